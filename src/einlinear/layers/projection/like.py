"""A structured layer like a dense one: its matrix is projected, all else is copied."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

import torch
from torch import Tensor, nn

from einlinear.errors import EinlinearError
from einlinear.layers.computed import ComputedLinear
from einlinear.layers.projection.metric import Metric
from einlinear.layers.projection.moments import Moments

_Layer = TypeVar("_Layer", bound=ComputedLinear)


def layer_like(
    linear: nn.Linear, make: Callable[..., _Layer], calibration: Tensor | Moments | None
) -> _Layer:
    """The layer closest to a dense one; `make` takes what nn.Linear takes, and weight_norm."""
    if not isinstance(linear, nn.Linear):
        raise EinlinearError(
            what=f"the layer to start from is {type(linear).__name__}",
            rule="from_linear takes an nn.Linear",
            fix='for whole models, use el.convert_(model, rules, init="project")',
        )
    weight = linear.weight
    with torch.random.fork_rng(devices=[]):  # fresh weights that are not kept
        layer = make(
            linear.in_features,
            linear.out_features,
            linear.bias is not None,
            weight_norm=False,
            device=weight.device,
            dtype=weight.dtype,
        )
    layer.project_(weight, Metric(_input_moments(calibration, linear)))
    layer.requires_grad_(weight.requires_grad)
    if layer.bias is not None:
        layer.bias.data.copy_(linear.bias.data)
        layer.bias.requires_grad_(linear.bias.requires_grad)
    return layer.train(linear.training)


def check_weight(layer: ComputedLinear, weight: Tensor) -> None:
    """Raise an error unless a weight can be projected onto the factors of a layer."""
    shape = (layer.out_features, layer.in_features)
    if tuple(weight.shape) != shape or not bool(weight.isfinite().all()):
        problem = "has numbers that are infinite or not a number"
        if tuple(weight.shape) != shape:
            problem = f"has the shape {tuple(weight.shape)}"
        raise EinlinearError(
            what=f"the weight to project {problem}",
            rule=f"it is finite, of shape {shape}, like nn.Linear.weight",
            fix="transpose it if it is laid out the other way round; repair what is not finite",
        )
    if layer.weight_norm:
        raise EinlinearError(
            what="the layer has weight normalisation",
            rule="a projected weight needs factors of any size; normalisation shrinks them",
            fix="create the layer with weight_norm=False",
        )


def _input_moments(calibration: object, linear: nn.Linear) -> Tensor | None:
    """The second moments of calibration inputs, whatever form they have."""
    if calibration is None:
        return None
    if isinstance(calibration, Tensor):
        seen = Moments(linear.in_features, linear.weight.device)
        seen.add(calibration)
    else:
        seen = calibration if isinstance(calibration, Moments) else Moments(0)
    if not seen.count or seen.width != linear.in_features:
        raise EinlinearError(
            what=f"the calibration is {type(calibration).__name__}, with {seen.count} vectors of "
            f"{seen.width} numbers",
            rule="it is a tensor of inputs of the layer, or their Moments, with at least one input",
            fix=f"give a tensor of shape (..., {linear.in_features}); join several with torch.cat",
        )
    return seen.mean
