"""Power laws fitted to many samples of points at once."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from einlinear.studies.observations import Floats

Sharing = Literal["fitted", "shared", "given"]
Bools = NDArray[np.bool_]
At = tuple[Floats, Floats]

MAX_STEPS = 200
LEAST_SCALE = 1e-6  # of residuals; below it all points count in full
HUBER = 1.345  # in deviations: 95 % efficiency where the noise is normal
STIFFNESS = 0.1  # of points beyond the bend, see `_step`
SETTLED = 1e-7  # a step that lowers the cost by less than this share is the last
SHARES = 1 - np.geomspace(1, 1e-3, 25)  # of the lowest loss: where linf is looked for first
BELOW = 1 - 1e-6  # the highest linf, as a share of the lowest loss
THIRD = 3  # points in a third of all, at least, if lines are laid through medians
CLOSER = 0.5  # the share to which the bend must fall for a law from that start to count
TINY = 1e-300  # the least loss above linf


@dataclass(frozen=True, eq=False)
class Points:
    """Points of samples x structures, filled up with points of weight 0.

    x is the logarithm of compute, less `centre` of the structure; y the logarithm of the loss.
    highest: the upper bound of linf, of samples x structures, see `highest_linf`.
    """

    x: Floats
    y: Floats
    weight: Floats
    highest: Floats

    def rows(self, index: NDArray[np.int64]) -> Points:
        """Some of the samples."""
        columns = (self.x, self.y, self.weight, self.highest)
        return Points(*(column[index] for column in columns))


@dataclass(frozen=True, eq=False)
class Laws:
    """The laws of samples x structures: L = linf + exp(scale - a x)."""

    linf: Floats
    scale: Floats
    a: Floats

    def rows(self, index: NDArray[np.int64]) -> Laws:
        """Some of the samples."""
        return Laws(self.linf[index], self.scale[index], self.a[index])

    @property
    def columns(self) -> tuple[Floats, Floats, Floats]:
        """linf, scale and a."""
        return self.linf, self.scale, self.a

    def power(self, x: Floats) -> Floats:
        """What the loss is above linf at x, of samples x structures x points."""
        with np.errstate(over="ignore", invalid="ignore"):
            return np.asarray(np.exp(self.scale[..., None] - self.a[..., None] * x))

    def log_loss(self, x: Floats) -> Floats:
        """Logarithm of the loss at x, of samples x structures x points."""
        with np.errstate(divide="ignore", invalid="ignore"):
            return np.asarray(np.log(self.linf[..., None] + self.power(x)))

    def log_compute(self, loss: Floats) -> Floats:
        """The x at which a loss is reached; infinite if never, nan if losses do not fall."""
        above = loss - self.linf[..., None]
        reached = np.log(np.where(above > 0, above, np.nan))
        x = (self.scale[..., None] - reached) / np.where(self.a > 0, self.a, np.nan)[..., None]
        return np.asarray(np.where(above > 0, x, np.where(self.a > 0, np.inf, np.nan)[..., None]))


def least_squares(points: Points, linf: Floats) -> Laws:
    """Lines through log(L - linf), by ordinary least squares; linf of samples x structures."""
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


def _cost(points: Points, residual: Floats, bend: Floats) -> Floats:
    """Huber's cost of log residuals, of samples x structures."""
    size = np.abs(residual)
    small = np.minimum(size, bend[..., None])
    return np.asarray(np.einsum("bsm,bsm,bsm->bs", points.weight, small, size - 0.5 * small))


def highest_linf(lowest: Floats, sharing: Sharing) -> Floats:
    """The upper bound of linf, below the lowest loss of each structure; one for all if shared."""
    bound = np.asarray(BELOW * lowest)
    return np.full_like(bound, bound.min()) if sharing == "shared" else bound


