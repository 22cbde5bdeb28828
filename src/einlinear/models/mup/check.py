"""coordinate_check: measure whether the layers of a model move equally at every width."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from math import inf, isfinite, log2
from statistics import fmean, linear_regression
from typing import Any

import torch
from torch import Tensor, nn

from einlinear.errors import EinlinearError
from einlinear.layers.scaling import Optimizer, Parametrization
from einlinear.models.mup.base import Base
from einlinear.models.mup.check_result import CheckRow, CoordinateCheck
from einlinear.models.mup.groups import param_groups, plain_groups
from einlinear.models.mup.init import apply_init_, plan_init
from einlinear.models.mup.muon import Muon
from einlinear.models.survey.facts import find_layers
from einlinear.show.numbers import listed
from einlinear.structures.values import one_of, whole_number

LossFunction = Callable[[nn.Module, Any], Tensor]

_OPTIMIZERS: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "adam": torch.optim.Adam,
    "sgd": torch.optim.SGD,
    "muon": Muon,
}


def coordinate_check(
    make_model: Callable[[int], nn.Module],
    widths: Sequence[int],
    *,
    batch: Any = None,
    loss: LossFunction | None = None,
    steps: int = 4,
    lr: float = 0.01,
    base: nn.Module | Mapping[str, int] | None = None,
    base_width: int | None = None,
    optimizer: Optimizer = "adam",
    parametrization: Parametrization = "mup",
    seeds: int = 3,
    zero: str | Iterable[str] = (),
    head: str | Iterable[str] = (),
    bound: float = 0.2,
    shrink_bound: float = 0.75,
) -> CoordinateCheck:
    """Train a model at several widths for a few steps and measure how much every layer moves.

    With the right parametrization, the output of every layer changes by about the same amount at
    every width. If a change grows with the width, a learning rate that suits a small model is too
    high for a wide one. The check measures the output of every layer that has parameters, after
    each step, on the batch that it trains on. All passes of a run use the same random numbers, so
    dropout does not count as a change. Ref: [Y22 App. D].

    Args:
        make_model: makes a model of the given width; the check initialises its weights.
        widths: two or more widths.
        batch: (inputs, targets), or a function that returns them for a width.
        loss: a function of model and batch. By default, the cross entropy of model(inputs) if the
            targets are classes, otherwise the mean squared error.
        steps: number of training steps; at least two if the head starts at zero, because only the
            head moves in the first step.
        lr: the learning rate of the base.
        base: the model at the width at which you tuned lr, or a table of in_features by pattern,
            as in `param_groups`; instead of base_width.
        base_width: the width at which you tuned lr; the smallest of the widths by default.
        optimizer: "adam", "sgd" or "muon".
        parametrization: "mup" uses `init_` and `param_groups`; "naive" is what most models do:
            every matrix starts with standard deviation 1 / sqrt(fan_in), and all parameters share
            one learning rate; "unit" starts them with 1, except the head. The same layers start at
            zero in all.
        seeds: number of runs to average, with seeds 0, 1, 2, ...
        zero: layers that start at zero, as in `init_`.
        head: the output layer, as in `param_groups`.
        bound: how fast a layer's output or change may grow: at most width**bound.
        shrink_bound: how fast a layer's change may shrink. In chains of low-rank layers with ranks
            of sqrt(width), changes shrink as width**-0.5 in the first steps.
    """
    widths = _checked_widths(widths)
    make_optimizer = _OPTIMIZERS[one_of(optimizer, "optimizer", tuple(_OPTIMIZERS))]
    if base is None and base_width is None:
        base_width = widths[0]
    given = Base(base, base_width)
    steps, seeds = whole_number(steps, "steps", 1), whole_number(seeds, "seeds", 1)

    def run(width: int, seed: int) -> _Run:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            model = make_model(width)
            apply_init_(model, plan_init(model, zero=zero, parametrization=parametrization))
            if parametrization == "mup":
                groups = param_groups(
                    model,
                    lr,
                    base=given.model,
                    base_width=given.base_width,
                    optimizer=optimizer,
                    head=head,
                )
            else:
                groups = plain_groups(model, lr, optimizer=optimizer)
            data = batch(width) if callable(batch) else batch
            value = partial(_seeded_loss, loss or _default_loss, model, data, seed)
            return _train(model, make_optimizer(groups, lr=lr), value, steps)

    runs = {width: [run(width, seed) for seed in range(seeds)] for width in widths}
    _check_layers(runs)
    title = f"{parametrization}, {optimizer}, lr {lr:g} at {given}, {steps} steps"
    return CoordinateCheck(_rows(runs), widths, bound, shrink_bound, title)


@dataclass(frozen=True, slots=True)
class _Run:
    """The size and change of each layer's output at each step, and the layers that are trained."""

    measured: dict[tuple[str, int], tuple[float, float]]
    trained: frozenset[str]


