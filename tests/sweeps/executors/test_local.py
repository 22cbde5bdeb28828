"""Local processes that behave badly, and what a run's directory says after such things."""

import io
import json
import os
import signal
import stat
import subprocess
import sys
import sysconfig
from dataclasses import replace
from queue import SimpleQueue
from time import monotonic
from types import SimpleNamespace

import pytest

from einlinear.errors import EinlinearError
from einlinear.reports.gather import gather
from einlinear.runs.directory import BusyError, RunDirectory
from einlinear.sweeps import planner, run_job
from einlinear.sweeps.claims import Sight, Watch, claimed, take
from einlinear.sweeps.executors import child, local, worker
from einlinear.sweeps.executors.local import LocalExecutor
from einlinear.sweeps.job import Job, finished, keep_failure
from einlinear.sweeps.plan import PlanRequest
from einlinear.sweeps.study import Study
from einlinear.training.train import train
from kit.jobs import wait_for
from kit.runs import tiny

# Half an answer, the other half, and a pipe that ends long before its process does.
ANSWERS = """
job = json.loads(sys.stdin.readline())["job"]
line = json.dumps({"id": job["id"], "end": "done", "text": ""}).encode() + b"\\n"
os.write(1, line[:9])
time.sleep(0.05)
os.write(1, line[9:])
os.close(1)
time.sleep(60)
"""
PLANS = """
asked = json.loads(sys.stdin.readline())["plan"]
if asked["is_timed"]:
    os.kill(os.getpid(), 9)
wrong = {"what": f"is_timed {asked['is_timed']}", "rule": "r", "fix": "f"}
print(json.dumps({"wrong": wrong}), flush=True)
sys.stdin.readline()
"""
PRINTS = """
sys.stdin.readline()
print("hello\\n[1]\\n\\n3\\n{}\\n" + "[" * 100_000)
print(json.dumps({"wrong": {"what": "w", "rule": "r", "fix": "f"}}), flush=True)
asked = json.loads(sys.stdin.readline())["job"]
print('more\\n{"id": 1}\\n' + '{"a":' * 100_000)
print(json.dumps({"id": asked["id"], "end": "done"}), flush=True)
sys.stdin.readline()
"""
SAVES = """
import signal
job = json.loads(sys.stdin.readline())["job"]
path = job["out"] + "/" + job["id"]
def save(number, frame):
    open(path + "-saved", "w").close()
    if job["id"] != "stays":
        os._exit(0)
signal.signal(signal.SIGTERM, save)
open(path + "-began", "w").close()
while True:
    time.sleep(60)
"""
SRC = child.package_path()["PYTHONPATH"]
HANGS = """
request = json.loads(sys.stdin.readline())["plan"]
print("half a line", end="", flush=True)
if not request["study"]:
    time.sleep(60)
for _ in range(3):
    print(flush=True)
print(json.dumps({"wrong": {"what": "after a while", "rule": "r", "fix": "f"}}), flush=True)
sys.stdin.readline()
"""
LEAVES = """
sys.stdin.readline()
os.write(2, b"some last words")
sys.exit(3)
"""


@pytest.fixture
def executor(tmp_path, monkeypatch, request):
    """An executor with one process, which runs the script of the test."""
    script = tmp_path / "script"
    head = f"#!{sys.executable} -IS\nimport json, os, sys, time\n"
    script.write_text(head + request.param, encoding="utf-8")
    script.chmod(0o755)
    monkeypatch.setattr(child, "sys", SimpleNamespace(executable=str(script)))
    made = LocalExecutor(1, 1)
    yield made
    made.close()


def job(name, out="/"):
    return Job(name, str(out), tiny().as_dict(), None, str(out))


def outcome(executor):
    for _ in range(100):
        outcomes = executor.ended(0.1)
        if outcomes:
            return outcomes[0]
    raise AssertionError("no job has ended")


@pytest.mark.parametrize("executor", [ANSWERS], indirect=True)
def test_a_worker_that_answers_and_dies_slowly_gets_no_other_job(executor):
    for name in ("first", "second"):
        executor.start(job(name))
        assert (outcome(executor).id, executor.slots) == (name, 1)
        assert executor.ended(0.3) == []  # the end of its pipe is seen


