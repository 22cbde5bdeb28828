"""fuse_ and unfuse_: compute the feed-forward nets of a model in one pass, or layer by layer."""

from __future__ import annotations

from collections.abc import Iterator

from torch import nn

from einlinear.errors import EinlinearError, quote
from einlinear.layers.engine import binding
from einlinear.layers.engine.abi import Activation
from einlinear.layers.linear import EinsumLinear, SumLinear
from einlinear.layers.moe.routing import Routed
from einlinear.models.adapted import AdaptedLinear
from einlinear.models.convert.conversion import LayerNote
from einlinear.models.fusing.feedforward import has_hooks
from einlinear.models.fusing.fused import put_recipe_, remove_recipe_
from einlinear.models.fusing.fusion import FusedNet, Fusion
from einlinear.models.fusing.recipe import Net, Recipe, activation_of, find_recipe, is_linear
from einlinear.models.survey.sites import module_paths
from einlinear.show.numbers import listed
from einlinear.structures.named import named_call

# Methods that compute a net inside a larger module: nn.TransformerEncoderLayer, the layers of BERT.
_METHODS = ("_ff_block", "feed_forward_chunk")
_MOST_LAYERS = 3  # a module with more linear layers is not a feed-forward net
_ALONE = "in no feed-forward net"
_OTHERS: dict[type[nn.Module], str] = {
    Routed: "experts",
    SumLinear: "a sum of structures",
    AdaptedLinear: "an adapter",
    nn.Linear: "a dense layer",
}


def fuse_(model: nn.Module) -> Fusion:
    """Compute feed-forward nets of structured layers in one pass each, in place; return which.

    A net is up -> activation -> down, or down(activation(gate(x)) * up(x)), inside one module:
    of el.GPT, nn.TransformerEncoderLayer, nn.Sequential, Hugging Face or your own. The engine takes
    a few tokens at a time through the whole net, so that the wide activations between its layers
    stay in cache, and saves only the input for the backward pass. Parameters, their names, and
    results (up to rounding) stay the same.

    Calls for which this is not possible are computed layer by layer: under torch.compile,
    torch.export, torch.func and autocast, on other devices, with dropout inside the net, with hooks
    on its layers, and for a few tokens. Fuse after conversion; call it again after you have changed
    the modules of the model.
    """
    paths = _paths(model)
    for module, _ in paths:
        remove_recipe_(module)
    nets: list[FusedNet] = []
    reasons: dict[int, str] = {}
    done: set[int] = set()
    for module, names in reversed(paths):  # inner modules first
        for method in _methods(module):
            found = find_recipe(module, method)
            if isinstance(found, str):
                continue
            layers = [module.get_submodule(name) for net in found.nets for name in net.layers]
            if done & set(map(id, layers)):
                continue
            if obstacle := _obstacle(module, found):
                reasons.update((id(layer), obstacle) for layer in layers)
                continue
            put_recipe_(module, method, found)
            done.update(map(id, layers))
            nets += [_fused_net(module, names, net) for net in found.nets]
    structured = EinsumLinear | SumLinear | Routed
    left = [
        LayerNote(names, reasons.get(id(module), _ALONE))
        for module, names in paths
        if id(module) not in done
        and (id(module) in reasons or isinstance(module, structured))
        and not _is_term(names, paths)
    ]
    if not nets:
        raise _nothing(model, left)
    remarks = () if binding.is_available() else (f"layer by layer here: {binding.status()}",)
    return Fusion(tuple(reversed(nets)), tuple(left), remarks)


def unfuse_(model: nn.Module) -> tuple[str, ...]:
    """Compute all feed-forward nets layer by layer again, in place; return their modules' names."""
    fused = [names[0] for module, names in _paths(model) if remove_recipe_(module)]
    if not fused:
        raise EinlinearError(
            what=f"{type(model).__name__} has no fused feed-forward net",
            rule="there must be something to undo",
            fix="call el.fuse_(model) first, or leave this out",
        )
    return tuple(fused)


def _paths(model: nn.Module) -> list[tuple[nn.Module, tuple[str, ...]]]:
    if not isinstance(model, nn.Module):
        raise EinlinearError(
            what=f"the model is given as {quote(model)}",
            rule="a model is an nn.Module",
            fix="give the model whose feed-forward nets to fuse",
        )
    return module_paths(model)


def _methods(module: nn.Module) -> Iterator[str]:
    """The methods of a module that may compute a feed-forward net."""
    if is_linear(module) or "forward" in vars(module):
        return
    yield from (name for name in _METHODS if hasattr(type(module), name))
    if isinstance(module, nn.ModuleList | nn.ModuleDict):
        return
    count = sum(is_linear(inner) for inner in module.modules())
    if count >= 2 and (count <= _MOST_LAYERS or type(module) is nn.Sequential):
        yield "forward"


def _obstacle(module: nn.Module, recipe: Recipe) -> str:
    """Why a net cannot be computed in one pass; "" if it can."""
    layers = [module.get_submodule(name) for net in recipe.nets for name in net.layers]
    for kind, reason in _OTHERS.items():
        if any(isinstance(layer, kind) for layer in layers):
            return f"its net has {reason}"
    for layer in layers:
        if type(layer) is not EinsumLinear:
            return f"its net has a {type(layer).__name__}"
    inside = [module.get_submodule(path) for path in recipe.inside if path]
    if any(has_hooks(part) for part in (*layers, *inside)):
        return "its net has a hook"
    return ""


def _fused_net(module: nn.Module, names: tuple[str, ...], net: Net) -> FusedNet:
    layers = [module.get_submodule(name) for name in net.layers]
    plans = [layer.plan for layer in layers if isinstance(layer, EinsumLinear)]
    activation = net.activation
    if not isinstance(activation, Activation):
        found = activation_of(module.get_submodule(activation))
        assert found is not None, "a net has a known activation"
        activation = found
    return FusedNet(
        names if names != ("",) else ("the model",),
        tuple(".".join(filter(None, [names[0], name])) for name in net.layers),
        (plans[0].d_in, plans[0].d_out, plans[-1].d_out),
        listed(list(dict.fromkeys(named_call(plan.structure) for plan in plans))),
        "gated " * (len(net.ups) > 1) + activation.name.lower().replace("_", " "),
    )


def _is_term(names: tuple[str, ...], paths: list[tuple[nn.Module, tuple[str, ...]]]) -> bool:
    """Whether a layer is part of another, as a term of a sum."""
    holders = [name for module, own in paths if is_linear(module) for name in own]
    return any(names[0].startswith(f"{holder}.") for holder in holders if holder)


def _nothing(model: nn.Module, left: list[LayerNote]) -> EinlinearError:
    reasons = dict.fromkeys(f"{note.names[0]}: {note.reason}" for note in left)
    return EinlinearError(
        what=f"{type(model).__name__} has no feed-forward net that can be fused"
        + (f" ({listed(list(reasons), 4)})" if reasons else ""),
        rule="a net is two or three structured layers with an activation between them: "
        "up -> relu, gelu or silu -> down",
        fix="convert the layers of feed-forward nets first: "
        'el.convert_(model, {"*.mlp.*": el.btt()})',
    )
