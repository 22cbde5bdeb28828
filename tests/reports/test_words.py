"""The conclusions of reports on records whose laws are known."""

import re
from dataclasses import replace

import numpy as np
import pytest

import einlinear as el
from einlinear.reports.analyse import ReportSettings, analyse, observe
from einlinear.reports.gather import gather
from einlinear.reports.words import conclude
from kit.report_records import (
    DENSE,
    KINDS,
    UNITS,
    WIDTHS,
    Kind,
    make_record,
    write_bent,
    write_diverged,
    write_record,
    write_runs,
    write_unfinished,
)

QUICK = ReportSettings(resamples=100)


def said(directory, settings=QUICK):
    """All sentences about a directory."""
    return conclude(analyse(gather(directory), settings))


def test_slower_in_seconds_though_cheaper(tmp_path):
    kinds = (DENSE, Kind("btt", 2.0, slowness=6.0))
    write_runs(tmp_path, kinds, WIDTHS, 2)
    (text, *_) = said(tmp_path).results
    assert text.startswith("`btt`: `dense` needs")
    assert "in seconds, however, it needs more time" in text


def test_the_reference_may_be_the_best(tmp_path):
    write_runs(tmp_path, (DENSE, KINDS[3]), WIDTHS, 2)
    assert said(tmp_path).headline == "`dense` needs the least compute to reach a given loss."
    swapped = said(tmp_path, replace(QUICK, reference="low_rank"))
    assert swapped.headline.startswith(
        "`dense` needs the least compute to reach a given loss: `low_rank`"
    )


def test_structures_that_are_alike(tmp_path):
    write_runs(tmp_path, (DENSE, KINDS[2]), WIDTHS, 2)
    headline = said(tmp_path).headline
    assert headline.startswith("No structure clearly needs less compute than `dense`:")
    assert "`monarch` cannot be distinguished from it" in headline


def test_a_cap_on_steps_is_noticed(tmp_path):
    """Every run stops at the same step: the trap in which multipliers look too large."""
    write_runs(tmp_path / "capped", (DENSE, KINDS[1]), WIDTHS, 1, steps=20)
    capped = said(tmp_path / "capped")
    (caution,) = [text for text in capped.cautions if "ends of runs" in text]
    assert "`dense` (7 of 7)" in caution
    assert "may be far off" in capped.headline
    write_runs(tmp_path / "long", (DENSE, KINDS[1]), WIDTHS, 1)
    long = said(tmp_path / "long")
    assert not [text for text in long.cautions if "ends of runs" in text]
    assert "far off" not in long.headline


def test_what_few_runs_cannot_say(tmp_path):
    write_runs(tmp_path, (DENSE, KINDS[1]), (64, 80), 1, overtime=1.2, points=6)
    cautions = " ".join(said(tmp_path).cautions)
    assert "Each setting has only one seed" in cautions
    assert "few model sizes of" in cautions
    write_runs(tmp_path / "long", (DENSE, KINDS[1]), (64, 96, 128, 192), 1)
    headline = said(tmp_path / "long").headline
    assert "However, there are few sizes and each setting has only one seed, so inter" in headline


def test_a_limit_that_the_data_do_not_show(tmp_path):
    random = np.random.default_rng(0)
    table = tmp_path / "runs.csv"
    compute = np.geomspace(1e9, 3e10, 12)
    loss = (1 + 50 * compute**-0.2) * np.exp(0.02 * random.normal(size=12))
    rows = [f"r{k},{c},{y}" for k, (c, y) in enumerate(zip(compute, loss, strict=True))]
    table.write_text("\n".join(["run,compute,loss", *rows]), encoding="utf-8")
    assert "The data do not determine L∞" in " ".join(said(table).cautions)


def test_less_than_a_decade(tmp_path):
    table = tmp_path / "runs.csv"
    compute = np.geomspace(1e9, 4e9, 8)
    rows = [f"r{k},{c},{1 + 50 * c**-0.2},dense" for k, c in enumerate(compute)]
    table.write_text("\n".join(["run,compute,loss,structure", *rows]), encoding="utf-8")
    cautions = " ".join(said(table).cautions)
    assert "less than one decade" in cautions
    assert "Each run has only one point" in cautions


