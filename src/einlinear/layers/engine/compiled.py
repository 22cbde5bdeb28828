"""The compiled variant: the engine on tensors."""

from __future__ import annotations

from collections.abc import Sequence
from weakref import ref

import torch
from torch import Tensor
from torch.autograd import forward_ad
from torch.nn import Parameter

from einlinear.errors import EinlinearError
from einlinear.layers.engine import binding
from einlinear.layers.engine.abi import CallArguments
from einlinear.layers.strided import contiguous, rows
from einlinear.structures.plan import Plan

IS_AVAILABLE = binding.is_available()

DTYPES = {torch.float32: "float32", torch.float64: "float64", torch.bfloat16: "bfloat16"}
"""The dtypes that the engine takes, with its names for them."""

_PLAIN = (Tensor, Parameter)

# These say whether a mode, a transform or tracing intercepts torch's operators. They are not public
# names of torch: if one is missing, all calls go through operators.
try:
    _num_modes = torch._C._len_torch_dispatch_stack
    _num_function_modes = torch._C._len_torch_function_stack
    _transform = torch._C._functorch.peek_interpreter_stack
    _tracing = torch._C._get_tracing_state
    _has_storage = torch._C._has_storage
    _CAN_BE_DIRECT = forward_ad._current_level < 0
    from torch.utils._device import DeviceContext
except (AttributeError, ImportError):  # pragma: no cover - renamed in another version of torch
    _CAN_BE_DIRECT = False


def is_direct(x: Tensor, tensors: Sequence[Tensor]) -> bool:
    """Whether the engine may read these tensors directly, without the overhead of an operator."""
    if not _CAN_BE_DIRECT or torch.compiler.is_compiling():
        return False
    dtype = x.dtype
    for tensor in (x, *tensors):
        is_plain = type(tensor) in _PLAIN and tensor.is_cpu and tensor.dtype == dtype
        if not is_plain or tensor.is_neg() or tensor.layout is not torch.strided:
            return False
        if not _has_storage(tensor):  # batched by is_grads_batched, which is not a transform
            return False
    return (
        dtype in DTYPES
        and _num_modes() == 0
        and (_num_function_modes() == 0 or _only_sets_the_device())
        and _transform() is None
        and _tracing() is None
        and forward_ad._current_level < 0
    )


def is_batched(tensor: Tensor) -> bool:
    """Whether the tensor is batched by autograd (is_grads_batched)."""
    if not _CAN_BE_DIRECT or torch.compiler.is_compiling():
        return False
    return bool(torch._C._functorch.is_legacy_batchedtensor(tensor))


def _only_sets_the_device() -> bool:
    """Whether the only modes are from torch.set_default_device, which affects only new tensors."""
    stack = torch.overrides._get_current_function_mode_stack()  # type: ignore[no-untyped-call]
    return all(isinstance(mode, DeviceContext) for mode in stack)


def is_usable(x: Tensor) -> bool:
    """Whether the engine can multiply these rows."""
    return IS_AVAILABLE and x.is_cpu and x.dtype in DTYPES


def address_of(tensor: Tensor, shape: tuple[int, ...], dtype: torch.dtype) -> int:
    """The address of a tensor, after checking what the engine cannot: shape, dtype and device."""
    address = tensor.data_ptr()
    is_right = tensor.shape == shape and tensor.dtype == dtype and tensor.is_cpu
    if not is_right or (address == 0 and tensor.numel()):
        raise EinlinearError(
            what=f"the engine was given {tuple(tensor.shape)}, {tensor.dtype}, on "
            f"{tensor.device}" + (", no memory" if is_right else ""),
            rule=f"here it takes {shape}, {dtype}, on the CPU",
            fix="give input, factors and bias one dtype and device, and the shapes of the plan",
        )
    return address


def factor_addresses(plan: Plan, factors: Sequence[Tensor], dtype: torch.dtype) -> list[int]:
    """The addresses of the factors of a plan, after checking shapes, dtype and device."""
    shapes = binding.factor_shapes(plan)
    return [address_of(f, shape, dtype) for f, shape in zip(factors, shapes, strict=True)]


