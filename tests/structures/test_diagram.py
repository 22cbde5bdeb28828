from fractions import Fraction
from xml.etree import ElementTree

import pytest

import einlinear as el
from cases import STRUCTURES
from einlinear import EinlinearError, make_plan
from einlinear.structures.diagram import _pill_width, lay_out
from einlinear.structures.edges import all_edges

SVG = "{http://www.w3.org/2000/svg}"


@pytest.mark.parametrize("name", STRUCTURES)
def test_the_picture_names_every_node_and_edge(name):
    plan = make_plan(STRUCTURES[name], 1024, 768)
    root = ElementTree.fromstring(el.draw_structure(plan))
    texts = ["".join(text.itertext()) for text in root.iter(f"{SVG}text")]
    for node in ("X", "Y", *plan.structure.factors):
        assert node in texts
    for edge, size in plan.sizes.items():
        assert f"{edge} {size}" in texts
    assert str(plan.structure) in " ".join(texts)
    assert f"{2 * plan.macs:,} FLOPs per token, " in " ".join(texts)
    assert len(list(root.iter(f"{SVG}path"))) == len(plan.sizes)


CROWDED = el.Structure.from_edges(
    {e: Fraction(1, 15) if e[0] in "XY" else Fraction(1, 40) for e in all_edges(4)}
)


@pytest.mark.no_cover
@pytest.mark.parametrize("name", [*STRUCTURES, "all 41 edges"])
def test_no_label_covers_another_or_leaves_the_picture(name):
    plan = make_plan(STRUCTURES.get(name, CROWDED), 1024, 1024)
    picture = lay_out(plan)
    boxes = {e: (p.x, p.y, _pill_width(e, plan.sizes[e]) / 2) for e, p in picture.labels.items()}
    for edge, (x, y, half) in boxes.items():
        assert 0 <= x - half
        assert x + half <= picture.width
        assert 12 <= y <= picture.height - 12
        for other, (x2, y2, half2) in boxes.items():
            if other != edge:
                assert abs(x - x2) >= half + half2 or abs(y - y2) >= 24, (edge, other)
        for node in picture.nodes.values():
            assert abs(x - node.x) >= half + 20 or abs(y - node.y) >= 12 + 20, edge


def test_only_plans_are_drawn():
    with pytest.raises(EinlinearError, match="make_plan"):
        el.draw_structure(el.btt())


def test_a_caption_can_be_left_out():
    plan = make_plan(el.btt(), 64, 64)
    assert "parameters" in el.draw_structure(plan)
    assert "parameters" not in el.draw_structure(plan, caption=False)


def test_an_edge_of_size_one_is_dashed():
    assert "dasharray" in el.draw_structure(make_plan(el.btt(num_factors=3), 2, 2))
    assert "dasharray" not in el.draw_structure(make_plan(el.btt(num_factors=3), 64, 64))
