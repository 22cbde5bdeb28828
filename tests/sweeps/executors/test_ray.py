"""Jobs on Ray: real clusters, real deaths; a stand-in only for machines that are not here."""

import json
import os
import signal
import socket
import subprocess
import sys
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from queue import SimpleQueue
from secrets import token_hex
from types import SimpleNamespace

import pytest

from einlinear import EinlinearError
from einlinear.sweeps.claims import claimed
from einlinear.sweeps.executors import child
from einlinear.sweeps.executors import ray as on_ray
from einlinear.sweeps.executors.ray import RayExecutor
from einlinear.sweeps.executors.ray_driver import Cluster, serve
from einlinear.sweeps.job import Outcome
from einlinear.sweeps.placing import Placing, opened
from einlinear.sweeps.study import Study
from einlinear.sweeps.sweep import plan_sweep, prepare_directory, run_sweep, sweep
from kit.forked import use_forked_workers
from kit.jobs import all_ended, assert_trained, first_checkpoint, is_gone, tiny_job, wait_for
from kit.runs import TINY, numbers, without_clock

LONG = {"steps": 300, "checkpoint_every": 10}
ENDLESS = {"steps": 100_000, "checkpoint_every": 10}


@pytest.fixture(scope="module")
def ray_here():
    """A cluster on this machine, with room for two jobs."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("RAY_gcs_rpc_server_reconnect_timeout_s", "1")
        executor = open_cluster()
    yield executor
    executor.close()


def open_cluster(tries=3):
    """A cluster for two jobs. Ray gives it 30 seconds to start, too few on a busy, slow machine."""
    try:
        return RayExecutor(None, 1, cpus=2)
    except EinlinearError as error:
        if tries == 1 or "timed out during startup" not in str(error):
            raise
        return open_cluster(tries - 1)


@pytest.mark.slow
def test_jobs_end_in_any_way(ray_here, tmp_path):
    out, elsewhere = tmp_path / "sweep", tmp_path / "other"
    out.mkdir()
    elsewhere.mkdir()
    good = [tiny_job(out, seed=seed) for seed in (1, 2, 3)]
    bad = tiny_job(out, data=str(tmp_path / "nothing.txt"))
    unseen = replace(tiny_job(out, seed=4), out=str(elsewhere))
    assert ray_here.slots == 2
    for job in (*good, bad, unseen):
        ray_here.start(job)
    outcomes = all_ended(ray_here, 5)
    assert [outcomes[job.id].end for job in good] == ["done"] * 3
    assert outcomes[bad.id].end == outcomes[unseen.id].end == "error"
    assert f"there is no file {tmp_path / 'nothing.txt'}" in outcomes[bad.id].text
    assert f"there is no {elsewhere / 'studies'} on the machine" in outcomes[unseen.id].text
    assert not list(elsewhere.iterdir())
    assert_trained(good[1], tmp_path / "plain", seed=2)
    assert not (Path.home() / ".ray" / "auth_token").exists() or "RAY_AUTH_TOKEN" in os.environ
    assert ray_here.ended(0.0) == []


def test_a_killed_worker_and_its_run(ray_here, tmp_path):
    job = tiny_job(tmp_path, **LONG)
    ray_here.start(job)
    os.kill(first_checkpoint(job), signal.SIGKILL)
    outcome = all_ended(ray_here, 1)[job.id]
    assert outcome.end == "killed"
    assert "worker died" in outcome.text
    before = (job.directory / "metrics.jsonl").read_bytes().splitlines()[0]  # with its time
    end = "busy"  # as long as the system has not yet let go of what the worker held
    while end == "busy":
        ray_here.start(job)
        end = all_ended(ray_here, 1)[job.id].end
    assert end == "done"
    assert (job.directory / "metrics.jsonl").read_bytes().splitlines()[0] == before
    assert_trained(job, tmp_path / "plain", **LONG)


@pytest.mark.slow
def test_twelve_runs_and_a_death(ray_here, tmp_path, monkeypatch):
    use_forked_workers(monkeypatch)  # for the plan
    study = Study("twelve", TINY, ({"structure": ["dense", "btt"], "seed": list(range(6))},))
    out, plain, killed = tmp_path / "sweep", tmp_path / "plain", []

    def kill_one(at):
        owners = [claimed(out / "runs" / run.id).get("pid") for run in at.running]
        if not killed and at.finished >= 3 and any(owners):
            killed.append(next(filter(None, owners)))
            with suppress(ProcessLookupError):  # its run has just ended
                os.kill(killed[0], signal.SIGKILL)

    plan = plan_sweep(study, prepare_directory(study, out), Placing("ray", threads=1), ray_here)
    assert (len(plan.runs), plan.slots) == (12, 2)
    result = run_sweep(plan, ray_here, kill_one)
    assert killed
    assert not result.failures
    other = sweep(study, plain, executor="inline", threads=1)
    assert [*map(without_clock, result.records)] == [*map(without_clock, other.records)]
    for run in plan.runs:
        assert numbers(out / "runs" / run.id) == numbers(plain / "runs" / run.id)


def test_a_cluster_is_lost(ray_here, tmp_path):  # the last one on it
    job = tiny_job(tmp_path, **ENDLESS)
    ray_here.start(job)
    worker = first_checkpoint(job)
    parts = children(ray_here._child.process.pid)
    (server,) = (pid for pid, name in parts.items() if "gcs_server" in name)
    os.kill(server, signal.SIGKILL)
    with pytest.raises(EinlinearError, match="cluster on this machine cannot be reached: the conn"):
        wait_for(lambda: ray_here.ended(0.2))
    ray_here._child.wait(60)
    with pytest.raises(EinlinearError, match="cannot be reached"):
        ray_here.start(job)
    wait_for(lambda: all(map(is_gone, [worker, *parts])))


@pytest.fixture
def ray_head(monkeypatch):
    """A cluster of its own, that others join: its process and its address."""
    monkeypatch.setenv("RAY_AUTH_MODE", "token")
    monkeypatch.setenv("RAY_AUTH_TOKEN", token_hex(16))
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        port = s.getsockname()[1]
    command = [str(Path(sys.executable).parent / "ray"), "start", "--head", f"--port={port}"]
    options = ["--num-cpus=1", "--include-dashboard=false", "--disable-usage-stats", "--block"]
    memory = "--object-store-memory=100000000"
    head = subprocess.Popen(
        [*command, *options, memory], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )
    wait_for(lambda: any("raylet" in name for name in children(head.pid).values()))
    yield head, f"127.0.0.1:{port}"
    for pid in children(head.pid):
        os.kill(pid, signal.SIGKILL)
    head.kill()
    head.wait()


def children(parent):
    """The processes that a process has started, with what they are."""
    found = {}
    for path in Path("/proc").glob("[0-9]*"):
        try:
            fields = (path / "stat").read_text(encoding="utf-8").rpartition(")")[2].split()
            name = (path / "cmdline").read_bytes().split(b"\0")[0].decode()
        except OSError:
            continue
        if int(fields[1]) == parent:
            found[int(path.name)] = name
    return found


@pytest.mark.slow
def test_join_a_cluster_and_leave_it(ray_head, tmp_path):
    head, address = ray_head
    executor = RayExecutor(address, 1)
    try:
        assert executor.slots == 1
        job = tiny_job(tmp_path, **ENDLESS)
        executor.start(job)
        worker = first_checkpoint(job)
    finally:
        executor.close()
    wait_for(lambda: is_gone(worker))
    assert head.poll() is None, "only the jobs end"


def run_instead(monkeypatch, command):
    """Start a command where the executor would start the process that talks to Ray."""
    right = subprocess.Popen
    monkeypatch.setattr(child.subprocess, "Popen", lambda _, **options: right(command, **options))


def answer_with(monkeypatch, line):
    run_instead(monkeypatch, ["sh", "-c", f"echo '{line}'"])


def test_jobs_that_no_machine_has_room_for(monkeypatch):
    answer_with(monkeypatch, '{"largest": 4.0, "slots": 1}')
    with pytest.raises(EinlinearError, match="threads are 5, and the largest machine has 4 CPUs"):
        RayExecutor("auto", 5)
    executor = RayExecutor("auto", 4)
    assert executor.slots == 1
    executor.close()


@pytest.mark.parametrize(("most", "slots"), [(None, 5), (3, 3), (8, 5)])
def test_no_more_at_once_than_asked_for(monkeypatch, tmp_path, most, slots):
    answer_with(monkeypatch, '{"largest": 4.0, "slots": 5}')
    with opened(Placing("ray", most, 1), tmp_path) as executor:
        assert executor.slots == slots


def test_what_is_printed_beside_answers_is_none(monkeypatch):
    """As what files of a site print while Python starts."""
    lines = ["hello", "[1]", '{"a": 1}', "[" * 1000, "", '{"slots": 2, "largest": 1.0}']
    answer_with(monkeypatch, "\n".join(lines))
    executor = RayExecutor("auto", 1)
    assert executor.slots == 2
    executor.close()
    assert child._object(b"[" * 100_000) is None
    assert Outcome.from_dict({"id": "a", "end": "done"}) == Outcome("a", "done")
    for values in ([], {"id": "a"}, {"id": 1, "end": "done"}, {"id": "a", "end": "done", "x": 1}):
        assert Outcome.from_dict(values) is None


def test_a_cluster_that_never_answers(monkeypatch):
    run_instead(monkeypatch, ["cat"])
    monkeypatch.setattr(on_ray, "OPEN_SECONDS", 0.3)
    with pytest.raises(EinlinearError, match=r"cannot be reached: no answer for 0.005 minutes"):
        RayExecutor(None, 1)


def test_nobody_listens():
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))  # the port is taken, and silent
        address = f"127.0.0.1:{s.getsockname()[1]}"
        with pytest.raises(EinlinearError, match=f"cluster {address} cannot be reached: Connec"):
            RayExecutor(address, 1)


def test_ray_is_not_installed(monkeypatch):
    monkeypatch.setattr(on_ray, "find_spec", lambda name: None)
    with pytest.raises(EinlinearError, match=r'pip install "einlinear\[ray\]"'):
        RayExecutor(None, 1)


class FakeRay(SimpleNamespace):
    """As much of Ray as a cluster asks for, with machines as a test wants them."""

    def __init__(self, *machines):
        super().__init__(machines=list(machines), requests=[], is_closed=False)
        self.exceptions = SimpleNamespace(
            RayTaskError=KeyError, RuntimeEnvSetupError=LookupError, RayError=RuntimeError
        )

    def init(self, address, **options):
        self.opened = address, options

    def nodes(self):
        return [{"Alive": is_alive, "Resources": has} for is_alive, has in self.machines]

    def remote(self, **request):
        self.requests.append(request)
        return lambda function: SimpleNamespace(remote=lambda job: job.id)

    def wait(self, tasks, timeout):
        return tasks[:1], tasks[1:]

    def get(self, task):
        raise self.error

    def cancel(self, task, force):
        self.requests.append((task, force))

    def shutdown(self):
        self.is_closed = True


def machine(cpus, gpus=0, is_alive=True):
    return is_alive, {"CPU": float(cpus), "GPU": float(gpus), "memory": 1e9}


def test_room_follows_the_machines(tmp_path):
    ray = FakeRay(machine(5), machine(3), machine(64, is_alive=False))
    cluster = Cluster(ray, None, 2, None)
    assert cluster.slots == 2 + 1
    assert cluster.largest == 5
    ray.machines.append(machine(8))
    assert cluster.slots == 7
    ray.machines.clear()
    assert (cluster.slots, cluster.largest) == (1, 0)  # a cluster that grows by what waits


def test_gpus_are_asked_for_where_a_run_can_use_them(tmp_path):
    ray = FakeRay(machine(16, gpus=4), machine(2, gpus=8), machine(16))
    cluster = Cluster(ray, "auto", 2, None)
    assert ray.opened[0] == "auto"
    assert "num_cpus" not in ray.opened[1]
    assert cluster.slots == 4 + 1
    cluster.start(tiny_job(tmp_path, device="auto"))
    cluster.start(tiny_job(tmp_path, device="cpu"))
    assert [request["num_gpus"] for request in ray.requests] == [1, 0]
    assert all(request["max_retries"] == 0 for request in ray.requests)
    assert cluster.slots == 8 + 1 + 8  # the last run needs none
    ray.machines = [machine(2)]
    cluster.start(tiny_job(tmp_path, device="auto"))
    assert ray.requests[-1]["num_gpus"] == 0


def test_several_gpus_of_one_machine(tmp_path):
    ray = FakeRay(machine(16, gpus=4), machine(16, gpus=3), machine(4, gpus=8), machine(64))
    cluster = Cluster(ray, "auto", 2, None, devices=2)
    assert cluster.most_gpus == 8
    assert cluster.slots == 2 + 1 + 1
    cluster.start(tiny_job(tmp_path, device="auto"))
    cluster.start(tiny_job(tmp_path, device="cpu"))
    asked = [(request["num_cpus"], request["num_gpus"]) for request in ray.requests]
    assert asked == [(4, 2), (4, 0)]


@pytest.mark.parametrize(
    ("answer", "what"),
    [
        ({"largest": 8.0, "gpus": 2, "slots": 1}, "devices are 4, and the machine with the most"),
        ({"largest": 7.0, "gpus": 0, "slots": 1}, "threads are 2 for each of 4 devices"),
    ],
)
def test_devices_that_no_machine_has(monkeypatch, answer, what):
    answer_with(monkeypatch, json.dumps(answer))
    with pytest.raises(EinlinearError, match=what):
        RayExecutor("auto", 2, devices=4)


@pytest.mark.parametrize(
    ("error", "end"), [(KeyError("no module"), "error"), (RuntimeError("node died"), "killed")]
)
def test_what_ray_raises_is_an_outcome(tmp_path, error, end):
    ray = FakeRay(machine(2))
    ray.error = error
    jobs, told = SimpleQueue(), []

    def tell(values):
        told.append(values)
        if "outcome" in values:
            jobs.put(tiny_job(tmp_path, seed=2))
            jobs.put(None)

    jobs.put(tiny_job(tmp_path))
    cluster = Cluster(ray, None, 1, 2)
    serve(cluster, jobs, tell)
    assert told[0] == {"slots": 2}
    assert told[1]["outcome"]["end"] == end
    assert str(error) in told[1]["outcome"]["text"]
    cluster.close()
    assert ray.is_closed
