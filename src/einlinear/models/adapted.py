"""AdaptedLinear: a linear layer with a structured update that is trained beside it."""

from __future__ import annotations

from copy import copy

import torch
from torch import Tensor, nn
from torch.nn.functional import linear

from einlinear.layers.linear import EinsumLinear, SumLinear, terms_of
from einlinear.layers.reference import dense_weight
from einlinear.layers.scaling import MatrixAxes, Scaling, matrix_scaling, vector_scaling


class AdaptedLinear(nn.Module):
    """A linear layer, usually frozen, plus a structured update, usually trained.

        y = W x + U x + bias        U: the matrix of `update`, zero at the start

    `weight` and `bias` are the parameters of the layer, under their old names, so the state dict
    of a plain model fits. `update` is an EinsumLinear or a SumLinear, without bias and without
    weight normalisation. el.adapt_ puts such layers into a model.

    Args:
        plain: the layer to adapt: an nn.Linear, or a layer with a transposed weight.
        update: the structured layer to add.
        is_transposed: whether the weight is (in, out), as in the Conv1D of Hugging Face.
    """

    weight: nn.Parameter
    bias: nn.Parameter | None

    def __init__(
        self, plain: nn.Module, update: EinsumLinear | SumLinear, *, is_transposed: bool = False
    ) -> None:
        super().__init__()
        self.in_features = update.in_features
        self.out_features = update.out_features
        self.is_transposed = is_transposed
        for name in ("weight", "bias"):
            self.register_parameter(name, getattr(plain, name, None))
        self.update = update
        self.training = plain.training
        # What the layer was, to be that again. In a tuple, so that it is not a submodule; without
        # parameters, so that it does not keep old ones alive.
        self._plain = (_filled(plain, dict.fromkeys(plain._parameters)),)

    def forward(self, x: Tensor) -> Tensor:
        """Apply the layer to the last axis of x."""
        weight_oi = self.weight.T if self.is_transposed else self.weight
        y = linear(x, weight_oi, self.bias)
        dtype = self.update_dtype
        is_mixed = dtype != self.weight.dtype  # only then: autocast decides on its own
        change: Tensor = self.update(x.to(dtype) if is_mixed else x)
        return y + change.to(y.dtype)

    @property
    def update_dtype(self) -> torch.dtype:
        """The dtype of the update, which may be wider than that of the layer."""
        return next(self.update.parameters()).dtype

    def to_dense(self) -> Tensor:
        """The effective weight, (out_features, in_features), in float32 or better."""
        weight_oi = self.weight.T if self.is_transposed else self.weight
        dtype = torch.promote_types(self.update_dtype, torch.float32)
        dtype = torch.promote_types(dtype, self.weight.dtype)
        weight_oi = weight_oi.to(dtype)
        for term in terms_of(self.update):
            factors = [factor.to(dtype) for factor in term.factors()]
            weight_oi = weight_oi + dense_weight(term.plan, factors)
        return weight_oi

    def merged(self) -> nn.Module:
        """A plain layer of the class that was adapted, with the update added to its weight."""
        with torch.no_grad():
            sum_oi = self.to_dense()
            weight = (sum_oi.T if self.is_transposed else sum_oi).to(self.weight.dtype)
        return self._as_plain(nn.Parameter(weight.contiguous(), self.weight.requires_grad))

    def without_update(self) -> nn.Module:
        """A plain layer of the class that was adapted, with the weight that it had."""
        return self._as_plain(self.weight)

    def _as_plain(self, weight: nn.Parameter) -> nn.Module:
        own: dict[str, nn.Parameter | None] = {"weight": weight, "bias": self.bias}
        names = self._plain[0]._parameters
        plain = _filled(self._plain[0], {name: own[name] for name in names})
        plain.training = self.training
        return plain

    def param_scaling(self) -> dict[str, Scaling]:
        """The scaling of the weight and bias of the layer itself."""
        axes = MatrixAxes((-2,), (-1,)) if self.is_transposed else MatrixAxes((-1,), (-2,))
        scaling = {"weight": matrix_scaling(self.in_features, self.out_features, axes)}
        return scaling | ({} if self.bias is None else {"bias": vector_scaling(self.out_features)})

    def extra_repr(self) -> str:
        """The arguments that print(layer) shows."""
        return (
            f"in_features={self.in_features}, out_features={self.out_features}, "
            f"bias={self.bias is not None}"
        )


def _filled(layer: nn.Module, parameters: dict[str, nn.Parameter | None]) -> nn.Module:
    """A copy of a layer without submodules, with these parameters."""
    new = copy(layer)
    new._parameters = parameters
    return new
