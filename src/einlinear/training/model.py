"""The model of a run: built for its task, converted, initialised."""

from __future__ import annotations

import torch
from torch import nn

from einlinear.data.tasks.task import SequenceTask, Task, VectorTask
from einlinear.layers.moe.layers import MoEFeedForward
from einlinear.models.convert.convert import convert_
from einlinear.models.convert.experts import Experts, moe
from einlinear.models.convert.heads import Heads, heads
from einlinear.models.gpt import GPT
from einlinear.models.mlp import MLP, ResidualMLP
from einlinear.models.mup.init import apply_init_, plan_init
from einlinear.runs.config import RunConfig
from einlinear.runs.presets import SEQUENCE_TASKS
from einlinear.structures.structure import Structure
from einlinear.structures.text import parse_structure

_ATTENTION = ("*.q_proj", "*.k_proj", "*.v_proj", "*.o_proj")
_FEED_FORWARD = ("*.up", "*.down")
_GPT_LAYERS = (*_ATTENTION, *_FEED_FORWARD)
_NORMALISED = ("*.q_proj", "*.k_proj")  # a norm follows: a gain would have no effect
_EXPERT_LAYERS = {"vo": ("*.v_proj", "*.o_proj"), "ffn": _FEED_FORWARD}

_Conversion = Structure | Heads | Experts


def sizes_of(task: Task) -> tuple[int, int]:
    """The sizes of a model that its task decides: vocabulary and context, or input and output."""
    if isinstance(task, SequenceTask):
        return task.vocab_size, task.context
    assert isinstance(task, VectorTask), "a task is of sequences or of vectors"
    return task.in_features, task.out_features


def make_model(config: RunConfig, sizes: tuple[int, int]) -> nn.Module:
    """The initialised model of a run, on the CPU; `sizes` are those of its task."""
    with torch.device("meta"):
        model = make_shape(config, sizes)
    _allocate_(model)
    is_mup = config.parametrization == "mup"
    # Like the `down` layers that they replace, experts end a residual branch.
    zero = ("blocks.*.mlp",) if is_mup and config.experts == "ffn" else ()
    starts = plan_init(
        model,
        zero=zero,
        head_init=config.head_init,
        base_width=config.base_width,
        parametrization=config.parametrization,
        unit="blocks.*",
        use_roles=is_mup,
    )
    apply_init_(model, starts, torch.Generator().manual_seed(config.seed))
    return model


def base_inputs(config: RunConfig, model: nn.Module) -> dict[str, int]:
    """The in_features of every layer of the run's model at the base width, by pattern."""
    table: dict[str, int] = {}
    if config.fixed_input:
        assert isinstance(model, MLP | ResidualMLP), "only MLPs have an input layer"
        table["input"] = model.input.in_features
    if config.base_expansion is not None:
        # The second layers of feed-forward nets, their gates, and those of feed-forward experts.
        table["*.down*"] = config.base_expansion * config.base_width
    return table | {"*": config.base_width}


def _allocate_(model: nn.Module) -> None:
    """Move a model from the meta device to memory, without values; shared parameters stay shared.

    `nn.Module.to_empty` would separate them.
    """
    made: dict[nn.Parameter, nn.Parameter] = {}
    for module in model.modules():
        own = module.named_parameters(recurse=False, remove_duplicate=False)
        for name, parameter in own:
            if parameter not in made:
                empty = torch.empty_like(parameter, device="cpu")
                made[parameter] = nn.Parameter(empty, parameter.requires_grad)
            module._parameters[name] = made[parameter]
    assert not any(True for _ in model.buffers()), "models of runs have no buffers"


def make_shape(config: RunConfig, sizes: tuple[int, int]) -> nn.Module:
    """The model of a run on the default device, which may be meta, with arbitrary weights."""
    model = _make_dense(config, sizes)
    if config.experts == "ffn":
        _mix_feed_forward_(model, config)
    elif config.structure != "dense" or config.num_experts:
        rules, own = _conversions(config), config.factor_init
        convert_(model, rules, weight_norm=config.weight_norm, factor_init=own)
    return model


def _mix_feed_forward_(model: nn.Module, config: RunConfig) -> None:
    """Replace the feed-forward net of every block by a mixture of experts: the standard MoE."""
    assert isinstance(model, GPT), "only a GPT has feed-forward nets"
    for block in model.blocks:
        experts = MoEFeedForward(
            model.width,
            4 * model.width,
            num_experts=config.num_experts,
            num_active=config.num_active,
            bias=model.bias,
        )
        block.register_module("mlp", experts)


def _make_dense(config: RunConfig, sizes: tuple[int, int]) -> nn.Module:
    """The model of a task, built of plain linear layers."""
    scale = None if config.scale_branches else 1.0
    if config.task in SEQUENCE_TASKS:
        assert config.positions is not None, "sequences have positions"
        assert config.embedding_std is not None, "sequences have embeddings"
        return GPT(
            sizes[0],
            context=sizes[1],
            width=config.width,
            depth=config.depth,
            head_size=config.head_size,
            num_heads=config.num_heads,
            positions=config.positions,
            embedding_std=config.embedding_std,
            tied=bool(config.tied),
            bias=bool(config.bias),
            zero_query=bool(config.zero_query),
            heads_inner=bool(config.head_aligned) and config.head_axis == "own",
            branch_scale=scale,
        )
    if config.task == "regression":
        return ResidualMLP(
            *sizes,
            width=config.width,
            depth=config.depth,
            input_norm=bool(config.input_norm),
            branch_scale=scale,
        )
    assert config.activation is not None, "an MLP for images has an activation"
    return MLP(*sizes, width=config.width, depth=config.depth, activation=config.activation)


def _conversions(config: RunConfig) -> dict[object, _Conversion | None]:
    """The rules for `convert_`: which layers become what."""
    names = _GPT_LAYERS if config.task in SEQUENCE_TASKS else ("blocks.*",)
    names = ("head", *names) if config.convert_head else names
    return {name: _conversion(config, name) for name in names}


def _conversion(config: RunConfig, name: str) -> _Conversion | None:
    """What the layers of this name become: experts or one matrix; None to keep nn.Linear."""
    structure: Structure | Heads = parse_structure(config.structure)
    if config.head_aligned and name in _ATTENTION:
        assert config.head_axis is not None, "a GPT has attention heads"
        structure = heads(structure=config.structure, axis=config.head_axis)
    if not config.num_experts or name not in _EXPERT_LAYERS.get(config.expert_layers, (name,)):
        return None if config.structure == "dense" else structure
    return moe(
        structure,
        config.num_experts,
        config.num_active,
        expert_norm=config.expert_norm,
        expert_gain=config.expert_gain and name not in _NORMALISED,
    )
