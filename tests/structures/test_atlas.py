import json
import re
import sys
from collections import Counter

import pytest

from einlinear import EinlinearError
from einlinear.structures.atlas import GROUPS, NAMED_EXAMPLES, atlas_rows, draw_atlas


@pytest.fixture(scope="module")
def rows():
    return atlas_rows(samples=12, seed=5)


def test_groups_are_what_they_are_called(rows):
    assert Counter(row.group for row in rows) == {
        group: 12 if group != "named" else len(NAMED_EXAMPLES) for group in GROUPS
    }
    for row in rows:
        if row.group == "best":
            assert (row.taxonomy.omega, row.taxonomy.psi) == (0, 1)
        if row.group == "unshared":
            assert row.taxonomy.omega == 0
            assert row.taxonomy.psi < 1
        if row.group == "three":
            assert row.structure.num_factors == 3


def test_the_page_needs_nothing_else(rows):
    page = draw_atlas(rows, 1024)
    assert not re.search(r"<(script|link|img|iframe)[^>]*(src|href)=", page)
    for name in NAMED_EXAMPLES:
        assert name in page
    assert page.count("<svg") >= len(NAMED_EXAMPLES)
    assert '<td class="n">131,072</td>' in page, "2 FLOPs for each multiply-add of a Monarch layer"


def test_every_structure_is_drawn(rows):
    page = draw_atlas(rows, 256)
    figures = json.loads(re.search(r'id="figures">(.*)</script>', page)[1])
    assert list(figures) == ["space", "rank-cost", "sharing-cost"]
    for figure in figures.values():
        points = sum(len(trace["x"]) for trace in figure["data"] if "scatter" in trace["type"])
        assert points == len(rows)
        assert figure["layout"]["height"] > 0


def test_without_plotly_there_is_a_clear_error(rows, monkeypatch):
    monkeypatch.setitem(sys.modules, "plotly.offline", None)
    with pytest.raises(EinlinearError, match=r"einlinear\[plot\]"):
        draw_atlas(rows, 256)
