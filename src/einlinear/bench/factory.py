"""What a name such as "package.module:factory" stands for: a model, or its inputs."""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from functools import reduce
from importlib import import_module
from typing import Any, NamedTuple

from torch import Tensor, nn

from einlinear.errors import EinlinearError, did_you_mean, quote, reason

_NAME = re.compile(r"([^\W\d]\w*(?:\.[^\W\d]\w*)*):([^\W\d]\w*(?:\.[^\W\d]\w*)*)")


class _Wanted(NamedTuple):
    """What a name is expected to stand for, in messages."""

    noun: str
    rule: str
    example: str
    fix: str


_MODEL = _Wanted(
    noun="the model",
    rule="a model is named MODULE:FACTORY: a module that Python can import, and a function in it "
    "that returns the model when called without arguments",
    example="my_project.models:make",
    fix="`def make(): return el.GPT(...)`",
)
_INPUTS = _Wanted(
    noun="the input",
    rule="inputs are named MODULE:FUNCTION: a module that Python can import, and a function in it "
    "that returns what the model is called with",
    example="my_project.models:inputs",
    fix="`def inputs(): return torch.randn(8, 64)`",
)


def build_model(name: str) -> nn.Module:
    """Import a module, from the current folder too, and call its factory; return the model."""
    model = _made(name, _MODEL, whole=nn.Module)
    if not isinstance(model, nn.Module):
        raise _refused(f"{name}() returned {quote(model)}", "let it return an nn.Module", _MODEL)
    return model


def build_inputs(name: str) -> object:
    """Import a module, from the current folder too, and call a function; return the inputs."""
    return _made(name, _INPUTS, whole=Tensor)


def _made(name: str, wanted: _Wanted, *, whole: type) -> object:
    """What the named function returns; or what the name stands for, if that is a `whole`."""
    match = _NAME.fullmatch(name) if isinstance(name, str) else None
    if match is None:
        fix = f"give a name such as {wanted.example}"
        raise _refused(f"{wanted.noun} is {quote(name)}", fix, wanted)
    with _current_folder():
        module = _imported(match[1], wanted)
        factory = _attribute(module, match[1], match[2], wanted)
        if isinstance(factory, whole):
            return factory
        if not callable(factory):
            raise _refused(f"{name} is {quote(factory)}", "name a function or a class", wanted)
        try:
            return factory()
        except Exception as error:
            raise _refused(
                f"{name}() failed: {type(error).__name__}: {reason(error)}",
                f"name a function that needs no arguments, such as {wanted.fix}, and call it "
                "yourself to see the whole error",
                wanted,
            ) from error


@contextmanager
def _current_folder() -> Iterator[None]:
    """Look for modules in the current folder first, as `python -m` does."""
    folder = os.getcwd()
    sys.path.insert(0, folder)
    try:
        yield
    finally:
        if folder in sys.path:
            sys.path.remove(folder)


def _imported(name: str, wanted: _Wanted) -> object:
    try:
        return import_module(name)
    except ModuleNotFoundError as error:
        missing = error.name or ""
        if name != missing and not name.startswith(f"{missing}."):
            raise _failed_import(name, error, wanted) from error  # the module itself was found
        fix = "check the spelling, and start in the folder that holds it or install its package"
        raise _refused(f"there is no module {quote(missing)}", fix, wanted) from error
    except Exception as error:
        raise _failed_import(name, error, wanted) from error


def _failed_import(name: str, error: Exception, wanted: _Wanted) -> EinlinearError:
    fix = f"python -c 'import {name}' shows the whole error"
    what = f"importing {name} failed: {type(error).__name__}: {reason(error)}"
    return _refused(what, fix, wanted)


def _attribute(module: object, where: str, name: str, wanted: _Wanted) -> Any:
    try:
        return reduce(getattr, name.split("."), module)
    except AttributeError as error:
        known = [each for each in dir(module) if not each.startswith("_")]
        raise _refused(
            f"the module {where} has no {quote(name)}",
            did_you_mean(name, known, "name one of its functions"),
            wanted,
        ) from error


def _refused(what: str, fix: str, wanted: _Wanted) -> EinlinearError:
    return EinlinearError(what=what, rule=wanted.rule, fix=fix)
