"""The arguments of a command, and an error of three lines for those that lack something."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import MISSING, fields, is_dataclass
from itertools import takewhile
from types import UnionType
from typing import Annotated, Any, Literal, NamedTuple, Union, get_args, get_origin, get_type_hints

from einlinear.errors import EinlinearError

_ANY = -1  # as many values as are given


class Argument(NamedTuple):
    """A flag such as "--out", or an argument by its place, which has no flag.

    values: what stands for them in help texts, such as "FLOAT FLOAT".
    num_values: how many there are; _ANY if that is open, 0 for a flag that is on or off.
    is_greedy: whether all words up to the next flag are its values.
    """

    flag: str
    values: str
    num_values: int
    is_greedy: bool
    is_required: bool

    @property
    def name(self) -> str:
        """What it is called where it is missing."""
        return self.flag or self.values.split()[0]

    @property
    def usage(self) -> str:
        """How it is typed."""
        return f"{self.flag} {self.values}".strip()


def arguments_of(command: Callable[..., None]) -> list[Argument]:
    """All of a command, those of its dataclasses with them; a bool has a second flag, --no-."""
    hints = get_type_hints(command, include_extras=True)
    found: list[Argument] = []
    for name, parameter in inspect.signature(command).parameters.items():
        kind, _ = _parts(hints[name])
        if is_dataclass(kind):
            inner = get_type_hints(kind, include_extras=True)
            for field in fields(kind):
                found += _of_flag(field.name, inner[field.name], field.default is MISSING)
        else:
            is_required = parameter.default is inspect.Parameter.empty
            if parameter.kind is inspect.Parameter.POSITIONAL_ONLY:
                found.append(_argument("", hints[name], is_required))
            else:
                found += _of_flag(name, hints[name], is_required)
    return found


def metavar(hint: object) -> str:
    """What can be given for a value of this type, besides nothing."""
    kind, given = _parts(hint)
    if given:
        return given
    parts = [part for part in get_args(kind) if part is not type(None)]
    if get_origin(kind) is Literal:
        return "{" + ",".join(map(str, parts)) + "}"
    if get_origin(kind) is tuple:
        inner = metavar(parts[0])
        return f"[{inner} [{inner} ...]]" if Ellipsis in parts else " ".join(map(metavar, parts))
    if parts:
        return metavar(parts[0])
    return "{True,False}" if kind is bool else str(getattr(kind, "__name__", kind)).upper()


def is_flag(word: str) -> bool:
    """Whether a word is meant as a flag; numbers below 0 are not."""
    return re.match("-{1,2}[a-zA-Z]", word) is not None


def check_given(command: Callable[..., None], words: Sequence[str]) -> None:
    """Raise if a flag lacks values, or if an argument is missing that the command needs."""
    arguments = arguments_of(command)
    seen = set(_given({a.flag: a for a in arguments if a.flag}, words))
    missing = [a for a in arguments if a.is_required and a.flag not in seen]
    if missing:
        names, needed = [a.name for a in missing], [a.usage for a in arguments if a.is_required]
        program = f"einlinear {command.__name__}"
        raise EinlinearError(
            what=f"{_listed(names)} {'is' if len(names) == 1 else 'are'} missing",
            rule=f"{program} needs {_listed(needed)}",
            fix=f"{program} {' '.join(needed)}; {program} --help says more",
        )


def _given(flags: Mapping[str, Argument], words: Sequence[str]) -> Iterator[str]:
    """The flags among the words, "" for a word that belongs to none; raises if values are missing.

    A word belongs to the flag before it as long as that takes more values.
    """
    at = 0
    while at < len(words):
        if words[at] == "--":  # the rest are no flags
            yield from [""] * (len(words) - at - 1)
            return
        flag, inline, _ = words[at].partition("=")
        argument = flags.get(flag.replace("_", "-"))
        at += 1
        if argument is None:
            yield ""
            continue
        yield argument.flag
        free = list(takewhile(lambda word: word != "--" and not is_flag(word), words[at:]))
        taken = (
            len(free) if argument.is_greedy else min(len(free), argument.num_values - bool(inline))
        )
        count = taken + bool(inline)
        if argument.num_values > 0 and count != argument.num_values:
            raise _wrong_count(argument, count)
        at += max(0, taken)


def _wrong_count(argument: Argument, count: int) -> EinlinearError:
    flag, needed = argument.flag, argument.num_values
    out = "" if argument.is_required else f", or leave {flag} out"
    return EinlinearError(
        what=f"{flag} has {_amount(count)}",
        rule=f"{flag} takes {_amount(needed)}: {argument.values}",
        fix=f"give {argument.usage}{out}",
    )


def _amount(count: int) -> str:
    return {0: "no value", 1: "one value"}.get(count, f"{count} values")


def _listed(names: Sequence[str]) -> str:
    *most, last = names
    return f"{', '.join(most)} and {last}" if most else last


def _of_flag(name: str, hint: object, is_required: bool) -> list[Argument]:
    flag = f"--{name.replace('_', '-')}"
    found = [_argument(flag, hint, is_required)]
    return found + [found[0]._replace(flag=f"--no-{flag[2:]}")] * (_parts(hint)[0] is bool)


def _argument(flag: str, hint: object, is_required: bool) -> Argument:
    kind, _ = _parts(hint)
    inner = [part for part in get_args(kind) if part is not type(None)]
    is_union = get_origin(kind) in (Union, UnionType)
    value = _parts(inner[0])[0] if is_union else kind
    is_tuple = get_origin(value) is tuple
    count = 1
    if is_tuple:
        count = _ANY if Ellipsis in get_args(value) else len(get_args(value))
    if kind is bool:
        return Argument(flag, "", 0, False, is_required)
    is_greedy = is_tuple and (is_union or count == _ANY)
    return Argument(flag, metavar(hint), count, is_greedy, is_required)


def _parts(hint: object) -> tuple[Any, str]:
    """A type without its annotations, and what they say to show for its values."""
    if get_origin(hint) is not Annotated:
        return hint, ""
    kind, *notes = get_args(hint)
    return kind, next((m for note in notes if (m := getattr(note, "metavar", None))), "")
