"""RunConfig: everything that decides a training run, as plain data."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, fields
from hashlib import sha256
from typing import Any

from einlinear.data.choices import CharacterRule, VocabularyName
from einlinear.errors import EinlinearError, did_you_mean, quote, shorten
from einlinear.files.whole import toml_text
from einlinear.layers.scaling import (
    EMBEDDING_STD,
    Decay,
    ExpertNorm,
    FactorInit,
    HeadInit,
    Parametrization,
)
from einlinear.models.choices import ActivationName, HeadAxis, PositionKind
from einlinear.runs.identity import canonical_text, deciding_values, first_head, in_one_form
from einlinear.runs.presets import OWN_FIELDS, SEQUENCE_TASKS, Preset, TaskName, preset_values
from einlinear.runs.settings import (
    HEAD_SETTINGS,
    WHOLE_NUMBERS,
    Device,
    ExpertLayers,
    ExpertsOf,
    OptimizerName,
    Precision,
    Schedule,
    Shard,
    Spacing,
    check_choice,
    check_preset,
    checked_setting,
)
from einlinear.structures.values import whole_number

NOT_IN_ID = ("preset", "checkpoint_every", "save_model", "keep_state", "shard")
"""Fields that are not part of a run's id, because they change its numbers by rounding at most.

A preset only fills in other fields. What is saved, and over which devices a run is spread, does not
matter.
"""

_ADDED = {
    "parametrization": "mup",
    "activation": "relu",
    "pool": 1,
    "save_model": True,
    "num_heads": None,
    "bias": False,
    "zero_query": False,
    "scale_branches": True,
    "input_norm": False,
    "tf32": False,
    "eval_spacing": "geometric",
    "expert_norm": "each",
    "expert_gain": False,
    "base_expansion": 1,
    "fixed_input": False,
    "head_init": None,
    "optimizer": "adamw",
    "decay": "independent",
    "keep_state": False,
    "expert_layers": "all",
    "factor_init": "spectral",
    "head_axis": "shared",
}
"""Fields that earlier versions did not have, with the values that those versions used.

