"""CIFAR-10 as distributed: the python batches or the binary ones.

The python batches are pickles, and loading a pickle can run any code. They are therefore not
loaded: pickletools reads the opcodes without running anything, and this module follows the few
that build numbers, strings, lists and dicts. A call stays a name and its arguments; the call that
builds an array of bytes is read from its arguments.

A malicious file can also ask for endless values: nested a million deep, or lists of lists of the
same list. Therefore opcodes, depth and sizes are bounded, lists and dicts can be used only once,
and only values of the expected types are read from the result.
"""

from __future__ import annotations

import os
import pickletools
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from einlinear.errors import EinlinearError, quote, reason
from einlinear.files.arrays import Array
from einlinear.files.whole import checked_reading

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
_MOST_BYTES = 2**30  # of a file; a batch has 31 MB
_MOST_OPCODES = 1_000_000  # a batch has 50,000
_DEEPEST = 16  # a batch has 4
_PLAIN = frozenset(
    "INT BININT BININT1 BININT2 LONG LONG1 LONG4 UNICODE BINUNICODE SHORT_BINUNICODE BINUNICODE8 "
    "BINBYTES SHORT_BINBYTES BINBYTES8".split()
)
"""Opcodes that push their argument."""
_Item = tuple[Any, int]  # a value of a pickle, and how deeply it is nested


def cifar_folder(path: Path) -> Path | None:
    """Return the folder of batches: this one, or one inside; None if there is none."""
    for folder in (path, *(path / name for name in _INNER)):
        if any(os.path.exists(folder / f"{_TEST}{suffix}") for suffix in ("", ".bin")):
            return folder
    return None


def read_cifar(folder: Path) -> dict[str, Array]:
    """Read train_x, train_y, test_x, test_y from a folder; training batches may be missing."""
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
    """Turn rows of three colour planes into (image, row, column, colour)."""
    images = planes.reshape(-1, _COLOURS, _SIDE, _SIDE).transpose(0, 2, 3, 1)
    return np.ascontiguousarray(images)


def _read_bytes(path: Path) -> bytes:
    with checked_reading(path, rule=_RULE, fix=_FIX):
        size = path.stat().st_size
        if size <= _MOST_BYTES:
            return path.read_bytes()
        raise EinlinearError(
            what=f"{path} has {size:,} bytes",
            rule=f"a batch has at most {_MOST_BYTES:,} bytes; those of CIFAR-10 have 31 million",
            fix=_FIX,
        )


def _read_binary(path: Path) -> tuple[Array, Array]:
    raw = np.frombuffer(_read_bytes(path), np.uint8)
    if not raw.size or raw.size % (_PIXELS + 1):
        raise EinlinearError(
            what=f"{path} has {raw.size:,} bytes",
            rule=f"every image has {_PIXELS + 1:,} bytes: its class, then its colours",
            fix=_FIX,
        )
    rows = raw.reshape(-1, _PIXELS + 1)
    return _images(rows[:, 1:]), _classes(rows[:, 0], path)


