import numpy as np
import pytest

from einlinear import EinlinearError
from einlinear.data.images import load_images, patch_halves


def images(count, rows=4, columns=6, seed=0):
    shape = (count, rows, columns, 3)
    return np.random.default_rng(seed).integers(0, 256, shape, dtype=np.uint8)


def saved(path, **changes):
    parts = {
        "train_x": images(20),
        "train_y": np.arange(20, dtype=np.uint8) % 5,
        "test_x": images(8, seed=1),
        "test_y": np.arange(8) % 5,
    }
    np.savez(path, **{key: part for key, part in (parts | changes).items() if part is not None})
    return path


def test_a_file_of_ones_own(tmp_path):
    path = saved(tmp_path / "own.npz")
    held = load_images(path)
    assert held.train_x.shape == (20, 72)
    assert held.train_x.dtype == np.float32
    assert held.num_classes == 5
    assert held.name == "own"
    assert held.test_y.tolist() == [0, 1, 2, 3, 4, 0, 1, 2]
    colours = held.train_x.reshape(-1, 3)
    assert np.allclose(colours.mean(0), 0, atol=1e-5)
    assert np.allclose(colours.std(0), 1, atol=1e-5)
    # Test images are moved and scaled as those for training are.
    raw = np.load(path)
    train, test = (raw[key].reshape(-1, 3).astype(float) for key in ("train_x", "test_x"))
    expected = (test - train.mean(0)) / train.std(0)
    assert np.allclose(held.test_x.reshape(-1, 3), expected, atol=1e-4)


def test_pooling_averages_squares(tmp_path):
    path = saved(tmp_path / "own.npz")
    held, raw = load_images(path, pool=2), np.load(path)["train_x"].astype(float)
    means = np.zeros((20, 2, 3, 3))
    for row in range(4):
        for column in range(6):
            means[:, row // 2, column // 2] += raw[:, row, column] / 4
    expected = (means - means.mean((0, 1, 2))) / means.std((0, 1, 2))
    assert np.allclose(held.train_x, expected.reshape(20, -1), atol=1e-4)


def test_the_fingerprint_is_of_all_that_matters(tmp_path):
    own = load_images(saved(tmp_path / "a.npz")).fingerprint
    assert load_images(saved(tmp_path / "b.npz")).fingerprint == own
    changed = load_images(saved(tmp_path / "c.npz", test_y=np.zeros(8, int))).fingerprint
    pooled = load_images(tmp_path / "a.npz", pool=2).fingerprint
    assert len({own, changed, pooled}) == 3


def test_the_task_of_the_package():
    parts = patch_halves()
    assert parts["train_x"].shape == (1590, 8, 4, 3)
    assert parts["test_x"].shape == (530, 8, 4, 3)
    counts = np.bincount(parts["train_y"])
    assert len(counts) == 10
    assert counts.min() >= 158  # tenths of 1590
    assert counts.max() <= 160
    assert set(parts["test_y"]) == set(range(10))
    # The left half tells a lot about the right one, and not all.
    brightness = parts["train_x"].mean((1, 2, 3))
    assert 0.9 < np.corrcoef(brightness, parts["train_y"])[0, 1] < 0.999
    assert load_images().train_x.shape == (1590, 96)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"test_y": None}, "lacks a key: test_y"),
        ({"train_x": images(20).astype(np.float32)}, "dtype float32"),
        ({"train_x": images(20)[..., 0]}, r"images of shape \(20, 4, 6\)"),
        ({"train_y": np.arange(19)}, r"classes of shape \(19,\)"),
        ({"train_y": np.arange(20) - 1}, "number the classes from 0"),
        ({"train_y": np.arange(20) / 2}, "dtype float64"),
        ({"test_x": images(8, rows=5)}, "all images have one size"),
        ({"test_x": images(0), "test_y": np.arange(0)}, r"images of shape \(0, 4, 6, 3\)"),
    ],
)
def test_bad_files(changes, message, tmp_path):
    with pytest.raises(EinlinearError, match=message):
        load_images(saved(tmp_path / "bad.npz", **changes))


def test_what_is_no_file_of_images(tmp_path):
    with pytest.raises(EinlinearError, match="No such file"):
        load_images(tmp_path / "none.npz")
    (tmp_path / "text.npz").write_text("no images")
    with pytest.raises(EinlinearError, match="cannot read"):
        load_images(tmp_path / "text.npz")
    np.save(tmp_path / "array.npy", np.zeros(3))
    with pytest.raises(EinlinearError, match="cannot read"):
        load_images(tmp_path / "array.npy")
    with pytest.raises(EinlinearError, match="pool is 3, and the images of own are 4 x 6"):
        load_images(saved(tmp_path / "own.npz"), pool=3)
