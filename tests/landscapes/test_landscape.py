"""The analysis of a landscape, on tables made by hand."""

import json
import math
from dataclasses import dataclass, replace
from math import log2
from xml.etree import ElementTree

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from einlinear import EinlinearError, LandscapeConfig
from einlinear.landscapes.cells import LandscapeCell
from einlinear.landscapes.config import make_study
from einlinear.landscapes.verdict import make_landscape
from einlinear.runs.record import Counts, Point, RunRecord

SMALL = LandscapeConfig(
    structures=("dense", "btt"), widths=(16, 64, 256), rates=(-10, -4), seeds=2, steps=10
)


@dataclass(frozen=True)
class Run:
    """A run as functions of losses see it; its rate is the power of two."""

    parametrization: str
    structure: str
    width: int
    rate: int
    seed: int


def test_the_optimizer_of_all_runs(tmp_path):
    adamw, muon = (make_study(replace(SMALL, optimizer=name)) for name in ("adamw", "muon"))
    assert adamw == make_study(SMALL)
    assert {cell.config.optimizer for cell in muon.cells} == {"muon"}
    assert "optimizer" not in adamw.base
    with pytest.raises(EinlinearError, match="optimizer is 'sgd'"):
        replace(SMALL, optimizer="sgd")


def record(config, train_loss, *, start=2.3, status="finished"):
    """The record of a run on images that ended with a training loss."""
    ends = (0, start), (config.steps, train_loss)
    curve = tuple(Point(step, step, step, 1.0, 0.0, loss, None, config.lr) for step, loss in ends)
    counts = Counts(1, 1, 1, 0, 0, 0)
    return RunRecord(
        config, status, config.steps, curve, "image", counts, 1, {}, train_loss, accuracy=0.5
    )


def landscape(loss, config=SMALL):
    """The landscape in which every run ends with the loss that a function of it gives."""
    study, records = make_study(config), []
    for run in (cell.config for cell in study.cells):
        given = Run(run.parametrization, run.structure, run.width, round(log2(run.lr)), run.seed)
        value = loss(given)
        is_lost = math.isinf(value)
        status = "diverged" if is_lost else "finished"
        records.append(record(run, None if is_lost else value, status=status))
    return make_landscape(config, study, records, "a table")


def valley(bottom):
    """Losses that grow with the distance from a rate."""
    return lambda run: 1.0 + 0.1 * abs(run.rate - bottom(run))


def transferring(run):
    return -7


def drifting(run):
    """Naive: down by one for every doubling of twice the width; btt one above dense."""
    if run.parametrization == "mup":
        return -7
    return {16: -5, 64: -7, 256: -9}[run.width] + (run.structure == "btt")


def test_the_best_rates_of_a_table():
    result = landscape(valley(drifting))
    best = {(c.parametrization, c.structure, c.width): c.best for c in result.cells}
    assert best["naive", "dense", 16] == -5
    assert best["naive", "btt", 256] == -8
    assert {rate for key, rate in best.items() if key[0] == "mup"} == {-7}
    assert len(best) == len(result.cells) == 12


def test_the_drift_of_a_table():
    result = landscape(valley(drifting))
    widths, structures = result.drift_over_widths("naive"), result.drift_over_structures("naive")
    assert (widths.doublings, widths.low, widths.high, widths.where) == (4, 4, 4, "dense")
    assert (structures.doublings, structures.where) == (1, "width 16")
    assert result.drift_over_widths("mup").doublings == 0
    transfer = result.transfer("naive")
    # One rate for all, -5: dense is 0, 2, 4 from its best, btt 1, 1, 3, each worth 0.1.
    assert transfer.rate == -5
    assert transfer.mean_loss == pytest.approx(0.1 * (0 + 2 + 4 + 1 + 1 + 3) / 6)
    assert transfer.worst_loss == pytest.approx(0.4)
    assert transfer.worst == "dense at width 256"


def test_the_verdict_in_words():
    naive, mup, compared = landscape(valley(drifting)).verdict
    assert naive.startswith(
        "naive: the rate does not transfer. One rate for all, 2^-5, costs 0.183 of loss on "
        "average, 0.400 or 40.0% at worst (dense at width 256). The best rate moves by at least "
        "4 doublings (4 in single seeds) over widths (dense), by 1 doubling (1 in "
        "single seeds) across structures (width 16). 1 of 6 best rates is the highest"
    )
    assert mup.startswith("µP: the rate transfers. One rate for all, 2^-7, costs 0.000")
    assert "moves by at most 0 doublings" in mup
    assert compared.endswith("moves less under µP than without: 0 doublings, at least 4 doublings.")


