"""A pool of workers in a process of its own, of which one is killed."""

import os
import signal
import time

from einlinear.data.workers import worker_pool


def kill_one_at_the_end(which):
    """Kill a worker that has nothing left to do, then leave the pool."""
    with worker_pool(2, time.sleep, (0,)) as pool:
        for future in [pool.submit(time.sleep, 0.5) for _ in range(2)]:
            future.result()
        time.sleep(0.5)  # both wait for more: one for the queue, the other for its lock
        os.kill(list(pool._processes)[which], signal.SIGKILL)
