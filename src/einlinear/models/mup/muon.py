"""Muon: an optimizer whose steps are orthogonal matrices, also for the factors of any structure.

A factor is a batch of matrices, one for each index along its batch axes; so are the experts of a
mixture, and the weights that a layer stacks. Parameter groups say which axes are which, as plain
tuples, because attributes of tensors vanish when a model is copied or cast.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from math import inf, prod
from numbers import Real
from typing import Any, Literal, cast, get_args, overload

import torch
import torch.distributed as dist
from torch import Tensor
from torch.optim.adamw import adamw

from einlinear.errors import EinlinearError, quote
from einlinear.layers.scaling import MatrixAxes
from einlinear.structures.values import one_of, whole_number

OrthogonalDtype = Literal["auto", "float32", "bfloat16"]

QUINTIC = (3.4445, -4.7750, 2.0315)
"""Coefficients of the iteration. Five steps bring singular values of 0.002 to 1 to 0.68 to 1.21."""

_LARGEST_BATCH = 2**22  # numbers: as soon as so many wait, they are orthogonalised together
_FUSED = ("cpu", "cuda")  # devices on which torch has a fused AdamW


class Muon(torch.optim.Optimizer):
    """Muon for matrices and for the factors of structured layers; AdamW for everything else.

        m = momentum * m + (1 - momentum) * gradient
        O = orthogonalised((1 - momentum) * gradient + momentum * m)        each matrix of it
        W = (1 - lr * weight_decay) * W - lr * O

    O has the singular vectors of its argument, and singular values of about 1, so lr is the
    spectral norm of a step. `param_groups(model, lr, optimizer="muon", ...)` makes the groups:
    rates that transfer across widths and structures, the axes of the matrices, and groups for
    AdamW, which are those whose "axes" are None. torch's own Muon takes only parameters of two
    axes. Ref: [J24].

    Works with DDP, and with FSDP2: where a parameter is split along its batch axes, each process
    orthogonalises its own matrices; elsewhere, every process gathers the whole gradient.

    Args:
        params: the groups that `param_groups` makes. In your own, "axes" is None for AdamW, or the
            `MatrixAxes` of the matrices.
        lr: for groups without a rate.
        weight_decay: for groups without one; multiplied by the rate.
        momentum: of the gradients of matrices.
        nesterov: whether to look ahead along the momentum.
        ns_steps: steps of the Newton-Schulz iteration.
        ns_coefficients: a, b, c of each of its steps, a X + b (X X') X + c (X X')² X. With
            (1.875, -1.25, 0.375) singular values converge to 1, in many more steps.
        ns_dtype: the precision of the iteration. "auto" is bfloat16 on a GPU and float32 on a CPU;
            float64 parameters always use float64.
        eps: gradients of matrices with a smaller Frobenius norm make smaller steps; zeros make
            none.
        betas: of AdamW.
        adam_eps: the eps of AdamW.
    """

    def __init__(
        self,
        params: Iterable[Mapping[str, Any]],
        lr: float = 0.02,
        *,
        weight_decay: float = 0.0,
        momentum: float = 0.95,
        nesterov: bool = True,
        ns_steps: int = 5,
        ns_coefficients: tuple[float, float, float] = QUINTIC,
        ns_dtype: OrthogonalDtype = "auto",
        eps: float = 1e-12,
        betas: tuple[float, float] = (0.9, 0.95),
        adam_eps: float = 1e-8,
    ) -> None:
        defaults = {
            "lr": lr,
            "weight_decay": weight_decay,
            "momentum": momentum,
            "nesterov": nesterov,
            "ns_steps": ns_steps,
            "ns_coefficients": tuple(ns_coefficients),
            "ns_dtype": ns_dtype,
            "eps": eps,
            "betas": tuple(betas),
            "adam_eps": adam_eps,
        }
        super().__init__(cast("list[dict[str, Any]]", params), defaults)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group, which must have "axes"."""
        if not isinstance(param_group, dict) or "axes" not in param_group:
            raise EinlinearError(
                what="a parameter group for Muon has no axes",
                rule="Muon must know the matrices of a parameter; AdamW takes groups whose axes "
                "are None",
                fix='give el.Muon(el.param_groups(model, lr, optimizer="muon", base_width=...))',
            )
        super().add_param_group(param_group | {"axes": _plain_axes(param_group["axes"])})
        group = self.param_groups[-1]
        try:
            _check_group(group)
        except EinlinearError:
            del self.param_groups[-1]
            raise

    @overload
    def step(self, closure: None = None) -> None: ...

    @overload
    def step(self, closure: Callable[[], float]) -> float: ...

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:
        """Make one step; `closure` computes the loss again."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        self._check_gradients()
        for batch in _batches(self._jobs()):
            _apply_(batch)
        return loss

    def _check_gradients(self) -> None:
        grads = (p.grad for group in self.param_groups for p in group["params"])
        if any(grad is not None and grad.is_sparse for grad in grads):
            raise EinlinearError(
                what="a gradient is sparse",
                rule="Muon and its AdamW take dense gradients",
                fix="make the embedding with sparse=False",
            )

    def _jobs(self) -> Iterator[_Job]:
        """Let AdamW make its steps, and return what is to be orthogonalised."""
        for group in self.param_groups:
            parameters = [p for p in group["params"] if p.grad is not None]
            if not parameters:
                continue
            if group["axes"] is None:
                self._adam_step(group, parameters)
            else:
                yield from self._muon_jobs(group, parameters)

    def _adam_step(self, group: dict[str, Any], parameters: list[Tensor]) -> None:
        for p in parameters:
            if not self.state[p]:
                self.state[p] = {
                    "step": torch.zeros((), dtype=torch.float32, device=p.device),
                    "exp_avg": torch.zeros_like(p),
                    "exp_avg_sq": torch.zeros_like(p),
                }
        states = [self.state[p] for p in parameters]
        is_fused = all(p.device.type in _FUSED and p.is_floating_point() for p in parameters)
        if is_fused:  # a loaded state has the number of steps on the CPU
            for p, state in zip(parameters, states, strict=True):
                state["step"] = state["step"].to(p.device)
        adamw(
            parameters,
            [cast("Tensor", p.grad) for p in parameters],
            [state["exp_avg"] for state in states],
            [state["exp_avg_sq"] for state in states],
            [],
            [state["step"] for state in states],
            fused=True if is_fused else None,
            amsgrad=False,
            beta1=group["betas"][0],
            beta2=group["betas"][1],
            lr=group["lr"],
            weight_decay=group["weight_decay"],
            eps=group["adam_eps"],
            maximize=False,
        )

    def _muon_jobs(self, group: dict[str, Any], parameters: list[Tensor]) -> Iterator[_Job]:
        """Update the momentum, decay the weights, and return what is to be orthogonalised."""
        for p in parameters:
            if not self.state[p]:
                self.state[p] = {"momentum_buffer": torch.zeros_like(p)}
        grads = [_local(cast("Tensor", p.grad)) for p in parameters]
        held = [_local(self.state[p]["momentum_buffer"]) for p in parameters]
        momentum = group["momentum"]
        torch._foreach_lerp_(held, grads, 1 - momentum)
        if group["weight_decay"]:
            kept = 1 - float(group["lr"]) * group["weight_decay"]
            torch._foreach_mul_([_local(p) for p in parameters], kept)
        for p, grad, buffer in zip(parameters, grads, held, strict=True):
            yield _job(group, p, grad.lerp(buffer, momentum) if group["nesterov"] else buffer)


@dataclass(frozen=True, slots=True, eq=False)
class _Job:
    """The matrices of one parameter: what to orthogonalise, and where to add the result."""

    matrices: Tensor  # (matrices, smaller side, larger side)
    write_: Callable[[Tensor], None]
    settings: tuple[Any, ...]

    @property
    def key(self) -> tuple[Any, ...]:
        return (*self.matrices.shape[1:], self.matrices.dtype, self.matrices.device, self.settings)


def _job(group: Mapping[str, Any], parameter: Tensor, update: Tensor) -> _Job:
    """The job of a parameter; `update` is what this process holds of its update."""
    axes = group["axes"]
    is_split = _is_distributed(parameter) and not _is_split_along_batch(parameter, axes)
    target = _local(parameter)
    whole = _gathered(update, parameter) if is_split else update
    lying = matrices_of(whole, axes)
    num_outputs = len(axes["outputs"])
    num_inputs = len(axes["inputs"])
    sides = lying.shape[lying.dim() - num_outputs - num_inputs :]
    out, inner = prod(sides[:num_outputs]), prod(sides[num_outputs:])
    matrices = lying.reshape(-1, out, inner)
    is_tall = out > inner
    rate = float(group["lr"])

    def write_(orthogonal: Tensor) -> None:
        step = (orthogonal.mT if is_tall else orthogonal).reshape(lying.shape).to(target.dtype)
        if is_split:
            step = _own_part(_laid_back(step, whole, axes), parameter)
            target.add_(step, alpha=-rate)
        else:
            matrices_of(target, axes).add_(step, alpha=-rate)

    settings = (
        group["ns_steps"], tuple(group["ns_coefficients"]), group["ns_dtype"], group["eps"],
    )  # fmt: skip
    return _Job(matrices.mT if is_tall else matrices, write_, settings)


def matrices_of(tensor: Tensor, axes: Mapping[str, Sequence[int]]) -> Tensor:
    """A view of a parameter: its batch axes, then the outputs, then the inputs of its matrices."""
    dim = tensor.dim()
    axis, count = axes["stack"]
    inputs, outputs = ([dim + a for a in axes[side]] for side in ("inputs", "outputs"))
    if count > 1:
        split = dim + axis
        sizes = tensor.shape
        each = sizes[split] // count
        tensor = tensor.view(*sizes[:split], count, each, *sizes[split + 1 :])
        inputs, outputs = ([a + (a >= split) for a in side] for side in (inputs, outputs))
    sides = (*outputs, *inputs)
    batch = [a for a in range(tensor.dim()) if a not in sides]
    return tensor.permute(*batch, *sides)


def _laid_back(matrices: Tensor, like: Tensor, axes: Mapping[str, Sequence[int]]) -> Tensor:
    """The tensor of which these are the matrices."""
    tensor = torch.empty_like(like, dtype=matrices.dtype)
    matrices_of(tensor, axes).copy_(matrices)
    return tensor


def _batches(jobs: Iterable[_Job]) -> Iterator[list[_Job]]:
    """Jobs of one shape together, as soon as they fill a batch, so that few wait in memory."""
    waiting: dict[tuple[Any, ...], list[_Job]] = {}
    for job in jobs:
        batch = waiting.setdefault(job.key, [])
        batch.append(job)
        if sum(waits.matrices.numel() for waits in batch) >= _LARGEST_BATCH:
            yield waiting.pop(job.key)
    yield from waiting.values()


def _apply_(jobs: Sequence[_Job]) -> None:
    """Orthogonalise the matrices of all jobs, which have one shape, and add them to weights."""
    steps, coefficients, dtype, eps = jobs[0].settings
    together = jobs[0].matrices if len(jobs) == 1 else torch.cat([job.matrices for job in jobs])
    orthogonal = orthogonalised(together, steps, coefficients, dtype=dtype, eps=eps)
    counts = [len(job.matrices) for job in jobs]
    for job, own in zip(jobs, torch.split(orthogonal, counts), strict=True):
        job.write_(own)


def orthogonalised(
    matrices: Tensor,
    steps: int = 5,
    coefficients: Sequence[float] = QUINTIC,
    *,
    dtype: OrthogonalDtype = "auto",
    eps: float = 1e-12,
) -> Tensor:
    """A batch of matrices with the same singular vectors, and singular values near 1.

        X = G / max(|G|, eps),   then `steps` times   X = a X + b (X X') X + c (X X')² X

    One row or column is normalised exactly. The rows should be the smaller side.
    Ref: [J24].  Checked by: test_muon.py::test_singular_values_follow_the_polynomial.
    """
    exact = torch.promote_types(matrices.dtype, torch.float32)
    x = _normalised(matrices.to(exact), eps)
    if min(x.shape[-2:]) <= 1 or not len(x):
        return x
    x = x.to(_working_dtype(x, dtype))
    a, b, c = coefficients
    for _ in range(steps):
        gram = torch.bmm(x, x.mT)
        polynomial = torch.baddbmm(gram, gram, gram, beta=b, alpha=c)
        x = torch.baddbmm(x, polynomial, x, beta=a)
    return x


def _normalised(x: Tensor, eps: float) -> Tensor:
    """Divide every matrix by its Frobenius norm, or by eps if that is larger.

    The squares of large numbers overflow, those of small ones vanish. So every matrix is first
    multiplied by a power of two, which rounds nothing and brings its largest number to about 1.
    """
    if not x.numel():
        return x
    largest: Tensor = torch.linalg.vector_norm(x, ord=inf, dim=(-2, -1), keepdim=True)
    most = 1000 if x.dtype == torch.float64 else 100  # both powers are normal numbers
    power = torch.exp2(-torch.frexp(largest).exponent.clamp(-most, most).to(x.dtype))
    x = x * power
    norms: Tensor = torch.linalg.vector_norm(x, dim=(-2, -1), keepdim=True)
    return x / torch.maximum(norms, eps * power)


def _working_dtype(x: Tensor, dtype: OrthogonalDtype) -> torch.dtype:
    if x.dtype == torch.float64:
        return x.dtype
    is_half = dtype == "bfloat16" or (dtype == "auto" and x.device.type == "cuda")
    return torch.bfloat16 if is_half else torch.float32


def _plain_axes(axes: object) -> dict[str, tuple[int, ...]] | None:
    """The axes of a group as tuples by name, which can be saved and loaded."""
    if axes is None:
        return None
    try:
        if isinstance(axes, Mapping):
            axes = MatrixAxes(**{name: tuple(found) for name, found in axes.items()})
        return asdict(cast("MatrixAxes", axes))
    except TypeError as error:
        raise EinlinearError(
            what=f"the axes of a parameter group are {quote(axes)}",
            rule="axes are None for AdamW, or the axes of matrices for Muon",
            fix="give el.MatrixAxes(inputs=(-1,), outputs=(-2,)), or the same as a dict",
        ) from error


def _check_group(group: Mapping[str, Any]) -> None:
    one_of(group["ns_dtype"], "ns_dtype", get_args(OrthogonalDtype))
    whole_number(group["ns_steps"], "ns_steps", 1, 100)
    numbers: list[tuple[str, object, float]] = [
        ("lr", group["lr"], inf),
        ("weight_decay", group["weight_decay"], inf),
        ("momentum", group["momentum"], 1.0),
        *(("a beta", beta, 1.0) for beta in group["betas"]),
    ]
    for name, value, end in numbers:
        is_number = isinstance(value, Real | Tensor)
        if not (is_number and 0 <= float(cast("float", value)) < end):
            raise EinlinearError(
                what=f"{name} is {quote(value)}",
                rule=f"{name} is a number of 0 or more, below {end:g}",
                fix=f"give {name} as a float",
            )
    for name, count in (("betas", 2), ("ns_coefficients", 3)):
        if len(group[name]) != count:
            raise EinlinearError(
                what=f"{name} is {quote(group[name])}",
                rule=f"{name} holds {count} numbers",
                fix=f"leave {name} out, or give {count} floats",
            )
    if not group["eps"] > 0:
        raise EinlinearError(
            what=f"eps is {quote(group['eps'])}",
            rule="eps is above 0, so that a gradient of zeros gives no step",
            fix="leave eps out, or give a small number such as 1e-12",
        )
    axes = group["axes"]
    if axes is None:
        return
    used = (*axes["inputs"], *axes["outputs"])
    axis, count = axes["stack"]
    for parameter in group["params"]:
        is_whole = parameter.dim() >= -axis and parameter.shape[axis] % count == 0
        has_axes = parameter.dim() >= -min(used, default=0) and (count == 1 or is_whole)
        if not has_axes or not parameter.is_floating_point():
            raise EinlinearError(
                what=f"a parameter has the shape {tuple(parameter.shape)}, the dtype "
                f"{parameter.dtype} and the axes {axes}",
                rule="Muon takes real matrices that have all axes of their group",
                fix='let el.param_groups(model, lr, optimizer="muon", ...) make the groups',
            )


def _is_distributed(tensor: Tensor) -> bool:
    if not (dist.is_available() and dist.is_initialized()):
        return False
    from torch.distributed.tensor import DTensor  # loads slowly

    return isinstance(tensor, DTensor)


def _local(tensor: Tensor) -> Tensor:
    """What this process holds of a tensor, sharing memory."""
    return cast("Any", tensor).to_local() if _is_distributed(tensor) else tensor


def _is_split_along_batch(parameter: Any, axes: Mapping[str, Sequence[int]]) -> bool:
    """Whether every process holds whole matrices of a DTensor."""
    sides = (*axes["inputs"], *axes["outputs"])
    places = [p for p in parameter.placements if not p.is_replicate()]
    return all(p.is_shard() and p.dim - parameter.dim() not in sides for p in places)


def _gathered(own: Tensor, like: Any) -> Tensor:
    """The whole tensor of which every process holds a part, as of the DTensor `like`."""
    from torch.distributed.tensor import DTensor

    part = DTensor.from_local(
        own, like.device_mesh, like.placements, shape=like.shape, stride=like.stride()
    )
    return part.full_tensor()


def _own_part(whole: Tensor, like: Any) -> Tensor:
    """The part that this process holds of a whole tensor; nothing is sent."""
    from torch.distributed.tensor import DTensor, Replicate

    places = [Replicate()] * like.device_mesh.ndim
    copies = DTensor.from_local(whole, like.device_mesh, places, run_check=False)
    return copies.redistribute(like.device_mesh, like.placements).to_local()
