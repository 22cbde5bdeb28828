"""Jobs of Slurm: real processes by submitit, and stand-ins for the commands of Slurm."""

import os
import signal
import subprocess
import sys
import time
from dataclasses import replace

import pytest

from einlinear import EinlinearError
from einlinear.sweeps.executors import slurm as on_slurm
from einlinear.sweeps.executors.slurm import SlurmExecutor
from kit.jobs import all_ended, assert_trained, first_checkpoint, is_gone, tiny_job, wait_for

ENDLESS = {"steps": 100_000, "checkpoint_every": 10}


def is_given_back(job):
    """Whether the claim on a run says that others may take it."""
    (claim,) = job.directory.glob("claim-*")
    return claim.stat().st_mtime == 0


@pytest.fixture
def open_slurm(tmp_path):
    """Opens executors whose jobs end with the test."""
    opened = []

    def make(options, threads=1, cluster="slurm"):
        opened.append(SlurmExecutor(tmp_path / "slurm", 4, threads, options, cluster=cluster))
        return opened[-1]

    yield make
    for executor in opened:
        executor.close()


@pytest.mark.slow
def test_jobs_end_in_any_way(tmp_path, open_slurm):
    executor = open_slurm({}, cluster="local")
    good = tiny_job(tmp_path)
    unseen = replace(tiny_job(tmp_path, seed=1), out=str(tmp_path / "elsewhere"))
    killed, left = (tiny_job(tmp_path, seed=seed, **ENDLESS) for seed in (2, 3))
    for job in (killed, left, unseen, good):
        executor.start(job)
    os.kill(first_checkpoint(killed), signal.SIGKILL)
    outcomes = all_ended(executor, 3)
    assert [outcomes[job.id].end for job in (good, unseen, killed)] == ["done", "error", "killed"]
    assert f"no {tmp_path / 'elsewhere' / 'studies'} on the machine" in outcomes[unseen.id].text
    assert "ended as FAILED, without a result" in outcomes[killed.id].text
    assert_trained(good, tmp_path / "plain")
    worker = first_checkpoint(left)
    os.kill(worker, signal.SIGUSR2)  # a warning that the time is nearly over
    assert not executor.ended(0.3)
    executor.close()
    wait_for(lambda: is_gone(worker))
    assert (is_given_back(killed), is_given_back(left)) == (False, True)


SBATCH = """#!/bin/sh
grep -q nowhere "$1" && echo "sbatch: error: invalid partition: nowhere" >&2 && exit 1
id=$(($(ls jobs | wc -l) + 100))
: > jobs/$id
grep -q -e --begin "$1" && echo PENDING > jobs/$id
cp "$1" script.$id
echo "Submitted batch job $id"
[ -e never_starts ] && exit
[ -s jobs/$id ] && exit
(SLURM_JOB_ID=$id sh script.$id; [ -s jobs/$id ] || echo FAILED > jobs/$id) > /dev/null 2>&1 &
"""
SRUN = """#!/bin/sh
while [ "${1#--}" != "$1" ]; do
    case $1 in --output) shift; out=$1;; --error) shift; err=$1;; esac
    shift
done
echo $$ > pid.$SLURM_JOB_ID
exec "$@" > "$(echo $out | sed s/%j/$SLURM_JOB_ID/)" 2> "$(echo $err | sed s/%j/$SLURM_JOB_ID/)"
"""
SQUEUE = """#!/bin/sh
echo "$@" >> asked
[ -e is_down ] && exit 1
for id in $(ls jobs); do echo "$id $(cat jobs/$id | grep . || echo RUNNING)"; done
"""
SCANCEL = """#!/bin/sh
echo CANCELLED > jobs/$1
[ ! -e pid.$1 ] || kill -TERM $(cat pid.$1)
"""


@pytest.fixture
def slurm(tmp_path, monkeypatch):
    """A folder in which scripts behave as the commands of Slurm do; without accounting."""
    (tmp_path / "bin").mkdir()
    (tmp_path / "jobs").mkdir()
    scripts = {"sbatch": SBATCH, "srun": SRUN, "squeue": SQUEUE, "scancel": SCANCEL}
    for name, text in scripts.items():
        (tmp_path / "bin" / name).write_text(text)
        (tmp_path / "bin" / name).chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(on_slurm, "_ASK_SECONDS", 0.3)
    monkeypatch.setattr(on_slurm._Queue, "grace", 0.6)
    yield tmp_path
    for path in tmp_path.glob("pid.*"):
        if not is_gone(int(path.read_text())):
            os.kill(int(path.read_text()), signal.SIGKILL)


def lines(path):
    return path.read_text().splitlines() if path.exists() else []


