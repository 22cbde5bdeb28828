"""Images with classes, from a user's file or from a small set in the package."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from einlinear.data.cifar_batches import cifar_folder, read_cifar
from einlinear.errors import EinlinearError
from einlinear.files.arrays import open_arrays
from einlinear.files.whole import as_path, checked_reading
from einlinear.structures.values import whole_number

_KEYS = ("train_x", "train_y", "test_x", "test_y")
_RULE = (
    "the file is an .npz with train_x and test_x (uint8; image, row, column, colour) and "
    "train_y and test_y (whole numbers, the classes, from 0), or a folder of CIFAR-10's batches"
)
_NUM_CLASSES = 10
_MOST_CLASSES = 65_536
_TEST_SHARE = 4  # one patch in four is for testing


@dataclass(frozen=True, slots=True, eq=False)
class Images:
    """Images as vectors, standardised per colour, and their classes."""

    train_x: npt.NDArray[np.float32]
    train_y: npt.NDArray[np.int64]
    test_x: npt.NDArray[np.float32]
    test_y: npt.NDArray[np.int64]
    num_classes: int
    fingerprint: str
    name: str


def load_images(path: str | Path | None = None, pool: int = 1) -> Images:
    """Load the images of a file or of the package, averaging squares of `pool` x `pool` pixels.

    The path may also be a folder with CIFAR-10 as distributed, as python or binary batches. The
    package has 2,120 patches of two photographs. Their task: given the left half of a patch,
    predict the decile of the brightness of its right half.
    """
    pool = whole_number(pool, "pool", 1)
    file = None if path is None else as_path(path, "the file of images")
    parts = patch_halves() if file is None else _read(file)
    name = "photo patches" if file is None else file.stem
    digest = hashlib.sha256(f"pool {pool}".encode())
    for key in _KEYS:
        digest.update(f"{key} {parts[key].shape} {parts[key].dtype}".encode())
        digest.update(np.ascontiguousarray(parts[key]).tobytes())
    train, test = (_pooled(parts[key], pool, name) for key in ("train_x", "test_x"))
    mean, std = train.mean((0, 1, 2)), train.std((0, 1, 2)) + 1e-6
    train_x, test_x = (
        ((x - mean) / std).reshape(len(x), -1).astype(np.float32) for x in (train, test)
    )
    train_y, test_y = (parts[key].astype(np.int64) for key in ("train_y", "test_y"))
    num_classes = int(max(train_y.max(), test_y.max())) + 1
    fingerprint = digest.hexdigest()[:16]
    return Images(train_x, train_y, test_x, test_y, num_classes, fingerprint, name)


def patch_halves() -> dict[str, npt.NDArray[Any]]:
    """The images of the package: left halves, and the deciles of their right halves."""
    file = resources.files("einlinear").joinpath("data/embedded/photo_patches_8x8.npz")
    with resources.as_file(file) as path, np.load(path, allow_pickle=False) as held:
        patches = held["x"]
    middle = patches.shape[2] // 2
    is_test = np.arange(len(patches)) % _TEST_SHARE == 0
    brightness = patches[:, :, middle:].mean((1, 2, 3))
    shares = np.arange(1, _NUM_CLASSES) / _NUM_CLASSES
    classes = np.searchsorted(np.quantile(brightness[~is_test], shares), brightness)
    left = patches[:, :, :middle]
    parts = (left[~is_test], classes[~is_test], left[is_test], classes[is_test])
    return dict(zip(_KEYS, parts, strict=True))


def _read(path: Path) -> dict[str, npt.NDArray[Any]]:
    folder = cifar_folder(path)
    if folder is not None:
        return read_cifar(folder)
    fix = "give such a file, or leave the data out to use the patches in the package"
    with checked_reading(path, rule=_RULE, fix=fix), open_arrays(path) as arrays:
        missing = [key for key in _KEYS if key not in arrays.names]
        parts = {} if missing else {key: arrays.read(key) for key in _KEYS}
    if missing:
        raise EinlinearError(
            what=f"{path} lacks a key: {missing[0]}", rule=_RULE, fix="add it with numpy.savez"
        )
    for part in ("train", "test"):
        _check(parts[f"{part}_x"], parts[f"{part}_y"], f"{part} of {path}")
    shapes = [parts[key].shape[1:] for key in ("train_x", "test_x")]
    if shapes[0] != shapes[1]:
        raise EinlinearError(
            what=f"in {path} images are {shapes[0]} in train_x and {shapes[1]} in test_x",
            rule="all images have one size",
            fix="resize them before you save them",
        )
    return parts


def _check(x: npt.NDArray[Any], y: npt.NDArray[Any], name: str) -> None:
    is_images = x.ndim == 4 and x.dtype == np.uint8 and x.size > 0
    is_classes = y.shape == x.shape[:1] and y.dtype.kind in "iu" and y.size > 0 and y.min() >= 0
    if not is_images or not is_classes:
        raise EinlinearError(
            what=f"{name} has images of shape {x.shape} and dtype {x.dtype}, "
            f"classes of shape {y.shape} and dtype {y.dtype}",
            rule=_RULE,
            fix="add a colour axis if there is none; number the classes from 0",
        )
    if y.max() >= _MOST_CLASSES:
        raise EinlinearError(
            what=f"{name} has the class {y.max()}",
            rule=f"classes are numbered from 0; there are at most {_MOST_CLASSES:,}",
            fix="number the classes from 0, without gaps",
        )


def _pooled(x: npt.NDArray[Any], pool: int, name: str) -> npt.NDArray[np.float32]:
    count, rows, columns, colours = x.shape
    if rows % pool or columns % pool:
        raise EinlinearError(
            what=f"pool is {pool}, and the images of {name} are {rows} x {columns}",
            rule="pool divides both sides of the images",
            fix="give a divisor, such as 1 or 2",
        )
    squares = x.reshape(count, rows // pool, pool, columns // pool, pool, colours)
    pooled: npt.NDArray[np.float32] = squares.mean((2, 4), dtype=np.float32)
    return pooled
