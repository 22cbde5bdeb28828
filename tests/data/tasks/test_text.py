"""The task text."""

import math

import numpy as np
import pytest
import torch
from torch import nn

import einlinear as el
from einlinear import EinlinearError
from einlinear.data import tokens
from einlinear.data.tasks.task import SequenceTask, random_words, spread
from kit.task_laws import check_laws, falling_loss

LETTERS = "abcdefghijklmnopqrstuvwxyz"


def save(path, text="", count=400):
    """A text in which the next letter says where one is."""
    path.write_text(text or LETTERS * count)
    return path


def test_laws():
    check_laws(el.open_task("text", context=16), el.open_task("text", context=16))


def test_the_texts_of_the_package():
    task = el.open_task("text")
    assert isinstance(task, SequenceTask)
    assert (task.name, task.unit, task.vocab_size, task.context) == ("text", "token", 96, 128)
    counts = task.tokens.counts
    assert (counts.documents, counts.documents_dropped) == (11, 0)
    both = len(task.tokens.train) + len(task.tokens.validation)
    assert both == 408_387  # of 408,407 bytes ten separators lose two newlines each
    assert 0.05 * both < len(task.tokens.validation) < 0.15 * both
    text = task.vocabulary.decode(task.tokens.train[:40])
    assert text == "Mr. Speaker, Mr. Vice President, Members"
    assert {len(batch.inputs) for batch in task.validation(10**6)[:-1]} == {64}


def test_byte_pairs_of_the_package():
    pytest.importorskip("tiktoken")
    task = el.open_task("text", vocabulary="gpt2", context=32)
    assert task.vocab_size == 50_257
    batch = task.batch(0, 4, seed=0)
    assert batch.inputs.dtype == torch.int64
    assert " " in task.vocabulary.decode(batch.inputs[0].tolist())


def test_windows(tmp_path):
    task = el.open_task("text", save(tmp_path / "a.txt"), context=30)
    batch = task.batch(5, 64, seed=1)
    assert batch.inputs.shape == batch.targets.shape == (64, 30)
    assert batch.units == 64 * 30
    assert batch.inputs.is_contiguous()
    assert batch.inputs.dtype == batch.targets.dtype == torch.int64
    for row, target in zip(batch.inputs.tolist(), batch.targets.tolist(), strict=True):
        text = task.vocabulary.decode([*row, target[-1]])
        assert row[1:] == target[:-1]
        assert text in LETTERS * 5


def test_places_are_even_and_reach_both_ends(tmp_path):
    # 1002 tokens for training: windows of 2 + 1 begin at 0 to 999.
    task = el.open_task("text", save(tmp_path / "a.txt", count=100), context=2)
    train = np.arange(1002)
    task = type(task)(
        tokens.Tokens(train, train, task.vocabulary, task.tokens.counts, ""), context=2
    )
    places = torch.cat([task.batch(step, 5000, seed=0).inputs[:, 0] for step in range(10)])
    counts = torch.bincount(places)
    assert len(counts) == 1000
    # 50,000 draws: 50 in each place, deviation 7.
    assert counts.min() > 50 - 6 * 7
    assert counts.max() < 50 + 6 * 7
    assert abs(float(places.double().mean()) - 499.5) < 6 * 1000 / math.sqrt(12 * 50_000)


def test_validation_windows_tile_the_text(tmp_path):
    held_out = save(tmp_path / "v.txt", count=10)  # 261 tokens
    task = el.open_task("text", save(tmp_path / "a.txt"), validation=held_out, context=26)
    rows = torch.cat([batch.inputs for batch in task.validation(1000, batch=3)])
    targets = torch.cat([batch.targets for batch in task.validation(1000, batch=3)])
    assert rows.flatten().tolist() == task.tokens.validation[:260].tolist()
    assert targets.flatten().tolist() == task.tokens.validation[1:261].tolist()
    few = torch.cat([batch.inputs for batch in task.validation(2)])
    assert torch.equal(few, rows[[0, 5]])


