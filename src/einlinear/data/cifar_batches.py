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
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from einlinear.errors import EinlinearError, quote, reason
from einlinear.files.arrays import Array

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
    try:
        size = path.stat().st_size
        if size <= _MOST_BYTES:
            return path.read_bytes()
    except OSError as error:
        raise EinlinearError(
            what=f"cannot read {path}: {reason(error)}", rule=_RULE, fix=_FIX
        ) from error
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


_MANY = (list, tuple, dict, _Call)
_ONCE = (list, dict, _Call)  # mutable values


class _Stack:
    """The stack and the memo of the pickle machine, with limits."""

    def __init__(self, most_copied: int) -> None:
        self.items: list[Any] = []
        self.marks: list[int] = []
        self.memo: dict[int, Any] = {}
        self.depths: dict[int, int] = {}  # of containers, by id
        self.kept: list[Any] = []  # so that no id is reused
        self.left = most_copied

    def push(self, item: Any, *parts: Any) -> None:
        """Push a value made of some parts."""
        if isinstance(item, _MANY):
            self.kept.append(item)
            self.depths[id(item)] = 1
            self.deepen(item, parts)
        self.items.append(item)

    def deepen(self, item: Any, parts: Iterable[Any]) -> None:
        """Record that parts are put into a value."""
        depth = 1 + max((self.depths.get(id(part), 0) for part in parts), default=0)
        self.depths[id(item)] = max(depth, self.depths[id(item)])
        if depth > _DEEPEST:
            raise ValueError(f"the pickle is nested more than {_DEEPEST} deep")

    def top(self, kind: type) -> Any:
        """The value on top of the stack, which must be of this kind."""
        if not self.items or not isinstance(self.items[-1], kind):
            raise ValueError("the pickle adds to something that is not a list, dict or array")
        return self.items[-1]

    def pop(self, count: int = 1) -> list[Any]:
        """Pop values pushed since the last mark."""
        if len(self.items) - (self.marks[-1] if self.marks else 0) < count:
            raise ValueError("the pickle takes more than it has")
        taken = self.items[-count:]
        del self.items[-count:]
        return taken

    def pop_to_mark(self) -> list[Any]:
        """Pop all values since the last mark."""
        if not self.marks:
            raise ValueError("the pickle takes more than it has")
        place = self.marks.pop()
        taken = self.items[place:]
        del self.items[place:]
        return taken

    def copied(self, count: int) -> None:
        """Count copied bytes, which must not exceed the size of the file."""
        self.left -= count
        if self.left < 0:
            raise ValueError("the pickle grows beyond its own size")


def parse_pickle(data: bytes) -> Any:
    """Return the value of a pickle of plain data without running it; calls stay calls."""
    stack = _Stack(len(data))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # invalid escapes in strings of old pickles
        for count, (opcode, argument, _) in enumerate(pickletools.genops(data)):
            name = opcode.name
            if count == _MOST_OPCODES:
                raise ValueError(f"the pickle has more than {_MOST_OPCODES:,} opcodes")
            if name == "STOP":
                return stack.pop()[0]
            if name in _PUSHES:
                stack.push(_PUSHES[name](argument))
            elif name in _STEPS:
                _STEPS[name](stack, argument)
            elif name not in ("PROTO", "FRAME"):
                raise ValueError(
                    f"the pickle has the opcode {name}, which plain data does not need"
                )
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
    # Strings of Python 2 are bytes, decoded as latin-1.
    **dict.fromkeys(
        "STRING BINSTRING SHORT_BINSTRING".split(), lambda text: text.encode("latin-1")
    ),
    "NONE": lambda _: None,
    "NEWTRUE": lambda _: True,
    "NEWFALSE": lambda _: False,
    "EMPTY_LIST": lambda _: [],
    "EMPTY_DICT": lambda _: {},
    "EMPTY_TUPLE": lambda _: (),
    "GLOBAL": _global,
}