@pytest.mark.parametrize("seeds", [1, 3])
def test_runs_of_one_name_in_a_table(tmp_path, seeds):
    """Of other structures or with other seeds they are other runs, in reports as in fits."""
    random = np.random.default_rng(0)
    table = tmp_path / "runs.csv"
    rows = [
        f"r{k},{c},{(1 + 50 * (gain * c) ** -0.2) * np.exp(0.001 * random.normal())},{name},{seed}"
        for name, gain in (("dense", 1), ("btt", 2))
        for k, c in enumerate(np.geomspace(1e8, 1e12, 12))
        for seed in range(seeds)
    ]
    table.write_text("\n".join(["run,compute,loss,structure,seed", *rows]), encoding="utf-8")
    runs = gather(table).runs
    assert len({run.id for run in runs}) == len(runs) == 24 * seeds
    assert runs[0].id == ("r0 dense" if seeds == 1 else "r0 dense seed 0")
    words = said(table)
    assert words.headline.startswith("`btt` needs the least compute")
    assert ("one seed" in " ".join(words.cautions)) == (seeds == 1)


def test_losses_that_the_reference_does_not_reach(tmp_path):
    """Beyond the limit of the reference there is no multiplier; before it, it is extrapolated."""
    table = tmp_path / "runs.csv"
    rows = [
        f"{name}{k},{c},{linf + 50 * c**-0.2},{name}"
        for name, linf in (("dense", 3.0), ("btt", 1.0))
        for k, c in enumerate(np.geomspace(1e8, 1e12, 24))
    ]
    table.write_text("\n".join(["run,compute,loss,structure", *rows]), encoding="utf-8")
    words = said(table, replace(QUICK, linf="fitted"))
    assert words.results[0] == "`btt`: by its law, `dense` never reaches the same losses."
    assert words.headline == (
        "`btt` reaches losses that `dense`, by its law, never reaches with any amount of compute. "
        "However, each setting has only one seed, so intervals are unreliable; see below."
    )
    words = said(table)
    assert "extrapolated: their losses do not overlap" in words.headline
    assert "ended early" not in words.headline  # which single points do not show


def test_a_given_linf_is_said(tmp_path):
    write_runs(tmp_path, (DENSE,), WIDTHS, 1)
    assert "L∞ was set to 0.5" in " ".join(said(tmp_path, replace(QUICK, linf=0.5)).cautions)


def test_no_dense_run(tmp_path):
    write_runs(tmp_path, KINDS[1:3], WIDTHS, 1)
    cautions = " ".join(said(tmp_path).cautions)
    assert "no dense run, so the reference is `btt(rank=2)`" in cautions or "`monarch`" in cautions
    with pytest.raises(el.EinlinearError, match="'dense', which was not run"):
        said(tmp_path, replace(QUICK, reference="dense"))


def test_tasks_are_not_mixed(tmp_path):
    write_runs(tmp_path, (DENSE,), WIDTHS, 1)
    other = make_record(Kind("dense", settings={"task": "pixels"}), 64, 0)
    write_record(tmp_path / "runs" / other.id, other)
    found = analyse(gather(tmp_path), QUICK)
    assert found.task == "text"
    assert other.id not in set(found.main.data.run)
    assert any("1 run of the task pixels" in text for text in conclude(found).cautions)
    assert analyse(gather(tmp_path), replace(QUICK, task="pixels")).runs[0].id == other.id
    with pytest.raises(el.EinlinearError, match="no runs of the task 'cifar'"):
        analyse(gather(tmp_path), replace(QUICK, task="cifar"))


def test_data_are_not_mixed(tmp_path):
    write_runs(tmp_path, (DENSE,), (32, 64), 1)
    other = make_record(DENSE, 128, 0)
    other = replace(other, environment={**other.environment, "data": "other"})
    write_record(tmp_path / "runs" / other.id, other)
    waiting = write_unfinished(tmp_path).name
    found = analyse(gather(tmp_path), QUICK)
    assert other.id not in set(found.main.data.run)
    assert {run.id for run in gather(tmp_path).runs} - {run.id for run in found.runs} == {other.id}
    assert waiting in {run.id for run in found.runs}
    assert any(
        text.startswith("Not included: 1 run on other data") for text in conclude(found).cautions
    )


@pytest.mark.parametrize(
    ("name", "noun"),
    [("device", "devices"), ("processor", "processors"), ("threads", "numbers of threads")],
)
def test_different_machines_are_mentioned(tmp_path, name, noun):
    first, second = (make_record(DENSE, width, 0) for width in (32, 64))
    write_record(tmp_path / "a", first)
    write_record(tmp_path / "b", second)
    assert "seconds may not be comparable" not in " ".join(said(tmp_path).cautions)
    write_record(tmp_path / "b", replace(second, environment={**second.environment, name: "new"}))
    assert f"used different {noun}, so their seconds" in " ".join(said(tmp_path).cautions)


