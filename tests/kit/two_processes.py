"""What each of two processes runs, in a module that another process can import."""

import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from cases import STRUCTURES
from einlinear import EinsumLinear, MoELinear, Muon, balance_loss, scaling_table
from einlinear import param_groups as make_groups


def model_and_input():
    torch.manual_seed(0)
    first, second = (EinsumLinear(64, 64, structure=STRUCTURES[n]) for n in ("monarch", "generic"))
    return nn.Sequential(first, nn.GELU(), second), torch.randn(600, 64)


def wrapped(model, kind):
    if kind == "ddp":
        return DistributedDataParallel(model)
    mesh = init_device_mesh("cpu", (2,))
    for layer in (model[0], model[2], model):
        fully_shard(layer, mesh=mesh)
    return model


def whole(tensor):
    return tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor


def compare_gradients(rank, kind, expected):
    """One backward pass on half of the tokens; the gradients must be those of one process."""
    model, x = model_and_input()
    model = wrapped(model, kind)
    model(x[rank * 300 : (rank + 1) * 300]).square().mean().backward()
    for parameter, wanted in zip(model.parameters(), expected, strict=True):
        torch.testing.assert_close(whole(parameter.grad), wanted, atol=1e-5, rtol=1e-4)


def train_with_groups(model, x):
    """Rates by name, and the weights after two steps of training with them."""
    base = nn.Sequential(nn.Linear(32, 32), nn.GELU(), nn.Linear(16, 16))
    tables = [scaling_table(model, 0.01, **f) for f in ({"base_width": 32}, {"base": base})]
    rates = [{row.name: row.rate for row in table} for table in tables]
    # A large eps: where a gradient is nearly zero, its sign is left to rounding.
    optimizer = torch.optim.AdamW(make_groups(model, 0.01, base_width=32), eps=1e-3)
    for _ in range(2):
        optimizer.zero_grad()
        model(x).square().mean().backward()
        optimizer.step()
    return rates, [whole(parameter.detach()) for parameter in model.parameters()]


def compare_training(rank, kind, expected):
    """Two steps on half of the tokens with parameter groups must end where one process does."""
    model, x = model_and_input()
    rates, weights = train_with_groups(wrapped(model, kind), x[rank * 300 : (rank + 1) * 300])
    assert rates == expected[0]
    for got, wanted in zip(weights, expected[1], strict=True):
        torch.testing.assert_close(got, wanted, atol=1e-5, rtol=1e-4)


def muon_model():
    """Under FSDP2, some parameters are split along their batch axes, others through matrices."""
    torch.manual_seed(0)
    first = EinsumLinear(64, 64, structure=STRUCTURES["monarch"])
    rest = nn.Sequential(
        MoELinear(64, 32, structure="low_rank(rank=3)", num_experts=3),
        EinsumLinear(32, 63, structure=STRUCTURES["low_rank(rank=5)"]),
        nn.MultiheadAttention(63, 3),
    )
    for parameter in rest[2].parameters():
        nn.init.normal_(parameter, std=0.1)
    nn.init.normal_(rest[0].gate.weight)

    class Attending(nn.Sequential):
        def forward(self, x):
            y = self[1](self[0](x))
            return self[2](y, y, y)[0]

    rest.__class__ = Attending
    return nn.Sequential(first, nn.GELU(), rest), torch.randn(600, 64)


def train_with_muon(model, x):
    """The weights after three steps on blocks of the batch, so that attention stays inside them."""
    groups = make_groups(model, 0.02, base_width=32, optimizer="muon", weight_decay=0.1)
    optimizer = Muon(groups, adam_eps=1e-3)
    for _ in range(3):
        optimizer.zero_grad()
        model(x.view(-1, 10, 64).transpose(0, 1)).square().mean().backward()
        optimizer.step()
    state = [value for p in model.parameters() for value in optimizer.state[p].values()]
    return [whole(tensor.detach()) for tensor in (*model.parameters(), *state)]


def compare_muon(rank, kind, expected):
    """Three steps of Muon on half of the tokens must end where one process does."""
    model, x = muon_model()
    weights = train_with_muon(wrapped(model, kind), x[rank * 300 : (rank + 1) * 300])
    for got, wanted in zip(weights, expected, strict=True):
        torch.testing.assert_close(got, wanted, atol=1e-4, rtol=1e-3)


def moe_and_input():
    torch.manual_seed(0)
    layers = [MoELinear(32, 32, structure="btt", num_experts=4) for _ in range(2)]
    for layer in layers:
        nn.init.normal_(layer.gate.weight)
    return nn.Sequential(layers[0], nn.GELU(), layers[1]), torch.randn(200, 32)


def moe_loss(model, x):
    """Without the part of the balance that is not a mean over tokens."""
    y = model(x)
    layers = [module for module in model.modules() if isinstance(module, MoELinear)]
    z_loss = sum(layer.last_routing.mean_square() for layer in layers)
    return y.square().mean() + 0.1 * z_loss


def compare_moe_gradients(rank, kind, expected):
    """An expert of a process may have no tokens: its gradients are zeros, not missing."""
    model, x = moe_and_input()
    model = wrapped(model, kind)
    moe_loss(model, x[rank * 100 : (rank + 1) * 100]).backward()
    for parameter, wanted in zip(model.parameters(), expected, strict=True):
        torch.testing.assert_close(whole(parameter.grad), wanted, atol=1e-5, rtol=1e-4)
    model.zero_grad()
    (model(x[:1]).square().mean() + 0.01 * balance_loss(model)).backward()
    assert all(parameter.grad is not None for parameter in model.parameters())