def _mark(stack: _Stack, _: Any) -> None:
    stack.marks.append(len(stack.items))


def _put(stack: _Stack, place: int) -> None:
    if not stack.items:
        raise ValueError("the pickle takes more than it has")
    stack.memo[place] = stack.items[-1]


def _get(stack: _Stack, place: int) -> None:
    item = stack.memo.get(place, stack)
    if item is stack:
        raise ValueError("the pickle refers to a value that it does not have")
    if isinstance(item, _ONCE):
        raise ValueError("the pickle uses a list, dict or array twice; plain data does not")
    stack.items.append(item)


def _tuple(stack: _Stack, items: list[Any]) -> None:
    stack.push(tuple(items), *items)


def _list(stack: _Stack, items: list[Any]) -> None:
    stack.push(items, *items)


def _extend(stack: _Stack, items: list[Any]) -> None:
    held = stack.top(list)
    held.extend(items)
    stack.deepen(held, items)


def _set_items(stack: _Stack, pairs: list[Any]) -> None:
    held = stack.top(dict)
    keys, values = pairs[::2], pairs[1::2]
    if len(keys) != len(values) or not all(isinstance(key, str | bytes) for key in keys):
        raise ValueError("the pickle has a dict whose keys are not strings")
    held.update(zip(keys, values, strict=True))
    stack.deepen(held, values)


def _new_dict(stack: _Stack, pairs: list[Any]) -> None:
    stack.push({})
    _set_items(stack, pairs)


def _named(stack: _Stack, _: Any) -> None:
    module, name = stack.pop(2)
    if not isinstance(module, str) or not isinstance(name, str):
        raise ValueError("the pickle has a name that is not a string")
    stack.push(_Name(module, name))


def _call(stack: _Stack, _: Any) -> None:
    function, arguments = stack.pop(2)
    if not isinstance(function, _Name) or not isinstance(arguments, tuple):
        raise ValueError("the pickle calls something that has no name")
    if function == _Name("_codecs", "encode"):  # how Python 3 writes bytes for Python 2
        if not arguments or not isinstance(arguments[0], str):
            raise ValueError("the pickle encodes something that is not a string")
        stack.copied(len(arguments[0]))
        stack.push(arguments[0].encode("latin-1"))
    else:
        stack.push(_Call(function, arguments), arguments)


def _build(stack: _Stack, _: Any) -> None:
    (state,) = stack.pop()
    call = stack.top(_Call)
    call.state = state
    stack.deepen(call, [state])


_STEPS: dict[str, Callable[[_Stack, Any], None]] = {
    **dict.fromkeys(("PUT", "BINPUT", "LONG_BINPUT"), lambda s, place: _put(s, int(place))),
    "MEMOIZE": lambda s, _: _put(s, len(s.memo)),
    **dict.fromkeys(("GET", "BINGET", "LONG_BINGET"), lambda s, place: _get(s, int(place))),
    "MARK": _mark,
    "TUPLE": lambda s, _: _tuple(s, s.pop_to_mark()),
    "TUPLE1": lambda s, _: _tuple(s, s.pop(1)),
    "TUPLE2": lambda s, _: _tuple(s, s.pop(2)),
    "TUPLE3": lambda s, _: _tuple(s, s.pop(3)),
    "LIST": lambda s, _: _list(s, s.pop_to_mark()),
    "APPEND": lambda s, _: _extend(s, s.pop()),
    "APPENDS": lambda s, _: _extend(s, s.pop_to_mark()),
    "DICT": lambda s, _: _new_dict(s, s.pop_to_mark()),
    "SETITEM": lambda s, _: _set_items(s, s.pop(2)),
    "SETITEMS": lambda s, _: _set_items(s, s.pop_to_mark()),
    "STACK_GLOBAL": _named,
    "REDUCE": _call,
    "BUILD": _build,
}


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
