"""Images of 8 x 8 pixels, averaged over boxes from files of images of any size."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from importlib import resources
from math import prod
from pathlib import Path
from typing import IO

import numpy as np

from einlinear.data.cifar_batches import cifar_folder, read_cifar
from einlinear.errors import EinlinearError, quote, shorten
from einlinear.files.arrays import Array, Arrays, Header, open_arrays, read_exactly
from einlinear.files.whole import as_path, checked_reading
from einlinear.structures.values import taken

SIDE, CHANNELS = 8, 3

_RULE = (
    "pixels are .npz files, or a folder of them, with train_x and test_x, or with x or X alone "
    "(uint8; image, row, column, colour; sides multiples of 8), or a folder of CIFAR-10"
)
_FIX = "give such files, or leave the data out to use the patches in the package"
_BLOCK = 4096  # images read at once,
_BLOCK_BYTES = 2**26  # or fewer, if they would take more bytes than this
_MOST_FILES = 1_000_000
_TEST_SHARE = 10  # one image in ten is for validation, if a file has no test_x
_MOST_TESTS = 10_000


@dataclass(frozen=True, slots=True, eq=False)
class Pictures:
    """Images of (image, 8, 8, 3) bytes."""

    train: Array
    test: Array

    def fingerprint(self) -> str:
        """A hash of all images."""
        digest = hashlib.sha256()
        for images in (self.train, self.test):
            digest.update(f"{images.shape}".encode())
            digest.update(np.ascontiguousarray(images).data)
        return digest.hexdigest()[:16]


def load_pictures(data: str | Path | Sequence[str | Path] | None = None) -> Pictures:
    """Load the images of files, or the patches of the package, at 8 x 8 pixels."""
    if data is None:
        file = resources.files("einlinear").joinpath("data/embedded/photo_patches_8x8.npz")
        with resources.as_file(file) as path:
            return _read(path)
    several = taken(data, _MOST_FILES)
    paths = [as_path(file, "a file of pixels") for file in ([data] if several is None else several)]
    if len(paths) == 1 and os.path.isdir(paths[0]):
        folder = cifar_folder(paths[0])
        if folder is not None:
            held = read_cifar(folder)
            return Pictures(box_average(held["train_x"]), box_average(held["test_x"]))
        paths = sorted(paths[0].glob("*.npz"))
    if not paths:
        raise EinlinearError(what=f"{quote(data)} holds no .npz files", rule=_RULE, fix=_FIX)
    parts = [_read(path) for path in paths]
    return Pictures(
        np.concatenate([part.train for part in parts]),
        np.concatenate([part.test for part in parts]),
    )


def _split(images: Array) -> Pictures:
    """Use every tenth image for validation, or fewer if there are very many."""
    if len(images) < 2:
        raise EinlinearError(
            what=f"there is {len(images)} image in a file without test_x",
            rule="there is at least one image for training and one for validation",
            fix=_FIX,
        )
    every = max(_TEST_SHARE, -(-len(images) // _MOST_TESTS))
    is_test = np.arange(len(images)) % every == 0
    return Pictures(images[~is_test], images[is_test])


def _read(path: Path) -> Pictures:
    """The images of a file, averaged while they are read."""
    with checked_reading(path, rule=_RULE, fix=_FIX), open_arrays(path) as arrays:
        held = set(arrays.names)
        chosen: tuple[str, ...] = ("train_x", "test_x")
        if not held.issuperset(chosen):
            chosen = tuple(key for key in ("x", "X") if key in held)[:1]
        if not chosen:
            raise EinlinearError(
                what=f"{path} has the keys {shorten(', '.join(sorted(held))) or 'none'}",
                rule=_RULE,
                fix="save the images as x with numpy.savez",
            )
        images = [_averaged(arrays, key, path) for key in chosen]
        return Pictures(*images) if len(images) == 2 else _split(images[0])


def _averaged(arrays: Arrays, key: str, path: Path) -> Array:
    """Average an array block by block: one file of CIFAR-5M has three gigabytes."""
    with arrays.open(key) as (header, file):
        shape, dtype = header.shape, header.dtype
        is_right = len(shape) == 4 and dtype == np.uint8 and not header.is_fortran and header.size
        if not is_right or shape[3] != CHANNELS or shape[1] % SIDE or shape[2] % SIDE:
            raise EinlinearError(
                what=f"{key} of {path} has images of shape {quote(shape)} and dtype {dtype}",
                rule=_RULE,
                fix=_FIX,
            )
        return np.concatenate([box_average(block) for block in _blocks(file, header)])


def _blocks(file: IO[bytes], header: Header) -> Iterator[Array]:
    count, *image = header.shape
    size = prod(image)
    step = max(1, min(_BLOCK, _BLOCK_BYTES // size))
    for begin in range(0, count, step):
        rows = min(step, count - begin)
        yield np.frombuffer(read_exactly(file, rows * size), np.uint8).reshape(rows, *image)


def box_average(images: Array) -> Array:
    """Shrink images to 8 x 8 pixels; each pixel is the mean of a box, halves rounded up."""
    count, rows, columns, colours = images.shape
    if (rows, columns) == (SIDE, SIDE):
        return images
    down, right = rows // SIDE, columns // SIDE
    sums = images.reshape(count, SIDE, down, SIDE, right, colours).sum((2, 4), dtype=np.uint32)
    means: Array = (2 * sums + down * right) // (2 * down * right)
    return means.astype(np.uint8)
