"""The settings of a learning-rate landscape, and the study of runs that they stand for."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, get_args

from einlinear.errors import EinlinearError, quote
from einlinear.files.whole import as_path
from einlinear.layers.scaling import Parametrization
from einlinear.models.choices import ActivationName
from einlinear.runs.settings import Device, OptimizerName
from einlinear.structures.plan import make_plan
from einlinear.structures.text import parse_structure
from einlinear.structures.values import one_of, whole_number
from einlinear.sweeps.study import Study

_OWN_RATES = {"naive": "naive_rates", "unit": "unit_rates"}
_EXPONENTS = (-40, 10)
_MOST_VALUES = 1_000  # of structures or widths
_MOST_RUNS = 100_000  # as in any study


@dataclass(frozen=True, slots=True)
class LandscapeConfig:
    """Everything that decides a landscape except the data.

    Args:
        structures: structures of the two inner layers; the best rate of the first is transferred.
        widths: widths of the hidden layers; the smallest is the base width of µP.
        rates: lowest and highest learning rate, as powers of two; tries all powers in between.
        naive_rates: the same for the naive runs; by default the same rates.
        unit_rates: the same for the runs with unit weights; by default the same rates.
        parametrizations: what to compare, in this order: naive; mup; unit, the baseline of the
            paper, naive with weights of unit variance in the inner layers.
        seeds: number of runs of each setting.
        steps: training steps.
        batch: images per step.
        pool: side of the squares of pixels to average before training.
        activation: activation between the layers.
        weight_norm: whether the inner layers normalise their factors.
        optimizer: adamw, or muon, whose best rates are higher.
        device: cpu, cuda, or auto: cuda if available.
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
    unit_rates: tuple[int, int] | None = None
    parametrizations: tuple[Parametrization, ...] = ("naive", "mup")
    seeds: int = 3
    steps: int = 200
    batch: int = 128
    pool: int = 1
    activation: ActivationName = "relu"
    weight_norm: bool = False
    optimizer: OptimizerName = "adamw"
    device: Device = "cpu"

    def __post_init__(self) -> None:
        lists = {
            "structures": "dense and btt",
            "widths": "64 and 256",
            "parametrizations": "naive and mup",
        }
        for name, example in lists.items():
            values = getattr(self, name)
            is_list = isinstance(values, tuple | list) and 0 < len(values) <= _MOST_VALUES
            if not is_list or len(set(map(quote, values))) < len(values):
                raise EinlinearError(
                    what=f"{name} are {_listed(values)}",
                    rule=f"a landscape has one or more {name}, each once",
                    fix=f"give {name} such as {example}, or leave them out",
                )
        for parametrization in self.parametrizations:
            one_of(parametrization, "a parametrization", get_args(Parametrization))
        _check_structures(self.structures, self.widths, is_linear=not self.weight_norm)
        lowest = {"seeds": 1, "steps": 10, "batch": 1, "pool": 1}
        for name, low in lowest.items():
            whole_number(getattr(self, name), name, low)
        for name in ("rates", *_OWN_RATES.values()):
            _check_rates(name, getattr(self, name))
        runs: int = len(self.structures) * len(self.widths) * self.seeds
        runs *= sum(len(self.exponents(name)) for name in self.parametrizations)
        if runs > _MOST_RUNS:
            raise EinlinearError(
                what=f"the landscape has {runs:,} runs",
                rule=f"a landscape has at most {_MOST_RUNS:,} runs: structures x widths x rates x "
                "seeds, for each parametrization",
                fix="give fewer seeds, rates, widths or structures",
            )
        one_of(self.activation, "activation", get_args(ActivationName))
        one_of(self.optimizer, "optimizer", get_args(OptimizerName))
        one_of(self.device, "device", get_args(Device))

    def exponents(self, parametrization: Parametrization) -> range:
        """The learning rates of a parametrization, as powers of two, lowest first."""
        low, high = getattr(self, self.rates_name(parametrization))
        return range(low, high + 1)

    def rates_name(self, parametrization: Parametrization) -> str:
        """The setting that has the rates of a parametrization: its own, if given, or rates."""
        own = _OWN_RATES.get(parametrization, "rates")
        return "rates" if getattr(self, own) is None else own


def _check_structures(structures: Sequence[str], widths: Sequence[int], *, is_linear: bool) -> None:
    """Refuse structures that a width is too small for, and two spellings of one.

    is_linear: whether "dense" is nn.Linear, which is not an einsum of the same structure.
    """
    spelled: dict[object, str] = {}
    for structure in structures:
        parsed = parse_structure(structure)
        for width in widths:
            make_plan(parsed, width, width)
        key = structure if is_linear and structure == "dense" else parsed
        first = spelled.setdefault(key, structure)
        if first != structure:
            raise EinlinearError(
                what=f"structures are {quote(first)} and {quote(structure)}, two spellings of "
                f"{parsed}",
                rule="a landscape has one or more structures, each once",
                fix="leave one of the two out",
            )


def _listed(values: object) -> str:
    return quote(list(values) if isinstance(values, tuple) else values)


def _check_rates(name: str, rates: tuple[int, int] | None) -> None:
    if rates is None and name in _OWN_RATES.values():
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


def make_study(config: LandscapeConfig, data: str | Path | None = None) -> Study:
    """All runs of a landscape as a Study: by parametrization, widths from narrow to wide.

    Runs that landscapes of other settings share have the same ids, so they are trained once.
    """
    base: dict[str, Any] = {
        "task": "cifar",
        "device": config.device,
        "pool": config.pool,
        "activation": config.activation,
        "weight_norm": config.weight_norm,
        "batch_size": config.batch,
        "steps": config.steps,
        "warmup": 0,
        "grad_clip": 0,
        "eval_points": 1,  # and the one before the first step
        "eval_size": 10**9,  # all test images
        "checkpoint_every": 0,  # a run takes seconds
        "save_model": False,
    }
    if config.optimizer != "adamw":
        base["optimizer"] = config.optimizer
    if data is not None:
        base["data"] = str(as_path(data, "the file of images"))
    structures = config.structures
    if config.weight_norm:  # of dense layers too, which nn.Linear does not have
        structures = tuple(str(parse_structure(structure)) for structure in structures)
    grids: list[dict[str, Any]] = [
        {
            "parametrization": parametrization,
            "structure": structures,
            "width": sorted(config.widths),
            "lr": [2.0**rate for rate in config.exponents(parametrization)],
            "seed": range(config.seeds),
        }
        | ({"base_width": min(config.widths)} if parametrization == "mup" else {})
        for parametrization in config.parametrizations
    ]
    return Study("landscape", base, tuple(grids))
