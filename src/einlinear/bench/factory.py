"""The model that a name such as "package.module:factory" stands for."""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from functools import reduce
from importlib import import_module
from typing import Any

from torch import nn

from einlinear.errors import EinlinearError, did_you_mean, quote, reason

_NAME = re.compile(r"([^\W\d]\w*(?:\.[^\W\d]\w*)*):([^\W\d]\w*(?:\.[^\W\d]\w*)*)")
_RULE = "a model is named MODULE:FACTORY: a module that Python can import, and a function in it "
_RULE += "that returns the model when called without arguments"


def build_model(name: str) -> nn.Module:
    """Import a module, from the current folder too, and call its factory; return the model."""
    match = _NAME.fullmatch(name) if isinstance(name, str) else None
    if match is None:
        raise _refused(f"the model is {quote(name)}", "give a name such as my_project.models:make")
    with _current_folder():
        module = _imported(match[1])
        factory = _attribute(module, match[1], match[2])
        if isinstance(factory, nn.Module):
            return factory
        if not callable(factory):
            raise _refused(f"{name} is {quote(factory)}", "name a function or a class")
        try:
            model = factory()
        except Exception as error:
            raise _refused(
                f"{name}() failed: {type(error).__name__}: {reason(error)}",
                "name a function that needs no arguments, such as "
                "`def make(): return el.GPT(...)`, and call it yourself to see the whole error",
            ) from error
    if not isinstance(model, nn.Module):
        raise _refused(f"{name}() returned {quote(model)}", "let it return an nn.Module")
    return model


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


def _imported(name: str) -> object:
    try:
        return import_module(name)
    except ModuleNotFoundError as error:
        missing = error.name or ""
        if name != missing and not name.startswith(f"{missing}."):
            raise _failed_import(name, error) from error  # the module itself was found
        fix = "check the spelling, and start in the folder that holds it or install its package"
        raise _refused(f"there is no module {quote(missing)}", fix) from error
    except Exception as error:
        raise _failed_import(name, error) from error


def _failed_import(name: str, error: Exception) -> EinlinearError:
    fix = f"python -c 'import {name}' shows the whole error"
    return _refused(f"importing {name} failed: {type(error).__name__}: {reason(error)}", fix)


def _attribute(module: object, where: str, name: str) -> Any:
    try:
        return reduce(getattr, name.split("."), module)
    except AttributeError as error:
        known = [each for each in dir(module) if not each.startswith("_")]
        raise _refused(
            f"the module {where} has no {quote(name)}",
            did_you_mean(name, known, "name one of its functions"),
        ) from error


def _refused(what: str, fix: str) -> EinlinearError:
    return EinlinearError(what=what, rule=_RULE, fix=fix)
