"""coordinate_check: do the layers of a model move by the same amount at every width?"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from math import inf, isfinite, log2, sqrt
from pathlib import Path
from typing import Any, Literal, get_args

import torch
from torch import Tensor, nn

from einlinear.errors import EinlinearError, quote
from einlinear.layers.scaling import Optimizer
from einlinear.models.check_plot import Panel, draw_panels
from einlinear.models.facts import find_facts, find_layers
from einlinear.models.groups import aligned, param_groups
from einlinear.models.init import Start, apply_init_, plan_init
from einlinear.structures.values import whole_number

Parametrization = Literal["mup", "naive"]
Loss = Callable[[nn.Module, Any], Tensor]

_OPTIMIZERS = {"adam": torch.optim.Adam, "sgd": torch.optim.SGD}


@dataclass(frozen=True, slots=True)
class _Run:
    """What one run measured: size and change by layer and step; which layers are trained."""

    sizes: dict[tuple[str, int], tuple[float, float]]
    trained: frozenset[str]

    @property
    def layers(self) -> list[str]:
        return list(dict.fromkeys(layer for layer, _ in self.sizes))


@dataclass(frozen=True, slots=True)
class CheckRow:
    """One layer after some steps, at every width.

    sizes are the root mean squares of its output, changes those of its difference from the output
    at the start, both averaged over seeds; slopes are those of log2 against log2 of the width.
    is_trained says whether the layer has parameters that are trained.
    """

    layer: str
    step: int
    sizes: tuple[float, ...]
    changes: tuple[float, ...]
    size_slope: float
    change_slope: float
    is_trained: bool = True

    @property
    def is_stuck(self) -> bool:
        """Whether a layer that is trained has not changed at any width."""
        return self.is_trained and not any(self.changes)


@dataclass(frozen=True, slots=True)
class CoordinateCheck:
    """What `coordinate_check` measured: a row for every layer and number of steps; print it.

    It passes if after the last step no layer's output, and no layer's change, grows faster than
    width**bound, no layer's change shrinks faster than width**-shrink_bound, and every layer that
    is trained has moved at some width. The size of an output may shrink: the head's does at the
    start.
    """

    rows: tuple[CheckRow, ...]
    widths: tuple[int, ...]
    bound: float
    shrink_bound: float
    title: str

    @property
    def last_rows(self) -> tuple[CheckRow, ...]:
        """The rows after the last step, which decide."""
        last = max(row.step for row in self.rows)
        return tuple(row for row in self.rows if row.step == last)

    @property
    def failures(self) -> tuple[CheckRow, ...]:
        """The rows that break the rule."""
        return tuple(row for row in self.last_rows if not self.is_fine(row))

    @property
    def passed(self) -> bool:
        """Whether every layer keeps to the rule."""
        return not self.failures

    def is_fine(self, row: CheckRow) -> bool:
        """Whether a row keeps to the rule."""
        highest = max(row.size_slope, row.change_slope)
        is_bound = highest <= self.bound and row.change_slope >= -self.shrink_bound
        return is_bound and not row.is_stuck

    def _verdict(self, row: CheckRow) -> str:
        if self.is_fine(row):
            return "ok"
        return "FAIL: never moves" if row.is_stuck else "FAIL"

    def __str__(self) -> str:
        head = ("layer", *(f"change at {w}" for w in self.widths), "slope", "size's slope", "")
        cells = [
            (
                row.layer,
                *(f"{change:.3g}" for change in row.changes),
                f"{row.change_slope:+.2f}",
                f"{row.size_slope:+.2f}",
                self._verdict(row),
            )
            for row in self.last_rows
        ]
        verdict = "PASS" if self.passed else f"FAIL: {len(self.failures)} of {len(cells)} layers"
        rule = f"slopes up to {self.bound:+.2f}; of changes, down to {-self.shrink_bound:+.2f}"
        return f"{self.title}\n{aligned([head, *cells], left=1)}\n{verdict} ({rule})"

    def plot(self, path: str | Path) -> Path:
        """Draw a panel for every layer, a line for every step; .svg, .png or .pdf."""
        panels = [
            Panel(
                title=row.layer + ", never moves" * row.is_stuck,
                slope=row.change_slope,
                is_fine=self.is_fine(row),
                lines=tuple(r.changes for r in self.rows if r.layer == row.layer and r.step),
            )
            for row in self.last_rows
        ]
        verdict = "pass" if self.passed else "fail"
        return draw_panels(panels, self.widths, f"{self.title}: {verdict}", Path(path))


def coordinate_check(
    make_model: Callable[[int], nn.Module],
    widths: Sequence[int],
    *,
    batch: Any = None,
    loss: Loss | None = None,
    steps: int = 4,
    lr: float = 0.01,
    base_width: int | None = None,
    optimizer: Optimizer = "adam",
    parametrization: Parametrization = "mup",
    seeds: int = 3,
    zero: str | Iterable[str] = (),
    head: str | Iterable[str] = (),
    bound: float = 0.2,
    shrink_bound: float = 0.75,
) -> CoordinateCheck:
    """Train a model at several widths for a few steps, and see how much every layer moves.

    Under a right parametrization the output of every layer changes by about the same at every
    width; where it grows with the width, a rate that suits a small model is too high for a wide
    one. Measured is the output of every layer that has parameters, after each step, on the batch
    that is trained on. The random numbers of all passes of a run are the same, so that dropout is
    not measured. Ref: [Y22 App. D].

    Args:
        make_model: makes the model of a width; its weights are initialised anew.
        widths: two or more widths.
        batch: (inputs, targets), or a function that makes them for a width.
        loss: a function of model and batch; unless given, cross entropy for targets that are
            classes, else the mean square error, of model(inputs).
        steps: of training; two or more where the head starts at zero, since only it moves in the
            first.
        lr: the rate at the base width.
        base_width: the smallest of the widths unless given.
        optimizer: "adam" or "sgd".
        parametrization: "mup" for `init_` and `param_groups`; "naive" for what most models do:
            deviations of 1 / sqrt(fan_in) and one rate for all parameters.
        seeds: how many runs are averaged, with seeds 0, 1, 2, ...
        zero: layers that start at zero, as for `init_`.
        head: the output layer, as for `param_groups`.
        bound: how fast a layer may grow.
        shrink_bound: how fast a layer's change may shrink; in chains of low-rank layers with
            ranks of sqrt(width) it does so by width**-0.5 in the first steps.
    """
    widths = _checked_widths(widths)
    if parametrization not in get_args(Parametrization) or optimizer not in _OPTIMIZERS:
        raise EinlinearError(
            what=f"parametrization is {quote(parametrization)}, optimizer is {quote(optimizer)}",
            rule='parametrization is "mup" or "naive", optimizer is "adam" or "sgd"',
            fix='try parametrization="mup", optimizer="adam"',
        )
    base = widths[0] if base_width is None else base_width
    steps, seeds = whole_number(steps, "steps", 1), whole_number(seeds, "seeds", 1)
    is_mup = parametrization == "mup"

    def run(width: int, seed: int) -> _Run:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            model = make_model(width)
            starts = plan_init(model, zero=zero)
            apply_init_(model, starts if is_mup else _naive(model, starts))
            groups: Any = [p for p in model.parameters() if p.requires_grad]
            if is_mup:
                groups = param_groups(model, lr, base_width=base, optimizer=optimizer, head=head)
            data = batch(width) if callable(batch) else batch
            chosen = _OPTIMIZERS[optimizer](groups, lr=lr)
            value = partial(_seeded_loss, loss or _default_loss, model, data, seed)
            return _train(model, chosen, value, steps)

    runs = [[run(width, seed) for seed in range(seeds)] for width in widths]
    _check_layers(widths, runs)
    title = f"{parametrization}, {optimizer}, lr {lr:g} at base width {base}, {steps} steps"
    return CoordinateCheck(_rows(widths, runs), widths, bound, shrink_bound, title)


def _checked_widths(widths: Sequence[int]) -> tuple[int, ...]:
    widths = tuple(sorted({whole_number(width, "a width", 1) for width in widths}))
    if len(widths) < 2:
        raise EinlinearError(
            what=f"the widths are {list(widths)}",
            rule="a slope needs two widths or more",
            fix="give a few, such as [64, 128, 256, 512]",
        )
    return widths


def _check_layers(widths: tuple[int, ...], runs: list[list[_Run]]) -> None:
    """All runs must have measured the same layers."""
    first = runs[0][0].layers
    for width, at_width in zip(widths, runs, strict=True):
        for seed, run in enumerate(at_width):
            if differ := sorted(set(first) ^ set(run.layers)):
                raise EinlinearError(
                    what=f"the layers at width {width} (seed {seed}) are not those at width "
                    f"{widths[0]}: {', '.join(differ[:8])}{', ...' * (len(differ) > 8)}",
                    rule="a model has the same layers, by name, at every width",
                    fix="let make_model change widths only, not the number or names of layers",
                )


def _naive(model: nn.Module, starts: tuple[Start, ...]) -> tuple[Start, ...]:
    """Matrices of deviation 1 / sqrt(fan_in); all else, zeros too, as planned."""
    scaling = {fact.name: fact.scaling for fact in find_facts(model, frozen=True)}
    return tuple(
        replace(start, std=1 / sqrt(scaling[start.name].fan_in))
        if start.std and scaling[start.name].kind == "matrix"
        else start
        for start in starts
    )


def _default_loss(model: nn.Module, batch: Any) -> Tensor:
    if not (isinstance(batch, tuple | list) and len(batch) == 2):
        raise EinlinearError(
            what=f"the batch is a {type(batch).__name__}",
            rule="without a loss of your own a batch is (inputs, targets)",
            fix="give batch=(inputs, targets), or loss=function of model and batch",
        )
    inputs, targets = batch
    output = model(inputs)
    if targets.is_floating_point():
        return nn.functional.mse_loss(output, targets)
    return nn.functional.cross_entropy(output.flatten(0, -2), targets.flatten())


def _seeded_loss(loss: Loss, model: nn.Module, batch: Any, seed: int) -> Tensor:
    """The loss, with the same random numbers each time: what dropout drops stays the same."""
    torch.manual_seed(seed)
    return loss(model, batch)


def _train(
    model: nn.Module, optimizer: torch.optim.Optimizer, loss: Callable[[], Tensor], steps: int
) -> _Run:
    """The size and the change of every layer's output before and after each step."""
    outputs: dict[str, Tensor] = {}

    def hook(name: str) -> Callable[..., None]:
        def record(module: nn.Module, inputs: object, output: object) -> None:
            if (tensor := _first_tensor(output)) is not None:
                outputs[name] = tensor.detach().to(torch.float32, copy=True)

        return record

    for layer in find_layers(model, frozen=True):
        layer.module.register_forward_hook(hook(layer.name))
    trained = frozenset(layer.name for layer in find_layers(model))
    sizes: dict[tuple[str, int], tuple[float, float]] = {}
    start: dict[str, Tensor] = {}
    for step in range(steps + 1):
        value = loss()
        start = start or dict(outputs)
        for name, output in outputs.items():
            sizes[name, step] = _rms(output), _rms(output - start[name])
        if step < steps:
            optimizer.zero_grad()
            value.backward()  # type: ignore[no-untyped-call]
            optimizer.step()
    return _Run(sizes, trained)


