"""Two processes that know each other and run one piece of work after another."""

import os
import socket
import sys
import time
import traceback
from datetime import timedelta
from multiprocessing.connection import wait

import torch
import torch.distributed as dist
import torch.multiprocessing  # teaches pipes to send tensors

from kit.forked import context


def run_two(work, *arguments):
    """Run work(rank, *arguments) in two processes of its own."""
    pair = Pair()
    try:
        pair.run(work, *arguments)
    finally:
        pair.stop()


class Pair:
    """Starts its processes when they are needed, and again when some work has failed."""

    def __init__(self):
        self.processes, self.pipes = [], []

    def run(self, work, *arguments):
        """Run work(rank, *arguments) in both processes; fail as the first that does."""
        if not self.processes:
            self.start()
        for pipe in self.pipes:
            pipe.send((work, arguments))
        deadline = time.monotonic() + 120
        waiting = list(self.pipes)
        try:
            while waiting:
                ready = wait(waiting, max(0.0, deadline - time.monotonic()))
                assert ready, "the processes wait for each other"
                for pipe in ready:
                    failure = pipe.recv()
                    assert failure is None, failure
                    waiting.remove(pipe)
        except BaseException:
            self.stop()
            raise

    def start(self):
        with socket.socket() as s:
            s.bind(("127.0.0.1", 0))
            port = s.getsockname()[1]
        for rank in range(2):
            here, there = context.Pipe()
            process = context.Process(target=serve, args=(rank, port, there), daemon=True)
            process.start()
            there.close()
            self.processes.append(process)
            self.pipes.append(here)

    def stop(self):
        for process, pipe in zip(self.processes, self.pipes, strict=True):
            process.kill()
            process.join()
            process.close()
            pipe.close()
        self.processes, self.pipes = [], []


def serve(rank, port, pipe):
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    torch.set_num_threads(1)
    dist.init_process_group("gloo", rank=rank, world_size=2, timeout=timedelta(seconds=60))
    while True:
        try:
            work, arguments = pipe.recv()
        except EOFError:
            sys.stderr.flush()
            os._exit(0)
        try:
            torch.manual_seed(0)
            work(rank, *arguments)
            pipe.send(None)
        except BaseException:
            pipe.send(f"rank {rank}: {traceback.format_exc()}")
