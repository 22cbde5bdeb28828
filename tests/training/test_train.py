"""Runs in one process: every task learns; what goes wrong is said before any training."""

import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from torch.nn.functional import cross_entropy

import einlinear as el
from einlinear import EinlinearError, RunConfig, train
from einlinear.files.tensors import read_tensors
from einlinear.models.mup.groups import param_groups
from einlinear.runs.directory import read_metrics
from einlinear.runs.schedule import eval_steps
from einlinear.training.devices.distributed import Place
from einlinear.training.load import load_writer
from einlinear.training.model import make_model
from einlinear.training.plan import plan_run, task_of
from einlinear.training.state import TrainState
from kit.runs import TINY, numbers, tiny, without_clock

SHORT = {"steps": 40, "warmup": 4, "eval_points": 4, "eval_size": 64, "device": "cpu"}
TASKS = {
    "text": {"width": 32, "depth": 1, "batch_size": 8},
    "pixels": {"width": 32, "depth": 1, "batch_size": 2, "eval_size": 8},
    "regression": {"width": 16, "batch_size": 256, "teacher_width": 16, "teacher_depth": 2},
    "cifar": {"width": 32, "batch_size": 32},
}


@pytest.mark.parametrize("structure", ["dense", "btt(rank=2)"])
@pytest.mark.parametrize("task", TASKS)
def test_every_task_learns_from_what_is_in_the_package(task, structure):
    settings = SHORT | TASKS[task] | {"head_init": "zero"}
    record = train(RunConfig(task=task, structure=structure, **settings))
    first, last = record.curve[0], record.curve[-1]
    assert record.status == "finished"
    assert record.steps_done == last.step == 40
    factor = {"text": 0.75, "pixels": 0.98, "regression": 0.5, "cifar": 0.7}[task]
    assert last.loss < factor * first.loss
    assert last.train_loss < factor * first.loss
    # The head starts at zero: all answers are as likely.
    start = {"text": math.log(96), "pixels": math.log(256), "cifar": math.log(10)}
    if task in start:
        assert math.isclose(first.loss, start[task], rel_tol=1e-5)


def by_hand(config):
    """Weights and losses of a run, by a loop as one would write it down."""
    task = task_of(config)
    model = make_model(config, (task.vocab_size, task.context))
    groups = param_groups(model, config.lr, base_width=64, weight_decay=config.weight_decay)
    optimizer = torch.optim.AdamW(groups, betas=config.betas)
    rates = [group["lr"] for group in groups]
    losses = []
    for step in range(config.steps):
        for group, rate in zip(optimizer.param_groups, rates, strict=True):
            group["lr"] = rate * min(1, (step + 1) / config.warmup)
        batch = task.batch(step, config.batch_size, seed=config.seed)
        loss = cross_entropy(model(batch.inputs).flatten(0, 1), batch.targets.flatten())
        optimizer.zero_grad()
        loss.backward()
        norm = torch.stack([p.grad.norm() for p in model.parameters()]).norm()
        for parameter in model.parameters():
            parameter.grad *= min(1, config.grad_clip / norm)
        optimizer.step()
        losses.append(loss.item())
    return model, losses


@pytest.mark.parametrize("accumulation", [1, 2])
def test_a_run_is_the_loop_one_would_write(tmp_path, accumulation):
    config = tiny(ema=0, steps=6, grad_clip=0.3, weight_decay=0.1, accumulation=accumulation)
    model, losses = by_hand(config)
    record = train(config, tmp_path)
    lines = [line for line in read_metrics(tmp_path) if line["kind"] == "train"]
    got = [line["train_loss"] for line in lines]
    torch.testing.assert_close(torch.tensor(got), torch.tensor(losses), rtol=1e-5, atol=0)
    weights = read_tensors(tmp_path / "model.safetensors")
    assert weights.keys() == dict(model.named_parameters()).keys()
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(weights[name], parameter.detach(), rtol=1e-3, atol=1e-5)
    batches = task_of(config).validation(config.eval_size)
    with torch.no_grad():
        values = [
            cross_entropy(model(b.inputs).flatten(0, 1), b.targets.flatten()) for b in batches
        ]
    assert len(values) == 1
    assert math.isclose(record.final_loss, float(values[0]), rel_tol=1e-4)