def test_what_is_spent_in_the_warm_up_is_no_frontier(tmp_path):
    """While the rate grows losses hardly fall: laws must not follow that."""
    record = make_record(DENSE, 64, 0, warmup=100)
    early = [p.step for p in record.curve if p.step < 100]
    assert len(early) > 3
    write_record(tmp_path / "a", record)
    (run,) = gather(tmp_path).runs
    assert [p.step for p in run.curve if not run.counts(p)] == early
    data = observe([run], "units")
    assert min(data.compute) >= 100 * UNITS
    assert len(data) == len(record.curve) - len(early)
    short = make_record(DENSE, 64, 0, warmup=100, steps=40)  # never warm: its end still counts
    write_record(tmp_path / "b", short)
    assert len(el.Observations.from_records([short])) == 1


def test_a_law_that_misses_its_points_is_said(tmp_path):
    """A frontier with a step in it has a law, and intervals, but does not follow it."""
    compute = np.geomspace(1e8, 1e12, 24)
    for size, is_said in ((0.0, False), (0.25, True)):
        loss = (1 + 50 * compute**-0.2) * np.exp(-size * (compute > 1e10))
        rows = [f"r{k},{c},{y}" for k, (c, y) in enumerate(zip(compute, loss, strict=True))]
        table = tmp_path / "runs.csv"
        table.write_text("\n".join(["run,compute,loss", *rows]), encoding="utf-8")
        assert any("Laws miss" in text for text in said(table).cautions) is is_said


def test_a_multiplier_that_changes_with_the_loss_is_said(tmp_path):
    """Laws that cross: one number hides that the other structure is better later."""
    compute = np.geomspace(1e8, 1e12, 24)
    laws = {"dense": 50 * compute**-0.20, "low_rank": 16 * compute**-0.15}
    rows = [
        f"{name}{k},{c},{1 + y},{name}"
        for name, losses in laws.items()
        for k, (c, y) in enumerate(zip(compute, losses, strict=True))
    ]
    table = tmp_path / "runs.csv"
    table.write_text("\n".join(["run,compute,loss,structure", *rows]), encoding="utf-8")
    (text,) = [text for text in said(table).results if "the multiplier falls" in text]
    first, high, last, low = map(
        float, re.search(r"falls from (.*) at loss (.*) to (.*) at loss (.*)\.$", text).groups()
    )

    def truth(loss):
        return ((loss - 1) / 50) ** -5 / ((loss - 1) / 16) ** (-1 / 0.15)

    assert high > low
    assert first == pytest.approx(truth(high), rel=0.1)
    assert last == pytest.approx(truth(low), rel=0.1)


def test_few_sizes_fall_back_to_the_whole_frontier(tmp_path):
    write_runs(tmp_path, (DENSE,), WIDTHS, 1)
    write_runs(tmp_path, (KINDS[3],), (64, 128), 1)
    laws = analyse(gather(tmp_path), QUICK).main.laws
    assert laws["dense"].points == "inner"
    assert laws["dense"].note == ""
    assert laws["low_rank"].points == "frontier"
    assert "few sizes" in laws["low_rank"].note
    assert laws["low_rank"].law.linf == laws["dense"].law.linf


def test_runs_that_diverge_count_until_then(tmp_path):
    bad = write_diverged(tmp_path)
    data = observe(gather(tmp_path).runs, "flops")
    assert len(data) == sum(p.loss is not None and p.step >= bad.config.warmup for p in bad.curve)


def test_a_limit_on_its_bound_and_a_bend_are_said(tmp_path):
    words = said(write_bent(tmp_path / "runs.csv"))
    assert words.headline == (
        "`dense` needs the least compute to reach a given loss. However, the points do not follow "
        "the laws, so this may be far off; see below."
    )
    (bound,) = [text for text in words.cautions if "bound" in text]
    assert bound == (
        "The fit puts L∞ of `dense` and `low_rank` at its upper bound, the lowest observed loss "
        "(2.1640): the points flatten more than a power law does, or that loss was luck. Neither "
        "L∞ nor the exponent is measured."
    )
    (bend,) = [text for text in words.cautions if "both ends" in text]
    assert re.search(
        r"noise explains: `low_rank` \(\+\d\.\d %, -\d\.\d %, \+\d\.\d %\) in the first, middle",
        bend,
    )


def write_curves(path, laws, noise=0.003, seeds=3):
    """Eight sizes of each structure; its law is where sizes are the best for their compute."""
    random = np.random.default_rng(0)
    rows = ["run,compute,loss,structure,seed,group,size"]
    for name, law in laws.items():
        for size in range(8):
            for seed in range(seeds):
                off = np.exp(noise * random.normal())
                for place in np.linspace(-4, 0, 12):
                    compute = 1e12 * 4**size * np.exp(place)
                    loss = law(compute / 1e12) * (1 + 0.02 * (place + 1.5) ** 2) * off
                    run = f"{name}-{size}-{seed}"
                    rows.append(f"{run},{compute},{loss},{name},{seed},{name}-{size},{size}")
    path.write_text("\n".join(rows), encoding="utf-8")
    return path


