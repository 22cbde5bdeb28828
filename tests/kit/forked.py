"""Processes forked from one that has loaded torch, so that none loads it again."""

import multiprocessing
import os
import runpy
import sys
import warnings
from multiprocessing import forkserver
from multiprocessing.connection import Connection
from subprocess import PIPE, TimeoutExpired
from tempfile import TemporaryFile
from types import SimpleNamespace

from einlinear.sweeps.executors import child, worker

# Slow imports. Modules of the tests cannot be listed: the server does not find them.
LOADED = ["torch._dynamo", "torch.testing", "torch.distributed.fsdp", "hypothesis", "pytest"]
LOADED += ["einlinear.cli.main", "einlinear.training.train", "einlinear.training.devices.sharded"]
LOADED += ["einlinear.sweeps.sweep", "einlinear.sweeps.executors.worker"]
LOADED += ["einlinear.sweeps.run_job", "einlinear.sweeps.planner"]

context = multiprocessing.get_context("forkserver")
context.set_forkserver_preload(LOADED)


def fork_workers(begin=None, *arguments):
    """A stand-in for the module subprocess: forks workers, which call `begin` first if given."""

    def popen(command, *, stdin, stdout, stderr, env, start_new_session):
        assert command[-1] == worker.__name__
        assert start_new_session
        return _ForkedProcess(stderr, env, begin, arguments)

    return SimpleNamespace(Popen=popen, PIPE=PIPE, TimeoutExpired=TimeoutExpired)


class _ForkedProcess:
    """What an executor uses of subprocess.Popen."""

    def __init__(self, stderr, env, begin, arguments):
        jobs, requests = context.Pipe(duplex=False)
        answers, said = context.Pipe(duplex=False)
        pipes = (jobs, said, Connection(os.dup(stderr.fileno())))
        place = os.getcwd(), dict(env)
        self._process = context.Process(target=_work, args=(pipes, *place, begin, arguments))
        self._process.start()
        for pipe in pipes:
            pipe.close()
        self.stdin = os.fdopen(os.dup(requests.fileno()), "wb")
        self.stdout = os.fdopen(os.dup(answers.fileno()), "rb")
        requests.close()
        answers.close()

    def poll(self):
        return self._process.exitcode

    def kill(self):
        self._process.kill()

    def terminate(self):
        self._process.terminate()

    def wait(self, timeout=None):
        self._process.join(timeout)
        if self._process.exitcode is None:
            raise TimeoutExpired("worker", timeout)
        return self._process.exitcode


def _work(pipes, folder, environment, begin, arguments):
    os.setsid()
    os.chdir(folder)
    os.environ.clear()
    os.environ.update(environment)
    for number, pipe in enumerate(pipes):
        os.dup2(pipe.fileno(), number)
        pipe.close()
    sys.stdin = open(0, closefd=False)
    if begin is not None:
        begin(*arguments)
    worker.main()


def use_forked_workers(monkeypatch):
    """Fork the workers of sweeps for the rest of a test."""
    monkeypatch.setattr(child, "subprocess", fork_workers())


def run_script(path, *arguments, seconds=300):
    """Run a script with warnings as errors, in a forked process; return what it printed."""
    with TemporaryFile("w+", encoding="utf-8") as printed:
        output = Connection(os.dup(printed.fileno()))
        process = context.Process(target=_script, args=(output, str(path), arguments))
        process.start()
        output.close()
        process.join(seconds)
        process.kill()
        process.join()
        printed.seek(0)
        text = printed.read()
    assert process.exitcode == 0, text
    return text


def _script(output, path, arguments):
    for number in (1, 2):
        os.dup2(output.fileno(), number)
    # Workers of a sweep come from the server of this process, not from another one.
    forkserver._forkserver.ensure_running = lambda: None
    child.subprocess = fork_workers()
    warnings.simplefilter("error")
    sys.argv = [path, *arguments]
    sys.path.insert(0, os.path.dirname(path))  # as Python does, so that it finds its neighbours
    runpy.run_path(path, run_name="__main__")