@pytest.mark.parametrize("executor", [LEAVES], indirect=True)
def test_last_words_of_a_worker(executor):
    executor.start(job("run"))
    ended = outcome(executor)
    assert ended.end == "killed"
    assert ended.text == "the process of the run ended with code 3\nsome last words\n"


@pytest.mark.parametrize("name", ["leaves", "stays"])
@pytest.mark.parametrize("executor", [SAVES], indirect=True)
def test_runs_under_way_may_save_before_they_are_ended(executor, name, tmp_path, monkeypatch):
    monkeypatch.setattr(local, "_SECONDS_TO_SAVE", 60.0 if name == "leaves" else 0.2)
    executor.start(job(name, tmp_path))
    wait_for((tmp_path / f"{name}-began").exists)
    (worker,) = executor._busy
    begin = monotonic()
    executor.close()
    assert monotonic() - begin < 10
    assert (tmp_path / f"{name}-saved").exists()
    assert worker.process.returncode == (0 if name == "leaves" else -signal.SIGKILL)


@pytest.mark.parametrize("executor", [PLANS], indirect=True)
def test_a_plan_is_asked_for_again_if_its_process_dies_but_without_timing(executor):
    with pytest.raises(EinlinearError, match="is_timed False") as told:
        executor.plan(PlanRequest({}, "/", 1))
    assert (told.value.rule, told.value.fix) == ("r", "f")
    executor.start(job("run"))
    assert outcome(executor).end == "killed", "the process that has answered takes the first job"


@pytest.mark.parametrize("executor", [LEAVES], indirect=True)
def test_no_plan_can_be_made(executor):
    with pytest.raises(EinlinearError) as told:
        executor.plan(PlanRequest({}, "/", 1))
    assert told.value.what == (
        "no plan could be made, in two attempts: the process that makes the plan ended with code 3"
        ": some last words"
    )
    assert "memory" in told.value.fix


@pytest.mark.parametrize(
    "executor", ["sys.stdin.readline()\nos.kill(os.getpid(), 9)"], indirect=True
)
def test_two_planners_are_killed(executor):
    with pytest.raises(EinlinearError, match=r"in two attempts: .* was killed by SIGKILL\n"):
        executor.plan(PlanRequest({}, "/", 1))


@pytest.mark.parametrize("executor", [HANGS], indirect=True)
def test_a_planner_that_lives_and_says_nothing(executor, monkeypatch):
    """It prints without an end, as what a site prints may be; then nothing more."""
    monkeypatch.setattr(local, "SILENT_SECONDS", 0.3)
    with pytest.raises(EinlinearError) as told:
        executor.plan(PlanRequest({}, "/", 1))
    assert told.value.what.endswith("the plan has said nothing for 0.005 minutes")
    monkeypatch.setattr(local, "SILENT_SECONDS", 60.0)
    with pytest.raises(EinlinearError, match="after a while"):
        executor.plan(PlanRequest({"is_slow": True}, "/", 1))


def test_what_a_worker_says_of_a_plan(tmp_path, monkeypatch):
    study = Study("s", {"task": "regression", "teacher_width": 8, "steps": 3, "width": 16})
    request = PlanRequest(study.as_dict(), str(tmp_path), 1)
    [planned] = local._plan(json.loads(json.dumps(worker._plan(request))))
    assert planned.config == study.cells[0].config
    monkeypatch.setattr(planner, "expand_study", lambda *_: 1 / 0)
    with pytest.raises(RuntimeError, match=r"(?s)no plan could be made.*ZeroDivisionError"):
        local._plan(worker._plan(request))
    wrong = replace(request, study=study.as_dict() | {"base": {"flops": 1}})
    monkeypatch.undo()
    with pytest.raises(EinlinearError, match="a budget is enough for one step"):
        local._plan(json.loads(json.dumps(worker._plan(wrong))))


@pytest.mark.parametrize("executor", [PRINTS], indirect=True)
def test_what_is_printed_before_an_answer_is_not_one(executor):
    with pytest.raises(EinlinearError, match="w"):
        executor.plan(PlanRequest({}, "/", 1))
    executor.start(job("run"))
    ended = outcome(executor)
    assert (ended.id, ended.end) == ("run", "done")


