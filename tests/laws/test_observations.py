from dataclasses import replace

import numpy as np
import pytest

import einlinear as el
from einlinear.laws.observations import StructureLabel
from einlinear.runs.record import Counts, Point
from einlinear.runs.shape import step_key
from einlinear.runs.step_times import ModelTime, StepTimes


def record(seed=0, structure="btt", losses=(4.5, 3.0, None, 2.5), warmup=0):
    curve = tuple(
        Point(10 * i, 100 * i, 700 * i, 2.0 * i, 0.1 * i, loss, None, 0.1)
        for i, loss in enumerate(losses)
    )
    config = el.RunConfig(structure=structure, seed=seed, width=64, warmup=warmup)
    counts = Counts(33, 7, 4, 1, 1, 1)
    return el.RunRecord(config, "finished", 30, curve, "token", counts, 5, {})


@pytest.mark.parametrize(
    ("compute", "expected"),
    [
        ("flops", [0, 4200, 12600]),
        ("linear_flops", [0, 2400, 7200]),
        ("macs", [0, 700, 2100]),
        ("linear_macs", [0, 400, 1200]),
        ("seconds", [0, 2, 6]),
        ("params", [33] * 3),
        ("units", [0, 100, 300]),
    ],
)
def test_observations_of_records(compute, expected):
    assert el.Observations.from_records([record()]).compute.tolist() == [0, 4200, 12600]
    data = el.Observations.from_records([record(0), record(1)], compute)
    assert data.compute.tolist() == expected * 2
    assert data.loss.tolist() == [4.5, 3.0, 2.5] * 2
    assert data.left_out == 2
    assert data.seed.tolist() == [0] * 3 + [1] * 3
    assert len(set(data.run)) == 2
    assert len(set(data.group)) == 1
    assert set(data.structure) == {"btt"}
    assert set(data.more["width"]) == {64}
    assert set(data.size) == {33}


def test_measured_times_replace_the_clock(tmp_path):
    records = [record(0), record(1, "dense")]
    times = StepTimes(
        tuple(
            ModelTime(step_key(r.config), "", 64, seconds, seconds, seconds, 1, "token")
            for r, seconds in zip(records, (0.5, 0.25), strict=True)
        ),
        "2026-01-02",
        9,
        {},
    )
    times.save(tmp_path / "steps.json")
    for given in (times, tmp_path / "steps.json", str(tmp_path / "steps.json")):
        data = el.Observations.from_records(records, "seconds", times=given)
        assert data.compute.tolist() == [0, 5, 15, 0, 2.5, 7.5]
    unknown = record(0, "low_rank")
    with pytest.raises(el.EinlinearError, match=f"no model of run {unknown.id}"):
        el.Observations.from_records([*records, unknown], "seconds", times=times)
    with pytest.raises(el.EinlinearError, match="times are given, and compute is 'flops'"):
        el.Observations.from_records(records, times=times)


def test_records_are_observations_by_their_flops():
    found = el.frontier([record(0), record(1, "dense")])
    assert found.compute.tolist() == [4200, 12600] * 2  # the start has no compute


def test_two_spellings_of_a_structure_are_one():
    spellings = ("monarch", "btt(rank=1)", "btt", "dense", "btt(rank=2)")
    data = el.Observations.from_records(record(0, spelling) for spelling in spellings)
    assert data.structures == ("monarch", "dense", "btt(rank=2)")


