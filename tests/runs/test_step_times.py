"""Times of steps, and the file that holds them."""

import json
from dataclasses import replace
from tempfile import TemporaryDirectory

import pytest
from hypothesis import given
from hypothesis import strategies as st

import einlinear as el
from einlinear.files.seals import sealed, unsealed
from einlinear.runs.step_times import ModelTime, StepTimes, read_step_times, trained_threads
from kit.report_records import DENSE, make_record
from kit.runs import tiny
from kit.times import times_of

positive = st.floats(1e-9, 1e9)
texts = st.text(st.characters(codec="utf-8"))
machines = st.dictionaries(texts, st.none() | st.booleans() | st.integers(0, 2**40) | texts)


@st.composite
def rows(draw, key):
    low, middle, high = sorted(draw(st.tuples(positive, positive, positive)))
    count = st.integers(0, 2**40)
    return ModelTime(key, draw(texts), draw(count), middle, low, high, draw(count), draw(texts))


@st.composite
def step_times(draw):
    keys = draw(st.lists(texts, min_size=1, max_size=4, unique=True))
    found = tuple(draw(rows(key)) for key in keys)
    return StepTimes(found, draw(texts), draw(st.integers(1, 99)), draw(machines))


@given(step_times())
def test_a_file_of_times_gives_the_same_times(times):
    with TemporaryDirectory() as folder:
        times.save(f"{folder}/steps.json")
        read = read_step_times(f"{folder}/steps.json")
    assert read == times
    assert read.table().count("\n") >= len(times.rows)


def test_runs_find_the_time_of_their_model():
    times = times_of(tiny(), tiny(structure="btt"))
    assert times.seconds_of(tiny(seed=5, lr=0.3, steps=7)) == 0.5
    assert times.find(tiny(structure="monarch")).label == "btt"
    assert times.find(tiny(optimizer="muon")) is None
    other = tiny(optimizer="muon")
    with pytest.raises(
        el.EinlinearError, match=f"(?s){other.id}: dense, width 16, muon.*einlinear time"
    ):
        times.seconds_of(other)


def test_the_table_shows_milliseconds_and_intervals():
    text = str(times_of(tiny()))
    assert "500" in text
    assert "400 - 600" in text
    assert "128 tokens" in text
    assert "2026-01-02 in 9 rounds" in text
    assert "1 thread," in text


def test_few_rounds_have_no_interval():
    times = times_of(tiny())
    assert "400 - 600" in replace(times, rounds=5).table()
    assert "400" not in replace(times, rounds=4).table()
    assert "–" in replace(times, rounds=4).table()
    assert "in 1 round (" in replace(times, rounds=1).origin


def test_the_processor_is_named_by_its_model_if_it_is_known():
    times = times_of(tiny())
    for machine, words in [
        ({"processor": "x86_64"}, "(x86_64, "),
        ({"processor": "x86_64", "processor_model": None}, "(x86_64, "),
        ({"processor": "x86_64", "processor_model": "EPYC 1"}, "(EPYC 1, "),
    ]:
        assert words in replace(times, machine=machine).origin


def test_the_threads_of_records():
    record = make_record(DENSE, 32, 0)
    given = [1, 2, 2, None, "two", 0, True]
    records = [replace(record, environment={"threads": number}) for number in given]
    assert trained_threads([*records, replace(record, environment={})]) == (1, 2)


@pytest.mark.parametrize(
    ("low", "middle", "high"),
    [(0.0, 1.0, 2.0), (1.0, 0.5, 2.0), (1.0, 3.0, 2.0), (1, 1, float("inf"))],
)
def test_times_outside_their_interval_are_refused(low, middle, high):
    with pytest.raises(el.EinlinearError, match="within its interval"):
        StepTimes((ModelTime("a", "dense", 8, middle, low, high, 1, "token"),), "", 1, {})


def test_two_times_of_a_model_are_refused():
    with pytest.raises(el.EinlinearError, match="2 times have 1 different keys"):
        times_of(tiny(), tiny(seed=1))
    with pytest.raises(el.EinlinearError, match="0 times"):
        times_of()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"schema": 2}, "its schema is 2, not 1"),
        ({"schema": True}, "its schema is True"),
        ({"rounds": "nine"}, "rounds is 'nine'"),
        ({"more": 1}, "it has the fields"),
        ({"rows": []}, "0 times"),
    ],
)
def test_what_no_file_of_times_is(tmp_path, change, message):
    path = tmp_path / "steps.json"
    times_of(tiny()).save(path)
    path.write_bytes(sealed(unsealed(path.read_bytes()) | change))
    with pytest.raises(el.EinlinearError, match=message) as caught:
        read_step_times(path)
    assert "einlinear time" in caught.value.fix


def test_changed_and_missing_files_are_refused(tmp_path):
    path = tmp_path / "steps.json"
    times_of(tiny()).save(path)
    values = json.loads(path.read_text())
    values["rows"][0]["seconds"] = 0.45
    path.write_text(json.dumps(values))
    with pytest.raises(el.EinlinearError, match="its checksum is wrong"):
        read_step_times(path)
    with pytest.raises(el.EinlinearError, match=r"cannot read .*none.json"):
        read_step_times(tmp_path / "none.json")
    with pytest.raises(el.EinlinearError, match="times is given as 3"):
        read_step_times(3)
