"""What a check says: a note, or why it failed, with the fix if one is known."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field

from einlinear.errors import EinlinearError, reason, shorten

_LONGEST = 240
_FIXES = {
    r"data.dependent|dynamic control flow|\.item\(\)": "its forward decides by the values of a "
    "tensor: use torch.where or torch.cond in place of `if`",
    r"out of memory|can't allocate|not enough memory": "give a smaller input with --inputs",
    r"No module named|requires .* to be installed": "install that package",
    r"no fake impl|fake tensor impl|register_fake": "say what shape the operator returns, with "
    "torch.library.register_fake",
    r"unsupported operator|No ONNX function found|No decompositions registered": "replace that "
    "operation by others, or register a translation of it (torch.onnx.export, "
    "custom_translation_table)",
}


@dataclass(frozen=True, slots=True)
class Note:
    """What a check found where all is well: a text, and the numbers in it."""

    text: str
    numbers: Mapping[str, float] = field(default_factory=dict)


class CheckFailedError(Exception):
    """Something does not work; the message says what, and the fix if one is known."""


class CheckSkippedError(Exception):
    """A check cannot be made; the message says what it needs."""


def plain_reason(error: BaseException) -> str:
    """What a failure says to a user, in one line; of a fix with many lines, the first."""
    if isinstance(error, CheckFailedError):
        return str(error)
    chain = causes(error)
    ours = _ours(error)
    if ours is not None:
        first, *more = ours.fix.strip().splitlines() or [""]
        fix = f"{first.rstrip(':')}; see below" if more else first
        return _one_line(f"{ours.what}. Rule: {ours.rule}. Fix: {fix}", 3 * _LONGEST)
    root = chain[-1]
    said = shorten(f"{type(root).__name__}: {_first_line(root)}", _LONGEST)
    texts = " ".join(map(_text, chain))
    fixes = [fix for known, fix in _FIXES.items() if re.search(known, texts, re.IGNORECASE)]
    return f"{said.rstrip('.')}. Fix: {fixes[0]}" if fixes else said


def long_fix(error: BaseException) -> str:
    """The fix of an error of ours, if it has more than one line, such as code to paste."""
    ours = _ours(error)
    fix = "" if ours is None else ours.fix.strip()
    return fix if "\n" in fix else ""


def causes(error: BaseException) -> list[BaseException]:
    """An error, what it was raised from, and so on."""
    found = [error]
    while (cause := found[-1].__cause__) is not None and cause not in found:
        found.append(cause)
    return found


def _ours(error: BaseException) -> EinlinearError | None:
    return next((each for each in causes(error) if isinstance(each, EinlinearError)), None)


def _one_line(text: str, most: int) -> str:
    return shorten(" ".join(text.split()), most)


def _first_line(error: BaseException) -> str:
    lines = [" ".join(line.split()) for line in _text(error).splitlines()]
    return next((line for line in lines if line), reason(error))


def _text(error: BaseException) -> str:
    try:
        return re.sub("\x1b\\[[0-9;]*m", "", str(error))  # torch colours its messages
    except Exception:  # an exception whose text fails
        return type(error).__name__
