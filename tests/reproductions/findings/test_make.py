"""The page of findings from records of known laws: the verdicts must be those of the laws."""

import json
from dataclasses import replace
from math import inf, isnan
from pathlib import Path

import pytest

import einlinear as el
from einlinear.landscapes.cells import LandscapeCell
from einlinear.reproductions.findings import samples as samples_module
from einlinear.reproductions.findings.evidence import label_of, read_evidence
from einlinear.reproductions.findings.findings import find_all, transfer_verdict
from einlinear.reproductions.findings.layers import HEADS, MIXTURES, NAMES, PLACES, STRUCTURES
from einlinear.reproductions.findings.make import make_findings
from einlinear.reproductions.findings.rates import drifts
from einlinear.reproductions.findings.ratios import overtakings
from einlinear.reproductions.findings.samples import draw_laws
from einlinear.runs.packed import write_packed
from kit.report_records import Kind, make_record

WIDTHS = (32, 48, 64, 96, 128, 192)
OMEGA, PSI, SAME = 0.4, 0.5, 1.0
TRUE = dict(
    zip(
        STRUCTURES,
        [1, SAME, SAME, SAME, SAME, PSI, PSI, PSI, PSI, OMEGA, OMEGA, OMEGA, SAME],
        strict=True,
    )
)


def settings_of(label):
    """The settings of a run that records name so."""
    if label.startswith("low_rank fan-in"):
        return "low_rank", {"factor_init": "fan_in"}
    structure, _, rest = label.partition(" moe 2/") if " moe" in label else (label, "", "")
    if "ffn-moe" in label:
        return "dense", {"experts": "ffn", "num_experts": int(label.split("/")[1])}
    if rest:
        layers = {"in V and O": "vo", "in FFNs": "ffn"}.get(rest.partition(" ")[2], "all")
        return structure, {"num_experts": int(rest.split(" ")[0]), "expert_layers": layers}
    if "head-aligned" in label:
        axis = "own" if "own" in label else "shared"
        return "btt", {"head_aligned": True, "head_axis": axis}
    return label, {}


def loss(rate, move):
    """The loss at a rate, a power of two; the best rate is -5, moved."""
    return 1 + 0.1 * abs(rate + 5 - move)


def records_of(label, multiplier, seeds=2):
    structure, settings = settings_of(label)
    growth = 2.0 if structure == "dense" else 1.5
    kind = Kind(structure, multiplier, growth=growth, settings=settings)
    return [make_record(kind, w, s, overtime=5.0) for w in WIDTHS for s in range(seeds)]


