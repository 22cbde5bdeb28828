"""HTML pages: Jinja templates of a room, and what is safe to put into their scripts."""

from __future__ import annotations

import json
from collections.abc import Mapping
from functools import cache
from math import isfinite

from jinja2 import ChoiceLoader, Environment, PackageLoader, StrictUndefined
from markupsafe import Markup

from einlinear.errors import EinlinearError
from einlinear.show.numbers import amount, between, duration, short


def render(room: str, template: str, /, **values: object) -> str:
    """Fill in a template from the folder templates/ of a room, such as "einlinear.bench".

    Values are escaped; markup that is already HTML comes as `Markup`. Templates can also extend and
    include those of `einlinear.show`, and use the filters short, amount, between and duration. A
    name that has no value is an error.
    """
    return _environment(room).get_template(template).render(values)


@cache
def _environment(room: str) -> Environment:
    rooms = dict.fromkeys((room, "einlinear.show"))
    environment = Environment(
        loader=ChoiceLoader([PackageLoader(name) for name in rooms]),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters |= {f.__name__: f for f in (short, amount, between, duration)}
    environment.filters["script_json"] = script_json
    return environment


def plotly_script() -> Markup:
    """The script that draws the figures of a page, to be embedded in it."""
    try:
        from plotly.offline import get_plotlyjs
    except ImportError as error:
        raise EinlinearError(
            what="figures need plotly, which is not installed",
            rule="plots are an extra of the package",
            fix='pip install "einlinear[plot]"',
        ) from error
    return Markup(get_plotlyjs())


def script_json(value: object) -> Markup:
    """A value as JSON that is safe inside a script element, whatever texts it holds.

    Numbers that are not finite become null. There are no angle brackets, so no text can end the
    script or open a comment in it. The JSON is ASCII, so all other characters that matter to a
    script are escaped already. Not for attributes: the quotes are plain.
    """
    text = json.dumps(finite(value), allow_nan=False, separators=(",", ":"))
    return Markup(text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026"))


def finite(value: object) -> object:
    """A value as JSON can hold it: numbers that are not finite become None."""
    if isinstance(value, float):
        return value if isfinite(value) else None
    if isinstance(value, Mapping):
        return {name: finite(item) for name, item in value.items()}
    return [finite(item) for item in value] if isinstance(value, list | tuple) else value
