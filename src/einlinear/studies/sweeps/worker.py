"""A worker process: reads jobs, one JSON object in a line, runs them, writes how they ended.

Before its first job it may be asked for the plan of the sweep. It leaves as soon as its input
ends, be it by the death of the process that started it.
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
from einlinear.studies.sweeps.job import Job
from einlinear.studies.sweeps.plan import PlanRequest


def main() -> None:
    """Run jobs until there are no more."""
    # Whatever prints to the standard output must not be taken for an answer.
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    print(file=answers, flush=True)  # ends what was printed before, while Python started
    faulthandler.enable()
    requests: SimpleQueue[Job | PlanRequest] = SimpleQueue()
    Thread(target=_read, args=(requests,), daemon=True).start()
    # Torch takes seconds to load, in which the input may end.
    from einlinear.studies.sweeps.run_job import load_all, run_job

    if requests.empty():
        load_all()
    while True:
        request = requests.get()
        if isinstance(request, Job):
            answer = asdict(run_job(request))
        else:
            answer = _plan(request, lambda: print(file=answers, flush=True))
        # In a line of its own, whatever else was printed there.
        print("\n" + json.dumps(answer), file=answers, flush=True)


def _plan(request: PlanRequest, on_model: Callable[[], None] = lambda: None) -> dict[str, Any]:
    """The plan of a sweep, or why there is none; says that it goes on after every model."""
    from einlinear.studies.sweeps.planner import make_plan

    try:
        return {"runs": [run.as_dict() for run in make_plan(request, on_model)]}
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
    finally:  # also after a line that was cut off, by the death of who wrote it
        os._exit(0)


if __name__ == "__main__":
    try:
        main()
    except BaseException:  # as torch that cannot be loaded
        traceback.print_exc()
        os._exit(1)  # Python itself would abort, over the input that a thread still reads