def test_a_worker_that_prints_while_python_starts(tmp_path, monkeypatch):
    (tmp_path / "sitecustomize.py").write_text(
        "import os; os.write(1, b'hello\\n[] half a line')", encoding="utf-8"
    )
    paths = f"{tmp_path}{os.pathsep}{SRC}"
    monkeypatch.setattr(child, "package_path", lambda: {"PYTHONPATH": paths})
    study = Study("s", {"task": "regression", "teacher_width": 8, "steps": 3, "width": 16})
    made = LocalExecutor(1, 1)
    try:
        [planned] = made.plan(PlanRequest(study.as_dict(), str(tmp_path), 1))
    finally:
        made.close()
    assert planned.config == study.cells[0].config


def test_a_worker_without_torch_says_so(tmp_path, monkeypatch):
    (tmp_path / "torch.py").write_text("raise ImportError('no torch here')")
    paths = f"{tmp_path}{os.pathsep}{SRC}"
    monkeypatch.setattr(child, "package_path", lambda: {"PYTHONPATH": paths})
    made = LocalExecutor(1, 1)
    try:
        with pytest.raises(EinlinearError, match="ended with code 1: ImportError: no torch here"):
            made.plan(PlanRequest({}, str(tmp_path), 1))
    finally:
        made.close()


def test_processes_that_cannot_be_started_leave_none_behind(monkeypatch):
    started = []
    right = subprocess.Popen

    def start(*arguments, **options):
        if started:
            raise OSError(24, "Too many open files")
        started.append(right(*arguments, **options))
        return started[0]

    monkeypatch.setattr(child.subprocess, "Popen", start)
    with pytest.raises(EinlinearError, match=r"process 2 .* cannot be started: Too many open"):
        LocalExecutor(3, 1)
    assert started[0].returncode is not None


def test_installed_packages_hide_no_module_of_python(monkeypatch, tmp_path):
    monkeypatch.setenv("PYTHONPATH", "given")
    inside = os.path.join("einlinear", "sweeps", "executors", "child.py")
    monkeypatch.setattr(child, "__file__", str(tmp_path / inside))
    assert child.package_path()["PYTHONPATH"] == f"{tmp_path}{os.pathsep}given"
    monkeypatch.setattr(child, "__file__", os.path.join(sysconfig.get_path("purelib"), inside))
    assert child.package_path()["PYTHONPATH"] == "given"


def test_a_worker_leaves_while_it_loads_torch(tmp_path):
    (tmp_path / "torch.py").write_text("import time; print('loading'); time.sleep(60)")
    paths = os.pathsep.join([str(tmp_path), child.package_path()["PYTHONPATH"]])
    command = [sys.executable, "-u", "-m", "einlinear.sweeps.executors.worker"]
    pipes = {"stdin": subprocess.PIPE, "stderr": subprocess.PIPE}
    with subprocess.Popen(command, env=os.environ | {"PYTHONPATH": paths}, **pipes) as process:
        try:
            assert process.stderr.readline() == b"loading\n"
            process.stdin.close()
            assert process.wait(20) == 0
        finally:
            process.kill()


@pytest.mark.parametrize("rest", [b"", b'{"id": "half'])
def test_a_worker_leaves_when_its_jobs_end_or_are_cut_off(monkeypatch, rest):
    class LeftError(Exception):
        pass

    def leave(code):
        raise LeftError

    job = {"id": "a", "out": "", "config": {}, "threads": 1, "folder": ""}
    line = json.dumps({"job": job}).encode()
    stdin = SimpleNamespace(buffer=io.BytesIO(line + b"\n" + rest))
    monkeypatch.setattr(worker, "sys", SimpleNamespace(stdin=stdin))
    monkeypatch.setattr(worker.os, "_exit", leave)
    jobs = SimpleQueue()
    with pytest.raises(LeftError):
        worker._read(jobs)
    assert jobs.get().id == "a"
    assert jobs.empty()


def test_who_lost_its_claim_stops_and_writes_no_record(tmp_path, monkeypatch):
    """Another process takes the run over in the middle; it has all the directory to itself."""
    config = tiny()
    others = []

    def train_and_lose(config, out, report, threads, thaw):
        def told(at):
            if not others:
                held = out / "claim-000001"
                others.append(take(out, Sight(1, held.stat().st_mtime_ns)))
                monkeypatch.setattr(run_job.Claim, "is_lost", lambda claim: not claim.look())
            report(at)

        train(config, out, told)

    monkeypatch.setattr(run_job, "train", train_and_lose)
    given = job(config.id, tmp_path)
    assert run_job.run_job(given, is_alone=False).end == "busy"
    assert others[0].look()
    assert claimed(given.directory)["token"] == others[0].owner.token
    assert finished(given.directory) is None
    assert not (given.directory / "failures.jsonl").exists()
    others[0].release()
    monkeypatch.setattr(run_job, "train", train)
    assert run_job.run_job(given, is_alone=False).end == "done"
    assert finished(given.directory) is not None
    assert Watch().free(given.directory) == Sight()


