"""Packed records: what a file keeps, and what is noticed when it has changed."""

import json
import sys
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from einlinear import EinlinearError, RunConfig, RunRecord
from einlinear.files.seals import seal_of
from einlinear.runs.packed import (
    absolute_paths,
    check_replaceable,
    is_packed,
    packed_bytes,
    read_packed,
    write_packed,
)
from einlinear.runs.record import Counts, LayerRouting, NewerError, Point
from kit.report_records import DENSE, KINDS, make_record

WHOLE = st.integers(0, 2**63)
NUMBERS = st.floats(0, sys.float_info.max)
LOSSES = st.none() | NUMBERS


@st.composite
def configs(draw):
    """Configs of all tasks and presets, with settings that earlier versions did not have."""
    task = draw(st.sampled_from(["text", "pixels", "regression", "cifar"]))
    more = {
        "factor_init": st.sampled_from(["spectral", "fan_in"]),
        "parametrization": st.sampled_from(["mup", "naive", "unit"]),
        "optimizer": st.sampled_from(["adamw", "muon"]),
        "save_model": st.booleans(),
        "expert_gain": st.booleans(),
        "weight_norm": st.booleans(),
        "num_experts": st.sampled_from([0, 4]),
        "lr": st.floats(1e-9, 1e3),
        "eval_spacing": st.sampled_from(["geometric", "even", "fixed"]),
        "data": st.sampled_from(["a b", "ü.txt", "/somewhere/texts"]),
        "seed": st.integers(0, 3),
    }
    chosen = draw(st.sets(st.sampled_from(sorted(more))))
    return RunConfig(
        task=task,
        preset=draw(st.sampled_from(["cpu", "paper", "release"])),
        structure=draw(st.sampled_from(["dense", "btt(rank=2)", "XA^1 YB^1 AB:4"])),
        width=64 * draw(st.integers(1, 3)),
        **{name: draw(more[name]) for name in sorted(chosen)},
    )


@st.composite
def run_records(draw):
    """Records with numbers of any size, of which some follow from others."""
    counts = Counts(*(draw(WHOLE) for _ in range(6)))
    per_step, follows = draw(WHOLE), draw(st.booleans())
    curve = []
    for step in draw(st.lists(st.integers(0, 10**6), min_size=1, max_size=5)):
        units = step * per_step if follows else draw(WHOLE)
        macs = units * counts.macs if draw(st.booleans()) else draw(WHOLE)
        times = [draw(NUMBERS) for _ in range(2)]
        loss, train_loss = draw(LOSSES), draw(LOSSES)
        curve.append(Point(step, units, macs, *times, loss, train_loss, draw(NUMBERS)))
    return RunRecord(
        config=draw(configs()),
        status="diverged" if curve[-1].loss is None else "finished",
        steps_done=draw(WHOLE),
        curve=tuple(curve),
        unit=draw(st.sampled_from(["token", "image"])),
        counts=counts,
        peak_bytes=draw(WHOLE),
        environment=draw(st.sampled_from([{}, {"torch": "2"}, {"torch": "3", "threads": 1}])),
        train_loss=draw(LOSSES),
        accuracy=draw(st.none() | st.floats(0, 1)),
    )


def some_records(**more):
    return [make_record(kind, width, 0, **more) for kind in KINDS[:2] for width in (32, 64)]


def near(value, digits):
    """A number up to rounding to significant digits; one half of the last, and a float's error."""
    return pytest.approx(value, rel=10.0 ** (1 - digits), abs=1e-307)


def check_same(read, record):
    """Raise unless a record is what was packed, up to rounding."""
    assert read.id == record.id
    bare = {"curve": (), "train_loss": None, "accuracy": None}
    assert replace(read, **bare) == replace(record, **bare)
    assert read.train_loss == near(record.train_loss, 8)
    assert read.accuracy == near(record.accuracy, 8)
    for left, right in zip(read.curve, record.curve, strict=True):
        assert (left.step, left.units, left.macs) == (right.step, right.units, right.macs)
        assert left.loss == near(right.loss, 8)
        assert left.train_loss == near(right.train_loss, 8)
        assert left.rate == near(right.rate, 6)
        assert left.seconds == near(right.seconds, 4)
        assert left.data_seconds == near(right.data_seconds, 4)


