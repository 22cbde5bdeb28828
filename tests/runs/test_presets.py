"""The presets of the paper, fact by fact: what its text says and what its released code does."""

from math import log, sqrt

import pytest
import torch
from torch import nn

import einlinear as el
from einlinear import EinlinearError, RunConfig
from einlinear.data.tasks.regression import Teacher
from einlinear.laws.observations import is_warm
from einlinear.layers.linear import EinsumLinear
from einlinear.layers.moe.layers import MoELinear
from einlinear.models.mup.groups import param_groups
from einlinear.runs.presets import presets_of
from einlinear.runs.schedule import eval_steps, rate_multiplier
from einlinear.training.counting import count_model
from einlinear.training.devices.distributed import Place
from einlinear.training.model import make_model, make_shape
from einlinear.training.needs import count_shape
from einlinear.training.state import TrainState
from einlinear.training.train import using_tf32

TEXT_SIZES, PIXEL_SIZES, REGRESSION_SIZES = (96, 128), (257, 192), (8, 1)
PAPER = [(task, name) for task in ("text", "pixels", "regression") for name in presets_of(task)]
PAPER = [(task, name) for task, name in PAPER if name != "cpu"]


def text(preset="paper", **changes):
    return RunConfig(task="text", preset=preset, **changes)


def pixels(**changes):
    return RunConfig(task="pixels", preset="paper", **changes)


def regression(**changes):
    return RunConfig(task="regression", preset="paper", **changes)


def rates(model, config):
    """The learning rate of every parameter, by name."""
    groups = param_groups(model, config.lr, base_width=config.base_width)
    found = {id(p): group["lr"] for group in groups for p in group["params"]}
    return {name: found[id(p)] for name, p in model.named_parameters()}


# Pixels


