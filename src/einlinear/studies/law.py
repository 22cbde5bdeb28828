"""Power laws fitted to many samples of points at once."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from einlinear.studies.observations import Floats

Sharing = Literal["fitted", "shared", "given"]

MAX_STEPS = 200
LEAST_SCALE = 1e-6  # of residuals; below it all points count in full
HUBER = 1.345  # in deviations: 95 % efficiency where the noise is normal
STIFFNESS = 0.1  # of points beyond the bend, see `_step`
SETTLED = 1e-7  # a step that lowers the cost by less than this share is the last
BELOW = 1 - 1e-6  # the highest linf, as a share of the lowest loss


@dataclass(frozen=True, eq=False)
class Points:
    """Points of samples x structures, filled up with points of weight 0.

    x is the logarithm of compute, less `centre` of the structure; y the logarithm of the loss.
    is_frontier: whether they are the lowest losses, so that no law stays above one of them.
    """

    x: Floats
    y: Floats
    weight: Floats
    is_frontier: bool

    def rows(self, index: NDArray[np.int64]) -> Points:
        """Some of the samples."""
        return Points(self.x[index], self.y[index], self.weight[index], self.is_frontier)


@dataclass(frozen=True, eq=False)
class Laws:
    """The laws of samples x structures: L = linf + exp(scale - a x)."""

    linf: Floats
    scale: Floats
    a: Floats

    def rows(self, index: NDArray[np.int64]) -> Laws:
        """Some of the samples."""
        return Laws(self.linf[index], self.scale[index], self.a[index])

    def log_loss(self, x: Floats) -> Floats:
        """Logarithm of the loss at x, of samples x structures x points."""
        power = np.exp(self.scale[..., None] - self.a[..., None] * x)
        return np.asarray(np.log(self.linf[..., None] + power))

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


def _cost(points: Points, laws: Laws, bend: Floats) -> Floats:
    """Huber's cost of log residuals, of samples x structures."""
    size = np.abs(points.y - laws.log_loss(points.x))
    small = np.minimum(size, bend[..., None])
    return np.asarray((points.weight * small * (size - 0.5 * small)).sum(-1))


def _highest_linf(points: Points, sharing: Sharing) -> Floats:
    """The upper bound of linf.

    The law of a frontier must be able to reach every loss that was reached. Where points scatter to
    both sides of the law, some may be below linf.
    """
    loss = np.exp(points.y)
    if points.is_frontier:
        bound = BELOW * np.where(points.weight > 0, loss, np.inf).min(-1)
    else:
        bound = np.where(points.weight > 0, loss, 0.0).max(-1)
    if sharing == "shared":
        return np.broadcast_to(bound.min(-1, keepdims=True), bound.shape)
    return np.asarray(bound)


def _step(
    points: Points, laws: Laws, bend: Floats, damping: Floats, highest: Floats, sharing: Sharing
) -> Laws:
    """The next laws: a damped Gauss-Newton step, in which linf stays between 0 and `highest`.

    With u = linf and v = (scale, a) of each structure the equations have the form of an arrow, so
    v is eliminated by 2 x 2 inverses, and one number for each linf is left. Beyond the bend the
    cost is hardly curved, so points there have a force but little weight: a third of the steps.
    """
    power = np.exp(laws.scale[..., None] - laws.a[..., None] * points.x)
    loss = laws.linf[..., None] + power
    residual = points.y - np.log(loss)
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
    alone = Points(x, y, weight, points.is_frontier)
    begin = Laws(*(v.reshape(-1, 1) for v in (start.linf, start.scale, start.a)))
    laws = _descend(alone, begin, bend.reshape(-1, 1), sharing)
    return Laws(*(v.reshape(shape) for v in (laws.linf, laws.scale, laws.a)))


def _descend(points: Points, start: Laws, bend: Floats, sharing: Sharing) -> Laws:
    """The steps of `robust_fit`; samples that have come to rest are left out of further ones."""
    linf, scale, a = start.linf.copy(), start.scale.copy(), start.a.copy()
    laws = Laws(linf, scale, a)
    live = np.arange(len(linf))
    with np.errstate(all="ignore"):
        highest = _highest_linf(points, sharing)
        cost = _cost(points, laws, bend).sum(-1)
        damping = np.full((len(cost), 1), 1e-3)
        now = points
        for _ in range(MAX_STEPS):
            new = _step(now, laws.rows(live), bend[live], damping[live], highest[live], sharing)
            new_cost, old = _cost(now, new, bend[live]).sum(-1), cost[live]
            better = new_cost < old
            for mine, theirs in ((linf, new.linf), (scale, new.scale), (a, new.a)):
                mine[live[better]] = theirs[better]
            cost[live[better]] = new_cost[better]
            is_done = (better & (old - new_cost <= SETTLED * old)) | (damping[live, 0] > 1e8)
            damping[live, 0] *= np.where(better, 1 / 8, 5)
            moving = ~is_done & (cost[live] > 1e-24)
            if not moving.any():
                break
            if not moving.all():
                live = live[moving]
                now = points.rows(live)
    return laws


def first_fit(points: Points, linf: float, sharing: Sharing) -> tuple[Laws, Floats]:
    """The laws of one sample, and the residuals beyond which points of a structure count less.

    Starts at several linf, by least squares; then the bend follows the median of residuals.
    """
    has = points.weight > 0
    lowest = np.exp(np.where(has, points.y, np.inf).min(-1))
    lowest = np.broadcast_to(lowest.min() if sharing == "shared" else lowest, lowest.shape)
    shares = (0.0, 0.3, 0.6, 0.8, 0.9, 0.97)
    starts = np.concatenate([share * lowest for share in shares])
    if sharing == "given":
        starts = np.full_like(lowest, linf)
    many = points.rows(np.zeros(len(starts), dtype=np.int64))
    none = np.full(starts.shape, np.inf)
    laws = robust_fit(many, least_squares(many, starts), none, sharing)
    cost = _cost(many, laws, none)
    cost = cost.sum(-1, keepdims=True) if sharing == "shared" else cost
    best = np.broadcast_to(np.nanargmin(cost, 0), laws.linf.shape[1:])
    column = np.arange(laws.linf.shape[1])
    chosen = Laws(*(v[best, column][None] for v in (laws.linf, laws.scale, laws.a)))
    bend = none[:1]
    for _ in range(3):
        residual = np.where(has, np.abs(points.y - chosen.log_loss(points.x)), np.nan)
        bend = HUBER * np.maximum(1.4826 * np.nanmedian(residual, -1), LEAST_SCALE)
        chosen = robust_fit(points, chosen, bend, sharing)
    return chosen, bend
