"""What a run costs, counted by hand, and by torch."""

import pytest

from einlinear import MoEFeedForward, RunConfig
from einlinear.models.gpt import GPT
from einlinear.training.counting import count_model
from einlinear.training.model import make_model
from einlinear.training.plan import plan_run

SMALL = {"width": 16, "depth": 2, "batch_size": 2}


def test_the_dense_reference_of_the_paper():
    config = RunConfig(preset="paper", width=256, depth=3)
    counts = count_model(make_model(config, (96, 128)), 128)
    assert counts.macs == 2_597_120
    assert counts.linear_macs == 3 * 12 * 256**2
    assert counts.head_macs == 96 * 256
    assert counts.attention_macs == 3 * 2 * 128 * 256


@pytest.mark.parametrize("task", ["text", "pixels", "regression", "cifar"])
@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"structure": "btt(rank=2)"},
        {"structure": "kronecker", "convert_head": True},
        {"structure": "low_rank", "num_experts": 3, "num_active": 2},
    ],
    ids=str,
)
def test_counts_are_those_of_torch(task, settings):
    own = {"head_size": 4} if task in ("text", "pixels") else {}
    own |= {"teacher_width": 8} if task == "regression" else {}
    # A difference is a warning, and warnings are errors here.
    plan = plan_run(RunConfig(task=task, **SMALL, **own, **settings))
    assert plan.counts.params == sum(p.numel() for p in plan.model.parameters())
    assert plan.units_per_step == 2 * {"text": 64, "pixels": 192}.get(task, 1)


def test_a_difference_is_noticed(monkeypatch):
    monkeypatch.setattr(GPT, "attention_macs", lambda self, length: 0)
    with pytest.warns(UserWarning, match="by the counter of torch"):
        plan_run(RunConfig(width=16, head_size=8))


def test_counts_of_experts():
    def counts(**settings):
        config = RunConfig(width=32, depth=1, head_size=16, structure="dense", **settings)
        return count_model(make_model(config, (96, 64)), 64)

    plain, mixed = counts(), counts(num_experts=4, num_active=2)
    gates = 4 * (5 * 32 + 128)
    assert mixed.linear_macs == 2 * plain.linear_macs + gates
    assert mixed.params == plain.params + 3 * plain.linear_macs + gates
    assert mixed.head_macs == plain.head_macs


def test_aligned_heads_are_in_the_model():
    config = RunConfig(width=64, head_size=16, structure="btt", head_aligned=True)
    model = make_model(config, (96, 64))
    layer = model.blocks[0].attention.q_proj
    assert layer.plan.y_edges[0] == "YAB"
    assert layer.plan.sizes["YAB"] == 4


def test_the_standard_mixture_of_experts():
    config = RunConfig(width=32, depth=2, head_size=16, experts="ffn", num_experts=4, num_active=3)
    # Torch's count is compared, and a difference is a warning, which is an error here.
    counts = plan_run(config).counts
    attention, net, gate = 4 * 32 * 32, 2 * 32 * 128, 32 * 4
    assert counts.linear_macs == 2 * (attention + 3 * net + gate)
    norms = 2 * (2 * 32 + 2 * 16) + 32
    assert counts.params == 2 * (attention + 4 * net + gate) + 2 * 96 * 32 + norms
    model = make_model(config, (96, 64))
    for block in model.blocks:
        assert isinstance(block.mlp, MoEFeedForward)
        assert not block.mlp.down.any(), "branches start at zero"
        assert block.mlp.up.std() > 0.1