@pytest.mark.parametrize("width", [32, 64, 128, 256, 512, 1024])
def test_pixels_paper_has_eight_heads_at_every_width(width):
    config = pixels(width=width)
    assert (config.num_heads, config.head_size) == (8, None)
    with torch.device("meta"):
        model = make_shape(config, PIXEL_SIZES)
    assert {block.attention.num_heads for block in model.blocks} == {8}
    assert {block.attention.head_size for block in model.blocks} == {width // 8}


def test_pixels_paper_has_two_epochs_of_5_982_688_images():
    config = pixels()
    assert config.steps == 186_959
    assert config.steps * config.batch_size == 2 * 5_982_688


def test_pixels_paper_does_not_clip():
    assert pixels().grad_clip == 0


def test_pixels_paper_has_biases_except_in_queries_keys_and_values():
    model = make_model(pixels(width=32), PIXEL_SIZES)
    for name, module in model.named_modules():
        if isinstance(module, nn.Linear | nn.LayerNorm):
            is_projection = name.endswith(("q_proj", "k_proj", "v_proj"))
            assert (module.bias is None) == is_projection, name
            assert module.bias is None or not module.bias.any(), name


def test_pixels_paper_starts_queries_at_zero():
    model = make_model(pixels(width=32), PIXEL_SIZES)
    zeros = {name for name, p in model.named_parameters() if p.dim() == 2 and not p.any()}
    branches = ("attention.q_proj", "attention.o_proj", "mlp.down")
    assert zeros == {"head.weight"} | {f"blocks.{i}.{n}.weight" for i in range(3) for n in branches}


def test_pixels_paper_starts_only_the_last_factor_of_structured_queries_at_zero():
    model = make_model(pixels(width=32, structure="btt"), PIXEL_SIZES)
    query = model.blocks[0].attention.q_proj
    assert isinstance(query, EinsumLinear)
    assert query.A.any()
    assert not query.B.any()


def test_pixels_paper_learns_queries_that_start_at_zero():
    torch.manual_seed(0)
    model = make_model(pixels(width=32, depth=1), PIXEL_SIZES)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    tokens = torch.randint(0, 256, (2, 193))
    for _ in range(3):  # the head, then the output of the branch, then the query
        loss = nn.functional.cross_entropy(model(tokens[:, :-1])[0], tokens[0, 1:])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    query = model.blocks[0].attention.q_proj.weight
    assert query.isfinite().all()
    assert query.any()


@pytest.mark.parametrize("depth", [2, 3])
def test_pixels_paper_does_not_scale_branches(depth):
    model = make_model(pixels(width=32, depth=depth), PIXEL_SIZES)
    assert [block.scale for block in model.blocks] == [1.0] * depth


def test_pixels_paper_is_float32_with_tf32():
    assert (pixels().precision, pixels().tf32) == ("float32", True)


@pytest.mark.parametrize("is_allowed", [True, False])
def test_tf32_is_set_on_a_gpu_and_restored(is_allowed):
    with using_tf32(torch.device("cuda"), not is_allowed):
        with using_tf32(torch.device("cpu"), is_allowed):
            assert torch.backends.cuda.matmul.allow_tf32 != is_allowed
        with using_tf32(torch.device("cuda"), is_allowed):
            assert torch.backends.cuda.matmul.allow_tf32 == is_allowed
        assert torch.backends.cuda.matmul.allow_tf32 != is_allowed
    assert torch.backends.cuda.matmul.allow_tf32 is False


def test_pixels_paper_trains_with_adam_and_cosine():
    config = pixels()
    assert (config.lr, config.base_width, config.batch_size) == (3e-3, 64, 64)
    assert (config.betas, config.schedule, config.warmup) == ((0.9, 0.999), "cosine", 0)
    assert (config.weight_norm, config.weight_decay) == (True, 0)


def test_pixels_paper_embeddings_have_deviation_0_02():
    # 192 x 64 numbers or more: their deviation is known to 0.6 %.
    model = make_model(pixels(), PIXEL_SIZES)
    for embedding in (model.embedding, model.places):
        assert float(embedding.weight.detach().std()) == pytest.approx(0.02, rel=0.04)


# Regression


def test_regression_paper_has_no_weight_norm():
    assert regression().weight_norm is False
    model = make_model(regression(structure="btt"), REGRESSION_SIZES)
    layers = [module for module in model.modules() if isinstance(module, EinsumLinear)]
    assert len(layers) == 6
    assert not any(layer.weight_norm for layer in layers)


def test_regression_paper_does_not_clip():
    assert regression().grad_clip == 0


def test_regression_paper_has_gelu_and_a_norm_after_the_input_layer():
    model = make_model(regression(), REGRESSION_SIZES)
    x = torch.randn(5, 8)
    seen = {}
    model.blocks[0].register_forward_pre_hook(lambda _, inputs: seen.update(x=inputs[0]))
    model(x)
    hidden = nn.functional.gelu(x @ model.input.weight.T + model.input.bias)
    expected = (hidden - hidden.mean(-1, keepdim=True)) / (
        hidden.var(-1, keepdim=True, unbiased=False) + 1e-5
    ).sqrt()
    torch.testing.assert_close(seen["x"], expected)


def test_regression_paper_teacher_has_six_hidden_layers_and_an_output_layer():
    config = regression()
    assert (config.teacher_width, config.teacher_depth) == (1024, 7)
    teacher = el.open_task("regression").teacher
    shapes = [tuple(weight.shape) for weight in teacher.weights]
    assert shapes == [(8, 1024), *[(1024, 1024)] * 5, (1024, 1)]


def test_regression_paper_teacher_answers_on_the_device_of_the_run(monkeypatch):
    monkeypatch.setattr(Teacher, "__call__", Teacher.raw)  # autocast knows no device meta
    own = el.open_task("regression", teacher_width=16)
    place = Place(0, 1, torch.device("meta"))
    config = regression(width=8, device="cpu")
    with torch.device("meta"):
        model = make_shape(config, REGRESSION_SIZES)
    task = TrainState(config, own, place, model).task
    batch = task.batch(0, 4, seed=0)
    assert {batch.inputs.device.type, batch.targets.device.type} == {"meta"}
    assert {b.targets.device.type for b in task.validation(8)} == {"meta"}


def test_regression_paper_structures_only_inner_layers():
    model = make_model(regression(structure="btt"), REGRESSION_SIZES)
    assert isinstance(model.input, nn.Linear)
    assert isinstance(model.head, nn.Linear)


def test_regression_paper_has_three_blocks_of_expansion_four():
    model = make_model(regression(), REGRESSION_SIZES)
    assert [(b.up.in_features, b.up.out_features) for b in model.blocks] == [(64, 256)] * 3


def test_regression_paper_trains_with_adam_and_cosine():
    config = regression()
    assert (config.lr, config.base_width, config.batch_size) == (1e-3, 64, 4096)
    assert (config.schedule, config.betas, config.steps) == ("cosine", (0.9, 0.999), 1_000_000)


# Text


def test_text_paper_is_the_dense_reference_of_2_597_120_multiply_adds():
    assert count_model(make_model(text(), TEXT_SIZES), 128).macs == 2_597_120


def test_text_paper_has_no_biases():
    model = make_model(text(), TEXT_SIZES)
    assert not [name for name, _ in model.named_parameters() if name.endswith("bias")]


@pytest.mark.parametrize("depth", [3, 6, 12])
def test_text_paper_scales_branches_by_the_root_of_three_over_the_depth(depth):
    with torch.device("meta"):
        model = make_shape(text(depth=depth), TEXT_SIZES)
    assert {block.scale for block in model.blocks} == {sqrt(3 / depth)}


def test_text_paper_does_not_scale_rates_with_the_depth():
    config = text(width=256)
    shallow, deep = (
        rates(make_model(text(width=256, depth=depth), TEXT_SIZES), config) for depth in (3, 6)
    )
    assert shallow["blocks.0.attention.q_proj.weight"] == 3e-3
    assert all(deep[name] == rate for name, rate in shallow.items())


def test_text_paper_has_a_head_size_of_64():
    assert (text().head_size, text().num_heads) == (64, None)


def test_text_paper_leaves_the_head_dense():
    assert text().convert_head is False
    assert isinstance(make_model(text(structure="btt"), TEXT_SIZES).head, nn.Linear)


def test_text_paper_clips_at_one_and_warms_up_for_2000_steps_to_a_constant_rate():
    config = text()
    assert (config.grad_clip, config.betas, config.weight_decay) == (1.0, (0.9, 0.95), 0.0)
    assert [rate_multiplier(config, step) for step in (999, 1999, 99_999)] == [0.5, 1.0, 1.0]


def test_text_paper_has_batches_of_65_536_tokens():
    assert text().batch_size * text().context == 65_536


@pytest.mark.parametrize("preset", ["paper", "release", "paper-gpt2", "release-gpt2"])
def test_text_paper_is_bfloat16_with_tf32(preset):
    assert (text(preset).precision, text(preset).tf32) == ("bfloat16", True)


def test_text_paper_experts_are_normalised_together_with_gains_except_in_queries_and_keys():
    config = text(structure="btt", num_experts=8, depth=1)
    model = make_model(config, TEXT_SIZES)
    layers = {n: m for n, m in model.named_modules() if isinstance(m, MoELinear)}
    assert len(layers) == 6
    assert {layer.expert_norm for layer in layers.values()} == {"together"}
    without = {name for name, layer in layers.items() if layer.gain is None}
    assert without == {"blocks.0.attention.q_proj", "blocks.0.attention.k_proj"}
    gains = {name: rate for name, rate in rates(model, config).items() if name.endswith("gain")}
    assert set(gains.values()) == {config.lr}
    assert all(layer.gain.tolist() == [1, 1] for n, layer in layers.items() if n not in without)


def test_text_paper_head_aligned_experts_have_no_gains_in_queries_and_keys():
    config = text(structure="btt", num_experts=8, depth=1, head_aligned=True)
    with torch.device("meta"):
        model = make_shape(config, TEXT_SIZES)
    attention = model.blocks[0].attention
    projections = (attention.q_proj, attention.k_proj, attention.v_proj, attention.o_proj)
    assert [layer.gain is None for layer in projections] == [True, True, False, False]


def test_text_has_the_base_width_of_the_text_and_that_of_the_release():
    assert [text(name).base_width for name in ("paper", "release")] == [256, 768]
    assert [text(name).base_width for name in ("paper-gpt2", "release-gpt2")] == [256, 768]
    for ending in ("", "-gpt2"):
        paper, release = (text(name + ending).as_dict() for name in ("paper", "release"))
        assert {k for k in paper if paper[k] != release[k]} == {"preset", "base_width"}


def test_text_gpt2_has_512_tokens_of_the_gpt2_vocabulary_in_12_layers():
    config = text("paper-gpt2")
    assert (config.vocabulary, config.context, config.depth) == ("gpt2", 512, 12)


def test_text_gpt2_has_a_structured_head():
    with torch.device("meta"):
        model = make_shape(text("paper-gpt2", structure="btt"), (50257, 512))
    assert isinstance(model.head, EinsumLinear)


def test_text_gpt2_has_the_rate_2e_3_of_three_layers_of_width_256():
    config = text("paper-gpt2")
    assert (config.lr, config.base_width) == (2e-3, 256)
    with torch.device("meta"):
        model = make_shape(config, (50257, 512))
    assert {block.scale for block in model.blocks} == {0.5}
    assert rates(model, config)["blocks.11.mlp.up.weight"] == 2e-3


def test_text_gpt2_multiply_adds_by_hand():
    counts = count_shape(text("paper-gpt2"), (50257, 512), 512)
    linear, head = 12 * 12 * 256**2, 50257 * 256
    attention, norms = 12 * 2 * 512 * 256, 5 * (4 * 12 + 1) * 256
    assert counts.macs == linear + head + attention + norms == 25_511_424


# All


@pytest.mark.parametrize(("task", "preset"), PAPER)
def test_paper_leaves_forty_points_after_the_warm_up(task, preset):
    config = RunConfig(task=task, preset=preset)
    steps = eval_steps(config.steps, config.eval_points, config.eval_spacing)[1:]
    assert sum(is_warm(config, step) for step in steps) >= 40


def test_text_paper_is_evaluated_every_2500_steps():
    config = text()
    steps = eval_steps(config.steps, config.eval_points, config.eval_spacing)
    assert steps == tuple(range(0, 100_001, 2500))


@pytest.mark.parametrize("task", ["pixels", "regression", "cifar"])
def test_only_text_has_a_preset_for_the_gpt2_vocabulary(task):
    with pytest.raises(EinlinearError) as caught:
        RunConfig(task=task, preset="paper-gpt2")
    assert f"the presets of {task} are cpu, paper, release" in str(caught.value)


@pytest.mark.parametrize("task", ["pixels", "regression"])
def test_a_short_run_of_the_paper(task):
    """Departures from the default model train: loss and curve are finite."""
    small = {"teacher_width": 8} if task == "regression" else {}
    small |= {"width": 16, "depth": 1, "batch_size": 8, "eval_points": 2, "eval_size": 8}
    record = el.train(RunConfig(task=task, preset="paper", steps=6, structure="btt", **small))
    assert record.status == "finished"
    assert [point.step for point in record.curve] == [0, 3, 6]
    if task == "pixels":
        assert record.curve[0].loss == pytest.approx(log(256), abs=1e-5)
