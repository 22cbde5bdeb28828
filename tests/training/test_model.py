"""The model of a run: its weights are drawn once, from the seed of the run."""

import pytest
import torch

from einlinear.models.mup.init import init_
from einlinear.runs.config import RunConfig
from einlinear.training.model import _allocate_, make_model, make_shape

GPT = {"width": 32, "depth": 2, "head_size": 16}
CONFIGS = {
    "dense": GPT,
    "structured": GPT | {"structure": "btt", "convert_head": True, "head_aligned": True},
    "tied": GPT | {"tied": True, "positions": "learned"},
    "experts": GPT | {"structure": "low_rank", "num_experts": 3},
    "MoE": GPT | {"experts": "ffn", "num_experts": 3},
    "residual MLP": {"task": "regression", "width": 16, "structure": "kronecker"},
    "MLP": {"task": "cifar", "width": 16, "structure": "btt", "activation": "gelu"},
}


@pytest.mark.parametrize("settings", CONFIGS.values(), ids=CONFIGS)
def test_weights_are_those_of_a_model_that_was_built_in_memory(settings):
    config = RunConfig(seed=5, **settings)
    slow = make_shape(config, (96, 64))
    zero = ("blocks.*.mlp",) if config.experts == "ffn" else ()
    init_(slow, zero=zero, generator=torch.Generator().manual_seed(5))
    before = torch.get_rng_state()
    model = make_model(config, (96, 64))
    assert torch.equal(torch.get_rng_state(), before)  # nothing is drawn besides
    assert {name: p.shape for name, p in model.named_parameters()} == {
        name: p.shape for name, p in slow.named_parameters()
    }
    for name, parameter in slow.state_dict().items():
        assert torch.equal(parameter, model.state_dict()[name]), name


def test_a_parameter_that_one_module_has_twice_stays_one():
    model = torch.nn.Linear(2, 2, bias=False, device="meta")
    model.again = model.weight
    _allocate_(model)
    assert model.again is model.weight
    assert model.weight.device.type == "cpu"


def test_a_tied_head_stays_tied():
    model = make_model(RunConfig(**CONFIGS["tied"]), (96, 64))
    assert model.head.weight is model.embedding.weight


def test_a_naive_model_starts_without_zeros():
    model = make_model(RunConfig(parametrization="naive", **CONFIGS["MoE"]), (96, 64))
    matrices = {name: p for name, p in model.named_parameters() if p.dim() > 1}
    assert all(parameter.any() for parameter in matrices.values())
