"""Memory and threads that a run needs, from its settings alone, before anything is built."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from math import log

import torch

from einlinear.data.tasks.pixels import PIXELS, VALUES
from einlinear.data.tasks.regression import IN_FEATURES
from einlinear.errors import EinlinearError, quote
from einlinear.layers.machine import NoRoomError, memory_bytes
from einlinear.runs.config import RunConfig
from einlinear.runs.presets import SEQUENCE_TASKS, preset_values
from einlinear.runs.record import Counts
from einlinear.show.numbers import amount
from einlinear.training.counting import count_model
from einlinear.training.devices.distributed import Place
from einlinear.training.model import make_shape

MACS_PER_THREAD = 500_000_000
"""Forward multiply-adds of a step for each thread. Threads wait for each other hundreds of times in
a step: small steps gain nothing from a second one, and are much slower on a busy machine."""

MOST_THREADS = 1024

_FLOAT = 4
_MOST = 2**63  # bytes: more than torch can address
_OBJECTS = 20_000  # bytes of the Python objects of a block, at least
_TENSOR = 500  # the same of a tensor
_POINT = 500  # the same of a point of the curve

# Numbers that a block keeps for the backward pass, per unit and per channel: a lower bound of what
# was measured. Checked by: test_needs.py::test_needs_are_below_what_was_measured.
_KEPT = {"text": 16.0, "pixels": 16.0, "regression": 9.0, "cifar": 0.5}
_HALF = 0.5  # of that with bfloat16
_USUAL = {"num_experts": 8, "num_active": 2}  # presets have all others


@dataclass(frozen=True, slots=True)
class Need:
    """A part of the memory that a run needs: a lower bound in bytes.

    growth: the settings that it depends on, and the power with which it grows with each.
    is_moved: whether it is on the device of the run, not in the main memory.
    """

    name: str
    bytes: int
    growth: Mapping[str, float]
    is_moved: bool = True


def count_shape(config: RunConfig, sizes: tuple[int, int], length: int) -> Counts:
    """Count a model from shapes alone, in a time that does not depend on its depth.

    All counts are linear in the depth, so two small models determine them.
    Checked by: test_needs.py::test_counts_of_deep_models.
    """

    def counted(depth: int) -> Counts:
        with torch.device("meta"):
            return count_model(make_shape(replace(config, depth=depth), sizes), length)

    try:
        if config.depth <= 3:
            return counted(config.depth)
        two, three = counted(2), counted(3)  # an MLP of depth 1 has no block
    except (RuntimeError, OverflowError, TypeError, NoRoomError) as error:
        if not isinstance(error, NoRoomError) and "overflow" not in str(error).lower():
            raise
        need = Need("the weights", _MOST, _weight_growth(config, sizes))
        raise _too_large(config, [need], f"torch can address {amount(_MOST)}B") from error
    grown = {
        name: getattr(two, name) + (config.depth - 2) * (getattr(three, name) - getattr(two, name))
        for name in Counts.__dataclass_fields__
    }
    return Counts(**grown)


def needs(config: RunConfig, processes: int = 1, *, is_moved: bool = False) -> list[Need]:
    """What a run needs in one of its processes, part by part; a lower bound.

    `is_moved` tells whether weights are made in main memory and then moved to another device.
    """
    length, outputs = _lengths(config)
    sizes = _sizes(config)
    params = count_shape(config, sizes, length).params
    # Weights, gradients, two moments, or one of Muon; the average. While the average is in use,
    # there is a copy of the weights instead of gradients.
    copies = (3 if config.optimizer == "muon" else 4) + bool(config.ema)
    shards = processes if config.shard == "fsdp2" else 1
    rows = config.batch_size // (processes * config.accumulation)
    kept = _KEPT[config.task] * (_HALF if config.precision == "bfloat16" else 1.0)
    numbers = int(kept * config.width * config.depth) + 2 * outputs
    by_rows = {"batch_size": 1.0, "context": 1.0}
    weights = _weight_growth(config, sizes)
    found = [
        Need("the weights", _FLOAT * params * copies // shards, weights),
        Need("the model", _OBJECTS * config.depth, {"depth": 1.0}, False),
        Need("the weights", _FLOAT * params * is_moved, weights, False),
        Need(
            "the activations of a batch",
            _FLOAT * max(1, rows) * length * numbers,
            by_rows | {"width": 1.0, "depth": 1.0},
        ),
        Need(
            "the curve", _POINT * min(config.eval_points, config.steps), {"eval_points": 1}, False
        ),
    ]
    if config.task == "regression":
        return found + _regression_needs(config)
    row = 8 * 3 * (length + 1) if config.task in SEQUENCE_TASKS else 8
    return [*found, Need("a batch", max(1, rows) * row, by_rows, False)]


def step_macs(config: RunConfig) -> int:
    """Approximate multiply-adds of a forward step, including the teacher, weighted by time."""
    length, _ = _lengths(config)
    macs = count_shape(config, _sizes(config), length).macs * length
    if config.teacher_width is not None and config.teacher_depth is not None:
        # It runs forward only.
        macs += max(0, config.teacher_depth - 2) * config.teacher_width**2 // 3
    return macs * config.batch_size


def check_needs(config: RunConfig, place: Place | None = None) -> None:
    """Refuse a run that needs more memory than this machine or GPU has, as far as known."""
    place = place or Place(0, 1, torch.device("cpu"))
    is_moved = place.device.type == "cuda"
    parts = needs(config, place.count, is_moved=is_moved)
    if is_moved:
        have = int(torch.cuda.mem_get_info(place.device)[1])
        _check(config, [part for part in parts if part.is_moved], have, "the GPU")
        parts = [part for part in parts if not part.is_moved]
    memory = memory_bytes()
    if memory is not None:
        _check(config, parts, memory, "this machine")


def fits(config: RunConfig) -> bool:
    """Whether this machine has enough memory for a run, as far as known."""
    try:
        check_needs(config)
    except EinlinearError:
        return False
    return True


def choose_threads(config: RunConfig, available: int) -> int:
    """The number of CPU threads that a run can use, out of those available."""
    if available == 1 or (config.device != "cpu" and torch.cuda.is_available()):
        return available
    return max(1, min(available, step_macs(config) // MACS_PER_THREAD))


@contextmanager
def using_threads(config: RunConfig, count: int | None) -> Iterator[None]:
    """Set torch's number of threads within the block; chosen for the run if None."""
    held = torch.get_num_threads()
    torch.set_num_threads(choose_threads(config, held) if count is None else count)
    try:
        yield
    finally:
        torch.set_num_threads(held)


