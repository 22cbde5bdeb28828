"""upcycle_: mixtures of experts that start from the dense weights of a trained model."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace
from math import isfinite
from typing import Any, get_args

import torch
from torch import nn

from einlinear.errors import EinlinearError, quote
from einlinear.layers.moe.layers import MoELinear
from einlinear.models.convert.apply import check_projectable, project_swaps_
from einlinear.models.convert.calibration import LossOf, Weighting, measure_moments
from einlinear.models.convert.conversion import Conversion
from einlinear.models.convert.convert import (
    LayerFilter,
    check_loss,
    check_progress,
    plan_conversion,
)
from einlinear.models.convert.names import layer_list
from einlinear.models.convert.rules import Rules
from einlinear.models.saving.pretrained import mark_pretrained_
from einlinear.show.progress import show_nothing
from einlinear.structures.values import one_of

_GATE_STD = 0.02  # as in sparse upcycling and most transformers


def upcycle_(
    model: nn.Module,
    rules: Rules,
    *,
    where: LayerFilter | None = None,
    calibration: Iterable[Any] | None = None,
    weighting: Weighting = "both",
    loss: LossOf | None = None,
    gate_std: float = _GATE_STD,
    noise: float = 0.0,
    on_progress: Callable[[str], None] = show_nothing,
) -> Conversion:
    """Replace linear layers by mixtures whose experts start from the dense weight; return a report.

    Every expert starts as the structured matrix closest to the old weight. The weights of the
    active experts add up to 1, so a mixture first computes what that one matrix does: with dense
    experts, exactly what the old layer did. The gates are random, so that experts see different
    tokens and diverge when they are trained. The layers have no weight normalisation, which would
    shrink projected factors; so `expert_norm` has no effect.

    Args:
        model: any module that contains linear layers, as for convert_.
        rules: el.moe(...), or {pattern: el.moe(...)}, with None to leave layers alone.
        where: a further condition on the layer and its name.
        calibration: batches of typical inputs, as for convert_(init="project").
        weighting: what calibration looks at, as for convert_.
        loss: the loss that matters, as for convert_.
        gate_std: the standard deviation of the weights of the gates. With 0, a gate is zero, and a
            hash of each token chooses its experts until the gate is trained.
        noise: noise in every factor of every expert, as a share of its root mean square; the
            output at the start then changes a little.
        on_progress: called with a short text for each batch and each layer, as for convert_.
    """
    for name, value in (("gate_std", gate_std), ("noise", noise)):
        is_number = isinstance(value, int | float) and not isinstance(value, bool)
        if not is_number or not isfinite(value) or value < 0:
            raise EinlinearError(
                what=f"{name} is {quote(value)}",
                rule=f"{name} is a finite number of 0 or more",
                fix=f"leave out {name}, or give a small number, such as 0.01",
            )
    one_of(weighting, "weighting", get_args(Weighting))
    check_progress(on_progress)
    check_loss(loss, weighting, calibration)
    conversion = plan_conversion(model, rules, where=where)
    single = [swap.names for swap in conversion.swaps if not swap.num_experts]
    if single:
        raise EinlinearError(
            what=f"rules without experts: {layer_list(single, 5)}",
            rule="upcycle_ makes mixtures of experts",
            fix='give el.moe("dense", num_experts=8); for structures alone, use '
            'el.convert_(model, rules, init="project")',
        )
    check_projectable(model, conversion)
    moments = None
    if calibration is not None:
        widths = {swap.names: (swap.d_in, swap.d_out) for swap in conversion.swaps}
        moments = measure_moments(
            model, widths, calibration, weighting=weighting, loss=loss, on_progress=on_progress
        )
    conversion = project_swaps_(model, conversion, moments, on_progress=on_progress)
    for swap in conversion.swaps:
        layer = model.get_submodule(swap.name)
        assert isinstance(layer, MoELinear), "all rules have experts"
        _start_(layer, gate_std, noise)
    mark_pretrained_(model)
    remark = f"experts: all start alike{', up to noise' * (noise > 0)}; gates: " + (
        f"random, with standard deviation {gate_std:g}" if gate_std else "zero"
    )
    return replace(conversion, remarks=(*conversion.remarks, remark))


@torch.no_grad()
def _start_(layer: MoELinear, gate_std: float, noise: float) -> None:
    """Draw the gate, and add noise to the factors of every expert."""
    layer.gate.weight.normal_(std=gate_std)
    if noise:
        for name in layer.expert_names:
            factor = layer.get_parameter(name)
            factor.add_(
                torch.randn_like(factor), alpha=noise * float(factor.square().mean().sqrt())
            )
