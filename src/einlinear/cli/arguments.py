"""Commands as typed functions: words become a call, help wraps, errors have three lines.

tyro reads the words and prints the help. Words that it would refuse are refused here first, since
its own messages name neither the rule nor a fix.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import MISSING, fields, is_dataclass, make_dataclass
from functools import partial
from itertools import takewhile
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, NamedTuple, Union, get_args, get_origin, get_type_hints

import tyro
from docstring_parser import parse as parse_docstring

from einlinear.cli.terminal import columns
from einlinear.errors import EinlinearError, did_you_mean, quote
from einlinear.show.numbers import listed
from einlinear.show.tables import wrapped

_ANY = -1  # any number of values
_NUMBERS = {int: ("a whole number", "8"), float: ("a number", "0.5")}


class Argument(NamedTuple):
    """A flag such as "--out", or a positional argument, which has no flag.

    values: what stands for the values in help texts, such as "FLOAT FLOAT".
    kind: the type of one value.
    num_values: how many values there are; _ANY for any number, 0 for a flag that is on or off.
    is_greedy: whether all words up to the next flag are its values.
    """

    flag: str
    values: str
    kind: Any
    num_values: int
    is_greedy: bool
    is_required: bool

    @property
    def usage(self) -> str:
        """How to type it."""
        return f"{self.flag} {self.values}".strip()


def parse_call(command: Callable[..., None], words: Sequence[str]) -> Callable[[], None]:
    """The call of a command that the words stand for. For --help, print the help and exit."""
    name = f"einlinear {command.__name__}"
    if {"-h", "--help"} & set(words):
        print(_description(command) + "\n")
        words = ["--help"]
    else:
        words = _checked(command, words)
    call, further = tyro.cli(
        _delayed(command),
        prog=name,
        description="",
        args=words,
        return_unknown_args=True,
        config=(tyro.conf.DisallowNone,),
    )
    if further:
        raise EinlinearError(
            what=f"{name} has no use for {quote(further[0])}",
            rule=f"{name} --help lists what it takes",
            fix="leave it out, or put quotes around a value that has spaces",
        )
    return call


def flags_class(config: type, unset: Mapping[str, str] | None = None) -> type:
    """The fields of a config as flags: a dataclass that checks nothing.

    A config checks its values when it is made, which is in the middle of parsing, where its error
    would be lost.

    Args:
        config: a dataclass whose docstring describes its fields.
        unset: if given, flags that were not typed are None, and help shows these defaults.
    """
    texts, hints = _help_texts(config), get_type_hints(config, include_extras=True)
    found: list[Any] = []
    for field in fields(config):
        hint, default = hints[field.name], field.default
        shown: Any = _default_shown
        values = None if hint is bool and unset is None else metavar(hint)
        if unset is not None:
            shown, default = f"(default: {unset.get(field.name, default)})", None
            hint = Annotated[hint | None, tyro.conf.FlagConversionOff]  # --compile True
        note = tyro.conf.arg(help=texts[field.name], help_behavior_hint=shown, metavar=values)
        found.append((field.name, Annotated[hint, note], default))
    return make_dataclass(config.__name__, found, kw_only=True)


def flag_names(command: Callable[..., None]) -> dict[str, str]:
    """The flags of a command by the names of their arguments: naive_rates has --naive-rates."""
    flags = (argument.flag for argument in arguments_of(command) if argument.flag)
    return {flag[2:].replace("-", "_"): flag for flag in flags}


def in_flags(error: EinlinearError, flags: Mapping[str, str]) -> EinlinearError:
    """The error with the flags of a command in place of the names that functions know.

    Functions name an argument in one of these ways: "seeds is 0", "leave seeds out", "seeds=3", or,
    if the name has an underscore, anywhere.
    """
    known = "|".join(map(re.escape, flags))
    compound = "|".join(re.escape(name) for name in flags if "_" in name) or "(?!)"
    patterns = (
        rf"(?:^|(?<= of ))({known})(?= (?:is|are) )",
        rf"(?<=leave )({known})(?= out\b)",
        rf"(?<![\w/.'\"-])({compound})(?![\w/.'\"-])",
    )

    def spoken(text: str) -> str:
        given = rf'\b({known})=(?:"([^"]*)"|([^\s,;"]+))'
        text = re.sub(given, lambda m: f"{flags[m[1]]} {m[2] or m[3]}", text)
        for pattern in patterns:
            text = re.sub(pattern, lambda m: flags[m[1]], text)
        return text

    return EinlinearError(what=spoken(error.what), rule=spoken(error.rule), fix=spoken(error.fix))


def arguments_of(command: Callable[..., None]) -> list[Argument]:
    """The arguments of a command and of its dataclasses; a bool has two flags, --x and --no-x."""
    hints = get_type_hints(command, include_extras=True)
    found: list[Argument] = []
    for name, parameter in inspect.signature(command).parameters.items():
        kind, _ = _parts(hints[name])
        if is_dataclass(kind):
            inner = get_type_hints(kind, include_extras=True)
            for field in fields(kind):
                found += _flags(field.name, inner[field.name], field.default is MISSING)
        elif parameter.kind is inspect.Parameter.POSITIONAL_ONLY:
            found.append(_argument("", hints[name], parameter.default is inspect.Parameter.empty))
        else:
            found += _flags(name, hints[name], parameter.default is inspect.Parameter.empty)
    return found


def metavar(hint: object) -> str:
    """What stands for a value of this type in help texts; None is left out."""
    kind, given = _parts(hint)
    if given:
        return given
    parts = [part for part in get_args(kind) if part is not NoneType]
    if get_origin(kind) is Literal:
        return "{" + ",".join(map(str, parts)) + "}"
    if get_origin(kind) is tuple:
        inner = metavar(parts[0])
        return f"[{inner} [{inner} ...]]" if Ellipsis in parts else " ".join(map(metavar, parts))
    if parts:
        return metavar(parts[0])
    return "{True,False}" if kind is bool else str(getattr(kind, "__name__", kind)).upper()


def _flags(name: str, hint: object, is_required: bool) -> list[Argument]:
    flag = f"--{name.replace('_', '-')}"
    found = [_argument(flag, hint, is_required)]
    return found + [found[0]._replace(flag=f"--no-{flag[2:]}")] * (found[0].num_values == 0)


def _argument(flag: str, hint: object, is_required: bool) -> Argument:
    kind, _ = _parts(hint)
    if kind is bool:
        return Argument(flag, "", bool, 0, False, is_required)
    is_union = get_origin(kind) in (Union, UnionType)
    value = _parts(next(p for p in get_args(kind) if p is not NoneType))[0] if is_union else kind
    count, is_tuple = 1, get_origin(value) is tuple
    if is_tuple:
        count = _ANY if Ellipsis in get_args(value) else len(get_args(value))
        value = get_args(value)[0]
    is_greedy = is_tuple and (is_union or count == _ANY)
    return Argument(flag, metavar(hint), value, count, is_greedy, is_required)


def _parts(hint: object) -> tuple[Any, str]:
    """A type without its annotations, and the metavar that they give."""
    if get_origin(hint) is not Annotated:
        return hint, ""
    kind, *notes = get_args(hint)
    return kind, next((m for note in notes if (m := getattr(note, "metavar", None))), "")


def _checked(command: Callable[..., None], words: Sequence[str]) -> list[str]:
    """The words as tyro reads them; raises if it would refuse them."""
    arguments = arguments_of(command)
    flags = {argument.flag: argument for argument in arguments if argument.flag}
    found, seen = [], set()
    for flag, values, is_inline in _grouped(flags, words, command.__name__):
        seen.add(flag)
        if flag in flags:
            argument = flags[flag]
            if argument.num_values not in (_ANY, len(values)):
                raise _wrong_count(argument, len(values))
            values = [_checked_value(argument, value) for value in values]
            values = [f"{flag}={values[0]}", *values[1:]] if is_inline else [flag, *values]
        found += values
    missing = [a for a in arguments if a.is_required and a.flag not in seen]
    if missing:
        names = [a.flag or a.values.split()[0] for a in missing]
        needed = [a.usage for a in arguments if a.is_required]
        program = f"einlinear {command.__name__}"
        raise EinlinearError(
            what=f"{listed(names)} {'is' if len(names) == 1 else 'are'} missing",
            rule=f"{program} needs {listed(needed)}",
            fix=f"{program} {' '.join(needed)}; see {program} --help",
        )
    return found


def _grouped(
    flags: Mapping[str, Argument], words: Sequence[str], name: str
) -> Iterator[tuple[str, list[str], bool]]:
    """Each flag with its values, and whether they were joined by "="; "" for positional words."""
    at = 0
    while at < len(words):
        word = words[at]
        at += 1
        if word == "--":  # no flags after this
            if words[at:]:
                yield "", list(words[at - 1 :]), False
            return
        if not _is_flag(word):
            yield "", [word], False
            continue
        flag, equals, inline = word.partition("=")
        argument = flags.get(flag.replace("_", "-"))
        if argument is None:
            known = [flag.removeprefix("--") for flag in flags]
            meant = flag.lstrip("-").replace("_", "-")
            raise EinlinearError(
                what=f"einlinear {name} has no flag {quote(word)}",
                rule=f"einlinear {name} --help lists its flags",
                fix=did_you_mean(meant, known, "leave it out", prefix="--"),
            )
        free = list(takewhile(lambda word: word != "--" and not _is_flag(word), words[at:]))
        if not argument.is_greedy:
            free = free[: max(0, argument.num_values - bool(equals))]
        at += len(free)
        yield argument.flag, [inline] * bool(equals) + free, bool(equals)


def _is_flag(word: str) -> bool:
    return re.match("-{1,2}[a-zA-Z]", word) is not None  # numbers below 0 are no flags


def _checked_value(argument: Argument, word: str) -> str:
    """A word that can be read as the type of the argument."""
    kind = argument.kind
    choices = ("True", "False") if kind is bool else get_args(kind)
    if choices:
        chosen = word.capitalize() if kind is bool else word
        if chosen in choices:
            return chosen
        rule = f"one of {', '.join(choices)}"
        fix = did_you_mean(word, choices, f"give {choices[0]}")
    else:
        try:
            kind(word)
            return word
        except ValueError:
            rule, example = _NUMBERS[kind]
            fix = f"give {rule} such as {example}"
    raise EinlinearError(
        what=f"{argument.flag} is {quote(word)}", rule=f"{argument.flag} is {rule}", fix=fix
    )


def _wrong_count(argument: Argument, count: int) -> EinlinearError:
    flag, needed = argument.flag, argument.num_values
    out = "" if argument.is_required else f", or leave {flag} out"
    amounts = {0: "no value", 1: "one value"}
    return EinlinearError(
        what=f"{flag} has {amounts.get(count, f'{count} values')}",
        rule=f"{flag} takes {amounts.get(needed, f'{needed} values')}"
        + f": {argument.values}" * bool(argument.values),
        fix=f"give {argument.usage}{out}",
    )


def _delayed(command: Callable[..., None]) -> Callable[..., partial[None]]:
    """A function that tyro can call in place of the command: returns the call."""

    def delayed(*given: object, **named: object) -> partial[None]:
        return partial(command, *given, **named)

    texts, hints = _help_texts(command), get_type_hints(command, include_extras=True)
    signature = inspect.signature(command)
    for name, parameter in signature.parameters.items():
        if not is_dataclass(_parts(hints[name])[0]):
            has_default = parameter.default is not inspect.Parameter.empty
            shown: Any = {"help_behavior_hint": _default_shown} if has_default else {}
            hints[name] = Annotated[hints[name], tyro.conf.arg(help=texts[name], **shown)]
    delayed.__doc__ = "Run the command."
    delayed.__annotations__ = hints
    delayed.__signature__ = signature.replace(  # type: ignore[attr-defined]
        parameters=[p.replace(annotation=hints[n]) for n, p in signature.parameters.items()]
    )
    return delayed


def _default_shown(default: str) -> str:
    return "(optional)" if default in ("None", "") else f"(default: {default})"


def _help_texts(documented: Any) -> dict[str, str]:
    """The description of each argument in a docstring, as one line, which tyro wraps.

    A description that begins with a possible value, such as cpu, is not capitalised.
    """
    found, hints = {}, get_type_hints(documented, include_extras=True)
    for entry in parse_docstring(documented.__doc__ or "").params:
        text = " ".join((entry.description or "").split())
        is_value = re.split(r"\W", text, maxsplit=1)[0] in _choices(hints.get(entry.arg_name))
        found[entry.arg_name] = text if is_value else text[:1].upper() + text[1:]
    return found


def _choices(hint: object) -> set[str]:
    """The words from which a value is chosen; empty if it is not chosen from a few."""
    kind, _ = _parts(hint)
    if get_origin(kind) is Literal:
        return set(map(str, get_args(kind)))
    return {word for part in get_args(kind) for word in _choices(part)}


def _description(command: Callable[..., None]) -> str:
    """What the command does, wrapped: tyro would print each paragraph as one line."""
    paragraphs = (parse_docstring(command.__doc__ or "").description or "").split("\n\n")
    return "\n\n".join(wrapped(" ".join(part.split()), columns(), "") for part in paragraphs)