def test_loss_by_hand():
    task = el.open_task("text", context=4)
    batch = task.batch(0, 3, seed=0)
    assert float(task.loss(torch.zeros(3, 4, 96), batch)) == pytest.approx(math.log(96))
    logits = torch.randn(3, 4, 96, dtype=torch.float64)
    total = 0.0
    for row in range(3):
        for place in range(4):
            weights = [math.exp(value) for value in logits[row, place].tolist()]
            total -= math.log(weights[batch.targets[row, place]] / sum(weights)) / 12
    assert float(task.loss(logits, batch)) == pytest.approx(total, rel=1e-5)
    assert task.loss(logits.bfloat16(), batch).dtype == torch.float32


def test_it_can_be_learned():
    torch.manual_seed(0)
    task = el.open_task("text", context=16)
    model = nn.Sequential(nn.Embedding(96, 32), nn.Linear(32, 96))
    before, after = falling_loss(task, model)
    assert after < before - 1


def test_a_folder_of_tokens(tmp_path):
    source = save(tmp_path / "a.txt")
    el.prepare(source, tmp_path / "out", processes=1)
    mapped, held = (el.open_task("text", tmp_path / name, context=16) for name in ("out", "a.txt"))
    check_laws(mapped, el.open_task("text", str(tmp_path / "out"), context=16))
    assert torch.equal(mapped.batch(3, 8, seed=0).inputs, held.batch(3, 8, seed=0).inputs)
    with pytest.raises(EinlinearError, match='vocabulary "ascii", not "gpt2"'):
        el.open_task("text", tmp_path / "out", vocabulary="gpt2")
    with pytest.raises(EinlinearError, match="texts for validation are given"):
        el.open_task("text", tmp_path / "out", validation=source)


def test_a_folder_of_texts_with_a_folder_named_parts(tmp_path):
    (tmp_path / "parts").mkdir()
    save(tmp_path / "parts" / "a.txt")
    save(tmp_path / "b.txt")
    assert len(el.open_task("text", tmp_path, context=16).tokens.train) > 15_000


def test_random_words_are_philox():
    words = random_words(5, 6, seed=11)
    expected = np.random.Philox(key=11).advance(5 << 192).random_raw(6)
    assert words.tolist() == expected.tolist()
    assert random_words(5, 6, seed=11, share=slice(2, 4)).tolist() == words[2:4].tolist()
    assert spread(100, 4).tolist() == [0, 25, 50, 75]
    assert spread(3, 10).tolist() == [0, 1, 2]


def test_bad_texts(tmp_path, monkeypatch):
    source = save(tmp_path / "a.txt")
    (tmp_path / "empty.txt").touch()
    (tmp_path / "newlines.txt").write_text("\n\n\n\n")
    for data, settings, message in [
        (tmp_path / "none.txt", {}, "there is no file"),
        (tmp_path / "empty.txt", {}, "is empty"),
        (tmp_path / "newlines.txt", {}, "of 0 documents none is left"),
        (source, {"context": 20_000}, "context is 20000, and the text for train has 10193 tokens"),
        (source, {"context": 300}, "the text for validation has 208 tokens"),
        (source, {"context": 0}, "context is 0"),
        (source, {"vocabulary": "gpt3"}, "'gpt3'"),
        (source, {"rule": "burn"}, "'burn'"),
        (source, {"validation_share": 0}, "the share for validation is 0"),
        (source, {"validation": tmp_path / "none.txt"}, "there is no file"),
        (None, {"validation": source}, "that of the package"),
        (None, {"contxt": 3}, "did you mean 'context'"),
        ("hub:some/name", {}, "from the hub is given directly"),
    ]:
        with pytest.raises(EinlinearError, match=message):
            el.open_task("text", data, **settings)
    monkeypatch.setattr(tokens, "IN_MEMORY", 10_000)
    with pytest.raises(EinlinearError, match="a text of 10,400 bytes is given directly"):
        el.open_task("text", source)


def test_bad_calls():
    task = el.open_task("text", context=4)
    for arguments, message in [
        ((-1, 4, 0), "the step is -1"),
        ((0, 0, 0), "the size of a batch is 0"),
        ((0, 4, -1), "the seed is -1"),
        ((0, 4, 0.5), "the seed is 0.5"),
    ]:
        step, size, seed = arguments
        with pytest.raises(EinlinearError, match=message):
            task.batch(step, size, seed=seed)
    with pytest.raises(EinlinearError, match="the size of a batch is 0"):
        task.validation(0)
    with pytest.raises(EinlinearError, match="did you mean 'text'"):
        el.open_task("texts")