def _read_pickle(path: Path) -> tuple[Array, Array]:
    raw = _read_bytes(path)
    try:
        batch = parse_pickle(raw)
        if not isinstance(batch, dict):
            raise ValueError("it is not a dict")
        held = {_text(key): value for key, value in batch.items()}
        images, labels = _array(held["data"]), _labels(held["labels"])
        if len(labels) != len(images):
            raise ValueError(f"it has {len(images):,} images and {len(labels):,} labels")
    except (ValueError, KeyError) as error:
        raise EinlinearError(
            what=f"cannot read {path}: {type(error).__name__}: {reason(error)}",
            rule='a python batch is a pickled dict with "data", an array of 3,072 bytes per '
            'image, and "labels"; a pickle that calls anything else is refused',
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
    """A call that a pickle would make, and the state it would set."""

    function: _Name
    arguments: tuple[Any, ...]
    state: Any = None


class _Machine:
    """The stack and the memo of the pickle machine, with limits; values come with their depth."""

    def __init__(self, most_copied: int) -> None:
        self.stack: list[_Item] = []
        self.below: list[list[_Item]] = []  # what was on the stack at each mark
        self.memo: dict[int, _Item] = {}
        self.left = most_copied

    def push(self, value: Any, parts: Sequence[_Item] = (), depth: int = 1) -> None:
        """Push a value made of some parts."""
        depth = max(depth, *(1 + part[1] for part in parts), 0)
        if depth > _DEEPEST:
            raise ValueError(f"the pickle is nested more than {_DEEPEST} deep")
        self.stack.append((value, depth))

    def pop(self, count: int = 1) -> list[_Item]:
        """Pop values pushed since the last mark."""
        if len(self.stack) < count:
            raise ValueError("the pickle takes more than it has")
        taken = self.stack[-count:]
        del self.stack[-count:]
        return taken

    def pop_to_mark(self) -> list[_Item]:
        """Pop all values since the last mark."""
        if not self.below:
            raise ValueError("the pickle takes more than it has")
        taken, self.stack = self.stack, self.below.pop()
        return taken

    def extend(self, kind: type, parts: Sequence[_Item]) -> Any:
        """The value on top of the stack, of this kind, into which parts are put."""
        [(value, depth)] = self.pop()
        if not isinstance(value, kind):
            raise ValueError("the pickle adds to something that is not a list, dict or array")
        self.push(value, parts, depth)
        return value

    def step(self, name: str, argument: Any) -> None:
        """Follow one opcode."""
        match name:
            case "PROTO" | "FRAME":
                pass
            case "NONE" | "NEWTRUE" | "NEWFALSE":
                self.push({"NONE": None, "NEWTRUE": True, "NEWFALSE": False}[name], depth=0)
            case "STRING" | "BINSTRING" | "SHORT_BINSTRING":
                self.push(argument.encode("latin-1"), depth=0)  # strings of Python 2 are bytes
            case _ if name in _PLAIN:
                self.push(argument, depth=0)
            case "MARK":
                self.below.append(self.stack)
                self.stack = []
            case "PUT" | "BINPUT" | "LONG_BINPUT" | "MEMOIZE":
                [item] = self.pop()
                self.stack.append(item)
                self.memo[len(self.memo) if argument is None else int(argument)] = item
            case "GET" | "BINGET" | "LONG_BINGET":
                self.recall(int(argument))
            case "EMPTY_TUPLE" | "EMPTY_LIST" | "EMPTY_DICT":
                self.push({"EMPTY_TUPLE": (), "EMPTY_LIST": [], "EMPTY_DICT": {}}[name])
            case "TUPLE1" | "TUPLE2" | "TUPLE3":
                items = self.pop(int(name[-1]))
                self.push(tuple(_values(items)), items)
            case "TUPLE" | "LIST":
                items = self.pop_to_mark()
                values = _values(items)
                self.push(values if name == "LIST" else tuple(values), items)
            case "APPEND" | "APPENDS":
                items = self.pop() if name == "APPEND" else self.pop_to_mark()
                self.extend(list, items).extend(_values(items))
            case "DICT" | "SETITEM" | "SETITEMS":
                items = self.pop(2) if name == "SETITEM" else self.pop_to_mark()
                if name == "DICT":
                    self.push({})
                self.set_items(items)
            case "GLOBAL":
                module, _, name = argument.partition(" ")
                self.push(_Name(module, name), depth=0)
            case "STACK_GLOBAL":
                module, name = _values(self.pop(2))
                if not isinstance(module, str) or not isinstance(name, str):
                    raise ValueError("the pickle has a name that is not a string")
                self.push(_Name(module, name), depth=0)
            case "REDUCE":
                self.call(*self.pop(2))
            case "BUILD":
                items = self.pop()
                self.extend(_Call, items).state = items[0][0]
            case _:
                raise ValueError(
                    f"the pickle has the opcode {name}, which plain data does not need"
                )

    def recall(self, place: int) -> None:
        """Push a value of the memo; mutable ones can be used only once."""
        if place not in self.memo:
            raise ValueError("the pickle refers to a value that it does not have")
        item = self.memo[place]
        if isinstance(item[0], list | dict | _Call):
            raise ValueError("the pickle uses a list, dict or array twice; plain data does not")
        self.stack.append(item)

    def set_items(self, items: Sequence[_Item]) -> None:
        """Put keys and values, in turns, into the dict on top of the stack."""
        keys, values = _values(items[::2]), _values(items[1::2])
        if len(keys) != len(values) or not all(isinstance(key, str | bytes) for key in keys):
            raise ValueError("the pickle has a dict whose keys are not strings")
        self.extend(dict, items).update(zip(keys, values, strict=True))

    def call(self, called: _Item, given: _Item) -> None:
        """Push a call as data, or the bytes that Python 3 writes as a call for Python 2."""
        function, arguments = called[0], given[0]
        if not isinstance(function, _Name) or not isinstance(arguments, tuple):
            raise ValueError("the pickle calls something that has no name")
        if function != _Name("_codecs", "encode"):
            self.push(_Call(function, arguments), [given])
            return
        if not arguments or not isinstance(arguments[0], str):
            raise ValueError("the pickle encodes something that is not a string")
        self.left -= len(arguments[0])
        if self.left < 0:
            raise ValueError("the pickle grows beyond its own size")
        self.push(arguments[0].encode("latin-1"), depth=0)


def _values(items: Sequence[_Item]) -> list[Any]:
    return [value for value, _ in items]


def parse_pickle(data: bytes) -> Any:
    """Return the value of a pickle of plain data without running it; calls stay calls."""
    machine = _Machine(len(data))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # invalid escapes in strings of old pickles
        for count, (opcode, argument, _) in enumerate(pickletools.genops(data)):
            if count == _MOST_OPCODES:
                raise ValueError(f"the pickle has more than {_MOST_OPCODES:,} opcodes")
            if opcode.name == "STOP":
                return machine.pop()[0][0]
            machine.step(opcode.name, argument)
    raise ValueError("the pickle does not end")


def _text(key: Any) -> str:
    return key.decode("latin-1") if isinstance(key, bytes) else str(key)


def _labels(values: Any) -> Array:
    if not isinstance(values, list) or not all(type(value) is int for value in values):
        raise ValueError("its labels are not a list of whole numbers")
    wrong = next((value for value in values if not 0 <= value < 256), None)
    if wrong is not None:
        raise ValueError(f"it has the label {quote(wrong)}")
    return np.array(values, np.int64)


def _array(call: Any) -> Array:
    """The array of bytes that a call of numpy would make: one row of 3,072 per image."""
    state = call.state if isinstance(call, _Call) and call.function.name == "_reconstruct" else ()
    if not isinstance(state, tuple) or len(state) != 5:
        raise ValueError("its data is not an array")
    _, shape, kind, is_fortran, raw = state
    codes = kind.arguments[:1] if isinstance(kind, _Call) else ()
    if not codes or codes[0] not in ("u1", "|u1", b"u1", b"|u1"):
        raise ValueError("its data is not an array of bytes")
    is_shape = isinstance(shape, tuple) and [type(size) for size in shape] == [int, int]
    if not is_shape or shape[1] != _PIXELS:
        raise ValueError(f"it has data of shape {quote(shape)}")
    if not isinstance(raw, bytes) or len(raw) != shape[0] * _PIXELS:
        raise ValueError("the size of its array does not match its shape")
    order: Any = "F" if is_fortran else "C"
    array: Array = np.frombuffer(raw, np.uint8).reshape(shape, order=order)
    return array
