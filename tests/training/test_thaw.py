"""Longer runs that continue shorter ones, bit for bit as if they had trained from step 0."""

import re
import shutil
from dataclasses import replace

import pytest

import einlinear as el
from einlinear import EinlinearError
from einlinear.runs.directory import read_record
from einlinear.runs.schedule import fixed_interval
from einlinear.training.state import TrainState
from einlinear.training.train import train
from kit.command import run
from kit.runs import TINY, killed, numbers, tiny, without_clock
from kit.train_processes import train_and_stop

FIXED = {"eval_spacing": "fixed", "eval_points": 3, "keep_state": True, "checkpoint_every": 10}
REGRESSION = {"task": "regression", "structure": "low_rank", "teacher_width": 8, "batch_size": 32}
CIFAR = {"task": "cifar", "batch_size": 8, "optimizer": "muon"}
EXPERTS = {"structure": "btt", "num_experts": 3, "num_active": 1}
ONE_IS_ENOUGH = pytest.mark.parametrize("chain", ["wsd"], indirect=True)


def run_of(steps, **changes):
    own = {} if changes.get("task") is None else {"head_size": None, "context": None}
    return tiny(**FIXED | own | changes, steps=steps)


def assert_same(out, other):
    assert numbers(out) == numbers(other)
    assert without_clock(read_record(out)) == without_clock(read_record(other))
    weights = "model.safetensors"
    assert (out / weights).read_bytes() == (other / weights).read_bytes()
    assert files(out) == files(other)


def files(path):
    return sorted(str(file.relative_to(path)) for file in path.rglob("*"))


@pytest.mark.parametrize(
    ("steps", "settings"),
    [
        ((20, 40), {"schedule": "wsd", "accumulation": 2, "precision": "bfloat16", "ema": 0.0}),
        ((20, 23), {"schedule": "wsd", **EXPERTS, "optimizer": "muon", "decay_share": 0.05}),
        pytest.param((25, 33), {"schedule": "constant", **EXPERTS}, marks=pytest.mark.slow),
        ((131, 139), {"schedule": "constant", **REGRESSION}),  # steps 131 and 139 end no line
        pytest.param((15, 40), {"schedule": "constant", **CIFAR}, marks=pytest.mark.slow),
        ((50, 60), {"schedule": "wsd", "ema": 0.5, **CIFAR, "optimizer": "adamw"}),
    ],
    ids=str,
)
def test_a_longer_run_is_as_if_it_had_not_stopped(tmp_path, steps, settings):
    short, long = (run_of(n, **settings) for n in steps)
    train(short, tmp_path / "short")
    held = {path: path.read_bytes() for path in (tmp_path / "short").rglob("*.*")}
    begin = []

    def note(_, step):
        begin.append(step)

    train(long, tmp_path / "long", on_start=note, thaw=tmp_path / "short")
    train(long, tmp_path / "whole")
    assert_same(tmp_path / "long", tmp_path / "whole")
    decay = round(short.decay_share * short.steps) if short.schedule == "wsd" else 0
    assert begin == [short.steps - decay]
    assert held == {path: path.read_bytes() for path in (tmp_path / "short").rglob("*.*")}


def test_a_line_is_open_where_a_run_freezes():
    assert 131 % fixed_interval(131) != 0


@pytest.fixture(scope="module", params=["constant", "wsd"])
def chain(request, tmp_path_factory):
    """Directories of runs of 60, 120 and 240 steps, each the continuation of the last."""
    out = tmp_path_factory.mktemp(request.param)
    for steps, thaw in ((60, None), (120, "60"), (240, "120")):
        config = run_of(steps, schedule=request.param, width=8)
        train(config, out / str(steps), thaw=thaw and out / thaw)
    train(config, out / "whole")
    return out


def test_a_chain_of_runs(chain):
    assert_same(chain / "240", chain / "whole")


def test_the_last_evaluation_of_the_shorter_run_is_its_own(chain):
    short, long = (read_record(chain / steps) for steps in ("60", "120"))
    assert [point.step for point in short.curve] == [0, 1, 2, 5, 10, 22, 46, 60]
    assert [point.step for point in long.curve] == [0, 1, 2, 5, 10, 22, 46, 100, 120]
    assert [p.loss for p in short.curve[:-1]] == [p.loss for p in long.curve[:7]]