@pytest.mark.slow
@settings(max_examples=60, deadline=None)
@given(st.lists(run_records(), min_size=1, max_size=6, unique_by=lambda record: record.id))
def test_a_file_keeps_records_up_to_rounding(tmp_path_factory, records):
    path = tmp_path_factory.getbasetemp() / "law.jsonl"
    assert write_packed(records, path) == path.stat().st_size
    found = {record.id: record for record in read_packed(path)}
    assert len(found) == len(records)
    for record in records:
        check_same(found[record.id], record)
    assert packed_bytes(found.values()) == packed_bytes(reversed(records))


def test_a_check_that_can_fail():
    record = make_record(DENSE, 32, 0)
    last = replace(record.curve[-1], loss=record.curve[-1].loss * (1 + 1e-6))
    with pytest.raises(AssertionError):
        check_same(replace(record, curve=(*record.curve[:-1], last)), record)


def test_routing_is_left_out(tmp_path):
    [record] = [make_record(KINDS[4], 64, 0, points=3)]
    assert isinstance(record.curve[-1].routing[0], LayerRouting)
    write_packed([record], tmp_path / "a.jsonl")
    [read] = read_packed(tmp_path / "a.jsonl")
    assert [point.routing for point in read.curve] == [()] * len(record.curve)


def test_a_run_takes_about_a_kilobyte():
    records = [make_record(kind, 64, seed) for kind in KINDS for seed in range(20)]
    assert len(packed_bytes(records)) / len(records) < 1500


def test_a_new_run_changes_two_lines():
    """Its own, and the number of runs; even if it has settings and a machine of its own."""
    records = some_records()
    more = replace(make_record(KINDS[3], 96, 1, weight_decay=0.5), environment={"torch": "3"})
    old, new = (packed_bytes(given).splitlines() for given in (records, [*records, more]))
    assert len(new) == len(old) + 1
    assert len(set(new) - set(old)) == 2


def test_damage_names_the_file_and_the_line(tmp_path):
    path = tmp_path / "records.jsonl"
    write_packed(some_records(), path)
    lines = path.read_bytes().splitlines(keepends=True)
    cases = [
        ([lines[0], lines[1].replace(b'"steps_done":', b'"steps_done":1'), *lines[2:]], 2),
        ([lines[0].replace(b'"runs":4', b'"runs":5'), *lines[1:]], 1),
        ([*lines[:3], lines[3][:50]], 4),
        ([*lines, lines[2]], 6),
        ([*lines[:3], b"\xff\n", *lines[3:]], 4),
        ([*lines[:3], b"[]\n", *lines[3:]], 4),
    ]
    for damaged, line in cases:
        path.write_bytes(b"".join(damaged))
        with pytest.raises(EinlinearError, match=f"cannot read .*records.jsonl, line {line}: "):
            read_packed(path)
    path.write_bytes(b"".join(lines[:-1]))
    with pytest.raises(EinlinearError, match="line 4: the file ends after 3 of 4 runs"):
        read_packed(path)
    path.write_bytes(b"\r\n".join([lines[0].strip(), b"", *map(bytes.strip, lines[:0:-1])]))
    assert packed_bytes(read_packed(path)) == b"".join(lines)  # order and line ends do not matter


def test_a_file_with_a_byte_order_mark_is_read_and_a_cut_line_is_named(tmp_path):
    path = tmp_path / "records.jsonl"
    data = packed_bytes(some_records())
    path.write_bytes(b"\xef\xbb\xbf" + data)
    assert packed_bytes(read_packed(path)) == data
    for number, cut in ((5, data[:-40]), (1, data[:300])):
        path.write_bytes(cut)
        with pytest.raises(EinlinearError, match=f"line {number}: the line is cut off"):
            read_packed(path)
    path.write_bytes(data.rstrip(b"\n"))  # an editor did this, and nothing is missing
    assert packed_bytes(read_packed(path)) == data


def test_a_damaged_header_is_that_of_packed_records(tmp_path):
    path = tmp_path / "records.jsonl"
    header, runs = packed_bytes(some_records()).split(b"\n", 1)
    for damaged in (
        header.replace(b'"format":"einlinear r', b'"format":"r'),
        header[:12],
        runs[:9],
    ):
        path.write_bytes(damaged + b"\n" + runs)
        assert is_packed(path)
        with pytest.raises(EinlinearError, match=r"cannot read .*, line 1: "):
            read_packed(path)
    path.write_bytes(runs)
    assert is_packed(path)


