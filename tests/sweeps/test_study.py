"""Studies: grids over a base, out of code and files."""

import itertools
import json
from pathlib import Path
from time import process_time

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import einlinear as el
from einlinear.sweeps import study as study_module
from einlinear.sweeps.study import Study, as_study, load_study, without_settings
from einlinear.sweeps.sweep import prepare_directory

TEXT = """
name = "first"

[base]
task = "text"
steps = 100

[grid]
structure = ["dense", "btt(rank=2)"]
width = [32, 64]
seed = [0, 1, 2]
"""


def configs(study):
    return [cell.config for cell in study.cells]


def test_all_combinations_in_the_order_of_the_grid(tmp_path):
    path = tmp_path / "study.toml"
    path.write_text(TEXT)
    study = load_study(path)
    seen = [(c.structure, c.width, c.seed, c.steps, c.task) for c in configs(study)]
    wanted = itertools.product(["dense", "btt(rank=2)"], [32, 64], range(3), [100], ["text"])
    assert seen == list(wanted)
    assert study.name == "first"


def test_optimizers_in_a_grid_have_rates_of_their_own():
    study = Study("optimizers", {"steps": 10}, ({"optimizer": ["adamw", "muon"]},))
    adamw, muon = configs(study)
    assert (adamw.optimizer, muon.optimizer) == ("adamw", "muon")
    assert adamw == el.RunConfig(steps=10)
    assert muon.lr == 4 * adamw.lr


def test_a_file_without_a_name_is_called_as_it_is(tmp_path):
    path = tmp_path / "rates.json"
    path.write_text(json.dumps({"grid": {"lr": [0.1, 0.2]}}))
    assert load_study(path).name == "rates"
    assert as_study(str(path)) == load_study(path)


def test_several_grids_and_what_they_share():
    study = Study(
        "two",
        {"task": "text", "steps": 10},
        (
            {"structure": "dense", "width": [32, 64]},
            {"structure": ["btt", "dense"], "width": 64},
        ),
    )
    seen = [(c.structure, c.width) for c in configs(study)]
    assert seen == [("dense", 32), ("dense", 64), ("btt", 64)], "dense 64 is run once"


def test_settings_that_vary_together(tmp_path):
    path = tmp_path / "study.toml"
    path.write_text(
        '[base]\ntask = "text"\nsteps = 5\n'
        '[[grid]]\nstructure = ["dense", "btt"]\n"width, steps" = [[32, 10], [64, 20]]\n'
        '[[grid]]\nstructure = "btt"\n"width,flops,seed" = [[32, 1e9, 1]]\n'
    )
    study = load_study(path)
    seen = [(c.config.structure, c.config.width, c.config.steps) for c in study.cells[:4]]
    pairs = [(32, 10), (64, 20)]
    assert seen == [(name, *pair) for name in ("dense", "btt") for pair in pairs]
    assert (study.cells[4].flops, study.cells[4].config.seed) == (1e9, 1)
    path.write_text(study.to_toml())
    assert load_study(path) == study


@pytest.mark.parametrize(
    ("dropped", "left"),
    [
        ({"seed"}, {"width, steps, lr": [[32, 10, 0.1], [64, 20, 0.1], [64, 20, 0.2]]}),
        ({"lr"}, {"width, steps": [[32, 10], [64, 20]], "seed": [0, 1]}),
        ({"steps", "lr"}, {"width": [32, 64], "seed": [0, 1]}),
        ({"width", "steps", "lr"}, {"seed": [0, 1]}),
    ],
)
def test_a_grid_without_settings_that_vary_together(dropped, left):
    rows = [[32, 10, 0.1], [64, 20, 0.1], [64, 20, 0.2]]
    assert without_settings({"width, steps, lr": rows, "seed": [0, 1]}, dropped) == left


@pytest.mark.parametrize(
    ("grid", "what"),
    [
        ({"width, steps": [[32]]}, "row 1 of width, steps is [32]"),
        ({"width, steps": [[32, 10], [64]]}, "row 2 of width, steps is [64]"),
        ({"width, steps": [[32, 10], 64]}, "row 2 of width, steps is 64"),
        ({"width, steps": [[[16, 32], 500]]}, "width in row 1 of width, steps is [16, 32]"),
        ({"lr, betas": [[0.1, [[0.9, 0.95]]]]}, "betas in row 1 of lr, betas is [[0.9, 0.95]]"),
        ({"lr, betas": [[0.1, 0.9]]}, "betas is 0.9"),
        ({"width, steps": 32}, "width, steps in grid is 32"),
        ({"width, steps": []}, "width, steps in grid is []"),
        ({"width, steps": [[32, 10], [32, 10]]}, "width, steps is [[32, 10], [32, 10]]"),
        ({"width": 32, "width, steps": [[32, 10]]}, "width is in 'width' and in 'width, steps'"),
        ({"width, stops": [[32, 10]]}, "unknown setting 'stops'"),
        ({"width, steps": [[32, 0]]}, "steps is 0"),
    ],
)
def test_settings_that_cannot_vary_together(grid, what):
    with pytest.raises(el.EinlinearError) as caught:
        Study("x", {"task": "text"}, (grid,))
    assert caught.value.what.startswith(what)


