"""The picture of routing."""

from dataclasses import replace

import pytest

import einlinear as el
from einlinear.reports.figures.routing import draw_routing
from einlinear.runs.record import LayerRouting


@pytest.fixture(scope="module")
def record():
    config = el.RunConfig(
        task="regression", structure="btt", num_experts=4, width=16, steps=4, eval_points=2,
        batch_size=16, eval_size=32, teacher_width=8, teacher_depth=2,
    )  # fmt: skip
    return el.train(config)


def test_a_panel_for_every_layer(record, tmp_path):
    path = draw_routing(record, tmp_path / "routing.svg")
    text = path.read_text(encoding="utf-8")
    layers = [routing.layer for routing in record.curve[-1].routing]
    assert len(layers) == 6
    for layer in layers:
        short = layer.removeprefix("blocks.").replace("mlp.", "")
        assert short in text
    assert draw_routing(record, tmp_path / "again.svg").read_text(encoding="utf-8") == text


def test_the_load_is_what_is_drawn(record, tmp_path):
    """A layer whose tokens all go to one expert looks different."""
    plain = draw_routing(record, tmp_path / "a.svg").read_text(encoding="utf-8")

    def collapsed(routing: LayerRouting) -> LayerRouting:
        return replace(routing, load=(1.0, 0.0, 0.0, 0.0), entropy=0.0)

    last = record.curve[-1]
    routing = tuple(collapsed(layer) for layer in last.routing)
    changed = replace(record, curve=(*record.curve[:-1], replace(last, routing=routing)))
    text = draw_routing(changed, tmp_path / "b.svg").read_text(encoding="utf-8")
    assert "0.00" in text
    assert text != plain


def test_errors(record, tmp_path):
    curve = tuple(replace(point, routing=()) for point in record.curve)
    with pytest.raises(el.EinlinearError, match="no layers of experts"):
        draw_routing(replace(record, curve=curve), tmp_path / "a.svg")
    with pytest.raises(el.EinlinearError, match="the suffix of the file"):
        draw_routing(record, tmp_path / "a.nothing")
