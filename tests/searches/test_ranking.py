"""What rows of a leaderboard hold, against numbers worked out by hand."""

from types import SimpleNamespace as Fake

import numpy as np
import pytest

from einlinear.searches.ranking import best_rate, seen_multiplier
from einlinear.searches.surrogate import Spreads
from einlinear.searches.words import conclusions, paste_code
from kit.search_records import make_answer, make_row

STEPS = (1, 2, 4, 8, 16)


def curve(macs, times=1.0, steps=STEPS):
    """A run whose loss is 3 (times x multiply-adds)^-0.5: an exact power law of compute."""
    points = [
        Fake(step=step, macs=macs * step, loss=3 * (times * macs * step) ** -0.5) for step in steps
    ]
    return len(steps), Fake(curve=points)


def searched(**longest):
    """A search with these runs: d of dense layers, c of a candidate; the number is the seed."""
    chains = {("dc".index(name[0]), 0, int(name[1])): run for name, run in longest.items()}
    return Fake(tally=Fake(longest=chains), spec=Fake(rungs=Fake(steps=STEPS)))


def test_the_multiplier_that_was_seen():
    state = searched(d0=curve(10.0), c0=curve(10.0, times=3.0))
    found = seen_multiplier(state, 1)
    assert found.multiplier == pytest.approx(3.0, rel=0.03)  # between points lines replace curves
    # Dense reached a loss at 160 multiply-adds for which the candidate needs 160 / 3.
    assert found.flops == pytest.approx(6 * 160 / 3, rel=0.03)
    assert seen_multiplier(state, 0).multiplier == pytest.approx(1.0)


def test_losses_that_only_one_reached_are_not_compared():
    state = searched(d0=curve(10.0, steps=(1, 2)), c0=curve(1e4))
    assert seen_multiplier(state, 1) is None


def test_seeds_are_averaged_before_the_lowest_loss_is_taken():
    lucky = curve(10.0, times=4.0)
    state = searched(d0=curve(10.0), d1=curve(10.0), c0=curve(10.0), c1=lucky)
    mean = (1 + 4**-0.5) / 2  # of the losses, so the multiplier is its power -2
    assert seen_multiplier(state, 1).multiplier == pytest.approx(mean**-2, rel=0.03)


def checked(usual, half, twice, noise=0.01):
    """A search whose final check found these losses, with this noise in each."""
    tuned = {
        (1, rate): Fake(config=None, status="finished", final_loss=loss)
        for rate, loss in ((0.5, half), (2.0, twice))
    }
    spreads = Spreads(noise=noise / 2**0.5, run=noise / 2**0.5)
    return Fake(
        tally=Fake(tuned=tuned),
        belief=Fake(spreads=spreads),
        usual_loss=lambda number, config: usual,
    )


def test_the_gain_of_a_learning_rate_is_shrunk_by_its_noise():
    found = best_rate(checked(usual=2.0, half=2.1, twice=1.9), 1)
    # A gain of log(2 / 1.9), seen with variance 2 x 0.01^2, of a kind with variance 0.02^2.
    share = 0.02**2 / (0.02**2 + 2 * 0.01**2)
    assert found.rate == 2.0
    assert found.gain == pytest.approx(share * np.log(2.0 / 1.9))
    assert found.spread == pytest.approx((2 * 0.01**2 * share) ** 0.5)
    exact = best_rate(checked(usual=2.0, half=2.1, twice=1.9, noise=1e-6), 1)
    assert exact.gain == pytest.approx(np.log(2.0 / 1.9))


def test_the_usual_rate_is_kept_if_no_other_is_better():
    found = best_rate(checked(usual=1.9, half=2.0, twice=2.1), 1)
    assert (found.rate, found.gain, found.spread) == (1.0, 0.0, 0.0)


def test_code_for_heads_and_experts():
    plain = make_row("btt")
    assert paste_code(plain) == 'el.convert_(model, el.parse("btt"))'
    assert paste_code(make_row("btt", head_aligned=True)) == (
        'el.convert_(model, {"*attention*": el.heads(structure="btt"), "*": el.parse("btt")})'
    )
    assert paste_code(make_row("btt", num_experts=8)) == (
        'el.convert_(model, el.moe(el.parse("btt"), num_experts=8, num_active=2))'
    )
    assert "feed-forward nets as experts" in paste_code(
        make_row("dense", num_experts=8, experts="ffn")
    )


def test_what_was_seen_is_told_beside_what_is_predicted():
    dense = make_row("dense", seen=1.0)
    btt = make_row("btt", seen=1.6, seen_flops=2e12)
    told = "In the runs themselves, dense needs 1.60 times the FLOPs of btt, at 2.00e12"
    assert f"That is predicted. {told}." in conclusions(make_answer([btt, dense]))
    ahead = f"{told}, but is predicted to win at the target."
    assert ahead in conclusions(make_answer([dense, btt]))
    behind = make_row("btt", seen=0.9)
    assert not any("runs themselves" in text for text in conclusions(make_answer([dense, behind])))
    unseen = make_row("btt", seen=None, seen_flops=None)
    assert not any("runs themselves" in text for text in conclusions(make_answer([unseen, dense])))


@pytest.mark.parametrize(("gain", "verb"), [(0.02, "is"), (0.01, "may be")])
def test_a_gain_within_its_noise_is_no_fact(gain, verb):
    row = make_row("btt", rate=2.0, rate_gain=gain, rate_spread=0.01)
    told = f"btt {verb} better with 2 times the learning rate; the table has its loss there."
    assert told in conclusions(make_answer([row, make_row("dense")]))