def _step(
    points: Points,
    laws: Laws,
    at: At,
    bend: Floats,
    damping: Floats,
    highest: Floats,
    sharing: Sharing,
) -> Laws:
    """The next laws: a damped Gauss-Newton step, in which linf stays between 0 and `highest`.

    With u = linf and v = (scale, a) of each structure the equations have the form of an arrow, so
    v is eliminated by 2 x 2 inverses, and one number for each linf is left. Beyond the bend the
    cost is hardly curved, so points there have a force but little weight: that takes fewer steps.

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
        du = np.clip(slope / bend_u, -laws.linf, highest - laws.linf)
    gs, ga = gs - us * du, ga - ua * du
    scale = laws.scale + (aa * gs - sa * ga) / det
    return Laws(laws.linf + du, scale, laws.a + (ss * ga - sa * gs) / det)


def _pool(values: Floats, sharing: Sharing) -> Floats:
    """Sums over the structures where they share a linf."""
    if sharing == "shared":
        return np.broadcast_to(values.sum(-1, keepdims=True), values.shape)
    return values


def robust_fit(points: Points, start: Laws, bend: Floats, sharing: Sharing) -> Laws:
    """Laws of least Huber cost, by Levenberg and Marquardt from a start, all samples at once.

    bend: the residual beyond which points count less, of samples x structures.
    """
    if sharing == "shared":
        return _descend(points, start, bend, sharing)
    shape = start.linf.shape  # structures that share nothing are samples of their own
    x, y, weight = (v.reshape(-1, 1, v.shape[-1]) for v in (points.x, points.y, points.weight))
    alone = Points(x, y, weight, points.highest.reshape(-1, 1))
    begin = Laws(*(v.reshape(-1, 1) for v in (start.linf, start.scale, start.a)))
    laws = _descend(alone, begin, bend.reshape(-1, 1), sharing)
    return Laws(*(v.reshape(shape) for v in (laws.linf, laws.scale, laws.a)))


def _descend(points: Points, start: Laws, bend: Floats, sharing: Sharing) -> Laws:
    """The steps of `robust_fit`; samples that have come to rest are left out of further ones."""
    found = Laws(start.linf.copy(), start.scale.copy(), start.a.copy())
    live = np.arange(len(found.linf))
    with np.errstate(all="ignore"):
        laws, at = found, _look(points, found)
        highest = points.highest
        cost = _cost(points, at[1], bend).sum(-1)
        damping = np.full((len(cost), 1), 1e-3)
        for _ in range(MAX_STEPS):
            new = _step(points, laws, at, bend, damping, highest, sharing)
            there = _look(points, new)
            new_cost = _cost(points, there[1], bend).sum(-1)
            better = new_cost < cost
            is_done = (better & (cost - new_cost <= SETTLED * cost)) | (damping[:, 0] > 1e8)
            laws, at = _merge(better, (laws, at), (new, there))
            for mine, theirs in zip(found.columns, laws.columns, strict=True):
                mine[live] = theirs
            cost = np.where(better, new_cost, cost)
            damping *= np.where(better, 1 / 8, 5)[:, None]
            moving = np.flatnonzero(~is_done & (cost > 1e-24))
            if not len(moving):
                break
            if len(moving) < len(live):
                live, cost, damping = live[moving], cost[moving], damping[moving]
                bend, highest = bend[moving], highest[moving]
                points, laws, at = points.rows(moving), laws.rows(moving), _rows(at, moving)
    return found


def _look(points: Points, laws: Laws) -> At:
    """Power and residual of laws at their points, of which both the step and the cost are made."""
    power = laws.power(points.x)
    return power, points.y - np.log(laws.linf[..., None] + power)


def _rows(at: At, index: NDArray[np.int64]) -> At:
    return at[0][index], at[1][index]


def _merge(better: Bools, old: tuple[Laws, At], new: tuple[Laws, At]) -> tuple[Laws, At]:
    """The new laws where they are better, the old ones where not."""
    if better.all():
        return new
    (laws, at), (new_laws, new_at) = old, new
    pairs = zip(new_laws.columns, laws.columns, strict=True)
    columns = (np.where(better[:, None], theirs, mine) for theirs, mine in pairs)
    for mine, theirs in zip(at, new_at, strict=True):
        mine[better] = theirs[better]
    return Laws(*columns), at


def first_fit(points: Points, linf: float, sharing: Sharing) -> tuple[Laws, Floats]:
    """The laws of one sample, and the residuals beyond which points of a structure count less.

    Starts at the best of several linf, by least squares; then the bend follows the median of
    residuals. A point far off at one end can hold that start where no other point is near the law.
    So a second start is by medians, and counts where its residuals are far smaller.
    """
    has = points.weight > 0
    lowest = np.exp(np.where(has, points.y, np.inf).min(-1))
    lowest = np.broadcast_to(lowest.min() if sharing == "shared" else lowest, lowest.shape)
    starts = SHARES[:, None] * lowest
    starts = np.minimum(starts, points.highest)
    if sharing == "given":
        starts = np.full_like(lowest, linf)
    many = points.rows(np.zeros(len(starts), dtype=np.int64))
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
    pairs = zip((*other[0].columns, other[1]), (*found[0].columns, found[1]), strict=True)
    *columns, bend = (np.where(is_closer, theirs, ours) for theirs, ours in pairs)
    return Laws(*columns), bend


def _best(laws: Laws, cost: Floats, sharing: Sharing) -> Laws:
    """Of the laws in each column those of least cost, as one sample."""
    cost = cost.sum(-1, keepdims=True) if sharing == "shared" else cost
    best = np.broadcast_to(np.nanargmin(cost, 0), laws.linf.shape[1:])
    column = np.arange(laws.linf.shape[1])
    return Laws(*(v[best, column][None] for v in laws.columns))


def _settle(points: Points, laws: Laws, bend: Floats, sharing: Sharing) -> tuple[Laws, Floats]:
    """The laws of least cost near a start, with a bend that follows the median of residuals."""
    for _ in range(4):
        laws = robust_fit(points, laws, bend, sharing)
        bend = HUBER * _spread(points, laws)
    return laws, bend


def _spread(points: Points, laws: Laws) -> Floats:
    """The deviation of residuals by their median, of samples x structures."""
    sizes = np.abs(points.y - laws.log_loss(points.x))
    middle = [np.median(sizes[:, s, has], -1) for s, has in enumerate(points.weight[0] > 0)]
    return np.maximum(1.4826 * np.stack(middle, axis=-1), LEAST_SCALE)


def _median_lines(points: Points, linf: Floats) -> Laws:
    """Lines through the medians of log(L - linf) in the first and the last third of the points."""
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
