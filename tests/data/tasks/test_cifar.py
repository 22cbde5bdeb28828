"""The task cifar, and CIFAR-10 as it is distributed."""

import math
import pickle
import struct

import numpy as np
import pytest
import torch
from torch import nn

import einlinear as el
from einlinear import EinlinearError
from einlinear.data.cifar_batches import parse_pickle, read_cifar
from einlinear.data.images import load_images
from einlinear.data.tasks.task import VectorTask
from kit.task_laws import check_laws, falling_loss


def batch(seed, count=6):
    rng = np.random.default_rng(seed)
    rows = rng.integers(0, 256, (count, 3072), dtype=np.uint8)
    return rows, rng.integers(0, 10, count).tolist()


NAMES = [*(f"data_batch_{i}" for i in range(1, 6)), "test_batch"]


def save_pickles(folder, protocol=2, **changes):
    folder.mkdir(exist_ok=True)
    for seed, name in enumerate(NAMES):
        rows, labels = batch(seed)
        held = {
            b"batch_label": b"a batch",
            b"labels": labels,
            b"data": rows,
            b"filenames": [b"x.png"],
        }
        held |= {key.encode(): value for key, value in changes.items()}
        (folder / name).write_bytes(pickle.dumps(held, protocol=protocol))
    return folder


def save_binary(folder):
    folder.mkdir(exist_ok=True)
    for seed, name in enumerate(NAMES):
        rows, labels = batch(seed)
        raw = b"".join(bytes([y]) + x.tobytes() for x, y in zip(rows, labels, strict=True))
        (folder / f"{name}.bin").write_bytes(raw)
    return folder


def check_parts(parts):
    assert parts["train_x"].shape == (30, 32, 32, 3)
    for index in (0, 7, 29):
        rows, labels = batch(index // 6)
        row = rows[index % 6]
        for y, x, colour in ((0, 0, 0), (0, 31, 1), (17, 5, 2), (31, 31, 2)):
            assert parts["train_x"][index, y, x, colour] == row[colour * 1024 + y * 32 + x]
        assert parts["train_y"][index] == labels[index % 6]
    assert parts["test_y"].tolist() == batch(5)[1]


@pytest.mark.parametrize("protocol", [0, 1, 2, 3, 4])
def test_python_batches(protocol, tmp_path):
    check_parts(read_cifar(save_pickles(tmp_path / "a", protocol)))


def test_binary_batches(tmp_path):
    check_parts(read_cifar(save_binary(tmp_path / "a")))


def python_2_pickle(rows, labels):
    """A batch as Python 2 wrote it, opcode by opcode."""
    text = lambda raw: b"U" + bytes([len(raw)]) + raw  # noqa: E731
    size = lambda n: b"J" + struct.pack("<i", n)  # noqa: E731
    kind = b"cnumpy\ndtype\n" + text(b"u1") + b"K\x00K\x01\x87R"
    kind += b"(K\x03" + text(b"|") + b"NNNJ\xff\xff\xff\xffJ\xff\xff\xff\xffK\x00tb"
    raw = rows.tobytes()
    array = b"cnumpy.core.multiarray\n_reconstruct\nq\x01cnumpy\nndarray\nq\x02K\x00\x85" + text(
        b"b"
    )
    array += b"\x87R(K\x01" + size(len(rows)) + size(3072) + b"\x86" + kind + b"\x89"
    array += b"T" + struct.pack("<i", len(raw)) + raw + b"tb"
    numbers = b"](" + b"".join(b"K" + bytes([y]) for y in labels) + b"e"
    return b"\x80\x02}(" + text(b"data") + array + text(b"labels") + numbers + b"u."


def test_batches_of_python_2(tmp_path):
    for seed, name in enumerate(NAMES):
        raw = python_2_pickle(*batch(seed))
        (tmp_path / name).write_bytes(raw)
    loaded = pickle.loads(raw, encoding="bytes")  # the oracle, on bytes made here
    assert (loaded[b"data"] == batch(5)[0]).all()
    check_parts(read_cifar(tmp_path))


class Evil:
    def __reduce__(self):
        return (open, ("ran", "w"))


def test_nothing_in_a_pickle_is_run(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for protocol in range(5):
        for held in (Evil(), {b"data": Evil(), b"labels": [0]}, {b"labels": Evil()}):
            (tmp_path / "test_batch").write_bytes(pickle.dumps(held, protocol=protocol))
            (tmp_path / "data_batch_1").write_bytes(pickle.dumps(held, protocol=protocol))
            with pytest.raises(EinlinearError, match="cannot read"):
                read_cifar(tmp_path)
    assert not (tmp_path / "ran").exists()
    pickle.loads(pickle.dumps(Evil())).close()  # it would have
    assert (tmp_path / "ran").exists()


def test_plain_values():
    held = {
        b"a": [1, -5, 70_000, 2**40, None, True, False, "text", b"bytes", (1,), (), (1, 2, 3, 4)]
    }
    for protocol in range(5):
        assert parse_pickle(pickle.dumps(held, protocol=protocol))[b"a"][:8] == held[b"a"][:8]
    assert parse_pickle(pickle.dumps(held, protocol=4)) == held


@pytest.mark.parametrize(
    "raw",
    [
        b"",
        b"no pickle",
        b"\x80\x02.",
        b"\x80\x02}",
        b"\x80\x02(e.",
        b"\x80\x02h\x05.",
        b"\x80\x02]u.",
    ],
)
def test_broken_pickles(raw, tmp_path):
    for name in ("data_batch_1", "test_batch"):
        (tmp_path / name).write_bytes(raw)
    with pytest.raises(EinlinearError, match="cannot read"):
        read_cifar(tmp_path)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"labels": [0] * 5}, "cannot read"),
        ({"labels": [11] * 6}, "classes outside 0 to 9"),
        ({"data": batch(0)[0].astype(np.int64)}, "not an array of bytes"),
        ({"data": batch(0)[0][:, :100]}, "shape"),
        ({"data": [1, 2]}, "not an array"),
    ],
)
def test_bad_python_batches(changes, message, tmp_path):
    with pytest.raises(EinlinearError, match=message):
        read_cifar(save_pickles(tmp_path / "a", **changes))


