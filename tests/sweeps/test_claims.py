"""Claims: one owner at a time, whatever happens to processes, clocks and disks."""

import errno
import json
import multiprocessing
import os
import shutil
import subprocess
import sys
from pathlib import Path
from tempfile import TemporaryDirectory
from threading import Condition, Thread, get_ident
from time import sleep

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from einlinear import EinlinearError
from einlinear.sweeps import claims
from einlinear.sweeps.claims import Sight, Watch, claimed, host_name, read_claim, take
from kit.claimers import ask, owner, paused, race


def until(condition):
    """Wait for something that happens soon."""
    for _ in range(2000):
        if condition():
            return
        sleep(0.005)
    raise AssertionError("it has not happened")


def dead_process():
    """The number of a process that has ended, and is not a zombie."""
    with subprocess.Popen([sys.executable, "-c", ""]) as process:
        return process.pid


def write_claim(folder, number=1, **fields):
    """A claim as somebody else has written it; it is of a living process unless fields say so."""
    folder.mkdir(parents=True, exist_ok=True)
    own = {"host": host_name(), "pid": os.getpid(), "started": claims._start_time(os.getpid())}
    path = folder / f"claim-{number:06d}"
    path.write_text(json.dumps(own | {"token": "other"} | fields), encoding="utf-8")
    return path


def taken(folder):
    """A claim on a folder that must be free."""
    seen = Watch().free(folder)
    assert seen is not None
    claim = take(folder, seen)
    assert claim is not None
    return claim


@pytest.fixture
def clock(monkeypatch):
    """A clock that stands still unless a test moves it."""
    now = [1000.0]
    monkeypatch.setattr(claims, "monotonic", lambda: now[0])
    return now


@pytest.mark.parametrize("kind", ["link", "folder", "pipe", "nested", "number"])
def test_claims_that_no_owner_has_made_are_dead_after_a_while(tmp_path, clock, kind):
    path = tmp_path / "claim-000001"
    make = {
        "link": lambda: path.symlink_to(tmp_path / "nowhere"),
        "folder": path.mkdir,
        "pipe": lambda: os.mkfifo(path),
        "nested": lambda: path.write_text('{"pid":' * 100_000),
        "number": lambda: path.write_text(json.dumps({"host": host_name(), "pid": -1})),
    }
    make[kind]()
    watch = Watch()
    assert claimed(tmp_path).get("token") is None
    assert watch.free(tmp_path) is None
    clock[0] += claims.STALE_SECONDS + 1
    seen = watch.free(tmp_path)
    assert seen is not None
    claim = take(tmp_path, seen)
    assert claim.path.name == "claim-000002"
    assert claim.look()
    claim.remove()
    assert [found.name for found in tmp_path.iterdir()] == ["claim-000001"] * (kind == "folder")


def test_a_name_that_is_nearly_a_claim_is_none(tmp_path):
    (tmp_path / "claim-7").touch()
    (tmp_path / "claim-0000009").touch()
    assert Watch().free(tmp_path) == Sight()


