"""The studies of the package: complete, valid, at the scale they claim."""

import re

import pytest

import einlinear as el
from einlinear.landscapes.config import LandscapeConfig, make_study
from einlinear.reproductions.catalogue import (
    REPRODUCTIONS,
    SCALES,
    check_scale,
    find_reproduction,
)
from einlinear.reproductions.costs import count_costs, runs_of, stored_costs
from einlinear.reproductions.shipped import (
    parse_settings,
    shipped_landscape,
    shipped_study,
    study_file,
    with_settings,
)
from einlinear.sweeps.planner import expand_study
from einlinear.training.plan import cost_run

SWEEPS = [found for found in REPRODUCTIONS.values() if found.kind == "sweep"]
BOTH = [(found, scale) for found in SWEEPS for scale in SCALES]
NAMES = [f"{found.name}-{scale}" for found, scale in BOTH]
PAPER = {str(structure) for structure in el.paper_structures().values()}
WIDEST, PARAMS = 4096, (120e3, 76.9e6)
"""Of the paper's models with 96 symbols: "from 120k to 76M parameters"."""


def structures_in(study):
    return {str(el.parse(cell.config.structure)) for cell in study.cells}


def test_every_figure_has_a_study_at_both_scales():
    files = {f"{n}.{scale}.toml" for n in REPRODUCTIONS if n != "taxonomy" for scale in SCALES}
    folder = study_file("heads", "cpu").parent
    assert {path.name for path in folder.iterdir()} == files | {"costs.json"}


@pytest.mark.parametrize(("found", "scale"), BOTH, ids=NAMES)
def test_a_study_is_one_that_sweep_reads(found, scale):
    study = el.load_study(study_file(found.name, scale))
    assert study.id == shipped_study(found, scale).id
    assert study.name.startswith(f"Figure {found.figure}")
    presets = {cell.config.preset for cell in study.cells}
    paper = "paper-gpt2" if found.name == "gpt2" else "paper"
    assert presets == {paper if scale == "paper" else "cpu"}
    assert all(cell.config.data is None for cell in study.cells)
    if scale == "cpu":
        assert {cell.config.device for cell in study.cells} == {"cpu"}


@pytest.mark.parametrize(("found", "scale"), BOTH, ids=NAMES)
def test_the_stored_costs_are_of_these_studies(found, scale):
    """Run python -m einlinear.reproductions.costs after changing a study."""
    assert stored_costs()[found.name, scale].study == runs_of(found, scale).id


@pytest.mark.parametrize("scale", SCALES)
def test_the_stored_cost_of_the_landscape(scale):
    landscape = REPRODUCTIONS["landscape"]
    assert stored_costs()["landscape", scale].study == runs_of(landscape, scale).id
    assert runs_of(REPRODUCTIONS["taxonomy"], scale) is None


def test_costs_are_counted_by_another_road():
    study = shipped_study(REPRODUCTIONS["heads"], "cpu")
    seeds = {cell.config.seed for cell in study.cells}
    flops = 0
    for cell in study.cells:
        if cell.config.seed == min(seeds):
            cost = cost_run(cell.config)
            of_a_step = 6 * cost.counts.macs * cost.units_per_step
            flops += of_a_step * round(cell.flops / of_a_step)
    stored = stored_costs()["heads", "cpu"]
    assert stored.runs == len(study.cells) == 3 * 5 * len(seeds)
    assert stored.flops == flops * len(seeds)
    assert stored == count_costs(study)


@pytest.mark.parametrize("name", ["exponents", "pixels", "regression", "gpt2"])
def test_all_23_structures_and_dense_at_the_scale_of_the_paper(name):
    study = shipped_study(REPRODUCTIONS[name], "paper")
    assert structures_in(study) == PAPER | {str(el.dense())}


def test_all_23_structures_on_a_cpu():
    study = shipped_study(REPRODUCTIONS["exponents"], "cpu")
    assert structures_in(study) == PAPER | {str(el.dense())}


def test_the_families_on_a_frontier():
    families = el.paper_families()
    named = {str(structure): name for name, structure in el.paper_structures().items()}
    for scale in SCALES:
        study = shipped_study(REPRODUCTIONS["frontiers"], scale)
        found = structures_in(study) - {str(el.dense())}
        kinds = {families[named[structure]] for structure in found}
        assert kinds >= {"full-rank BTT", "TT", "low rank", "generic"}


def test_a_frontier_of_the_paper_needs_no_run_that_the_exponents_do_not_have():
    ids = [
        {cell.config.id for cell in shipped_study(REPRODUCTIONS[name], "paper").cells}
        for name in ("frontiers", "exponents")
    ]
    assert ids[0] < ids[1]


