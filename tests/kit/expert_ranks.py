"""What each of two processes runs for the tests of expert parallelism.

Every rank also has the whole batch and a twin that is not sharded, and compares with that.
"""

import copy

import torch
from torch.utils.checkpoint import checkpoint

import einlinear as el
from einlinear.layers.moe import exchange

WIDTH = 12


def make_layer(structure, num_experts=4, num_active=2, dtype=torch.float64, **options):
    """A layer whose gate, biases and normalisation all matter; the same on both ranks."""
    torch.manual_seed(1)
    options = {"num_experts": num_experts, "num_active": num_active, "dtype": dtype} | options
    if structure == "feed forward":
        layer = el.MoEFeedForward(WIDTH, 20, **options)
    else:
        layer = el.MoELinear(WIDTH, 18, structure=structure, **options)
    scaling = layer.param_scaling()
    with torch.no_grad():
        for name, parameter in layer.named_parameters():
            std = scaling[name].init_std if name in scaling else 1.0
            parameter.normal_(std=std or 1.0)
            if name in layer.expert_names:  # some are above the deviation that they may have
                sizes = torch.linspace(0.3, 2.0, num_experts, dtype=dtype)
                parameter.mul_(sizes.view(-1, *[1] * (parameter.dim() - 1)))
    return layer


def batch(dtype=torch.float64, num_tokens=40, low=None):
    """The tokens of both ranks; with `low` all positive, above it."""
    torch.manual_seed(2)
    x = torch.randn(num_tokens, WIDTH, dtype=dtype)
    return x if low is None else x.abs() + low


def send_to_(layer, *experts):
    """A gate that sends every positive token to these experts, the last first."""
    with torch.no_grad():
        layer.gate.weight.zero_()
        for i, expert in enumerate(experts):
            layer.gate.weight[expert] = 1.0 + i


def close(got, wanted, tolerance=1e-10):
    assert got.dtype == wanted.dtype
    scale = max(1.0, float(wanted.detach().abs().max())) if wanted.numel() else 1.0
    torch.testing.assert_close(got, wanted, atol=tolerance * scale, rtol=0)


def part(tensor, rank):
    """The half of a rank along the first axis."""
    return tensor.chunk(2)[rank]


def loss_of(y, targets):
    return (y * targets).sum() / len(targets) + y.square().mean()


