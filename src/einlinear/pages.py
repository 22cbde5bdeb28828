"""What every HTML page needs: plotly's script, values inside scripts, templates filled in."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from math import isfinite

from einlinear.errors import EinlinearError


def plotly_script() -> str:
    """The script that draws the figures of a page, to be embedded in it."""
    try:
        from plotly.offline import get_plotlyjs
    except ImportError as error:
        raise EinlinearError(
            what="figures need plotly, which is not installed",
            rule="plots are an extra of the package",
            fix='pip install "einlinear[plot]"',
        ) from error
    return str(get_plotlyjs())


def script_json(value: object) -> str:
    """A value as JSON that is harmless inside a script, whatever texts it holds.

    Numbers that are not finite become null. No text can end the script or open a comment in it,
    because there are no angle brackets. All other characters that a script may take amiss are
    escapes already, since the JSON is ASCII.
    """
    text = json.dumps(_finite(value), allow_nan=False, separators=(",", ":"))
    return text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")


def _finite(value: object) -> object:
    if isinstance(value, float):
        return value if isfinite(value) else None
    if isinstance(value, Mapping):
        return {name: _finite(item) for name, item in value.items()}
    return [_finite(item) for item in value] if isinstance(value, list | tuple) else value


def fill(template: str, values: Mapping[str, str]) -> str:
    """A template with its %NAME% replaced; what is put in is not looked at again."""
    return re.sub("%([A-Z]+)%", lambda match: values[match[1]], template)
