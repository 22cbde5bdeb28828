"""RunRecord: what a run did, as plain data."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any, Literal

from einlinear.errors import EinlinearError, quote, reason
from einlinear.studies.config import RunConfig
from einlinear.studies.fields import field_types, typed

SCHEMA = 2
"""What records are written as: 2 has a seal, which 1 had not. Both are read."""

Status = Literal["finished", "diverged"]


@dataclass(frozen=True, slots=True)
class LayerRouting:
    """Where a layer of experts sent the tokens of a fixed batch.

    layer: its name.
    load: share of all pairs of token and expert that each expert got.
    entropy: how evenly the load is spread: 1 if all experts have the same, 0 if one has all.
    changed: share of the tokens that went to other experts at the point before; None at the first.
    """

    layer: str
    load: tuple[float, ...]
    entropy: float
    changed: float | None


@dataclass(frozen=True, slots=True)
class Point:
    """One evaluation of a run.

    step: how many steps were done.
    units: how many tokens, pixels, samples or images were trained on.
    macs: multiply-adds of the forward passes over them.
    seconds: time in steps so far: no evaluation, checkpoint or start.
    data_seconds: the part of it in which batches were made.
    loss: on the validation set; None where it was not finite.
    train_loss: mean over the steps since the point before; None at the start and if not finite.
    rate: the learning rate of the last step, at the base width.
    routing: of every layer of experts.
    """

    step: int
    units: int
    macs: int
    seconds: float
    data_seconds: float
    loss: float | None
    train_loss: float | None
    rate: float
    routing: tuple[LayerRouting, ...] = ()

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Point:
        """A point as `dataclasses.asdict` gives it, by way of JSON, too; else a ValueError."""
        point: Point = typed(cls, values, "a point")
        return point


@dataclass(frozen=True, slots=True)
class Counts:
    """Parameters, and multiply-adds of the forward pass per unit, from shapes and plans.

    params: all parameters; those of a mixture are those of all experts.
    macs: all multiply-adds, attention over the full context; active experts only.
    linear_macs: of the linear layers but the head.
    head_macs: of the output head.
    attention_macs: of the products of queries, keys and values.
    norm_macs: of the norms, five for each number they read; only those of a GPT are counted.
    """

    params: int
    macs: int
    linear_macs: int
    head_macs: int
    attention_macs: int
    norm_macs: int

    @property
    def product_macs(self) -> int:
        """Those of products of matrices: all but the norms."""
        return self.macs - self.norm_macs


@dataclass(frozen=True, slots=True)
class RunRecord:
    """What a run did: its config, counts, curve and surroundings.

    config: what decided it.
    status: "finished", or "diverged": the loss was not finite, or stayed far above the start.
    steps_done: how many steps were done; all of the config's if it finished.
    curve: the evaluations, the first before any step.
    unit: what is counted: token, pixel, sample or image.
    counts: parameters and multiply-adds per unit.
    peak_bytes: most bytes held at once in a step: weights, gradients, optimizer, activations.
    environment: versions, processor, threads, number of processes, the data.
    """

    config: RunConfig
    status: Status
    steps_done: int
    curve: tuple[Point, ...]
    unit: str
    counts: Counts
    peak_bytes: int
    environment: dict[str, Any]

    @property
    def id(self) -> str:
        """The id of the config."""
        return self.config.id

    @property
    def final_loss(self) -> float | None:
        """The last validation loss; None for a run that diverged."""
        return self.curve[-1].loss if self.status == "finished" else None

    @property
    def best_loss(self) -> float | None:
        """The lowest validation loss of the curve; None if there is none."""
        return min((p.loss for p in self.curve if p.loss is not None), default=None)

    @property
    def seconds(self) -> float:
        """Time in steps: no evaluation, checkpoint or start."""
        return self.curve[-1].seconds

    @property
    def units_per_second(self) -> float:
        """Tokens, pixels, samples or images per second in steps."""
        return self.curve[-1].units / self.seconds if self.seconds else 0.0

    def as_dict(self) -> dict[str, Any]:
        """All fields, and what follows from them, as JSON has them."""
        return {
            "schema": SCHEMA,
            "id": self.id,
            "config": self.config.as_dict(),
            "status": self.status,
            "steps_done": self.steps_done,
            "final_loss": self.final_loss,
            "best_loss": self.best_loss,
            "unit": self.unit,
            "counts": asdict(self.counts),
            "seconds": self.seconds,
            "units_per_second": self.units_per_second,
            "peak_bytes": self.peak_bytes,
            "environment": self.environment,
            "curve": [asdict(point) for point in self.curve],
        }

    @classmethod
    def from_dict(cls, values: Mapping[str, Any], source: str = "a record") -> RunRecord:
        """A record as `as_dict` gives it; what follows from other fields is not read.

        The types of all fields are checked. The seal is that of a file: `read_record` checks it.
        """
        try:
            _check_schema(values["schema"], source)
            held = {
                name: typed(hint, values[name], name)
                for name, hint in field_types(cls).items()
                if name != "config"
            }
            record = cls(
                config=RunConfig.from_dict(values["config"], f"the config in {source}"), **held
            )
            if not record.curve:
                raise ValueError("it has no points")
            if record.status == "finished" and record.final_loss is None:
                raise ValueError("it has finished without a loss")
            return record
        except _WRONG as error:
            if isinstance(error, EinlinearError):
                raise
            missing = isinstance(error, KeyError)
            raise EinlinearError(
                what=f"cannot read {source}: {f'it lacks {error}' if missing else reason(error)}",
                rule="a record is the record.json that a run has written",
                fix="give the command of the run again, which trains it again",
            ) from error


# A RecursionError is that of an error message: values may be nested as deeply as can be read.
_WRONG = (ArithmeticError, AttributeError, KeyError, TypeError, ValueError, RecursionError)


class NewerError(EinlinearError):
    """A file was written by a later version of the package: it is not damaged."""


def _check_schema(schema: object, source: str) -> None:
    if type(schema) is not int or not 1 <= schema:
        raise ValueError(f"its schema is {quote(schema)}, not {SCHEMA}")
    if schema > SCHEMA:
        raise NewerError(
            what=f"cannot read {source}: its schema is {quote(schema)}, not {SCHEMA}",
            rule="a record is read by the version of einlinear that wrote it, or by a later one",
            fix="pip install --upgrade einlinear",
        )
