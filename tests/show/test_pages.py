"""Pages: values are escaped, missing ones are errors, scripts cannot be broken out of."""

import json
import sys

import pytest
from jinja2 import UndefinedError
from markupsafe import Markup

from einlinear.show import pages
from einlinear.show.pages import plotly_script, render, script_json


@pytest.fixture
def room(tmp_path, monkeypatch):
    """A package with one template."""
    folder = tmp_path / "room_of_a_test" / "templates"
    folder.mkdir(parents=True)
    (folder.parent / "__init__.py").touch()
    (folder / "page.html").write_text("<p>{{ text }}</p>{{ number | amount }}")
    monkeypatch.syspath_prepend(tmp_path)
    yield "room_of_a_test"
    pages._environment.cache_clear()
    sys.modules.pop("room_of_a_test", None)


def test_values_are_escaped_unless_they_are_markup(room):
    assert render(room, "page.html", text="<b> & co", number=1.2e6) == (
        "<p>&lt;b&gt; &amp; co</p>1.20 M"
    )
    assert render(room, "page.html", text=Markup("<b>"), number=1) == "<p><b></p>1"


def test_a_missing_value_is_an_error(room):
    with pytest.raises(UndefinedError, match="number"):
        render(room, "page.html", text="")


def test_json_in_a_script_cannot_end_it():
    value = {"text": "</script><!--&", "numbers": [1.5, float("nan"), float("inf")]}
    text = script_json(value)
    assert not set("<>&") & set(text)
    assert text.isascii()
    assert json.loads(text) == {"text": "</script><!--&", "numbers": [1.5, None, None]}


def test_scripts_go_into_a_page_as_they_are():
    assert isinstance(script_json([]), Markup)
    assert isinstance(plotly_script(), Markup)
