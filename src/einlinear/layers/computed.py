"""A read-only weight: it is computed when read, so a write would be lost and is an error."""

from __future__ import annotations

import sys
from abc import abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NoReturn

import torch
from torch import Tensor, nn

from einlinear.errors import EinlinearError
from einlinear.layers.projection.metric import Metric
from einlinear.layers.scaling import FactorInit
from einlinear.structures.structure import Structure, StructureSum

PLACEHOLDER_SHAPE = (1,)
"""The shape of a weight in files for Hugging Face, so that no plain layer takes it for its own."""

_WRITES = frozenset(
    "__setitem__ __iadd__ __isub__ __imul__ __itruediv__ __ifloordiv__ __imod__ "
    "__ipow__ __iand__ __ior__ __ixor__ __ilshift__ __irshift__".split()
)
_KEEP_VALUES = frozenset(("share_memory_", "detach_"))


def without_placeholder(state_dict: dict[str, Any], prefix: str) -> dict[str, Any]:
    """Return a state dict without the placeholder of a structured layer's weight."""
    name = f"{prefix}weight"
    found = state_dict.get(name)
    if not isinstance(found, Tensor) or found.dtype != torch.uint8:
        return state_dict
    is_ours = found.shape == PLACEHOLDER_SHAPE
    return {key: value for key, value in state_dict.items() if key != name or not is_ours}


