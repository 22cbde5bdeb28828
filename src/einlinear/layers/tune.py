"""tune: time the variants of every layer once and remember the fastest."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from statistics import median

import torch
from torch import nn

from einlinear.errors import EinlinearError, quote
from einlinear.layers.linear import EinsumLinear
from einlinear.layers.measure import interleaved
from einlinear.layers.variants import ALL_VARIANTS, fitting_variants, situation
from einlinear.structures.values import whole_number

Choices = dict[str, dict[str, str]]
"""By layer name: device, dtype and token counts -> the variant to use. Plain data."""

_SITUATION = re.compile(r"\w+ \w+ up to \d+ tokens(, forward)?")


def tune(
    model: nn.Module,
    tokens: int = 2048,
    *,
    repeats: int = 7,
    choices: Mapping[str, Mapping[str, str]] | None = None,
) -> Choices:
    """Time the variants of every EinsumLinear at a number of tokens and keep the fastest.

    Times forward alone, for calls without gradients, and forward with backward. A choice applies to
    the device and dtype of the weights and to token counts up to the next power of two; it is
    copied and pickled with the layer. The choices are also returned: save them with a state_dict
    and pass them as `choices` to set them without timing.
    """
    layers = {name: m for name, m in model.named_modules() if isinstance(m, EinsumLinear)}
    if not layers:
        raise EinlinearError(
            what=f"{type(model).__name__} has no EinsumLinear to tune",
            rule="tune times structured layers",
            fix="convert its layers first, for example el.convert_(model, el.btt())",
        )
    if choices is not None:
        for name, chosen in choices.items():
            is_known = name in layers and set(chosen.values()) <= set(ALL_VARIANTS)
            if not is_known or not all(map(_SITUATION.fullmatch, chosen)):
                raise EinlinearError(
                    what=f"there is a choice {quote(dict(chosen))} for the layer {quote(name)}",
                    rule="choices name layers of the model, situations like 'cpu float32 up to "
                    f"2048 tokens', and variants {', '.join(ALL_VARIANTS)}",
                    fix="pass what tune returned for such a model; its layers are "
                    f"{', '.join(map(repr, layers))}",
                )
        for name, chosen in choices.items():
            layers[name].choices = dict(chosen)
        return {name: dict(layer.choices) for name, layer in layers.items()}
    tokens = whole_number(tokens, "tokens", 1)
    repeats = whole_number(repeats, "repeats", 1)
    known: dict[tuple[object, ...], dict[bool, str]] = {}
    for layer in layers.values():
        weight = layer.factors()[0]
        if weight.is_meta:
            raise EinlinearError(
                what="the model is on the meta device",
                rule="tune times real multiplies",
                fix="materialise it first: model.to_empty(device=...), then load its weights",
            )
        kind = layer.weight_norm, layer.bias is not None
        key = (layer.plan, weight.dtype, weight.device, *kind)
        if key not in known:
            with torch.inference_mode(False), torch.enable_grad():
                passes = (True, False)  # with a backward pass, and without
                known[key] = {both: _fastest(layer, tokens, repeats, both) for both in passes}
        for has_backward, variant in known[key].items():
            layer.choices[situation(weight, tokens, has_backward)] = variant
    return {name: dict(layer.choices) for name, layer in layers.items()}


def _fastest(layer: EinsumLinear, tokens: int, repeats: int, has_backward: bool) -> str:
    """The fastest variant of a layer as it is called, with bias and normalisation."""
    factors = dict(zip(layer.factor_names, layer.factors(), strict=True))
    like = next(iter(factors.values()))
    x_td = like.detach().new_ones(tokens, layer.in_features).requires_grad_()
    grad_to = like.detach().new_ones(tokens, layer.out_features)

    def action(variant: str) -> Callable[[], object]:
        timed = EinsumLinear(
            layer.in_features,
            layer.out_features,
            layer.bias is not None,
            structure=layer.structure,
            weight_norm=layer.weight_norm,
            device="meta",
            dtype=like.dtype,
        ).to_empty(device=like.device)
        with torch.no_grad():
            for name, parameter in timed.named_parameters():
                parameter.copy_(factors.get(name, grad_to[0]))
        timed.choices = {situation(x_td, tokens, has_backward): variant}
        inputs = [x_td, *timed.parameters()]

        def forward() -> object:
            with torch.no_grad():
                return timed(x_td)

        def both() -> object:
            return torch.autograd.grad(timed(x_td), inputs, grad_to)

        return both if has_backward else forward

    variants = fitting_variants(x_td.device.type, x_td.dtype)
    times = interleaved({variant: action(variant) for variant in variants}, repeats)
    return min(variants, key=lambda variant: median(times[variant]))
