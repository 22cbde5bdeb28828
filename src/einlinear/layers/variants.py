"""The variants: ways to multiply by the matrix of a plan, what they take, and the choice.

Legend: t tokens, d inputs, o outputs.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn.functional import linear

from einlinear.errors import EinlinearError, quote
from einlinear.layers.cost import KNOWN_DEVICES, cheapest, cheapest_cached
from einlinear.layers.engine import compiled
from einlinear.layers.export.plain import is_exporting, multiply_plainly
from einlinear.layers.operators import multiply_by_operator
from einlinear.layers.reference import dense_weight, multiply_by_einsum
from einlinear.structures.plan import Plan

ALL_VARIANTS = ("einsum", "strided", "dense", "engine")
_PORTABLE = ALL_VARIANTS[:3]
VARIANTS = ALL_VARIANTS if compiled.IS_AVAILABLE else _PORTABLE
"""The variants available here; the engine only if it was compiled."""


def multiply(
    plan: Plan,
    x_td: Tensor,
    factors: Sequence[Tensor],
    variant: str,
    bias: Tensor | None = None,
) -> Tensor:
    """W x + b for rows of input, by one of the variants; factors in the order of the plan's steps.

    einsum:  one torch.einsum per step; the reference, and best where steps are plain matrices.
    strided: batched multiplies in place, blocked over tokens.
    dense:   the matrix W itself, built on each call, for widths too small for structure to pay.
    engine:  the compiled engine, on the CPU, in float32, float64 and bfloat16.

    While torch exports, any of them is traced as plain matrix multiplies and reshapes.
    """
    if is_exporting() and variant in ALL_VARIANTS:
        return multiply_plainly(plan, x_td, factors, bias)
    if variant == "einsum":
        return multiply_by_einsum(plan, x_td, factors, bias)
    if variant == "dense":
        return linear(x_td, dense_weight(plan, factors), bias)
    if variant in VARIANTS:
        return multiply_by_operator(plan, x_td, factors, bias, variant)
    raise EinlinearError(
        what=f"there is no variant {quote(variant)}",
        rule=f"a variant is one of {', '.join(VARIANTS)}",
        fix="name one of them, or let the layer choose; einlinear doctor tells whether the engine "
        "is available",
    )


def fitting_variants(device: str, dtype: torch.dtype) -> tuple[str, ...]:
    """The variants worth choosing from on a device and in a dtype."""
    has_engine = device == "cpu" and compiled.IS_AVAILABLE and dtype in compiled.DTYPES
    return ALL_VARIANTS if has_engine else _PORTABLE


def choose_variant(
    plan: Plan, num_tokens: int, device: str, dtype: torch.dtype, *, has_backward: bool = True
) -> str:
    """The variant that should be fastest on a CPU, by the cost model.

    The model knows no other device: there it is einsum, until `tune` has timed the variants.
    """
    if device not in KNOWN_DEVICES:
        return "einsum"
    variants = fitting_variants(device, dtype)
    choose = cheapest if torch.compiler.is_compiling() else cheapest_cached
    return choose(plan, num_tokens, variants, has_backward)


def situation(tensor: Tensor, num_tokens: int, has_backward: bool) -> str:
    """The name of calls that share a choice: device, dtype, tokens up to a power of two, passes."""
    dtype = str(tensor.dtype).removeprefix("torch.")
    tokens = 1 << max(0, num_tokens - 1).bit_length()
    passes = "" if has_backward else ", forward"
    return f"{tensor.device.type} {dtype} up to {tokens} tokens{passes}"


def check_input(x: Tensor, weight: Tensor, width: int, *, is_cast: bool = False) -> None:
    """Raise an error unless a layer can take x; `is_cast` if autocast will unify the dtypes."""
    fits = (x.dtype == weight.dtype or is_cast) and x.device == weight.device
    if not fits or x.shape[-1:] != (width,):
        raise EinlinearError(
            what=f"the input has shape {tuple(x.shape)} and dtype {x.dtype}, on {x.device}",
            rule=f"the layer takes {weight.dtype}, with a last axis of {width}, on {weight.device}",
            fix=f"reshape or project the input to (..., {width}); convert it with "
            f".to({weight.device.type!r}, {weight.dtype}), or the layer with layer.to(...)",
        )


def is_autocast(x: Tensor) -> bool:
    """Whether autocast is on for the device of a tensor."""
    device = x.device.type
    return torch.amp.is_autocast_available(device) and torch.is_autocast_enabled(device)


def is_castable(tensor: Tensor) -> bool:
    """Whether autocast casts such an operand of a linear layer: not float64 and integers."""
    return tensor.is_floating_point() and tensor.dtype != torch.float64


def autocast_operand(tensor: Tensor) -> Tensor:
    """An operand as autocast, if it is on, casts it for a linear layer."""
    if not is_autocast(tensor) or not is_castable(tensor):
        return tensor
    return tensor.to(torch.get_autocast_dtype(tensor.device.type))