class ComputedWeight(Tensor):
    """A read-only tensor; its views and its `data` are read-only too.

    Everything computed from it is a plain tensor that you can write to: results, copies, detached,
    moved, cast or saved tensors, and parameters. Arrays that share its memory, like the result of
    `numpy()`, are not protected.
    """

    _is_hf_initialized = True  # Hugging Face then initialises it no more when it loads a model

    @classmethod
    def __torch_function__(
        cls,
        func: Callable[..., Any],
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        """Apply the function as to a plain tensor, unless it would write."""
        kwargs = kwargs or {}
        if torch.compiler.is_compiling():  # dynamo cannot trace the rest
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **kwargs)
        own = args[0] if args else kwargs.get("tensor", kwargs.get("input"))
        is_for_parameter = sys._getframe(1).f_code is nn.Parameter.__new__.__code__
        if _has_computed(own) and not is_for_parameter and (action := _write(func)):
            _refuse(action)
        if _has_computed(kwargs.get("out")):
            _refuse(f"{_name(func)}(out=...)")
        with torch._C.DisableTorchFunctionSubclass():
            result = func(*args, **kwargs)
            if is_for_parameter:  # it expects detach() and requires_grad_() to keep the class
                return result if result is own else result.as_subclass(cls)
            if not isinstance(own, cls) or _name(func) in ("detach", "_base"):
                return result
            if type(result) in (tuple, list):
                return type(result)(_read_only_view(own, part) for part in result)
            return _read_only_view(own, result)

    @property
    def _is_param(self) -> bool:
        return False

    @_is_param.setter
    def _is_param(self, _: bool) -> None:
        """Become an ordinary parameter: nn.Parameter sets this last."""
        self.__class__ = nn.Parameter  # type: ignore[assignment]

    def __deepcopy__(self, memo: dict[int, Any]) -> Tensor:
        """A plain copy."""
        return self.detach().clone()

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Save the plain tensor."""
        plain: Any = self.as_subclass(Tensor)
        return plain.__reduce_ex__(protocol)


class ComputedLinear(nn.Module):
    """A layer whose weight is computed when it is read, for code that expects an nn.Linear."""

    in_features: int
    out_features: int
    weight_norm: bool
    factor_init: FactorInit
    bias: nn.Parameter | None

    @property
    @abstractmethod
    def structure(self) -> Structure | StructureSum:
        """The structure of the layer."""

    @abstractmethod
    def project_(self, weight: Tensor, metric: Metric | None = None) -> float:
        """Set the factors to those closest to a dense weight; return the error."""

    @abstractmethod
    def to_dense(self) -> Tensor:
        """The effective weight, (out_features, in_features), like nn.Linear.weight."""

    @property
    def weight(self) -> Tensor:
        """The effective weight, read-only, for code that expects an nn.Linear."""
        return read_only(self.to_dense())

    @weight.setter
    def weight(self, value: object) -> None:
        raise _not_replaced()

    def register_parameter(self, name: str, param: nn.Parameter | None) -> None:
        """Add a parameter; refuses `layer.weight = nn.Parameter(...)`, which also calls this."""
        if name == "weight":
            raise _not_replaced()
        super().register_parameter(name, param)

    def _load_from_state_dict(
        self, state_dict: dict[str, Any], prefix: str, *arguments: Any
    ) -> None:
        """Load a state, also from a file for Hugging Face."""
        state_dict = without_placeholder(state_dict, prefix)
        super()._load_from_state_dict(state_dict, prefix, *arguments)

    def extra_repr(self) -> str:
        """The arguments that print(layer) shows."""
        return (
            f"in_features={self.in_features}, out_features={self.out_features}, "
            f"bias={self.bias is not None}, structure={str(self.structure)!r}"
            + ("" if self.weight_norm else ", weight_norm=False")
            + ("" if self.factor_init == "spectral" else f", factor_init={self.factor_init!r}")
        )


def _not_replaced() -> EinlinearError:
    """The error for assigning to layer.weight."""
    return EinlinearError(
        what="the weight of a structured layer cannot be replaced",
        rule="it is computed from the factors whenever it is read",
        fix="to set a weight of your own, replace the layer with an nn.Linear; to change the "
        "factors, write to them, as in nn.init.zeros_(layer.B), or use layer.load_state_dict(...)",
    )


def read_only(tensor: Tensor) -> Tensor:
    """The tensor, read-only; unchanged while torch traces or transforms it."""
    is_plain = type(tensor) is Tensor and not torch.compiler.is_compiling()
    if not is_plain or torch._C._functorch.is_functorch_wrapped_tensor(tensor):
        return tensor
    modes = torch._ops._len_torch_dispatch_stack_pre_dispatch()  # type: ignore[no-untyped-call]
    if modes or torch._C._len_torch_dispatch_stack():
        return tensor
    return tensor.as_subclass(ComputedWeight)


def _name(func: Any) -> str:
    """The name of a function of torch, or of the attribute that it reads."""
    name: str = getattr(func, "__name__", str(func))
    return _attribute(func) if name == "__get__" else name


def _attribute(func: Any) -> str:
    return getattr(func.__self__, "__name__", "an attribute")  # a property has none


def _write(func: Any) -> str:
    """What a function does to its first argument if it writes (its name ends in one _), else ""."""
    name = _name(func)
    if name in ("__set__", "__delete__"):
        attribute = _attribute(func)
        return "" if attribute == "grad" else f"setting {attribute}"
    is_in_place = name.endswith("_") and not name.endswith("__") and name not in _KEEP_VALUES
    return name if is_in_place or name in _WRITES else ""


def _has_computed(value: Any) -> bool:
    values = value if isinstance(value, (list, tuple)) else (value,)
    return any(isinstance(each, ComputedWeight) for each in values)


def _read_only_view(own: Tensor, result: Any) -> Any:
    """The result, read-only if it is a view; plain if it is `own`, which `cpu()` may return."""
    if result is own:
        return own.as_subclass(Tensor)
    if type(result) is not Tensor or not torch._C._has_storage(result):
        return result
    is_view = own.untyped_storage()._cdata == result.untyped_storage()._cdata
    return result.as_subclass(ComputedWeight) if is_view else result


def _refuse(action: str) -> NoReturn:
    fix = (
        "write to the factors: nn.init.zeros_(layer.B) makes the output of two factors zero, "
        "layer.reset_parameters() initialises all; for a copy to write to, use layer.to_dense()"
    )
    if "requires_grad" in action:
        fix = (
            "layer.requires_grad_(False) freezes the layer, layer.B.requires_grad_(False) a factor"
        )
    raise EinlinearError(
        what=f"{action} would write to the weight of a structured layer",
        rule="that weight is read-only: it is computed from the factors whenever it is read",
        fix=fix,
    )
