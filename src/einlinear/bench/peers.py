"""Peers: the same layers by other libraries, and mixtures of experts in plain PyTorch."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from importlib import import_module
from importlib.util import find_spec
from itertools import pairwise
from math import prod
from typing import Any

import torch
from torch import Tensor

from einlinear.layers.moe.layers import MoELinear
from einlinear.layers.norm import normalised_experts
from einlinear.layers.reference import einsum_steps
from einlinear.layers.scaling import factor_scaling
from einlinear.layers.strided import padded
from einlinear.structures.plan import Plan, Step

# The pip package of each module. tensorly-torch does not declare that it needs tensorly.
PACKAGES = {"tltorch": "tensorly-torch", "tensorly": "tensorly", "cola": "cola-ml"}


@dataclass(frozen=True, slots=True)
class Peer:
    """A layer of another library with the plan's weights.

    run maps rows of input, with axes x_edges, to rows of output, with axes y_edges. A library may
    order the axes in another way than the plan; the benchmark does not count that against it.
    """

    name: str
    run: Callable[[Tensor], Tensor]
    tensors: tuple[Tensor, ...]
    x_edges: tuple[str, ...]
    y_edges: tuple[str, ...]


def make_peers(
    plan: Plan, factors: Sequence[Tensor], structure: str
) -> tuple[list[Peer], list[str]]:
    """The peers that can compute this layer, and a note for each one that fails."""
    makers: dict[str, Callable[[], Peer | None]] = {}
    if find_spec("tltorch") and find_spec("tensorly"):
        makers["tltorch"] = partial(tltorch_peer, plan, factors, "factorized")
        makers["tltorch rebuilt"] = partial(tltorch_peer, plan, factors, "reconstructed")
    if find_spec("cola"):
        makers["cola"] = partial(cola_peer, plan, factors)
    peers, notes = [], []
    for name, make in makers.items():
        try:
            peer = make()
            if peer is not None:
                check_peer(peer, plan, factors)
                peers.append(peer)
        except Exception as error:  # an error in another library must not stop the benchmark
            notes.append(f"{name} is left out of {structure}: {failure_line(error)}")
    return peers, notes


def missing_note() -> str | None:
    """How to install the missing peers, or None if there are none."""
    missing = [package for module, package in PACKAGES.items() if find_spec(module) is None]
    if not missing:
        return None
    return f"not installed: {', '.join(missing)}; pip install {' '.join(missing)} adds their rows"


def failure_line(error: Exception) -> str:
    """An error of another library in one line."""
    return f"{type(error).__name__}: {error}".splitlines()[0][:160]


def check_peer(peer: Peer, plan: Plan, factors: Sequence[Tensor]) -> None:
    """Raise if the peer and the plan differ on a few rows."""
    x_td = torch.randn(3, plan.d_in_padded, dtype=factors[0].dtype, device=factors[0].device)
    with torch.no_grad():
        expected = _reordered(einsum_steps(plan, x_td, factors), plan, plan.y_edges, peer.y_edges)
        given = peer.run(_reordered(x_td, plan, plan.x_edges, peer.x_edges))
    error = ((given - expected).norm() / expected.norm().clamp(min=1e-30)).item()
    if not error < (0.05 if factors[0].dtype == torch.bfloat16 else 1e-3):
        raise ArithmeticError(f"its result is off by {error:.1%}")


def _reordered(rows: Tensor, plan: Plan, before: Sequence[str], after: Sequence[str]) -> Tensor:
    sizes = plan.sizes
    axes = [before.index(edge) + 1 for edge in after]
    return rows.reshape(-1, *(sizes[e] for e in before)).permute(0, *axes).flatten(1)


def tltorch_peer(plan: Plan, factors: Sequence[Tensor], implementation: str) -> Peer | None:
    """tltorch.FactorizedLinear with the factorization "blocktt", its name for a tensor train.

    Low rank is the train whose first factor has no output axis and whose last has no input axis.
    The parameters are the plan's. "factorized", the default, contracts the input with the factors
    from A on, with the plan's FLOPs if the layer is square; "reconstructed" makes the matrix first,
    with a dense layer's FLOPs. None if the structure is no train: an edge joins more than two
    nodes, or factors that are no neighbours.
    """
    names = sorted(step.factor for step in plan.steps)
    neighbours = {a + b for a, b in pairwise(names)}
    sizes = plan.sizes
    if any(len(edge) != 2 or (edge[0] not in "XY" and edge not in neighbours) for edge in sizes):
        return None
    ranks = [1, *(sizes.get(a + b, 1) for a, b in pairwise(names)), 1]
    d_in, d_out = (tuple(sizes.get(side + name, 1) for name in names) for side in "XY")
    layer = import_module("tltorch").FactorizedLinear(
        d_in,
        d_out,
        bias=False,
        factorization="blocktt",
        rank=ranks,
        implementation=implementation,
        device=factors[0].device,
        dtype=factors[0].dtype,
    )
    of_name = {step.factor: (step, f) for step, f in zip(plan.steps, factors, strict=True)}
    parameters = list(layer.weight.factors)
    with torch.no_grad():
        for name, before, after, parameter in zip(
            names, ["", *names], [*names[1:], ""], parameters, strict=False
        ):
            step, factor = of_name[name]
            wanted = (before + name, "Y" + name, "X" + name, name + after)
            axes = [step.edges.index(edge) for edge in wanted if edge in step.edges]
            parameter.copy_(factor.permute(axes).reshape(parameter.shape))
    return Peer(
        name="tltorch" if implementation == "factorized" else "tltorch rebuilt",
        run=layer,
        tensors=tuple(parameters),
        x_edges=tuple("X" + name for name in names if "X" + name in sizes),
        y_edges=tuple("Y" + name for name in names if "Y" + name in sizes),
    )


def cola_peer(plan: Plan, factors: Sequence[Tensor]) -> Peer:
    """A cola.ops operator: any structure, with the plan's parameters and FLOPs.

    Kronecker where the plan is a plain Kronecker product. Else the product of the plan's steps: a
    Dense, or a BlockDiag of one Dense per batch index, in a Kronecker product with the Identity
    along the kept axes, and a Permutation of the axes between two steps. Low rank is thus the
    product of two Dense. cola multiplies columns, so rows are transposed, which costs nothing.
    """
    ops = import_module("cola").ops
    tensors: list[Tensor] = []

    def dense(matrix: Tensor) -> Any:
        tensors.append(matrix.detach().contiguous().clone().requires_grad_())
        return ops.Dense(tensors[-1])

    if all(len(edge) == 2 and edge[0] in "XY" for edge in plan.sizes) and all(
        len(step.contracted) == len(step.new) == 1 for step in plan.steps
    ):
        operator = ops.Kronecker(*(dense(factor.t()) for factor in factors))
        before = tuple(step.contracted[0] for step in plan.steps)
        after = tuple(step.new[0] for step in plan.steps)
    else:
        operators: list[Any] = []
        before = after = tuple[str, ...]()
        for step, factor in zip(plan.steps, factors, strict=True):
            wanted = (*step.batch, *step.contracted, *step.kept)
            if not operators:
                before = wanted
            elif wanted != after:
                rows = torch.arange(prod(plan.sizes[e] for e in after))[None]
                order = _reordered(rows, plan, after, wanted)[0]
                operators.insert(0, ops.Permutation(order, dtype=factor.dtype))
            operators.insert(0, _cola_step(ops, plan, step, factor, dense))
            after = (*step.batch, *step.new, *step.kept)
        operator = ops.Product(*operators) if len(operators) > 1 else operators[0]
    return Peer("cola", lambda x_td: (operator @ x_td.t()).t(), tuple(tensors), before, after)


def _cola_step(
    ops: Any, plan: Plan, step: Step, factor: Tensor, dense: Callable[[Tensor], Any]
) -> Any:
    sizes = plan.sizes
    batch, contracted, new, kept = (
        prod(sizes[edge] for edge in edges)
        for edges in (step.batch, step.contracted, step.new, step.kept)
    )
    blocks = [dense(block.t()) for block in factor.reshape(batch, contracted, new)]
    operator = ops.BlockDiag(*blocks) if batch > 1 else blocks[0]
    if kept == 1:
        return operator
    return ops.Kronecker(operator, ops.Identity((kept, kept), dtype=factor.dtype))


def all_experts(layer: MoELinear, x_td: Tensor) -> Tensor:
    """The output of the layer, computed by running every expert on every token.

    One einsum per step for all experts at once, as the paper computes mixtures. The weights of the
    gate multiply the input of the last step, which then sums over the experts, too: so the outputs
    of single experts are never written, which would take as much memory again and more time.
    Gate, routing and parameters are those of the layer. Ref: [P24 §5].
    """
    plan = layer.plan
    experts_tk, weights_tk = layer.route(x_td)
    weights_te = weights_tk.new_zeros(x_td.shape[0], layer.num_experts)
    weights_te = weights_te.scatter(-1, experts_tk, weights_tk).to(x_td.dtype)
    factors: list[Tensor] = [getattr(layer, step.factor) for step in plan.steps]
    if layer.weight_norm:
        scaling = factor_scaling(plan, layer.factor_init)
        factors = normalised_experts(factors, [scaling[s.factor].init_std for s in plan.steps])
    z = padded(x_td, plan.d_in_padded).reshape(-1, *plan.x_shape)
    for number, (step, factor) in enumerate(zip(plan.steps[:-1], factors, strict=False)):
        z = torch.einsum(_of_experts(step, takes=number > 0, gives=True), z, factor)
    if len(plan.steps) == 1:
        z = z.unsqueeze(1)
    z = weights_te.reshape(*weights_te.shape, *[1] * (z.dim() - 2)) * z
    z = torch.einsum(_of_experts(plan.steps[-1], takes=True, gives=False), z, factors[-1])
    y_td = z.reshape(x_td.shape[0], plan.d_out_padded)[:, : plan.d_out]
    return y_td if layer.bias is None else y_td + layer.bias


def _of_experts(step: Step, *, takes: bool, gives: bool) -> str:
    """The step's equation with an axis of experts, Z: in the factor, before it, after it."""
    operands, result = step.equation.replace("...", "").split("->")
    rows, factor = operands.split(",")
    return f"...{'Z' * takes}{rows},Z{factor}->...{'Z' * gives}{result}"
