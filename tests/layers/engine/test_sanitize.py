"""The compiled engine on random programs under sanitizers; `make sanitize` runs more of them."""

import pytest

from einlinear.layers.engine.abi import ProgramHeader
from layers.engine import sanitize

CASES, EXPERT_CASES, NET_CASES = 30, 15, 15
NAMES = [field.name.lower() for field in ProgramHeader]


@pytest.mark.slow
@pytest.mark.parametrize("name", sanitize.SANITIZERS)
def test_random_programs_under_sanitizers(name, tmp_path):
    prefix = sanitize.find_prefix(name, tmp_path)
    if isinstance(prefix, str):
        pytest.skip(prefix)
    sanitize.write_cases(tmp_path / "cases", CASES, EXPERT_CASES, NET_CASES, seed=1)
    program = sanitize.build(name, tmp_path)
    done = sanitize.run(name, program, tmp_path / "cases", prefix, sanitize.TIMEOUT)
    assert done.returncode == 0, done.stderr
    assert f"{CASES} cases, {EXPERT_CASES} of experts and {NET_CASES} of nets" in done.stdout
    assert not done.stderr


def test_cases_are_of_all_kinds():
    """Every dtype, 1 to 4 factors, padding, gathered steps, calls that want only some gradients."""
    rng = sanitize.random.Random(1)
    cases = [sanitize.draw_case(rng) for _ in range(CASES)]
    headers = [dict(zip(NAMES, case[7:], strict=False)) for case in cases]
    assert {case[0] for case in cases} == {0, 1, 2}
    assert {header["steps"] for header in headers} >= {1, 2, 3, 4}
    assert any(header["d_in"] < header["d_in_padded"] for header in headers)
    assert any(header["d_out"] < header["d_out_padded"] for header in headers)
    assert any(header["scratch"] for header in headers)
    assert any(case[5] != 2 ** (2 + h["steps"]) - 1 for case, h in zip(cases, headers, strict=True))


def test_cases_of_experts_are_of_all_kinds():
    """Rows of tokens and of pairs, many pairs of a token, idle experts, one with all, no pairs."""
    rng = sanitize.random.Random(0)
    kinds = set()
    for _ in range(400):
        dtype, _, norm, weighted, bias, wanted, takes, adds, *rest = sanitize.draw_expert_case(rng)
        num_experts, num_tokens, num_pairs, _, *numbers = rest
        ends, tokens = numbers[:num_experts], numbers[num_experts : num_experts + num_pairs]
        counts = [end - start for start, end in zip([0, *ends], ends, strict=False)]
        assert ends[-1] == num_pairs
        assert all(0 <= token < num_tokens for token in tokens)
        kinds |= {("dtype", dtype), ("norm", norm), ("weighted", weighted), ("bias", bias)}
        kinds |= {("rows", takes, adds), ("x", wanted & 1), ("bias", wanted & 2)}
        kinds |= {("only x", norm, takes)} if wanted == 1 else set()
        each = [tokens.count(token) for token in range(num_tokens)]
        kinds |= {"idle token"} if 0 in each else set()
        kinds |= {"more than 8 pairs of a token"} if max(each, default=0) > 8 else set()
        kinds |= {"idle expert"} if 0 in counts and num_pairs else set()
        kinds |= {"all on one"} if num_experts > 1 and 40 < max(counts) == num_pairs else set()
        kinds |= {"no pairs"} if not num_pairs else set()
    names = {"idle token", "more than 8 pairs of a token", "idle expert", "all on one", "no pairs"}
    assert kinds >= names | {("dtype", i) for i in range(3)} | {("only x", 1, 0)}
    assert kinds >= {(name, i) for name in ("norm", "weighted", "bias", "x") for i in (0, 1)}
    assert kinds >= {("rows", i, j) for i in (0, 1) for j in (0, 1)} | {("bias", 2)}


def test_cases_of_nets_are_of_all_kinds():
    """Every dtype and activation, with and without a gate, some without some gradients."""
    rng = sanitize.random.Random(0)
    cases = [sanitize.draw_net_case(rng) for _ in range(120)]
    assert {case[0] for case in cases} == {0, 1, 2}
    assert {case[6] for case in cases} == {0, 1, 2, 3}
    assert {case[7] for case in cases} == {2, 3}
    assert {bool(case[5] & 1) for case in cases} == {True, False}
    assert {case[1] == 0 for case in cases} == {True, False}
