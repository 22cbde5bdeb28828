"""A worker process: reads jobs, one JSON object in a line, runs them, writes how they ended.

It leaves as soon as its input ends, be it by the death of the process that started it.
"""

from __future__ import annotations

import faulthandler
import json
import os
import sys
from dataclasses import asdict
from queue import SimpleQueue
from threading import Thread

from einlinear.studies.sweeps.job import Job


def main() -> None:
    """Run jobs until there are no more."""
    # Whatever prints to the standard output must not be taken for an answer.
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    faulthandler.enable()
    jobs: SimpleQueue[Job] = SimpleQueue()
    Thread(target=_read, args=(jobs,), daemon=True).start()
    # Torch takes seconds to load, in which the input may end.
    from einlinear.studies.sweeps.run_job import run_job

    while True:
        print(json.dumps(asdict(run_job(jobs.get()))), file=answers, flush=True)


def _read(jobs: SimpleQueue[Job]) -> None:
    try:
        for line in sys.stdin.buffer:
            jobs.put(Job(**json.loads(line)))
    finally:  # also after a line that was cut off, by the death of who wrote it
        os._exit(0)


if __name__ == "__main__":
    main()
