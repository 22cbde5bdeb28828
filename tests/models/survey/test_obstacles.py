"""Reasons a layer cannot be replaced: each is refused by name, and nothing is changed."""

import re

import pytest
import torch
from torch import nn

import einlinear as el
from einlinear.models.survey.sites import find_sites, output_heads


def refused(model, words, rules="btt()"):
    with pytest.raises(el.EinlinearError, match=re.escape(words)):
        el.convert_(model, rules)
    assert not [m for m in model.modules() if isinstance(m, el.EinsumLinear)]


def show(*arguments, **options):
    """A hook of any kind."""


TENSOR_HOOKS = ["register_hook", "register_post_accumulate_grad_hook"]


@pytest.mark.parametrize("name", ["weight", "bias"])
@pytest.mark.parametrize("register", TENSOR_HOOKS)
def test_hooks_of_tensors(register, name):
    model = nn.ModuleList([nn.Linear(16, 16)])
    handle = getattr(getattr(model[0], name), register)(show)
    refused(model, f"its {name} has a gradient hook, show")
    handle.remove()
    el.convert_(model, "btt()")


@pytest.mark.parametrize("options", [{}, {"kdim": 8}])
@pytest.mark.parametrize("register", TENSOR_HOOKS)
@pytest.mark.parametrize("part", ["q_proj", "out_proj"])
def test_hooks_of_what_an_attention_packs(part, register, options):
    model = nn.ModuleDict({"a": nn.MultiheadAttention(16, 2, **options)})
    weight = "k_proj_weight" if options else "in_proj_weight"
    getattr(getattr(model["a"], weight), register)(show)
    refused(model, f"its {weight} has a gradient hook, show", {f"a.{part}": "btt()"})


STATE_HOOKS = {
    "register_state_dict_post_hook": "state-dict hook",
    "register_state_dict_pre_hook": "state-dict pre-hook",
    "register_load_state_dict_pre_hook": "load-state-dict pre-hook",
    "register_load_state_dict_post_hook": "load-state-dict post-hook",
}


@pytest.mark.parametrize("kind", [nn.Linear, nn.MultiheadAttention])
@pytest.mark.parametrize("register", STATE_HOOKS)
def test_hooks_of_state_dicts(register, kind):
    model = nn.ModuleList([kind(16, 16)])
    getattr(model[0], register)(show)
    refused(model, f"it has a {STATE_HOOKS[register]}, show")


def test_a_weight_that_is_no_parameter():
    model = nn.ModuleList([nn.Linear(16, 16)])
    weight = model[0].weight.detach()
    del model[0].weight
    model[0].weight = weight
    refused(model, "its weight is a Tensor, not a plain nn.Parameter")
    del model[0].weight
    model[0].register_buffer("weight", weight)
    refused(model, "its weight is a Tensor, not a plain nn.Parameter")


def test_a_lazy_layer_that_has_run():
    model = nn.Sequential(nn.LazyLinear(16), nn.ReLU())
    model(torch.ones(2, 16))
    el.convert_(model, "btt()")


class Called(nn.Linear):
    def __call__(self, x):
        return 2 * super().__call__(x)


class CalledAttention(nn.MultiheadAttention):
    def __call__(self, x):
        return super().__call__(x, x, x)


def test_calls_of_their_own():
    refused(nn.ModuleList([Called(16, 16)]), "Called, which overrides __call__")
    words = "CalledAttention, which overrides __call__"
    refused(nn.ModuleList([CalledAttention(16, 2)]), words)


class Holder(nn.Module):
    def __init__(self, hold):
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(16, 16), nn.Linear(16, 16)])
        self.order = hold(self.layers)


def unregistered(layers):
    """A module that is not in the tree, but holds a layer that is."""
    return [nn.Sequential(layers[0])]


@pytest.mark.parametrize(
    "hold",
    [
        lambda layers: [layers[0]],
        lambda layers: (3, layers[0]),
        lambda layers: {layers[0]},
        lambda layers: {"x": layers[0]},
        lambda layers: {layers[0]: "x"},
        lambda layers: {"x": [(layers[0],)]},
        unregistered,
    ],
)
def test_layers_that_are_held_outside_the_tree(hold):
    model = nn.ModuleDict({"part": Holder(hold)})
    words = "'part.layers.0' cannot be replaced: it is also held outside the module tree, by order"
    refused(model, f"{words} of part")
    el.convert_(model, {"part.layers.1": "btt()"})
    refused(Holder(hold), "by order of the model")


@pytest.mark.filterwarnings("ignore")
def test_a_layer_that_is_compiled_by_itself():
    model = nn.ModuleDict({"a": torch.compile(nn.Linear(16, 16), backend="eager")})
    refused(model, "it is also held outside the module tree, by torch.compile at a")
    whole = torch.compile(nn.Sequential(nn.Linear(16, 16)), backend="eager")
    x = torch.ones(2, 16)
    el.convert_(whole, "btt()")
    torch.testing.assert_close(whole(x), whole._orig_mod(x))


def test_an_attention_that_is_held_outside_the_tree():
    model = nn.ModuleDict({"a": nn.MultiheadAttention(16, 2)})
    model.order = [model["a"]]
    refused(model, "by order of the model")


def test_holding_what_holds_a_layer_is_no_obstacle():
    model = Holder(lambda layers: [layers, 1, "x"])
    model.order.append(model.order)  # a circle
    outer = nn.ModuleDict({"inner": model})
    model.owner = (outer,)  # not in the tree of the inner model, and reaches its layers through it
    assert len(el.convert_(model, "btt()").swaps) == 2


def test_parameters_over_the_same_memory_are_tied():
    model = nn.ModuleDict({"a": nn.Linear(16, 16), "b": nn.Linear(16, 16), "c": nn.Linear(16, 16)})
    model["b"].weight = nn.Parameter(model["a"].weight.data)
    refused(model, "its weights are tied: a.weight is b.weight; neither can b")
    model["b"].weight = nn.Parameter(model["a"].weight.data.T)
    refused(model, "its weights are tied: a.weight is b.weight; neither can b")
    assert len(el.convert_(model, {"c": "btt()"}).swaps) == 1
    with torch.device("meta"):
        on_meta = nn.ModuleList([nn.Linear(16, 16), nn.Linear(16, 16)])
    assert len(el.convert_(on_meta, "btt()").swaps) == 2
    empty = nn.ModuleList([nn.Linear(16, 16, bias=False), nn.Linear(16, 16, bias=False)])
    for layer in empty:
        layer.weight.data.untyped_storage().resize_(0)  # no memory, so none in common
    assert "tied" not in "".join(site.obstacle for site in find_sites(empty))


def test_an_embedding_in_the_same_memory_makes_a_head():
    model = nn.ModuleDict(
        {"e": nn.Embedding(9, 16), "words": nn.Linear(16, 9, bias=False), "z": nn.Linear(16, 16)}
    )
    assert not output_heads(model, find_sites(model))
    model["words"].weight = nn.Parameter(model["e"].weight.data)
    assert output_heads(model, find_sites(model)) == {"words"}


@pytest.mark.parametrize("register", TENSOR_HOOKS)
def test_hooks_of_the_output_projection_of_an_attention(register):
    model = nn.ModuleDict({"a": nn.MultiheadAttention(16, 2)})
    getattr(model["a"].out_proj.weight, register)(show)
    refused(model, "its out_proj.weight has a gradient hook, show", {"a.out_proj": "btt()"})
    el.convert_(model, {"a.q_proj": "btt()"})
