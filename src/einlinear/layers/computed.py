"""A weight that is computed when it is read, so that writing to it is an error, not a no-op."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from einlinear.errors import EinlinearError

_WRITES = frozenset(
    "__setitem__ __set__ __delete__ __iadd__ __isub__ __imul__ __itruediv__ __ifloordiv__ __imod__ "
    "__ipow__ __iand__ __ior__ __ixor__ __ilshift__ __irshift__".split()
)


class ComputedWeight(Tensor):
    """A tensor that can be read but not written; its views cannot be written, either.

    Whatever is computed from it is a plain tensor.
    """

    @classmethod
    def __torch_function__(
        cls,
        func: Callable[..., Any],
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        """The function applied as to a plain tensor, unless it would write."""
        kwargs = kwargs or {}
        own = args[0] if args else kwargs.get("tensor", kwargs.get("input"))
        if isinstance(own, cls) and _is_write(func):
            _refuse(getattr(func, "__name__", str(func)))
        if isinstance(kwargs.get("out"), cls):
            _refuse(f"{getattr(func, '__name__', func)}(out=...)")
        with torch._C.DisableTorchFunctionSubclass():
            result = func(*args, **kwargs)
        is_view = isinstance(own, cls) and type(result) is Tensor and _share(own, result)
        return result.as_subclass(cls) if is_view else result

    def __reduce_ex__(self, protocol: Any) -> Any:
        """What is saved and copied is the plain tensor."""
        plain: Any = self.as_subclass(Tensor)
        return plain.__reduce_ex__(protocol)


def read_only(tensor: Tensor) -> Tensor:
    """The tensor with writes refused; as it is where torch traces or transforms it."""
    is_plain = type(tensor) is Tensor and not torch.compiler.is_compiling()
    if not is_plain or torch._C._functorch.is_functorch_wrapped_tensor(tensor):
        return tensor
    return tensor.as_subclass(ComputedWeight)


def _is_write(func: Callable[..., Any]) -> bool:
    """Whether a function changes its first argument: torch's names for these end in one _."""
    name = getattr(func, "__name__", "")
    return name in _WRITES or (name.endswith("_") and not name.endswith("__"))


def _share(tensor: Tensor, other: Tensor) -> bool:
    with torch._C.DisableTorchFunctionSubclass():
        return bool(tensor.untyped_storage()._cdata == other.untyped_storage()._cdata)


def _refuse(action: str) -> None:
    raise EinlinearError(
        what=f"{action} would write to the weight of a structured layer",
        rule="that weight is computed from the factors whenever it is read, so writing to it would "
        "change nothing",
        fix="write to the factors: nn.init.zeros_(layer.B) makes the output of two factors zero, "
        "layer.reset_parameters() draws all anew; for a copy of your own take layer.to_dense()",
    )