@pytest.mark.parametrize(
    ("extra", "word"),
    [
        (0.019, "the rate transfers"),
        (0.021, "the rate nearly transfers"),
        (0.049, "the rate nearly transfers"),
        (0.051, "the rate does not transfer"),
    ],
)
def test_words_follow_the_numbers(extra, word):
    """At width 256 the rate -7, best elsewhere, costs this share of a loss of 1."""

    def loss(run):
        if run.width < 256:
            return 1 + 0.1 * abs(run.rate + 7)
        return {-7: 1 + extra, -6: 1.0}.get(run.rate, 2.0)

    naive, mup, last = landscape(loss).verdict
    assert word in naive
    assert word in mup
    assert "as much under µP as without: 1 doubling, 1 doubling." in last


def test_mup_that_drifts_more_is_said_to():
    flipped = {"mup": "naive", "naive": "mup"}

    def bottom(run):
        return -7 if flipped[run.parametrization] == "mup" else {16: -5, 64: -7, 256: -9}[run.width]

    assert "moves more under µP than without: 4" in landscape(valley(bottom)).verdict[-1]


THREE = replace(SMALL, parametrizations=("mup", "naive", "unit"))


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of what matplotlib imports
def test_three_parametrizations_are_compared(tmp_path):
    pytest.importorskip("matplotlib")

    def bottom(run):
        shift = {"mup": 0, "naive": 1, "unit": 2}[run.parametrization]
        return {16: -6, 64: -6 - shift, 256: -6 - shift}[run.width]

    study = make_study(THREE)
    kinds = [cell.config.parametrization for cell in study.cells]
    assert list(dict.fromkeys(kinds)) == ["mup", "naive", "unit"]
    assert [kinds.count(name) for name in THREE.parametrizations] == [2 * 3 * 7 * 2] * 3
    assert {cell.config.base_width for cell in study.cells[: len(kinds) // 3]} == {16}
    result = landscape(valley(bottom), THREE)
    *own, naive, unit = result.verdict
    assert [words.split(":")[0] for words in own] == ["µP", "naive", "unit"]
    assert naive == (
        "Over widths the best rate moves less under µP than without: 0 doublings, 1 doubling."
    )
    assert unit == (
        "Over widths the best rate moves less under µP than with unit weights: 0 doublings, "
        "2 doublings."
    )
    assert {"mup", "naive", "unit"} <= result.as_json().keys()
    text = result.plot(tmp_path / "three.svg").read_text(encoding="utf-8")
    for words in ("µP", "naive", "unit"):
        assert f">{words}<" in text or f"<!-- {words} -->" in text
    assert [row[0] for row in result.rows()[1:]] == ["µP"] * 6 + ["naive"] * 6 + ["unit"] * 6


def test_rates_of_unit_weights_are_their_own_if_given():
    config = replace(THREE, unit_rates=(-3, -1))
    assert [len(config.exponents(name)) for name in THREE.parametrizations] == [7, 7, 3]
    result = landscape(valley(lambda run: -3), config)
    assert "unit: cannot be told; widen --unit-rates." in result.verdict[2]


def test_a_higher_loss_than_with_unit_weights_is_said():
    def loss(run):
        return 1.0 + 0.1 * abs(run.rate + 7) - 0.25 * (run.parametrization == "unit")

    assert landscape(loss, THREE).caveat == (
        "µP is not lower here: each at its best rate, µP has a higher loss than unit in 6 of 6 "
        "cells, by up to 0.250. Compare where the best rates lie, not the rows."
    )


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of what matplotlib imports
def test_best_rates_with_losses_above_the_axis_are_still_shown(tmp_path):
    pytest.importorskip("matplotlib")

    def loss(run):
        return (1.0 if run.parametrization == "mup" else 2.47) + 0.01 * abs(run.rate + 7)

    for height, is_told in ((0.0, True), (1.0, False)):
        result = landscape(lambda run, less=height: loss(run) - less / 2, SMALL)
        text = result.plot(tmp_path / "high.svg").read_text(encoding="utf-8")
        assert ("A triangle is a best rate" in " ".join(text.split())) == is_told


def test_without_mup_there_is_nothing_to_compare_it_with():
    result = landscape(valley(transferring), replace(SMALL, parametrizations=("unit",)))
    assert len(result.verdict) == 1
    assert result.caveat == ""


def test_seeds_give_the_interval():
    result = landscape(lambda run: 1.0 + 0.1 * abs(run.rate + 7 - 2 * run.seed) + 0.01 * run.rate)
    cell = result.cells[0]
    assert cell.best_by_seed == (-7, -5)
    assert cell.interval == (-7, -5)
    assert cell.best == -7  # equal sums from -7 to -5, and the slope decides
    assert result.drift_over_widths("mup").doublings == 0


def test_one_seed_has_no_interval():
    result = landscape(valley(transferring), replace(SMALL, seeds=1))
    assert {row[4] for row in result.rows()[1:]} == {"-7"}


def test_two_spellings_of_a_structure_are_named():
    for options in ({}, {"weight_norm": True}):
        with pytest.raises(EinlinearError) as told:
            LandscapeConfig(structures=("dense", "monarch", "btt(rank=1)"), **options)
        assert "'monarch' and 'btt(rank=1)', two spellings of XA^1/2" in told.value.what
    edges = ("dense", "XA^1 YA^1")
    assert LandscapeConfig(structures=edges).structures == edges, "nn.Linear and an einsum"
    with pytest.raises(EinlinearError, match=r"'dense' and 'XA\^1 YA\^1', two spellings"):
        LandscapeConfig(structures=edges, weight_norm=True)


def test_a_rate_at_which_one_seed_diverges_is_not_the_best():
    def loss(run):
        return math.inf if run.rate == -6 and run.seed == 1 else 1 + abs(run.rate + 6)

    cell = landscape(loss).cells[0]
    assert cell.best in (-7, -5)
    assert cell.best_by_seed[0] == -6
    assert cell.means[cell.rates.index(-6)] == math.inf


def test_losses_above_the_start_are_divergence():
    one = LandscapeConfig(structures=("dense",), widths=(16,), rates=(-9, -9), seeds=1)
    study = make_study(one)

    def loss(*args, **kwargs):
        records = [record(cell.config, *args, **kwargs) for cell in study.cells]
        return make_landscape(one, study, records, "a table").cells[0].best_loss

    assert loss(2.5) == 2.5
    assert loss(2.6) == math.inf
    assert loss(None) == math.inf
    assert loss(2.0, status="diverged") == math.inf


def test_what_diverges_everywhere_has_no_best_rate():
    result = landscape(lambda run: math.inf if run.structure == "btt" else 1 + abs(run.rate + 7))
    cell = next(c for c in result.cells if c.structure == "btt")
    assert (cell.best, cell.interval, cell.is_at_edge) == (None, None, False)
    assert "In 3 cells every rate diverges." in result.verdict[0]
    assert "all diverge" in str(result)
    assert json.loads(json.dumps(result.as_json(), allow_nan=False))
    nothing = landscape(lambda run: math.inf)
    assert nothing.transfer("mup") is None
    assert nothing.drift_over_widths("mup") is None
    assert nothing.drift_over_structures("mup") is None
    assert nothing.verdict == (
        "naive: cannot be told; start --rates lower. In 6 cells every rate diverges.",
        "µP: cannot be told; start --rates lower. In 6 cells every rate diverges.",
        "Whether the best rate moves less under µP than without cannot be told.",
    )
    assert "inf" not in str(nothing)
    assert "%" not in str(nothing)


@pytest.mark.parametrize("is_lost", [lambda run: run.width > 16, lambda run: run.width == 16])
def test_cells_in_which_every_rate_diverges_leave_the_answer_open(is_lost):
    """The rest agree on a rate, but whether it serves those that diverge is not known."""
    result = landscape(lambda run: math.inf if is_lost(run) else 1 + 0.1 * abs(run.rate + 7))
    assert result.answer("mup") == "cannot be told"
    assert result.as_json()["mup"]["answer"] == "cannot be told"
    lost = sum(cell.best is None for cell in result.cells_of("mup"))
    assert result.verdict[1] == (
        f"µP: cannot be told; start --rates lower. In {lost} cells every rate diverges."
    )
    assert result.verdict[2].endswith("cannot be told.")


def test_one_lost_cell_leaves_bad_news_as_it_is():
    def loss(run):
        is_lost = run.structure == "btt" and run.width == 256
        return math.inf if is_lost else valley(lambda run: -7 + (run.width == 64))(run)

    result = landscape(loss)
    assert result.answer("mup") == "does not transfer"
    assert result.verdict[1].startswith("µP: the rate does not transfer.")
    assert "moves by at least 1 doubling" in result.verdict[1]
    assert result.verdict[1].endswith("In 1 cell every rate diverges.")


def test_rates_that_diverge_and_others_that_are_the_highest_need_a_wider_grid():
    result = landscape(lambda run: math.inf if run.structure == "btt" else 1 - 0.1 * run.rate)
    assert result.verdict[1].startswith("µP: cannot be told; widen --rates. 3 of 6 best rates")


def test_one_cell_has_nowhere_to_transfer_a_rate_to():
    one = replace(SMALL, structures=("dense",), widths=(16,))
    result = landscape(valley(transferring), one)
    assert result.answer("mup") == "cannot be told"
    assert result.verdict == (
        "naive: cannot be told; give more --widths or --structures.",
        "µP: cannot be told; give more --widths or --structures.",
        "Whether the best rate moves less under µP than without cannot be told.",
    )


def test_only_drifts_that_were_measured_are_told():
    one_width = landscape(valley(transferring), replace(SMALL, widths=(16,)))
    assert one_width.verdict[1].endswith(
        "The best rate moves by at most 0 doublings (0 in single seeds) across structures "
        "(width 16)."
    )
    assert one_width.as_json()["mup"]["over_widths"] is None
    one_structure = landscape(valley(transferring), replace(SMALL, structures=("btt",)))
    assert one_structure.answer("mup") == "transfers"
    assert one_structure.verdict[1].endswith("(0 in single seeds) over widths (btt).")


@pytest.mark.parametrize(
    ("loss", "why"),
    [
        (lambda run: math.inf, "(naive and µP): in 6 cells every rate diverges."),
        (
            lambda run: (
                math.inf if run.width == 16 and run.parametrization == "mup" else 1 - 0.1 * run.rate
            ),
            "(naive): best rates are ends of the grid. Whether rates transfer cannot be told "
            "(µP): best rates are ends of the grid, in 2 cells every rate diverges.",
        ),
    ],
)
def test_the_picture_says_why_nothing_can_be_told(tmp_path, loss, why):
    pytest.importorskip("matplotlib")
    root = ElementTree.parse(landscape(loss).plot(tmp_path / "landscape.svg")).getroot()
    words = " ".join("".join(root.itertext()).split())
    assert f"Whether rates transfer cannot be told {why}" in words


def test_the_transferred_rate_may_diverge_elsewhere():
    def loss(run):
        return math.inf if run.width == 256 and run.rate > -8 else 1 + abs(run.rate + 7)

    result = landscape(loss)
    assert result.transfer("mup").diverged == 2
    assert result.verdict[1].startswith("µP: the rate does not transfer.")
    assert "diverges in 2 cells" in result.verdict[1]
    assert "diverges in 1 cell." in landscape(loss, replace(SMALL, structures=("btt",))).verdict[1]


@pytest.mark.parametrize(("bottom", "edge"), [(-4, "highest"), (-10, "lowest")])
def test_best_rates_at_the_end_of_the_grid_tell_nothing(bottom, edge):
    """Every best rate is the same, and the last one tried: the rate seems to transfer."""
    result = landscape(valley(lambda run: bottom))
    assert all(cell.is_at_edge for cell in result.cells)
    assert result.transfer("mup").word == "transfers"
    assert result.answer("mup") == "cannot be told"
    assert result.verdict == (
        f"naive: cannot be told; widen --rates. 6 of 6 best rates are the {edge} of the grid, "
        f"2^{bottom} (width 16, 64, 256): better ones may lie beyond.",
        f"µP: cannot be told; widen --rates. 6 of 6 best rates are the {edge} of the grid, "
        f"2^{bottom} (width 16, 64, 256): better ones may lie beyond.",
        "Whether the best rate moves less under µP than without cannot be told.",
    )
    assert "end of grid" in str(result)
    assert result.as_json()["mup"]["answer"] == "cannot be told"
    own = landscape(valley(lambda run: bottom), replace(SMALL, naive_rates=(-10, -4)))
    assert own.verdict[0].startswith("naive: cannot be told; widen --naive-rates. 6 of 6")


def test_one_best_rate_at_an_end_leaves_only_bad_news():
    """What a rate costs there is known from below: it may be too much, but not little enough."""

    def bottom(run):
        return -4 if run.width == 256 and run.structure == "btt" else -6

    flat = landscape(lambda run: 1 + 0.001 * abs(run.rate - bottom(run)))
    assert flat.transfer("mup").word == "transfers"
    assert flat.verdict[1] == (
        "µP: cannot be told; widen --rates. 1 of 6 best rates is the highest of the grid, 2^-4 "
        "(width 256): better ones may lie beyond."
    )
    steep = landscape(valley(bottom))
    assert steep.answer("mup") == "does not transfer"
    assert "moves by at least 2 doublings" in steep.verdict[1]
    assert steep.verdict[1].endswith(
        "1 of 6 best rates is the highest of the grid, 2^-4 (width 256): better ones may lie "
        "beyond."
    )


def test_ends_of_one_grid_may_still_be_compared():
    """Naive rates move by four doublings or more; those of µP are inside, and do not."""

    def bottom(run):
        return -7 if run.parametrization == "mup" else {16: -6, 64: -8, 256: -10}[run.width]

    assert landscape(valley(bottom)).verdict[-1] == (
        "Over widths the best rate moves less under µP than without: 0 doublings, "
        "at least 4 doublings."
    )


def test_that_mup_is_not_lower_is_said(tmp_path):
    pytest.importorskip("matplotlib")

    def loss(run):
        return 1 + 0.1 * abs(run.rate + 7) + 0.02 * (run.parametrization == "mup")

    result = landscape(loss)
    caveat = (
        "µP is not lower here: each at its best rate, µP has the higher loss in 6 of 6 cells, "
        "by up to 0.020. Compare where the best rates lie, not the rows."
    )
    assert result.caveat == caveat
    assert str(result).endswith(caveat)
    root = ElementTree.parse(result.plot(tmp_path / "landscape.svg")).getroot()
    assert caveat in " ".join("".join(root.itertext()).split())
    assert landscape(valley(transferring)).caveat == ""


@given(
    st.lists(
        st.lists(st.floats(0.1, 9) | st.just(math.inf), min_size=2, max_size=2),
        min_size=1,
        max_size=8,
    )
)
def test_no_rate_beats_the_best(losses):
    rates = tuple(range(-9, -9 + len(losses)))
    accuracies = tuple((0.5, 0.5) for _ in losses)
    cell = LandscapeCell("mup", "dense", 64, rates, tuple(map(tuple, losses)), accuracies)
    sums = {rate: sum(pair) for rate, pair in zip(rates, losses, strict=True)}
    if cell.best is None:
        assert min(sums.values()) == math.inf
    else:
        assert sums[cell.best] <= min(sums.values()) * (1 + 1e-12)
        assert cell.loss_at(cell.best) == cell.best_loss
    if cell.interval:
        low, high = cell.interval
        assert low <= high
        assert {low, high} <= set(cell.best_by_seed)


@settings(max_examples=12)
@given(st.integers(-3, 3), st.integers(-3, 3))
def test_a_shift_of_the_valley_is_the_drift(wide, btt):
    def bottom(run):
        return -7 + wide * (run.width == 256) + btt * (run.structure == "btt") * (run.width == 16)

    result = landscape(valley(bottom))
    assert result.drift_over_structures("mup").doublings == abs(btt)
    assert result.drift_over_widths("mup").doublings == max(
        abs(wide), max(0, btt, wide) - min(0, btt, wide)
    )


def test_runs_are_all_combinations():
    config = LandscapeConfig(structures=("btt",), widths=(64, 16), naive_rates=(-9, -9), seeds=2)
    runs = [cell.config for cell in make_study(config).cells]
    assert len(runs) == len({run.id for run in runs}) == 2 * 2 + 2 * 9 * 2
    assert [run.width for run in runs[:4]] == [16, 16, 64, 64]
    assert {run.base_width for run in runs if run.parametrization == "mup"} == {16}
    assert {run.lr for run in runs if run.parametrization == "naive"} == {2**-9}
    # Landscapes of other widths, which have another base width, share the naive runs.
    wider = {cell.config.id for cell in make_study(replace(config, widths=(64, 256))).cells}
    shared = {run.id for run in runs if run.parametrization == "naive" and run.width == 64}
    assert shared == wider & {run.id for run in runs}


def test_the_device_of_all_runs():
    plain, on_gpu = (make_study(LandscapeConfig(**given)) for given in ({}, {"device": "cuda"}))
    assert {cell.config.device for cell in plain.cells} == {"cpu"}
    assert {cell.config.device for cell in on_gpu.cells} == {"cuda"}
    assert plain.cells[0].config.id != on_gpu.cells[0].config.id
    with pytest.raises(EinlinearError, match="device"):
        LandscapeConfig(device="gpu")


def test_dense_layers_are_normalised_like_others():
    plain, normed = (
        make_study(LandscapeConfig(structures=("dense",), weight_norm=is_normed)).cells[0].config
        for is_normed in (False, True)
    )
    assert plain.structure == "dense"
    assert normed.structure == "XA^1 YA^1"


def test_a_table_with_holes_is_refused():
    study = make_study(SMALL)
    records = [record(cell.config, 1.0) for cell in study.cells]
    with pytest.raises(EinlinearError, match="1 of 168 runs are missing"):
        make_landscape(SMALL, study, records[1:], "a table")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"structures": ()}, r"structures are \[\]"),
        ({"structures": ("btt", "btt")}, "each once"),
        ({"structures": ("bttt",)}, "no structure named 'bttt'"),
        ({"widths": ()}, r"widths are \[\]"),
        ({"widths": (64, 0)}, "input width is 0"),
        ({"rates": (-4, -9)}, r"rates are \[-4, -9\]"),
        ({"rates": (-99, -9)}, "an end of rates is -99"),
        ({"naive_rates": (0, -1)}, r"naive_rates are \[0, -1\]"),
        ({"unit_rates": (0, -1)}, r"unit_rates are \[0, -1\]"),
        ({"parametrizations": ()}, r"parametrizations are \[\]"),
        ({"parametrizations": ("mup", "mup")}, r"parametrizations are \['mup', 'mup'\]"),
        ({"parametrizations": ("mup", "normal")}, "a parametrization is 'normal'"),
        ({"seeds": 0}, "seeds is 0"),
        ({"steps": 9}, "steps is 9"),
        ({"batch": 0}, "batch is 0"),
        ({"pool": 0}, "pool is 0"),
        ({"activation": "tanh"}, "activation is 'tanh'"),
    ],
)
def test_bad_settings(options, message):
    with pytest.raises(EinlinearError, match=message):
        LandscapeConfig(**options)


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of what matplotlib imports
def test_the_picture(tmp_path):
    pytest.importorskip("matplotlib")
    result = landscape(
        lambda run: math.inf if run.rate == -4 else 1.2 + 0.1 * abs(run.rate - drifting(run))
    )
    svg = result.plot(tmp_path / "folder" / "landscape.svg").read_bytes()
    text = svg.decode()
    for word in ("dense", "btt", "naive", "µP", "learning rate", "width 16", "256", "a table"):
        assert word in text, word
    root = ElementTree.fromstring(svg)
    assert len([g for g in root.iter() if g.get("id", "").startswith("axes_")]) == 4
    # A line, a band and a dot for each of three widths in each of four panels.
    marked = [g.get("id", "") for g in root.iter()]
    assert sum(name.startswith("FillBetween") for name in marked) == 12
    assert result.plot(tmp_path / "again.svg").read_bytes() == svg
    assert result.plot(tmp_path / "landscape.png").read_bytes()[:4] == b"\x89PNG"
    with pytest.raises(EinlinearError, match="suffix of the file"):
        result.plot(tmp_path / "landscape.xyz")
    landscape(lambda run: math.inf).plot(tmp_path / "nothing.svg")


def test_pictures_without_matplotlib(monkeypatch, tmp_path):
    monkeypatch.setitem(__import__("sys").modules, "matplotlib.figure", None)
    with pytest.raises(EinlinearError, match="need matplotlib"):
        landscape(valley(transferring)).plot(tmp_path / "landscape.svg")
