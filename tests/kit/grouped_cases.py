"""Many experts and their tokens, what the engine makes of them, and what is right."""

from dataclasses import dataclass
from itertools import accumulate, pairwise

import torch

import einlinear as el
from einlinear.layers.engine import binding
from einlinear.layers.engine.abi import ProgramHeader
from einlinear.layers.moe import grouped
from einlinear.layers.moe.assignment import Assignment

TOL = {torch.float64: 1e-11, torch.float32: 1e-5, torch.bfloat16: 2e-2}


def take_few_tokens(plan, tokens=(3, 4)):
    """Cut even small work into blocks, and share it out to threads."""
    prepared = binding._Prepared(plan, tokens)
    prepared.numbers[ProgramHeader.MACS] = 10**9
    binding._prepared[id(plan)] = prepared


@dataclass(frozen=True, eq=False)
class Case:
    """What the engine is given."""

    plan: el.Plan
    x: torch.Tensor
    grad: torch.Tensor
    bias: torch.Tensor
    factors: list[torch.Tensor]
    assignment: Assignment
    stds: list[float]

    def forward(self, has_bias=True):
        bias = self.bias if has_bias else None
        return grouped.grouped_forward(
            self.plan, self.x, self.factors, bias, self.assignment, self.stds
        )

    def backward(self, scales, wanted=None):
        wanted = wanted or [True] * (3 + len(self.factors))
        return grouped.grouped_backward(
            self.plan, self.grad, self.x, self.factors, self.assignment, scales, self.stds, wanted
        )


def make(
    plan, experts_of_tokens, num_experts, *, dtype=torch.float64,
    x_by_token=True, y_by_token=True, weighted=True, norm=True, seed=0,
):  # fmt: skip
    """Random numbers; the factors of some experts are above their deviation, some below."""
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape, dtype=dtype):
        return torch.randn(*shape, generator=generator, dtype=torch.float64).to(dtype)

    pairs = sorted((e, t) for t, own in enumerate(experts_of_tokens) for e in own)
    counts = [sum(e == expert for e, _ in pairs) for expert in range(num_experts)]
    stds = [step.fan_in**-0.5 for step in plan.steps]
    sizes = torch.linspace(0.4, 1.9, num_experts, dtype=torch.float64)
    factors = []
    for i, (step, std) in enumerate(zip(plan.steps, stds, strict=True)):
        shape = plan.factor_shapes[step.factor]
        own = sizes.roll(i).view(-1, *[1] * len(shape))
        factors.append((normal(num_experts, *shape, dtype=torch.float64) * std * own).to(dtype))
    assignment = Assignment(
        torch.tensor([t for _, t in pairs], dtype=torch.int64),
        torch.tensor(list(accumulate(counts)), dtype=torch.int64),
        normal(len(pairs), dtype=torch.promote_types(dtype, torch.float32)) if weighted else None,
        len(experts_of_tokens), x_by_token, y_by_token,
    )  # fmt: skip
    x = normal(assignment.num_rows(x_by_token), plan.d_in)
    grad = normal(assignment.num_rows(y_by_token), plan.d_out)
    own_stds = stds if norm else []
    return Case(plan, x, grad, normal(plan.d_out), factors, assignment, own_stds)


def oracle(case, has_bias=True):
    """Output, scales, and the gradients of input, weights, bias and factors, in float64."""
    plan, assignment, stds = case.plan, case.assignment, case.stds
    tensors = [case.x, assignment.w_p, case.bias, *case.factors]
    tensors = [None if t is None else t.double().clone().requires_grad_() for t in tensors]
    x, w, bias, *factors = tensors
    rows = x[assignment.tokens_p] if assignment.x_by_token else x
    rows = torch.nn.functional.pad(rows, (0, plan.d_in_padded - plan.d_in))
    parts, scales = [], torch.ones(len(factors), len(assignment.ends_e), dtype=torch.float64)
    for e, (start, end) in enumerate(pairwise([0, *assignment.ends_e.tolist()])):
        own = {}
        for i, step in enumerate(plan.steps):
            factor = factors[i][e]
            if stds:
                rms = factor.square().mean().sqrt()
                scale = stds[i] / rms if rms > stds[i] else torch.ones(())
                scales[i, e] = scale.detach()
                factor = factor * scale
            own[step.factor] = factor
        in_order = [own[name] for name in plan.factor_shapes]
        part = rows[start:end].reshape(end - start, *plan.x_shape)
        part = torch.einsum(plan.equation, part, *in_order)
        parts.append(part.flatten(1)[:, : plan.d_out])
    y = torch.cat(parts) if w is None else torch.cat(parts) * w.unsqueeze(-1)
    if assignment.y_by_token:
        y = y.new_zeros(assignment.num_tokens, plan.d_out).index_add(0, assignment.tokens_p, y)
    y = y + bias if has_bias else y + 0 * bias
    inputs = [t for t in tensors if t is not None]
    found = iter(torch.autograd.grad(y, inputs, case.grad.double(), allow_unused=True))
    grads = [None if t is None else next(found) for t in tensors]
    if not has_bias:
        grads[2] = case.grad.double().sum(0)
    grads = [torch.zeros_like(t) if t is not None and g is None else g
             for t, g in zip(tensors, grads, strict=True)]  # fmt: skip
    return y.detach(), scales, grads


def assert_near(got, wanted, dtype, what, is_real=False):
    tolerance = TOL[torch.float32 if is_real and dtype == torch.bfloat16 else dtype]
    most = max(1.0, float(wanted.abs().max())) if wanted.numel() else 1.0
    torch.testing.assert_close(
        got.double(), wanted, atol=5 * tolerance * most, rtol=0,
        msg=lambda text: f"{what}: {text}",
    )  # fmt: skip


def assert_right(case, has_bias=True, wanted=None):
    wanted = wanted or [True] * (3 + len(case.factors))
    dtype = case.x.dtype
    right_y, right_scales, right = oracle(case, has_bias)
    y, scales = case.forward(has_bias)
    assert y.dtype == dtype
    assert_near(y, right_y, dtype, "output")
    if case.stds:
        assert_near(scales, right_scales, dtype, "scales", is_real=True)
    else:
        assert scales.numel() == 0
    names = ["x", "weights", "bias", *[step.factor for step in case.plan.steps]]
    grads = case.backward(scales, wanted)
    for name, got, exact, flag in zip(names, grads, right, wanted, strict=True):
        if not flag or exact is None:
            assert got is None, name
            continue
        assert got.shape == exact.shape
        assert_near(got, exact, dtype, f"gradient of {name}")


def spread(num_tokens, num_experts, num_active, seed=0):
    """Distinct experts for every token."""
    generator = torch.Generator().manual_seed(seed)
    return [
        torch.randperm(num_experts, generator=generator)[:num_active].tolist()
        for _ in range(num_tokens)
    ]
