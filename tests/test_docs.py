"""The code in README and docs runs, command lines too."""

import re
import shlex
from pathlib import Path

import pytest
import torch

import einlinear as el
from einlinear.cli.main import main

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
SLOW = {
    "test_python": ["docs/export.md", "docs/search.md"],
    "test_commands": [
        "README.md",
        "docs/models.md",
        "docs/report.md",
        "docs/reproduce.md",
        "docs/search.md",
        "docs/sweeps.md",
        "docs/training-runs.md",
        "docs/tutorial.md",
    ],
}
"""Pages with long examples, whose calls and commands other tests make too."""


def pages(test):
    """Parameters of a test of all pages."""
    slow = [ROOT / name for name in SLOW[test]]
    return pytest.mark.parametrize(
        "page",
        [pytest.param(page, marks=[pytest.mark.slow] * (page in slow)) for page in PAGES],
        ids=lambda page: page.name,
    )


def blocks(page, language):
    text = page.read_text(encoding="utf-8")
    return re.findall(rf"^```{language}\n(.*?)^```", text, re.MULTILINE | re.DOTALL)


@pytest.mark.filterwarnings("ignore:.*LeafSpec:FutureWarning")  # in torch's own export
@pages("test_python")
def test_python(page, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    names = {}
    for block in blocks(page, "python"):
        exec(compile(block, str(page), "exec"), names)


@pages("test_commands")
def test_commands(page, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    # The first line of a file that commands use is its name.
    for block in (*blocks(page, "toml"), *blocks(page, "py")):
        name = re.match(r"# (\w+\.(?:toml|py))\n", block)
        if name:
            (tmp_path / name[1]).write_text(block, encoding="utf-8")
    for block in blocks(page, "sh"):
        for line in block.splitlines():
            if line.startswith("einlinear "):
                main(shlex.split(line, comments=True)[1:])


def test_the_readme_takes_a_newcomer_to_a_trained_model(capsys):
    names = {}
    exec(blocks(ROOT / "README.md", "python")[0], names)
    layers = names["model"]
    assert [type(layers[i]).__name__ for i in (0, 2, 4)] == ["EinsumLinear"] * 2 + ["Linear"]
    assert "left alone: 4 (output head)" in capsys.readouterr().out
    assert len({group["lr"] for group in names["optimizer"].param_groups}) > 2
    assert names["loss"] < 1.0  # 2.30 for equal logits


def test_the_readme_says_what_comes_out(capsys):
    plan = next(b for b in blocks(ROOT / "README.md", "python") if "make_plan" in b)
    exec(plan, {"el": el, "torch": torch})
    out = capsys.readouterr().out
    assert "...ga,gaf,fge->...fe {'XA': 32, 'XAB': 32," in out
    assert "16.0 1024" in out


def test_the_readme_halves_a_trained_model(capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    trained = next(b for b in blocks(ROOT / "README.md", "python") if "budget=0.5" in b)
    torch.manual_seed(0)
    made = {"el": el, "torch": torch, "nn": torch.nn}
    exec(trained, made)
    assert "budget: 0.5 of the flops" in capsys.readouterr().out
    assert any(isinstance(module, el.EinsumLinear) for module in made["trained"])
    x = torch.randn(5, 64)
    assert torch.equal(made["trained"](x), made["loaded"](x))


def test_the_page_on_models_shows_the_table(capsys):
    page = ROOT / "docs" / "models.md"
    exec(blocks(page, "python")[0], {})
    table = [line.strip() for line in capsys.readouterr().out.strip().splitlines()]
    lines = [line.strip() for line in page.read_text(encoding="utf-8").splitlines()]
    start = lines.index(table[0])
    assert lines[start : start + len(table)] == table


@pytest.mark.parametrize("name", ["house.svg", "engine.svg", "results/speed.svg"])
def test_pictures_follow_the_dark_mode(name):
    picture = (ROOT / "docs" / name).read_text(encoding="utf-8")
    drawn = picture.partition("</style>")[2]
    assert "(prefers-color-scheme:dark)" in picture
    assert 'fill="#' not in drawn, "a colour that the style cannot change"


def test_links_lead_somewhere():
    for page in [*PAGES, ROOT / "CONTRIBUTING.md"]:
        for target in re.findall(r"\]\(([^)#]+)\)", page.read_text(encoding="utf-8")):
            assert (page.parent / target).exists(), f"{page.name} links to {target}"
