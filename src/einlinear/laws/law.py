"""Fit power laws to many samples of points at once."""

from __future__ import annotations

from typing import Literal, NamedTuple, TypeVar

import numpy as np
from numpy.typing import NDArray

from einlinear.laws.observations import Bools, Floats

Sharing = Literal["fitted", "shared", "given"]
At = tuple[Floats, Floats]

MAX_STEPS = 200
LEAST_SCALE = 1e-6  # of residuals; below it all points have full weight
HUBER = 1.345  # in standard deviations: 95 % efficiency under normal noise
STIFFNESS = 0.1  # of points beyond the bend, see `_step`
SETTLED = 1e-7  # stop when a step lowers the cost by less than this share
SHARES = 1 - np.geomspace(1, 1e-3, 25)  # of the lowest loss: the first guesses of linf
BELOW = 1 - 1e-6  # the highest linf, as a share of the lowest loss
THIRD = 3  # lines through medians need this many points in each third
CLOSER = 0.5  # the second start wins if it lowers the bend to this share
TINY = 1e-300  # the smallest loss above linf


class SampleBatch(NamedTuple):
    """Points as arrays of samples x structures x points, padded with weight 0.

    Not another table: the layout lets one numpy call fit all samples of all structures.

    x: the logarithm of compute minus the `centre` of the structure.
    y: the logarithm of the loss.
    weight: how often the point's run was drawn.
    highest: the upper bound of linf, samples x structures.
    """

    x: Floats
    y: Floats
    weight: Floats
    highest: Floats


class Laws(NamedTuple):
    """Laws of samples x structures: L = linf + exp(scale - a x)."""

    linf: Floats
    scale: Floats
    a: Floats

    def power(self, x: Floats) -> Floats:
        """How far the loss is above linf at x: samples x structures x points."""
        with np.errstate(over="ignore", invalid="ignore"):
            return np.asarray(np.exp(self.scale[..., None] - self.a[..., None] * x))

    def log_loss(self, x: Floats) -> Floats:
        """The logarithm of the loss at x: samples x structures x points."""
        with np.errstate(divide="ignore", invalid="ignore"):
            return np.asarray(np.log(self.linf[..., None] + self.power(x)))

    def log_compute(self, loss: Floats) -> Floats:
        """The x at which a loss is reached; inf if never, nan if the loss does not fall."""
        above = loss - self.linf[..., None]
        reached = np.log(np.where(above > 0, above, np.nan))
        x = (self.scale[..., None] - reached) / np.where(self.a > 0, self.a, np.nan)[..., None]
        return np.asarray(np.where(above > 0, x, np.where(self.a > 0, np.inf, np.nan)[..., None]))


_Samples = TypeVar("_Samples", SampleBatch, Laws)


def take_samples(samples: _Samples, index: NDArray[np.int64]) -> _Samples:
    """The samples at these positions."""
    return type(samples)(*(column[index] for column in samples))


def least_squares(points: SampleBatch, linf: Floats) -> Laws:
    """Fit lines to log(L - linf) by ordinary least squares; linf is samples x structures."""
    above = np.exp(points.y) - linf[..., None]
    weight = points.weight * (above > 0)
    y = np.log(np.where(above > 0, above, 1.0))
    total = weight.sum(-1)
    with np.errstate(invalid="ignore", divide="ignore"):
        mean_x = (weight * points.x).sum(-1) / total
        mean_y = (weight * y).sum(-1) / total
        dx = points.x - mean_x[..., None]
        slope = (weight * dx * y).sum(-1) / (weight * dx * dx).sum(-1)
    return Laws(linf, mean_y - slope * mean_x, -slope)


def _cost(points: SampleBatch, residual: Floats, bend: Floats) -> Floats:
    """The Huber cost of log residuals: samples x structures."""
    size = np.abs(residual)
    small = np.minimum(size, bend[..., None])
    return np.asarray(np.einsum("bsm,bsm,bsm->bs", points.weight, small, size - 0.5 * small))