def test_frontiers_and_exponents_share_runs_on_a_cpu():
    found = [
        {(cell.config.id, cell.flops) for cell in shipped_study(REPRODUCTIONS[name], "cpu").cells}
        for name in ("frontiers", "exponents")
    ]
    assert len(found[0] & found[1]) == 5 + 6 * 4


def test_the_settings_of_the_paper():
    configs = {
        name: [cell.config for cell in shipped_study(REPRODUCTIONS[name], "paper").cells]
        for name in ("exponents", "pixels", "regression", "moe", "gpt2")
    }
    text = configs["exponents"]
    assert {(c.steps, c.batch_size * c.context, c.context) for c in text} == {(100_000, 65536, 128)}
    assert {c.width for c in text} <= set(range(256, WIDEST + 1))
    assert {c.depth for c in text} == {3, 6}
    pixels = configs["pixels"]
    assert {c.depth for c in pixels} == {2, 3}
    assert {max(c.width for c in pixels if c.structure == "dense")} == {512}
    assert {min(c.width for c in pixels), max(c.width for c in pixels)} == {32, 1024}
    regression = configs["regression"]
    assert {c.steps for c in regression} == {1_000_000}
    assert {min(c.width for c in regression), max(c.width for c in regression)} == {64, 4096}
    gpt2 = configs["gpt2"]
    assert {(c.depth, c.context, c.vocabulary, c.convert_head) for c in gpt2} == {
        (12, 512, "gpt2", True)
    }
    assert max(c.width for c in gpt2 if c.structure == "dense") == 768
    experts = {(c.structure, c.experts, c.num_experts, c.num_active) for c in configs["moe"]}
    assert experts == {
        ("dense", "linear", 0, 2),
        *(("dense", "ffn", number, 2) for number in (8, 16)),
        *(("btt", "linear", number, 2) for number in (8, 16)),
    }


@pytest.mark.parametrize("scale", SCALES)
def test_the_experts_of_other_structures(scale):
    study = shipped_study(REPRODUCTIONS["moe-structures"], scale)
    experts = {
        (cell.config.structure, cell.config.experts, cell.config.num_experts)
        for cell in study.cells
    }
    assert experts == {
        ("dense", "linear", 0),
        ("dense", "ffn", 8),
        ("dense", "linear", 8),
        ("btt", "linear", 8),
        ("low_rank(rank=d/8)", "linear", 8),
    }


@pytest.mark.parametrize("scale", SCALES)
def test_heads_are_the_only_difference(scale):
    cells = shipped_study(REPRODUCTIONS["heads"], scale).cells
    readings = {(cell.config.head_aligned, cell.config.head_axis) for cell in cells}
    apart = ("head_aligned", "head_axis")
    sides = [
        {
            tuple(sorted((k, str(v)) for k, v in cell.settings.items() if k not in apart))
            for cell in cells
            if (cell.config.head_aligned, cell.config.head_axis) == reading
        }
        for reading in readings
    ]
    assert all(side == sides[0] for side in sides)
    assert len(cells) == len(readings) * len(sides[0])
    assert {(False, "shared"), (True, "shared")} <= readings
    assert ((True, "own") in readings) == (scale == "cpu")


@pytest.mark.slow
def test_models_of_the_paper_are_not_larger_than_the_paper_says():
    for name in ("frontiers", "exponents", "heads"):
        cells = shipped_study(REPRODUCTIONS[name], "paper").cells
        counts = [cost_run(cell.config).counts.params for cell in cells]
        assert PARAMS[0] / 4 < min(counts) < max(counts) <= PARAMS[1]
    small = max(
        cost_run(cell.config).counts.params
        for cell in shipped_study(REPRODUCTIONS["gpt2"], "paper").cells
    )
    dense = el.RunConfig(task="text", preset="paper-gpt2", width=768)
    assert small == cost_run(dense).counts.params


ONE_STEP = {
    "steps": 1,
    "batch_size": 2,
    "eval_points": 1,
    "eval_size": 2,
    "device": "cpu",
    "checkpoint_every": 0,
    "save_model": False,
    "warmup": 0,
}


@pytest.mark.slow
@pytest.mark.parametrize("found", SWEEPS, ids=lambda found: found.name)
def test_a_step_of_the_paper_is_trained(found):
    """One run of each grid, at a small width."""
    width = {"pixels": 32, "regression": 64}.get(found.name, 64)
    study = shipped_study(found, "paper", settings=ONE_STEP | {"width": width})
    for grid in study.grids:
        record = el.train(el.Study("one", study.base, (grid,)).cells[-1].config)
        assert record.status == "finished"
        assert record.steps_done == 1