def test_a_run_that_fails_before_its_first_step_has_a_name(tmp_path, monkeypatch):
    """Reports know a run by its config; without one nobody would see that it failed."""

    def too_large(*_, **__):
        raise RuntimeError("cannot allocate memory")

    config = tiny()
    monkeypatch.setattr(run_job, "train", too_large)
    given = job(config.id, tmp_path)
    assert run_job.run_job(given, is_alone=False).end == "error"
    (run,) = gather(given.directory).runs
    assert (run.id, run.state) == (config.id, "failed")
    assert "cannot allocate memory" in run.message


def test_a_record_that_cannot_be_read_now_is_left_alone(tmp_path):
    config = tiny()
    given = job(config.id, tmp_path)
    (given.directory / "record.json").mkdir(parents=True)  # no file can be read there
    ended = run_job.run_job(given, is_alone=False)
    assert ended.end == "error"
    assert "record.json is not a file" in ended.text
    assert (given.directory / "record.json").is_dir()


@pytest.mark.parametrize("damage", ["cut off", "another rate"])
def test_a_damaged_config_is_written_again(tmp_path, damage):
    """The name of the folder is the id, and the sweep knows the config."""
    config = tiny(steps=8, eval_points=1)
    given = replace(job(config.id, tmp_path), config=config.as_dict())
    directory = RunDirectory(given.directory)
    directory.keep_config(config)
    path = given.directory / "config.json"
    other = tiny(steps=8, eval_points=1, lr=0.5)
    bad = b'{"width": 1' if damage == "cut off" else other.to_json().encode()
    path.write_bytes(bad)
    assert run_job.run_job(given, is_alone=False).end == "done"
    assert path.with_name("config.json.unreadable-1").read_bytes() == bad
    assert directory.read_config() == config


def test_what_others_can_do_is_for_the_umask_to_say(tmp_path):
    """A second user of the directory, of the same group, may write to the log of the first."""
    config = tiny(steps=4, warmup=0, eval_points=1)
    given = replace(job(config.id, tmp_path), config=config.as_dict())
    held = os.umask(0o002)
    try:
        with take(given.directory, Sight()) as claim:
            assert stat.S_IMODE(claim.path.stat().st_mode) == 0o664
        assert run_job.run_job(given).end == "done"
    finally:
        os.umask(held)
    assert stat.S_IMODE((given.directory / "log.txt").stat().st_mode) == 0o664


def test_a_run_does_not_fail_for_want_of_a_log(tmp_path):
    config = tiny(steps=4, warmup=0, eval_points=1)
    given = replace(job(config.id, tmp_path), config=config.as_dict())
    (given.directory / "log.txt").mkdir(parents=True)  # no file can be written there
    assert run_job.run_job(given).end == "done"


def test_failures_after_a_line_that_was_cut_off(tmp_path):
    keep_failure(tmp_path, "error", "one")
    path = tmp_path / "failures.jsonl"
    path.write_bytes(path.read_bytes() + b'{"attempt": 2, "ti')
    keep_failure(tmp_path, "killed", "three")
    lines = path.read_text(encoding="utf-8").splitlines()
    assert len(lines) == 3
    assert [json.loads(lines[n])["attempt"] for n in (0, 2)] == [1, 3]


def test_a_file_system_without_locks(tmp_path, monkeypatch):
    def fail(*_):
        raise OSError(38, "Function not implemented")

    directory = RunDirectory(tmp_path)
    with monkeypatch.context() as patch:
        patch.setattr("fcntl.flock", fail)
        directory.open(tiny())
    directory.close()
    first = RunDirectory(tmp_path)
    first.open(tiny())
    with pytest.raises(BusyError, match="another process is training"):
        RunDirectory(tmp_path).open(tiny())
    first.close()
