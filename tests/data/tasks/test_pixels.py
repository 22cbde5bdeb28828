"""The task pixels and the files it reads."""

import math
import tracemalloc

import numpy as np
import pytest
import torch
from torch import nn

import einlinear as el
from einlinear import EinlinearError
from einlinear.data import pixel_files
from einlinear.data.pixel_files import load_pictures
from einlinear.data.tasks.task import SequenceTask
from kit.task_laws import check_laws, falling_loss


def images(count, side=8, seed=0):
    shape = (count, side, side, 3)
    return np.random.default_rng(seed).integers(0, 256, shape, dtype=np.uint8)


def test_laws():
    check_laws(el.open_task("pixels"), el.open_task("pixels"))


def test_the_patches_of_the_package():
    task = el.open_task("pixels")
    assert isinstance(task, SequenceTask)
    assert (task.name, task.unit, task.vocab_size, task.context) == ("pixels", "pixel", 257, 192)
    assert (len(task.train), len(task.test)) == (1908, 212)


def test_order_of_values(tmp_path):
    x = images(2)
    np.savez(tmp_path / "a.npz", train_x=x[:1], test_x=x[1:])
    task = el.open_task("pixels", tmp_path / "a.npz")
    wanted = [
        [
            int(image[row, column, colour])
            for row in range(8)
            for column in range(8)
            for colour in range(3)
        ]
        for image in x
    ]
    batch = task.batch(0, 2, seed=0)
    assert batch.units == 2 * 192
    assert batch.targets.tolist() == [wanted[0]] * 2
    assert batch.inputs.tolist() == [[256, *wanted[0][:-1]]] * 2
    assert batch.inputs.dtype == batch.targets.dtype == torch.int64
    assert task.validation(5)[0].targets.tolist() == [wanted[1]]


def test_boxes_are_averaged(tmp_path):
    x = images(3, side=32)
    x[0, :4, :4] = 10
    x[0, 0, 0] = 18  # mean 10.5
    np.savez_compressed(tmp_path / "a.npz", train_x=x, test_x=x)
    got = load_pictures(tmp_path / "a.npz").train
    assert got[0, 0, 0].tolist() == [11, 11, 11]  # halves go up
    for row in range(8):
        for column in range(8):
            box = x[:, 4 * row : 4 * row + 4, 4 * column : 4 * column + 4].astype(float)
            wanted = np.floor(box.mean((1, 2)) + 0.5)
            assert (got[:, row, column] == wanted).all()


def test_files_without_a_test_part(tmp_path):
    np.savez(tmp_path / "part0.npz", X=images(25, side=16), Y=np.arange(25))  # as CIFAR-5M
    np.savez(tmp_path / "part1.npz", x=images(5))
    both = load_pictures(tmp_path)
    assert (len(both.train), len(both.test)) == (22 + 4, 3 + 1)
    assert (both.train[-4:] == images(5)[1:]).all()
    assert (both.test[-1] == images(5)[0]).all()
    named = load_pictures([tmp_path / "part0.npz", str(tmp_path / "part1.npz")])
    assert named.fingerprint() == both.fingerprint()
    assert load_pictures(tmp_path / "part0.npz").fingerprint() != both.fingerprint()


def test_large_files_are_read_block_by_block(tmp_path, monkeypatch):
    monkeypatch.setattr(pixel_files, "_BLOCK", 64)
    x = images(3000, side=32)  # 9 MB
    np.savez(tmp_path / "a.npz", X=x)
    wanted = load_pictures(tmp_path / "a.npz")
    tracemalloc.start()
    got = load_pictures(tmp_path / "a.npz")
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 5e6
    assert (got.train == wanted.train).all()


def test_loss_does_not_look_at_the_start_token():
    task = el.open_task("pixels")
    batch = task.batch(0, 2, seed=0)
    logits = torch.zeros(2, 192, 257)
    assert float(task.loss(logits, batch)) == pytest.approx(math.log(256))
    logits[..., 256] = 50
    assert float(task.loss(logits, batch)) == pytest.approx(math.log(256))
    assert float(task.loss(logits[..., :256], batch)) == pytest.approx(math.log(256))
    right = 20.0 * nn.functional.one_hot(batch.targets, 257)
    assert float(task.loss(right, batch)) < 1e-3


def test_it_can_be_learned():
    torch.manual_seed(0)
    task = el.open_task("pixels")
    model = nn.Sequential(nn.Embedding(257, 32), nn.Linear(32, 257))
    before, after = falling_loss(task, model)
    assert after < before - 0.2


@pytest.mark.parametrize(
    ("arrays", "message"),
    [
        ({"pictures": images(3)}, "has the keys pictures"),
        ({"train_x": images(3)}, "has the keys train_x"),
        ({"x": images(3).astype(np.float32)}, "dtype float32"),
        ({"x": images(3)[..., 0]}, r"shape \(3, 8, 8\)"),
        ({"x": images(3)[..., :2]}, r"shape \(3, 8, 8, 2\)"),
        ({"x": images(3, side=12)}, r"shape \(3, 12, 12, 3\)"),
        ({"x": images(0)}, r"shape \(0, 8, 8, 3\)"),
        ({"x": images(1)}, "there is 1 image"),
        ({"x": np.asfortranarray(images(3))}, r"shape \(3, 8, 8, 3\)"),
    ],
)
def test_bad_arrays(arrays, message, tmp_path):
    np.savez(tmp_path / "a.npz", **arrays)
    with pytest.raises(EinlinearError, match=message):
        el.open_task("pixels", tmp_path / "a.npz")


def test_bad_files(tmp_path):
    np.savez(tmp_path / "whole.npz", x=images(50))
    raw = (tmp_path / "whole.npz").read_bytes()
    (tmp_path / "cut.npz").write_bytes(raw[:5000])
    (tmp_path / "empty.npz").touch()
    damaged = bytearray(raw)
    damaged[3000] ^= 1
    (tmp_path / "damaged.npz").write_bytes(damaged)
    for name in ("none", "cut", "empty", "damaged"):
        with pytest.raises(EinlinearError, match="cannot read"):
            el.open_task("pixels", tmp_path / f"{name}.npz")
    (tmp_path / "folder").mkdir()
    with pytest.raises(EinlinearError, match=r"holds no \.npz files"):
        el.open_task("pixels", tmp_path / "folder")