def _step(
    points: SampleBatch, laws: Laws, at: At, bend: Floats, damping: Floats, sharing: Sharing
) -> Laws:
    """The next laws: a damped Gauss-Newton step that keeps linf between 0 and its bound.

    With u = linf and v = (scale, a) of each structure the normal equations form an arrow matrix:
    2 x 2 inverses eliminate v and leave one number per linf. Beyond the bend the cost is almost
    linear, so points there exert force but get little weight, which takes fewer steps.

    at: power and residual of the laws.
    """
    power, residual = at
    loss = laws.linf[..., None] + power
    clipped = np.clip(residual, -bend[..., None], bend[..., None])
    weight = np.where(clipped == residual, points.weight, STIFFNESS * points.weight)
    force = points.weight * clipped
    by_u, by_scale = 1.0 / loss, power / loss
    by_a = -points.x * by_scale
    wu, ws, wa = weight * by_u, weight * by_scale, weight * by_a

    def dot(left: Floats, right: Floats) -> Floats:
        return np.asarray(np.einsum("bsm,bsm->bs", left, right))

    more = 1.0 + damping
    ss, aa, sa = dot(ws, by_scale) * more, dot(wa, by_a) * more, dot(ws, by_a)
    us, ua = dot(wu, by_scale), dot(wu, by_a)
    gu, gs, ga = dot(by_u, force), dot(by_scale, force), dot(by_a, force)
    det = ss * aa - sa * sa
    if sharing == "given":
        du = np.zeros_like(laws.linf)
    else:
        inverse_s, inverse_a = (aa * us - sa * ua) / det, (ss * ua - sa * us) / det
        slope = _pool(gu - inverse_s * gs - inverse_a * ga, sharing)
        bend_u = _pool(dot(wu, by_u) * more - inverse_s * us - inverse_a * ua, sharing)
        du = np.clip(slope / bend_u, -laws.linf, points.highest - laws.linf)
    gs, ga = gs - us * du, ga - ua * du
    scale = laws.scale + (aa * gs - sa * ga) / det
    return Laws(laws.linf + du, scale, laws.a + (ss * ga - sa * gs) / det)


def _pool(values: Floats, sharing: Sharing) -> Floats:
    """Sum over the structures if they share linf."""
    if sharing == "shared":
        return np.broadcast_to(values.sum(-1, keepdims=True), values.shape)
    return values


def robust_fit(points: SampleBatch, start: Laws, bend: Floats, sharing: Sharing) -> Laws:
    """Minimise the Huber cost with Levenberg-Marquardt, for all samples at once.

    bend: the residual beyond which points count less, samples x structures.
    """
    if sharing == "shared":
        return _descend(points, start, bend, sharing)
    shape = start.linf.shape  # structures that share nothing are fitted as separate samples
    x, y, weight = (v.reshape(-1, 1, v.shape[-1]) for v in (points.x, points.y, points.weight))
    alone = SampleBatch(x, y, weight, points.highest.reshape(-1, 1))
    begin = Laws(*(v.reshape(-1, 1) for v in start))
    laws = _descend(alone, begin, bend.reshape(-1, 1), sharing)
    return Laws(*(v.reshape(shape) for v in laws))


def _descend(points: SampleBatch, start: Laws, bend: Floats, sharing: Sharing) -> Laws:
    """The steps of `robust_fit`; samples that have converged drop out."""
    found = Laws(*(column.copy() for column in start))
    live = np.arange(len(found.linf))
    with np.errstate(all="ignore"):
        laws, at = found, _look(points, found)
        cost = _cost(points, at[1], bend).sum(-1)
        damping = np.full((len(cost), 1), 1e-3)
        for _ in range(MAX_STEPS):
            new = _step(points, laws, at, bend, damping, sharing)
            there = _look(points, new)
            new_cost = _cost(points, there[1], bend).sum(-1)
            better = new_cost < cost
            is_done = (better & (cost - new_cost <= SETTLED * cost)) | (damping[:, 0] > 1e8)
            laws, at = _merge(better, (laws, at), (new, there))
            for mine, theirs in zip(found, laws, strict=True):
                mine[live] = theirs
            cost = np.where(better, new_cost, cost)
            damping *= np.where(better, 1 / 8, 5)[:, None]
            moving = np.flatnonzero(~is_done & (cost > 1e-24))
            if not len(moving):
                break
            if len(moving) < len(live):
                live, cost, damping = live[moving], cost[moving], damping[moving]
                bend, at = bend[moving], (at[0][moving], at[1][moving])
                points, laws = take_samples(points, moving), take_samples(laws, moving)
    return found


