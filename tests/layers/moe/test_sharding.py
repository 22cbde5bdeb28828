"""Experts on two ranks, which are real processes: the same as on one, forward and backward."""

import re
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import einlinear as el
from einlinear.layers.moe.exchange import held_pairs, local_experts, visits
from einlinear.layers.moe.sharding import plan_sharding
from kit import expert_models as models
from kit import expert_ranks as ranks
from kit.pair import Pair

KINDS = ["btt(rank=2)", "low_rank", "dense", "feed forward"]


@pytest.fixture(scope="module")
def pair():
    pair = Pair()
    yield pair
    pair.stop()


@st.composite
def choices(draw):
    """Distinct experts for each token, the number of ranks and how many experts each holds."""
    num_ranks, count = draw(st.integers(1, 4)), draw(st.integers(1, 4))
    num_experts = num_ranks * count
    num_active = draw(st.integers(1, num_experts))
    token = st.permutations(range(num_experts)).map(lambda order: order[:num_active])
    tokens = draw(st.lists(token, max_size=8))
    return torch.tensor(tokens, dtype=torch.long).view(-1, num_active), num_ranks, count


@given(choices())
def test_every_pair_arrives_once_and_rows_once_per_rank(case):
    experts_tk, num_ranks, count = case
    tokens_v, sends_n = visits(experts_tk, num_ranks, count)
    experts_vk, is_held_vk = local_experts(experts_tk, tokens_v, sends_n, count)
    wanted = [
        (rank, token)
        for rank in range(num_ranks)
        for token, chosen in enumerate(experts_tk.tolist())
        if any(expert // count == rank for expert in chosen)
    ]
    assert tokens_v.tolist() == [token for _, token in wanted]
    assert sends_n.tolist() == [sum(r == rank for r, _ in wanted) for rank in range(num_ranks)]
    found = []
    for rank, rows in enumerate(torch.split(torch.arange(len(tokens_v)), sends_n.tolist())):
        places = torch.arange(experts_vk[rows].numel()).view(experts_vk[rows].shape)
        pairs = held_pairs(experts_vk[rows], places, count)
        starts = [0, *pairs.ends_e.tolist()]
        for expert in range(count):
            for row in pairs.tokens_p[starts[expert] : starts[expert + 1]].tolist():
                found.append((int(tokens_v[rows[row]]), rank * count + expert))
        slots = is_held_vk[rows].flatten().nonzero().flatten()
        assert sorted(pairs.w_p.tolist()) == slots.tolist()
    every = [(token, e) for token, chosen in enumerate(experts_tk.tolist()) for e in chosen]
    assert sorted(found) == sorted(every)


@pytest.mark.parametrize("num_active", [1, 2, 4])
@pytest.mark.parametrize("structure", KINDS)
def test_outputs_and_gradients_are_those_of_one_process(pair, structure, num_active):
    pair.run(ranks.layers, structure, 4, num_active, {})


@pytest.mark.parametrize(
    "options",
    [
        {"bias": False},
        {"weight_norm": False},
        {"expert_norm": "together"},
        {"expert_norm": "together", "expert_gain": True},
    ],
)
def test_options(pair, options):
    pair.run(ranks.layers, "btt", 6, 3, options)
    if "bias" in options:
        pair.run(ranks.layers, "feed forward", 2, 2, options)


@pytest.mark.parametrize("structure", ["btt", "feed forward"])
@pytest.mark.parametrize("experts", [(3,), (0, 1), (3, 0)])
def test_uneven_routing(pair, structure, experts):
    pair.run(ranks.uneven, structure, experts)


@pytest.mark.parametrize("structure", ["btt", "feed forward"])
def test_a_rank_without_tokens(pair, structure):
    pair.run(ranks.no_tokens, structure)


def test_shapes_and_second_derivatives(pair):
    pair.run(ranks.shapes_and_second_derivatives)


def test_what_travels(pair):
    pair.run(ranks.traffic)


@pytest.mark.parametrize("structure", ["btt", "feed forward"])
def test_half_precision(pair, structure):
    pair.run(ranks.half_precision, structure)


@pytest.mark.parametrize("structure", ["btt", "feed forward"])
def test_checkpointing(pair, structure):
    pair.run(ranks.checkpointed, structure)


@pytest.mark.parametrize("kind", ["alone", "ddp", "fsdp2"])
def test_training_ends_where_one_process_does(pair, kind):
    pair.run(models.training, kind)


def test_gradients_that_some_ranks_miss(pair):
    pair.run(models.missing_gradients)


def test_states(pair, tmp_path):
    pair.run(models.states, str(tmp_path))


def test_wrong_states(pair):
    pair.run(models.wrong_states)


def test_fresh_weights(pair):
    pair.run(models.starts)


def test_what_each_rank_holds(pair):
    pair.run(models.sharding_value)


def test_errors(pair):
    pair.run(models.errors)


def test_ddp_on_a_part(pair):
    pair.run(models.ddp_on_a_part)


def test_shared_parameters(pair):
    pair.run(models.shared)


def test_the_page_on_mixtures(pair):
    page = Path(__file__).parents[3] / "docs" / "moe.md"
    (code,) = re.findall(r"^```py\n(.*?)^```", page.read_text("utf-8"), re.MULTILINE | re.DOTALL)
    pair.run(models.snippet, code)


def test_compile(pair):
    pair.run(ranks.compiled)


def test_without_a_process_group():
    layer = el.MoELinear(8, 8, structure="btt", num_experts=4)
    with pytest.raises(el.EinlinearError, match=r"no process group[\s\S]*torchrun"):
        el.shard_experts_(layer)


def test_the_plan_changes_nothing():
    layer = el.MoELinear(8, 8, structure="btt", num_experts=6)
    plan = plan_sharding(layer, 2, 3)
    assert (plan.experts(""), plan.parameters) == (range(4, 6), ("A", "B"))
    assert (layer.shard, layer.A.shape[0]) == (None, 6)
    with pytest.raises(el.EinlinearError, match="'itself' has 6 experts, for 4 ranks"):
        plan_sharding(layer, 0, 4)
    with pytest.raises(el.EinlinearError, match="take 7 experts, or a group of"):
        plan_sharding(layer, 0, 7)
    with pytest.raises(el.EinlinearError, match=r"layer 'mix'[\s\S]*name one of ''"):
        plan.experts("mix")


def test_the_pair_sees_failures(pair):  # the last, because it ends the processes
    with pytest.raises(AssertionError, match=r"rank 1: [\s\S]*in 0 groups"):
        pair.run(ranks.fails_on_rank_1)
    assert not pair.processes