def test_no_run_of_an_earlier_file_is_lost(tmp_path):
    path, records = tmp_path / "records.jsonl", some_records()
    check_replaceable(path, records)
    write_packed(records, path)
    check_replaceable(path, records)
    with pytest.raises(EinlinearError, match=r"(?s)2 runs that the new file would not.*SOURCE too"):
        check_replaceable(path, records[2:])
    path.write_bytes(path.read_bytes()[:-9])
    with pytest.raises(EinlinearError, match="cut off"):
        check_replaceable(path, records)
    path.write_text("")
    with pytest.raises(EinlinearError, match="exists, and does not hold packed records"):
        check_replaceable(path, records)


def resealed(line, change):
    """A line with other values whose checksum is right."""
    values = json.loads(line)
    del values["seal"]
    change(values)
    return json.dumps(values | {"seal": seal_of(values)[:16]}).encode()


@pytest.mark.parametrize(
    ("number", "change", "words"),
    [
        (0, lambda v: v.update(schema=2), "its schema is 2, not 1"),
        (0, lambda v: v.update(schema="1"), "line 1: its schema is '1', not 1"),
        (0, lambda v: v.update(schema=0), "line 1: its schema is 0, not 1"),
        (0, lambda v: v.pop("runs"), "line 1: the header lacks runs"),
        (0, lambda v: v.update(base=[]), "line 1: the header.base is "),
        (
            0,
            lambda v: v["base"].update(lr=7.0),
            "the run is '.*', but its settings now have the id",
        ),
        (0, lambda v: v["counts"].pop(), "line 2: it has 6 counts, and the header 5"),
        (1, lambda v: v.pop("status"), "line 2: the run lacks status"),
        (1, lambda v: v.update(status="lost"), "line 2: status is 'lost'"),
        (1, lambda v: v.update(more=1), "line 2: the run has a field 'more'"),
        (1, lambda v: v.update(curve=3), "line 2: the run.curve is 3, not an object"),
        (1, lambda v: v["curve"]["loss"].pop(), "line 2: loss has 18 points, and step 19"),
        (1, lambda v: v["curve"].update(loss=["x"]), r"line 2: the run.curve.loss\[0\] is 'x'"),
        (1, lambda v: v.update(environment="x"), "line 2: the header has no environment 'x'"),
        (1, lambda v: v["config"].update(widht=1), "line 2: unknown config key 'widht'"),
        (1, lambda v: v["config"].update(width="x"), "line 2: width is "),
        (1, lambda v: v["config"].update(seed=5), "line 2: the run is '.*', but its settings now"),
    ],
)
def test_every_field_is_checked(tmp_path, number, change, words):
    path = tmp_path / "records.jsonl"
    lines = packed_bytes(some_records()).splitlines()
    lines[number] = resealed(lines[number], change)
    path.write_bytes(b"\n".join(lines))
    with pytest.raises(EinlinearError, match=words) as caught:
        read_packed(path)
    assert str(path) in caught.value.what
    assert isinstance(caught.value, NewerError) == (words == "its schema is 2, not 1")


def test_what_cannot_be_packed_or_read(tmp_path):
    records = some_records()
    with pytest.raises(EinlinearError, match="no records to pack"):
        packed_bytes([])
    with pytest.raises(EinlinearError, match=f"two records of run {records[1].id}"):
        packed_bytes([*records, records[1]])
    with pytest.raises(EinlinearError, match=r"cannot read .*none.jsonl: No such file"):
        read_packed(tmp_path / "none.jsonl")
    table = tmp_path / "table.jsonl"
    table.write_text('{"run": "a", "compute": 1, "loss": 2}\n', encoding="utf-8")
    assert not is_packed(table)
    assert not is_packed(tmp_path)
    with pytest.raises(EinlinearError, match=r"table.jsonl does not hold packed records"):
        read_packed(table)


def test_absolute_paths_are_named_once():
    records = some_records(data="texts") + some_records(data="/texts/a", validation="b")
    records += some_records(data=r"C:\texts", validation="/texts/a")
    assert absolute_paths(records) == ("/texts/a", r"C:\texts")