def test_an_evaluation_changes_nothing(chain, tmp_path):
    config = replace(read_record(chain / "60").config, eval_points=20)
    record = train(config, tmp_path)
    assert record.final_loss == read_record(chain / "60").final_loss
    assert record.train_loss == read_record(chain / "60").train_loss


@pytest.mark.slow
@pytest.mark.parametrize(
    ("moment", "calls"),
    [("in a step", 1), ("in a step", 30), ("between its two files", 2), ("before the record", 1)],
)
def test_a_continued_run_is_killed_and_resumes(tmp_path, chain, moment, calls):
    shutil.copytree(chain / "60", tmp_path / "60")
    config = read_record(chain / "120").config
    assert killed(config, tmp_path / "120", moment, calls, tmp_path / "60")
    if (moment, calls) != ("in a step", 1):
        shutil.rmtree(tmp_path / "60")  # its own checkpoints are enough
    train(config, tmp_path / "120", thaw=tmp_path / "60")
    assert_same(tmp_path / "120", chain / "120")


@ONE_IS_ENOUGH
@pytest.mark.parametrize("moment", ["in the tensors of a checkpoint", "between its two files"])
def test_a_run_is_killed_while_it_freezes(tmp_path, chain, moment):
    config = read_record(chain / "60").config
    assert killed(replace(config, checkpoint_every=0), tmp_path, moment, 1)
    assert not list(tmp_path.glob("frozen/*.json"))
    train(config, tmp_path)
    assert_same(tmp_path, chain / "60")


@ONE_IS_ENOUGH
def test_a_finished_run_does_not_need_the_shorter_one(tmp_path, chain):
    record = read_record(chain / "120")
    assert train(record.config, chain / "120", thaw=tmp_path / "gone") == record


@ONE_IS_ENOUGH
def test_without_a_directory_of_its_own(chain):
    whole = read_record(chain / "120")
    assert without_clock(train(whole.config, thaw=chain / "60")) == without_clock(whole)


@ONE_IS_ENOUGH
def test_a_damaged_state_costs_time_only(tmp_path, chain):
    shutil.copytree(chain / "60", tmp_path / "60")
    (state,) = (tmp_path / "60" / "frozen").glob("*.safetensors")
    state.write_bytes(state.read_bytes()[:-1] + b"?")
    config = read_record(chain / "120").config
    with pytest.warns(UserWarning, match=r"frozen.* is damaged .*; starting again from step 0"):
        train(config, tmp_path / "120", thaw=tmp_path / "60")
    assert_same(tmp_path / "120", chain / "120")


@ONE_IS_ENOUGH
def test_damaged_checkpoints_of_the_longer_run(tmp_path, chain):
    config = read_record(chain / "120").config
    stopped = replace(config, checkpoint_every=60)
    train_and_stop(stopped, tmp_path, 70)
    (state,) = tmp_path.glob("checkpoints/*.json")
    state.write_bytes(state.read_bytes()[:-9])
    begin = []
    with pytest.warns(UserWarning, match=r"is damaged .*; continuing the run in"):
        train(config, tmp_path, on_start=lambda _, step: begin.append(step), thaw=chain / "60")
    assert begin == [60 if config.schedule == "constant" else 48]
    assert_same(tmp_path, chain / "120")


def test_a_run_that_is_past_the_state_that_it_should_keep(tmp_path):
    config = run_of(20, schedule="wsd", checkpoint_every=6)
    train_and_stop(replace(config, keep_state=False), tmp_path, 19)
    with pytest.warns(UserWarning, match="resumes at step 18, after the state of step 16"):
        train(config, tmp_path)
    with pytest.raises(EinlinearError, match="has no state of step 16"):
        train(replace(config, steps=40), thaw=tmp_path)


def test_a_run_that_has_diverged_before(tmp_path):
    config = run_of(20, lr=1e30, grad_clip=0.0)
    assert train(config, tmp_path).status == "diverged"
    with pytest.raises(EinlinearError, match="has no state of step 20") as told:
        train(replace(config, steps=40), thaw=tmp_path)
    assert "unless it diverges before" in told.value.rule