def test_settings_replace_those_of_base_and_grids():
    study = shipped_study(
        REPRODUCTIONS["moe"], "cpu", settings={"steps": 5, "width": [32, 64], "seed": 3}
    )
    configs = [cell.config for cell in study.cells]
    assert {(c.steps, c.seed) for c in configs} == {(5, 3)}
    assert {c.width for c in configs} == {32, 64}
    assert {c.num_experts for c in configs} == {0, 8, 16}
    before = shipped_study(REPRODUCTIONS["moe"], "cpu")
    assert with_settings(before, {}) is before


def test_a_budget_replaces_steps_and_steps_a_budget():
    study = with_settings(shipped_study(REPRODUCTIONS["heads"], "cpu"), {"flops": 1e9, "width": 32})
    assert {cell.flops for cell in study.cells} == {1e9}
    again = with_settings(study, {"steps": 7})
    assert {cell.flops for cell in again.cells} == {None}
    assert {run.config.steps for run in expand_study(again)} == {7}


def test_settings_that_vary_together_are_replaced_together():
    study = el.Study("x", {"task": "text"}, ({"width, flops": [[32, 1e9], [64, 2e9]]},))
    for settings, missing in [({"width": [32]}, "flops"), ({"width": 32, "seed": 1}, "flops")]:
        with pytest.raises(el.EinlinearError, match=f"without {missing}, .*") as caught:
            with_settings(study, settings)
        assert caught.value.fix == "also give flops or steps"
    for settings in ({"steps": 5}, {"flops": 1e8}):
        assert [c.config.width for c in with_settings(study, settings).cells] == [32, 64]
    for settings in ({"width": 16, "steps": 5}, {"width": 16, "flops": 1e9}):
        assert [c.config.width for c in with_settings(study, settings).cells] == [16]
    assert len(with_settings(study, {"seed": [0, 1]}).cells) == 4
    three = el.Study("x", {"task": "text"}, ({"width, depth, steps": [[32, 2, 5]]},))
    with pytest.raises(el.EinlinearError, match="width is replaced without depth, "):
        with_settings(three, {"width": 16, "flops": 1e9})


def test_data_goes_to_every_run(tmp_path):
    text = tmp_path / "a.txt"
    text.write_text("abc\n")
    study = shipped_study(REPRODUCTIONS["heads"], "paper", data=text, validation=str(text))
    pairs = {(cell.config.data, cell.config.validation) for cell in study.cells}
    assert pairs == {(str(text), str(text))}
    hub = shipped_study(REPRODUCTIONS["heads"], "paper", data="hub:some/texts")
    assert {cell.config.data for cell in hub.cells} == {"hub:some/texts"}


def test_the_landscape():
    paper = shipped_landscape("paper")
    assert paper.widths == (64, 256, 1024, 4096)
    changed = shipped_landscape("cpu", {"widths": [16, 32], "steps": 10})
    assert (changed.widths, changed.steps) == ((16, 32), 10)
    assert isinstance(changed, LandscapeConfig)
    assert {cell.config.width for cell in make_study(changed).cells} == {16, 32}


def test_values_of_settings():
    pairs = ["steps=20", "lr=1e-2", "width=[32,64]", "structure=btt", "save_model=false"]
    assert parse_settings(pairs) == {
        "steps": 20,
        "lr": 1e-2,
        "width": [32, 64],
        "structure": "btt",
        "save_model": False,
    }


@pytest.mark.parametrize(
    ("make", "what", "fix"),
    [
        (
            lambda: find_reproduction("fronteirs"),
            "there is no reproduction named 'fronteirs'",
            "did you mean 'frontiers'?",
        ),
        (lambda: find_reproduction("zzz"), "'zzz'", "einlinear reproduce lists them"),
        (lambda: find_reproduction(3), "named 3", "einlinear reproduce lists them"),
        (lambda: check_scale("papr"), "scale is 'papr'", "did you mean 'paper'?"),
        (
            lambda: shipped_study(REPRODUCTIONS["heads"], "cpu", data="no/where"),
            "there is no file or folder no/where",
            "check the path",
        ),
        (
            lambda: shipped_study(REPRODUCTIONS["regression"], "cpu", data="."),
            "data is '.', and regression has no use for it",
            "leave data out",
        ),
        (
            lambda: shipped_study(REPRODUCTIONS["pixels"], "cpu", validation="."),
            "validation is '.', and pixels has no use for it",
            "leave validation out",
        ),
        (
            lambda: shipped_study(REPRODUCTIONS["heads"], "cpu", settings={"widht": 3}),
            "unknown setting 'widht'",
            "did you mean 'width'?",
        ),
        (
            lambda: shipped_landscape("cpu", {"width": 3}),
            "unknown setting 'width' of a landscape",
            "did you mean 'widths'?",
        ),
        (lambda: parse_settings(["steps"]), "--settings has 'steps'", "try --settings"),
    ],
)
def test_errors(make, what, fix):
    with pytest.raises(el.EinlinearError, match=re.escape(what)) as caught:
        make()
    assert fix in caught.value.fix
