"""One run on many devices: process groups, DDP, and errors that end all processes."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from einlinear.errors import EinlinearError, quote
from einlinear.runs.config import RunConfig

MINUTES = "EINLINEAR_RANK_MINUTES"
"""Environment variable: minutes that the processes of a run wait for each other; 30 by default."""

_MINUTES, _MOST_MINUTES = 30, 10_000
_GROUPS = ("gloo", "nccl")  # their errors may be plain RuntimeErrors
# Parts of torch's messages if another process does not answer, and if it has ended.
_SILENT = ("timed out", "timeout", "time out")
_AGAIN = "start all processes again: the run resumes from its last checkpoint"
_ENDED = ("connection closed", "connection reset", "broken pipe", "connection was likely closed")


class SharedError(EinlinearError):
    """An error that all processes of a run raise, although it may have happened in one."""


@dataclass(frozen=True, slots=True)
class Place:
    """The rank of a process in its run, the number of processes, and its device."""

    rank: int
    count: int
    device: torch.device

    @property
    def is_first(self) -> bool:
        """Whether this process writes files."""
        return self.rank == 0


@contextmanager
def joined(config: RunConfig) -> Iterator[Place]:
    """Join the process group of torchrun, if there is one, and yield the place of this process."""
    rank, count = numbers()
    starts = not dist.is_initialized() and count > 1
    device = _device(config)
    try:
        if starts:
            variable("MASTER_PORT", 29500, 0, 65535)
            backend = "nccl" if device.type == "cuda" else "gloo"
            dist.init_process_group(backend, timeout=patience())
        if dist.is_initialized():
            yield Place(dist.get_rank(), dist.get_world_size(), device)
        else:
            yield Place(0, 1, device)
    except (RuntimeError, ValueError) as error:
        is_group = count > 1 or dist.is_initialized()
        minutes = patience().total_seconds() / 60 if starts else None
        rank = dist.get_rank() if dist.is_initialized() else rank
        known = explained(error, rank, minutes) if is_group else None
        if known is None:
            raise
        raise known from error
    finally:
        if starts and dist.is_initialized():
            dist.destroy_process_group()


def numbers() -> tuple[int, int]:
    """The rank of this process and the number of processes from torchrun; 0 and 1 if alone."""
    count = variable("WORLD_SIZE", 1, 1)
    rank = variable("RANK", 0, 0, count - 1 if count > 1 else None)
    return (rank, count) if count > 1 else (0, 1)


def variable(name: str, default: int, low: int, high: int | None = None) -> int:
    """An integer from the environment, checked."""
    text = os.environ.get(name, str(default)).strip()
    number = int(text) if text.isascii() and text.isdecimal() and len(text) < 10 else -1
    if number < low or (high is not None and number > high):
        scope = f"of {low} or more" if high is None else f"from {low} to {high}"
        raise EinlinearError(
            what=f"the environment has {name}={quote(text)}",
            rule=f"{name} is a whole number {scope}",
            fix=f"unset {name}; torchrun sets what its processes need",
        )
    return number


def patience() -> timedelta:
    """How long the processes of a run wait for each other."""
    return timedelta(minutes=variable(MINUTES, _MINUTES, 1, _MOST_MINUTES))


def explained(error: Exception, rank: int, minutes: float | None) -> EinlinearError | None:
    """The error to raise if torch reports that another process is silent or gone; else None.

    A process that is stopped, swapped out or cut off from the network looks the same from here.
    Processes wait for each other this many minutes; None if the user started the group.
    """
    text = str(error).lower()
    if isinstance(error, ValueError):
        if isinstance(error, EinlinearError) or "environment variable" not in text:
            return None
        return EinlinearError(
            what=f"process {rank} cannot find the others: {error}",
            rule="WORLD_SIZE is more than 1 only where torchrun, or you, set all it needs",
            fix="use torchrun --nproc-per-node N -m einlinear train ..., or unset WORLD_SIZE",
        )
    if not isinstance(error, dist.DistError) and not any(name in text for name in _GROUPS):
        return None
    if any(words in text for words in _SILENT):
        return _silent(rank, minutes)
    if any(words in text for words in _ENDED):
        return EinlinearError(
            what=f"another process of the run ended while process {rank} waited for it",
            rule="a run needs all its processes until it ends",
            fix=_AGAIN,
        )
    return None


def _silent(rank: int, minutes: float | None) -> EinlinearError:
    how_long, rule = "in time", "for each other as long as their process group says"
    more = "give init_process_group a longer timeout"
    if minutes is not None:
        how_long, rule = f"for {minutes:g} minutes", f"{minutes:g} minutes for each other"
        more = f"set {MINUTES}"
    return EinlinearError(
        what=f"process {rank} had no answer from another process {how_long}",
        rule=f"the processes of a run wait {rule}",
        fix=f"{_AGAIN}; if one of them needs longer, {more}",
    )


def _device(config: RunConfig) -> torch.device:
    has_cuda = torch.cuda.is_available()
    if config.device == "cuda" and not has_cuda:
        raise EinlinearError(
            what="the device is cuda",
            rule="a device is one that torch finds on this machine",
            fix='leave device out, or give "cpu"',
        )
    if config.device == "cpu" or not has_cuda:
        return torch.device("cpu")
    number = variable("LOCAL_RANK", 0, 0, torch.cuda.device_count() - 1)
    device = torch.device("cuda", number)
    torch.cuda.set_device(device)
    return device


@contextmanager
def together(place: Place) -> Iterator[None]:
    """Raise an error that happens in one process in all processes."""
    error: EinlinearError | None = None
    try:
        yield
    except EinlinearError as raised:
        if place.count == 1:
            raise
        error = raised
    if place.count > 1:
        mine = None if error is None else (error.what, error.rule, error.fix)
        parts: list[tuple[str, str, str] | None] = [None] * place.count
        dist.all_gather_object(parts, mine)
        for rank, given in enumerate(parts):
            if given is not None:
                what = given[0] if all(parts) else f"process {rank}: {given[0]}"
                raise SharedError(what=what, rule=given[1], fix=given[2]) from error


def from_first(place: Place, number: int) -> int:
    """The value of the number in the first process."""
    if place.count == 1:
        return number
    held = torch.tensor(number, device=place.device)
    dist.broadcast(held, 0)
    return int(held)


def summed(place: Place, numbers: Tensor) -> Tensor:
    """The sum of the numbers over all processes."""
    if place.count > 1:
        numbers = numbers.clone()
        dist.all_reduce(numbers)
    return numbers


def mean(place: Place, numbers: Tensor) -> Tensor:
    """The mean of the numbers over all processes."""
    return summed(place, numbers) / place.count


def share(config: RunConfig, place: Place, part: int) -> slice:
    """The rows of the global batch in one part of the share of a process."""
    size = config.batch_size // (place.count * config.accumulation)
    start = (place.rank * config.accumulation + part) * size
    return slice(start, start + size)


def check_share(config: RunConfig, place: Place) -> None:
    """Refuse a batch that cannot be divided evenly among processes and parts."""
    if config.batch_size % (place.count * config.accumulation):
        raise EinlinearError(
            what=f"the batch_size is {config.batch_size}, for {place.count} processes with an "
            f"accumulation of {config.accumulation}",
            rule="all processes compute parts of the same size",
            fix=f"give a batch_size that is a multiple of {place.count * config.accumulation}",
        )


class Spread:
    """A model on one device; call `module`. Subclasses spread it over several."""

    def __init__(self, model: nn.Module) -> None:
        self.module = model

    def exchanging(self, is_last: bool) -> AbstractContextManager[Any]:
        """Context for one part of a step: gradients are exchanged in the last one only."""
        return nullcontext()

    def whole(self, tensor: Tensor) -> Tensor:
        """A copy of the whole tensor in CPU memory."""
        return tensor.detach().to("cpu", copy=True).contiguous()

    def like(self, tensor: Tensor, other: Tensor) -> Tensor:
        """Place a whole tensor like another one."""
        return tensor.to(other.device)

    def local(self, tensor: Tensor) -> Tensor:
        """The part of a tensor that this process holds, sharing memory."""
        return tensor


class DataParallel(Spread):
    """A copy of the model on every device, with DistributedDataParallel."""

    def __init__(self, model: nn.Module, place: Place) -> None:
        ids = None if place.device.type == "cpu" else [place.device]
        self._ddp = DistributedDataParallel(model, device_ids=ids, gradient_as_bucket_view=True)
        super().__init__(self._ddp)

    def exchanging(self, is_last: bool) -> AbstractContextManager[Any]:
        """Skip the exchange before the last part."""
        return nullcontext() if is_last else self._ddp.no_sync()