def _look(points: SampleBatch, laws: Laws) -> At:
    """Power and residual at the points, which both the step and the cost need."""
    power = laws.power(points.x)
    return power, points.y - np.log(laws.linf[..., None] + power)


def _merge(better: Bools, old: tuple[Laws, At], new: tuple[Laws, At]) -> tuple[Laws, At]:
    """Take the new laws where they are better."""
    if better.all():
        return new
    (laws, at), (new_laws, new_at) = old, new
    pairs = zip(new_laws, laws, strict=True)
    columns = (np.where(better[:, None], theirs, mine) for theirs, mine in pairs)
    for mine, theirs in zip(at, new_at, strict=True):
        mine[better] = theirs[better]
    return Laws(*columns), at


def first_fit(points: SampleBatch, linf: float, sharing: Sharing) -> tuple[Laws, Floats]:
    """The laws of one sample, and the residual beyond which points of each structure count less.

    Starts from the best of several linf by least squares; the bend then follows the median
    residual. An outlier at one end can hold that start far from all other points, so a second start
    uses medians and wins where its residuals are far smaller.
    """
    has = points.weight > 0
    lowest = np.exp(np.where(has, points.y, np.inf).min(-1))
    lowest = np.broadcast_to(lowest.min() if sharing == "shared" else lowest, lowest.shape)
    starts = np.minimum(SHARES[:, None] * lowest, points.highest)
    if sharing == "given":
        starts = np.full_like(lowest, linf)
    many = take_samples(points, np.zeros(len(starts), dtype=np.int64))
    laws = least_squares(many, starts)
    none = np.full(lowest.shape, np.inf)
    cost = _cost(many, many.y - laws.log_loss(many.x), none)
    found = _settle(points, _best(laws, cost, sharing), none, sharing)
    if has.sum(-1).min() < 3 * THIRD:
        return found
    laws = _median_lines(many, starts)
    start = _best(laws, np.log(_spread(many, laws)), sharing)
    other = _settle(points, start, HUBER * _spread(points, start), sharing)
    is_closer = other[1] < CLOSER * found[1]
    if sharing == "shared":
        is_closer = np.full_like(is_closer, np.log(other[1] / found[1]).mean() < np.log(CLOSER))
    pairs = zip((*other[0], other[1]), (*found[0], found[1]), strict=True)
    *columns, bend = (np.where(is_closer, theirs, ours) for theirs, ours in pairs)
    return Laws(*columns), bend


def _best(laws: Laws, cost: Floats, sharing: Sharing) -> Laws:
    """The cheapest law of each column, as one sample."""
    cost = cost.sum(-1, keepdims=True) if sharing == "shared" else cost
    best = np.broadcast_to(np.nanargmin(cost, 0), laws.linf.shape[1:])
    column = np.arange(laws.linf.shape[1])
    return Laws(*(v[best, column][None] for v in laws))


def _settle(points: SampleBatch, laws: Laws, bend: Floats, sharing: Sharing) -> tuple[Laws, Floats]:
    """Minimise the cost from a start while the bend follows the median residual."""
    for _ in range(4):
        laws = robust_fit(points, laws, bend, sharing)
        bend = HUBER * _spread(points, laws)
    return laws, bend


def _spread(points: SampleBatch, laws: Laws) -> Floats:
    """The spread of residuals by their median: samples x structures."""
    sizes = np.abs(points.y - laws.log_loss(points.x))
    middle = [np.median(sizes[:, s, has], -1) for s, has in enumerate(points.weight[0] > 0)]
    return np.maximum(1.4826 * np.stack(middle, axis=-1), LEAST_SCALE)


def _median_lines(points: SampleBatch, linf: Floats) -> Laws:
    """Lines through the medians of log(L - linf) in the first and last third of the points."""
    y = np.log(np.maximum(np.exp(points.y) - linf[..., None], TINY))
    lines = []
    for s, has in enumerate(points.weight[0] > 0):
        third = int(has.sum()) // 3
        of_x, of_y = points.x[:, s, has], y[:, s, has]
        ends = [slice(third), slice(-third, None)]
        (x0, x1), (y0, y1) = ([np.median(v[:, end], -1) for end in ends] for v in (of_x, of_y))
        a = (y0 - y1) / (x1 - x0)
        lines.append((np.median(of_y + a[:, None] * of_x, -1), a))
    scale, a = np.moveaxis(np.array(lines), 0, -1)
    return Laws(linf, scale, a)