def test_what_makes_other_layers_is_another_structure():
    one = record()
    kinds = (
        {},
        {"head_aligned": True},
        {"weight_norm": False},
        {"convert_head": True},
        {"optimizer": "muon"},
        {"weight_decay": 0.1, "decay": "standard"},
        {"num_experts": 8},
        {"num_experts": 8, "expert_norm": "together"},
        {"num_experts": 8, "expert_gain": True, "optimizer": "muon"},
        {"factor_init": "fan_in", "optimizer": "muon"},
        {"head_aligned": True, "head_axis": "own"},
        {"num_experts": 8, "expert_layers": "vo"},
        {"num_experts": 8, "expert_layers": "ffn", "expert_gain": True},
    )
    records = [replace(one, config=replace(one.config, **kind)) for kind in kinds]
    data = el.Observations.from_records(records)
    variants = ("", "head-aligned", "without norm", "with head", "muon", "standard decay")
    variants += ("moe 2/8", "moe 2/8 norm together", "moe 2/8 gains muon")
    variants += (
        "fan-in factors muon",
        "head-aligned own axis",
        "moe 2/8 in V and O",
        "moe 2/8 in FFNs gains",
    )
    assert data.structures == tuple(f"btt {variant}".rstrip() for variant in variants)
    assert set(data.more["base_structure"]) == {"btt"}
    assert set(data.more["variant"]) == set(variants)
    alike = [{"decay": "standard"}, {"expert_gain": True, "expert_norm": "together"}]  # no effect
    alike += [{"expert_layers": "vo"}, {"head_axis": "own"}]
    records = [replace(one, config=replace(one.config, **kind)) for kind in alike]
    assert el.Observations.from_records(records).structures == ("btt",)
    sizes = [replace(one, config=replace(one.config, depth=d, lr=r)) for d, r in ((1, 0.1), (2, 1))]
    data = el.Observations.from_records(sizes)
    assert (data.structures, len(set(data.group))) == (("btt",), 2)


@pytest.mark.parametrize(
    ("text", "is_same"),
    [
        ("monarch moe 2/8", True),
        ("btt(rank = 1) moe 2/8", True),
        ("btt(rank=2) moe 2/8", False),
        ("monarch", False),
        ("monarch moe 2/4", False),
        ("nothing moe 2/8", False),
    ],
)
def test_a_label_matches_any_spelling_of_its_structure(text, is_same):
    assert StructureLabel("monarch", "moe 2/8").matches(text) is is_same


def test_empty_values_stand_for_their_defaults():
    data = el.Observations(
        list("abcd"),
        [1] * 4,
        [2] * 4,
        ["x", None, "", "x"],
        [None, 3, np.nan, 1],
        ["g", "", None, "g"],
    )
    assert data.structure.tolist() == ["x", "all", "all", "x"]
    assert data.seed.tolist() == [0, 3, 0, 1]
    assert data.group.tolist() == ["g", "b", "c", "g"]
    assert data.size.tolist() == ["g", "b", "c", "g"]


@pytest.mark.parametrize(("warmup", "steps"), [(0, 3), (1, 2), (10, 2), (11, 1), (30, 1)])
def test_points_of_the_warm_up_are_left_out(warmup, steps):
    assert len(el.Observations.from_records([record(warmup=warmup)])) == steps


OTHER_TASK = replace(record(), config=el.RunConfig(task="regression"))
OTHER_DATA = replace(record(1), environment={"data": "abc"})


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: el.Observations(["a"], [1.0, 2.0], [1.0]), "compute has 2 values, run has 1"),
        (lambda: el.Observations(["a"], [-1.0], [1.0]), "point 0 of the observations: compute"),
        (lambda: el.Observations(["a"], [1.0], [0.0]), "point 0 of the observations: loss is 0"),
        (lambda: el.Observations(["a"], [1.0], ["low"]), "loss cannot be read"),
        (lambda: el.Observations(["a"], [1.0], [2.0], seed=[0.5]), "seed cannot be read"),
        (lambda: el.Observations(["a", ""], [1, 1], [2, 2]), "point 1 .* run is empty"),
        (lambda: el.Observations("a", 1.0, 2.0), "flat and have the same length"),
        (lambda: el.Observations([["a"]], [1.0], [2.0]), "run cannot be read"),
        (lambda: el.Observations(["a"], [[1.0]], [2.0]), "compute cannot be read"),
        (lambda: el.Observations.from_records([]), "there are no observations"),
        (lambda: el.Observations.from_records([record()], "cost"), "compute is 'cost'"),
        (lambda: el.frontier("runs.csv"), "hold 'r'"),
        (lambda: el.frontier([record(), OTHER_TASK]), "was on text .* on regression"),
        (lambda: el.frontier([record(), OTHER_DATA]), "data None.*data abc"),
    ],
)
def test_what_no_observations_are(call, message):
    with pytest.raises(el.EinlinearError, match=message):
        call()
