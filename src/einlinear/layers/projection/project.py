"""project: the factors of a plan whose weight is closest to a dense one."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from einlinear.layers.projection.alternating import alternate
from einlinear.layers.projection.blockwise import improve_blocks, is_blockwise
from einlinear.layers.projection.metric import Metric, damped
from einlinear.layers.projection.splitting import split_weight
from einlinear.layers.reference import dense_weight
from einlinear.layers.scaling import factor_scaling
from einlinear.structures.plan import Plan

_PADDING = 1e-8  # what an error in the padding counts, which nobody sees; it must be positive

ROUNDING = 1e-12
"""Shares of a squared norm below this are errors of rounding."""


@dataclass(frozen=True, slots=True)
class Projection:
    """Factors, and how close their weight is to the dense one.

    `error` is the share of the squared norm that is lost, in the metric of the projection: with the
    second moments of the inputs, the share of the squared outputs. `sweeps` counts the passes over
    blocks or factors; 0 means that a closed form gave the answer.
    """

    factors: dict[str, Tensor]
    error: float
    sweeps: int


def project(
    plan: Plan,
    weight_oi: Tensor,
    metric: Metric | None = None,
    *,
    damping: float = 1e-3,
    tolerance: float = 1e-3,
    most_sweeps: int = 50,
    start: dict[str, Tensor] | None = None,
) -> Projection:
    """Return the factors whose weight is closest to a dense weight, computed in float64.

    Closed forms are used where they exist: any two factors in the Frobenius norm, low rank in every
    norm. Otherwise blocks or factors are improved in turns, from the closed form for the Frobenius
    norm, until a sweep takes off less than `tolerance` of the error.

    Args:
        plan: the plan of the structured layer.
        weight_oi: the dense weight, laid out like nn.Linear.weight.
        metric: what errors count; the Frobenius norm if left out.
        damping: what is added to the diagonals of the moments, as a share of their mean.
        tolerance: the improvement at which to stop.
        most_sweeps: how many sweeps to do at most.
        start: factors to improve instead of the closed form for the Frobenius norm, where that is
            not the answer.
    """
    weight_oi = weight_oi.detach().double()
    metric = prepared(metric or Metric(), damping)
    full_oi = weight_oi.new_zeros(plan.d_out_padded, plan.d_in_padded)
    full_oi[: plan.d_out, : plan.d_in] = weight_oi
    is_padded = full_oi.shape != weight_oi.shape
    is_closed = len(plan.steps) <= 2 and not is_padded and metric.is_plain
    factors = start if start is not None and not is_closed else split_weight(plan, full_oi)
    sweeps = 0
    if is_closed:
        pass
    elif is_blockwise(plan):
        within = _with_padding(metric, plan, full_oi)
        factors, sweeps = improve_blocks(
            plan, full_oi, factors, within, tolerance=tolerance, most_sweeps=most_sweeps
        )
    else:
        factors, sweeps = alternate(
            plan, weight_oi, factors, metric, tolerance=tolerance, most_sweeps=most_sweeps
        )
    factors = balanced(plan, factors)
    made_oi = dense_weight(plan, [factors[step.factor] for step in plan.steps])
    whole = metric.square(weight_oi)
    error = metric.square(weight_oi - made_oi) / whole if whole > 0 else 0.0
    return Projection(factors, error, sweeps)


def rank_errors(weight_oi: Tensor, metric: Metric, *, damping: float = 1e-3) -> Tensor:
    """The share of the squared norm that the closest weight of each rank loses, from rank 0 on.

    With the Cholesky roots of both weights, G = C C^T and H = K K^T, these are sums of the squared
    singular values of C^T W K.
    Checked by: test_project.py::test_errors_of_all_ranks.
    """
    scaled = weight_oi.detach().double()
    metric = prepared(metric, damping)
    if metric.inputs is not None:
        scaled = scaled @ torch.linalg.cholesky(metric.inputs)
    if metric.outputs is not None:
        scaled = torch.linalg.cholesky(metric.outputs).mT @ scaled
    squares = torch.linalg.svdvals(scaled).square()
    kept = torch.cat([squares.new_zeros(1), squares.cumsum(0)])
    lost = 1 - kept / kept[-1].clamp(min=1e-300)
    return torch.where(lost > ROUNDING, lost, 0.0)


def trainable_factors(factors: dict[str, Tensor], last: str) -> dict[str, Tensor]:
    """The factors to copy: all; of a weight of zeros only the last.

    With all factors zero, none has a gradient; with the others fresh, the last one has.
    """
    is_zero = not any(bool(factor.any()) for factor in factors.values())
    return {last: factors[last]} if is_zero else factors


def balanced(plan: Plan, factors: dict[str, Tensor]) -> dict[str, Tensor]:
    """The same weight with factors whose sizes are to each other as those of fresh ones.

    Learning rates suppose this: the rms of each factor is the same multiple of its standard
    deviation at initialisation. A weight of zero stays as it is.
    """
    stds = {name: scaling.init_std for name, scaling in factor_scaling(plan).items()}
    sizes = {name: float(f.square().mean().sqrt()) / stds[name] for name, f in factors.items()}
    if min(sizes.values()) == 0:
        return factors
    logs = torch.tensor(list(sizes.values()), dtype=torch.float64).log()
    common = float(logs.mean().exp())
    return {name: factor * (common / sizes[name]) for name, factor in factors.items()}


def prepared(metric: Metric, damping: float) -> Metric:
    """A metric in float64, damped."""
    sides = {"inputs": metric.inputs, "outputs": metric.outputs}
    return replace(
        metric,
        **{name: damped(m.double(), damping) for name, m in sides.items() if m is not None},
    )


def _with_padding(metric: Metric, plan: Plan, full_oi: Tensor) -> Metric:
    """A metric for the padded widths, in which errors in the padding count next to nothing."""
    inputs = _extended(metric.inputs, plan.d_in, full_oi.shape[1], full_oi)
    outputs = _extended(metric.outputs, plan.d_out, full_oi.shape[0], full_oi)
    return Metric(inputs, outputs)


def _extended(moments: Tensor | None, width: int, padded: int, like: Tensor) -> Tensor | None:
    if padded == width:
        return moments
    known = torch.eye(width, dtype=like.dtype, device=like.device) if moments is None else moments
    scale = float(known.diagonal().mean())
    full = like.new_zeros(padded, padded)
    full.diagonal().fill_(_PADDING * scale)
    full[:width, :width] = known
    return full
