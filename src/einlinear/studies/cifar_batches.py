"""CIFAR-10 as it is distributed: the python batches, or the binary ones.

The python batches are pickles, and loading a pickle may run any code that its writer likes. So
they are not loaded: the opcodes are read with pickletools, which runs nothing, and the few that
build numbers, strings, lists and dicts are followed here. Calls stay what they are, a name and its
arguments, and the one that stands for an array of bytes is read from its arguments.
"""

from __future__ import annotations

import pickletools
from collections.abc import Callable
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from einlinear.errors import EinlinearError

Array = npt.NDArray[Any]
_SIDE, _COLOURS, _CLASSES = 32, 3, 10
_PIXELS = _SIDE * _SIDE * _COLOURS
_TRAIN = tuple(f"data_batch_{number}" for number in range(1, 6))
_TEST = "test_batch"
_INNER = ("cifar-10-batches-py", "cifar-10-batches-bin")
_RULE = (
    "a folder of CIFAR-10 holds data_batch_1 to data_batch_5 and test_batch, either as python "
    "batches or, with .bin, as binary ones"
)
_FIX = "unpack the archive again"


def cifar_folder(path: Path) -> Path | None:
    """The folder of batches that a folder is or holds, if it does."""
    for folder in (path, *(path / name for name in _INNER)):
        if any((folder / f"{_TEST}{suffix}").exists() for suffix in ("", ".bin")):
            return folder
    return None


def read_cifar(folder: Path) -> dict[str, Array]:
    """train_x, train_y, test_x, test_y of the batches in a folder; the training ones there are."""
    suffix = "" if (folder / _TEST).exists() else ".bin"
    read = _read_pickle if suffix == "" else _read_binary
    files = [folder / f"{name}{suffix}" for name in _TRAIN]
    present = [file for file in files if file.exists()]
    if not present:
        raise EinlinearError(what=f"{folder} holds no {files[0].name}", rule=_RULE, fix=_FIX)
    train = [read(file) for file in present]
    test_x, test_y = read(folder / f"{_TEST}{suffix}")
    return {
        "train_x": np.concatenate([x for x, _ in train]),
        "train_y": np.concatenate([y for _, y in train]),
        "test_x": test_x,
        "test_y": test_y,
    }


def _images(planes: Array) -> Array:
    """Rows of three planes of colour as (image, row, column, colour)."""
    images = planes.reshape(-1, _COLOURS, _SIDE, _SIDE).transpose(0, 2, 3, 1)
    return np.ascontiguousarray(images)


def _read_binary(path: Path) -> tuple[Array, Array]:
    raw = np.fromfile(path, np.uint8)
    if not raw.size or raw.size % (_PIXELS + 1):
        raise EinlinearError(
            what=f"{path} has {raw.size:,} bytes",
            rule=f"every image has {_PIXELS + 1:,} bytes: its class, then its colours",
            fix=_FIX,
        )
    rows = raw.reshape(-1, _PIXELS + 1)
    return _images(rows[:, 1:]), _classes(rows[:, 0], path)


def _read_pickle(path: Path) -> tuple[Array, Array]:
    try:
        held = {_text(key): value for key, value in parse_pickle(path.read_bytes()).items()}
        images, labels = _array(held["data"]), np.array(held["labels"], np.int64)
        if images.ndim != 2 or images.shape[1] != _PIXELS or labels.shape != images.shape[:1]:
            raise ValueError(f"it has data of shape {images.shape} and {labels.shape} labels")
    except (ValueError, KeyError, TypeError, AttributeError, IndexError, OverflowError) as error:
        raise EinlinearError(
            what=f"cannot read {path}: {type(error).__name__}: {error}",
            rule='a python batch is a pickled dict with "data", an array of bytes with 3,072 to '
            'an image, and "labels"; a pickle that calls for anything else is not followed',
            fix=_FIX,
        ) from error
    return _images(images), _classes(labels, path)


def _classes(labels: Array, path: Path) -> Array:
    if labels.size and 0 <= labels.min() and labels.max() < _CLASSES:
        return labels.astype(np.int64)
    raise EinlinearError(
        what=f"{path} has classes outside 0 to {_CLASSES - 1}",
        rule=f"CIFAR-10 has {_CLASSES} classes",
        fix=_FIX,
    )


@dataclass(frozen=True, slots=True)
class _Name:
    """A name that a pickle would import."""

    module: str
    name: str


@dataclass(slots=True)
class _Call:
    """A call that a pickle would make, and the state that it would set."""

    function: object
    arguments: tuple[Any, ...]
    state: Any = None


_MARK = object()


class _Stack:
    """The stack and the memo of the pickle machine."""

    def __init__(self) -> None:
        self.items: list[Any] = []
        self.memo: dict[int, Any] = {}

    def push(self, item: Any) -> None:
        self.items.append(item)

    def pop(self, count: int = 1) -> list[Any]:
        if len(self.items) < count:
            raise ValueError("the pickle takes more than it has")
        taken = self.items[-count:]
        del self.items[-count:]
        return taken

    def pop_to_mark(self) -> list[Any]:
        place = max(i for i, item in enumerate(self.items) if item is _MARK)
        taken = self.items[place + 1 :]
        del self.items[place:]
        return taken