def _check(config: RunConfig, parts: Sequence[Need], have: int, who: str) -> None:
    if sum(part.bytes for part in parts) > have:
        raise _too_large(config, parts, f"{who} has {amount(have)}B")


def _too_large(config: RunConfig, parts: Sequence[Need], limit: str) -> EinlinearError:
    """An error that names the most unusual setting of the part that needs the most."""
    part = max(parts, key=lambda part: part.bytes)
    name = max(part.growth, key=lambda name: part.growth[name] * _excess(config, name))
    usual = preset_values(config.task, "cpu") | _USUAL | {"structure": "dense"}
    least = "more than " * (part.bytes == _MOST)
    return EinlinearError(
        what=f"{name}={quote(getattr(config, name)).strip(chr(39))} would need {least}"
        f"{amount(part.bytes)}B for {part.name}; {limit}",
        rule="a run needs memory for its weights, gradients, moments, activations and data",
        fix=f"give a smaller {name}, such as {usual[name]}"
        if name != "structure"
        else "give a smaller rank, or another structure",
    )


def _excess(config: RunConfig, name: str) -> float:
    """How far a setting is above its usual value, as a logarithm."""
    if name == "structure":
        return 1.0  # its growth is a logarithm already
    usual = preset_values(config.task, "cpu") | _USUAL
    value = getattr(config, name)
    return log(value / usual[name]) if value and usual.get(name) else 0.0


def _weight_growth(config: RunConfig, sizes: tuple[int, int]) -> dict[str, float]:
    growth = {"width": 2.0, "depth": 1.0, "num_experts": 1.0}
    if config.positions == "learned" and config.task == "text":
        growth["context"] = 1.0
    if config.structure != "dense":
        growth["structure"] = _structure_excess(config, sizes)
    return growth


def _structure_excess(config: RunConfig, sizes: tuple[int, int]) -> float:
    """The logarithm of the ratio of weights, structured by dense."""
    small = replace(config, depth=2, num_experts=0)
    plain = replace(small, structure="dense", head_aligned=None, convert_head=False)
    try:
        with torch.device("meta"):
            own, dense = (count_model(make_shape(c, sizes), 1).params for c in (small, plain))
    except (RuntimeError, OverflowError, TypeError, NoRoomError):
        return 0.0
    return log(own / dense)


def _regression_needs(config: RunConfig) -> list[Need]:
    """The teacher, its answers to a batch, the whole batch and the whole validation set."""
    width, depth = config.teacher_width, config.teacher_depth
    assert width is not None, "regression has a teacher"
    assert depth is not None, "regression has a teacher"
    weights = IN_FEATURES * width + max(0, depth - 2) * width**2 + width
    grows = {"teacher_width": 2.0, "teacher_depth": 1.0}
    row = _FLOAT * (IN_FEATURES + 1)
    return [
        Need("the teacher", _FLOAT * weights + _TENSOR * depth, grows),
        Need(
            "the teacher's answers",
            _FLOAT * config.batch_size * width // config.accumulation,
            {"batch_size": 1.0, "teacher_width": 1.0},
        ),
        Need("a batch", row * config.batch_size, {"batch_size": 1.0}, False),
        Need("the validation set", row * config.eval_size, {"eval_size": 1.0}),
    ]


def _sizes(config: RunConfig) -> tuple[int, int]:
    """The sizes of a model that its task decides, as `sizes_of`; a lower bound."""
    length, outputs = _lengths(config)
    return (outputs, length) if config.task in SEQUENCE_TASKS else (IN_FEATURES, outputs)


def _lengths(config: RunConfig) -> tuple[int, int]:
    """Units of a row, and outputs for each; 1 where only the data decides."""
    if config.task == "text":
        assert config.context is not None, "text has a context"
        return config.context, 50257 if config.vocabulary == "gpt2" else 96
    return (PIXELS, VALUES) if config.task == "pixels" else (1, 1)