A field with that value is not part of the id, and not stored if the preset has it too: ids and
files stay the same.
"""

MUON_RATE = 4.0
"""The default learning rate of Muon, relative to that of AdamW: about the best on small texts."""

_BY_PRESET: Any = None  # default of a field that the preset decides


@dataclass(frozen=True, slots=True, kw_only=True)
class RunConfig:
    """Everything that decides a run: two runs with equal configs give equal numbers.

    The preset fills in fields that you leave out or set to None, depending on the task. Fields
    that the task does not have stay None, for example head_size for an MLP.

    Args:
        task: text, pixels, regression or cifar.
        preset: defaults for fields that you leave out: "cpu" learns something within minutes on a
            CPU, "paper" is the setting of [P24], "release" that of its released code; text also has
            "paper-gpt2" and "release-gpt2".
        data: a file or folder of data; by default the data set that comes with the package.
        validation: a text file for validation; by default a part of the data.
        rule: what to do with characters outside ascii in a text: drop the document, or fold them.
        pool: side of the squares of pixels to average before training on images.
        structure: structure of the linear layers; "dense" keeps nn.Linear.
        experts: what an expert is: "linear", a linear layer of the structure, or "ffn", a dense
            feed-forward net of a GPT block, the standard MoE.
        num_experts: experts in each layer; 0 for no mixture of experts.
        expert_layers: which layers have experts, if experts is "linear": "all"; or in a GPT only
            "vo", the projections to values and of the output, or "ffn", the two layers of every
            feed-forward net. The others have one matrix of the structure.
        num_active: experts that each token uses.
        expert_norm: whether factors are normalised for each expert, or for all together.
        expert_gain: whether every factor of experts has a learnable gain, except in the
            projections to queries and keys, which are normalised themselves.
        balance: weight of the balance loss, averaged over the gates.
        convert_head: whether the output head gets the structure too.
        head_aligned: whether to align the structures of the attention projections with the heads.
        head_axis: the axis that is then the head: "shared" by the factors, so that all have weights
            for every head, or "own", an axis of one factor.
        weight_norm: whether structured layers normalise their factors.
        factor_init: the standard deviation of the fresh factors of structured layers, and the limit
            of their norm: "spectral", sqrt(min(fan_in, fan_out)) / fan_in, or "fan_in",
            1 / sqrt(fan_in).
        width: width of the model.
        depth: blocks of a GPT or a residual MLP, hidden layers of an MLP.
        head_size: width of an attention head.
        num_heads: number of attention heads; give this or head_size.
        context: tokens in a sequence.
        vocabulary: "ascii", 96 symbols, or "gpt2", 50257 byte pairs.
        positions: learned, rotary or alibi.
        embedding_std: standard deviation of the initial embeddings.
        tied: whether the head shares its weight with the embedding.
        bias: whether norms and linear layers of a GPT have biases.
        zero_query: whether the projections to queries start at zero.
        scale_branches: whether residual branches are multiplied by sqrt(3 / depth).
        input_norm: whether GELU and a norm follow the input layer of a residual MLP.
        activation: activation of the MLP for images, relu or gelu.
        teacher_width: width of the teacher network.
        teacher_depth: layers of the teacher network.
        batch_size: sequences, samples or images per step, over all devices.
        accumulation: number of parts in which each device computes its share of the batch.
        steps: training steps.
        parametrization: "mup"; "naive", all parameters share one learning rate, and outputs of all
            layers start with unit variance; or "unit", the same with weights of unit variance in
            the blocks, the baseline of [P24].
        head_init: how the head starts: "zero"; "small", with standard deviation
            sqrt(base_width) / fan_in; or "usual", 1 / sqrt(fan_in), which is the default without
            µP.
        optimizer: adamw, or muon: Muon for matrices, AdamW for embeddings, vectors and the head.
        lr: learning rate at the base width. For muon, the spectral norm of the step of a square
            matrix; AdamW then has half of it, and the default is four times that of
            adamw.
        base_width: the width at which the learning rate was tuned.
        base_expansion: hidden width of feed-forward nets at the base width, in base widths: the
            learning rate of the second matrix follows from base_expansion * base_width inputs.
        fixed_input: whether the input layer of an MLP has the learning rate lr, because its fan-in
            is the same at every width; otherwise lr * base_width / fan_in.
        schedule: constant, cosine, or wsd (constant, then a linear decay), after the warm-up.
        warmup: steps in which the rate grows from 0; by default at most a tenth of the steps.
        decay_share: share of the steps in which wsd decays.
        final_rate: where cosine and wsd end, as a share of the learning rate.
        betas: betas of AdamW.
        weight_decay: weight decay at the base width.
        decay: how it follows the learning rates of µP: "independent", each step decays matrices by
            the same share at every width, or "standard", by a share that falls with the rate.
        grad_clip: largest norm of the gradient; 0 for no limit.
        precision: float32, or bfloat16 by autocast.
        tf32: whether GPUs may multiply float32 matrices in TF32; no effect on a CPU.
        seed: random seed of weights and batches.
        eval_points: evaluations besides the one at the start; with fixed spacing, in each factor
            of ten of the steps.
        eval_spacing: geometric, at geometrically growing steps; even; or fixed, at steps that grow
            geometrically and are the same for runs of any length, so that a longer run can
            continue a shorter one.
        eval_size: maximum number of sequences, samples or images in the validation set.
        ema: evaluate the average of the weights over about this share of the steps so far; 0 for
            no average.
        compile: whether to compile the model with torch.compile.
        device: cpu, cuda, or auto: cuda if available.
        shard: how to spread a model over many devices: ddp or fsdp2.
        checkpoint_every: steps between checkpoints; 0 for none.
        save_model: whether to keep the trained weights in model.safetensors.
        keep_state: whether to keep the state from which a longer run can continue: after the last
            step of a constant schedule, where the decay of wsd begins.
    """

    task: TaskName = "text"
    preset: Preset = "cpu"
    data: str | None = None
    validation: str | None = None
    rule: CharacterRule | None = None
    pool: int | None = None
    structure: str = "dense"
    experts: ExpertsOf = "linear"
    num_experts: int = 0
    expert_layers: ExpertLayers = "all"
    num_active: int = 2
    expert_norm: ExpertNorm = _BY_PRESET
    expert_gain: bool = _BY_PRESET
    balance: float = 0.01
    convert_head: bool = _BY_PRESET
    head_aligned: bool | None = None
    head_axis: HeadAxis | None = None
    weight_norm: bool = _BY_PRESET
    factor_init: FactorInit = "spectral"
    width: int = _BY_PRESET
    depth: int = _BY_PRESET
    head_size: int | None = None
    num_heads: int | None = None
    context: int | None = None
    vocabulary: VocabularyName | None = None
    positions: PositionKind | None = None
    embedding_std: float | None = None
    tied: bool | None = None
    bias: bool | None = None
    zero_query: bool | None = None
    scale_branches: bool | None = None
    input_norm: bool | None = None
    activation: ActivationName | None = None
    teacher_width: int | None = None
    teacher_depth: int | None = None
    batch_size: int = _BY_PRESET
    accumulation: int = 1
    steps: int = _BY_PRESET
    parametrization: Parametrization = "mup"
    head_init: HeadInit = _BY_PRESET
    optimizer: OptimizerName = "adamw"
    lr: float = _BY_PRESET
    base_width: int = _BY_PRESET
    base_expansion: int | None = None
    fixed_input: bool | None = None
    schedule: Schedule = _BY_PRESET
    warmup: int = _BY_PRESET
    decay_share: float = 0.2
    final_rate: float = 0.0
    betas: tuple[float, float] = _BY_PRESET
    weight_decay: float = _BY_PRESET
    decay: Decay = "independent"
    grad_clip: float = _BY_PRESET
    precision: Precision = _BY_PRESET
    tf32: bool = _BY_PRESET
    seed: int = 0
    eval_points: int = _BY_PRESET
    eval_spacing: Spacing = _BY_PRESET
    eval_size: int = _BY_PRESET
    ema: float = _BY_PRESET
    compile: bool = False
    device: Device = "auto"
    shard: Shard = "ddp"
    checkpoint_every: int = _BY_PRESET
    save_model: bool = True
    keep_state: bool = False

    def __post_init__(self) -> None:
        for name in ("task", "preset", "optimizer"):
            check_choice(name, getattr(self, name))
        if self.tied is True and self.embedding_std is None:
            self._set("embedding_std", EMBEDDING_STD)  # larger ones would make large logits
        check_preset(self.task, self.preset)
        preset = preset_values(self.task, self.preset)
        if self.head_size is not None or self.num_heads is not None:
            preset = {name: value for name, value in preset.items() if name not in HEAD_SETTINGS}
        if self.optimizer == "muon":
            preset["lr"] *= MUON_RATE
        steps = whole_number(
            preset["steps"] if self.steps is None else self.steps, "steps", *WHOLE_NUMBERS["steps"]
        )
        preset["warmup"] = min(preset["warmup"], steps // 10)  # the rate is reached in short runs
        preset["checkpoint_every"] = max(1, min(1000, steps // 10))
        if self.parametrization != "mup":
            preset["head_init"] = "usual"
        for name, value in preset.items():
            if getattr(self, name) is None:
                self._set(name, value)
        for field in fields(self):
            self._set(field.name, checked_setting(self.task, field.name, getattr(self, field.name)))
        self._check_together()

    def _set(self, name: str, value: object) -> None:
        object.__setattr__(self, name, value)

    def _check_together(self) -> None:
        """Check fields that depend on each other."""
        canonical_text(self.structure)
        if self.num_experts:
            fix = f"give an int from 1 to num_experts, which is {self.num_experts}"
            whole_number(self.num_active, "num_active", 1, self.num_experts, fix=fix)
        if self.experts == "ffn":
            self._check_feed_forward()
        if self.expert_layers != "all" and self.experts == "ffn":
            raise EinlinearError(
                what=f'expert_layers is "{self.expert_layers}", and experts is "ffn"',
                rule='with experts = "ffn", feed-forward nets are the experts, and nothing else',
                fix='leave out expert_layers, or give experts="linear"',
            )
        if self.expert_layers != "all" and self.task not in SEQUENCE_TASKS:
            raise EinlinearError(
                what=f'expert_layers is "{self.expert_layers}", and the task is {self.task}',
                rule="some layers alone can have experts in a GPT only, whose tasks are "
                + " and ".join(SEQUENCE_TASKS),
                fix='give expert_layers="all", or leave it out',
            )
        self._check_heads()
        if self.batch_size % self.accumulation:
            raise EinlinearError(
                what=f"the batch_size is {self.batch_size}, the accumulation {self.accumulation}",
                rule="a batch is computed in parts of the same size",
                fix="give a batch_size that is a multiple of the accumulation",
            )
        if self.tied and self.convert_head and self.structure != "dense":
            raise EinlinearError(
                what="convert_head is set, and the head is tied to the embeddings",
                rule="a structured head cannot share the embedding's weight",
                fix="leave out tied or convert_head",
            )
        if self.head_aligned and self.structure == "dense":
            raise EinlinearError(
                what="head_aligned is set, and the structure is dense",
                rule="only the axes of a structure can be aligned with heads",
                fix='give a structure such as "btt", or leave head_aligned out',
            )
        if self.keep_state and (self.schedule == "cosine" or self.eval_spacing != "fixed"):
            raise EinlinearError(
                what=f"keep_state is set, the schedule is {self.schedule}, the eval_spacing "
                f"{self.eval_spacing}",
                rule="a longer run continues a shorter one if nothing before depends on the steps",
                fix='give schedule="constant" or "wsd", and eval_spacing="fixed"',
            )

    def _check_heads(self) -> None:
        """Check that the width is divided evenly among the heads, by one of two fields."""
        given = {
            name: getattr(self, name) for name in HEAD_SETTINGS if getattr(self, name) is not None
        }
        if len(given) > 1:
            raise EinlinearError(
                what=f"head_size is {self.head_size} and num_heads is {self.num_heads}",
                rule="each of the two follows from the other and the width",
                fix="give only one of them",
            )
        for name, value in given.items():
            if self.width % value:
                raise EinlinearError(
                    what=f"the width is {self.width}, the {name} {value}",
                    rule="the width is divided evenly among the attention heads",
                    fix=f"give a width that is a multiple of {value}, or another {name}",
                )

    def _check_feed_forward(self) -> None:
        """Check the fields that feed-forward experts need."""
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
        """A short hash of what decides the run's numbers: fields with an effect, not NOT_IN_ID."""
        return settings_hash(deciding_values(self._values()))

    @property
    def earlier_id(self) -> str:
        """The id of the run in versions whose ids also held settings without an effect.

        They did not hold the rule of sizes: such a run is the same only if its shapes are.
        """
        return settings_hash(in_one_form(self._values()))

    def as_dict(self) -> dict[str, Any]:
        """All fields as plain JSON values, without fields in _ADDED that need not be stored."""
        values = self._values()
        preset = preset_values(self.task, self.preset)
        for name, value in _ADDED.items():
            if values[name] in (None, value) and preset.get(name) in (None, value):
                del values[name]
        return values

    def _values(self) -> dict[str, Any]:
        """All fields as plain JSON values."""
        values = {field.name: getattr(self, field.name) for field in fields(self)}
        return values | {"betas": list(self.betas)}

    def to_json(self) -> str:
        """The config as JSON text for `load_config`."""
        return json.dumps(self.as_dict(), indent=1)

    def to_toml(self) -> str:
        """The config as TOML text for `load_config`, without fields that the task does not have."""
        values = {name: value for name, value in self.as_dict().items() if value is not None}
        return toml_text(values)

    @classmethod
    def from_dict(cls, values: Mapping[str, object], source: str = "a config") -> RunConfig:
        """Build a config from a mapping; error messages name `source` as its origin."""
        known = [field.name for field in fields(cls)]
        if not isinstance(values, Mapping):
            raise EinlinearError(
                what=f"{source} is {quote(values)}",
                rule="a config is a table of fields by name",
                fix='give {"task": "text", "structure": "btt"}',
            )
        for name in values:
            if name not in known:
                raise EinlinearError(
                    what=f"unknown config key {quote(name)} in {shorten(str(source))}",
                    rule="a RunConfig holds only its own fields",
                    fix=did_you_mean(name, known, f"one of {', '.join(known)}"),
                )
        task = values.get("task")
        if isinstance(task, str) and all(k in values for k in known if k not in _ADDED):
            # A stored config, perhaps of an earlier version, whose presets were not those of today.
            old = {k: v for k, v in _ADDED.items() if task in OWN_FIELDS.get(k, (task,))}
            old["head_init"] = first_head(values.get("parametrization"))
            values = old | dict(values)
        return cls(**values)  # type: ignore[arg-type]


def settings_hash(values: Mapping[str, Any]) -> str:
    """The id of these values. A field of _ADDED counts if earlier versions had no such value."""
    counting = {
        name: value
        for name, value in values.items()
        if name not in NOT_IN_ID and (name not in _ADDED or value not in (None, _ADDED[name]))
    }
    return sha256(json.dumps(counting, sort_keys=True).encode()).hexdigest()[:16]
