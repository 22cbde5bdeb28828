"""Structures of a study that are sampled: the same ones every time, all errors before any run."""

import pytest

import einlinear as el
from einlinear import EinlinearError, parse, taxonomy
from einlinear.structures.sampling import distinct_structures
from einlinear.sweeps.planner import expand_study
from einlinear.sweeps.study import Study, load_study

TEXT = """
[base]
task = "text"
steps = 4

[[grid]]
structure = { sample = 5, omega = 0, psi = 1, nu = [0.3, 0.7], seed = 2, factors = [2, 3] }
width = [16, 32]

[[grid]]
structure = ["dense", { sample = 2 }]
"""


def structures(study):
    return list(dict.fromkeys(cell.config.structure for cell in study.cells))


def test_a_table_samples_structures(tmp_path):
    path = tmp_path / "study.toml"
    path.write_text(TEXT, encoding="utf-8")
    study = load_study(path)
    region = {"omega": 0, "psi": 1, "nu": (0.3, 0.7)}
    wanted = distinct_structures(5, num_factors=[2, 3], seed=2, **region)
    free = distinct_structures(2)
    assert structures(study) == [*map(str, wanted), "dense", *map(str, free)]
    assert len(study.cells) == 5 * 2 + 3
    for structure in map(parse, structures(study)[:5]):
        found = taxonomy(structure)
        assert (found.omega, found.psi) == (0, 1)
        assert 0.3 <= found.nu <= 0.7
    labels = [run.label for run in expand_study(study)]
    assert all(str(s) in label for s, label in zip(wanted, labels[::2], strict=False))


def test_what_is_stored_names_the_structures(tmp_path):
    path = tmp_path / "study.toml"
    path.write_text(TEXT, encoding="utf-8")
    study = load_study(path)
    assert "sample" not in study.to_toml()
    path.write_text(study.to_toml(), encoding="utf-8")
    assert load_study(path) == study
    assert load_study(path).id == study.id


def test_a_larger_sample_adds_runs_only():
    few, more = (Study("s", {}, ({"structure": {"sample": n, "psi": 1}},)) for n in (3, 8))
    assert [c.config.id for c in few.cells] == [c.config.id for c in more.cells[:3]]
    assert len(more.cells) == 8


def test_two_samples_that_overlap():
    table = {"sample": 3, "omega": 0}
    study = Study("s", {}, ({"structure": [table, {**table, "sample": 5}]},))
    assert structures(study) == [str(s) for s in distinct_structures(5, omega=0)]


def test_the_plural_is_understood():
    one, other = (Study("s", {}, ({key: {"sample": 3}},)) for key in ("structure", "structures"))
    assert one == other
    with pytest.raises(EinlinearError, match="unknown setting 'structures'"):
        Study("s", {}, ({"structures": ["btt"]},))


@pytest.mark.parametrize(
    ("table", "what", "fix"),
    [
        ({"sample": 3, "psi": 1, "nu": [0.1, 0.2]}, "with factors = 2 lie where", "nu >= 1/2"),
        ({"sample": 3, "factors": 1}, "with factors = 1", "use factors = 2 or more"),
        ({"sample": 0}, "sample is 0", "from 1 to 10,000"),
        ({"sample": 10**9}, "sample is 1000000000", "from 1 to 10,000"),
        ({"sample": 2.5}, "sample is 2.5", "from 1 to 10,000"),
        ({"sample": 3, "factors": []}, r"factors is \[\]", "give 2, or [2, 3]"),
        ({"sample": 3, "factors": [2, 2]}, r"factors is \[2, 2\]", "give 2, or [2, 3]"),
        ({"sample": 3, "factors": [2, 9]}, "factors is 9", "from 1 to 4"),
        ({"sample": 3, "nu": [0.7, 0.3]}, r"nu is \[0.7, 0.3\]", "write nu = [0.25, 0.5]"),
        ({"sample": 3, "omega": 2}, "omega has the exponent 2", "write 0.5"),
        ({"sample": 3, "seed": -1}, "seed is -1", "of 0 or more"),
        ({"sample": 3, "omgea": 0}, "unknown key 'omgea' in structure", "did you mean 'omega'?"),
        ({"omega": 0}, "structure is {'omega': 0}", "give structure = { sample = 20"),
    ],
    ids=str,
)
def test_what_is_wrong_is_said_with_the_file_and_the_key(table, what, fix):
    with pytest.raises(EinlinearError, match=what) as told:
        Study.from_dict({"grid": {"structure": table}}, "study.toml")
    assert told.value.what.endswith("in study.toml")
    assert fix in told.value.fix


def test_a_sample_in_the_base_or_of_something_else():
    with pytest.raises(EinlinearError, match="structure in base is") as told:
        Study("s", {"structure": {"sample": 3}})
    assert told.value.fix == "put structure under [grid]"
    with pytest.raises(EinlinearError, match=r"width is .'sample': 3"):
        Study("s", {}, ({"width": {"sample": 3}},))


def test_too_many_runs():
    grid = {"structure": {"sample": 20}, "seed": range(10**4)}
    with pytest.raises(EinlinearError, match="a study of 200,000 runs or more"):
        el.Study("many", {}, (grid,))