@pytest.mark.slow
def test_jobs_of_slurm(slurm, open_slurm):
    options = {"partition": "cpu", "time": "90", "nice": "10", "setup": "export SET_UP=1"}
    executor = open_slurm(options, threads=3)
    started = time.monotonic()
    good, cancelled, lost = tiny_job(slurm), tiny_job(slurm, **ENDLESS), tiny_job(slurm, seed=1)
    executor.start(good)
    executor.start(cancelled)
    (slurm / "never_starts").touch()
    executor.start(lost)
    worker = first_checkpoint(cancelled)
    subprocess.run(["scancel", "101"], check=True)
    outcomes = all_ended(executor, 2)
    assert outcomes[good.id].end == "done"
    assert outcomes[cancelled.id].end == "killed"
    assert "job 101 ended as CANCELLED" in outcomes[cancelled.id].text
    wait_for(lambda: is_gone(worker))
    assert is_given_back(cancelled)

    (slurm / "is_down").touch()  # a controller that is being restarted says nothing of jobs
    (slurm / "jobs" / "102").unlink()
    assert not executor.ended(1.5)
    (slurm / "is_down").unlink()
    outcome = all_ended(executor, 1)[lost.id]
    assert (outcome.end, "job 102 ended as GONE" in outcome.text) == ("killed", True)
    asked = lines(slurm / "asked")
    assert set(asked) == {f"--user={os.getuid()} --states=all --noheader --format=%i %T"}
    assert 3 <= len(asked) <= (time.monotonic() - started) / 0.3 + 1

    script = lines(slurm / "slurm" / "100_submission.sh")
    flags = "partition=cpu time=90 nice=10 cpus-per-task=3 job-name=einlinear".split()
    assert {f"#SBATCH --{flag}" for flag in flags} <= set(script)
    assert "export SET_UP=1" in script
    assert any("srun" in line and "--cpus-per-task=3" in line for line in script)


def test_what_waits_is_cancelled_at_the_end(slurm, open_slurm):
    executor = open_slurm({"begin": "tomorrow"})
    executor.start(tiny_job(slurm))
    executor.start(tiny_job(slurm, seed=1))
    assert not executor.ended(0.8)
    executor.close()
    assert [lines(slurm / "jobs" / name) for name in ("100", "101")] == [["CANCELLED"]] * 2


def test_no_time_is_that_of_the_partition(slurm):
    executor = SlurmExecutor(slurm / "slurm", 1, 1, {})
    text = executor._submitit._make_submission_file_text("command", "uid")
    assert "--time" not in text
    assert "--cpus-per-task=1" in text


@pytest.mark.parametrize(
    ("gpus", "options", "flags"),
    [
        (0, {}, []),
        (2, {}, ["--gpus-per-node=2"]),
        (2, {"gpus": "a100:2"}, ["--gpus=a100:2"]),
        (2, {"gpus-per-task": "3"}, ["--gpus-per-task=3"]),
    ],
)
def test_gpus_are_asked_for_once(slurm, gpus, options, flags):
    executor = SlurmExecutor(slurm / "slurm", 1, 1, options, gpus=gpus)
    text = executor._submitit._make_submission_file_text("command", "uid")
    asked = [line.removeprefix("#SBATCH ") for line in text.splitlines() if "#SBATCH" in line]
    assert [flag for flag in asked if flag.startswith("--gpu")] == flags


@pytest.mark.parametrize(
    ("option", "message"),
    [
        ("partitions", "unknown setting of Slurm: 'partitions'.*did you mean 'partition'"),
        ("cpus-per-tusk", "'cpus-per-tusk'.*did you mean 'cpus_per_task'"),
        ("nodes", "unknown setting of Slurm: 'nodes'"),
    ],
)
def test_unknown_options(tmp_path, option, message):
    with pytest.raises(EinlinearError, match=f"(?s){message}"):
        SlurmExecutor(tmp_path, 1, 1, {option: "1"}, cluster="local")


def test_a_job_that_slurm_refuses(slurm):
    executor = SlurmExecutor(slurm / "slurm", 1, 1, {"partition": "nowhere"})
    with pytest.raises(EinlinearError, match="rejected a job: sbatch: error: invalid partition"):
        executor.start(tiny_job(slurm))
    executor.close()


def test_no_slurm_and_no_submitit(tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(EinlinearError, match="no Slurm on this machine"):
        SlurmExecutor(tmp_path, 1, 1, {})
    monkeypatch.setitem(sys.modules, "submitit", None)
    with pytest.raises(EinlinearError, match=r'pip install "einlinear\[slurm\]"'):
        SlurmExecutor(tmp_path, 1, 1, {})
