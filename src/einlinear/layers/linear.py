"""EinsumLinear: a plan with weights, in the place of nn.Linear."""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor, nn

from einlinear.errors import EinlinearError
from einlinear.layers import compiled
from einlinear.layers.computed import read_only
from einlinear.layers.execute import choose_variant, dense_weight, fitting_variants, multiply
from einlinear.layers.norm import multiply_direct, normalised
from einlinear.layers.room import room_for
from einlinear.layers.scaling import Scaling, factor_scaling, vector_scaling
from einlinear.structures.plan import Plan, make_plan
from einlinear.structures.structure import Structure
from einlinear.structures.text import parse

_MOST_VARIANTS = 4096  # numbers of tokens whose variant a layer remembers


class EinsumLinear(nn.Module):
    """A linear layer of any structure: drop-in for nn.Linear.

    The factors are parameters named A, B, C, ... with the axes of `plan.factor_edges`. With weight
    normalisation (on unless turned off) a factor M is used as M / max(1, rms(M) / std), std being
    its deviation at the start: it may shrink but not grow, which keeps training stable. Ref: [P24
    §4, Q24].

    Args:
        in_features: width of the input.
        out_features: width of the output.
        bias: whether a bias is added.
        structure: a Structure, or its text such as "btt(rank=2)".
        weight_norm: whether factors are normalised.
        device: where the parameters are.
        dtype: of the parameters.
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = True,
        *,
        structure: Structure | str,
        weight_norm: bool = True,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        structure = parse(structure) if isinstance(structure, str) else structure
        self.plan = make_plan(structure, in_features, out_features)
        self.in_features = self.plan.d_in
        self.out_features = self.plan.d_out
        self.weight_norm = weight_norm
        scaling = factor_scaling(self.plan)
        self.choices: dict[str, str] = {}
        self._call: compiled.Inference | None = None
        self._names = [step.factor for step in self.plan.steps]
        self._stds = [scaling[name].init_std for name in self._names]
        with _room(self.plan):
            for name, shape in self.plan.factor_shapes.items():
                empty = torch.empty(shape, device=device, dtype=dtype)
                self.register_parameter(name, nn.Parameter(empty))
            empty = torch.empty(self.out_features, device=device, dtype=dtype)
        self.bias = nn.Parameter(empty) if bias else None
        self.reset_parameters()

    @property
    def structure(self) -> Structure:
        """The structure of the layer."""
        return self.plan.structure

    @property
    def weight(self) -> Tensor:
        """to_dense(), read-only, for code that reads the weight of an nn.Linear."""
        return read_only(self.to_dense())

    @weight.setter
    def weight(self, value: object) -> None:
        raise _not_replaced()

    def register_parameter(self, name: str, param: nn.Parameter | None) -> None:
        """Add a parameter; `layer.weight = nn.Parameter(...)`, which ends here, is an error."""
        if name == "weight":
            raise _not_replaced()
        super().register_parameter(name, param)

    def param_scaling(self) -> dict[str, Scaling]:
        """What initialisation and learning rates need to know of each parameter, by its name."""
        scaling = factor_scaling(self.plan)
        if self.bias is not None:
            scaling["bias"] = vector_scaling(self.out_features)
        return scaling

    def reset_parameters(self) -> None:
        """Draw the factors anew, with the deviation of their fan-in and fan-out; bias 0."""
        for name, scaling in self.param_scaling().items():
            nn.init.normal_(getattr(self, name), std=scaling.init_std)

    def factors(self) -> list[Tensor]:
        """The factors as they are multiplied, normalised, in the order of the plan's steps."""
        weights = [getattr(self, name) for name in self._names]
        if not self.weight_norm:
            return weights
        return [normalised(w, std) for w, std in zip(weights, self._stds, strict=True)]

    def to_dense(self) -> Tensor:
        """The effective weight, (out_features, in_features), laid out as nn.Linear.weight."""
        return dense_weight(self.plan, self.factors())

    def forward(self, x: Tensor) -> Tensor:
        """The layer applied to the last axis of x."""
        if compiled.IS_AVAILABLE and not torch.compiler.is_compiling():
            y = self._by_engine(x)
            if y is not None:
                return y
        factors: list[Tensor] = self.factors()
        bias: Tensor | None = self.bias
        device = x.device.type
        if torch.amp.is_autocast_available(device) and torch.is_autocast_enabled(device):
            dtype = torch.get_autocast_dtype(device)
            x, factors = _cast(x, dtype), [_cast(factor, dtype) for factor in factors]
            bias = bias if bias is None else _cast(bias, dtype)
        self._check(x, factors[0])
        x_td = x.reshape(-1, self.in_features)
        y_te = multiply(self.plan, x_td, factors, self._variant(x_td), bias)
        return y_te.reshape(*x.shape[:-1], self.out_features).contiguous()

    def _by_engine(self, x: Tensor) -> Tensor | None:
        """The output by the engine, normalisation folded in; None where that cannot be."""
        own: dict[str, Any] = self._parameters  # attributes of a module take longer to find
        bias: Tensor | None = own["bias"] if "bias" in own else self.bias
        factors = [own[name] if name in own else getattr(self, name) for name in self._names]
        if torch.is_grad_enabled():
            return self._train_by_engine(x, factors, bias)
        stds = self._stds if self.weight_norm else None
        call = self._call
        if call is None or not call.is_current(factors, bias, stds):
            self._call = None
            if not compiled.Inference.fits(x, factors, bias):
                return None
            call = self._call = compiled.Inference(self.plan, factors, bias, stds)
        if not compiled.is_direct(x, ()) or torch.is_autocast_enabled("cpu"):
            return None
        if x.dtype != call.dtype or x.shape[-1:] != call.width:
            self._check(x, factors[0])
            return None
        x_td = x if x.dim() == 2 else x.reshape(-1, self.in_features)
        if call.choices != self.choices or len(call.variants) > _MOST_VARIANTS:
            call.choices, call.variants = dict(self.choices), {}
        num_tokens = x_td.shape[0]
        variant = call.variants.get(num_tokens)
        if variant is None:
            variant = call.variants[num_tokens] = self._variant(x_td)
        if variant != "engine":
            return None
        y_te = call(x_td)
        return y_te if x.dim() == 2 else y_te.reshape(*x.shape[:-1], self.out_features)

    def _train_by_engine(
        self, x: Tensor, factors: list[Tensor], bias: Tensor | None
    ) -> Tensor | None:
        tensors = factors if bias is None else [*factors, bias]
        if self.weight_norm and x.dtype == torch.bfloat16:
            return None
        if not compiled.is_direct(x, tensors) or torch.is_autocast_enabled("cpu"):
            return None
        self._check(x, factors[0])
        x_td = x if x.dim() == 2 else x.reshape(-1, self.in_features)
        if self._variant(x_td) != "engine":
            return None
        stds = self._stds if self.weight_norm else None
        y_te = multiply_direct(self.plan, x_td, factors, bias, stds)
        return y_te if x.dim() == 2 else y_te.reshape(*x.shape[:-1], self.out_features)

    def _variant(self, x_td: Tensor) -> str:
        """What was tuned for such an input, or what the model of costs says."""
        # While compiling nothing may depend on the number of tokens: it would become a guard.
        num_tokens = x_td.shape[0]
        is_known = isinstance(num_tokens, int) and not torch.compiler.is_compiling()
        known = int(num_tokens) if is_known else 2048
        has_backward = torch.is_grad_enabled()
        if self.choices:
            tuned = self.choices.get(situation(x_td, known, has_backward), "")
            # A model may come from where there was an engine.
            if tuned in fitting_variants(x_td.device.type, x_td.dtype):
                return tuned
        return choose_variant(
            self.plan, known, x_td.device.type, x_td.dtype, has_backward=has_backward
        )

    def _check(self, x: Tensor, weight: Tensor) -> None:
        fits = x.dtype == weight.dtype and x.device == weight.device
        if not fits or x.shape[-1:] != (self.in_features,):
            raise EinlinearError(
                what=f"the input has shape {tuple(x.shape)} and dtype {x.dtype}, on {x.device}",
                rule=f"the layer takes {weight.dtype}, with a last axis of {self.in_features}, "
                f"on {weight.device}",
                fix=f"reshape or project the input to (..., {self.in_features}); convert it with "
                f".to({weight.device.type!r}, {weight.dtype}), or the layer with layer.to(...)",
            )

    def __getstate__(self) -> dict[str, Any]:
        """What is copied and saved: not the prepared call, which knows addresses."""
        return {**self.__dict__, "_call": None}

    def extra_repr(self) -> str:
        """What print(layer) shows."""
        return (
            f"in_features={self.in_features}, out_features={self.out_features}, "
            f"bias={self.bias is not None}, structure={str(self.structure)!r}"
            + ("" if self.weight_norm else ", weight_norm=False")
        )


