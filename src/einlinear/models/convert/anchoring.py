"""anchor_: fit layers again, in order, to what the original model has in their places.

Projection takes each layer by itself, as if its inputs stayed those of the original model. In the
converted model they differ, from layer to layer more. Here a layer is fitted to the outputs of the
original layer, on the inputs that it gets after all layers before it were replaced: it makes up
for their errors as far as it can, so that errors do not add up.
"""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack, suppress
from typing import Any

import torch
from torch import Tensor, nn

from einlinear.errors import EinlinearError, reason
from einlinear.layers.linear import EinsumLinear, SumLinear
from einlinear.layers.projection.pairs import Pairs
from einlinear.models.convert.batches import (
    called,
    evaluating,
    input_of,
    mask_of,
    opened_attention,
    visible,
)
from einlinear.models.convert.names import LayerNames, layer_list
from einlinear.models.convert.stages import Course, Stages, Stopped, seen_on
from einlinear.show.progress import show_nothing

_DAMPING = 1e-2  # how much a layer stays with its weight where its inputs say little; more if few


def sharing_copy(model: nn.Module) -> nn.Module:
    """A copy of a model that shares its parameters and buffers, whose layers can be replaced."""
    shared: dict[int, Any] = {id(tensor): tensor for tensor in model.parameters()}
    shared |= {id(tensor): tensor for tensor in model.buffers()}
    try:
        return copy.deepcopy(model, shared)
    except Exception as error:
        raise EinlinearError(
            what=f"the model cannot be copied: {reason(error)}",
            rule="anchored=True runs the original model beside a copy with the new layers",
            fix="remove what cannot be copied from the model, or leave out anchored",
        ) from error


@torch.no_grad()
def anchor_(
    converted: nn.Module,
    original: nn.Module,
    layers: Iterable[LayerNames],
    batches: Sequence[Any],
    sensitivity: Mapping[LayerNames, Tensor | None],
    *,
    on_progress: Callable[[str], None] = show_nothing,
) -> dict[LayerNames, float]:
    """Fit layers of a converted model to the outputs of the original; return the errors.

    Args:
        converted: the converted model, whose layers are projected already.
        original: the model before it was converted.
        layers: the names of the layers to fit.
        batches: calibration batches.
        sensitivity: the second moments of the gradients at the outputs of each layer, if known.
        on_progress: called with a text for each group of layers that are fitted together.

    Returns:
        The share of the squared outputs of each original layer, around their mean if there is a
        bias, that its new layer misses; nothing for layers that were not called.
    """
    layers = list(layers)
    errors: dict[LayerNames, float] = {}
    with ExitStack() as stack:
        stack.enter_context(torch.random.fork_rng(devices=[]))
        stack.enter_context(evaluating(converted))
        stack.enter_context(evaluating(original))
        stack.enter_context(opened_attention(original, layers))
        groups = _groups_in_order(converted, layers, batches)
        course = _course(original, groups, batches)
        new, old = (Stages(model, batches, course.chains) for model in (converted, original))
        for number, group in enumerate(groups, 1):
            on_progress(f"anchoring: step {number} of {len(groups)}, {layer_list(list(group), 3)}")
            pairs = {names: _pairs_for(converted, names, sensitivity) for names in group}
            for stages in (new, old):
                stages.complete(course.before.get(next(iter(group))[0], []))
            _see(new, old, pairs, sum(group.values()))
            for names, seen in pairs.items():
                if seen.count:
                    errors[names] = _fit_(_layer(converted, names), seen)
    return errors


def _layer(model: nn.Module, names: LayerNames) -> EinsumLinear | SumLinear:
    layer = model.get_submodule(names[0])
    assert isinstance(layer, EinsumLinear | SumLinear), "only projected layers are fitted"
    return layer


def _pairs_for(
    model: nn.Module, names: LayerNames, sensitivity: Mapping[LayerNames, Tensor | None]
) -> Pairs:
    layer = _layer(model, names)
    return Pairs(
        layer.in_features,
        layer.out_features,
        has_bias=layer.bias is not None,
        outputs=sensitivity.get(names),
    )


