"""The scripts of the worked results run from the first stage to the page, at toy size."""

import json
import random
import re
from pathlib import Path

import pytest

from kit.forked import run_script

ROOT = Path(__file__).parents[1]
SCRIPTS = ROOT / "examples/results"
TOY = ["--width", "32", "--depth", "1", "--context", "16", "--steps", "6", "--windows", "8"]
WORDS = "a speech is made of words and every word is made of letters again".split()


def made_up(path, documents, seed):
    draw = random.Random(seed)
    texts = [" ".join(draw.choices(WORDS, k=80)) for _ in range(documents)]
    path.write_text("\n\n\n".join(texts), encoding="utf-8")
    return str(path)


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    folder = tmp_path_factory.mktemp("results")
    texts = [made_up(folder / "train.txt", 20, 0), made_up(folder / "val.txt", 4, 1)]
    run("compress_gpt", "train", *texts, "--out", folder / "runs", *TOY)
    return folder, texts


def run(name, *arguments):
    return run_script(SCRIPTS / f"{name}.py", *map(str, arguments))


@pytest.mark.slow
def test_the_compressed_gpt(runs):
    folder, texts = runs
    out, record = folder / "runs", folder / "compress.json"
    run("compress_gpt", "project", *texts, "--out", out, "--batches", 1)
    run("compress_gpt", "tune", *texts, "--out", out, "--steps", 2)
    run("compress_gpt", "record", "--out", out, "--file", record, "--source", "made-up words")
    run("compress_gpt", "page", record, "--out", folder / "page")
    page = (folder / "page/compress-gpt.md").read_text(encoding="utf-8")
    assert "symbols of made-up words" in page
    assert "speed |" not in page
    assert page.count("| anchored |") == 6
    arms = json.loads(record.read_text(encoding="utf-8"))["projected"]
    assert len(arms) == 24
    assert all(arm["loss"][1] <= arm["loss"][0] <= arm["loss"][2] for arm in arms.values())

    run("compress_gpt", "speed", "--out", out, "--rounds", 2, "--batch", 1)
    run("compress_gpt", "record", "--out", out, "--file", record)
    run("compress_gpt", "page", record, "--out", folder / "page")
    page = (folder / "page/compress-gpt.md").read_text(encoding="utf-8")
    assert "against the level before | speed |" in page
    assert (folder / "page/compress-gpt.svg").read_text(encoding="utf-8").startswith("<?xml")
    done = run("compress_gpt", "project", *texts, "--out", out, "--batches", 1)
    assert "loss" not in done, "a stage that is complete has nothing to do"


@pytest.mark.slow
def test_adapters(runs):
    pytest.importorskip("peft")
    folder, texts = runs
    record = folder / "adapters.json"
    arguments = ["--gpt", folder / "runs", "--out", folder / "adapters", "--steps", 2]
    run("adapters", "run", texts[0], *arguments, "--windows", 8)
    run("adapters", "record", "--out", folder / "adapters", "--file", record)
    run("adapters", "page", record, "--out", folder / "page")
    arms = json.loads(record.read_text(encoding="utf-8"))["arms"]
    assert len(arms) == 5
    lora, low_rank, *_ = arms.values()
    assert lora["params"] == low_rank["params"]
    page = (folder / "page/adapters.md").read_text(encoding="utf-8")
    assert f"{lora['params']:,}" in page


@pytest.mark.parametrize(
    ("name", "script"), [("compress-gpt", "compress_gpt"), ("adapters", "adapters")]
)
def test_the_pages_are_those_of_the_committed_records(name, script, tmp_path):
    pytest.importorskip("matplotlib")
    folder = ROOT / "docs/results"
    run(script, "page", folder / f"{name}.json", "--out", tmp_path)
    made = (tmp_path / f"{name}.md").read_text(encoding="utf-8")
    assert made == (folder / f"{name}.md").read_text(encoding="utf-8")


@pytest.mark.parametrize("name", ["compress_gpt", "adapters"])
def test_a_script_says_how_to_run_it(name):
    text = (SCRIPTS / f"{name}.py").read_text(encoding="utf-8")
    assert f"\n    python examples/results/{name}.py" in text
    assert not re.search(r"/(tmp|work|home)/", text)