def test_bad_folders(tmp_path):
    save_binary(tmp_path)
    (tmp_path / "data_batch_3.bin").write_bytes(b"\0" * 3072)
    with pytest.raises(EinlinearError, match="has 3,072 bytes"):
        read_cifar(tmp_path)
    for path in tmp_path.glob("data_batch*"):
        path.unlink()
    with pytest.raises(EinlinearError, match=r"holds no data_batch_1\.bin"):
        read_cifar(tmp_path)


def test_an_array_of_another_size_than_it_says(tmp_path):
    six, seven = (b"J" + struct.pack("<i", count) for count in (6, 7))
    raw = python_2_pickle(*batch(0))
    assert raw.count(six) == 1
    for name in NAMES:
        (tmp_path / name).write_bytes(raw.replace(six, seven))
    with pytest.raises(EinlinearError, match="does not match its shape"):
        read_cifar(tmp_path)


def test_laws():
    check_laws(el.open_task("cifar"), el.open_task("cifar"))


def test_the_patches_of_the_package():
    task = el.open_task("cifar")
    assert isinstance(task, VectorTask)
    assert (task.name, task.unit, task.in_features, task.out_features) == ("cifar", "image", 96, 10)
    assert el.open_task("cifar", pool=2).in_features == 24


@pytest.mark.parametrize("save", [save_pickles, save_binary])
def test_the_task_on_distributed_files(save, tmp_path):
    inner = "cifar-10-batches-py" if save is save_pickles else "cifar-10-batches-bin"
    save(tmp_path / inner)
    task = el.open_task("cifar", tmp_path)
    assert (task.in_features, task.out_features) == (3072, 10)
    x = np.concatenate([batch(seed)[0] for seed in range(5)])
    planes = x.reshape(30, 3, 1024).astype(float)
    standard = (planes - planes.mean((0, 2), keepdims=True)) / planes.std((0, 2), keepdims=True)
    got = task.batch(0, 50, seed=0)
    assert got.units == 50
    for row, label in zip(got.inputs.numpy(), got.targets.tolist(), strict=True):
        distances = np.abs(standard.transpose(0, 2, 1).reshape(30, -1) - row).max(1)
        index = int(distances.argmin())
        assert distances[index] < 1e-4
        assert label == batch(index // 6)[1][index % 6]
    pixels = el.open_task("pixels", tmp_path)
    assert (len(pixels.train), len(pixels.test)) == (30, 6)
    assert load_images(tmp_path).fingerprint == task.fingerprint


def test_loss_by_hand():
    task = el.open_task("cifar")
    got = task.batch(0, 4, seed=0)
    assert float(task.loss(torch.zeros(4, 10), got)) == pytest.approx(math.log(10))
    logits = torch.zeros(4, 10)
    logits[range(4), got.targets] = 1.0
    assert float(task.loss(logits, got)) == pytest.approx(math.log(9 + math.e) - 1)


def test_it_can_be_learned():
    torch.manual_seed(0)
    task = el.open_task("cifar")
    before, after = falling_loss(task, nn.Linear(96, 10))
    assert after < before - 0.5


def test_bad_data(tmp_path):
    with pytest.raises(EinlinearError, match="No such file"):
        el.open_task("cifar", tmp_path / "none.npz")
    np.savez(tmp_path / "a.npz", x=np.zeros(3))
    with pytest.raises(EinlinearError, match="lacks a key: train_x"):
        el.open_task("cifar", tmp_path / "a.npz")
    with pytest.raises(EinlinearError, match="is given 2 files"):
        el.open_task("cifar", [tmp_path / "a.npz", tmp_path / "b.npz"])
    with pytest.raises(EinlinearError, match="pool is 0"):
        el.open_task("cifar", pool=0)
    with pytest.raises(EinlinearError, match="cannot read"):
        el.open_task("cifar", tmp_path)


def doubled(count):
    """A list of the same list twice, and so on: 2^count values in a few bytes."""
    return b"\x80\x02}(U\x06labels]q\x00K\x01a" + b"](h\x00h\x00eq\x00" * count + b"u."


@pytest.mark.no_cover
@pytest.mark.parametrize(
    ("raw", "message"),
    [
        (b"\x80\x02)" + b"\x85" * 3_000_000 + b".", "nested more than 16 deep"),
        (b"\x80\x02}(K\x01" + b"\x85" * 900_000 + b"K\x01u.", "nested more than 16 deep"),
        (b"\x80\x02" + b"]" * 99_000 + b"a" * 98_999 + b".", "nested more than 16 deep"),
        (b"\x80\x02" + b"N" * 1_000_001 + b".", "more than 1,000,000 opcodes"),
        (doubled(40), "uses a list, dict or array twice"),
        (b"\x80\x02}K\x01\x85K\x01s.", "keys are not strings"),
        (b"\x80\x02B\xff\xff\xff\x7fabc.", "expected 2147483647 bytes"),
        (b"\x80\x04\x8e" + b"\xff" * 7 + b"\x0fabc.", "bytes"),
        (
            b"\x80\x02(c_codecs\nencode\nq\x01X\x64\0\0\0"
            + b"x" * 100
            + b"\x85q\x02Rh\x01h\x02R"
            + b"h\x01h\x02R" * 50
            + b"t.",
            "grows beyond its own size",
        ),
        (b"\x80\x02K\x01(" + b"(t" * 100_000 + b"t.", "it is not a dict"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_pickles_made_to_do_harm(raw, message, tmp_path):
    for name in ("data_batch_1", "test_batch"):
        (tmp_path / name).write_bytes(raw)
    with pytest.raises(EinlinearError, match=message):
        read_cifar(tmp_path)


@pytest.mark.parametrize(
    "labels", [["a"] * 6, [10**30] * 6, [[1]] * 6, {b"a": 1}, b"123456", [True] * 6, [-1] * 6]
)
def test_labels_that_are_none(labels, tmp_path):
    with pytest.raises(EinlinearError, match=r"label|classes"):
        read_cifar(save_pickles(tmp_path / "a", labels=labels))


def test_files_that_are_none(tmp_path):
    (tmp_path / "test_batch").mkdir()
    (tmp_path / "data_batch_1").mkdir()
    with pytest.raises(EinlinearError, match="Is a directory"):
        read_cifar(tmp_path)
    for name in ("data_batch_1", "test_batch"):
        (tmp_path / name).rmdir()
        with (tmp_path / name).open("wb") as file:
            file.truncate(2**40)  # a file of holes: a terabyte, and nothing on the disk
    with pytest.raises(EinlinearError, match="has 1,099,511,627,776 bytes"):
        read_cifar(tmp_path)