def parse_pickle(data: bytes) -> Any:
    """What a pickle of plain values stands for, without running it; calls stay calls."""
    stack = _Stack()
    for opcode, argument, _ in pickletools.genops(data):
        name = opcode.name
        if name == "STOP":
            return stack.pop()[0]
        if name in _PUSHES:
            stack.push(_PUSHES[name](argument))
        elif name in _STEPS:
            _STEPS[name](stack, argument)
        elif name not in ("PROTO", "FRAME"):
            raise ValueError(f"the pickle has the opcode {name}, which plain data does not need")
    raise ValueError("the pickle does not end")


def _same(argument: Any) -> Any:
    return argument


def _global(argument: str) -> _Name:
    module, _, name = argument.partition(" ")
    return _Name(module, name)


_PUSHES: dict[str, Callable[[Any], Any]] = {
    **dict.fromkeys(
        "INT BININT BININT1 BININT2 LONG LONG1 LONG4 UNICODE BINUNICODE SHORT_BINUNICODE "
        "BINBYTES SHORT_BINBYTES BINBYTES8 BINUNICODE8".split(),
        _same,
    ),
    # Strings of Python 2 are bytes, told as latin-1.
    **dict.fromkeys(
        "STRING BINSTRING SHORT_BINSTRING".split(), lambda text: text.encode("latin-1")
    ),
    "NONE": lambda _: None,
    "NEWTRUE": lambda _: True,
    "NEWFALSE": lambda _: False,
    "EMPTY_LIST": lambda _: [],
    "EMPTY_DICT": lambda _: {},
    "EMPTY_TUPLE": lambda _: (),
    "MARK": lambda _: _MARK,
    "GLOBAL": _global,
}


def _set_items(stack: _Stack, pairs: list[Any]) -> None:
    stack.items[-1].update(zip(pairs[::2], pairs[1::2], strict=True))


def _put(stack: _Stack, place: int) -> None:
    stack.memo[place] = stack.items[-1]


def _call(stack: _Stack, _: Any) -> None:
    function, arguments = stack.pop(2)
    if function == _Name("_codecs", "encode"):  # how Python 3 writes bytes for Python 2
        stack.push(arguments[0].encode("latin-1"))
    else:
        stack.push(_Call(function, tuple(arguments)))


def _build(stack: _Stack, _: Any) -> None:
    (state,) = stack.pop()
    if not isinstance(stack.items[-1], _Call):
        raise ValueError("the pickle sets the state of something that is no array")
    stack.items[-1].state = state


_STEPS: dict[str, Callable[[_Stack, Any], None]] = {
    **dict.fromkeys(("PUT", "BINPUT", "LONG_BINPUT"), lambda s, place: _put(s, int(place))),
    "MEMOIZE": lambda s, _: _put(s, len(s.memo)),
    **dict.fromkeys(("GET", "BINGET", "LONG_BINGET"), lambda s, place: s.push(s.memo[int(place)])),
    "TUPLE": lambda s, _: s.push(tuple(s.pop_to_mark())),
    "TUPLE1": lambda s, _: s.push(tuple(s.pop(1))),
    "TUPLE2": lambda s, _: s.push(tuple(s.pop(2))),
    "TUPLE3": lambda s, _: s.push(tuple(s.pop(3))),
    "LIST": lambda s, _: s.push(s.pop_to_mark()),
    "APPEND": lambda s, _: s.items[-2].append(s.pop()[0]),
    "APPENDS": lambda s, _: _extend(s, s.pop_to_mark()),
    "DICT": lambda s, _: _new_dict(s, s.pop_to_mark()),
    "SETITEM": lambda s, _: _set_items(s, s.pop(2)),
    "SETITEMS": lambda s, _: _set_items(s, s.pop_to_mark()),
    "STACK_GLOBAL": lambda s, _: s.push(_Name(*s.pop(2))),
    "REDUCE": _call,
    "BUILD": _build,
}


def _extend(stack: _Stack, items: list[Any]) -> None:
    stack.items[-1].extend(items)


def _new_dict(stack: _Stack, pairs: list[Any]) -> None:
    stack.push({})
    _set_items(stack, pairs)


def _text(key: str | bytes) -> str:
    return key.decode("latin-1") if isinstance(key, bytes) else key


def _array(call: Any) -> Array:
    """The array of bytes that a call of numpy's would make."""
    is_array = isinstance(call, _Call) and getattr(call.function, "name", "") == "_reconstruct"
    if not is_array or not isinstance(call.state, tuple):
        raise ValueError("its data is no array")
    _, shape, kind, is_fortran, raw = call.state
    if not isinstance(kind, _Call) or _text(kind.arguments[0]) not in ("u1", "|u1"):
        raise ValueError("its data is no array of bytes")
    if not isinstance(raw, bytes) or len(raw) != prod(shape):
        raise ValueError("its array has another size than its shape says")
    order: Any = "F" if is_fortran else "C"
    array: Array = np.frombuffer(raw, np.uint8).reshape(shape, order=order)
    return array
