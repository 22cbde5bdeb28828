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


@pytest.fixture(scope="module")
def encoder(tmp_path_factory):
    """The folder of a tiny encoder with random weights, and a text to encode."""
    transformers = pytest.importorskip("transformers")
    torch = pytest.importorskip("torch")
    folder = tmp_path_factory.mktemp("encoder")
    draw = random.Random(2)
    lines = [" ".join(draw.choices(WORDS, k=10)).capitalize() + "." for _ in range(300)]
    (folder / "text.txt").write_text("\n".join(lines), encoding="utf-8")
    model = folder / "tiny"
    model.mkdir()
    vocabulary = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", ".", *sorted(set(WORDS))]
    (model / "vocab.txt").write_text("\n".join(vocabulary), encoding="utf-8")
    transformers.BertTokenizer(str(model / "vocab.txt")).save_pretrained(model)
    sizes = {
        "vocab_size": len(vocabulary),
        "hidden_size": 32,
        "intermediate_size": 128,
        "num_attention_heads": 2,
    }
    config = transformers.BertConfig(num_hidden_layers=2, **sizes)
    torch.manual_seed(0)
    transformers.BertModel(config, add_pooling_layer=False).save_pretrained(model)
    return folder


@pytest.mark.slow
def test_the_compressed_encoder(encoder):
    out, record = encoder / "runs", encoder / "record.json"
    toy = [encoder / "text.txt", "--out", out, "--model", encoder / "tiny"]
    toy += ["--held-out", 64, "--calibration", 128, "--threads", 1]
    run("compress_encoder", "project", *toy)
    run("compress_encoder", "distil", *toy, "--steps", 3)
    run("compress_encoder", "speed", *toy, "--rounds", 2)
    run("compress_encoder", "record", "--out", out, "--file", record, "--source", "made-up words")
    run("compress_encoder", "page", record, "--out", encoder / "page")
    rows = json.loads(record.read_text(encoding="utf-8"))["rows"].values()
    own = [row for row in rows if "share" in row and not row.get("peer")]
    assert len(own) == 2 * (5 * 4 + 3)
    for row in own:
        for metric in ("cosine", "recall", "spearman"):
            mean, low, high = row[metric]
            assert low <= mean <= high <= 1
    dense = next(row for row in rows if row["family"] == "dense")
    assert dense["recall"] == dense["cosine"] == [1, 1, 1]
    page = (encoder / "page/compress-encoder.md").read_text(encoding="utf-8")
    assert "held-out sentences of made-up words" in page
    assert page.count("| anchored |") == 10
    done = run("compress_encoder", "project", *toy)
    assert "cosine" not in done, "a stage that is complete has nothing to do"


@pytest.mark.slow
def test_distillation_resumes_where_it_was_interrupted(encoder, tmp_path, monkeypatch):
    """The weights are the same, bit for bit, as without the interruption."""
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    monkeypatch.syspath_prepend(SCRIPTS)
    import encoder_distil

    monkeypatch.setattr(encoder_distil, "_KEPT_EVERY", 2)
    tokens = transformers.AutoTokenizer.from_pretrained(encoder / "tiny")
    sentences = (encoder / "text.txt").read_text(encoding="utf-8").splitlines()
    teacher = transformers.BertModel.from_pretrained(
        encoder / "tiny", add_pooling_layer=False
    ).eval()

    def distilled(name, interrupt_at=None):
        calls = 0

        def batch_of(texts):
            nonlocal calls
            calls += 1
            if calls == interrupt_at:
                raise KeyboardInterrupt
            found = tokens(texts, padding=True, return_tensors="pt")
            return {"input_ids": found["input_ids"], "attention_mask": found["attention_mask"]}

        torch.manual_seed(1)
        student = transformers.BertModel(teacher.config, add_pooling_layer=False).eval()
        recipe = encoder_distil.Recipe(steps=5, size=4)
        arguments = student, teacher, batch_of, sentences, recipe, tmp_path / name
        if interrupt_at:
            with pytest.raises(KeyboardInterrupt):
                encoder_distil.distil_(*arguments)
            calls, interrupt_at = 0, None
        facts = encoder_distil.distil_(*arguments)
        assert facts["seen"] == 20
        return student.state_dict()

    whole, resumed = distilled("whole"), distilled("resumed", interrupt_at=4)
    assert all(torch.equal(whole[name], resumed[name]) for name in whole)


@pytest.mark.parametrize(
    ("name", "script"),
    [
        ("compress-gpt", "compress_gpt"),
        ("compress-encoder", "compress_encoder"),
        ("adapters", "adapters"),
    ],
)
def test_the_pages_are_those_of_the_committed_records(name, script, tmp_path):
    pytest.importorskip("matplotlib")
    folder = ROOT / "docs/results"
    run(script, "page", folder / f"{name}.json", "--out", tmp_path)
    made = (tmp_path / f"{name}.md").read_text(encoding="utf-8")
    assert made == (folder / f"{name}.md").read_text(encoding="utf-8")


@pytest.mark.parametrize("name", ["compress_gpt", "compress_encoder", "adapters"])
def test_a_script_says_how_to_run_it(name):
    text = (SCRIPTS / f"{name}.py").read_text(encoding="utf-8")
    assert f"\n    python examples/results/{name}.py" in text
    assert not re.search(r"/(tmp|work|home)/", text)
