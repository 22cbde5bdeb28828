"""The driver: who runs what when others are there, and how failures count."""

import json
from contextlib import nullcontext
from dataclasses import replace
from time import sleep

import pytest

from einlinear.runs.directory import RunDirectory
from einlinear.sweeps import driver
from einlinear.sweeps.claims import Watch
from einlinear.sweeps.driver import Driver
from einlinear.sweeps.executors.executor import InlineExecutor
from einlinear.sweeps.job import Job, Outcome
from einlinear.sweeps.planner import expand_study
from einlinear.sweeps.run_job import run_job
from einlinear.sweeps.study import Study
from kit.runs import TINY


@pytest.fixture(scope="module")
def runs():
    base = TINY | {"steps": 4, "warmup": 0, "checkpoint_every": 1}
    return expand_study(Study("four", base, ({"seed": [0, 1, 2, 3]},)))


def jobs_of(runs, out):
    return [
        (
            replace(run, seconds=1.0 + place),
            Job(run.id, str(out), run.config.as_dict(), None, str(out)),
        )
        for place, run in enumerate(runs)
    ]


def test_runs_that_wait_count_from_their_checkpoint(runs, tmp_path):
    jobs = jobs_of(runs[:2], tmp_path)  # of 1 and 2 seconds
    checkpoints = jobs[1][1].directory / "checkpoints"
    checkpoints.mkdir(parents=True)
    (checkpoints / "step-3.json").touch()
    seen = []
    Driver(jobs, InlineExecutor(), seen.append)._report()
    assert seen[0].seconds_left == pytest.approx(1 + 2 / 4)


class Scripted(InlineExecutor):
    """Runs jobs here, but for those whose next outcome is written down."""

    def __init__(self, outcomes):
        super().__init__()
        self.outcomes, self.started = outcomes, []

    def start(self, job):
        self.started.append(job.id)
        super().start(job)

    def ended(self, seconds):
        if not self._jobs:
            sleep(0.02)
        jobs, self._jobs = self._jobs, []
        return [self._run(job) for job in jobs]

    def _run(self, job):
        waiting = self.outcomes.get(job.id, [])
        return waiting.pop(0)(job) if waiting else run_job(job, is_alone=False)


def killed(step=None):
    """A kill, after the checkpoint of a step if one is given."""

    def end(job):
        if step is not None:
            folder = job.directory / "checkpoints"
            folder.mkdir(parents=True, exist_ok=True)
            (folder / f"step-{step:09d}.json").write_text("no checkpoint")
        job.directory.mkdir(parents=True, exist_ok=True)
        return Outcome(job.id, "killed", "killed by SIGKILL\n")

    return end


def error(job):
    return Outcome(job.id, "error", "ValueError: no\n")


def drive(runs, out, outcomes, tell=lambda at: None):
    executor = Scripted(outcomes)
    return executor, *Driver(jobs_of(runs, out), executor, tell).to_the_end()


def test_the_longest_first(runs, tmp_path):
    executor, records, failures = drive(runs, tmp_path, {})
    assert executor.started == [run.id for run in reversed(runs)]
    assert set(records) == set(executor.started)
    assert not failures


def test_an_error_is_tried_once_more_at_the_end(runs, tmp_path):
    first = runs[3].id
    executor, records, failures = drive(runs, tmp_path, {first: [error]})
    assert executor.started[0] == executor.started[-1] == first
    assert len(records) == 4
    assert not failures


def test_two_errors_are_a_failure(runs, tmp_path):
    told = []
    bad = runs[1].id
    executor, records, failures = drive(runs, tmp_path, {bad: [error, error]}, told.append)
    assert executor.started.count(bad) == 2
    assert failures[bad].text == "ValueError: no\n"
    assert failures[bad].directory == tmp_path / "runs" / bad
    assert set(records) == {run.id for run in runs} - {bad}
    assert (told[-1].finished, told[-1].failed, told[-1].share) == (3, 1, 1.0)
    assert sum(failures[bad] in at.last for at in told) == 1


