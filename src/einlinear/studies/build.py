"""The model of a run: made for its task, converted, initialised."""

from __future__ import annotations

import torch
from torch import nn

from einlinear.layers.moe import MoEFeedForward
from einlinear.models.convert import convert_
from einlinear.models.experts import Experts, moe
from einlinear.models.gpt import GPT
from einlinear.models.heads import Heads, heads
from einlinear.models.init import init_
from einlinear.models.mlp import MLP, ResidualMLP
from einlinear.structures.structure import Structure
from einlinear.structures.text import parse
from einlinear.studies.config import RunConfig
from einlinear.studies.presets import SEQUENCE_TASKS
from einlinear.studies.tasks.task import SequenceTask, Task, VectorTask

_ALIGNED = ("*.q_proj", "*.k_proj", "*.v_proj", "*.o_proj")

Rule = Structure | Heads | Experts


def sizes_of(task: Task) -> tuple[int, int]:
    """What a task decides of its model: tokens and context, or the widths of input and output."""
    if isinstance(task, SequenceTask):
        return task.vocab_size, task.context
    assert isinstance(task, VectorTask), "a task is of sequences or of vectors"
    return task.in_features, task.out_features


def make_model(config: RunConfig, sizes: tuple[int, int]) -> nn.Module:
    """The model of a run before its first step, on the processor; `sizes` are those of its task."""
    model = make_shape(config, sizes)
    # The end of a branch, as `down` of the net in its place was.
    zero = ("blocks.*.mlp",) if config.experts == "ffn" else ()
    generator = torch.Generator().manual_seed(config.seed)
    init_(model, zero=zero, generator=generator)
    return model


def make_shape(config: RunConfig, sizes: tuple[int, int]) -> nn.Module:
    """The model of a run with any weights, on the default device, which may be meta."""
    model = make_dense(config, sizes)
    if config.experts == "ffn":
        mix_feed_forward_(model, config)
    elif config.structure != "dense" or config.num_experts:
        convert_(model, conversion_rules(config), weight_norm=config.weight_norm)
    return model


def mix_feed_forward_(model: nn.Module, config: RunConfig) -> None:
    """Put a mixture of feed-forward nets in the place of that of every block: the standard MoE."""
    assert isinstance(model, GPT), "only a GPT has feed-forward nets"
    for block in model.blocks:
        experts = MoEFeedForward(
            model.width,
            4 * model.width,
            num_experts=config.num_experts,
            num_active=config.num_active,
            bias=False,
        )
        block.register_module("mlp", experts)


def make_dense(config: RunConfig, sizes: tuple[int, int]) -> nn.Module:
    """The model of a task, of plain linear layers."""
    if config.task in SEQUENCE_TASKS:
        assert config.positions is not None, "sequences have positions"
        assert config.embedding_std is not None, "sequences have embeddings"
        return GPT(
            sizes[0],
            context=sizes[1],
            width=config.width,
            depth=config.depth,
            head_size=config.head_size,
            positions=config.positions,
            embedding_std=config.embedding_std,
            tied=bool(config.tied),
        )
    kind = ResidualMLP if config.task == "regression" else MLP
    return kind(*sizes, width=config.width, depth=config.depth)


def conversion_rules(config: RunConfig) -> dict[object, Rule]:
    """What `convert_` is to do: which layers become what."""
    rules: dict[object, Rule] = {}
    if config.convert_head:
        rules["head"] = _mixed(config, parse(config.structure))
    if config.head_aligned:
        aligned = heads(structure=config.structure)
        rules |= dict.fromkeys(_ALIGNED, _mixed(config, aligned))
    rules["blocks.*"] = _mixed(config, parse(config.structure))
    return rules


def _mixed(config: RunConfig, structure: Structure | Heads) -> Rule:
    """The structure, or experts of it."""
    return (
        moe(structure, config.num_experts, config.num_active) if config.num_experts else structure
    )
