"""Odd records do not end a report: they are named, and the rest is shown."""

import json
from copy import deepcopy
from dataclasses import asdict
from math import inf, nan

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

import einlinear as el
from einlinear.files.seals import sealed
from einlinear.reports.analyse import ReportSettings, analyse
from einlinear.reports.figures.figures import make_figures
from einlinear.reports.gather import gather
from einlinear.reports.words import conclude
from kit.report_records import DENSE, KINDS, make_record, page_of, write_record, write_runs

QUICK = ReportSettings(resamples=0)
NESTED = [[]]
for _ in range(300):
    NESTED = [NESTED]
ODD = [
    *(10**400, 10**120, 2**70, -1, 0, 1, True, None, "", "x", "=1+1", "9" * 500, [], {}, [1, "a"]),
    *({"a": 1}, inf, -inf, nan, 5e-324, 1e-200, 1e-90, 1e90, 1e308, -1.5, 0.0, NESTED),
]


def paths(value, here=()):
    """All places in a value of JSON; of long lists the first, the second and the last."""
    if here:
        yield here
    if isinstance(value, dict | list):
        for key, inner in value.items() if isinstance(value, dict) else enumerate(value):
            if isinstance(value, dict) or key in (0, 1, len(value) - 1):
                yield from paths(inner, (*here, key))


def changed(values, path, new):
    """The same with another value at a place."""
    values = deepcopy(values)
    inner = values
    for key in path[:-1]:
        inner = inner[key]
    inner[path[-1]] = new
    return values


RECORDS = {
    name: json.loads(json.dumps(make_record(kind, 64, 5, points=4).as_dict()))
    for name, kind in (("plain", KINDS[1]), ("experts", KINDS[4]))
}
PLAIN = RECORDS["plain"]
places = st.one_of(
    *(
        st.tuples(st.just(name), st.sampled_from(list(paths(values))))
        for name, values in RECORDS.items()
    )
)


def write_odd(folder, values):
    """A run of which a record was written with these values, and so was its config."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "record.json").write_bytes(sealed(values))
    (folder / "config.json").write_text(json.dumps(values.get("config")), encoding="utf-8")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("runs")
    write_runs(path, (DENSE,), (32, 64, 128), 1, points=6)
    return path


@settings(max_examples=5, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(places, st.sampled_from(ODD))
@example(("plain", ("config", "lr")), 10**400)
@example(("plain", ("curve", 1, "step")), {"a": 1})
@example(("plain", ("config", "width")), inf)
@example(("experts", ("curve", 1, "routing")), [])
@example(("experts", ("curve", 1, "routing", 0, "load")), [])
@example(("plain", ("environment",)), NESTED)
@example(("plain", ("curve",)), NESTED)
def test_a_changed_record_does_not_end_a_report(folder, place, value):
    name, path = place
    write_odd(folder / "runs" / "odd", changed(RECORDS[name], path, value))
    found = analyse(gather(folder), QUICK)
    assert {run.structure for run in found.runs if run.has_result} >= {"dense"}
    conclude(found)
    make_figures(found)


@settings(max_examples=5, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(places, st.sampled_from(ODD))
def test_its_page_is_made(folder, place, value):
    name, path = place
    write_odd(folder / "runs" / "odd", changed(RECORDS[name], path, value))
    assert "<h1>" in page_of(folder)


def test_odd_records_are_named_and_the_rest_is_shown(tmp_path):
    good = write_runs(tmp_path, KINDS[:2], (32, 64, 128), 1, points=6)
    losses = [point | {"loss": 5e-324} for point in PLAIN["curve"]]
    odd = {
        "lr": changed(PLAIN, ("config", "lr"), 10**400),
        "step": changed(PLAIN, ("curve", 1, "step"), {"a": 1}),
        "width": changed(PLAIN, ("config", "width"), inf),
        "loss": changed(PLAIN, ("curve",), losses),
        "units": changed(PLAIN, ("curve", 1, "units"), 10**400),
        "seed": changed(PLAIN, ("config", "seed"), 2**70),
    }
    for name, values in odd.items():
        write_odd(tmp_path / "runs" / name, values)
    page = page_of(tmp_path)
    gathered = gather(tmp_path)
    assert {path.split("/")[-2] for path, _ in gathered.problems} == set(odd)
    for path, _ in gathered.problems:
        assert path in page
    reasons = {path.split("/")[-2]: why for path, why in gathered.problems if "record" in path}
    assert "its loss is 5e-324, not 0, nor 1e-100 to 1e+100" in reasons["loss"]
    assert max(map(len, reasons.values())) < 600
    shown = {run.id: run.state for run in gathered.runs if run.has_result}
    assert shown == {record.id: "finished" for record in good}
    states = {run.state for run in gathered.runs if run.id == PLAIN["id"]}
    assert states == {"unreadable"}


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of what matplotlib imports
def test_extreme_but_true_numbers_are_shown(tmp_path):
    """A loss that is enormous, or 0, and steps beyond all use are numbers like others."""
    pytest.importorskip("matplotlib")
    write_runs(tmp_path, KINDS[:2], (32, 64, 128), 1, points=6)
    for name, loss in (("zero", 0.0), ("small", 1e-99), ("large", 1e99)):
        record = make_record(KINDS[1], 64, 0, points=6, lr=0.5 + len(name), steps=10**12)
        curve = [asdict(point) | {"loss": loss} for point in record.curve]
        record = el.RunRecord.from_dict(record.as_dict() | {"curve": curve})
        write_record(tmp_path / "runs" / name, record)
    gathered = gather(tmp_path)
    assert gathered.problems == ()
    assert len(gathered.runs) == 9
    el.report(tmp_path, resamples=20)


def test_extreme_points_of_a_table_are_counted_and_left_out(tmp_path):
    rows = [f"r{k},{10**k},{1 + 2.0**-k}" for k in range(1, 7)]
    table = tmp_path / "runs.csv"
    table.write_text("\n".join(["run,compute,loss", *rows, "a,1e7,5e-324", "b,1e300,2"]))
    gathered = gather(table)
    assert gathered.problems == (
        (
            str(table),
            "left out 2 points with a compute or loss outside 1e-100 to 1e+100, the first of "
            "run 'a' (compute 1e+07, loss 4.94066e-324)",
        ),
    )
    assert len(analyse(gathered, QUICK).main.data) == 6