class Inference:
    """A layer's call without gradients, prepared once for its parameters."""

    def __init__(
        self,
        plan: Plan,
        factors: Sequence[Tensor],
        bias: Tensor | None,
        stds: Sequence[float] | None,
    ):
        self.plan, self.stds = plan, stds
        self.dtype, self.width = factors[0].dtype, torch.Size((plan.d_in,))
        # Weak references: do not keep parameters that the layer has replaced.
        self._known = [ref(tensor) for tensor in (factors if bias is None else [*factors, bias])]
        self._shapes = [*binding.factor_shapes(plan), (plan.d_out,)]
        addresses = factor_addresses(plan, factors, self.dtype)
        bias_at = 0 if bias is None else address_of(bias, (plan.d_out,), self.dtype)
        self._addresses = [*addresses, bias_at]
        self._arguments = binding.make_arguments(plan, DTYPES[self.dtype], addresses)
        self._arguments.bias = bias_at
        self._arguments.y_row = plan.d_out
        if stds:
            binding.set_array(self._arguments, "stds", stds, len(addresses))
        # Filled in by the layer: the variant for each number of tokens, given its choices.
        self.variants: dict[int, str] = {}
        self.choices: dict[str, str] = {}

    @staticmethod
    def fits(x: Tensor, factors: Sequence[Tensor], bias: Tensor | None) -> bool:
        """Whether a call with these tensors can be prepared."""
        tensors = factors if bias is None else [*factors, bias]
        return is_direct(x, tensors) and all(tensor.is_contiguous() for tensor in tensors)

    def is_current(
        self, factors: Sequence[Tensor], bias: Tensor | None, stds: Sequence[float] | None
    ) -> bool:
        """Whether the parameters still have the same addresses, dtypes and shapes."""
        tensors = factors if bias is None else [*factors, bias]
        if stds is not self.stds or len(tensors) != len(self._known):
            return False
        for tensor, known, shape, address in zip(
            tensors, self._known, self._shapes, self._addresses, strict=False
        ):
            if (
                tensor is not known()
                or tensor.data_ptr() != address
                or tensor.dtype != self.dtype
                or tensor.shape != shape
                or not tensor.is_contiguous()
            ):
                return False
        return True

    def __call__(self, x_td: Tensor) -> Tensor:
        """W x + b for rows of input of the layer's dtype and width."""
        x_td = rows(x_td)
        y_te = x_td.new_empty(x_td.shape[0], self.plan.d_out)
        arguments = CallArguments.from_buffer_copy(self._arguments)  # calls may run in parallel
        arguments.tokens = x_td.shape[0]
        arguments.threads = torch.get_num_threads()
        arguments.x, arguments.x_row = x_td.data_ptr(), x_td.stride(0)
        arguments.y = y_te.data_ptr()
        binding.run_engine("forward", arguments)
        return y_te


def compiled_forward(
    plan: Plan,
    x_td: Tensor,
    factors: Sequence[Tensor],
    bias: Tensor | None,
    stds: Sequence[float] | None = None,
) -> tuple[Tensor, tuple[float, ...] | None]:
    """W x + b for rows of input; with stds, of normalised factors, and the scale of each."""
    x_td, factors, dtype = rows(x_td), contiguous(factors), x_td.dtype
    bias = bias if bias is None or bias.is_contiguous() else bias.contiguous()
    tokens = x_td.shape[0]
    y_te = x_td.new_empty(tokens, plan.d_out)
    scales = binding.call_forward(
        plan,
        DTYPES[dtype],
        tokens,
        address_of(x_td, (tokens, plan.d_in), dtype),
        x_td.stride(0),
        factor_addresses(plan, factors, dtype),
        0 if bias is None else address_of(bias, (plan.d_out,), dtype),
        y_te.data_ptr(),
        plan.d_out,
        stds=stds,
        threads=torch.get_num_threads(),
    )
    return y_te, scales


def compiled_backward(
    plan: Plan,
    x_td: Tensor | None,
    factors: Sequence[Tensor],
    grad_te: Tensor,
    wanted: Sequence[bool],
    norm: tuple[Sequence[float], Sequence[float]] | None = None,
) -> list[Tensor | None]:
    """The gradients of input, bias and factors; None for those not wanted.

    norm: the stds of the factors and the scales of the forward pass, if it normalised them.
    x_td: may be None if no gradient of a factor is wanted.
    """
    grad_te, factors, dtype = rows(grad_te), contiguous(factors), grad_te.dtype
    tokens = grad_te.shape[0]
    x_td = None if x_td is None else rows(x_td)
    shapes = [(tokens, plan.d_in), (plan.d_out,), *binding.factor_shapes(plan)]
    grads = [
        grad_te.new_empty(shape) if flag else None
        for shape, flag in zip(shapes, wanted, strict=True)
    ]
    grad_x, grad_bias, *grad_factors = (0 if grad is None else grad.data_ptr() for grad in grads)
    binding.call_backward(
        plan,
        DTYPES[dtype],
        tokens,
        0 if x_td is None else address_of(x_td, (tokens, plan.d_in), dtype),
        plan.d_in if x_td is None else x_td.stride(0),
        factor_addresses(plan, factors, dtype),
        address_of(grad_te, (tokens, plan.d_out), dtype),
        grad_te.stride(0),
        grad_x,
        plan.d_in,
        grad_factors,
        grad_bias,
        stds=None if norm is None else norm[0],
        scales=None if norm is None else norm[1],
        threads=torch.get_num_threads(),
    )
    return grads