def test_processes_race_and_one_wins(tmp_path):
    """Fresh runs, runs that were given back, and runs whose owner is dead."""
    folders = [tmp_path / str(number) for number in range(60)]
    for folder in folders[20:40]:
        os.utime(write_claim(folder), (0, 0))
    pid = dead_process()
    for folder in folders[40:]:
        write_claim(folder, 7, pid=pid)
    context = multiprocessing.get_context("spawn")
    barrier = context.Barrier(4)
    processes = [context.Process(target=race, args=(n, folders, barrier)) for n in range(4)]
    for process in processes:
        process.start()
    for process in processes:
        process.join(100)
        assert process.exitcode == 0
    for number, folder in enumerate(folders):
        assert len(list(folder.glob("winner-*"))) == 1, folder
        expected = ["claim-000001", "claim-000002", "claim-000008"][number // 20]
        assert [path.name for path in folder.glob("claim-*")] == [expected]


class Turns:
    """Lets threads go from one look at the disk to the next, in an order that is given."""

    def __init__(self, order):
        self._order, self._waiting, self._change = list(order), {}, Condition()

    def gate(self, right):
        def gated(*arguments, **keywords):
            self.wait()
            return right(*arguments, **keywords)

        return gated

    def wait(self):
        with self._change:
            if get_ident() in self._waiting:
                self._waiting[get_ident()] = True
                self._change.notify_all()
                self._change.wait_for(lambda: not self._waiting[get_ident()])

    def run(self, *jobs):
        def job(work):
            with self._change:
                self._waiting[get_ident()] = False
                self._change.notify_all()
            self.wait()
            try:
                work()
            finally:
                with self._change:
                    del self._waiting[get_ident()]
                    self._change.notify_all()

        threads = [Thread(target=job, args=(work,)) for work in jobs]
        for count, thread in enumerate(threads):  # one by one, so that their order is given
            thread.start()
            with self._change:
                self._change.wait_for(lambda n=count: len(self._waiting) > n)
        while any(thread.is_alive() for thread in threads):
            with self._change:
                self._change.wait_for(lambda: all(self._waiting.values()))
                if self._waiting:
                    turn = self._order.pop(0) if self._order else 0
                    self._waiting[list(self._waiting)[turn % len(self._waiting)]] = False
                    self._change.notify_all()
                    continue
            for thread in threads:
                thread.join()


@settings(max_examples=150)
@given(
    st.lists(st.integers(0, 3), max_size=60),
    st.lists(st.sampled_from(["keep", "fail", "finish"]), min_size=2, max_size=4),
    st.integers(0, 2),
)
def test_any_order_of_looks_has_one_owner(order, ends, held):
    """Threads that take, and keep, give back or finish: never two at a time."""
    alive, most, finished = set(), [], []

    def contend(name, folder):
        seen = Watch().free(folder)
        claim = None if seen is None else take(folder, seen)
        if claim is None:
            return
        if finished:  # its record is there: nothing is trained
            claim.remove()
            return
        alive.add(name)
        most.append(len(alive))
        turns.wait()
        turns.wait()
        assert claim.look()
        if ends[name] != "keep":
            alive.remove(name)
        if ends[name] == "fail":
            claim.release()
        if ends[name] == "finish":
            finished.append(name)
            claim.remove()

    turns = Turns(order)
    with TemporaryDirectory() as name, pytest.MonkeyPatch.context() as patch:
        folder = Path(name)
        if held:
            os.utime(write_claim(folder, held), (0, 0))
        for function in ("_numbers", "_look", "_path"):
            patch.setattr(claims, function, turns.gate(getattr(claims, function)))
        patch.setattr(os, "open", turns.gate(os.open))
        jobs = [lambda n=n: contend(n, folder) for n in range(len(ends))]
        turns.run(*jobs)
    assert most
    assert max(most) == 1


def test_two_have_come_between_look_and_claim(tmp_path, monkeypatch):
    """The first of them has made the number that is free again, the second has removed it."""
    os.utime(write_claim(tmp_path), (0, 0))
    right, others = os.open, []

    def late(*arguments):
        if not others:
            others.append(None)
            taken(tmp_path).release()
            others.append(taken(tmp_path))
        return right(*arguments)

    seen = Watch().free(tmp_path)
    monkeypatch.setattr(os, "open", late)
    assert take(tmp_path, seen) is None
    assert others[1].path.name == "claim-000003"
    assert others[1].look()


def test_a_claim_is_taken_kept_and_given_back(tmp_path):
    folder = tmp_path / "run"
    claim = taken(folder)
    assert Watch().free(folder) is None
    assert take(folder, Sight()) is None
    told = claimed(folder)
    assert (told["host"], told["pid"]) == (host_name(), os.getpid())
    assert [told[name] for name in ("done", "total", "loss", "seconds_left")] == [None] * 4
    claim.release()
    again = taken(folder)
    assert again.path.name == "claim-000002"
    assert not claim.path.exists()
    assert not claim.look()
    assert again.look()
    again.remove()
    assert list(folder.iterdir()) == []
    assert taken(folder).path.name == "claim-000001"


def test_what_a_beat_says(tmp_path, monkeypatch):
    monkeypatch.setattr(claims, "BEAT_SECONDS", 0.01)
    with taken(tmp_path) as claim:
        for state in ({"done": 10**30, "loss": 0.123456789}, {"done": 3}):
            claim.report(state)
            until(lambda n=state["done"]: claimed(tmp_path).get("done") == n)
            assert claimed(tmp_path)["token"] == claim.owner.token
    assert Watch().free(tmp_path) == Sight(1, 0)


def test_numbers_beyond_six_digits(tmp_path):
    os.utime(write_claim(tmp_path, 999_999), (0, 0))
    assert taken(tmp_path).path.name == "claim-1000000"
    assert Watch().free(tmp_path) is None


@pytest.mark.parametrize("text", ["", "{", "[1]", '{"pid": 1e400}', '{"host": 1}', "\x00"])
def test_a_claim_that_says_nothing_is_alive_until_it_is_stale(tmp_path, clock, text):
    write_claim(tmp_path).write_text(text, encoding="utf-8")
    watch = Watch(30)
    assert watch.free(tmp_path) is None
    clock[0] += 31
    assert watch.free(tmp_path) is not None


def test_processes_of_this_machine(tmp_path):
    assert Watch().free(tmp_path) == Sight()
    write_claim(tmp_path)
    assert Watch().free(tmp_path) is None
    for fields in ({"pid": dead_process()}, {"started": "1"}):  # gone; a number that came again
        write_claim(tmp_path, **fields)
        assert Watch().free(tmp_path).number == 1
    write_claim(tmp_path, pid=2**70)
    assert Watch().free(tmp_path) is None


def test_a_zombie_is_dead(tmp_path):
    with owner(tmp_path) as process:
        assert Watch().free(tmp_path) is None
        process.kill()
        stat = Path(f"/proc/{process.pid}/stat")
        until(lambda: stat.read_text(encoding="utf-8").rpartition(") ")[2][0] == "Z")
        assert Watch().free(tmp_path) is not None  # nobody has waited for it


@pytest.mark.parametrize("shift", [9 - 10**9, 0, 10**9])
def test_another_machine_is_dead_by_the_clock_of_who_looks(tmp_path, clock, shift):
    """Whatever its own clock says: only changes are counted."""
    path = write_claim(tmp_path, host="elsewhere", pid=dead_process())
    watch = Watch(30)
    for beat in range(5):
        os.utime(path, (10**9 + shift - beat,) * 2)  # its clock may even go backwards
        assert watch.free(tmp_path) is None
        clock[0] += 29
        assert watch.free(tmp_path) is None
    clock[0] += 2
    seen = watch.free(tmp_path)
    assert seen is not None
    os.utime(path)  # it was only slow
    assert take(tmp_path, seen) is None
    assert watch.free(tmp_path) is None


def test_who_is_paused_while_it_looks_has_not_waited(tmp_path, clock, monkeypatch):
    write_claim(tmp_path, host="elsewhere")
    watch = Watch(30)
    assert watch.free(tmp_path) is None
    right = claims._look

    def slow(folder):
        clock[0] += 60
        return right(folder)

    monkeypatch.setattr(claims, "_look", slow)
    assert watch.free(tmp_path) is None


def stale(watch, folder):
    """Look for half a second; what was seen last."""
    for _ in range(25):
        seen = watch.free(folder)
        sleep(0.02)
    return seen


def test_a_paused_owner_that_writes_keeps_its_run(tmp_path):
    with owner(tmp_path, is_locking=True) as process:
        with paused(process):
            assert stale(Watch(0.2), tmp_path) is None
        assert ask(process) == "held"


def test_a_paused_owner_that_lost_its_run_knows_at_once(tmp_path):
    with owner(tmp_path) as process:
        watch = Watch(0.2)
        assert stale(watch, tmp_path) is None  # it beats
        with paused(process):
            claim = take(tmp_path, stale(watch, tmp_path))
            assert claim is not None
        assert ask(process) == "lost"
        assert claim.look()


def test_a_directory_that_was_deleted_and_made_again(tmp_path):
    folder = tmp_path / "run"
    claim = taken(folder)
    shutil.rmtree(folder)
    other = taken(folder)
    assert other.path == claim.path
    assert not claim.look()
    assert other.look()


def test_a_full_disk_stops_no_heart(tmp_path, monkeypatch):
    claim = taken(tmp_path)
    os.utime(claim.path, (5, 5))

    def full(*_):
        raise OSError(errno.ENOSPC, "no space left on device")

    monkeypatch.setattr(os, "write", full)
    claim.write()
    assert claim.path.stat().st_mtime > 5
    assert read_claim(claim.path)["token"] == claim.owner.token


def test_a_disk_that_does_not_answer_loses_no_claim(tmp_path, monkeypatch):
    claim = taken(tmp_path)

    def fail(*_):
        raise OSError(errno.EIO, "input/output error")

    with monkeypatch.context() as patch:
        patch.setattr(os, "listdir", fail)
        assert claim.look()
        assert claimed(tmp_path) == {}
    shutil.rmtree(tmp_path)
    assert not claim.look()


def test_a_directory_that_cannot_be_made(tmp_path):
    file = tmp_path / "file"
    file.touch()
    for folder in (file, file / "run"):
        with pytest.raises(EinlinearError, match="cannot write"):
            take(folder, Watch().free(folder))
