"""Which layers are output heads, and which are not."""

import pytest
import torch
from torch import nn

import einlinear as el
from einlinear.models.survey.sites import find_sites, output_heads


def heads_of(model):
    return set(output_heads(model, find_sites(model)))


def blocks(count, name, width=16, d_out=4):
    """Blocks that all have an inner layer and one of the given name."""
    return nn.ModuleList(
        nn.ModuleDict({"fc": nn.Linear(width, width), name: nn.Linear(width, d_out)})
        for _ in range(count)
    )


def perceptron():
    return nn.Sequential(
        nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 3)
    )


# The head.


def test_converting_twice_leaves_the_head_alone():
    model = perceptron()
    el.convert_(model, "btt()")
    assert heads_of(model) == {"4"}
    with pytest.raises(el.EinlinearError, match="all but output heads are structured already"):
        el.convert_(model, "btt()")
    assert type(model[4]) is nn.Linear


def test_structured_layers_count_for_the_last_layer():
    def structured(d_in, d_out):
        return el.EinsumLinear(d_in, d_out, structure="btt()")

    assert heads_of(nn.Sequential(structured(16, 16), nn.Linear(16, 3))) == {"1"}
    assert not heads_of(nn.Sequential(nn.Linear(16, 3)))
    # The last layer is structured, or one reads what the last dense one makes.
    assert not heads_of(nn.Sequential(nn.Linear(16, 16), nn.Linear(16, 3), structured(16, 5)))
    assert not heads_of(nn.Sequential(structured(3, 16), nn.Linear(16, 16), nn.Linear(16, 3)))


@pytest.mark.parametrize("name", ["gate_scores", "score", "head", "classifier", "fc_out"])
def test_a_layer_that_every_block_has_is_no_head(name):
    model = nn.ModuleDict({"blocks": blocks(2, name)})
    assert not heads_of(model)
    model["out"] = nn.Linear(16, 10)
    assert heads_of(model) == {"out"}
    el.convert_(model, {f"blocks.0.{name}": "btt()"})  # what is structured is a sibling, too
    assert heads_of(model) == {"out"}
    del model["out"]
    assert not heads_of(model)


def test_siblings_have_the_same_width():
    model = nn.ModuleDict({"blocks": blocks(1, "score")})
    assert heads_of(model) == {"blocks.0.score"}
    model["blocks"].append(blocks(1, "score", d_out=5)[0])
    assert heads_of(model) == {"blocks.0.score", "blocks.1.score"}


def test_the_last_number_of_a_name_counts():
    model = nn.Sequential(nn.Linear(8, 16), nn.Linear(16, 3), nn.Linear(16, 3))
    assert heads_of(model) == {"2"}
    nested = nn.Sequential(nn.Sequential(nn.Linear(8, 16)), nn.Sequential(nn.Linear(16, 3)))
    assert heads_of(nested) == {"1.0"}
    pair = nn.ModuleList([nn.Sequential(nn.Linear(8, 3)), nn.Sequential(nn.Linear(16, 3))])
    assert not heads_of(pair)


def test_what_a_model_declares_may_have_siblings():
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.blocks = blocks(2, "score")

        def layer_roles(self):
            return {"blocks.*.score": "head"}

    assert heads_of(Model()) == {"blocks.0.score", "blocks.1.score"}


def test_a_declared_head_that_is_structured_is_still_the_head():
    class Model(nn.Sequential):
        def layer_roles(self):
            return {"0": "head"}

    model = Model(nn.Linear(16, 16), nn.Linear(16, 16), nn.Linear(16, 3))
    el.convert_(model, {"0": "btt()"})
    assert not heads_of(model)


@pytest.mark.filterwarnings("ignore")
def test_a_compiled_layer_keeps_its_name():
    model = nn.ModuleDict({"head": torch.compile(nn.Linear(16, 16)), "x": nn.Linear(16, 16)})
    assert heads_of(model) == {"head._orig_mod"}
