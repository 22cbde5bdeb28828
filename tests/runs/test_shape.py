"""What decides the time of a step."""

from dataclasses import fields, replace

import pytest

from einlinear.runs.config import RunConfig
from einlinear.runs.shape import NOT_IN_A_STEP, step_key, step_settings
from kit.runs import tiny

BTT = tiny(structure="btt")


@pytest.mark.parametrize(
    "change",
    [
        {"seed": 3},
        {"lr": 0.1},
        {"steps": 100, "warmup": 2},
        {"structure": "monarch"},
        {"structure": "btt(rank=1)"},
        {"factor_init": "fan_in"},
        {"head_init": "small"},
        {"parametrization": "naive"},
        {"eval_points": 2, "eval_size": 4, "eval_spacing": "even"},
        {"schedule": "wsd", "decay_share": 0.5},
        {"weight_decay": 0.1, "betas": (0.8, 0.9)},
        {"balance": 0.5, "num_active": 1, "expert_gain": True},
        {"head_size": None, "num_heads": 2},
        {"grad_clip": 0.5},
    ],
    ids=str,
)
def test_what_costs_no_time_leaves_the_key(change):
    assert step_key(replace(BTT, **change)) == step_key(BTT)


@pytest.mark.parametrize(
    "change",
    [
        {"structure": "dense"},
        {"structure": "btt(rank=2)"},
        {"width": 32},
        {"depth": 2},
        {"batch_size": 8},
        {"accumulation": 2},
        {"context": 32},
        {"optimizer": "muon"},
        {"num_experts": 4},
        {"head_aligned": True},
        {"convert_head": True},
        {"weight_norm": False},
        {"grad_clip": 0.0},
        {"ema": 0.0},
        {"compile": True},
        {"precision": "bfloat16"},
    ],
    ids=str,
)
def test_another_model_batch_or_optimizer_is_another_key(change):
    assert step_key(replace(BTT, **change)) != step_key(BTT)


@pytest.mark.parametrize(
    "change", [{"num_experts": 8}, {"num_active": 1}, {"expert_layers": "ffn"}, {"balance": 0.0}]
)
def test_experts_are_part_of_the_key(change):
    experts = tiny(structure="btt", num_experts=4)
    assert step_key(replace(experts, **change)) != step_key(experts)


def test_dense_runs_share_a_key_whatever_structures_would_do():
    changed = tiny(weight_norm=False, convert_head=True, factor_init="fan_in")
    assert step_key(changed) == step_key(tiny())


def test_settings_that_are_left_out_are_settings():
    names = {field.name for field in fields(RunConfig)}
    assert names > NOT_IN_A_STEP
    assert set(step_settings(BTT)) == (names - NOT_IN_A_STEP) | {"sizes_rule"}


def test_the_key_of_a_run_does_not_change():
    """Files of times hold keys: a new version must find them."""
    assert [step_key(tiny()), step_key(BTT)] == ["bad41ddbfd24186b", "7cd65718031d501a"]
