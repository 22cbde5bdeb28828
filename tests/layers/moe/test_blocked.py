"""Many experts in blocks of one length, as on a GPU, against torch's autograd in float64."""

from dataclasses import fields

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import einlinear as el
from cases import STRUCTURES, structures
from einlinear.layers.moe import blocked
from einlinear.layers.moe.blocked import BlockedExperts, block_length
from einlinear.layers.opaque import only_wanted
from kit.grouped_cases import TOL, Case, assert_right, make, spread

BTT = el.make_plan(STRUCTURES["btt(rank=2)"], 20, 28)


class BlockedCase(Case):
    """A case that is not for the engine."""

    def experts(self):
        given = self.plan, "einsum", self.x, self.factors, self.assignment, self.stds
        return BlockedExperts(*given)

    def forward(self, has_bias=True):
        return self.experts().forward(self.bias if has_bias else None)

    def backward(self, scales, wanted=None):
        wanted = wanted or [True] * (3 + len(self.factors))
        return only_wanted(self.experts().backward(self.grad, scales, wanted), wanted)


def blocked_case(*arguments, **options):
    case = make(*arguments, **options)
    return BlockedCase(**{field.name: getattr(case, field.name) for field in fields(case)})


@settings(max_examples=60)
@given(
    structure=structures(max_factors=3),
    widths=st.tuples(st.integers(1, 20), st.integers(1, 20)),
    num_experts=st.integers(1, 5),
    table=st.lists(st.lists(st.integers(0, 4), max_size=4), max_size=12),
    dtype=st.sampled_from(list(TOL)),
    flags=st.lists(st.booleans(), min_size=4, max_size=4),
    wanted=st.one_of(st.none(), st.lists(st.booleans(), min_size=6, max_size=6)),
)
def test_outputs_and_gradients(structure, widths, num_experts, table, dtype, flags, wanted):
    plan = el.make_plan(structure, *widths)
    x_by_token, y_by_token, weighted, norm = flags
    table = [[expert % num_experts for expert in own] for own in table]
    case = blocked_case(
        plan, table, num_experts, dtype=dtype,
        x_by_token=x_by_token, y_by_token=y_by_token, weighted=weighted, norm=norm and weighted,
    )  # fmt: skip
    assert_right(case, y_by_token, wanted and wanted[: 3 + len(plan.steps)])


@pytest.mark.parametrize("length", [1, 2, 7, 1000])
@pytest.mark.parametrize("table", [spread(60, 5, 2), [[3]] * 50, [[0], [4]], [[]] * 3, []])
def test_blocks_of_any_length_have_room(monkeypatch, length, table):
    monkeypatch.setattr(blocked, "block_length", lambda *_: length)
    assert_right(blocked_case(BTT, table, 5))


def test_what_fills_up_a_block_is_nothing():
    """Not even where another expert has numbers that are none."""
    case = blocked_case(BTT, [[0], [1], [0, 1], [2]], 4, dtype=torch.float32)
    for expert in (1, 3):
        case.factors[0][expert].view(-1)[0] = torch.nan
    y, scales = case.forward()
    assert y.isnan().all(1).tolist() == [False, True, True, False]
    grad_x, _, _, *grads = case.backward(scales)
    assert grad_x.isnan().all(1).tolist() == [False, True, True, False]
    for grad in grads:
        assert grad.flatten(1).isnan().any(1).tolist()[:3] == [False, True, False]


@given(st.integers(0, 10**5), st.integers(1, 64), st.sampled_from(["dense", "btt", "low_rank"]))
def test_at_most_twice_the_rows_and_nine_times_the_weights(num_pairs, num_experts, structure):
    plan = el.make_plan(el.parse(structure), 64, 64)
    length = block_length(plan, num_pairs, num_experts)
    num_blocks = (num_pairs + num_experts * (length - 1)) // length
    assert num_blocks <= (blocked._MOST_BLOCKS + 1) * num_experts
    assert num_blocks * length <= 2 * num_pairs + num_experts


def test_the_oracle_sees_a_row_in_the_wrong_block(monkeypatch):
    right = BlockedExperts._lay_out

    def wrong(self):
        right(self)
        self.experts_n = self.experts_n.roll(1)

    monkeypatch.setattr(BlockedExperts, "_lay_out", wrong)
    with pytest.raises(AssertionError, match="output"):
        assert_right(blocked_case(BTT, spread(60, 5, 2), 5))
