"""The time of a model before and after conversion, measured in turns."""

from __future__ import annotations

from collections.abc import Callable
from statistics import median

import torch
from torch import nn

from einlinear.bench.doctor.checks import random_measure, trained_parameters
from einlinear.bench.doctor.inputs import tensors_of
from einlinear.bench.doctor.reasons import Note
from einlinear.bench.doctor.subject import Subject
from einlinear.bench.recommend import rounds_for
from einlinear.bench.rows import timing_fields
from einlinear.layers.measure import interleaved
from einlinear.show.numbers import short

_ALIKE = (0.95, 1.05)
_BUSY = 2.0  # how far apart the ends of the interval are on a machine that counts as busy


def check_speed(
    subject: Subject, *, has_backward: bool, on_progress: Callable[[str], None] | None = None
) -> Note:
    """How many times faster the model is after conversion, with its own input."""
    act = _training_step if has_backward else _inference
    models = {"dense": subject.plain(), "structured": subject.converted()}
    actions = {name: act(subject, model) for name, model in models.items()}
    rounds = rounds_for(actions, on_progress)
    times = interleaved(actions, rounds, on_progress=on_progress)
    fields = timing_fields(times["dense"], times["structured"])
    speed, low, high = fields["speed"], fields["low"], fields["high"]
    before, after = [1e3 * median(seconds) for seconds in times.values()]
    return Note(
        f"{short(before)} ms -> {short(after)} ms, {_comparison(speed, low, high)}"
        + f"; einlinear recommend --model {subject.name} says which layers gain" * (high < 1),
        {
            "speed": speed,
            "low": low,
            "high": high,
            "rounds": fields["rounds"],
            "milliseconds_before": before,
            "milliseconds_after": after,
        },
    )


def _comparison(speed: float, low: float, high: float) -> str:
    if _ALIKE[0] <= speed <= _ALIKE[1]:
        word = "about as fast"
    elif low <= 1 <= high:
        word = "no difference beyond the noise"
    else:
        word = f"{short(speed)} x the speed"
    busy = "; the machine is busy, measure again when it is idle" * (high > _BUSY * low)
    return f"{word} ({short(low)} to {short(high)} x){busy}"


def _inference(subject: Subject, model: nn.Module) -> Callable[[], object]:
    model.eval()

    def run() -> None:
        with torch.no_grad():
            subject.inputs.call(model)

    return run


def _training_step(subject: Subject, model: nn.Module) -> Callable[[], object]:
    parameters = list(trained_parameters(model.train()).values())

    def run() -> None:
        measure = random_measure(tensors_of(subject.inputs.call(model)))
        torch.autograd.grad(measure, parameters, allow_unused=True)

    return run
