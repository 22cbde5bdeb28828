"""The compiled variant: the engine on tensors."""

from __future__ import annotations

from array import array
from collections.abc import Callable, Sequence
from operator import attrgetter
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

# Names for what every call uses: a look into a module takes longer where caches are cold.
_copied = CallArguments.from_buffer_copy
_empty_like, _num_threads = torch.empty_like, torch.get_num_threads

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
    if dtype not in DTYPES or not _is_plain(x, dtype):
        return False
    for tensor in tensors:
        if not _is_plain(tensor, dtype):
            return False
    return _is_undisturbed()


def _is_plain(tensor: Tensor, dtype: torch.dtype) -> bool:
    """Whether the numbers of a tensor are in memory as they are.

    Without storage are sparse ones, and those that is_grads_batched batches without a transform.
    """
    return (
        type(tensor) in _PLAIN
        and tensor.is_cpu
        and tensor.dtype is dtype
        and not tensor.is_neg()
        and _has_storage(tensor)
    )


def is_recorded() -> bool:
    """Whether a mode of dispatch or tracing records torch's operators."""
    return not _CAN_BE_DIRECT or _num_modes() != 0 or _tracing() is not None


def _is_undisturbed() -> bool:
    """Whether no mode, transform or tracing wants to see what is computed."""
    return (
        _num_modes() == 0
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


def apply_directly(function: type[torch.autograd.Function]) -> Callable[..., Tensor]:
    """What `function.apply` calls in the end, for tensors that `is_direct` accepts.

    The rest of it is for transforms, which do not see these tensors, and takes a microsecond.
    """
    try:
        made: Callable[..., Tensor] = torch._C._FunctionBase.__dict__["apply"].__get__(
            None, function
        )
    except (AttributeError, KeyError):  # pragma: no cover - renamed in another version of torch
        made = function.apply
    return made


class LayerCall:
    """The calls of a layer, forward and backward, prepared once for its parameters.

    A small layer takes less time than one look at everything that could be wrong with its
    parameters, so calls check only what can change: `is_current`.
    """

    def __init__(
        self,
        plan: Plan,
        factors: Sequence[Tensor],
        bias: Tensor | None,
        stds: Sequence[float] | None,
    ):
        self.plan, self.stds = plan, stds
        self.dtype, self.d_in, self.d_out = factors[0].dtype, plan.d_in, plan.d_out
        addresses = factor_addresses(plan, factors, self.dtype)
        bias_at = 0 if bias is None else address_of(bias, (plan.d_out,), self.dtype)
        self.factors = _Known(factors)
        self._all = self.factors if bias is None else _Known([*factors, bias])
        self._arguments = binding.make_arguments(plan, DTYPES[self.dtype], addresses)
        self._arguments.bias = bias_at
        self._arguments.y_row, self._arguments.grad_x_row = plan.d_out, plan.d_in
        if stds:
            binding.set_array(self._arguments, "stds", stds, len(addresses))
        # Filled in by the layer: the variant for each number of tokens, without and with gradients.
        self.variants: tuple[dict[int, str], dict[int, str]] = {}, {}
        self.choices: dict[str, str] = {}

    @staticmethod
    def fits(x: Tensor, factors: Sequence[Tensor], bias: Tensor | None) -> bool:
        """Whether a call with these tensors can be prepared."""
        tensors = factors if bias is None else [*factors, bias]
        return is_direct(x, tensors) and all(tensor.is_contiguous() for tensor in tensors)

    def is_current(self, tensors: Sequence[Tensor], stds: Sequence[float] | None) -> bool:
        """Whether these are still the factors, and the bias, and the settings."""
        return stds is self.stds and self._all.are(tensors)

    def has_factors(self, factors: Sequence[Tensor]) -> bool:
        """Whether these are the factors that the call was prepared for, at the same addresses."""
        return self.factors.are(factors)

    def comparison(self) -> Callable[[], int]:
        """A function: are the factors, while they stay in place, bit for bit what they are now?"""
        return binding.factor_comparison(
            self._arguments, self.factors.addresses, self.factors.sizes
        )

    def forward(self, x: Tensor, scales: int = 0, *, has_bias: bool = True) -> Tensor:
        """W x + b for the last axis of x; scales are written to an address.

        The width of x must be that of the layer. No view of x is made if it is contiguous.
        """
        rows_td, tokens, address, row = _rows_of(x, self.d_in, self.dtype)
        sizes = (tokens,) if x.dim() == 2 else x.shape[:-1]
        y = rows_td.new_empty(*sizes, self.d_out)
        arguments = _copied(self._arguments)  # calls may run in parallel
        arguments.tokens = tokens
        arguments.threads = _num_threads()
        arguments.x, arguments.x_row = address, row
        arguments.y = y.data_ptr()
        arguments.scales = scales
        if not has_bias:
            arguments.bias = 0
        binding.run_engine("forward", arguments)
        return y

    def backward(
        self,
        x: Tensor | None,
        factors: Sequence[Tensor],
        grad_y: Tensor,
        wanted: Sequence[bool],
        scales: array[float] | None = None,
    ) -> list[Tensor | None]:
        """The gradients of input, bias and factors; None for those not wanted.

        x: may be None if no gradient of a factor is wanted.
        scales: those of the forward pass, if it normalised the factors.
        """
        arguments = _copied(self._arguments)
        rows_to, tokens, arguments.grad_y, arguments.grad_y_row = _rows_of(
            grad_y, self.d_out, self.dtype
        )
        arguments.tokens = tokens
        arguments.threads = _num_threads()
        if x is not None:
            x, _, arguments.x, arguments.x_row = _rows_of(x, self.d_in, self.dtype)
        if scales is None:
            arguments.stds = 0
        else:
            arguments.scales = scales.buffer_info()[0]
        grad_x = grad_bias = None
        if wanted[0]:
            sizes = (tokens,) if grad_y.dim() == 2 else grad_y.shape[:-1]
            grad_x = rows_to.new_empty(*sizes, self.d_in)
            arguments.grad_x = grad_x.data_ptr()
        if wanted[1]:
            grad_bias = rows_to.new_empty(self.d_out)
            arguments.grad_bias = grad_bias.data_ptr()
        grads: list[Tensor | None] = [grad_x, grad_bias]
        addresses = []
        for factor, flag in zip(factors, wanted[2:], strict=True):
            grad = _empty_like(factor) if flag else None
            addresses.append(0 if grad is None else grad.data_ptr())
            grads.append(grad)
        grads_at = array("Q", addresses)
        arguments.grad_factors = grads_at.buffer_info()[0]
        binding.run_engine("backward", arguments)
        del rows_to  # a copy, if rows were not contiguous: it had to live until here
        return grads


def _rows_of(tensor: Tensor, width: int, dtype: torch.dtype) -> tuple[Tensor, int, int, int]:
    """A tensor as rows, their number, the address and the distance between two.

    It is copied, or viewed with two axes, only if it is not contiguous.
    """
    row = width
    if not tensor.is_contiguous():
        tensor = rows(tensor.reshape(-1, width))
        row = tensor.stride(0)
    address, count = tensor.data_ptr(), tensor.numel()
    if (address == 0 and count) or tensor.dtype is not dtype or count % width:
        address_of(tensor, (count // width, width), dtype)  # raises
    return tensor, count // width, address, row


class _Known:
    """Tensors to recognise, and what must not have changed: the allocator reuses addresses."""

    def __init__(self, tensors: Sequence[Tensor]):
        self.addresses = [*map(ADDRESS, tensors)]
        self.sizes = [*map(BYTES, tensors)]
        # Weak references: do not keep parameters that the layer has replaced.
        refs, dtypes = map(ref, tensors), [tensor.dtype for tensor in tensors]
        self._facts = [*zip(refs, self.addresses, self.sizes, dtypes, strict=True)]

    def are(self, tensors: Sequence[Tensor]) -> bool:
        """Whether the tensors are these, in the same memory, contiguous."""
        if len(tensors) != len(self._facts):
            return False
        for i, (known, address, size, dtype) in enumerate(self._facts):
            tensor = tensors[i]
            if (
                tensor is not known()
                or tensor.data_ptr() != address
                or tensor.nbytes != size
                or tensor.dtype is not dtype
                or not tensor.is_contiguous()
            ):
                return False
        return True


# Called by map.
ADDRESS: Callable[[Tensor], int] = Tensor.data_ptr
BYTES: Callable[[Tensor], int] = attrgetter("nbytes")


def compiled_forward(
    plan: Plan, x_td: Tensor, factors: Sequence[Tensor], bias: Tensor | None
) -> Tensor:
    """W x + b for rows of input."""
    bias = bias if bias is None or bias.is_contiguous() else bias.contiguous()
    factors = contiguous(factors)  # a name for them: the call does not keep copies alive
    address_of(x_td, (x_td.shape[0], plan.d_in), factors[0].dtype)
    return LayerCall(plan, factors, bias, None).forward(x_td)


def compiled_backward(
    plan: Plan,
    x_td: Tensor,
    factors: Sequence[Tensor],
    grad_te: Tensor,
    wanted: Sequence[bool],
) -> list[Tensor | None]:
    """The gradients of input, bias and factors; None for those not wanted."""
    factors = contiguous(factors)
    return LayerCall(plan, factors, None, None).backward(x_td, factors, grad_te, wanted)