def _first_tensor(output: object) -> Tensor | None:
    if isinstance(output, Tensor):
        return output
    if isinstance(output, tuple | list) and output:
        return _first_tensor(output[0])
    return None


def _rms(tensor: Tensor) -> float:
    return float(tensor.square().mean().sqrt())


def _rows(widths: tuple[int, ...], runs: list[list[_Run]]) -> tuple[CheckRow, ...]:
    """Rows of what was measured, averaged over the runs of each width."""
    rows = []
    first = runs[0][0]
    for layer, step in first.sizes:
        pairs = [[run.sizes[layer, step] for run in at_width] for at_width in runs]
        sizes = tuple(sum(size for size, _ in pair) / len(pair) for pair in pairs)
        changes = tuple(sum(change for _, change in pair) / len(pair) for pair in pairs)
        slopes = slope(widths, sizes), slope(widths, changes)
        is_trained = layer in first.trained
        rows.append(CheckRow(layer, step, sizes, changes, *slopes, is_trained))
    return tuple(rows)


def slope(widths: Sequence[int], values: Sequence[float]) -> float:
    """The slope of the line through log2(value) against log2(width), by least squares.

    Values that are zero say nothing and are left out; one that is not finite makes it infinite.
    """
    if not all(map(isfinite, values)):
        return inf
    points = [(log2(w), log2(v)) for w, v in zip(widths, values, strict=True) if v > 0]
    if len(points) < 2:
        return 0.0
    mean_x = sum(x for x, _ in points) / len(points)
    mean_y = sum(y for _, y in points) / len(points)
    spread = sum((x - mean_x) ** 2 for x, _ in points)
    return sum((x - mean_x) * (y - mean_y) for x, y in points) / spread
