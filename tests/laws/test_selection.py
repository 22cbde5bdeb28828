from math import log

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import einlinear as el
from einlinear.laws.selection import make_views, places
from kit.scaling import CURVES_LAW, curves, optima, together


def beats(c, loss, other_c, other_loss):
    return other_c <= c and other_loss <= loss and (other_c, other_loss) != (c, loss)


SOME_POINTS = st.lists(
    st.tuples(st.integers(0, 9), st.integers(1, 9), st.sampled_from("ab")), min_size=1, max_size=25
).filter(lambda points: {s for c, _, s in points} == {s for c, _, s in points if c})


@given(SOME_POINTS)
def test_the_frontier_is_what_no_point_beats(points):
    compute, loss, names = zip(*points, strict=True)
    runs = [str(i) for i in range(len(points))]
    found = el.frontier(el.Observations(runs, compute, loss, names))
    expected = {
        (c, v, s)
        for c, v, s in points
        if c and not any(t == s and oc and beats(c, v, oc, ov) for oc, ov, t in points)
    }
    rows = list(zip(found.compute, found.loss, found.structure, strict=True))
    assert set(rows) == expected
    assert len(rows) == len(expected)


def hull_by_force(points, tolerance):
    """A point is near the hull if no line between two others is far below it."""
    front = [p for p in points if not any(beats(*p, *q) for q in points)]
    last = max(c for c, _ in front)
    near = []
    for c, loss in points:
        heights = [log(v) for x, v in front if x == c]
        for left, low in front:
            for right, high in front:
                if left < c < right:
                    share = (log(c) - log(left)) / (log(right) - log(left))
                    heights.append((1 - share) * log(low) + share * log(high))
        if c <= last and heights and log(loss) <= min(heights) + log(1 + tolerance) + 1e-9:
            near.append((c, loss))
    return sorted(near)


@given(
    st.dictionaries(st.integers(1, 30), st.integers(20, 60), min_size=1, max_size=12),
    st.sampled_from([0.0, 0.04]),
)
def test_the_hull_by_brute_force(points, tolerance):
    rows = [(float(c), float(loss)) for c, loss in points.items()]
    runs = [str(i) for i in range(len(rows))]
    compute, loss = zip(*rows, strict=True)
    data = el.Observations(runs, compute, np.array(loss) + 2.0)
    found = el.frontier(data, hull=True, linf=2.0, tolerance=tolerance)
    assert sorted(zip(found.compute, found.loss - 2.0, strict=True)) == hull_by_force(
        rows, tolerance
    )


@pytest.mark.parametrize("seed", range(20))
def test_the_hull_of_points_near_a_law_by_brute_force(seed):
    _, compute, loss, _ = optima(np.random.default_rng(seed), 30, 0.03)
    rows = list(zip(compute.tolist(), loss.tolist(), strict=True))
    data = el.Observations([str(i) for i in range(30)], compute, loss)
    found = el.frontier(data, hull=True, tolerance=0.01)
    assert sorted(zip(found.compute, found.loss, strict=True)) == hull_by_force(rows, 0.01)


def place_sets(data):
    """The points of each place, as places in the observations."""
    table = make_views(data)[0]
    found = {}
    for index, place in zip(table.index.tolist(), places(table).tolist(), strict=True):
        found.setdefault(place, set()).add(index)
    return sorted(map(sorted, found.values()))


def test_seeds_meet_where_their_compute_is_equal():
    # The second seed lacks its second point, the third diverged after two.
    run, group = list("aaaabbbccd"), ["g"] * 9 + ["h"]
    data = el.Observations(run, [1, 2, 3, 4, 1, 3, 4, 1, 2, 2], np.arange(10, 0, -1), group=group)
    assert place_sets(data) == [[0, 4, 7], [1, 8], [2, 5], [3, 6], [9]]


def test_seeds_meet_by_their_order_where_compute_is_seconds():
    seconds = [1.0, 2.1, 4.0, 1.1, 2.0, 4.2, 0.9, 2.2]
    data = el.Observations(list("aaabbbcc"), seconds, np.ones(8), group=["g"] * 8)
    assert place_sets(data) == [[0, 3, 6], [1, 4, 7], [2, 5]]


def test_seeds_do_not_meet_where_their_points_are_far_apart():
    data = el.Observations(list("aabb"), [1.0, 2.0, 2.5, 3.0], np.ones(4), group=["g"] * 4)
    assert place_sets(data) == [[0], [1], [2], [3]]


def at(middle, group, compute):
    """The median of a group at some compute, on the lines between its points."""
    x, y = zip(*sorted((np.log(c), v) for (g, c), v in middle.items() if g == group), strict=True)
    return np.interp(np.log(compute), x, y, np.inf, np.inf)


def test_the_frontier_of_seeds_is_that_of_their_medians():
    data = together(curves(np.random.default_rng(0), 7, 0.02))
    found = el.fit_power_law(data, points="frontier", linf=0.5, resamples=0).points
    middle = {}
    for group, compute in set(zip(data.group, data.compute, strict=True)):
        here = (data.group == group) & (data.compute == compute)
        middle[group, compute] = np.median(np.log(data.loss[here]))
    best = {
        (g, c)
        for (g, c), v in middle.items()
        if not any(oc <= c and ov <= v for (og, oc), ov in middle.items() if (og, oc) != (g, c))
        and not any(at(middle, og, c) < v for og in set(data.group) - {g})
    }
    assert set(zip(found.group, found.compute, strict=True)) == best
    assert len(found) == 3 * len(best)


@pytest.mark.parametrize("sizes", [6, 8, 20, 40, 80])
def test_the_law_does_not_hang_on_how_close_sizes_are(sizes):
    """Of 40 sizes several take turns, point by point, where all of them are too large."""
    data = together(curves(np.random.default_rng(0), sizes, 0.0))
    found = el.fit_power_law(data, resamples=0)
    linf, _, a = CURVES_LAW
    assert found.laws[0].a == pytest.approx(a, rel=0.02)
    assert found.laws[0].linf == pytest.approx(linf, rel=0.005)


def test_sizes_at_the_ends_are_left_out_with_all_their_groups():
    """Two rates of each size, of which one is better early and the other late."""
    random = np.random.default_rng(1)
    run, compute, loss, name, _, group = curves(random, 8, 0.0, seeds=2)
    is_second = np.array([int(r.split()[1]) % 2 for r in run], dtype=bool)
    middle = np.repeat(np.exp(np.log(compute).reshape(8, 40).mean(-1)), 40)  # of each size
    loss = loss * (compute / middle) ** np.where(is_second, -1e-3, 1e-3)
    data = el.Observations(run, compute, loss, name, group=run, size=group)
    found = el.fit_power_law(data, resamples=0).points
    assert set(found.size) == {f"dense {i}" for i in range(1, 7)}
    by_group = el.Observations(run, compute, loss, name, group=run)
    found = el.fit_power_law(by_group, resamples=0).points
    assert {"dense 1", "dense 14"} <= set(found.run)  # the other rate of the same size


def test_of_points_of_equal_compute_the_lowest_of_a_run_counts():
    compute = np.repeat([1e6, 1e7, 1e8, 1e9, 1e10], 6)  # parameters, say
    loss = np.tile([5.0, 4.0, 3.0, 2.0, 1.0, 1.5], 5) * compute**-0.1
    data = el.Observations(compute.astype(str), compute, loss)
    found = el.fit_power_law(data, points="frontier", linf=0.0, resamples=0)
    assert sorted(found.points.loss) == pytest.approx(sorted(set(1.0 * compute**-0.1)))
