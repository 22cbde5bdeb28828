"""Sweeps to which bad things happen: nothing that has finished is lost, the rest goes on."""

import json
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from collections import Counter
from contextlib import suppress
from pathlib import Path

import pytest

from einlinear.runs.directory import RunDirectory, read_record
from einlinear.sweeps.claims import claimed, host_name
from einlinear.sweeps.planner import expand_study
from einlinear.sweeps.study import load_study
from kit.runs import numbers, tiny, without_clock
from kit.sweeping import (
    lives,
    printed_file,
    sweeping,
    swept,
    trainings,
    until,
    workers,
    write_study,
)

TWO = ("--processes", "2", "--threads", "1")
ONE = ("--processes", "1", "--threads", "1")  # the same rounding


@pytest.fixture(scope="module")
def reference(tmp_path_factory):
    """The file of a study of 12 runs, and the directory of a sweep that nothing has disturbed."""
    folder = tmp_path_factory.mktemp("reference")
    study = write_study(folder / "study.toml", range(6))
    code, printed = swept(study, folder / "out", *TWO)
    assert code == 0, printed
    assert len(records(folder / "out")) == 12
    return study, folder / "out"


def records(out):
    return sorted(out.glob("runs/*/record.json"))


def stamps(out):
    """What changes if a record is written again."""
    return {path: (path.stat().st_ino, path.stat().st_mtime_ns) for path in records(out)}


def assert_same_run(run, other):
    assert without_clock(read_record(run)) == without_clock(read_record(other))
    assert numbers(run) == numbers(other)
    assert (run / "model.safetensors").read_bytes() == (other / "model.safetensors").read_bytes()


def assert_same(out, other):
    names = [path.parent.name for path in records(out)]
    assert names == [path.parent.name for path in records(other)]
    for name in names:
        assert_same_run(out / "runs" / name, other / "runs" / name)


def id_of(structure, seed):
    return tiny(structure=structure, seed=seed).id


def failures(run):
    lines = (run / "failures.jsonl").read_text(encoding="utf-8").splitlines()
    return [json.loads(line) for line in lines]


def children(pid):
    """The numbers of the processes that a process has started."""
    found = []
    for path in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = path.read_text(encoding="utf-8").rpartition(") ")[2].split()
        except OSError:
            continue
        if fields[1] == str(pid) and fields[0] not in "ZX":
            found.append(int(path.parent.name))
    return found


def ended_process():
    """The number of a process that has ended."""
    with subprocess.Popen(["true"]) as process:
        pass
    return process.pid


def killed_command(study, out, wait):
    """The command itself, killed; its workers leave."""
    command = [sys.executable, "-m", "einlinear", "sweep", str(study), "--out", str(out), *TWO]
    with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as driver:
        until(lambda: len(records(out)) >= 2)
        time.sleep(wait)
        started = children(driver.pid)
        assert len(started) == 2
        driver.kill()
    until(lambda: not any(map(lives, started)))


def killed_worker(out):
    """One process that trains, killed."""
    owner = until(lambda: [c for c in map(claimed, out.glob("runs/*")) if c.get("pid")])[0]
    with suppress(ProcessLookupError):  # it has just ended
        os.kill(owner["pid"], signal.SIGKILL)


@pytest.mark.slow
def test_twelve_runs_and_many_deaths(tmp_path, reference):
    """The command is killed, then a worker, then a command, then Ctrl-C is pressed."""
    study, whole = reference
    out = tmp_path / "out"
    seed = random.randrange(10**6)
    print(f"moments by {seed}")
    moment = random.Random(seed)
    killed_command(study, out, moment.uniform(0, 0.2))
    done = stamps(out)
    with sweeping(study, out, *TWO) as process:
        until(lambda: len(records(out)) >= min(11, len(done) + 2))
        time.sleep(moment.uniform(0, 0.3))
        killed_worker(out)
        until(lambda: len(records(out)) >= min(11, len(done) + 4))
        time.sleep(moment.uniform(0, 0.3))
        process.kill()
        until(lambda: not workers(out))
    done |= {path: stamp for path, stamp in stamps(out).items() if path not in done}
    with sweeping(study, out, *TWO) as process:
        until(lambda: len(workers(out)) == 2)
        time.sleep(moment.uniform(0, 0.5))
        with suppress(ProcessLookupError):  # it has just ended
            os.kill(process.pid, signal.SIGINT)
        begin = time.monotonic()
        process.join(20)
        assert time.monotonic() - begin < 15
        assert process.exitcode in (130, 0)  # 0 if all was done
        until(lambda: process.exitcode == 0 or not workers(out))
        assert process.exitcode == 0 or "interrupted" in printed_file(out).read_text()
        assert process.exitcode == 0 or "same command again" in printed_file(out).read_text()
    code, printed = swept(study, out, *TWO)
    assert code == 0, printed
    assert_same(out, whole)
    now = stamps(out)
    assert {path: now[path] for path in done} == done
    assert len(list(out.rglob("failures.jsonl"))) <= 1  # of the worker