def all_records(multipliers):
    return [record for label, true in multipliers.items() for record in records_of(label, true)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A study in which BTT-MoE is better than the standard mixture, and heads do not matter."""
    folder = tmp_path_factory.mktemp("study")
    mixtures = {name: 2.0 for name in (*MIXTURES, *PLACES)}
    mixtures |= {"btt moe 2/8": 4.0, "btt moe 2/16": 5.0}
    write_packed(all_records(TRUE), folder / "structures.jsonl")
    write_packed(all_records(mixtures), folder / "moe.jsonl")
    write_packed(all_records(dict.fromkeys(HEADS, 1.0)), folder / "heads.jsonl")
    tuned = [replace(r, config=replace(r.config, lr=lr)) for lr in (0.01, 0.02)
             for r in records_of("btt", 1.0)[:1]]  # fmt: skip
    write_packed(tuned, folder / "tuning.jsonl")
    rates = {"mup": [0, 0], "naive": [0, -2], "unit": [0, -4]}
    cells = [
        {
            "parametrization": name,
            "structure": structure,
            "width": width,
            "rates": [-9, -8, -7, -6, -5, -4],
            "losses": [[loss(r, move), None if r > -5 else loss(r, move)]
                       for r in range(-9, -3)],
            "accuracies": [[0.5, 0.5]] * 6,
        }
        for name, moves in rates.items()
        for structure in ("dense", "btt")
        for width, move in zip((64, 256), moves, strict=True)
    ]  # fmt: skip
    (folder / "landscape.json").write_text(json.dumps({"cells": cells}))
    return folder


@pytest.fixture(scope="module", autouse=True)
def few_samples():
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(samples_module, "RESAMPLES", 60)
        yield


@pytest.fixture(scope="module")
def found(folder):
    return find_all(read_evidence(folder))


def test_labels_are_those_of_records(folder):
    evidence = read_evidence(folder)
    labels = {label_of(record) for record in evidence.all_records}
    assert labels == {*STRUCTURES, *MIXTURES, *PLACES, *HEADS}
    assert labels <= set(NAMES)


def test_verdicts_are_those_of_the_laws(found):
    verdicts = {key: finding.verdict for key, finding in found.judged.items()}
    assert verdicts["omega"] == verdicts["psi"] == verdicts["nu"] == "reproduced"
    assert verdicts["moe"] == verdicts["moe-structures"] == "reproduced"
    assert verdicts["heads"] in ("not resolved", "contradicted")
    assert (found.power_law, found.transfer) == ("reproduced", "reproduced")


def test_ratios_are_those_of_the_laws(found):
    laws = found.samples["flops"]
    for name in set(STRUCTURES) - {"dense"}:
        ratio = laws.ratio(name, "dense")
        assert ratio.value == pytest.approx(TRUE[name], rel=0.1)
        assert ratio.low / 1.05 <= TRUE[name] <= ratio.high * 1.05
        assert ratio.before[0] == pytest.approx(TRUE[name], rel=0.15)
        assert laws.ratio("dense", name).value == pytest.approx(1 / ratio.value)
    rows = {row.text: row.judged.ratio.value for row in found.judged["moe"].rows}
    assert rows["BTT-MoE, E = 16 over standard MoE, E = 16"] == pytest.approx(2.5, rel=0.15)


def test_laws_that_cross_meet_where_they_do():
    """C^-0.3 and 2 C^-0.4 meet at C = 2^10."""
    compute = [float(10 * 2**k) for k in range(24)]
    rows = [
        (f"{name}{size}{k}", c, b * c**-a, name, f"{name}{k // 4}")
        for name, b, a in (("flat", 1.0, 0.3), ("dense", 2.0, 0.4))
        for size in "x"
        for k, c in enumerate(compute)
    ]
    run, c, loss, structure, size = zip(*rows, strict=True)
    data = el.Observations(run=run, compute=c, loss=loss, structure=structure, size=size)
    laws = draw_laws(data, linf=0.0, points="all", samples=0)
    assert laws.crossing("flat", "dense") == pytest.approx(2**10, rel=0.02)
    assert laws.exponents_apart("flat", "dense")[0] == pytest.approx(-0.1, abs=1e-6)
    last = laws.ratio("flat", "dense")
    assert last.loss == pytest.approx(compute[-1] ** -0.3)
    assert last.value == pytest.approx((2 / last.loss) ** 2.5 / compute[-1])
    earlier = 2 * (last.compute / 10) ** -0.4
    assert last.before[0] == pytest.approx(last.compute / 10 / earlier ** (-1 / 0.3))


@pytest.mark.slow
def test_layers_without_runs_are_left_out(folder, tmp_path):
    kept = [r for r in el.read_records(folder / "structures.jsonl") if label_of(r) != "kronecker"]
    write_packed(kept, tmp_path / "structures.jsonl")
    page = make_findings(tmp_path, tmp_path / "out")
    assert "Kronecker" not in page.read_text()
    assert "Mixtures" not in page.read_text()
    numbers = json.loads(
        (tmp_path / "out" / "findings.json").read_text(), parse_constant=pytest.fail
    )
    assert len(numbers["over_dense"]["flops"]) == len(STRUCTURES) - 2


def test_one_seed_is_preliminary(folder, tmp_path):
    one = [r for r in el.read_records(folder / "structures.jsonl") if r.config.seed == 0]
    write_packed(one, tmp_path / "structures.jsonl")
    page = make_findings(tmp_path, tmp_path / "out").read_text()
    assert "reproduced (one seed)" in page
    assert "**Preliminary**" in page


def test_drifts_are_those_of_the_best_rates(found):
    assert [found.drifts[name].mean for name in ("mup", "naive", "unit")] == [0, 2, 4]
    assert found.drifts["mup"].one_rate == 0
    assert found.drifts["naive"].one_rate == pytest.approx(100 * 0.5 * 0.2)
    assert found.drifts["unit"].one_rate == pytest.approx(100 * 0.5 * 0.4)


def test_a_baseline_that_does_not_learn_has_no_drift():
    def cell(name, width, losses):
        return LandscapeCell(name, "dense", width, (-2, -1), losses, ((0.5,), (0.5,)))

    cells = [
        cell("mup", 64, ((1.5,), (1.4,))),
        cell("mup", 256, ((1.5,), (1.4,))),
        cell("unit", 64, ((1.9,), (2.0,))),
        cell("unit", 256, ((2.31,), (inf,))),
    ]
    moved = drifts(cells)
    assert (moved["mup"].mean, moved["mup"].num_learned) == (0, 2)
    assert isnan(moved["unit"].mean)
    assert moved["unit"].num_learned == 1
    assert transfer_verdict(moved) == "reproduced"
    lower = [*cells[:2], cell("unit", 64, ((0.2,), (0.1,))), cells[3]]
    assert transfer_verdict(drifts(lower)) == "not resolved"


def test_a_width_that_ended_early_is_named(folder):
    evidence = read_evidence(folder)
    short = [
        replace(r, curve=r.curve[:-7]) if (label_of(r), r.config.width) == ("btt", 64) else r
        for r in evidence.records["structures"]
    ]
    before = overtakings(evidence.observations("structures", "flops"))
    ends = overtakings(el.Observations.from_records(short))
    assert before["btt"].early == ()
    assert ends == before | {"btt": replace(before["btt"], early=(64,))}


@pytest.mark.slow
def test_the_page_has_every_finding(folder, tmp_path):
    page = make_findings(folder, tmp_path / "a").read_text()
    for text in (
        "Every structure follows a power law",
        "**reproduced**",
        "Learning rates transfer",
    ):
        assert text in page
    assert "&lt;" not in page
    assert "&#3" not in page
    for figure in ("findings.svg", "laws.svg", "rates.svg"):
        assert figure in page
        assert (tmp_path / "a" / figure).stat().st_size > 5000
    numbers = json.loads((tmp_path / "a" / "findings.json").read_text())
    assert numbers["findings"]["omega"]["verdict"] == "reproduced"


def test_a_folder_without_structures(tmp_path):
    with pytest.raises(el.EinlinearError, match=r"no structures\.jsonl"):
        read_evidence(tmp_path)


@pytest.mark.slow
def test_the_committed_page_is_that_of_the_committed_records(tmp_path, monkeypatch):
    monkeypatch.setattr(samples_module, "RESAMPLES", 1000)
    results = Path(__file__).parents[3] / "docs" / "results"
    page = make_findings(results / "study", tmp_path)
    assert page.read_text() == (results / "findings.md").read_text()
