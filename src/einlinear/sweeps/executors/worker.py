"""A worker process: reads jobs, one JSON object per line, runs them, and writes their outcomes.

Before its first job it may be asked for the plan of the sweep. It leaves as soon as its input
ends, even if the process that started it was killed.
"""

from __future__ import annotations

import faulthandler
import json
import os
import sys
import traceback
from collections.abc import Callable
from dataclasses import asdict
from queue import SimpleQueue
from threading import Thread
from typing import Any

from einlinear.errors import EinlinearError
from einlinear.layers.engine.memory import keep_memory_if_possible
from einlinear.sweeps.executors.child import speak
from einlinear.sweeps.job import Job
from einlinear.sweeps.plan import PlanRequest


def main() -> None:
    """Run jobs until there are no more."""
    tell = speak()
    faulthandler.enable()
    keep_memory_if_possible()
    requests: SimpleQueue[Job | PlanRequest] = SimpleQueue()
    Thread(target=_read, args=(requests,), daemon=True).start()
    # Torch takes seconds to load; the input may end meanwhile.
    from einlinear.sweeps.run_job import load_all, run_job

    if requests.empty():
        load_all()
    while True:
        request = requests.get()
        if isinstance(request, Job):
            tell(asdict(run_job(request)))
        else:
            tell(_plan(request, lambda: tell(None)))


def _plan(request: PlanRequest, on_model: Callable[[], None] = lambda: None) -> dict[str, Any]:
    """The plan of a sweep, or the reason there is none."""
    from einlinear.sweeps.planner import plan_study

    try:
        return {"runs": [run.as_dict() for run in plan_study(request, on_model)]}
    except EinlinearError as error:
        return {"wrong": {"what": error.what, "rule": error.rule, "fix": error.fix}}
    except Exception:
        return {"raised": traceback.format_exc()}


def _read(requests: SimpleQueue[Job | PlanRequest]) -> None:
    kinds = {"job": Job, "plan": PlanRequest}
    try:
        for line in sys.stdin.buffer:
            for kind, values in json.loads(line).items():
                requests.put(kinds[kind](**values))
    finally:  # also after a line cut off by the death of its writer
        os._exit(0)


if __name__ == "__main__":
    try:
        main()
    except BaseException:  # for example, torch cannot be loaded
        traceback.print_exc()
        os._exit(1)  # a normal exit would abort because a thread is still reading the input