def _checked_widths(widths: Sequence[int]) -> tuple[int, ...]:
    widths = tuple(sorted({whole_number(width, "a width", 1) for width in widths}))
    if len(widths) < 2:
        raise EinlinearError(
            what=f"the widths are {list(widths)}",
            rule="a slope needs two widths or more",
            fix="give several, such as [64, 128, 256, 512]",
        )
    return widths


def _check_layers(runs: dict[int, list[_Run]]) -> None:
    """Refuse runs that did not measure the same layers."""
    expected: set[str] | None = None
    for width, at_width in runs.items():
        for seed, run in enumerate(at_width):
            layers = {layer for layer, _ in run.measured}
            expected = layers if expected is None else expected
            if differ := sorted(expected ^ layers):
                raise EinlinearError(
                    what=f"the layers at width {width} (seed {seed}) are not those at width "
                    f"{min(runs)}: {listed(differ, 8)}",
                    rule="a model has layers of the same names at every width",
                    fix="let make_model change only the widths, not the number or names of layers",
                )


def _default_loss(model: nn.Module, batch: Any) -> Tensor:
    if not (isinstance(batch, tuple | list) and len(batch) == 2):
        raise EinlinearError(
            what=f"the batch is a {type(batch).__name__}",
            rule="without a loss function, a batch is (inputs, targets)",
            fix="give batch=(inputs, targets), or loss=function of model and batch",
        )
    inputs, targets = batch
    output = model(inputs)
    if targets.is_floating_point():
        return nn.functional.mse_loss(output, targets)
    return nn.functional.cross_entropy(output.flatten(0, -2), targets.flatten())


def _seeded_loss(loss: LossFunction, model: nn.Module, batch: Any, seed: int) -> Tensor:
    """Compute the loss with the same random numbers each time, so dropout drops the same units."""
    torch.manual_seed(seed)
    return loss(model, batch)


def _train(
    model: nn.Module, optimizer: torch.optim.Optimizer, loss: Callable[[], Tensor], steps: int
) -> _Run:
    """Train, and measure the size and change of every layer's output before and after each step."""
    outputs: dict[str, Tensor] = {}

    def hook(name: str) -> Callable[..., None]:
        def record(module: nn.Module, inputs: object, output: object) -> None:
            if (tensor := _first_tensor(output)) is not None:
                outputs[name] = tensor.detach().to(torch.float32, copy=True)

        return record

    for layer in find_layers(model, frozen=True):
        layer.module.register_forward_hook(hook(layer.name))
    trained = frozenset(layer.name for layer in find_layers(model))
    measured: dict[tuple[str, int], tuple[float, float]] = {}
    start: dict[str, Tensor] = {}
    for step in range(steps + 1):
        value = loss()
        start = start or dict(outputs)
        for name, output in outputs.items():
            measured[name, step] = _rms(output), _rms(output - start[name])
        if step < steps:
            optimizer.zero_grad()
            value.backward()  # type: ignore[no-untyped-call]
            optimizer.step()
    return _Run(measured, trained)


def _first_tensor(output: object) -> Tensor | None:
    if isinstance(output, Tensor):
        return output
    if isinstance(output, tuple | list) and output:
        return _first_tensor(output[0])
    return None


def _rms(tensor: Tensor) -> float:
    return float(tensor.square().mean().sqrt())


def _rows(runs: dict[int, list[_Run]]) -> tuple[CheckRow, ...]:
    """Average what was measured over the runs of each width."""
    rows = []
    widths = tuple(runs)
    first = runs[widths[0]][0]
    for layer, step in first.measured:
        pairs = [[run.measured[layer, step] for run in at_width] for at_width in runs.values()]
        sizes = tuple(fmean(size for size, _ in pair) for pair in pairs)
        changes = tuple(fmean(change for _, change in pair) for pair in pairs)
        slopes = slope(widths, sizes), slope(widths, changes)
        rows.append(CheckRow(layer, step, sizes, changes, *slopes, layer in first.trained))
    return tuple(rows)


def slope(widths: Sequence[int], values: Sequence[float]) -> float:
    """Return the least-squares slope of log2(value) against log2(width).

    Zeros are left out; a value that is not finite makes the slope infinite.
    """
    if not all(map(isfinite, values)):
        return inf
    points = [(log2(w), log2(v)) for w, v in zip(widths, values, strict=True) if v > 0]
    return linear_regression(*zip(*points, strict=True)).slope if len(points) > 1 else 0.0
