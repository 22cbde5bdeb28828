"""Whether a report can show the numbers of a run; one odd record must not end a report."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import isfinite

from einlinear.errors import quote
from einlinear.studies.config import RunConfig
from einlinear.studies.record import LayerRouting, Point, RunRecord

LEAST, MOST = 1e-100, 1e100
"""Where numbers of a report lie, unless they are 0: beyond, logarithms and ratios break down."""

_COUNTS = ("params", "macs", "linear_macs", "head_macs", "attention_macs", "norm_macs")


def check_config(config: RunConfig) -> None:
    """Refuse, by a ValueError, settings that a report cannot show."""
    if abs(config.seed) >= 2**63:
        raise ValueError(f"its seed is {quote(config.seed)}, not below 2^63")
    for name in ("width", "depth", "steps", "warmup", "num_experts", "num_active"):
        _whole(getattr(config, name), name)


def check_record(record: RunRecord) -> None:
    """Refuse, by a ValueError, numbers that a report cannot show."""
    if record.status not in ("finished", "diverged"):
        raise ValueError(f"its status is {quote(record.status)}")
    if not isinstance(record.environment, Mapping):
        raise ValueError(f"its environment is {quote(record.environment)}")
    check_config(record.config)
    for name in ("steps_done", "peak_bytes"):
        _whole(getattr(record, name), name)
    for name in _COUNTS:
        _whole(getattr(record.counts, name), name)
    check_points(record.curve)


def check_points(points: Sequence[Point]) -> None:
    """Refuse, by a ValueError, a curve that a report cannot show."""
    for point in points:
        for name in ("step", "units", "macs"):
            _whole(getattr(point, name), name)
        for name in ("seconds", "data_seconds", "rate"):
            _number(getattr(point, name), name)
        for name in ("loss", "train_loss"):
            if getattr(point, name) is not None:
                _number(getattr(point, name), name)
    shapes = {_shape(point.routing) for point in points if point.routing}
    if len(shapes) > 1:
        raise ValueError("its layers of experts differ from point to point")


def _shape(routing: tuple[LayerRouting, ...]) -> tuple[tuple[str, int], ...]:
    """The name and the number of experts of each layer."""
    for layer in routing:
        if not isinstance(layer.layer, str) or not layer.load:
            raise ValueError(f"a layer of experts is {quote(layer)}")
        for value in (*layer.load, layer.entropy):
            _number(value, "a load or its entropy")
    return tuple((layer.layer, len(layer.load)) for layer in routing)


def is_shown(value: float) -> bool:
    """Whether a number is 0, or lies where a report can show it."""
    return value == 0 or (isfinite(value) and LEAST <= value <= MOST)


def _whole(value: object, name: str) -> None:
    if not isinstance(value, int) or isinstance(value, bool) or not 0 <= value <= MOST:
        raise ValueError(f"its {name} is {quote(value)}, not a whole number up to {MOST:g}")


def _number(value: object, name: str) -> None:
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    # Whole numbers may have no float; compared with one they are exact.
    if not is_number or not (value == 0 or LEAST <= value <= MOST):  # type: ignore[operator]
        raise ValueError(f"its {name} is {quote(value)}, not 0, nor {LEAST:g} to {MOST:g}")
