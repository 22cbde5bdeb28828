"""What a run needs in memory, from its settings alone; refused before anything is built."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from math import log

import torch

from einlinear.errors import EinlinearError, quote
from einlinear.layers.room import NoRoomError
from einlinear.machine import memory_bytes
from einlinear.studies.build import make_shape
from einlinear.studies.config import RunConfig
from einlinear.studies.counting import count
from einlinear.studies.distributed import Place
from einlinear.studies.numbers import amount
from einlinear.studies.presets import SEQUENCE_TASKS, preset_values
from einlinear.studies.record import Counts
from einlinear.studies.tasks.pixels import PIXELS, VALUES
from einlinear.studies.tasks.regression import IN_FEATURES

_FLOAT = 4
_MOST = 2**63  # bytes of a tensor, which torch cannot have
_OBJECTS = 20_000  # bytes of the Python objects of a block, at least
_TENSOR = 500  # the same of a tensor
_POINT = 500  # the same of a point of the curve

# Numbers that a block keeps for the backward pass, for each unit and each number of the width: less
# than was measured. Checked by: test_needs.py::test_needs_are_below_what_was_measured.
_KEPT = {"text": 16.0, "pixels": 16.0, "regression": 9.0, "cifar": 0.5}
_HALF = 0.5  # of that with bfloat16
_USUAL = {"num_experts": 8, "num_active": 2}  # all others by the preset


@dataclass(frozen=True, slots=True)
class Need:
    """A part of what a run needs: how many bytes, at least.

    growth: the settings that decide it, with the power by which it grows with each.
    is_moved: whether it is on the device of the run, not in the memory of the machine.
    """

    name: str
    bytes: int
    growth: Mapping[str, float]
    is_moved: bool = True


def count_shape(config: RunConfig, sizes: tuple[int, int], length: int) -> Counts:
    """The counts of a model from shapes alone, in a time that does not depend on its depth.

    All counts grow by the same amount with every block, so that two small models tell them.
    Checked by: test_needs.py::test_counts_of_deep_models.
    """

    def counted(depth: int) -> Counts:
        with torch.device("meta"):
            return count(make_shape(replace(config, depth=depth), sizes), length)

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
    """What a run needs in one of its processes, part by part; less than it takes in fact.

    Args:
        config: of the run.
        processes: of the run.
        is_moved: whether weights are made here and then moved to a device of its own.
    """
    length, outputs = _lengths(config)
    sizes = _sizes(config)
    params = count_shape(config, sizes, length).params
    # Weights, gradients, two moments; the average. While that is in use there are no gradients, but
    # the weights that it stands for.
    copies = 4 + bool(config.ema)
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
    """About how many multiply-adds a step has, forward; those of a teacher included, by time."""
    length, _ = _lengths(config)
    macs = count_shape(config, _sizes(config), length).macs * length
    if config.teacher_width is not None and config.teacher_depth is not None:
        macs += max(0, config.teacher_depth - 2) * config.teacher_width**2 // 3  # it only answers
    return macs * config.batch_size


def check_needs(config: RunConfig, place: Place | None = None) -> None:
    """Refuse a run that needs more memory than there is here; what is not known is not checked."""
    processes = 1 if place is None else place.count
    is_moved = place is not None and place.device.type == "cuda"
    parts = needs(config, processes, is_moved=is_moved)
    if is_moved:
        assert place is not None, "a device is that of a place"
        have = int(torch.cuda.mem_get_info(place.device)[1])
        _check(config, [part for part in parts if part.is_moved], have, "the GPU")
        parts = [part for part in parts if not part.is_moved]
    memory = memory_bytes()
    if memory is not None:
        _check(config, parts, memory, "this machine")


def fits(config: RunConfig) -> bool:
    """Whether a run has enough memory on this machine, as far as is known."""
    try:
        check_needs(config)
    except EinlinearError:
        return False
    return True


def _check(config: RunConfig, parts: Sequence[Need], have: int, who: str) -> None:
    if sum(part.bytes for part in parts) > have:
        raise _too_large(config, parts, f"{who} has {amount(have)}B")


def _too_large(config: RunConfig, parts: Sequence[Need], limit: str) -> EinlinearError:
    """Names the setting that is farthest above the usual, in the part that needs the most."""
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
    """How far a setting is above the usual, as a logarithm; for a structure, against dense."""
    if name == "structure":
        return 1.0  # its growth is the logarithm already
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
    """How many times the weights of dense layers a structure has, as a logarithm."""
    small = replace(config, depth=2, num_experts=0)
    plain = replace(small, structure="dense", head_aligned=None, convert_head=False)
    try:
        with torch.device("meta"):
            own, dense = (count(make_shape(c, sizes), 1).params for c in (small, plain))
    except (RuntimeError, OverflowError, TypeError, NoRoomError):
        return 0.0
    return log(own / dense)


def _regression_needs(config: RunConfig) -> list[Need]:
    """The teacher, its answers to a batch, the batch and the validation set, all of them whole."""
    width, depth = config.teacher_width, config.teacher_depth
    assert width is not None, "regression has a teacher"
    assert depth is not None, "regression has a teacher"
    weights = IN_FEATURES * width + max(0, depth - 2) * width**2 + width
    grows = {"teacher_width": 2.0, "teacher_depth": 1.0}
    row = _FLOAT * (IN_FEATURES + 1)
    return [
        Need("the teacher", _FLOAT * weights + _TENSOR * depth, grows, False),
        Need(
            "the teacher's answers",
            _FLOAT * config.batch_size * width // config.accumulation,
            {"batch_size": 1.0, "teacher_width": 1.0},
            False,
        ),
        Need("a batch", row * config.batch_size, {"batch_size": 1.0}, False),
        Need("the validation set", row * config.eval_size, {"eval_size": 1.0}, False),
    ]


def _sizes(config: RunConfig) -> tuple[int, int]:
    """What the task decides of a model, as `build.sizes_of` has it, at least."""
    length, outputs = _lengths(config)
    return (outputs, length) if config.task in SEQUENCE_TASKS else (IN_FEATURES, outputs)


def _lengths(config: RunConfig) -> tuple[int, int]:
    """Units of a row, and outputs for each, at least: what only the data knows counts as 1."""
    if config.task == "text":
        assert config.context is not None, "text has a context"
        return config.context, 50257 if config.vocabulary == "gpt2" else 96
    return (PIXELS, VALUES) if config.task == "pixels" else (1, 1)