@pytest.mark.parametrize(
    ("grid", "fix"),
    [
        ({"width, steps": [[32]]}, 'give "width, steps" = [[32, 500], [64, 1000]]'),
        ({"width, flops": 3}, 'give "width, flops" = [[32, 1e+12], [64, 2e+12]]'),
        ({"width, tied": 3}, 'give "width, tied" = [[32, false], [64, false]]'),
        ({"tied, betas": 3}, 'give "tied, betas" = [[false, [0.9, 0.95]]]'),
        ({"width, steps": [[[16, 32], 5]]}, "give each value a row of its own, as in "),
        ({"width,": [32]}, 'write width, or name a second setting: "width, steps"'),
        ({"width, , steps": [[32, 10]]}, 'write "width, steps"'),
        ({"width; steps": [[32, 10]]}, 'write "width, steps"'),
    ],
)
def test_how_settings_vary_together(grid, fix):
    with pytest.raises(el.EinlinearError) as caught:
        Study("x", {"task": "text"}, (grid,))
    assert caught.value.fix.startswith(fix)


def test_pairs_of_betas_vary_together_with_others(tmp_path):
    rows = [[0.1, [0.9, 0.95]], [0.1, (0.9, 0.99)], [0.2, [0.9, 0.99]]]
    study = Study("x", {"task": "text"}, ({"lr, betas": rows},))
    assert [(c.lr, c.betas) for c in configs(study)] == [(lr, tuple(pair)) for lr, pair in rows]
    path = tmp_path / "study.toml"
    path.write_text(study.to_toml())
    assert load_study(path).id == study.id
    assert without_settings(study.grids[0], {"lr"}) == {"betas": [[0.9, 0.95], [0.9, 0.99]]}
    three = {"lr, betas, seed": [[0.1, [0.9, 0.95], 0], [0.2, [0.9, 0.95], 0]]}
    assert without_settings(three, {"lr"}) == {"betas, seed": [[[0.9, 0.95], 0]]}
    with pytest.raises(el.EinlinearError, match="each value once"):
        Study("x", {"task": "text"}, ({"lr, betas": [rows[0], rows[0]]},))


def test_settings_do_not_vary_together_in_a_base():
    with pytest.raises(el.EinlinearError, match="width, steps in base"):
        Study("x", {"task": "text", "width, steps": [[32, 10]]})


def test_a_base_alone_is_one_run():
    assert len(Study("one", {"task": "cifar"}).cells) == 1


def test_a_budget_takes_the_place_of_steps_and_the_other_way():
    study = Study("b", {"task": "text", "steps": 10}, ({"flops": [1e9, 2e9]}, {"width": [32]}))
    assert [cell.flops for cell in study.cells] == [1e9, 2e9, None]
    assert ["steps" in cell.settings for cell in study.cells] == [False, False, True]
    other = Study("b", {"task": "text", "flops": 1e9}, ({"steps": 5},))
    assert [(cell.flops, cell.settings["steps"]) for cell in other.cells] == [(None, 5)]


def test_betas_are_one_value_or_a_list_of_pairs():
    one = Study("b", {"task": "text"}, ({"betas": [0.9, 0.95]},))
    two = Study("b", {"task": "text"}, ({"betas": [[0.9, 0.95], [0.9, 0.99]]},))
    assert [c.betas for c in configs(one)] == [(0.9, 0.95)]
    assert [c.betas for c in configs(two)] == [(0.9, 0.95), (0.9, 0.99)]


texts = st.text(st.characters(codec="utf-8"), min_size=1, max_size=12)


@given(
    name=texts,
    data=texts,
    widths=st.lists(st.integers(1, 9), min_size=1, max_size=3, unique=True),
    rates=st.lists(st.floats(1e-9, 1e3), min_size=1, max_size=3, unique=True),
    tied=st.booleans(),
)
def test_toml_and_back(tmp_path_factory, name, data, widths, rates, tied):
    base = {"task": "text", "head_size": 1, "data": data, "tied": tied}
    study = Study(name, base, ({"width": widths, "lr": rates}, {"betas": [[0.9, 0.95]]}))
    path = tmp_path_factory.mktemp("study") / "s.toml"
    path.write_bytes(study.to_toml().encode())
    again = load_study(path)
    assert configs(again) == configs(study)
    assert (again.name, again.id) == (study.name, study.id)


def test_values_of_other_packages_are_kept_as_a_file_has_them(tmp_path):
    base = {"task": "text", "data": Path("a") / "b.txt", "lr": np.float64(0.5)}
    study = Study("s", base, ({"seed": range(2), "width": (np.int64(16), 32)},))
    path = tmp_path / "s.toml"
    path.write_text(study.to_toml())
    assert load_study(path) == study
    assert (
        configs(study)[3].as_dict()
        == el.RunConfig(task="text", data="a/b.txt", lr=0.5, seed=1, width=32).as_dict()
    )
    assert len({c.id for c in configs(study)}) == 4