@pytest.mark.parametrize(
    ("kills", "is_failure"),
    [
        ([None, None], True),
        ([5, 5, 5], True),
        ([5, 6, 7, 8], False),
        ([5, 6, 6, 7], False),
    ],
)
def test_kills_count_unless_the_run_got_further(runs, tmp_path, kills, is_failure):
    bad = runs[2].id
    with nullcontext() if is_failure else pytest.warns(UserWarning, match="damaged"):
        executor, records, failures = drive(runs, tmp_path, {bad: [killed(k) for k in kills]})
    assert (bad in failures) == is_failure
    assert (bad in records) != is_failure
    assert executor.started.count(bad) == (len(kills) if is_failure else len(kills) + 1)
    lines = (tmp_path / "runs" / bad / "failures.jsonl").read_text().splitlines()
    assert [json.loads(line)["kind"] for line in lines] == ["killed"] * len(kills)


def test_a_claim_of_a_lost_machine_is_taken_over_by_who_did_not_watch(runs, tmp_path, monkeypatch):
    monkeypatch.setattr(driver, "Watch", lambda: Watch(0.3))
    directory = tmp_path / "runs" / runs[0].id
    directory.mkdir(parents=True)
    owner = {"host": "far away", "pid": 1, "started": "1", "token": "t", "done": 3, "loss": 2.5}
    (directory / "claim-000007").write_text(json.dumps(owner))
    told = []
    executor, records, failures = drive(runs, tmp_path, {}, told.append)
    assert len(records) == 4
    assert not failures
    assert executor.started[-1] == runs[0].id, "the others come first"
    far = [run for at in told for run in at.running if run.id == runs[0].id]
    assert all(run.is_elsewhere for run in far)
    assert far[0].loss == 2.5


@pytest.mark.parametrize(
    "done",
    ["9" * 4000, "9" * 400, "-3", "1e400", "NaN", '{"a": 1}', "[" * 9**5],
    ids=["very long", "long", "negative", "infinite", "nan", "table", "nested"],
)
def test_one_damaged_claim_ends_no_sweep(runs, tmp_path, monkeypatch, done):
    monkeypatch.setattr(driver, "Watch", lambda: Watch(0.1))
    directory = tmp_path / "runs" / runs[0].id
    directory.mkdir(parents=True)
    (directory / "claim-000001").write_text(f'{{"done": {done}, "seconds_left": {done}}}')
    told = []
    _, records, failures = drive(runs[:1], tmp_path, {}, told.append)
    assert (len(records), failures) == (1, {})
    shares = [at.share for at in told]
    assert shares == sorted(shares)
    assert shares[-1] == 1


def test_what_another_process_trains_by_hand_is_waited_for(runs, tmp_path, monkeypatch):
    """A directory may be held without a claim: that is no failure."""
    monkeypatch.setattr(driver, "_SECONDS_TO_LEAVE_IT", 0.1)
    run = runs[0]
    holder = RunDirectory(tmp_path / "runs" / run.id)
    holder.open(run.config)
    told = []

    def tell(at):
        told.append(at)
        if len(told) == 6:
            holder.close()

    _, records, failures = drive(runs, tmp_path, {}, tell)
    assert len(records) == 4
    assert not failures
    assert not (tmp_path / "runs" / run.id / "failures.jsonl").exists()


def test_time_left_follows_what_runs_took(runs, tmp_path, monkeypatch):
    now = [0.0]
    monkeypatch.setattr(driver, "monotonic", lambda: now[0])
    lefts = []

    def slowly(job):
        now[0] += 3 * expected[job.id]  # three times what was expected
        return run_job(job, is_alone=False)

    pairs = jobs_of(runs, tmp_path)
    expected = {run.id: run.seconds for run, _ in pairs}
    executor = Scripted({run.id: [slowly] for run in runs})
    Driver(pairs, executor, lambda at: lefts.append((at.share, at.seconds_left))).to_the_end()
    assert lefts[0] == (0.0, 10.0)
    assert [left for _, left in lefts[1:]] == pytest.approx([18.0, 9.0, 3.0, 0.0])
    assert [share for share, _ in lefts[1:]] == pytest.approx([0.4, 0.7, 0.9, 1.0])


def test_a_checkpoint_of_an_earlier_sweep_is_no_progress(runs, tmp_path):
    bad = runs[2].id
    killed(5)(jobs_of(runs, tmp_path)[2][1])
    executor, _, failures = drive(runs, tmp_path, {bad: [killed(), killed()]})
    assert bad in failures
    assert executor.started.count(bad) == 2
