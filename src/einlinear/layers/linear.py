"""EinsumLinear, a plan with weights, and SumLinear, a sum of them: drop-ins for nn.Linear."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, get_args, overload

import torch
from torch import Tensor, nn

from einlinear.errors import EinlinearError, quote, shorten
from einlinear.layers.computed import ComputedLinear
from einlinear.layers.dense import DenseWeight, can_be_dense, multiply_densely
from einlinear.layers.eager import multiply_eagerly
from einlinear.layers.engine import compiled
from einlinear.layers.export.cola import weight_operator
from einlinear.layers.machine import room_for
from einlinear.layers.norm import normalised
from einlinear.layers.projection.like import check_weight, layer_like
from einlinear.layers.projection.metric import Metric
from einlinear.layers.projection.moments import Moments
from einlinear.layers.projection.project import project, trainable_factors
from einlinear.layers.projection.summing import project_sum
from einlinear.layers.reference import dense_weight
from einlinear.layers.scaling import (
    FactorInit,
    Scaling,
    factor_scaling,
    term_scaling,
    vector_scaling,
)
from einlinear.layers.variants import (
    autocast_operand,
    check_input,
    choose_variant,
    fitting_variants,
    is_autocast,
    multiply,
    situation,
)
from einlinear.structures.plan import make_plan
from einlinear.structures.structure import Structure, StructureSum
from einlinear.structures.text import parse
from einlinear.structures.values import one_of

_MOST_VARIANTS = 4096  # numbers of tokens whose variant a layer remembers


class EinsumLinear(ComputedLinear):
    """A linear layer of any structure: a drop-in replacement for nn.Linear.

    The factors are parameters named A, B, C, ... with the axes of `plan.factor_edges`. With weight
    normalisation (the default), a factor M is used as M / max(1, rms(M) / std), where std is its
    standard deviation at initialisation: it may shrink but not grow, which keeps training stable.
    Ref: [P24 §4, Q24].

    Args:
        in_features: width of the input.
        out_features: width of the output.
        bias: whether to add a learnable bias.
        structure: a Structure, or text like "btt(rank=2)".
        weight_norm: whether to normalise the factors.
        factor_init: the standard deviation of fresh factors: "spectral", which is
            sqrt(min(fan_in, fan_out)) / fan_in, or "fan_in", which is 1 / sqrt(fan_in).
        device: the device of the parameters.
        dtype: the dtype of the parameters.
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = True,
        *,
        structure: Structure | str,
        weight_norm: bool = True,
        factor_init: FactorInit = "spectral",
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        given = parse(structure) if isinstance(structure, str) else structure
        if isinstance(given, StructureSum):
            raise _is_sum(given)
        self.plan = make_plan(given, in_features, out_features)
        self.in_features = self.plan.d_in
        self.out_features = self.plan.d_out
        self.weight_norm = weight_norm
        self.factor_init = one_of(factor_init, "factor_init", get_args(FactorInit))
        scaling = self._factor_scaling()
        self.choices: dict[str, str] = {}
        self._call: compiled.LayerCall | None = None
        self._dense: DenseWeight | None = None
        self._names = [step.factor for step in self.plan.steps]
        self._stds = [scaling[name].init_std for name in self._names]
        this = f"a layer of {self.structure} from {self.in_features} to {self.out_features}"
        with room_for(this, self.plan.params, "give a smaller rank or width"):
            for name, shape in self.plan.factor_shapes.items():
                empty = torch.empty(shape, device=device, dtype=dtype)
                self.register_parameter(name, nn.Parameter(empty))
            empty = torch.empty(self.out_features, device=device, dtype=dtype)
        # Also None is registered, so that nothing but a parameter can take its place.
        self.register_parameter("bias", nn.Parameter(empty) if bias else None)
        self.reset_parameters()

    @overload
    @classmethod
    def from_linear(
        cls,
        linear: nn.Linear,
        structure: Structure,
        *,
        calibration: Tensor | Moments | None = None,
    ) -> EinsumLinear: ...

    @overload
    @classmethod
    def from_linear(
        cls,
        linear: nn.Linear,
        structure: Structure | StructureSum | str,
        *,
        calibration: Tensor | Moments | None = None,
    ) -> EinsumLinear | SumLinear: ...

    @classmethod
    def from_linear(
        cls,
        linear: nn.Linear,
        structure: Structure | StructureSum | str,
        *,
        calibration: Tensor | Moments | None = None,
    ) -> EinsumLinear | SumLinear:
        """Return the structured layer that is closest to a dense one; the bias is copied.

        The layer has no weight normalisation, which would shrink the factors. For a sum of
        structures it is a SumLinear.

        Args:
            linear: the dense layer; it stays as it is.
            structure: a Structure, a sum, or text like "btt(rank=2)" or "low_rank(rank=8) + btt".
            calibration: inputs of the dense layer, a tensor of shape (..., in_features) or their
                Moments. With them, the outputs for such inputs are closest; without, the weights.
        """
        return _closest(cls, linear, structure, calibration)

    @torch.no_grad()
    def project_(self, weight: Tensor, metric: Metric | None = None) -> float:
        """Set the factors to those whose matrix is closest to a dense weight; return the error.

        Args:
            weight: the dense weight, laid out like nn.Linear.weight.
            metric: what errors count; the Frobenius norm if left out.

        Returns:
            The share of the squared norm of the weight that is lost, in this metric.
        """
        check_weight(self, weight)
        found = project(self.plan, weight, metric)
        self.set_factors_(found.factors)
        return found.error

    def set_factors_(self, factors: dict[str, Tensor]) -> None:
        """Set the factors to those of a projection; if all are zero, only the last."""
        for name, factor in trainable_factors(factors, self._names[-1]).items():
            getattr(self, name).data.copy_(factor)

    @property
    def structure(self) -> Structure:
        """The structure of the layer."""
        return self.plan.structure

    def _factor_scaling(self) -> dict[str, Scaling]:
        return factor_scaling(self.plan, self.factor_init)

    def param_scaling(self) -> dict[str, Scaling]:
        """The scaling of each parameter by name, for initialisation and learning rates."""
        scaling = self._factor_scaling()
        if self.bias is not None:
            scaling["bias"] = vector_scaling(self.out_features)
        return scaling

    def reset_parameters(self) -> None:
        """Initialise the factors randomly, by their fan-in and fan-out, and the bias to 0."""
        for name, scaling in self.param_scaling().items():
            parameter = getattr(self, name)
            if not parameter.is_meta:  # counting models would take several times as long
                nn.init.normal_(parameter, std=scaling.init_std)

    @property
    def factor_names(self) -> tuple[str, ...]:
        """The names of the factors, in the order of the plan's steps."""
        return tuple(self._names)

    def factors(self) -> list[Tensor]:
        """The factors as the layer uses them, normalised, in the order of the plan's steps."""
        weights = [getattr(self, name) for name in self._names]
        if not self.weight_norm:
            return weights
        return [normalised(w, std) for w, std in zip(weights, self._stds, strict=True)]

    def to_dense(self) -> Tensor:
        """The effective weight, (out_features, in_features), like nn.Linear.weight."""
        return dense_weight(self.plan, self.factors())

    def to_cola(self) -> Any:
        """The effective weight as a lazy LinearOperator of CoLA, (out_features, in_features).

        It multiplies by the layer's own product, with the factors that the layer has now, and
        gradients flow to them. Needs the package cola-ml.
        """
        factors = self.factors()

        def product(x_td: Tensor) -> Tensor:
            return multiply(self.plan, x_td, factors, self._variant(x_td, x_td.shape[0]))

        return weight_operator(product, (self.out_features, self.in_features), factors[0])

    def forward(self, x: Tensor) -> Tensor:
        """Apply the layer to the last axis of x."""
        if compiled.IS_AVAILABLE and not torch.compiler.is_compiling():
            if self._dense is not None and not torch.is_grad_enabled():
                y = self._dense.multiply(x, self._parameters, self.weight_norm, self.choices)
                if y is not None:
                    return y
            y = self._by_engine(x)
            if y is not None:
                return y
        factors: list[Tensor] = self.factors()
        bias: Tensor | None = self.bias
        if is_autocast(x):
            x, factors = autocast_operand(x), [autocast_operand(factor) for factor in factors]
            bias = bias if bias is None else autocast_operand(bias)
        check_input(x, factors[0], self.in_features)
        x_td = x.reshape(-1, self.in_features)
        y_to = multiply(self.plan, x_td, factors, self._variant(x_td, x_td.shape[0]), bias)
        return y_to.reshape(*x.shape[:-1], self.out_features).contiguous()

    def _by_engine(self, x: Tensor) -> Tensor | None:
        """The output by the engine, including normalisation; None if it cannot be used."""
        own: dict[str, Any] = self._parameters  # looking up a module's attributes is slower
        bias: Tensor | None = own["bias"] if "bias" in own else self.bias
        factors = [own[name] if name in own else getattr(self, name) for name in self._names]
        stds = self._stds if self.weight_norm else None
        call = self._call
        if call is None or not call.is_current(factors if bias is None else [*factors, bias], stds):
            self._call = self._dense = None
            if not compiled.LayerCall.fits(x, factors, bias):
                return None
            call = self._call = compiled.LayerCall(self.plan, factors, bias, stds)
        elif not compiled.is_direct(x, ()):
            return None
        if torch.is_autocast_enabled("cpu"):
            return None
        if x.dtype is not call.dtype or x.dim() == 0 or x.shape[-1] != call.d_in:
            check_input(x, factors[0], self.in_features)
            return None
        if call.choices != self.choices:
            call.choices, call.variants = dict(self.choices), ({}, {})
        has_grad = torch.is_grad_enabled()
        variants, num_tokens = call.variants[has_grad], x.numel() // call.d_in
        variant = variants.get(num_tokens)
        if variant is None:
            if len(variants) >= _MOST_VARIANTS:
                variants.clear()
            variant = variants[num_tokens] = self._variant(x, num_tokens)
        if variant == "engine":
            if not has_grad:
                return call.forward(x)
            if stds is not None and call.dtype is torch.bfloat16:
                return None  # the engine does not differentiate normalisation in bfloat16
            return multiply_eagerly(call, x, factors, bias)
        if variant != "dense" or not can_be_dense(self.plan, call.dtype):
            return None
        if has_grad:
            return multiply_densely(call, x, factors, bias)
        state = own, self.weight_norm, self.choices
        y = None if self._dense is None else self._dense.multiply(x, *state)
        if y is None:
            self._dense = DenseWeight(call, own, factors, bias, self.weight_norm)
            y = self._dense.multiply(x, *state)
        return y

    def _variant(self, x: Tensor, num_tokens: int) -> str:
        """The variant tuned for such an input, or the choice of the cost model."""
        # While compiling, nothing may depend on the number of tokens: it would become a guard.
        is_known = isinstance(num_tokens, int) and not torch.compiler.is_compiling()
        known = int(num_tokens) if is_known else 2048
        has_backward = torch.is_grad_enabled()
        if self.choices:
            tuned = self.choices.get(situation(x, known, has_backward), "")
            # The model may have been tuned where the engine was available.
            if tuned in fitting_variants(x.device.type, x.dtype):
                return tuned
        return choose_variant(self.plan, known, x.device.type, x.dtype, has_backward=has_backward)

    def __getstate__(self) -> dict[str, Any]:
        """The state to copy or pickle, without the prepared call, which holds addresses."""
        return {**self.__dict__, "_call": None, "_dense": None}