def test_parts_of_a_step_add_up_to_its_gradients():
    states = []
    for accumulation in (1, 2):
        config = tiny(structure="btt", accumulation=accumulation)
        plan = plan_run(config, is_checked=False)
        state = TrainState(config, plan.task, Place(0, 1, torch.device("cpu")), plan.model)
        for part in range(accumulation):
            state.backward(state.batch(3, part))
        states.append(state)
    whole, parts = ([p.grad for p in state.parameters] for state in states)
    assert any(grad.abs().max() > 0 for grad in whole)
    for wanted, got in zip(whole, parts, strict=True):
        torch.testing.assert_close(got, wanted, rtol=1e-4, atol=1e-6)


def test_the_curve():
    config = tiny(structure="btt")
    record = train(config)
    points = eval_steps(config.steps, config.eval_points)
    assert tuple(p.step for p in record.curve) == points
    for point in record.curve:
        assert point.units == point.step * 4 * 16
        assert point.macs == point.units * record.counts.macs
        assert 0 <= point.data_seconds <= point.seconds
    seconds = [p.seconds for p in record.curve]
    assert seconds == sorted(seconds)
    assert seconds[0] == 0
    assert record.curve[0].train_loss is None
    assert record.unit == "token"
    assert record.environment["processes"] == 1
    # Weights and their two moments, their average, and at least the gradients.
    assert record.peak_bytes > 5 * 4 * record.counts.params
    assert record.units_per_second > 0


def test_a_run_is_a_function_of_its_config():
    config = tiny(structure="low_rank", num_experts=3)
    torch.manual_seed(1)
    before = torch.get_rng_state()
    first = train(config)
    assert torch.equal(torch.get_rng_state(), before)
    torch.manual_seed(2)
    assert without_clock(train(config)) == without_clock(first)
    other = train(replace(config, seed=1))
    assert other.final_loss != first.final_loss


def test_the_average_of_the_weights():
    plain, averaged = train(tiny(ema=0)), train(tiny(ema=1))
    assert plain.curve[-1].train_loss == averaged.curve[-1].train_loss
    assert plain.final_loss != averaged.final_loss


def test_experts(tmp_path):
    config = tiny(structure="btt", num_experts=3, num_active=1, steps=10)
    record = train(config, tmp_path)
    for point in record.curve:
        assert len(point.routing) == 6  # q, k, v, o, up, down
        for layer in point.routing:
            assert len(layer.load) == 3
            assert math.isclose(sum(layer.load), 1, rel_tol=1e-5)
            assert 0 <= layer.entropy <= 1
            assert (layer.changed is None) == (point.step == 0)
    assert any(layer.changed for layer in record.curve[1].routing)
    assert el.read_record(tmp_path) == record
    unbalanced = train(replace(config, balance=0.0))
    assert unbalanced.curve[-1].train_loss != record.curve[-1].train_loss


def test_experts_that_are_feed_forward_nets(tmp_path):
    config = tiny(experts="ffn", num_experts=3, num_active=1, ema=0)
    record = train(config, tmp_path)
    assert record.final_loss < 0.9 * record.curve[0].loss
    assert [layer.layer for layer in record.curve[-1].routing] == ["blocks.0.mlp"]
    assert load_writer(tmp_path).model.blocks[0].mlp.num_experts == 3


def test_a_text_that_is_folded(tmp_path):
    data = write(tmp_path / "a.txt", "Caf\u00e9 and more. " * 200)
    with pytest.raises(EinlinearError, match="none is left"):
        train(tiny(data=data))
    assert train(tiny(data=data, rule="fold")).status == "finished"


