"""The words after a command made into a call of it; help that wraps, errors of three lines."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Sequence
from dataclasses import fields, is_dataclass, make_dataclass
from difflib import get_close_matches
from functools import partial
from shutil import get_terminal_size
from textwrap import fill
from typing import Annotated, Any, Literal, NamedTuple, get_args, get_origin, get_type_hints

import tyro
from docstring_parser import Docstring, parse
from tyro.constructors import ConstructorRegistry, PrimitiveConstructorSpec, PrimitiveTypeInfo

from einlinear.cli_arguments import arguments_of, check_given, is_flag, metavar
from einlinear.errors import EinlinearError, quote

_NOT_SHOWN = ("None", "")  # defaults that say nothing


def call_of(command: Callable[..., None], words: Sequence[str]) -> Callable[[], None]:
    """The call that the words after a command stand for; prints its help if they ask for it."""
    _check_flags(command, words)
    if {"-h", "--help"} & set(words):
        print(_description(command) + "\n")
    else:
        check_given(command, words)
    call, further = tyro.cli(
        _delayed(command),
        prog=f"einlinear {command.__name__}",
        description="",
        args=list(words),
        return_unknown_args=True,
        config=(tyro.conf.DisallowNone,),
        registry=_registry(),
    )
    if further:
        raise EinlinearError(
            what=f"einlinear {command.__name__} has no use for {quote(further[0])}",
            rule=f"einlinear {command.__name__} --help lists what it takes",
            fix="leave it out, or put quotes around a value that has spaces",
        )
    given = inspect.signature(command).bind(*call.args, **call.keywords).arguments
    for flag, refused in _refused(given):
        raise EinlinearError(
            what=f"{flag} is {quote(refused.text)}",
            rule=f"{flag} is {refused.rule}",
            fix=refused.fix,
        )
    return call


def did_you_mean(
    word: str, known: Sequence[str], otherwise: str, least: float = 0.6, *, prefix: str = ""
) -> str:
    """A fix: the nearest of the words that exist, or something else if none is near."""
    close = get_close_matches(word, known, 1, least)
    return f'did you mean "{prefix}{close[0]}"?' if close else otherwise


def unchecked(config: type) -> type:
    """The fields of a dataclass as another that checks nothing.

    Made of what was typed, the dataclass itself would check it in the middle of parsing, where its
    error cannot be told from others.
    """
    hints = get_type_hints(config, include_extras=True)
    found: list[Any] = []
    for field in fields(config):
        hint = hints[field.name]
        if type(None) in get_args(hint):
            hint = Annotated[hint, tyro.conf.arg(metavar=metavar(hint))]
        found.append((field.name, _with_default_shown(hint), field.default))
    return make_dataclass(
        config.__name__, found, kw_only=True, namespace={"__doc__": config.__doc__}
    )


class _Refused(NamedTuple):
    """A word in the place of a value that it does not stand for."""

    text: str
    rule: str
    fix: str


def _refused(values: object, name: str = "") -> Iterator[tuple[str, _Refused]]:
    """Every word that was refused, with its flag."""
    if isinstance(values, _Refused):
        yield f"--{name.replace('_', '-')}", values
    elif isinstance(values, dict):
        for key, value in values.items():
            yield from _refused(value, key)
    elif is_dataclass(values):
        yield from _refused({f.name: getattr(values, f.name) for f in fields(values)})
    elif isinstance(values, tuple):
        for value in values:
            yield from _refused(value, name)


def _delayed(command: Callable[..., None]) -> Callable[..., partial[None]]:
    """The command, which is not run but returned with what it was given."""

    def delayed(*given: object, **named: object) -> partial[None]:
        return partial(command, *given, **named)

    hints = get_type_hints(command, include_extras=True)
    signature = inspect.signature(command)
    for name, parameter in signature.parameters.items():
        if parameter.default is not inspect.Parameter.empty:
            hints[name] = _with_default_shown(hints[name])
    texts = {entry.arg_name: entry.description or "" for entry in _doc(command).params}
    arguments = [f"    {name}: {' '.join(text.split())}" for name, text in texts.items()]
    delayed.__doc__ = "\n".join(["Run the command.", "", "Args:", *arguments])
    delayed.__annotations__ = hints
    delayed.__signature__ = signature.replace(  # type: ignore[attr-defined]
        parameters=[p.replace(annotation=hints[n]) for n, p in signature.parameters.items()]
    )
    return delayed


def _with_default_shown(hint: object) -> Any:
    def shown(default: str) -> str:
        return "(optional)" if default in _NOT_SHOWN else f"(default: {default})"

    return Annotated[hint, tyro.conf.arg(help_behavior_hint=shown)]


def _doc(command: Callable[..., None]) -> Docstring:
    return parse(command.__doc__ or "")


def _description(command: Callable[..., None]) -> str:
    """What the command does, in lines that fit. tyro would print each paragraph as one line."""
    width = max(40, get_terminal_size().columns)
    paragraphs = (_doc(command).description or "").split("\n\n")
    return "\n\n".join(fill(" ".join(part.split()), width) for part in paragraphs)


def _check_flags(command: Callable[..., None], words: Sequence[str]) -> None:
    """Raise if there is a flag that the command does not have."""
    known = [argument.flag for argument in arguments_of(command) if argument.flag]
    for word in words:
        flag = word.partition("=")[0].replace("_", "-")
        if word == "--":
            return
        if is_flag(word) and flag not in (*known, "-h", "--help"):
            names = [name.removeprefix("--") for name in known]
            raise EinlinearError(
                what=f"einlinear {command.__name__} has no flag {quote(word)}",
                rule=f"einlinear {command.__name__} --help lists its flags",
                fix=did_you_mean(flag.lstrip("-"), names, "leave it out", prefix="--"),
            )


def _registry() -> ConstructorRegistry:
    """How choices and numbers are read: what cannot be read is refused after parsing, by name."""
    registry = ConstructorRegistry()
    registry.primitive_rule(_choice)
    registry.primitive_rule(_number)
    return registry


def _choice(info: PrimitiveTypeInfo) -> PrimitiveConstructorSpec[Any] | None:
    if get_origin(info.type) is not Literal and info.type is not bool:
        return None
    values = (True, False) if info.type is bool else get_args(info.type)
    named = {str(value): value for value in values}

    def read(words: list[str]) -> object:
        word = words[0].capitalize() if info.type is bool else words[0]
        if word in named:
            return named[word]
        fix = did_you_mean(word, list(named), f"give {next(iter(named))}")
        return _Refused(words[0], f"one of {', '.join(named)}", fix)

    metavar = "{" + ",".join(named) + "}"
    return PrimitiveConstructorSpec(1, metavar, read, lambda v: v in values, lambda v: [str(v)])


def _number(info: PrimitiveTypeInfo) -> PrimitiveConstructorSpec[Any] | None:
    kinds = {int: ("a whole number", "8"), float: ("a number", "0.5")}
    if info.type not in kinds:
        return None
    kind: type[int] | type[float] = info.type
    rule, example = kinds[kind]

    def read(words: list[str]) -> object:
        try:
            return kind(words[0])
        except ValueError:
            return _Refused(words[0], rule, f"give {rule} such as {example}")

    def fits(value: object) -> bool:
        return isinstance(value, int | kind) and not isinstance(value, bool)

    return PrimitiveConstructorSpec(1, kind.__name__.upper(), read, fits, lambda v: [str(v)])