def test_two_sweeps_share_the_runs(tmp_path, reference):
    study, whole = reference
    out = tmp_path / "out"
    half = write_study(tmp_path / "half.toml", range(3))
    with sweeping(half, out, *ONE) as first, sweeping(half, out, *ONE) as second:
        for process in (first, second):
            process.join(90)
            assert process.exitcode == 0
    assert set(Counter(trainings(out)).values()) == {1}
    assert len(records(out)) == 6
    assert not list(out.glob("runs/*/claim-*"))
    # The rest, with the death of one of them.
    with sweeping(study, out, *ONE) as first, sweeping(study, out, *ONE) as second:
        until(lambda: len(records(out)) >= 8)
        first.kill()
        first.join()
        begun = trainings(out)
        second.join(90)
        assert second.exitcode == 0
    assert_same(out, whole)
    assert not workers(out)
    twice = [name for name, count in Counter(trainings(out)).items() if count > 1]
    assert len(twice) <= 1  # what the dead one had begun
    assert set(twice) <= set(begun)


def test_records_that_cannot_be_read(tmp_path, reference):
    study, whole = reference
    out = tmp_path / "out"
    shutil.copytree(whole, out)
    paths = records(out)
    text = paths[0].read_bytes()
    other = json.loads(paths[1].read_bytes())
    damage = [text[: len(text) // 2], b"", b"\xff\x00", json.dumps(other | {"schema": 99}).encode()]
    damage.append(paths[5].read_bytes())  # of another run
    for path, data in zip(paths, damage, strict=False):
        path.write_bytes(data)
    shutil.rmtree(paths[6].parent)
    shutil.copytree(paths[7].parent, paths[6].parent)  # all of another run
    left = paths[8].parent / "checkpoints" / "step-000000020.safetensors"
    left.parent.mkdir()
    left.write_bytes(b"of a process that was killed right after the record")
    claim = paths[8].parent / "claim-000001"
    claim.write_text(json.dumps({"host": host_name(), "pid": ended_process(), "started": "1"}))
    untouched = {path: stamp for path, stamp in stamps(out).items() if path in paths[5:]}
    code, printed = swept(study, out, *TWO)
    assert code == 1
    assert f"{paths[6].parent} holds another run" in printed
    assert "11 runs finished, 0 of them diverged; 1 failed" in printed
    for path, data in zip(paths, damage, strict=False):
        assert path.with_name("record.json.unreadable-1").read_bytes() == data
    now = stamps(out)
    assert {path: now[path] for path in untouched} == untouched
    assert not left.parent.exists()
    assert not claim.exists()
    shutil.rmtree(paths[6].parent)
    assert swept(study, out, *ONE)[0] == 0
    assert_same(out, whole)
    assert sorted(trainings(out)) == sorted(path.parent.name for path in [*paths[:5], paths[6]])


FAULTY = {
    ("dense", 0): "raises",
    ("btt", 0): "is killed",
    ("dense", 1): "is killed further on",
    ("btt", 1): "segfaults",
}


def test_runs_that_fail(tmp_path, reference):
    study, whole = reference
    out = tmp_path / "out"
    study = write_study(tmp_path / "study.toml", range(4))
    for name, file in [(id_of("dense", 2), "metrics.jsonl"), (id_of("btt", 2), "log.txt")]:
        (out / "runs" / name).mkdir(parents=True)
        (out / "runs" / name / file).symlink_to("/dev/full")
    code, printed = swept(study, out, *TWO, faults=FAULTY)
    assert code == 1, printed
    assert "4 runs finished, 0 of them diverged; 4 failed" in printed
    texts = {
        id_of("dense", 0): ("RuntimeError: boom", "error"),
        id_of("btt", 0): ("was killed by SIGKILL", "killed"),
        id_of("btt", 1): ("was killed by SIGSEGV", "killed"),
        id_of("dense", 2): ("cannot write", "error"),
    }
    for name, (text, kind) in texts.items():
        run = out / "runs" / name
        told = failures(run)
        assert [(line["attempt"], line["kind"]) for line in told] == [(1, kind), (2, kind)]
        assert all(text in line["error"] for line in told)
        assert f"log: {run / 'log.txt'}" in printed
        assert trainings(out).count(name) == 2
    log = (out / "runs" / id_of("dense", 0) / "log.txt").read_text(encoding="utf-8")
    assert log.count("RuntimeError: boom") == 2
    log = (out / "runs" / id_of("btt", 1) / "log.txt").read_text(encoding="utf-8")
    assert log.count("Fatal Python error: Segmentation fault") == 2
    # Killed again and again, but further each time: it came to its end.
    assert trainings(out).count(id_of("dense", 1)) == 5
    assert len(failures(out / "runs" / id_of("dense", 1))) == 4
    (out / "runs" / id_of("dense", 2) / "metrics.jsonl").unlink()
    done = stamps(out)
    code, printed = swept(study, out, *TWO)
    assert code == 0, printed
    assert done.items() <= stamps(out).items()
    for path in records(out):
        assert_same_run(path.parent, whole / "runs" / path.parent.name)


@pytest.mark.slow
def test_runs_that_others_have(tmp_path, reference):
    """By hand, on a machine that is gone, and one whose directory goes away."""
    study, whole = reference
    out = tmp_path / "out"
    study = write_study(tmp_path / "study.toml", range(2))
    by_hand, gone, deleted = id_of("dense", 0), id_of("btt", 0), id_of("dense", 1)
    directory = RunDirectory(out / "runs" / by_hand)
    directory.open(tiny(seed=0))
    (out / "runs" / gone).mkdir()
    owner = {"host": f"not {host_name()}", "pid": os.getpid(), "started": None, "token": "x"}
    (out / "runs" / gone / "claim-000004").write_text(json.dumps(owner), encoding="utf-8")
    faults = {("dense", 1): "is slow"}
    with sweeping(study, out, *TWO, faults=faults) as process:
        until(lambda: (out / "runs" / deleted / "checkpoints").exists())
        (out / "runs" / deleted).rename(tmp_path / "deleted")  # at once, unlike rmtree
        until(lambda: len(records(out)) == 3)
        assert process.is_alive()
        directory.close()
        process.join(90)
        assert process.exitcode == 0
    for path in records(out):
        assert_same_run(path.parent, whole / "runs" / path.parent.name)
    assert not list(out.rglob("failures.jsonl"))
    assert Counter(trainings(out))[gone] == 1


@pytest.fixture
def disk(tmp_path):
    """A small disk of its own."""
    path = tmp_path / "disk"
    path.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=8m", "tmpfs", str(path)]
    if os.getuid() or subprocess.run(mount, capture_output=True).returncode:
        pytest.skip("only root may mount")
    out = tmp_path / "out"  # what is kept beside it is on another disk
    out.symlink_to(path)
    yield out
    subprocess.run(["umount", "-l", str(path)], check=True)


def fill(path):
    """Take all the room that there is."""
    with path.open("wb", buffering=0) as file:
        for size in (1 << 16, 1 << 12):
            try:
                while True:
                    file.write(bytes(size))
            except OSError:
                pass


def test_a_full_disk(tmp_path, disk, reference):
    _, whole = reference
    study = write_study(tmp_path / "study.toml", range(2))
    out, ballast = disk, disk / "ballast"
    slow = {("dense", 1): "is slow", ("btt", 1): "is slow"}
    with sweeping(study, out, *TWO, faults=slow) as process:
        until(lambda: records(out))
        fill(ballast)
        process.join(90)
        assert process.exitcode == 1
    printed = printed_file(out).read_text(encoding="utf-8")
    assert "No space left on device" in printed
    assert "run the same command again" in printed
    done = stamps(out)
    assert 0 < len(done) < 4
    ballast.unlink()
    assert swept(study, out, *TWO)[0] == 0
    assert done.items() <= stamps(out).items()
    assert len(records(out)) == 4
    for path in records(out):
        assert_same_run(path.parent, whole / "runs" / path.parent.name)


def test_a_disk_that_can_only_be_read(tmp_path, disk, reference):
    study, whole = reference
    shutil.copytree(whole, disk, dirs_exist_ok=True)
    subprocess.run(["mount", "-o", "remount,ro", str(disk.resolve())], check=True)
    code, printed = swept(study, disk, *ONE)
    assert code == 0
    assert "12 runs finished" in printed
    code, printed = swept(write_study(tmp_path / "more.toml", range(7)), disk, *ONE)
    assert code == 2
    assert printed.splitlines()[-3].startswith("einlinear: cannot write")
    assert "Read-only" in printed.splitlines()[-3]


def test_directories_that_are_something_else(tmp_path, reference):
    study, whole = reference
    file = tmp_path / "file"
    file.touch()
    bad = tmp_path / "bad.toml"
    bad.write_text("[base\n", encoding="utf-8")
    run = records(whole)[0].parent
    before = stamps(whole)
    for given, out, text in [
        (study, file, f"{file} is a file"),
        (study, run, f"{run} is the directory of a single run"),
        (tmp_path / "missing.toml", tmp_path / "out", "cannot read"),
        (bad, tmp_path / "out", "cannot read"),
    ]:
        code, printed = swept(given, out, *ONE)
        assert code == 2
        assert printed.splitlines()[-3].startswith(f"einlinear: {text}")
    assert stamps(whole) == before
    assert not (tmp_path / "out").exists()
    assert len(expand_study(load_study(study))) == 12