@pytest.fixture(scope="module")
def short(tmp_path_factory):
    """Directory of a run of 4 steps."""
    out = tmp_path_factory.mktemp("short")
    train(run_of(4), out)
    return out


@pytest.mark.parametrize(
    ("config", "what", "fix"),
    [
        (run_of(4), "has 4 steps, the new one 4", "more than 4 steps"),
        (run_of(8, lr=0.5, seed=1), "other settings: lr 0.01, not 0.5, seed 0, not 1", "thaw out"),
        (run_of(40, warmup=3), "warmup 4, not 3", "give warmup=4"),
        (run_of(8, schedule="wsd"), "schedule 'constant', not 'wsd'", "settings of that run"),
    ],
    ids=["as long", "other settings", "warm-up", "schedule"],
)
def test_runs_that_are_not_continued(tmp_path, short, config, what, fix):
    with pytest.raises(EinlinearError, match=what) as told:
        train(config, tmp_path / "out", thaw=short)
    assert fix in told.value.fix
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("changes", "what"),
    [
        ({"schedule": "cosine"}, "has the schedule cosine, the eval_spacing fixed$"),
        ({"eval_spacing": "even"}, "has the schedule constant, the eval_spacing even$"),
        ({"schedule": "wsd", "decay_share": 1.0}, "fixed and the decay_share 1$"),
        ({}, "has no state of step 3 in"),
    ],
    ids=str,
)
def test_runs_that_keep_no_state(tmp_path, changes, what):
    config = run_of(3, keep_state=False, **changes)
    train(config, tmp_path)
    with pytest.raises(EinlinearError) as told:
        train(replace(config, steps=8), thaw=tmp_path)
    assert re.search(what, told.value.what), told.value.what


def test_no_run_at_all(tmp_path):
    with pytest.raises(EinlinearError, match="which holds no run"):
        train(run_of(8), thaw=tmp_path / "gone")
    with pytest.raises(EinlinearError, match="thaw is given as 5"):
        train(run_of(8), thaw=5)


def test_a_state_of_another_run(tmp_path, short):
    shutil.copytree(short, tmp_path / "other")
    (tmp_path / "other" / "record.json").unlink()
    text = run_of(4, seed=1).to_json()
    (tmp_path / "other" / "config.json").write_text(text, encoding="utf-8")
    with pytest.raises(EinlinearError, match="is of a run with other settings"):
        train(run_of(8, seed=1), thaw=tmp_path / "other")


def test_data_that_has_changed(tmp_path):
    text = tmp_path / "text.txt"
    text.write_text("The first text. " * 400, encoding="utf-8")
    train(run_of(4, data=str(text)), tmp_path / "short")
    text.write_text("Another one now. " * 400, encoding="utf-8")
    with pytest.raises(EinlinearError, match="the data has changed since step 4"):
        train(run_of(8, data=str(text)), thaw=tmp_path / "short")


def test_a_high_loss_is_noticed_with_fixed_spacing_too(monkeypatch):
    right = TrainState.step

    def step(self, number):
        right(self, number)
        self.losses += 100 if number >= 150 else 0

    monkeypatch.setattr(TrainState, "step", step)
    record = train(run_of(300, schedule="constant", **REGRESSION))
    assert record.status == "diverged"
    assert record.steps_done == 160  # the end of the ten lines of two steps after 140


def test_the_command(capsys, tmp_path):
    flags = [
        word
        for name, value in (TINY | FIXED).items()
        if name != "steps"
        for word in (f"--{name.replace('_', '-')}", str(value))
    ]
    for steps, thaw in ((4, []), (8, ["--thaw", str(tmp_path / "4")])):
        words = ["train", *flags, "--steps", str(steps), "--out", str(tmp_path / str(steps)), *thaw]
        code, printed, err = run(capsys, *words)
        assert code == 0, err
        assert ("resumes at step 4" in printed) == bool(thaw)
    whole = el.train(run_of(8))
    assert without_clock(read_record(tmp_path / "8")) == without_clock(whole)
