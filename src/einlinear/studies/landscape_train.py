"""One run of a landscape: a perceptron of four layers, trained on images."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from math import inf, isfinite, sqrt
from time import perf_counter
from typing import Any

import torch
from torch import Tensor, nn

from einlinear.errors import EinlinearError
from einlinear.machine import memory_bytes
from einlinear.models.convert import convert_
from einlinear.models.facts import find_facts
from einlinear.models.groups import param_groups
from einlinear.models.init import Start, apply_init_, init_
from einlinear.models.mlp import MLP
from einlinear.structures.plan import make_plan
from einlinear.structures.text import parse
from einlinear.studies.images import Images
from einlinear.studies.landscape_runs import LandscapeConfig, Run, RunResult

_FLOAT = 4  # bytes of a number
_GIVE_UP = 2.0  # times the loss at the start
_PATIENCE = 2  # tenths of the steps in which a loss may be high


@dataclass(frozen=True, slots=True)
class TensorImages:
    """The images as tensors."""

    train_x: Tensor
    train_y: Tensor
    test_x: Tensor
    test_y: Tensor
    num_classes: int

    @classmethod
    def of(cls, images: Images) -> TensorImages:
        """The same memory as tensors."""
        return cls(
            train_x=torch.from_numpy(images.train_x),
            train_y=torch.from_numpy(images.train_y),
            test_x=torch.from_numpy(images.test_x),
            test_y=torch.from_numpy(images.test_y),
            num_classes=images.num_classes,
        )


def check_memory(runs: Iterable[Run], images: Images) -> None:
    """Refuse runs of which one needs more memory than this machine has, by a low estimate."""
    have = memory_bytes()
    if have is None:
        return
    for run in {(run.structure, run.width): run for run in runs}.values():
        _check_run(run, images, have)


def _check_run(run: Run, images: Images, have: int) -> None:
    """Names the setting that is farthest above the usual, in the part that needs the most."""
    usual = LandscapeConfig()
    d_in, width = images.train_x.shape[1], run.width
    inner = make_plan(parse(run.structure), width, width).params
    weights = (d_in + images.num_classes) * width + 2 * inner
    steps, batch = run.steps / usual.steps, run.batch / usual.batch
    widths, ranks = width / max(usual.widths), inner / width**2
    parts: dict[str, tuple[int, dict[str, float]]] = {
        "the numbers of its images": (8 * run.steps * run.batch, {"steps": steps, "batch": batch}),
        "its activations": (
            _FLOAT * run.batch * (d_in + 3 * width),
            {"batch": batch, "widths": widths},
        ),
        # And their gradients and two moments.
        "its weights": (4 * _FLOAT * weights, {"widths": widths, "structures": ranks}),
    }
    if sum(size for size, _ in parts.values()) <= have:
        return
    part = max(parts, key=lambda part: parts[part][0])
    size, excess = parts[part]
    name = max(excess, key=lambda name: excess[name])
    given = {"widths": width, "structures": run.structure}.get(name, getattr(run, name, None))
    fixes = {
        "widths": "give smaller widths, such as 64 256 1024",
        "structures": "give a smaller rank, or other structures",
    }
    raise EinlinearError(
        what=f"{name} {given}: a run would need {size / 1e9:,.0f} GB for {part}; this machine has "
        f"{have / 1e9:,.0f} GB",
        rule="a run of a landscape needs memory for its batches, weights and activations",
        fix=fixes.get(
            name, f"give a smaller number; {name} is {getattr(usual, name)} unless given"
        ),
    )


def train_run(run: Run, images: TensorImages) -> RunResult:
    """The run, from its seed on; a run whose loss stays high is given up.

    That is, if in any tenth of the steps but the first two the mean loss is not finite or twice as
    high as at the start.
    """
    begin = perf_counter()
    generator = torch.Generator().manual_seed(run.seed)
    shape = (run.steps, run.batch)
    batches = torch.randint(len(images.train_y), shape, generator=generator)
    model = make_model(images.train_x.shape[1], images.num_classes, run)
    optimizer = _prepared(model, run, generator)
    start_loss, _ = _test(model, images)
    losses: list[float] = []
    tenth = run.steps // 10
    for step, batch in enumerate(batches, 1):
        optimizer.zero_grad()
        logits = model(images.train_x[batch])
        loss = nn.functional.cross_entropy(logits, images.train_y[batch])
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        losses.append(float(loss.detach()))
        if not isfinite(losses[-1]):
            break
        if step % tenth == 0 and step > _PATIENCE * tenth:
            if _mean(losses[-tenth:]) > _GIVE_UP * start_loss:
                break
    test_loss, accuracy = _test(model, images)
    return RunResult(
        run=run,
        start_loss=start_loss,
        train_loss=_finite(_mean(losses[-tenth:])),
        test_loss=_finite(test_loss),
        test_accuracy=accuracy,
        steps_done=len(losses) if isfinite(losses[-1]) else len(losses) - 1,
        seconds=perf_counter() - begin,
    )


def make_model(d_in: int, num_classes: int, run: Run) -> MLP:
    """Four layers: input and head dense, the two between structured."""
    model = MLP(d_in, num_classes, width=run.width, activation=run.activation)
    convert_(model, {"blocks.*": run.structure}, weight_norm=run.weight_norm)
    return model


def _prepared(model: nn.Module, run: Run, generator: torch.Generator) -> torch.optim.Optimizer:
    """The model initialised in place, and its optimizer, both by the parametrization.

    mup: `init_` and `param_groups`. naive: every matrix and factor of deviation 1 / sqrt(fan_in),
    which gives outputs of unit variance, biases 0, and one rate for all parameters.
    """
    lr = 2.0**run.rate
    groups: Any = model.parameters()
    if run.base_width is not None:
        init_(model, generator=generator)
        groups = param_groups(model, lr, base_width=run.base_width)
    else:
        apply_init_(model, naive_starts(model), generator)
    return torch.optim.Adam(groups, lr=lr, fused=True)


def naive_starts(model: nn.Module) -> tuple[Start, ...]:
    """Matrices and factors of deviation 1 / sqrt(fan_in), the head too; biases 0."""
    return tuple(
        Start(fact.name, 0.0, 1 / sqrt(fact.scaling.fan_in) if fact.scaling.init_std else 0.0)
        for fact in find_facts(model, frozen=True)
    )


@torch.no_grad()
def _test(model: nn.Module, images: TensorImages) -> tuple[float, float]:
    """Loss and accuracy on the test images."""
    logits = model(images.test_x)
    loss = float(nn.functional.cross_entropy(logits, images.test_y))
    return loss, float((logits.argmax(1) == images.test_y).float().mean())


def _mean(losses: list[float]) -> float:
    return sum(losses) / len(losses) if all(map(isfinite, losses)) else inf


def _finite(value: float) -> float | None:
    return value if isfinite(value) else None
