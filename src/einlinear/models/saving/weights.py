"""The weights and buffers of a model, each once; and back, tied as they were."""

from __future__ import annotations

from collections.abc import Hashable, Mapping

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn.parameter import is_lazy

from einlinear.errors import EinlinearError
from einlinear.files.tensors import can_write
from einlinear.layers.moe.routing import Routed
from einlinear.show.numbers import listed


def distinct_tensors(model: nn.Module) -> tuple[dict[str, Tensor], dict[str, str]]:
    """Return the tensors of a model that have different memory, and the other names of each.

    The second value maps each other name to the name in the first.
    """
    check_whole(model)
    tensors: dict[str, Tensor] = {}
    tied: dict[str, str] = {}
    first: dict[Hashable, str] = {}
    for name, tensor in _state(model).items():
        _check_tensor(name, tensor)
        kept = first.setdefault(_memory(tensor), name)
        if kept == name:
            tensors[name] = tensor.detach()
        else:
            tied[name] = kept
    return tensors, tied


def check_whole(model: nn.Module) -> None:
    """Refuse a model whose weights are spread over several processes."""
    named = [name for name, tensor in model.named_parameters() if _is_part(tensor)]
    named += [
        name
        for name, module in model.named_modules()
        if isinstance(module, Routed) and module.shard is not None
    ]
    if named:
        raise EinlinearError(
            what=f"{named[0]!r} is spread over several processes",
            rule="a model is saved with the weights of one process",
            fix="gather them with el.full_state_dict(model), load them into a model that is not "
            "sharded, and save that",
        )


def _is_part(tensor: Tensor) -> bool:
    return isinstance(tensor, DTensor) or hasattr(tensor, "ds_id")  # of DeepSpeed


def set_tensors_(
    model: nn.Module,
    tensors: Mapping[str, Tensor],
    tied: Mapping[str, str],
    *,
    device: torch.device | str | None = None,
    dtype: torch.dtype | None = None,
) -> None:
    """Give a model these weights and buffers, tied as they were; check all before the first.

    Buffers that are not saved (persistent=False) keep the values of the model.
    """
    names = {name: name for name in tensors} | dict(tied)
    own = _state(model)
    _check_names(set(own), set(names))
    for name, kept in names.items():
        _check_shape(name, tuple(own[name].shape), tuple(tensors[kept].shape))
    _check_meta(model, set(own))
    new: dict[str, Tensor] = {}
    for name, tensor in tensors.items():
        here = "cpu" if own[name].is_meta else own[name].device
        to = dtype if tensor.is_floating_point() else None
        value = tensor.to(here if device is None else device, to)
        is_parameter = isinstance(own[name], nn.Parameter)
        new[name] = nn.Parameter(value, own[name].requires_grad) if is_parameter else value
    for name, kept in names.items():
        parent, _, last = name.rpartition(".")
        setattr(model.get_submodule(parent), last, new[kept])
    if device is not None or dtype is not None:
        model.to(device, dtype)  # buffers that are not saved


def _state(model: nn.Module) -> dict[str, Tensor]:
    """Return parameters and saved buffers under all their names, as they are in the model."""
    state: dict[str, object] = model.state_dict(keep_vars=True)
    found = {}
    for name, value in state.items():
        if not isinstance(value, Tensor) or is_lazy(value):
            raise EinlinearError(
                what=f"the state of the model has {name!r}, which is {type(value).__name__}",
                rule="a saved model consists of tensors",
                fix="call a lazy model once before; leave out get_extra_state",
            )
        found[name] = value
    return found


def _memory(tensor: Tensor) -> Hashable:
    """Return a key that two tensors share if they are the same numbers in the same memory."""
    if tensor.numel() == 0:
        return id(tensor)
    layout = tuple(tensor.shape), tensor.stride(), tensor.dtype
    return isinstance(tensor, nn.Parameter), tensor.device, tensor.data_ptr(), layout


def _check_tensor(name: str, tensor: Tensor) -> None:
    if not can_write(tensor):
        raise EinlinearError(
            what=f"{name!r} has the layout {tensor.layout} and dtype {tensor.dtype}",
            rule="a saved model has dense tensors of real numbers",
            fix="make it a buffer with persistent=False, or store its parts",
        )
    if tensor.is_meta:
        raise EinlinearError(
            what=f"{name!r} is on the meta device",
            rule="a saved model has weights; tensors on the meta device have none",
            fix="create the model on the CPU or a GPU, or load its weights first",
        )


def _check_names(own: set[str], saved: set[str]) -> None:
    missing, unexpected = sorted(own - saved), sorted(saved - own)
    if missing or unexpected:
        parts = [f"{listed(missing, 5)} of the new model were not saved"] * bool(missing)
        parts += [f"{listed(unexpected, 5)} were saved and have no place"] * bool(unexpected)
        raise EinlinearError(
            what=f"the weights do not fit: {'; '.join(parts)}",
            rule="the new model has the same weights and buffers as the model that was saved",
            fix="make the model as it was before it was converted",
        )


def _check_shape(name: str, own: tuple[int, ...], saved: tuple[int, ...]) -> None:
    if own != saved:
        raise EinlinearError(
            what=f"{name!r} has the shape {own} in the new model, and was saved with {saved}",
            rule="the new model has the shapes of the one that was saved",
            fix="make the model with the same widths, vocabulary and classes",
        )


def _check_meta(model: nn.Module, saved: set[str]) -> None:
    lost = [name for name, buffer in model.named_buffers() if buffer.is_meta and name not in saved]
    if lost:
        raise EinlinearError(
            what=f"the values of {listed(lost, 5)} are unknown: they are on the meta device, and "
            "buffers with persistent=False are not saved",
            rule="on the meta device, make_model may only create what was saved",
            fix="create the model on the CPU: leave out torch.device('meta')",
        )
