"""Compute multipliers: how much more compute a reference needs for the same loss."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import nan

import numpy as np

from einlinear.errors import EinlinearError, quote
from einlinear.laws.fit import (
    Data,
    FitPoints,
    Interval,
    Linf,
    Method,
    check_draws,
    fit_power_law,
    pose,
)
from einlinear.laws.law import Laws, SampleBatch
from einlinear.laws.observations import Bools, Floats, as_observations
from einlinear.laws.resample import Problem, interval, solve, solve_samples

_Draws = tuple[int, int]  # the number of samples, and their random seed
SLACK = 1e-9  # keeps the ends of ranges inside after log and exp


@dataclass(frozen=True, eq=False, slots=True)
class Multiplier:
    """λ(L) = C_reference(L) / C(L) of one structure, as a curve and as one number.

    losses, values, low, high: the curve from both laws, with the interval at each loss.
    is_extrapolated: whether each loss is outside the losses of either frontier.
    mean, std: of C_reference(L_i) / C_i over the points (C_i, L_i) of the structure's frontier
        whose losses the reference has also reached; `num_points` is how many.
    median: of the same ratios; prefer it, because points near linf can inflate mean and std.
    mean_interval, median_interval: their intervals.
    mean_is_extrapolated: whether there are no such points, so that all points were used.
    """

    structure: str
    reference: str
    losses: Floats
    values: Floats
    low: Floats
    high: Floats
    is_extrapolated: Bools
    mean: float
    std: float
    median: float
    num_points: int
    mean_interval: Interval
    median_interval: Interval
    mean_is_extrapolated: bool


@dataclass(frozen=True, slots=True)
class LinfRow:
    """The law of one structure at a given linf; the multiplier is the mean over points."""

    linf: float
    structure: str
    a: float
    b: float
    r2: float
    rms: float
    multiplier: float


def compute_multiplier(
    observations: Data,
    reference: str = "dense",
    *,
    linf: Linf = "shared",
    points: FitPoints = "inner",
    method: Method = "robust",
    tolerance: float = 0.05,
    losses: Sequence[float] | None = None,
    level: float = 0.9,
    resamples: int = 500,
    seed: int = 0,
) -> dict[str, Multiplier]:
    """The multiplier of every structure except the reference: 2 means half the compute.

    Args:
        observations: observations, or records, which are compared by training FLOPs.
        reference: the structure to compare with.
        linf: "shared" by all laws, "fitted" for each structure, or a number.
        points: as in `fit_power_law`.
        method: as in `fit_power_law`.
        tolerance: as in `fit_power_law`.
        losses: losses of the curve; defaults to 41 that span all frontiers.
        level: level of the intervals.
        resamples: bootstrap samples for the intervals; 0 for no intervals.
        seed: random seed of the samples.
    """
    data = as_observations(observations)
    data.of(reference)
    check_draws(level, resamples, seed)
    if len(data.structures) < 2:
        raise EinlinearError(
            what=f"{quote(reference)} is the only structure",
            rule="a multiplier compares a structure with a reference",
            fix="add runs of another structure",
        )
    problem = pose(data, linf, points, method, tolerance)
    here = problem.structures.index(reference)
    return _compare(problem, here, losses, level, (resamples, seed))


def _compare(
    problem: Problem, here: int, losses: Sequence[float] | None, level: float, draws: _Draws
) -> dict[str, Multiplier]:
    """The multipliers of all structures; `here` is the index of the reference."""
    found = solve(problem)
    points = problem.points
    ranges = _loss_ranges(points)
    grid = _grid(ranges, losses)
    bounds, is_beyond = _bounds(points, ranges, here)
    curve = _curve(problem, found[0], grid, here)
    ours = _over_points(problem, points, found[0], here, bounds)
    curves, averages = [np.full_like(curve, nan)], [np.full((1, 4, len(ranges)), nan)]
    for sample, laws in solve_samples(problem, found, *draws):
        curves.append(_curve(problem, laws, grid, here))
        averages.append(_over_points(problem, sample, laws, here, bounds))
    low, high = interval(np.concatenate(curves), level)
    low_ends, high_ends = (v.tolist() for v in interval(np.concatenate(averages), level))
    mean, std, median, count = ours[0].tolist()
    outside = (grid < ranges[:, :1] * (1 - SLACK)) | (grid > ranges[:, 1:] * (1 + SLACK))
    return {
        structure: Multiplier(
            structure=structure,
            reference=problem.structures[here],
            losses=grid,
            values=curve[0, s],
            low=low[s],
            high=high[s],
            is_extrapolated=outside[s] | outside[here],
            mean=mean[s],
            std=std[s],
            median=median[s],
            num_points=int(count[s]),
            mean_interval=(low_ends[0][s], high_ends[0][s]),
            median_interval=(low_ends[2][s], high_ends[2][s]),
            mean_is_extrapolated=bool(is_beyond[s]),
        )
        for s, structure in enumerate(problem.structures)
        if s != here
    }


def _loss_ranges(points: SampleBatch) -> Floats:
    """The lowest and highest fitted loss of each structure."""
    has = points.weight[0] > 0
    low = np.where(has, points.y[0], np.inf).min(-1)
    high = np.where(has, points.y[0], -np.inf).max(-1)
    return np.asarray(np.exp(np.stack([low, high], axis=-1)))


def _grid(ranges: Floats, losses: Sequence[float] | None) -> Floats:
    if losses is None:
        return np.geomspace(ranges.min(), ranges.max(), 41)
    try:
        grid = np.asarray(losses, dtype=float)
    except (TypeError, ValueError):
        grid = np.zeros(0)
    if grid.ndim != 1 or not len(grid) or not (np.isfinite(grid) & (grid > 0)).all():
        raise EinlinearError(
            what=f"losses is {quote(losses)}",
            rule="losses are finite numbers above 0",
            fix=f"give some between {ranges.min():.4g} and {ranges.max():.4g}",
        )
    return grid


def _bounds(points: SampleBatch, ranges: Floats, here: int) -> tuple[Floats, Bools]:
    """Bounds of the losses to average over, and whether none are within the reference's."""
    low, high = ranges[here] * [1 - SLACK, 1 + SLACK]
    loss = np.exp(points.y[0])
    is_beyond = ~((points.weight[0] > 0) & (loss >= low) & (loss <= high)).any(-1)
    bounds = np.where(is_beyond[:, None], [0.0, np.inf], [low, high])
    return bounds, is_beyond


