"""The compiled engine on random programs under sanitizers; `make sanitize` runs more of them."""

import pytest

from layers import sanitize

CASES = 30


@pytest.mark.slow
@pytest.mark.parametrize("name", sanitize.SANITIZERS)
def test_random_programs_under_sanitizers(name, tmp_path):
    prefix = sanitize.find_prefix(name, tmp_path)
    if isinstance(prefix, str):
        pytest.skip(prefix)
    sanitize.write_cases(tmp_path / "cases", CASES, seed=1)
    program = sanitize.build(name, tmp_path)
    done = sanitize.run(name, program, tmp_path / "cases", prefix, timeout=300)
    assert done.returncode == 0, done.stderr
    assert f"{CASES} cases" in done.stdout
    assert not done.stderr


def test_cases_are_of_all_kinds():
    """Every dtype, 1 to 4 factors, padding, gathered steps, calls that want only some gradients."""
    rng = sanitize.random.Random(1)
    cases = [sanitize.draw_case(rng) for _ in range(CASES)]
    headers = [dict(zip(sanitize.flat.HEADER, case[7:], strict=False)) for case in cases]
    assert {case[0] for case in cases} == {0, 1, 2}
    assert {header["steps"] for header in headers} >= {1, 2, 3, 4}
    assert any(header["d_in"] < header["d_in_padded"] for header in headers)
    assert any(header["d_out"] < header["d_out_padded"] for header in headers)
    assert any(header["scratch"] for header in headers)
    assert any(case[5] != 2 ** (2 + h["steps"]) - 1 for case, h in zip(cases, headers, strict=True))