def _fit_(layer: EinsumLinear | SumLinear, pairs: Pairs) -> float:
    """Set factors and bias to those that give the outputs which a layer should have."""
    before = {name: parameter.clone() for name, parameter in layer.named_parameters()}
    near_oi = layer.to_dense()
    damping = _DAMPING + layer.in_features / pairs.count
    with suppress(torch.linalg.LinAlgError):  # type: ignore[attr-defined]  # constant inputs
        layer.project_(pairs.best_weight(near_oi, damping).to(near_oi.device), pairs.metric)
    if pairs.error(layer.to_dense()) > pairs.error(near_oi):  # alternation may end elsewhere
        for name, parameter in layer.named_parameters():
            parameter.copy_(before[name])
    made_oi = layer.to_dense()
    if layer.bias is not None:
        layer.bias.copy_(pairs.best_bias(made_oi))
    return pairs.error(made_oi)


def _groups_in_order(
    model: nn.Module, layers: list[LayerNames], batches: Sequence[Any]
) -> list[Counter[LayerNames]]:
    """The layers in the order in which they are first called, with their numbers of calls.

    Layers with the same input are together.
    """
    groups: list[Counter[LayerNames]] = []
    inputs: list[Tensor] = []  # kept, so that no two have the same identity
    own: dict[LayerNames, Counter[LayerNames]] = {}

    def hook(names: LayerNames) -> Callable[..., None]:
        def note(module: nn.Module, args: Any, kwargs: Any, output: Tensor) -> None:
            if names not in own:
                x = input_of(args, kwargs)
                if not inputs or x is not inputs[-1]:
                    groups.append(Counter())
                inputs.append(x)
                own[names] = groups[-1]
            own[names][names] += 1

        return note

    with ExitStack() as stack:
        for names in layers:
            module = model.get_submodule(names[0])
            stack.callback(module.register_forward_hook(hook(names), with_kwargs=True).remove)
        for number, batch in enumerate(batches, 1):
            if len(own) < len(layers):  # some layers may be called for some batches only
                called(model, batch, number)
    return groups


def _course(model: nn.Module, groups: list[Counter[LayerNames]], batches: Sequence[Any]) -> Course:
    """Which blocks can be skipped; none if a layer is called again in a later block."""
    layers = [names[0] for group in groups for names in group]
    if any(count > 1 for group in groups for count in group.values()) or not layers:
        return Course([], {})
    return seen_on(model, layers, batches[0])


def _see(
    converted: Stages, original: Stages, pairs: Mapping[LayerNames, Pairs], calls: int
) -> None:
    """Add the inputs of layers in the converted model, with their outputs in the original one."""
    for number, batch in enumerate(original.batches):
        mask = mask_of(batch, original.model)
        outputs = _passed(original, pairs, calls, number, lambda x, y: y)
        inputs = _passed(converted, pairs, calls, number, lambda x, y: x)
        for names, seen in pairs.items():
            for x, y in zip(inputs[names], outputs[names], strict=False):
                if x.shape[:-1] == y.shape[:-1]:  # else tokens were sent to other experts
                    seen.add(visible(x, mask), visible(y, mask))


def _passed(
    stages: Stages,
    group: Iterable[LayerNames],
    calls: int,
    number: int,
    pick: Callable[[Tensor, Tensor], Tensor],
) -> dict[LayerNames, list[Tensor]]:
    """What passes through layers when a model is called, input or output; the rest is not run."""
    found: dict[LayerNames, list[Tensor]] = {names: [] for names in group}

    def hook(names: LayerNames) -> Callable[..., None]:
        def note(module: nn.Module, args: Any, kwargs: Any, output: Tensor) -> None:
            found[names].append(pick(input_of(args, kwargs), output).clone())
            if sum(map(len, found.values())) == calls:
                raise Stopped

        return note

    with ExitStack() as stack, suppress(Stopped):
        for names in group:
            module = stages.model.get_submodule(names[0])
            stack.callback(module.register_forward_hook(hook(names), with_kwargs=True).remove)
        stages.run(number)
    return found