def test_a_run_that_diverges_is_a_result(tmp_path):
    record = train(tiny(lr=10, warmup=0, grad_clip=0, ema=0), tmp_path)
    assert record.status == "diverged"
    # The loss is finite: the first ten lines are passed over, the next ten tell.
    assert record.steps_done == record.curve[-1].step == 20
    assert record.curve[-1].loss > 10 * record.curve[0].loss
    assert record.final_loss is None
    assert el.read_record(tmp_path) == record
    assert train(record.config, tmp_path) == record
    assert load_writer(tmp_path).step == 20


def test_a_high_loss_for_a_while_is_none():
    record = train(tiny(lr=0.3, warmup=0, grad_clip=0, ema=0, head_init="zero"))
    assert max(point.loss for point in record.curve) > 2 * record.curve[0].loss
    assert record.status == "finished"


def test_a_loss_that_is_not_finite(monkeypatch):
    right = TrainState.backward
    monkeypatch.setattr(TrainState, "backward", lambda self, batch: right(self, batch) * math.nan)
    record = train(tiny())
    assert record.status == "diverged"
    assert record.steps_done == 1
    assert record.curve[-1].train_loss is None


def test_weights_that_the_last_step_has_lost(tmp_path, monkeypatch):
    config = tiny(ema=0)
    right = TrainState.step

    def step(self, number):
        right(self, number)
        if number == config.steps - 1:
            with torch.no_grad():
                self.parameters[0].fill_(math.nan)

    monkeypatch.setattr(TrainState, "step", step)
    record = train(config)
    assert record.status == "diverged"
    assert record.steps_done == config.steps
    assert record.curve[-1].loss is None


def test_a_run_that_has_finished_is_not_repeated(tmp_path, monkeypatch):
    record = train(tiny(), tmp_path)
    monkeypatch.setattr(TrainState, "step", None)
    assert train(tiny(checkpoint_every=3), tmp_path) == record
    with pytest.raises(EinlinearError, match="holds another run"):
        train(tiny(seed=4), tmp_path)


def test_precision():
    plain = train(tiny(structure="btt", steps=6))
    half = train(tiny(structure="btt", steps=6, precision="bfloat16"))
    assert half.final_loss != plain.final_loss
    assert math.isclose(half.final_loss, plain.final_loss, rel_tol=0.01)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_a_compiled_run(monkeypatch):
    compiled = []
    right = torch.nn.Module.compile

    def compile_(self):
        compiled.append(self)
        right(self, backend="aot_eager")

    monkeypatch.setattr(torch.nn.Module, "compile", compile_)
    torch._dynamo.reset()
    plain = train(tiny(structure="btt", steps=4))
    record = train(tiny(structure="btt", steps=4, compile=True))
    assert len(compiled) == 1
    assert math.isclose(record.final_loss, plain.final_loss, rel_tol=1e-4)


def test_progress():
    seen = []
    config = tiny()
    train(config, progress=seen.append)
    assert seen[-1].done == seen[-1].total == config.steps
    assert seen[-1].seconds_left == 0
    assert seen[-1].unit == "token"
    assert all(math.isfinite(at.loss) and at.units_per_second > 0 for at in seen)


def test_mirrors_see_what_is_written(tmp_path):
    seen = []
    train(tiny(), tmp_path, mirrors=[lambda step, values: seen.append((step, values))])
    written = numbers(tmp_path)
    assert [step for step, _ in seen] == [line["step"] for line in written]
    for (_, values), line in zip(seen, written, strict=True):
        assert all(line[key] == value for key, value in values.items() if "seconds" not in key)


