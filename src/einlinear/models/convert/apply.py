"""apply_swaps_: put new layers in place, with random weights or the closest to the old ones."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from einlinear.errors import EinlinearError
from einlinear.layers.linear import EinsumLinear, SumLinear
from einlinear.layers.moe.layers import MoELinear
from einlinear.layers.projection.blockwise import is_one_block
from einlinear.layers.projection.metric import Metric, damped
from einlinear.layers.scaling import FactorInit
from einlinear.models.convert.anchoring import anchor_, sharing_copy
from einlinear.models.convert.calibration import LayerMoments, Weighting
from einlinear.models.convert.conversion import Conversion, LayerFit, Swap
from einlinear.models.convert.names import LayerNames, layer_list
from einlinear.models.saving.placing import keep_flags_, put_layers_
from einlinear.models.survey.obstacles import ADAPTER
from einlinear.models.survey.sites import Site, dense_parameters, find_sites
from einlinear.show.progress import show_nothing
from einlinear.structures.structure import StructureSum

_OUTPUT_DAMPING = 1.0  # of the mean of the diagonal
_ANCHORED_SAMPLES = 10  # vectors for each input of a layer


def apply_swaps_(
    model: nn.Module,
    swaps: Iterable[Swap],
    *,
    weight_norm: bool = True,
    factor_init: FactorInit = "spectral",
) -> None:
    """Replace the layers; all new layers are created before the first is put in place."""
    layers = _new_layers(model, swaps, weight_norm=weight_norm, factor_init=factor_init)
    put_layers_(model, layers)


def _new_layers(
    model: nn.Module,
    swaps: Iterable[Swap],
    *,
    weight_norm: bool = True,
    factor_init: FactorInit = "spectral",
    fill: Callable[[Site, nn.Module], None] | None = None,
) -> list[tuple[Site, nn.Module]]:
    """The new layers, with the sites that they replace.

    `fill` sets the weights of a new layer from its site.
    """
    sites = {site.names: site for site in find_sites(model)}
    layers: list[tuple[Site, nn.Module]] = []
    for swap in swaps:
        site = sites.get(swap.names)
        if site is None or (site.d_in, site.d_out) != (swap.d_in, swap.d_out) or site.obstacle:
            raise EinlinearError(
                what=f"there is no linear layer {swap.name!r}, {swap.d_in} -> {swap.d_out}, to "
                f"replace in {type(model).__name__}",
                rule="swaps can only be applied to the model they were planned for",
                fix="plan them again for this model",
            )
        layer = _new_layer(site, swap, weight_norm, factor_init)
        if fill is not None:
            fill(site, layer)
        layers.append((site, layer))
    return layers


def project_swaps_(
    model: nn.Module,
    conversion: Conversion,
    moments: dict[LayerNames, LayerMoments] | None,
    anchors: Sequence[Any] = (),
    *,
    on_progress: Callable[[str], None] = show_nothing,
) -> Conversion:
    """Replace layers by the closest structured ones; return the conversion with their errors.

    With batches as anchors, the layers are then fitted to the outputs of the original model.
    """
    fits: dict[LayerNames, LayerFit] = {}
    sensitivity: dict[LayerNames, Tensor | None] = {}

    def fill(site: Site, new: nn.Module) -> None:
        assert isinstance(new, EinsumLinear | SumLinear | MoELinear), "a swap makes these"
        place = f"layer {len(fits) + 1} of {len(conversion.swaps)}"
        on_progress(f"projecting: {place}, {site.name}")
        own = None if moments is None else moments.pop(site.names)
        weight, bias = dense_parameters(site)
        metric = None if own is None else _trusted(own.metric, new)
        sensitivity[site.names] = None if metric is None else metric.outputs
        error = new.project_(weight, metric)
        if new.bias is not None and bias is not None:
            new.bias.data.copy_(bias.detach())
        needed = (_ANCHORED_SAMPLES if anchors else 1) * site.d_in
        count = 0 if own is None else own.inputs.count
        seen = count, own is None or count >= needed
        fits[site.names] = LayerFit(site.names, error, *seen)

    weighting: Weighting | None = None
    if moments is not None:
        weighting = "both" if any(own.has_gradient for own in moments.values()) else "inputs"
    with torch.random.fork_rng(devices=[]):  # fresh weights that are not kept
        layers = _new_layers(model, conversion.swaps, weight_norm=False, fill=fill)
    if anchors:
        converted = sharing_copy(model)
        places = {site.names: site for site in find_sites(converted)}
        put_layers_(converted, [(places[site.names], layer) for site, layer in layers])
        errors = anchor_(converted, model, fits, anchors, sensitivity, on_progress=on_progress)
        _check_fitted(errors, fits)
        for names, error in errors.items():
            fits[names] = replace(fits[names], error=error)
    put_layers_(model, layers)
    return replace(
        conversion,
        lost=(),
        fits=tuple(fits.values()),
        weighting=weighting,
        is_anchored=bool(anchors),
    )


def _trusted(metric: Metric, new: EinsumLinear | SumLinear | MoELinear) -> Metric:
    """What errors of a new layer count.

    The weights of its outputs come from gradients, so they hold for small errors only. Structures
    other than low rank leave larger ones on trained weights: theirs are damped. In a small GPT with
    layers of btt(rank=2) this lowered the loss from 2.88 to 2.04, below the 2.07 of inputs alone.
    """
    plans = new.plan.plans if isinstance(new, SumLinear) else (new.plan,)
    if metric.outputs is None or all(map(is_one_block, plans)):
        return metric
    return replace(metric, outputs=damped(metric.outputs, _OUTPUT_DAMPING))


def _check_fitted(errors: Mapping[LayerNames, float], fits: Mapping[LayerNames, LayerFit]) -> None:
    """Refuse a model whose copy does not call its layers."""
    called = [names for names, fit in fits.items() if fit.samples]
    if called and not errors:
        raise EinlinearError(
            what=f"the new layers were never called: {layer_list(called, 5)}",
            rule="anchored=True runs a copy of the model with the new layers; a forward that is "
            "wrapped in a function still calls the layers of the original",
            fix="convert the model before its forward is wrapped, or leave out anchored",
        )


def check_projectable(model: nn.Module, conversion: Conversion) -> None:
    """Raise an error unless all layers to replace can start from the old weights."""
    sites = {site.names: site for site in find_sites(model)}
    for swap in conversion.swaps:
        weight = sites[swap.names].weight
        if weight.is_meta or not bool(weight.isfinite().all()):
            problem = "is on the meta device" if weight.is_meta else "is not finite everywhere"
            raise EinlinearError(
                what=f"the weight of layer {swap.name!r} {problem}",
                rule='init="project" starts from the numbers of the old weights',
                fix="load the weights first, and repair them; or leave the layer alone: "
                f"{{{swap.name!r}: None}}",
            )
    adapted = [layer for layer in conversion.lost if layer.reason.startswith(ADAPTER)]
    if adapted:
        raise EinlinearError(
            what=f'init="project" inside adapters: {layer_list([a.names for a in adapted], 5)}',
            rule="an adapter and the layer it adapts are one weight; each alone is not",
            fix="merge the adapters into the model first, or convert the model before you add them",
        )


def check_without_experts(conversion: Conversion) -> None:
    """Raise an error if a layer to project would become a mixture."""
    mixed = [swap.names for swap in conversion.swaps if swap.num_experts]
    if mixed:
        raise EinlinearError(
            what=f'experts with init="project": {layer_list(mixed, 5)}',
            rule="convert_ projects only layers without experts",
            fix="start experts from the old weights with el.upcycle_(model, rules), give a "
            'structure without experts, or init="fresh"',
        )


def _new_layer(
    site: Site, swap: Swap, weight_norm: bool, factor_init: FactorInit
) -> EinsumLinear | SumLinear | MoELinear:
    """Create the structured layer with the device, dtype and flags of the dense one."""
    make: Callable[..., EinsumLinear | SumLinear | MoELinear] = (
        SumLinear if isinstance(swap.structure, StructureSum) else EinsumLinear
    )
    if swap.num_experts:
        make = partial(
            MoELinear,
            num_experts=swap.num_experts,
            num_active=swap.num_active,
            expert_norm=swap.expert_norm,
            expert_gain=swap.expert_gain,
        )
    new = make(
        swap.d_in,
        swap.d_out,
        bias=swap.has_bias,
        structure=swap.structure,
        weight_norm=weight_norm,
        factor_init=factor_init,
        device=site.weight.device,
        dtype=site.weight.dtype,
    )
    keep_flags_(new, site)
    return new