def _curve(problem: Problem, laws: Laws, losses: Floats, here: int) -> Floats:
    """The ratio: samples x structures x losses; nan where neither law reaches the loss."""
    x = laws.log_compute(losses) + problem.centre[:, None]
    with np.errstate(invalid="ignore", over="ignore"):
        return np.asarray(np.exp(x[:, here, None] - x))


def _over_points(
    problem: Problem, points: SampleBatch, laws: Laws, here: int, bounds: Floats
) -> Floats:
    """Mean, std, median and number of C_reference(L_i) / C_i: samples x 4 x structures.

    The ratio is infinite at a loss that the reference's law never reaches.
    """
    loss = np.exp(points.y)
    reference = Laws(*(v[:, here, None] for v in laws))
    needed = reference.log_compute(loss) + problem.centre[here]
    weight = points.weight * ((loss >= bounds[:, :1]) & (loss <= bounds[:, 1:]))
    with np.errstate(invalid="ignore", divide="ignore", over="ignore"):
        factor = needed - points.x - problem.centre[:, None]
        ratio = np.exp(np.where(weight > 0, factor, 0.0))
        total = weight.sum(-1)
        mean = (weight * ratio).sum(-1) / total
        spread = (weight * (ratio - mean[..., None]) ** 2).sum(-1)
        std = np.sqrt(spread / np.maximum(total - 1, 1))
    return np.stack([mean, std, _median(ratio, weight), total], axis=1)


def _median(values: Floats, weight: Floats) -> Floats:
    """The weighted median along the last axis."""
    order = np.argsort(np.where(weight > 0, values, np.inf), axis=-1)
    ordered = np.take_along_axis(values, order, -1)
    share = np.cumsum(np.take_along_axis(weight, order, -1), -1)
    half = share[..., -1:] / 2
    low, high = (share < half).sum(-1, keepdims=True), (share <= half).sum(-1, keepdims=True)
    last = values.shape[-1] - 1
    ends = [np.take_along_axis(ordered, np.minimum(k, last), -1)[..., 0] for k in (low, high)]
    return np.where(half[..., 0] > 0, (ends[0] + ends[1]) / 2, nan)


def linf_table(
    observations: Data,
    values: Sequence[float] | None = None,
    reference: str = "dense",
    *,
    points: FitPoints = "inner",
) -> tuple[LinfRow, ...]:
    """The laws and multipliers at several given linf: how much conclusions depend on it.

    One or two decades of compute do not determine linf. The data do not support a conclusion that
    changes within this table.

    Args:
        observations: observations, or records, which are compared by training FLOPs.
        values: values of linf; defaults to 0, 0.3, 0.6, 0.8 and 0.9 of the lowest loss.
        reference: the structure that multipliers compare with.
        points: as in `fit_power_law`.
    """
    data = as_observations(observations)
    if values is None:
        values = [share * float(data.loss.min()) for share in (0.0, 0.3, 0.6, 0.8, 0.9)]
    if isinstance(values, str) or not isinstance(values, Sequence | np.ndarray):
        raise EinlinearError(
            what=f"values are {quote(values)}",
            rule="values is a list of linf to compare",
            fix="give a list of numbers, such as [0.0, 0.5, 1.0]",
        )
    rows = []
    for linf in values:
        laws = fit_power_law(data, linf=linf, points=points, resamples=0).laws
        means = {reference: 1.0}
        if len(laws) > 1:
            found = compute_multiplier(data, reference, linf=linf, points=points, resamples=0)
            means |= {name: multiplier.mean for name, multiplier in found.items()}
        for law in laws:
            mean = means.get(law.structure, nan)
            rows.append(LinfRow(linf, law.structure, law.a, law.b, law.r2, law.rms, mean))
    return tuple(rows)