def test_exponents_that_only_a_shared_limit_tells_apart_are_not_said(tmp_path):
    """Both are 0.25; the limits differ."""
    table = write_curves(
        tmp_path / "runs.csv",
        {"dense": lambda c: 2.0 + 3 * c**-0.25, "btt": lambda c: 1.86 + 3.1 * c**-0.25},
    )
    found = analyse(gather(table), QUICK)
    dense, btt = (found.main.laws[name].law for name in ("dense", "btt"))
    assert btt.a_interval[0] > dense.a_interval[1]
    sentences = " ".join(conclude(found).results)
    assert (
        "is unclear: it does with a shared L∞, but not if each structure has its own" in sentences
    )
    assert "The loss of" not in sentences


def test_exponents_that_differ_are_said(tmp_path):
    table = write_curves(
        tmp_path / "runs.csv",
        {"dense": lambda c: 2.0 + 3 * c**-0.2, "btt": lambda c: 2.0 + 3 * c**-0.3},
    )
    (text,) = [text for text in said(table).results if "exponent" in text]
    assert text.startswith("With a shared L∞, the loss of `btt` falls faster with compute than")


def test_structures_that_cross(tmp_path):
    """At 100 times the first compute, where both have a loss of 2.6."""
    table = write_curves(
        tmp_path / "runs.csv",
        {"dense": lambda c: 2.0 + 2.4 * c**-0.3, "btt": lambda c: 2.0 + 1.2 * c**-0.15},
    )
    words = said(table)
    loss = float(
        re.search(r"`btt` needs less above loss ([\d.]+) and more below it", words.headline)[1]
    )
    assert loss == pytest.approx(2.6, abs=0.05)
    assert words.results[0].startswith(f"`btt` needs less above loss {loss}")
    assert "distinguished" not in words.headline + words.results[0]


def test_losses_that_stay_above_a_law_are_said(tmp_path):
    law = {"dense": lambda c: max(2.2, 2.0 + 3 * c**-0.6)}
    table = write_curves(tmp_path / "runs.csv", law | {"btt": lambda c: law["dense"](2 * c)})
    words = said(table)
    (text,) = [text for text in words.cautions if "stay above the law" in text]
    assert text.startswith("Beyond the fitted points, losses stay above the law: those of `dense`")
    assert "However, the points do not follow the laws" in words.headline
    assert "The exponents cannot be compared" in " ".join(words.results)


def test_a_stray_run_is_named(tmp_path):
    table = write_curves(tmp_path / "runs.csv", {"dense": lambda c: 2.0 + 3 * c**-0.25})
    with table.open("a") as file:
        file.write("\nodd,1e15,1.2,dense,0,odd,9")
    (text,) = [text for text in said(table).cautions if "check it" in text]
    assert text.startswith("Run `odd` is far below the law of `dense`")


def test_files_that_cannot_be_read_are_named(tmp_path):
    records = write_runs(tmp_path, (DENSE,), (32, 48, 64, 96), 1, points=6)
    for record in records:
        (tmp_path / "runs" / record.id / "record.json").write_text("{", encoding="utf-8")
    words = said(tmp_path)
    assert words.headline == "No run could be read, so there are no conclusions; see below."
    assert sum("record.json`: " in text for text in words.cautions) == 3
    assert "1 more file could not be read; the page lists all of them." in words.cautions
    assert "metrics.jsonl" not in str(gather(tmp_path).problems)


def test_a_limit_above_losses_is_refused_before_anything_is_written(tmp_path):
    write_runs(tmp_path, (DENSE,), (32, 64), 1, points=6)
    with pytest.raises(el.EinlinearError, match="linf is 5, the lowest loss is"):
        el.report(tmp_path, linf=5.0)
    assert not (tmp_path / "report").exists()


def test_losses_below_a_law_are_said(tmp_path):
    """Those of a size that does not count in the fit, because it is at the end of the frontier."""
    compute = np.geomspace(1e8, 1e12, 16)
    loss = 1 + 50 * compute**-0.2
    loss[-1] *= 0.9
    rows = [f"r{k},{c},{y},{k}" for k, (c, y) in enumerate(zip(compute, loss, strict=True))]
    table = tmp_path / "runs.csv"
    rows.append(f"again,{compute[-1]},{loss[-1]},15")
    table.write_text("\n".join(["run,compute,loss,group", *rows]), encoding="utf-8")
    (text,) = [text for text in said(table).cautions if "below the law" in text]
    assert text.startswith("Some losses are below the law: those of `all` by up to 10 %.")
