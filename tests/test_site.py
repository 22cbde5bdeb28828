"""How the documentation site reads docstrings; `make docs` builds it."""

import runpy
from pathlib import Path

import pytest

CONF = Path(__file__).parents[1] / "docs/conf.py"


@pytest.fixture(scope="module")
def conf():
    pytest.importorskip("sphinx")
    return runpy.run_path(str(CONF))


def read(conf, text):
    lines = text.splitlines()
    conf["plain_docstring"](None, "function", "f", None, {}, lines)
    return "\n".join(lines)


def test_an_indented_formula_is_shown_as_it_is(conf):
    text = read(conf, "The law.\n\n    y = a * x_i\n    z = b\n\nfor all *x* of `f_`.")
    assert text == "The law.\n\n::\n\n    y = a * x_i\n    z = b\n\nfor all \\*x\\* of `f_`."


def test_fields_become_a_list(conf):
    text = read(
        conf,
        "What a run did.\n\nloss: the last one,\n  in nats\nunit: what is counted\nNot a field.",
    )
    assert text.endswith(
        "- loss: the last one,\n  in nats\n- unit: what is counted\n\nNot a field."
    )


def test_sections_are_left_to_napoleon(conf):
    text = (
        "Convert.\n\nArgs:\n    model: any.\n    rules: what\n        to do.\n\nReturns:\n    it."
    )
    assert read(conf, text) == text


def test_names_that_end_with_an_underscore_are_no_links(conf):
    assert read(conf, "As convert_ and init_, not d_in.") == "As convert\\_ and init\\_, not d_in."


def test_types_are_short(conf):
    array = "~numpy.ndarray[tuple[~typing.Any, ...], ~numpy.dtype[~numpy.float64]]"
    long = f"(x: {array}, d: torch.device)"
    shown = conf["short_signature"](None, "function", "f", None, {}, long, "~pathlib.Path")
    assert shown == ("(x: ndarray, d: torch.device)", "Path")
    assert conf["short_signature"](None, "property", "p", None, {}, None, None) is None


def test_a_file_that_is_no_page_is_offered_for_download(conf):
    source = ["[credits](../src/CREDITS.md), [models](models.md)"]
    conf["link_outside"](None, "data", source)
    assert source == ["{download}`credits <../src/CREDITS.md>`, [models](models.md)"]
    source = ["[models](../models.md)"]
    conf["link_outside"](None, "results/landscape", source)
    assert source == ["[models](../models.md)"]
