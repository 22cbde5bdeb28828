"""What a learning-rate landscape runs: its settings, the runs they stand for, what a run gives."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import product
from math import inf
from typing import Literal, get_args

from einlinear.errors import EinlinearError, quote
from einlinear.structures.plan import make_plan
from einlinear.structures.text import parse
from einlinear.structures.values import whole_number

Parametrization = Literal["naive", "mup"]
Activation = Literal["relu", "gelu"]
PARAMETRIZATIONS: tuple[Parametrization, ...] = get_args(Parametrization)

_EXPONENTS = (-40, 10)
_MOST = 1e300
_MOST_VALUES = 1_000  # of structures or widths
_MOST_RUNS = 1_000_000
_DIVERGED = 1.1  # of the loss at the start


@dataclass(frozen=True, slots=True)
class LandscapeConfig:
    """Everything that decides a landscape, but the data.

    Args:
        structures: of the two inner layers; the first is the one whose rate is transferred.
        widths: of the hidden layers; the smallest is the base width of muP.
        rates: lowest and highest rate, as powers of two; all powers between are run.
        naive_rates: the same for the naive runs, where they need others.
        seeds: how many runs of each setting.
        steps: of training.
        batch: images in a step.
        pool: side of the squares of pixels that are averaged to one.
        activation: between the layers.
        weight_norm: whether the inner layers normalise their factors.
    """

    structures: tuple[str, ...] = (
        "dense",
        "low_rank",
        "kronecker",
        "tensor_train(rank_exponent=1/4)",
        "btt",
        "theta(1/2,1/4,1/4,1/4,1/2,1/4,0)",
    )
    widths: tuple[int, ...] = (64, 128, 256, 512, 1024)
    rates: tuple[int, int] = (-12, -4)
    naive_rates: tuple[int, int] | None = None
    seeds: int = 3
    steps: int = 200
    batch: int = 128
    pool: int = 1
    activation: Activation = "relu"
    weight_norm: bool = False

    def __post_init__(self) -> None:
        for name, example in (("structures", '("dense", "btt")'), ("widths", "(64, 256)")):
            values = getattr(self, name)
            is_list = isinstance(values, tuple | list) and 0 < len(values) <= _MOST_VALUES
            if not is_list or len(set(map(quote, values))) < len(values):
                raise EinlinearError(
                    what=f"{name} are {_listed(values)}",
                    rule=f"a landscape has one or more {name}, each once",
                    fix=f"give {name} such as {example}, or leave them out",
                )
        for structure, width in product(self.structures, self.widths):
            make_plan(parse(structure), width, width)
        lowest = {"seeds": 1, "steps": 10, "batch": 1, "pool": 1}
        for name, low in lowest.items():
            whole_number(getattr(self, name), name, low)
        for name in ("rates", "naive_rates"):
            _check_rates(name, getattr(self, name))
        runs = len(self.structures) * len(self.widths) * self.seeds
        runs *= sum(len(self.exponents(name)) for name in PARAMETRIZATIONS)
        if runs > _MOST_RUNS:
            raise EinlinearError(
                what=f"the landscape has {runs:,} runs",
                rule=f"a landscape has at most {_MOST_RUNS:,} runs: structures x widths x rates x "
                "seeds, naive and under muP",
                fix="give fewer seeds, rates, widths or structures",
            )
        is_known = isinstance(self.activation, str) and self.activation in get_args(Activation)
        if not is_known:
            raise EinlinearError(
                what=f"the activation is {quote(self.activation)}",
                rule=f"the activation is one of {', '.join(get_args(Activation))}",
                fix='try "relu"',
            )

    def exponents(self, parametrization: Parametrization) -> range:
        """The rates of a parametrization, as powers of two, lowest first."""
        is_own = parametrization == "naive" and self.naive_rates is not None
        low, high = self.naive_rates if is_own and self.naive_rates else self.rates
        return range(low, high + 1)


def _listed(values: object) -> str:
    return quote(list(values) if isinstance(values, tuple) else values)


def _check_rates(name: str, rates: tuple[int, int] | None) -> None:
    if rates is None and name == "naive_rates":
        return
    if isinstance(rates, tuple | list) and len(rates) == 2:
        low, high = (whole_number(end, f"an end of {name}", *_EXPONENTS) for end in rates)
        if low <= high:
            return
    raise EinlinearError(
        what=f"{name} are {_listed(rates)}",
        rule="rates go from a power of two to a higher one",
        fix="give two whole numbers, the lower first: -12 -4 is 1/4096 to 1/16",
    )


@dataclass(frozen=True, slots=True)
class Run:
    """Everything that decides one run; two runs of equal settings give equal numbers.

    rate is the power of two. base_width is None for naive runs, which know none. data is the
    fingerprint of the images.
    """

    parametrization: Parametrization
    structure: str
    width: int
    rate: int
    seed: int
    steps: int
    batch: int
    activation: Activation
    weight_norm: bool
    base_width: int | None
    data: str


@dataclass(frozen=True, slots=True)
class RunResult:
    """What a run gave. A loss is None where it was not finite.

    train_loss is the mean over the last tenth of the steps, or over the last tenth that was run if
    the run was given up; start_loss is the test loss before the first step.
    """

    run: Run
    start_loss: float
    train_loss: float | None
    test_loss: float | None
    test_accuracy: float
    steps_done: int
    seconds: float

    def check(self) -> None:
        """Raise a ValueError if a value is not of its type, as in a file that is damaged."""
        run, number = self.run, (int, float)
        kinds: dict[str, tuple[object, tuple[type, ...]]] = {
            **{name: (getattr(run, name), (str,)) for name in ("structure", "data")},
            **{name: (getattr(run, name), (int,)) for name in ("width", "rate", "seed", "steps")},
            "batch": (run.batch, (int,)),
            "weight_norm": (run.weight_norm, (bool,)),
            "base_width": (run.base_width, (int, type(None))),
            "start_loss": (self.start_loss, number),
            "train_loss": (self.train_loss, (*number, type(None))),
            "test_loss": (self.test_loss, (*number, type(None))),
            "test_accuracy": (self.test_accuracy, number),
            "steps_done": (self.steps_done, (int,)),
            "seconds": (self.seconds, number),
        }
        for name, (value, types) in kinds.items():
            is_number = isinstance(value, number)
            if type(value) not in types or (is_number and not abs(value) < _MOST):  # type: ignore[arg-type]
                raise ValueError(f"its {name} is {quote(value)}")
        losses = [self.start_loss, self.train_loss or 0.0, self.test_loss or 0.0]
        if min(*losses, self.steps_done, self.seconds, self.test_accuracy) < 0:
            raise ValueError("a loss, time or number is below 0")
        for name, known in (("parametrization", Parametrization), ("activation", Activation)):
            if getattr(run, name) not in get_args(known):
                raise ValueError(f"its {name} is {quote(getattr(run, name))}")

    @property
    def diverged(self) -> bool:
        """Given up, not finite, or ended more than a tenth above the loss at the start."""
        is_above = self.train_loss is None or self.train_loss > _DIVERGED * self.start_loss
        return is_above or self.steps_done < self.run.steps

    @property
    def loss(self) -> float:
        """The training loss, infinite for a run that diverged."""
        return inf if self.diverged or self.train_loss is None else self.train_loss


def plan_runs(config: LandscapeConfig, data: str) -> tuple[Run, ...]:
    """All runs of a landscape on the data of this fingerprint; widths from narrow to wide."""
    return tuple(
        Run(
            parametrization=parametrization,
            structure=structure,
            width=width,
            rate=rate,
            seed=seed,
            steps=config.steps,
            batch=config.batch,
            activation=config.activation,
            weight_norm=config.weight_norm,
            base_width=min(config.widths) if parametrization == "mup" else None,
            data=data,
        )
        for parametrization in PARAMETRIZATIONS
        for structure, width in product(config.structures, sorted(config.widths))
        for rate in config.exponents(parametrization)
        for seed in range(config.seeds)
    )


def cost(run: Run, d_in: int) -> float:
    """About how long a run takes compared with others: multiply-adds, and what a step costs."""
    plan = make_plan(parse(run.structure), run.width, run.width)
    macs = d_in * run.width + 2 * plan.macs
    return run.steps * (run.batch * macs + _STEP_MACS)


_STEP_MACS = 2e7  # what a step costs beside its products, in multiply-adds
