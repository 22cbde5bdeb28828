"""RunConfig: everything that decides a training run, as plain data."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, fields
from difflib import get_close_matches
from functools import cache
from hashlib import sha256
from math import isfinite, nan
from numbers import Real
from pathlib import Path
from typing import Any, Literal, get_args

from einlinear.errors import EinlinearError, quote, shorten
from einlinear.layers.scaling import EMBEDDING_STD
from einlinear.structures.named import dense
from einlinear.structures.text import parse
from einlinear.structures.values import whole_number
from einlinear.studies.presets import OWN_FIELDS, SEQUENCE_TASKS, Preset, TaskName, preset_values

Schedule = Literal["constant", "cosine", "wsd"]
Precision = Literal["float32", "bfloat16"]
Positions = Literal["learned", "rotary", "alibi"]
VocabularyName = Literal["ascii", "gpt2"]
Rule = Literal["drop", "fold"]
Device = Literal["auto", "cpu", "cuda"]
Shard = Literal["ddp", "fsdp2"]
ExpertsOf = Literal["linear", "ffn"]

NOT_IN_ID = ("preset", "checkpoint_every", "shard")
"""Fields that do not change what a run computes, and so are no part of its id.

A preset only fills in other fields; how often a run is saved and over how many devices it is spread
changes no number but for rounding.
"""

_BY_PRESET: Any = None  # the default of a field that the preset decides

# Lowest and highest value of a field.
_MOST, _MOST_STEPS = 10**9, 10**12
_WHOLE: dict[str, tuple[int, int]] = {
    "num_experts": (0, _MOST),
    "num_active": (1, _MOST),
    "width": (1, _MOST),
    "depth": (1, _MOST),
    "head_size": (1, _MOST),
    "context": (1, _MOST),
    "teacher_width": (1, _MOST),
    "teacher_depth": (1, _MOST),
    "batch_size": (1, _MOST),
    "accumulation": (1, _MOST),
    "steps": (1, _MOST_STEPS),
    "base_width": (1, _MOST),
    "warmup": (0, _MOST_STEPS),
    "eval_points": (1, 10**6),
    "eval_size": (1, _MOST),
    "seed": (0, 2**63 - 1),
    "checkpoint_every": (0, _MOST_STEPS),
}
# The same for numbers; a field named here with True must be above its lowest value.
_REAL: dict[str, tuple[float, float | None, bool]] = {
    "lr": (0, None, True),
    "balance": (0, None, False),
    "embedding_std": (0, None, True),
    "weight_decay": (0, None, False),
    "grad_clip": (0, None, False),
    "decay_share": (0, 1, False),
    "final_rate": (0, 1, False),
    "ema": (0, 1, False),
}
_CHOICES: dict[str, tuple[str, ...]] = {
    "task": get_args(TaskName),
    "experts": get_args(ExpertsOf),
    "preset": get_args(Preset),
    "vocabulary": get_args(VocabularyName),
    "rule": get_args(Rule),
    "positions": get_args(Positions),
    "schedule": get_args(Schedule),
    "precision": get_args(Precision),
    "device": get_args(Device),
    "shard": get_args(Shard),
}
_FLAGS = ("convert_head", "head_aligned", "weight_norm", "tied", "compile")


@dataclass(frozen=True, slots=True, kw_only=True)
class RunConfig:
    """Everything that decides a run; two runs of equal configs give equal numbers.

    A field that is left out, or None, is filled in by the preset, for the task. Fields that the
    task does not have stay None: head_size, context and so on of an MLP.

    Args:
        task: text, pixels, regression or cifar.
        preset: what fields that are left out become: "cpu" learns something in minutes on a
            processor, "paper" is the setting of [P24].
        data: a file or folder of data; the data set in the package unless given.
        validation: a file of text for validation; a part of the data unless given.
        rule: for characters outside ascii, where the data is text: drop the document, or fold them.
        structure: of the linear layers; "dense" leaves them as nn.Linear.
        experts: what an expert is, if there are any: linear, one in the place of a linear layer, of
            the structure; or ffn, a dense feed-forward net of a block of a GPT, the standard MoE.
        num_experts: experts of each layer; 0 is no mixture of experts.
        num_active: experts that each token uses.
        balance: weight of the balance loss, a mean over the gates.
        convert_head: whether the output head gets the structure, too.
        head_aligned: whether the structures of queries, keys, values and the output of attention
            are aligned with its heads.
        weight_norm: whether structured layers normalise their factors.
        width: of the model.
        depth: blocks of a GPT or of a residual MLP, hidden layers of an MLP.
        head_size: width of an attention head.
        context: tokens of a sequence.
        vocabulary: ascii, which is 96 symbols, or gpt2, which is 50257 byte pairs.
        positions: learned, rotary or alibi.
        embedding_std: deviation of the embeddings at the start.
        tied: whether the head shares the embeddings.
        teacher_width: width of the network to be learned.
        teacher_depth: layers of the network to be learned.
        batch_size: sequences, samples or images in a step, of all devices together.
        accumulation: parts in which each device computes its share of the batch.
        steps: of training.
        lr: rate at the base width.
        base_width: the width at which the rate was found.
        schedule: constant, cosine, or wsd (constant, then a linear decay), after the warm-up.
        warmup: steps in which the rate grows from 0; at most a tenth of the steps unless given.
        decay_share: share of the steps in which wsd decays.
        final_rate: where cosine and wsd end, as a share of the rate.
        betas: of AdamW.
        weight_decay: of AdamW, at the base width.
        grad_clip: largest norm of the gradient; 0 is no limit.
        precision: float32, or bfloat16 by autocast.
        seed: of weights and batches.
        eval_points: evaluations, at steps that grow geometrically, besides the one at the start.
        eval_size: sequences, samples or images of the validation set, at most.
        ema: the loss is that of an average of the weights over about this share of the steps so
            far; 0 is no average.
        compile: whether the model is compiled by torch.compile.
        device: cpu, cuda, or auto: cuda where there is one.
        shard: how a model is spread over many devices: ddp or fsdp2.
        checkpoint_every: steps between checkpoints; 0 is none.
    """

    task: TaskName = "text"
    preset: Preset = "cpu"
    data: str | None = None
    validation: str | None = None
    rule: Rule | None = None
    structure: str = "dense"
    experts: ExpertsOf = "linear"
    num_experts: int = 0
    num_active: int = 2
    balance: float = 0.01
    convert_head: bool = False
    head_aligned: bool | None = None
    weight_norm: bool = True
    width: int = _BY_PRESET
    depth: int = _BY_PRESET
    head_size: int | None = None
    context: int | None = None
    vocabulary: VocabularyName | None = None
    positions: Positions | None = None
    embedding_std: float | None = None
    tied: bool | None = None
    teacher_width: int | None = None
    teacher_depth: int | None = None
    batch_size: int = _BY_PRESET
    accumulation: int = 1
    steps: int = _BY_PRESET
    lr: float = _BY_PRESET
    base_width: int = _BY_PRESET
    schedule: Schedule = _BY_PRESET
    warmup: int = _BY_PRESET
    decay_share: float = 0.2
    final_rate: float = 0.0
    betas: tuple[float, float] = _BY_PRESET
    weight_decay: float = _BY_PRESET
    grad_clip: float = 1.0
    precision: Precision = "float32"
    seed: int = 0
    eval_points: int = _BY_PRESET
    eval_size: int = _BY_PRESET
    ema: float = _BY_PRESET
    compile: bool = False
    device: Device = "auto"
    shard: Shard = "ddp"
    checkpoint_every: int = _BY_PRESET

    def __post_init__(self) -> None:
        for name in ("task", "preset"):
            _check_choice(name, getattr(self, name))
        if self.tied is True and self.embedding_std is None:
            self._set("embedding_std", EMBEDDING_STD)  # larger ones would make large logits
        preset = preset_values(self.task, self.preset)
        steps = whole_number(
            preset["steps"] if self.steps is None else self.steps, "steps", *_WHOLE["steps"]
        )
        preset["warmup"] = min(preset["warmup"], steps // 10)  # the rate is reached in short runs
        preset["checkpoint_every"] = max(1, min(1000, steps // 10))
        for name, value in preset.items():
            if getattr(self, name) is None:
                self._set(name, value)
        for field in fields(self):
            self._set(field.name, _checked(self.task, field.name, getattr(self, field.name)))
        self._check_together()

    def _set(self, name: str, value: object) -> None:
        object.__setattr__(self, name, value)

    def _check_together(self) -> None:
        """What no field can say alone."""
        _one_form(self.structure)
        if self.num_experts:
            fix = f"give an int from 1 to num_experts, which is {self.num_experts}"
            whole_number(self.num_active, "num_active", 1, self.num_experts, fix=fix)
        if self.experts == "ffn":
            self._check_feed_forward()
        if self.head_size is not None and self.width % self.head_size:
            raise EinlinearError(
                what=f"the width is {self.width}, the head_size {self.head_size}",
                rule="attention heads share out the width of the model",
                fix=f"give a width that is a multiple of {self.head_size}, or another head_size",
            )
        if self.batch_size % self.accumulation:
            raise EinlinearError(
                what=f"the batch_size is {self.batch_size}, the accumulation {self.accumulation}",
                rule="a batch is computed in parts of the same size",
                fix="give a batch_size that is a multiple of the accumulation",
            )
        if self.tied and self.convert_head and self.structure != "dense":
            raise EinlinearError(
                what="convert_head is set, and the head is tied to the embeddings",
                rule="a head with a structure has weights of its own",
                fix="leave tied or convert_head out",
            )
        if self.head_aligned and self.structure == "dense":
            raise EinlinearError(
                what="head_aligned is set, and the structure is dense",
                rule="axes of a structure are aligned with heads; a dense layer has none",
                fix='give a structure such as "btt", or leave head_aligned out',
            )

    def _check_feed_forward(self) -> None:
        """What experts that are feed-forward nets need."""
        has_nets = self.task in SEQUENCE_TASKS
        if not has_nets or self.structure != "dense" or not self.num_experts:
            raise EinlinearError(
                what=f'experts is "ffn", the task {self.task}, the structure '
                f"{quote(self.structure)}, num_experts {self.num_experts}",
                rule="one expert or more are dense feed-forward nets of a GPT, whose tasks are "
                + " and ".join(SEQUENCE_TASKS),
                fix='give experts="ffn", num_experts=8 and no structure; or leave experts out',
            )

    @property
    def id(self) -> str:
        """A short name that follows from all fields but NOT_IN_ID."""
        values = {k: v for k, v in self.as_dict().items() if k not in NOT_IN_ID}
        if self.structure != "dense":
            values["structure"] = _one_form(self.structure)
        elif self.num_experts:
            values["structure"] = str(dense())
        return sha256(json.dumps(values, sort_keys=True).encode()).hexdigest()[:16]

    def as_dict(self) -> dict[str, Any]:
        """All fields as JSON has them."""
        values = {field.name: getattr(self, field.name) for field in fields(self)}
        return values | {"betas": list(self.betas)}

    def to_json(self) -> str:
        """All fields as a JSON text, which `load_config` reads."""
        return json.dumps(self.as_dict(), indent=1)

    def to_toml(self) -> str:
        """All fields that the task has as a TOML text, which `load_config` reads."""
        values = {name: value for name, value in self.as_dict().items() if value is not None}
        return "".join(f"{name} = {toml_value(value)}\n" for name, value in values.items())

    @classmethod
    def from_dict(cls, values: Mapping[str, object], source: str = "a config") -> RunConfig:
        """A config from its fields by name; `source` says in an error where they stand."""
        known = [field.name for field in fields(cls)]
        if not isinstance(values, Mapping):
            raise EinlinearError(
                what=f"{source} is {quote(values)}",
                rule="a config is a table of fields by name",
                fix='give {"task": "text", "structure": "btt"}',
            )
        for name in values:
            if name not in known:
                close = get_close_matches(quote(name)[:40], known, 1, 0.5)
                raise EinlinearError(
                    what=f"unknown config key {quote(name)} in {shorten(str(source))}",
                    rule="a RunConfig holds only its own fields",
                    fix=f"did you mean {close[0]!r}?" if close else f"one of {', '.join(known)}",
                )
        return cls(**values)  # type: ignore[arg-type]


@cache
def _one_form(structure: str) -> str:
    """The text of a structure that all its spellings share; raises if it is none."""
    return str(parse(structure))


def toml_value(value: object) -> str:
    """A text, number, flag or list of them as TOML writes it, which is nearly as JSON does."""
    # JSON writes characters beyond 16 bits as two, and DEL as it is; TOML allows neither.
    return json.dumps(value, ensure_ascii=False, default=str).replace("\x7f", "\\u007f")


def _checked(task: str, name: str, value: object) -> object:
    """The value of a field, in its one form."""
    tasks = OWN_FIELDS.get(name)
    if tasks is not None and task not in tasks:
        if value is None:
            return None
        raise EinlinearError(
            what=f"{name} is {quote(value)}, and the task is {task}",
            rule=f"{name} is a setting of {' and '.join(tasks)}",
            fix=f"leave {name} out",
        )
    if name in _WHOLE:
        return whole_number(value, name, *_WHOLE[name])
    if name in _REAL:
        return _real(name, value, *_REAL[name])
    if name in _CHOICES:
        return _check_choice(name, value)
    if name in _FLAGS:
        if isinstance(value, bool):
            return value
        raise EinlinearError(
            what=f"{name} is {quote(value)}",
            rule=f"{name} is true or false",
            fix="give one of the two",
        )
    return _betas(value) if name == "betas" else _text(name, value)


def _as_float(value: object) -> float:
    """The value as a float; nan if it is no number, or too large for one."""
    try:
        return float(value) if isinstance(value, Real) and not isinstance(value, bool) else nan
    except OverflowError:
        return nan


def _real(name: str, value: object, low: float, high: float | None, is_above: bool) -> float:
    number = _as_float(value)
    if isfinite(number):
        if (number > low or (number == low and not is_above)) and (high is None or number <= high):
            return number
    scope = f"above {low:g}" if is_above else f"of {low:g} or more"
    scope = scope if high is None else f"from {low:g} to {high:g}"
    raise EinlinearError(
        what=f"{name} is {quote(value)}",
        rule=f"{name} is a number {scope}",
        fix=f"give a float {scope}",
    )


def _check_choice(name: str, value: object) -> object:
    choices = _CHOICES[name]
    if isinstance(value, str) and value in choices:
        return value
    close = get_close_matches(value[:40] if isinstance(value, str) else "", choices, 1)
    raise EinlinearError(
        what=f"{name} is {quote(value)}",
        rule=f"{name} is one of {', '.join(choices)}",
        fix=f"did you mean {close[0]!r}?" if close else f"give {choices[0]!r}",
    )


def _betas(value: object) -> tuple[float, float]:
    if isinstance(value, list | tuple) and len(value) == 2:
        first, second = (_real("each of betas", beta, 0, 1, False) for beta in value)
        if first < 1 and second < 1:
            return first, second
    raise EinlinearError(
        what=f"betas is {quote(value)}",
        rule="betas are two numbers of 0 or more, below 1",
        fix="give (0.9, 0.95)",
    )


def _text(name: str, value: object) -> str | None:
    if name in ("data", "validation") and value is None:
        return None
    if isinstance(value, Path):
        value = str(value)
    if isinstance(value, str) and value:
        return value
    raise EinlinearError(
        what=f"{name} is {quote(value)}", rule=f"{name} is a text", fix=f"give {name} in quotes"
    )
