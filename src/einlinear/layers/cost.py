"""What each variant costs, modelled: the choice where nothing was timed."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from math import prod

from einlinear.structures.plan import Plan

# Nanoseconds of forward + backward on two cores of a CPU: per call, per step, and per token for
# every multiply-add, every number that a step reads or writes, every number that a small matrix
# reads or writes. Fitted to a grid of five structures, widths 16 to 8192 and 1 to 8192 tokens,
# float32; docs/performance.md says how well the choice does.
_COSTS = {
    "einsum": (78e3, 156e3, 0.039, 1.7, 1.1),
    "strided": (148e3, 297e3, 0.048, 2.1, 0.0),
    "dense": (430e3, 0.0, 0.039, 0.8, 0.0),
    "engine": (60e3, 5e3, 0.04, 0.5, 0.5),
}


def cheapest(plan: Plan, num_tokens: int, variants: Sequence[str]) -> str:
    """The variant that costs least by the model; the first of equals."""
    costs = [nanoseconds(plan, num_tokens, variant) for variant in variants]
    return variants[costs.index(min(costs))]  # in words that torch.compile can read


cheapest_cached = lru_cache(maxsize=65536)(cheapest)


def nanoseconds(plan: Plan, num_tokens: int, variant: str) -> float:
    """About how long forward and backward take on a CPU.

        call + step * steps + tokens * (mac * macs + number * moved + tile * tiled)

    Einsum moves what it has to transpose: what steps with batch or kept axes read and write. The
    dense variant makes the matrix first, which is einsum on d_in tokens.
    """
    call, step, mac, number, tile = _COSTS[variant]
    if variant == "dense":
        each = mac * plan.dense_macs + number * (plan.d_in + plan.d_out)
        _, _, *made = _COSTS["einsum"]
        make = made[0] * plan.macs + made[1] * _moved(plan, "einsum") + made[2] * _tiled(plan)
        return call + plan.d_in * make + num_tokens * each
    each = mac * plan.macs + number * _moved(plan, variant) + tile * _tiled(plan)
    return call + step * len(plan.steps) + num_tokens * each


def _moved(plan: Plan, variant: str) -> int:
    sizes = plan.sizes
    widths = [prod([sizes[edge] for edge in edges]) for edges in plan.layouts]
    is_plain = [variant == "einsum" and not (step.batch or step.kept) for step in plan.steps]
    return sum([widths[i] + widths[i + 1] for i, plain in enumerate(is_plain) if not plain])


def _tiled(plan: Plan) -> float:
    return sum([step.macs / min(step.fan_in, step.fan_out) for step in plan.steps])
