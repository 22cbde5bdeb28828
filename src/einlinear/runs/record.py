"""RunRecord: the result of a run, as plain data."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any, Literal, cast

from einlinear.errors import EinlinearError, quote, reason
from einlinear.files.fields import field_types, typed
from einlinear.runs.config import RunConfig

SCHEMA = 2
"""The format of new records: 2 has a checksum, 1 did not. Both can be read."""

Status = Literal["finished", "diverged"]

_ADDED = ("train_loss", "accuracy")  # fields that records of earlier versions do not have


@dataclass(frozen=True, slots=True)
class LayerRouting:
    """Where a layer of experts sent the tokens of a fixed batch.

    load: the share of all token-expert pairs that each expert got.
    entropy: how even the load is: 1 if all experts have the same, 0 if one has everything.
    changed: the share of tokens that went to other experts at the previous point; None at first.
    """

    layer: str
    load: tuple[float, ...]
    entropy: float
    changed: float | None


@dataclass(frozen=True, slots=True)
class Point:
    """One evaluation of a run.

    units: number of tokens, pixels, samples or images trained on.
    macs: multiply-adds of the forward passes over them.
    seconds: time in steps so far, without evaluations, checkpoints and start-up.
    data_seconds: the part of it spent on making batches.
    loss: on the validation set; None if not finite.
    train_loss: mean over the steps since the previous point; None at the start or if not finite.
    rate: the learning rate of the last step, at the base width.
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
        """Build a point from `dataclasses.asdict`, also after JSON; raises ValueError."""
        return cast(Point, typed(cls, values, "a point"))


@dataclass(frozen=True, slots=True)
class Counts:
    """Parameters, and multiply-adds of the forward pass per unit, from shapes and plans.

    params: all parameters, including all experts.
    macs: all multiply-adds, with attention over the full context and active experts only.
    linear_macs: of the linear layers except the head.
    head_macs: of the output head.
    attention_macs: of the products of queries, keys and values.
    norm_macs: of the norms of a GPT, five per input element.
    """

    params: int
    macs: int
    linear_macs: int
    head_macs: int
    attention_macs: int
    norm_macs: int

    @property
    def product_macs(self) -> int:
        """Multiply-adds of matrix products: all except the norms."""
        return self.macs - self.norm_macs


@dataclass(frozen=True, slots=True)
class RunRecord:
    """The result of a run: its config, counts, curve and environment.

    config: what decided it.
    status: "finished", or "diverged": the loss was not finite, or stayed far above the start.
    steps_done: number of steps done; all steps of the config if it finished.
    curve: the evaluations; the first is before any step.
    unit: token, pixel, sample or image.
    counts: parameters and multiply-adds per unit.
    peak_bytes: peak memory in a step: weights, gradients, optimizer, activations.
    environment: versions, processor, threads, number of processes, a fingerprint of the data.
    train_loss: mean training loss over the last tenth of the steps; None if the run ended before,
        if it is not finite, or if an earlier version wrote the record.
    accuracy: share of validation images whose class was right at the end; None for other tasks.
    """

    config: RunConfig
    status: Status
    steps_done: int
    curve: tuple[Point, ...]
    unit: str
    counts: Counts
    peak_bytes: int
    environment: dict[str, Any]
    train_loss: float | None = None
    accuracy: float | None = None

    @property
    def id(self) -> str:
        """The id of the config."""
        return self.config.id

    @property
    def final_loss(self) -> float | None:
        """The last validation loss; None if the run diverged."""
        return self.curve[-1].loss if self.status == "finished" else None

    @property
    def best_loss(self) -> float | None:
        """The lowest validation loss of the curve; None if there is none."""
        return min((p.loss for p in self.curve if p.loss is not None), default=None)

    @property
    def seconds(self) -> float:
        """Time in steps, without evaluations, checkpoints and start-up."""
        return self.curve[-1].seconds

    @property
    def units_per_second(self) -> float:
        """Tokens, pixels, samples or images per second in steps."""
        return self.curve[-1].units / self.seconds if self.seconds else 0.0

    def as_dict(self) -> dict[str, Any]:
        """All fields and derived values as plain JSON values."""
        return {
            "schema": SCHEMA,
            "id": self.id,
            "config": self.config.as_dict(),
            "status": self.status,
            "steps_done": self.steps_done,
            "final_loss": self.final_loss,
            "best_loss": self.best_loss,
            "train_loss": self.train_loss,
            "accuracy": self.accuracy,
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
        """Build a record from `as_dict`, ignoring derived values.

        Checks the types of all fields, but not the checksum of the file: `read_record` does.
        """
        try:
            _check_schema(values["schema"], source)
            held = {
                name: typed(hint, values[name], name)
                for name, hint in field_types(cls).items()
                if name != "config" and (name in values or name not in _ADDED)
            }
            record = cls(
                config=RunConfig.from_dict(values["config"], f"the config in {source}"), **held
            )
            if not record.curve:
                raise ValueError("it has no points")
            if record.status == "finished" and record.final_loss is None:
                raise ValueError("it finished without a loss")
            return record
        except _WRONG as error:
            if isinstance(error, EinlinearError):
                raise
            missing = isinstance(error, KeyError)
            raise EinlinearError(
                what=f"cannot read {source}: {f'it lacks {error}' if missing else reason(error)}",
                rule="a record is the record.json that a run has written",
                fix="give the command of the run again to train it again",
            ) from error


# A RecursionError comes from formatting an error message: values may be nested deeply.
_WRONG = (ArithmeticError, AttributeError, KeyError, TypeError, ValueError, RecursionError)


class NewerError(EinlinearError):
    """The file is not damaged: a later version of the package wrote it."""


def _check_schema(schema: object, source: str) -> None:
    if type(schema) is not int or not 1 <= schema:
        raise ValueError(f"its schema is {quote(schema)}, not {SCHEMA}")
    if schema > SCHEMA:
        raise NewerError(
            what=f"cannot read {source}: its schema is {quote(schema)}, not {SCHEMA}",
            rule="a record is read by the version of einlinear that wrote it, or by a later one",
            fix="pip install --upgrade einlinear",
        )