def test_a_text_for_validation(tmp_path):
    data = write(tmp_path / "a.txt", "One and one are two. " * 200)
    same = write(tmp_path / "b.txt", "One and one are two. " * 100)
    other = write(tmp_path / "c.txt", "ZYXWVUTSRQPO " * 100)
    known, unknown = (train(tiny(data=data, validation=path)) for path in (same, other))
    assert known.curve[-1].train_loss == unknown.curve[-1].train_loss
    assert known.final_loss < unknown.final_loss - 1


def write(path, text):
    path.write_text(text, encoding="utf-8")
    return str(path)


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        (lambda at: {"data": str(at / "none.txt")}, "none.txt"),
        (lambda at: {"data": write(at / "empty.txt", "")}, "empty.txt"),
        (lambda at: {"data": write(at / "short.txt", "too short"), "context": 512}, "512"),
        (lambda at: {"structure": "XA^1 XAB:7 YB^1"}, "7"),
        (lambda at: {"device": "cuda"}, "cuda"),
    ],
)
def test_bad_input_is_found_before_training(tmp_path, monkeypatch, settings, words):
    if torch.cuda.is_available():
        pytest.skip("there is such a device")
    monkeypatch.setattr(TrainState, "step", None)
    out = tmp_path / "out"
    with pytest.raises(EinlinearError, match=words):
        train(RunConfig(**TINY | settings(tmp_path)), out)
    assert not out.exists()


def test_wrong_keys_in_a_file_of_images(tmp_path):
    path = tmp_path / "images.npz"
    np.savez(path, nothing=np.zeros(3))
    for task in ("pixels", "cifar"):
        with pytest.raises(EinlinearError, match=r"images\.npz"):
            train(RunConfig(task=task, data=str(path)))


def test_what_is_no_config():
    with pytest.raises(EinlinearError, match="RunConfig"):
        train({"task": "text"})


@pytest.mark.parametrize("tied", [False, True])
def test_a_finished_run_can_be_loaded(tmp_path, tied):
    record = train(tiny(tied=tied, structure="btt"), tmp_path)
    writer = load_writer(tmp_path)
    assert writer.step == 24
    (batch,) = task_of(record.config).validation(8)
    with torch.no_grad():
        logits = writer.model(batch.inputs)
    loss = cross_entropy(logits.flatten(0, 1), batch.targets.flatten())
    assert math.isclose(float(loss), record.final_loss, rel_tol=1e-5)
    assert writer.encode("").tolist() == [[0]]
    assert writer.vocabulary.decode(writer.encode("To be").flatten().tolist()) == "To be"


def test_the_training_loss_is_that_of_the_last_tenth(tmp_path):
    record = train(RunConfig(task="cifar", **SHORT | TASKS["cifar"]), tmp_path)
    lines = [line for line in read_metrics(tmp_path) if line["kind"] == "train"]
    assert [line["step"] for line in lines[-4:]] == [37, 38, 39, 40]
    last = [line["train_loss"] for line in lines[-4:]]
    assert record.train_loss == pytest.approx(sum(last) / 4)
    assert 0 < record.accuracy < 1
    assert train(tiny()).accuracy is None


def test_weights_are_kept_only_if_asked_for(tmp_path):
    config = tiny(save_model=False)
    record = train(config, tmp_path)
    assert not (tmp_path / "model.safetensors").exists()
    assert train(config, tmp_path) == record
    with pytest.warns(UserWarning, match=r"model.safetensors.*; training the run again"):
        again = train(tiny(), tmp_path)
    assert (tmp_path / "model.safetensors").exists()
    assert [p.loss for p in again.curve] == [p.loss for p in record.curve]


@pytest.mark.parametrize("task", ["text", "regression"])
def test_a_naive_run_has_one_rate_for_all_parameters(task):
    config = RunConfig(task=task, width=32, steps=1, parametrization="naive", lr=0.25)
    plan = plan_run(config, is_checked=False)
    state = TrainState(config, plan.task, Place(0, 1, torch.device("cpu")), plan.model)
    assert [group["lr"] for group in state.optimizer.param_groups] == [0.25]
