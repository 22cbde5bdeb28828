"""Replace the seconds of runs by their steps times the measured time of a step."""

from __future__ import annotations

from dataclasses import replace

from einlinear.errors import EinlinearError
from einlinear.laws.observations import spent_at
from einlinear.reports.shown import Gathered, ShownRun
from einlinear.runs.step_times import StepTimes


def with_times(gathered: Gathered, times: StepTimes) -> Gathered:
    """The same runs with measured seconds; refuses a finished run whose model was not measured.

    Clocks are never mixed: a run without a record whose model was not measured has no seconds.
    """
    if gathered.kind == "table":
        raise EinlinearError(
            what=f"times are given, and {gathered.source} is a table",
            rule="times of steps belong to the models of runs; a table has its own compute",
            fix="give the directory of the runs, or leave the times out",
        )
    runs = tuple(_with_time(run, times) for run in gathered.runs)
    return replace(gathered, runs=runs, times=times)


def _with_time(run: ShownRun, times: StepTimes) -> ShownRun:
    assert run.config is not None, "only the runs of a table have no config"
    if run.record is None and times.find(run.config) is None:
        spent = {name: values for name, values in run.spent.items() if name != "seconds"}
        return replace(run, spent=spent, seconds=None, units_per_second=None)
    step = times.seconds_of(run.config)
    seconds = tuple(spent_at(point, "seconds", None, step) for point in run.curve)
    rate = run.curve[-1].units / seconds[-1] if seconds and seconds[-1] else None
    return replace(
        run,
        spent={**run.spent, "seconds": seconds},
        seconds=seconds[-1] if seconds else None,
        units_per_second=rate,
    )


def about_times(gathered: Gathered) -> tuple[str, ...]:
    """The sentence that says what seconds are, if they are not those of the runs' clocks."""
    if gathered.times is None:
        return ()
    but = "" if gathered.search is None else " Those of the search itself are as recorded."
    text = f"Seconds are steps times the time of a step of each model, {gathered.times.origin}."
    return (text + but,)
