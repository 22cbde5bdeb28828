"""Times of steps that nobody has measured."""

from einlinear.runs.shape import step_key
from einlinear.runs.step_times import ModelTime, StepTimes


def times_of(*configs, seconds=0.5):
    """The same time for the models of some runs."""
    made = [
        ModelTime(step_key(c), c.structure, c.width, seconds, 0.4, 0.6, 64, "token")
        for c in configs
    ]
    return StepTimes(tuple(made), "2026-01-02T03:04:05Z", 9, {"threads": 1, "torch": "2.13.0"})