@pytest.mark.parametrize(
    ("values", "what", "fix"),
    [
        ({"grids": {}}, "unknown key 'grids'", "did you mean 'grid'?"),
        ({"width": 64}, "unknown key 'width'", r"put it under \[base\] or \[grid\]"),
        ({"base": {"widht": 64}}, "unknown setting 'widht'", "did you mean 'width'?"),
        ({"base": {"flop": 1e9}}, "unknown setting 'flop'", "did you mean 'flops'?"),
        ({"grid": {"width": []}}, r"width is \[\]", "give width a value"),
        ({"grid": {"width": [64, 64]}}, r"width is \[64, 64\]", "remove the second 64"),
        ({"grid": {"betas": [[0, 0.9], [0, 0.9]]}}, "betas is", "remove the second [0, 0.9]"),
        ({"base": {"width": [16, 32]}}, r"width in base is \[16, 32\]", "put width under [grid]"),
        ({"base": {"data": None}}, "data is None", "leave it out"),
        ({"grid": {"data": [None, "a.txt"]}}, "data is None", "leave it out"),
        ({"grid": {"seed": {1, 2}}}, "seed is {1, 2}", "or a list"),
        ({"base": None}, "base is None", "give"),
        ({"grid": []}, r"grid is \[\]", "give"),
        ({"grid": [3]}, "grid is 3", "give"),
        ({"name": 3}, "name is 3", "give"),
        ({"base": {"flops": 0}}, "flops is 0", "flops = 1e12"),
        ({"base": {"flops": True}}, "flops is True", "flops = 1e12"),
        ({"base": {"flops": 10**400}}, "number of about 400 digits", "flops = 1e12"),
        ({"base": {"flops": 1e9, "steps": 3}}, r"steps are 3 and flops 1e\+09", "leave"),
        ({"grid": {"structure": ["dense", "bttt"]}}, "bttt", "btt"),
        ({"grid": {"width": [64, 65]}}, "65", "multiple"),
    ],
)
def test_what_is_wrong_is_said_before_anything_runs(values, what, fix):
    with pytest.raises(el.EinlinearError, match=what) as caught:
        Study.from_dict(values)
    assert fix.replace("\\", "") in caught.value.fix


def test_what_is_no_study():
    with pytest.raises(el.EinlinearError, match="study is 3"):
        as_study(3)


@pytest.mark.parametrize(
    ("grid", "total", "longest"),
    [
        ({"seed": range(10**9)}, "1.00e9", "seed has 1.00e9 values"),
        ({"seed": range(10**30)}, "1.00e30", "seed has 1.00e30 values"),
        ({"seed": range(0, -(10**9), -1)}, "1.00e9", "seed has 1.00e9 values"),
        (
            {"seed": range(1000), "lr": [0.1 * n for n in range(1, 2001)]},
            "2.00e6",
            "lr has 2,000 values",
        ),
    ],
)
def test_grids_of_very_many_runs(grid, total, longest):
    begin = process_time()
    with pytest.raises(el.EinlinearError) as told:
        Study("many", {"task": "cifar"}, (grid,))
    assert process_time() - begin < 0.5
    assert told.value.what == f"a study of {total} runs or more: {longest}"
    assert told.value.rule == "a study has at most 100,000 runs"


def test_values_that_are_nested_or_too_many_are_named():
    nested = 0.5
    for _ in range(100_000):
        nested = [nested]
    for value in (nested, range(10**9)):
        with pytest.raises(
            el.EinlinearError, match=r"^betas is .{1,200}\n  rule: a setting has one"
        ):
            Study("s", {"betas": value})


def test_a_pair_of_betas_is_one_value():
    seeds = list(range(150))
    study = Study("s", {"task": "cifar"}, ({"seed": seeds, "betas": (0.5, 0.9)},))
    assert len(study.cells) == 150
    assert study_module._length("betas", [0.5, 0.9]) == 1
    assert study_module._length("betas", [(0.5, 0.9), (0.6, 0.9)]) == 2


def test_the_same_study_in_another_layout_is_stored_once(tmp_path):
    """Earlier versions wrote lists on one line, and named the file by its text."""
    study = Study("s", {"task": "text"}, ({"width": [16, 32]},))
    folder = tmp_path / "studies"
    folder.mkdir()
    text = 'name = "s"\n\n[base]\ntask = "text"\n\n[[grid]]\nwidth = [16, 32]\n'
    (folder / "an-old-name.toml").write_text(text, encoding="utf-8")
    prepare_directory(study, tmp_path)
    assert [path.name for path in folder.iterdir()] == ["an-old-name.toml"]
    prepare_directory(Study("s", {"task": "text"}, ({"width": [16]},)), tmp_path)
    assert len(list(folder.iterdir())) == 2
