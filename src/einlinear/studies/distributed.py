"""One run on many devices: who does what, DDP, errors that end all processes."""

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
from einlinear.studies.config import RunConfig

MINUTES = "EINLINEAR_RANK_MINUTES"
"""The variable that says how long the processes of a run wait for each other; 30 unless set."""

_MINUTES, _MOST_MINUTES = 30, 10_000
_GROUPS = ("gloo", "nccl")  # their errors may be of no type of their own
# What torch says where another process does not answer, and where it has ended.
_SILENT = ("timed out", "timeout", "time out")
_AGAIN = "start all processes again: the run goes on from its last checkpoint"
_ENDED = ("connection closed", "connection reset", "broken pipe", "connection was likely closed")


class SharedError(EinlinearError):
    """An error that every process of a run raises, though it may be that of one."""


@dataclass(frozen=True, slots=True)
class Place:
    """Where a process stands among those of a run: its number, how many there are, its device."""

    rank: int
    count: int
    device: torch.device

    @property
    def is_first(self) -> bool:
        """Whether it is the one that writes."""
        return self.rank == 0


@contextmanager
def joined(config: RunConfig) -> Iterator[Place]:
    """The place of this process: alone, or as torchrun or a process group says."""
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
        known = explained(error, _rank(rank), minutes) if is_group else None
        if known is None:
            raise
        raise known from error
    finally:
        if starts and dist.is_initialized():
            dist.destroy_process_group()


def numbers() -> tuple[int, int]:
    """The number of this process and how many there are, as torchrun says; 0 and 1 if it is alone.

    What the environment says of it is checked.
    """
    count = variable("WORLD_SIZE", 1, 1)
    rank = variable("RANK", 0, 0, count - 1 if count > 1 else None)
    return (rank, count) if count > 1 else (0, 1)


def _rank(told: int) -> int:
    return dist.get_rank() if dist.is_initialized() else told


def variable(name: str, default: int, low: int, high: int | None = None) -> int:
    """A number that torchrun, or a user, has put into the environment."""
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
    """What to raise where torch says that another process is silent or gone; None if it does not.

    Whether a rank is stopped, swapped out or cut off from the network looks the same from here.

    Args:
        error: as torch has raised it.
        rank: of this process.
        minutes: for which processes wait for each other; None if the user has started the group.
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
    what = f"process {rank} had no answer from another process"
    if minutes is None:
        return EinlinearError(
            what=f"{what} in time",
            rule="the processes of a run wait for each other as long as their process group says",
            fix=f"{_AGAIN}; if one of them needs longer, give init_process_group a longer timeout",
        )
    return EinlinearError(
        what=f"{what} for {minutes:g} minutes",
        rule=f"the processes of a run wait {minutes:g} minutes for each other",
        fix=f"{_AGAIN}; if one of them needs longer, set {MINUTES}",
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
    """An error of one process inside becomes the error of all."""
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
    """The number that the first process has."""
    if place.count == 1:
        return number
    held = torch.tensor(number, device=place.device)
    dist.broadcast(held, 0)
    return int(held)


def summed(place: Place, numbers: Tensor) -> Tensor:
    """The numbers, added up over all processes."""
    if place.count > 1:
        numbers = numbers.clone()
        dist.all_reduce(numbers)
    return numbers


def mean(place: Place, numbers: Tensor) -> Tensor:
    """The numbers, averaged over all processes."""
    return summed(place, numbers) / place.count


def share(config: RunConfig, place: Place, part: int) -> slice:
    """The rows of the global batch that a process computes in one of its parts."""
    size = config.batch_size // (place.count * config.accumulation)
    start = (place.rank * config.accumulation + part) * size
    return slice(start, start + size)


def check_share(config: RunConfig, place: Place) -> None:
    """Refuse a batch that cannot be shared out evenly."""
    if config.batch_size % (place.count * config.accumulation):
        raise EinlinearError(
            what=f"the batch_size is {config.batch_size}, for {place.count} processes with an "
            f"accumulation of {config.accumulation}",
            rule="all processes compute parts of the same size",
            fix=f"give a batch_size that is a multiple of {place.count * config.accumulation}",
        )


class Spread:
    """A model on one device: `module` is what is called. Others override what differs."""

    def __init__(self, model: nn.Module) -> None:
        self.module = model

    def exchanging(self, is_last: bool) -> AbstractContextManager[Any]:
        """The surroundings of one part of a step: gradients are exchanged in the last only."""
        return nullcontext()

    def whole(self, tensor: Tensor) -> Tensor:
        """A copy of all of a tensor in the memory of the processor."""
        return tensor.detach().to("cpu", copy=True).contiguous()

    def like(self, tensor: Tensor, other: Tensor) -> Tensor:
        """A whole tensor, put where another is."""
        return tensor.to(other.device)

    def local(self, tensor: Tensor) -> Tensor:
        """What this process holds of a tensor, in the same memory."""
        return tensor


class DataParallel(Spread):
    """The same model on every device, by DistributedDataParallel."""

    def __init__(self, model: nn.Module, place: Place) -> None:
        ids = None if place.device.type == "cpu" else [place.device]
        self._ddp = DistributedDataParallel(model, device_ids=ids, gradient_as_bucket_view=True)
        super().__init__(self._ddp)

    def exchanging(self, is_last: bool) -> AbstractContextManager[Any]:
        """No exchange before the last part."""
        if is_last:
            return nullcontext()
        return self._ddp.no_sync()