def compare(rank, layer, x, tolerance=1e-10, call=None):
    """Outputs and all gradients, against one process with all tokens."""
    call = call or (lambda layer, x: layer(x))
    twin = copy.deepcopy(layer)
    whole_x = x.clone().requires_grad_()
    whole_y = twin(whole_x)
    targets = torch.linspace(-1, 1, whole_y.numel(), dtype=x.dtype).view(whole_y.shape)
    loss_of(whole_y, targets).backward()

    sharding = el.shard_experts_(layer)
    assert [p.shape[0] for p in own(layer)] == [layer.num_experts // 2] * len(layer.expert_names)
    own_x = part(x, rank).clone().requires_grad_()
    y = call(layer, own_x)
    close(y, part(whole_y, rank), tolerance)
    loss_of(y, part(targets, rank)).backward()
    close(own_x.grad / 2, part(whole_x.grad, rank), tolerance)  # of the mean of both losses
    el.average_gradients_(layer)
    for name, parameter in layer.named_parameters():
        wanted = dict(twin.named_parameters())[name].grad
        wanted = part(wanted, rank) if name in sharding.parameters else wanted
        close(parameter.grad, wanted, tolerance)
    assert torch.equal(layer.last_routing.experts, part(twin.last_routing.experts, rank))


def own(layer):
    return [getattr(layer, name) for name in layer.expert_names]


def layers(rank, structure, num_experts, num_active, options):
    compare(rank, make_layer(structure, num_experts, num_active, **options), batch())


def uneven(rank, structure, experts):
    """All tokens on few experts: a rank may have all rows or none."""
    layer = make_layer(structure, num_active=len(experts))
    send_to_(layer, *experts)
    compare(rank, layer, batch(low=0.1))
    assert {e for e in range(4) if layer.last_routing.load[e] > 0} == set(experts)


def no_tokens(rank, structure):
    """One rank has no tokens at all, and its experts get their gradients from the other."""
    layer, x = make_layer(structure), batch()
    twin = copy.deepcopy(layer)
    twin(x).square().sum().backward()
    el.shard_experts_(layer)
    y = layer(x if rank == 0 else x[:0])
    assert y.shape[0] == (40 if rank == 0 else 0)
    y.square().sum().backward()
    for mine, whole in zip(own(layer), own(twin), strict=True):
        close(mine.grad * 2, part(whole.grad, rank))
    for _ in range(2):
        assert layer(x[:0]).shape[0] == 0  # nobody has any


def shapes_and_second_derivatives(rank):
    layer, x = make_layer("btt", bias=True), batch(num_tokens=24)
    twin = copy.deepcopy(layer)
    el.shard_experts_(layer)
    halves = part(x, rank).view(2, 6, WIDTH)
    close(layer(halves), part(twin(x), rank).view(2, 6, -1))

    def penalty(layer, x):
        x = x.clone().requires_grad_()
        (grad,) = torch.autograd.grad(layer(x).square().sum(), x, create_graph=True)
        return grad.square().sum()

    penalty(layer, part(x, rank)).backward()
    penalty(twin, x).backward()
    for mine, whole in zip(own(layer), own(twin), strict=True):
        close(mine.grad * 2, part(whole.grad, rank), 1e-9)


def traffic(rank):
    """A row goes once to a rank, however many of its experts are there."""
    layer = make_layer("btt", num_active=2)
    send_to_(layer, 2, 3)
    el.shard_experts_(layer)
    ways = []
    carry = exchange.Way.carry
    exchange.Way.carry = lambda way, rows: (ways.append((way, rows.shape)), carry(way, rows))[1]
    try:
        layer(part(batch(low=0.1), rank))
    finally:
        exchange.Way.carry = carry
    assert [tuple(shape) for _, shape in ways[:3]] == [(20, 2), (20, WIDTH), (20, 2)]
    assert all(way.sends == (0, 20) for way, _ in ways[:3])
    back = (40, 18) if rank == 1 else (0, 18)
    assert [tuple(shape) for _, shape in ways[3:]] == [back]


def half_precision(rank, structure):
    layer, x = make_layer(structure, dtype=torch.float32), batch(torch.float32)
    twin, state = copy.deepcopy(layer), copy.deepcopy(layer.state_dict())
    el.shard_experts_(layer)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        y, wanted = layer(part(x, rank)), part(twin(x), rank)
    assert y.dtype == torch.bfloat16
    close(y.float(), wanted.float(), 0.02)
    assert torch.equal(layer.last_routing.experts, part(twin.last_routing.experts, rank))
    y.float().square().mean().backward()
    assert all(p.grad is not None and p.grad.dtype == torch.float32 for p in layer.parameters())
    half, twin = layer.bfloat16(), twin.bfloat16()
    half.load_state_dict({name: tensor.bfloat16() for name, tensor in state.items()})
    close(half(part(x, rank).bfloat16()).float(), part(twin(x.bfloat16()), rank).float(), 0.02)


def checkpointed(rank, structure):
    def call(layer, x):
        return checkpoint(layer, x, use_reentrant=False)

    compare(rank, make_layer(structure), batch(), call=call)


def compiled(rank):
    """The exchange breaks the graph; the results are the same."""
    layer, x = make_layer("btt", dtype=torch.float32), batch(torch.float32)
    compare(rank, layer, x, 1e-5, call=lambda layer, x: torch.compile(layer, backend="eager")(x))


def fails_on_rank_1(rank):
    if rank == 1:
        el.clip_grad_norm_(make_layer("btt"), 1.0)
