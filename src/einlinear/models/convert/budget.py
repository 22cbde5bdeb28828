"""Which structure each layer gets so that all of them lose least within a budget."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Literal

import torch
from torch import Tensor, nn

from einlinear.errors import EinlinearError, quote
from einlinear.layers.linear import EinsumLinear
from einlinear.layers.measure import interleaved
from einlinear.layers.projection.metric import Metric
from einlinear.layers.projection.project import rank_errors
from einlinear.models.convert.calibration import LayerMoments
from einlinear.models.convert.conversion import Conversion, LayerNote
from einlinear.models.convert.names import LayerNames
from einlinear.models.survey.sites import dense_parameters, find_sites
from einlinear.show.numbers import counted
from einlinear.structures.named import low_rank
from einlinear.structures.plan import Plan, make_plan
from einlinear.structures.structure import Structure

BudgetUnit = Literal["flops", "parameters", "seconds"]

_RANKS = 32  # that a layer can have: steps of this share of the dense cost
_LOWEST = {1, 2, 3, 4, 6, 8}  # ranks for small budgets
_REPEATS = 5  # of a timed product


@dataclass(frozen=True, slots=True)
class Option:
    """A structure that a layer could have, what it costs and what it loses; None is dense."""

    structure: Structure | None
    cost: float
    error: float


def check_budget(budget: float, tokens: int) -> None:
    """Raise an error unless the budget is a share of what dense layers cost."""
    if not (isinstance(budget, int | float) and 0 < budget < 1):
        raise EinlinearError(
            what=f"the budget is {quote(budget)}",
            rule="it is a share of what the dense layers cost, more than 0 and less than 1",
            fix="give budget=0.5 for half of it",
        )
    if not (isinstance(tokens, int) and tokens > 0):
        raise EinlinearError(
            what=f"tokens is {quote(tokens)}",
            rule="it is how many tokens a timed call has",
            fix="give tokens=2048, or as many as your batches have",
        )


def choose_options(
    options: Mapping[LayerNames, Sequence[Option]], budget: float
) -> dict[LayerNames, Option]:
    """One option for each layer, with the smallest sum of errors whose costs are in the budget.

    Costs and budget are shares of what the dense layers cost.

    Starts from the cheapest options and takes, again and again, the step that saves most error per
    cost, along the lower convex hull of each layer's options. If every hull is used to the last
    step that fits, the sum is at most one step from the smallest possible. Steps that no longer fit
    are skipped, so that smaller ones can use what is left.
    """
    hulls = {names: _hull(found) for names, found in options.items()}
    chosen = {names: 0 for names in hulls}
    left = budget - sum(hull[0].cost for hull in hulls.values())
    if left < 0:
        least = sum(hull[0].cost for hull in hulls.values())
        raise EinlinearError(
            what=f"the budget is {budget:.3g}, and layers of rank 1 cost {least:.3g} in all",
            rule="a budget is a share of what the dense layers cost; every layer has at least "
            "rank 1, or stays dense",
            fix=f"give a budget of {least:.3g} or more, or the rule None for some layers"
            if least < 0.9995
            else "these layers are too small to be cheaper in any rank: leave them as they are",
        )
    steps = [(names, place) for names, hull in hulls.items() for place in range(1, len(hull))]
    steps.sort(key=lambda step: -_slope(*hulls[step[0]][step[1] - 1 : step[1] + 1]))
    for names, place in steps:
        hull = hulls[names]
        if place != chosen[names] + 1:
            continue  # an earlier step of this layer did not fit
        extra = hull[place].cost - hull[place - 1].cost
        if extra <= left:
            chosen[names] = place
            left -= extra
    return {names: hulls[names][place] for names, place in chosen.items()}


def _hull(options: Iterable[Option]) -> list[Option]:
    """The options on the lower convex hull of error by cost, from the cheapest to the best."""
    hull: list[Option] = []
    for option in sorted(options, key=lambda o: (o.cost, o.error)):
        if hull and option.error >= hull[-1].error:
            continue
        while len(hull) > 1 and _slope(hull[-2], option) >= _slope(hull[-2], hull[-1]):
            hull.pop()
        hull.append(option)
    return hull


def _slope(first: Option, second: Option) -> float:
    """The error saved per cost."""
    return (first.error - second.error) / max(second.cost - first.cost, 1e-300)


def layer_options(
    weight_oi: Tensor,
    metric: Metric,
    whole: float,
    cost: Callable[[Plan | None], float],
) -> list[Option]:
    """What a layer could become: low rank of many ranks, or dense as it is.

    Low rank loses least of all named structures of the same cost on trained weights, and one SVD
    gives the errors of all ranks.

    Args:
        weight_oi: the dense weight.
        metric: what errors count.
        whole: what a layer that loses everything counts.
        cost: the cost of a plan, or of the dense layer.
    """
    d_out, d_in = weight_oi.shape
    lost = rank_errors(weight_oi, metric).tolist()
    dense = d_in * d_out
    ranks = {max(1, k * dense // (_RANKS * (d_in + d_out))) for k in range(1, _RANKS)}
    found = [Option(None, cost(None), 0.0)]
    for rank in sorted(ranks | _LOWEST):
        structure = low_rank(rank=rank)
        plan = make_plan(structure, d_in, d_out)
        if rank < len(lost) and plan.macs < dense:
            found.append(Option(structure, cost(plan), whole * lost[rank]))
    return found


def within_budget(
    model: nn.Module,
    conversion: Conversion,
    moments: Mapping[LayerNames, LayerMoments],
    budget: float,
    costs: Costs,
    *,
    on_progress: Callable[[str], None],
) -> Conversion:
    """The conversion with the best structures whose costs are a share of the dense layers' costs.

    Layers that stay dense are among those left alone.
    """
    sites = {site.names: site for site in find_sites(model)}
    is_weighted = any(own.has_gradient for own in moments.values())
    options: dict[LayerNames, list[Option]] = {}
    dense: list[LayerNote] = []
    for number, swap in enumerate(conversion.swaps, 1):
        on_progress(f"choosing ranks: layer {number} of {len(conversion.swaps)}, {swap.name}")
        weight_oi, _ = dense_parameters(sites[swap.names])
        own = moments.get(swap.names)
        metric, samples = (Metric(), 1) if own is None else (own.metric, own.inputs.count)
        if not samples:
            dense.append(LayerNote(swap.names, "calibration never called it"))
            continue
        calls = 1 if costs.unit == "parameters" else samples
        cost = partial(costs.of, d_in=swap.d_in, d_out=swap.d_out, like=weight_oi)
        # Only gradients tell how errors of different layers compare. Without them, the share that a
        # layer loses counts as much as it has weights: in a small GPT at half of the FLOPs, sums of
        # absolute errors lost 0.6 nats, these shares 0.04.
        whole = float(weight_oi.numel())
        if own is not None and is_weighted:
            is_reached = own.has_gradient
            whole = samples * is_reached * metric.square(weight_oi.detach().double())
        options[swap.names] = [
            replace(option, cost=calls * option.cost)
            for option in layer_options(weight_oi, metric, whole, cost)
        ]
    whole = sum(found[0].cost for found in options.values())
    shares = {
        names: [replace(option, cost=option.cost / whole) for option in found]
        for names, found in options.items()
    }
    chosen = choose_options(shares, budget)
    swaps = [
        replace(swap, structure=structure, typed=_typed(structure))
        for swap in conversion.swaps
        if swap.names in chosen and (structure := chosen[swap.names].structure) is not None
    ]
    dense += [
        LayerNote(names, "best dense within the budget")
        for names, option in chosen.items()
        if option.structure is None
    ]
    spent = sum(option.cost for option in chosen.values())
    layers = counted(len(chosen), "layer")
    note = f"budget: {budget:g} of the {costs.unit} of {layers}; {spent:.2f} used"
    return replace(conversion, swaps=tuple(swaps), left=(*conversion.left, *dense), remarks=(note,))


def _typed(structure: Structure) -> str:
    """How a user would write it; without an edge between its factors, the rank is 1."""
    rank = next((size for edge, size in structure.edges if edge == "AB"), 1)
    return f"low_rank(rank={rank})"


class Costs:
    """What plans cost in a unit; seconds are measured once for each plan, on this machine."""

    def __init__(self, unit: BudgetUnit, tokens: int) -> None:
        self.unit, self._tokens = unit, tokens
        self._seconds: dict[tuple[int, int, Structure | None], float] = {}

    def of(self, plan: Plan | None, d_in: int, d_out: int, like: Tensor) -> float:
        """The cost of a plan, or of the dense layer."""
        if self.unit == "flops":
            return float(d_in * d_out if plan is None else plan.macs)
        if self.unit == "parameters":
            return float(d_in * d_out if plan is None else plan.params)
        key = d_in, d_out, None if plan is None else plan.structure
        if key not in self._seconds:
            self._seconds[key] = self._timed(plan, d_in, d_out, like)
        return self._seconds[key]

    @torch.no_grad()
    def _timed(self, plan: Plan | None, d_in: int, d_out: int, like: Tensor) -> float:
        device, dtype = like.device, like.dtype
        kept = torch.random.get_rng_state()
        x = torch.randn(self._tokens, d_in, device=device, dtype=dtype)
        layer: nn.Module = nn.Linear(d_in, d_out, device=device, dtype=dtype)
        if plan is not None:
            layer = EinsumLinear(
                d_in,
                d_out,
                structure=plan.structure,
                weight_norm=False,
                device=device,
                dtype=dtype,
            )
        torch.random.set_rng_state(kept)
        (times,) = interleaved({"call": lambda: layer(x)}, _REPEATS).values()
        return min(times)