def situation(tensor: Tensor, num_tokens: int, has_backward: bool) -> str:
    """Calls that are tuned together: device, dtype, tokens up to a power of two, passes."""
    dtype = str(tensor.dtype).removeprefix("torch.")
    tokens = 1 << max(0, num_tokens - 1).bit_length()
    passes = "" if has_backward else ", forward"
    return f"{tensor.device.type} {dtype} up to {tokens} tokens{passes}"


def _cast(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    """What autocast does to an operand of a linear layer: nothing to float64 and integers."""
    is_cast = tensor.is_floating_point() and tensor.dtype != torch.float64
    return tensor.to(dtype) if is_cast else tensor


def _room(plan: Plan) -> AbstractContextManager[None]:
    name = f"a layer of {plan.structure} from {plan.d_in} to {plan.d_out}"
    return room_for(name, plan.params, "give a smaller rank or width")


def _not_replaced() -> EinlinearError:
    """What to raise where layer.weight is given another value."""
    return EinlinearError(
        what="the weight of a structured layer cannot be replaced",
        rule="it is computed from the factors whenever it is read",
        fix="for a weight of your own replace the layer by an nn.Linear; to change the factors, "
        "write to them, as nn.init.zeros_(layer.B) does, or use layer.load_state_dict(...)",
    )