class SumTerm(EinsumLinear):
    """One term of a SumLinear: it starts smaller and learns more slowly than a layer of its own."""

    def __init__(self, *args: Any, num_terms: int, num_factors: int, **options: Any) -> None:
        self._num_terms, self._num_factors = num_terms, num_factors  # the first weights need them
        super().__init__(*args, **options)

    def _factor_scaling(self) -> dict[str, Scaling]:
        return term_scaling(self.plan, self.factor_init, self._num_terms, self._num_factors)


class SumLinear(ComputedLinear):
    """A linear layer whose matrix is a sum of structured ones: low_rank(rank=8) + btt.

        y = W1 x + W2 x + ... + bias

    `terms` are the structured layers, without bias; the factors are parameters named terms.0.A,
    terms.0.B, terms.1.A, ... With n terms, the last factor of each starts, and with weight
    normalisation is limited to, 1 / sqrt(n) of what it has in a layer of its own, so that outputs
    start as large as those of one layer.

    Args:
        in_features: width of the input.
        out_features: width of the output.
        bias: whether to add a learnable bias.
        structure: a sum of structures, or text like "low_rank(rank=8) + btt".
        weight_norm: whether to normalise the factors, as in EinsumLinear.
        factor_init: the standard deviation of fresh factors, as in EinsumLinear.
        device: the device of the parameters.
        dtype: the dtype of the parameters.
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = True,
        *,
        structure: StructureSum | str,
        weight_norm: bool = True,
        factor_init: FactorInit = "spectral",
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        self.plan = make_plan(_as_sum(structure), in_features, out_features)
        self.in_features = self.plan.d_in
        self.out_features = self.plan.d_out
        self.weight_norm = weight_norm
        self.factor_init = one_of(factor_init, "factor_init", get_args(FactorInit))
        terms = [
            SumTerm(
                self.in_features,
                self.out_features,
                False,
                structure=plan.structure,
                weight_norm=weight_norm,
                factor_init=factor_init,
                device=device,
                dtype=dtype,
                num_terms=len(self.plan.plans),
                num_factors=sum(len(each.steps) for each in self.plan.plans),
            )
            for plan in self.plan.plans
        ]
        self.terms = nn.ModuleList(terms)
        zeros = torch.zeros(self.out_features, device=device, dtype=dtype)
        # Also None is registered: a module without a table of parameters would be no layer.
        self.register_parameter("bias", nn.Parameter(zeros) if bias else None)

    @classmethod
    def from_linear(
        cls,
        linear: nn.Linear,
        structure: StructureSum | str,
        *,
        calibration: Tensor | Moments | None = None,
    ) -> SumLinear:
        """Return the sum that is close to a dense layer; as EinsumLinear.from_linear."""
        layer = _closest(cls, linear, _as_sum(structure), calibration)
        assert isinstance(layer, SumLinear), "a sum makes a SumLinear"
        return layer

    @torch.no_grad()
    def project_(self, weight: Tensor, metric: Metric | None = None) -> float:
        """Set all factors so that the sum is close to a dense weight; return the error.

        Terms are projected in turns, each onto what the others leave.

        Args:
            weight: the dense weight, laid out like nn.Linear.weight.
            metric: what errors count; the Frobenius norm if left out.

        Returns:
            The share of the squared norm of the weight that is lost, in this metric.
        """
        check_weight(self, weight)
        found = project_sum(self.plan.plans, weight, metric)
        for term, factors in zip(terms_of(self), found.factors, strict=True):
            term.set_factors_(factors)
        return found.error

    @property
    def structure(self) -> StructureSum:
        """The structures of all terms."""
        return self.plan.structure

    def param_scaling(self) -> dict[str, Scaling]:
        """The scaling of each parameter by name, of all terms too."""
        scaling = {
            f"terms.{i}.{name}": own
            for i, term in enumerate(terms_of(self))
            for name, own in term.param_scaling().items()
        }
        if self.bias is not None:
            scaling["bias"] = vector_scaling(self.out_features)
        return scaling

    def reset_parameters(self) -> None:
        """Initialise the factors of all terms randomly, and the bias to 0."""
        for term in terms_of(self):
            term.reset_parameters()
        if self.bias is not None and not self.bias.is_meta:
            nn.init.zeros_(self.bias)

    def to_dense(self) -> Tensor:
        """The effective weight, (out_features, in_features), like nn.Linear.weight."""
        first, *others = [term.to_dense() for term in terms_of(self)]
        return sum(others, first)

    def to_cola(self) -> Any:
        """The effective weight as a lazy LinearOperator of CoLA, as EinsumLinear.to_cola."""
        like = terms_of(self)[0].factors()[0]
        return weight_operator(self._summed, (self.out_features, self.in_features), like)

    def forward(self, x: Tensor) -> Tensor:
        """Apply the layer to the last axis of x."""
        y = self._summed(x)
        return y if self.bias is None else y + autocast_operand(self.bias)

    def _summed(self, x: Tensor) -> Tensor:
        y: Tensor = self.terms[0](x)
        for term in self.terms[1:]:
            y = y + term(x)
        return y


def terms_of(layer: EinsumLinear | SumLinear) -> tuple[EinsumLinear, ...]:
    """The layers whose matrices a layer adds up: its terms, or the layer itself."""
    if isinstance(layer, EinsumLinear):
        return (layer,)
    return tuple(term for term in layer.terms if isinstance(term, EinsumLinear))


def _closest(
    kind: type[EinsumLinear] | type[SumLinear],
    linear: nn.Linear,
    structure: Structure | StructureSum | str,
    calibration: Tensor | Moments | None,
) -> EinsumLinear | SumLinear:
    """The structured layer that is closest to a dense one; a SumLinear for a sum."""
    structure = parse(structure) if isinstance(structure, str) else structure
    is_other = isinstance(structure, StructureSum) and issubclass(kind, EinsumLinear)
    make: Callable[..., EinsumLinear | SumLinear] = SumLinear if is_other else kind
    return layer_like(linear, partial(make, structure=structure), calibration)


def _as_sum(structure: object) -> StructureSum:
    """A sum, given as itself or as text."""
    given = parse(structure) if isinstance(structure, str) else structure
    if isinstance(given, StructureSum):
        return given
    raise EinlinearError(
        what=f"a sum of structures is given as {quote(structure)}",
        rule="a SumLinear adds up the matrices of two or more structures",
        fix='write "low_rank(rank=8) + btt"; for a single structure, create an el.EinsumLinear',
    )


def _is_sum(structure: StructureSum) -> EinlinearError:
    """The error for an EinsumLinear of a sum."""
    return EinlinearError(
        what=f"the structure of an EinsumLinear is given as the sum {shorten(str(structure))}",
        rule="an EinsumLinear has a single structure; a SumLinear has a sum of them",
        fix="create an el.SumLinear with the same arguments",
    )
