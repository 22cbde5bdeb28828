"""The small GPT of the worked results: how it is trained and how its loss is measured.

Used by compress_gpt.py and adapters.py in this folder. Every result is a JSON file in the output
folder, and what is there already is not computed again, so an interrupted stage resumes.
"""

import json
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from time import perf_counter
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file, save_file
from torch import nn

import einlinear as el

CONFIDENCE = 0.9
WARM_UP = 0.05  # share of the steps
SAVE_EVERY = 200  # steps
_RESAMPLES = 2000
_ROWS = 32  # windows in a forward pass of the evaluation


def make_gpt(settings: Mapping[str, Any]) -> el.GPT:
    """A new GPT: attention with alibi positions, heads of 32 features."""
    return el.GPT(
        96,
        context=settings["context"],
        width=settings["width"],
        depth=settings["depth"],
        head_size=32,
        positions="alibi",
    )


def load_gpt(out: Path) -> el.GPT:
    """The trained GPT of an output folder."""
    model = make_gpt(read(out / "dense.json")["settings"])
    model.load_state_dict(load_file(out / "dense.safetensors"))
    return model


def open_text(train: Path, validation: Path, context: int) -> Any:
    """The task of predicting the next of 96 symbols."""
    return el.open_task("text", train, validation=validation, context=context, rule="fold")


def fit_(
    model: nn.Module,
    task: Any,
    groups: Iterable[Any],
    *,
    steps: int,
    batch: int,
    seed: int,
    checkpoint: Path | None = None,
    say: Callable[[int, float], None] = lambda step, loss: None,
) -> float:
    """Train with AdamW, a warm-up and a linear decay to zero; return the seconds it took.

    A checkpoint, if given, is written every few hundred steps, and removed at the end.
    """
    optimizer = torch.optim.AdamW(groups)
    warm_up = max(1, round(WARM_UP * steps))
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda step: min((step + 1) / warm_up, (steps - step) / (steps - warm_up + 1))
    )
    first, seconds = 0, 0.0
    if checkpoint and checkpoint.exists():
        state = torch.load(checkpoint)
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        schedule.load_state_dict(state["schedule"])
        first, seconds = state["step"], state["seconds"]
    model.train()
    start = perf_counter()
    for step in range(first, steps):
        if checkpoint and step % SAVE_EVERY == 0 and step > first:
            state = {
                "model": model.state_dict(),
                "optimizer": optimizer.state_dict(),
                "schedule": schedule.state_dict(),
                "step": step,
                "seconds": seconds + perf_counter() - start,
            }
            torch.save(state, checkpoint.with_suffix(".new"))
            checkpoint.with_suffix(".new").replace(checkpoint)
        rows = task.batch(step, batch, seed=seed)
        loss = task.loss(model(rows.inputs), rows)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        schedule.step()
        if step % SAVE_EVERY == 0:
            say(step, loss.item())
    if checkpoint:
        checkpoint.unlink(missing_ok=True)
    return seconds + perf_counter() - start


def train_dense(out: Path, task: Any, settings: Mapping[str, Any]) -> None:
    """Train the GPT from scratch and store it in the output folder."""
    if (out / "dense.json").exists():
        return
    torch.manual_seed(settings["seed"])
    model = make_gpt(settings)
    el.init_(model)
    seconds = fit_(
        model,
        task,
        el.param_groups(model, lr=settings["lr"], base_width=64),
        steps=settings["steps"],
        batch=settings["batch"],
        seed=settings["seed"],
        checkpoint=out / "training.pt",
        say=lambda step, loss: print(f"step {step:6d}   loss {loss:.3f}", flush=True),
    )
    save_file(model.state_dict(), out / "dense.safetensors")
    store_losses(out, "dense", window_losses(model, task, settings["windows"]))
    params = sum(p.numel() for p in model.parameters())
    write(out / "dense.json", {"settings": settings, "seconds": seconds, "params": params})


@torch.no_grad()
def window_losses(model: nn.Module, task: Any, windows: int) -> np.ndarray:
    """The mean loss of every window, spread evenly over the held-out text, in nats per symbol."""
    model.eval()
    found = []
    for rows in task.validation(windows):
        for x, y in zip(rows.inputs.split(_ROWS), rows.targets.split(_ROWS), strict=True):
            each = nn.functional.cross_entropy(model(x).transpose(1, 2), y, reduction="none")
            found.append(each.mean(1).double().numpy())
    return np.concatenate(found)


def interval(values: np.ndarray) -> list[float]:
    """The mean of windows, and its 90 % interval by bootstrap over them."""
    rng = np.random.default_rng(0)
    means = [values[rng.integers(len(values), size=len(values))].mean() for _ in range(_RESAMPLES)]
    low, high = np.quantile(means, [(1 - CONFIDENCE) / 2, (1 + CONFIDENCE) / 2])
    return [round(float(number), 5) for number in (values.mean(), low, high)]


def store_losses(out: Path, name: str, losses: np.ndarray) -> None:
    """Keep the losses of all windows, so that models can be compared window by window."""
    (out / "losses").mkdir(exist_ok=True)
    save_file({"losses": torch.from_numpy(losses)}, out / "losses" / f"{name}.safetensors")


def stored_losses(out: Path, name: str) -> np.ndarray:
    return load_file(out / "losses" / f"{name}.safetensors")["losses"].numpy()


def read(path: Path) -> Any:
    return json.loads(path.read_text(encoding="utf-8"))


def write(path: Path, value: Any) -> None:
    """Write JSON in one go, so that an interrupted stage leaves no half of a file."""
    path.parent.mkdir(parents=True, exist_ok=True)
    new = path.with_suffix(".new")
    new.write_text(json.dumps(value, indent=1) + "\n", encoding="utf-8")
    new.replace(path)
