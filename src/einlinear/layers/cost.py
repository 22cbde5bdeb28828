"""A cost model of the variants, which chooses one where nothing was timed."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from math import prod

from einlinear.errors import EinlinearError, quote
from einlinear.structures.plan import Plan

KNOWN_DEVICES = ("cpu",)
"""The types of devices on which variants were timed to fit the model."""

_LANES = 8  # numbers in a vector

# Nanoseconds on two cores of a CPU, float32, forward alone and forward + backward: per call, per
# step, per weight; and per token for each multiply-add, each number that a step moves along batch
# axes, each number it moves along shared axes, each number that a small matrix reads or writes.
# Fitted to five structures at widths 16 to 8192 and 1 to 8192 tokens, those of the engine with a
# backward pass to half of these cases on AVX-512; docs/performance.md shows how good the choices
# are, also for the other half. To fit them again, run tests/bench_grid.py, then with --fit. All
# five structures have two steps, so costs per call and per step are told apart by convention.
_FORWARD = {
    "einsum": (15e3, 30e3, 0.29, 0.014, 0.73, 0.30, 0.32),
    "strided": (47e3, 93e3, 0.76, 0.013, 0.70, 0.70, 0.0),
    "engine": (6.1e3, 0.1e3, 0.11, 0.016, 0.08, 0.08, 0.0),
}
_BOTH = {
    "einsum": (76e3, 153e3, 1.3, 0.042, 2.0, 0.94, 1.14),
    "strided": (137e3, 273e3, 3.5, 0.035, 2.0, 2.0, 0.70),
    "engine": (0.0, 22.6e3, 1.05, 0.0102, 0.198, 0.198, 0.0),
}
# The same for the dense variant: per call; per token for each multiply-add of the dense layer and
# each number of input and output; and per row of the matrix it makes (there are d_in), for each
# multiply-add of the plan and each number moved.
_DENSE_FORWARD = (126e3, 0.014, 0.015, 0.027, 0.52)
_DENSE_BOTH = (430e3, 0.044, 0.37, 0.075, 1.1)
# The same for matrices that the engine makes (layers/dense.py). Without gradients they are kept.
_SMALL_FORWARD = (4.1e3, 0.014, 0.15, 0.0, 0.0)
_SMALL_BOTH = (54e3, 0.044, 0.37, 0.064, 0.35)

MOST_KEPT = 1 << 14
"""The most numbers of a matrix that a layer keeps: 64 KB in float32."""


def cheapest(plan: Plan, num_tokens: int, variants: Sequence[str], has_backward: bool) -> str:
    """The variant that the model finds cheapest; the first of equals."""
    costs = [
        nanoseconds(plan, num_tokens, variant, has_backward, has_engine="engine" in variants)
        for variant in variants
    ]
    return variants[costs.index(min(costs))]  # not min(key=...), which torch.compile cannot trace


cheapest_cached = lru_cache(maxsize=65536)(cheapest)


def nanoseconds(
    plan: Plan,
    num_tokens: int,
    variant: str,
    has_backward: bool,
    *,
    device: str = "cpu",
    has_engine: bool = False,
) -> float:
    """The estimated time of a layer: fixed costs, and costs per token.

    An error for a device that the model was not fitted to.

    Einsum transposes what steps with batch axes read and write; plain steps move nothing. The dense
    variant builds the matrix first. Narrow steps of the engine waste vector lanes.
    """
    if device not in KNOWN_DEVICES:
        raise EinlinearError(
            what=f"the cost model was asked about an unknown device, {quote(device)}",
            rule=f"it is fitted to times measured on {', '.join(KNOWN_DEVICES)}",
            fix="time the variants on that device: el.tune(model, tokens=...)",
        )
    sizes = plan.sizes
    widths = [prod([sizes[edge] for edge in edges]) for edges in plan.layouts]
    through = [widths[i] + widths[i + 1] for i in range(len(plan.steps))]
    if variant == "dense":
        if has_engine and plan.d_in * plan.d_out <= MOST_KEPT:
            call, mac, number, *row = _SMALL_BOTH if has_backward else _SMALL_FORWARD
        else:
            call, mac, number, *row = _DENSE_BOTH if has_backward else _DENSE_FORWARD
        make = row[0] * plan.macs + row[1] * sum(through)
        each = mac * plan.dense_macs + number * (plan.d_in + plan.d_out)
        return call + plan.d_in * make + num_tokens * each
    call, per_step, weight, mac, batch, shared, tile = (_BOTH if has_backward else _FORWARD)[
        variant
    ]
    fixed = call + per_step * len(plan.steps) + weight * plan.params
    each = 0.0
    for step, numbers in zip(plan.steps, through, strict=True):
        lanes = (_waste(step.fan_in) + _waste(step.fan_out)) / 2 if variant == "engine" else 1.0
        each += mac * step.macs * lanes + tile * step.macs / min(step.fan_in, step.fan_out)
        if step.batch or variant != "einsum":
            each += batch * numbers
        elif step.kept:
            each += shared * numbers
    return fixed + num_tokens * each


def _waste(size: int) -> float:
    """Lanes used per lane needed."""
    return -(-size // _LANES) * _LANES / size
