"""The scripts in examples/ run as a reader would run them, and print what they promise."""

from pathlib import Path

import pytest

from kit.forked import run_script

EXAMPLES = Path(__file__).parents[1] / "examples"
SAYS = {
    "drop_in_layer": ["rank                   256 of 256", "nn.Linear", "btt(rank=2)"],
    "convert_huggingface": ["heads()", "left alone: lm_head (output head)", "step  20   loss"],
    "train_moe_gpt": ["moe(monarch(), num_experts=4, num_active=2)", "step   20   loss", "load of"],
    "sweep_and_report": ["dense           16", "btt             32", "index.html"],
    "own_layer_with_mup": ["mix.gain", "PASS (slopes", "FAIL: 3 of 4 layers"],
}
SMALL = {
    "drop_in_layer": ["--width", "256"],
    "convert_huggingface": ["--steps", "20", "--layers", "1"],
    "train_moe_gpt": ["--steps", "20", "--experts", "4"],
}


def test_every_example_is_listed():
    assert {path.stem for path in EXAMPLES.glob("*.py")} == set(SAYS)


@pytest.mark.slow
@pytest.mark.parametrize("name", SAYS)
def test_an_example_runs(name):
    out = run_script(EXAMPLES / f"{name}.py", *SMALL.get(name, []))
    for words in SAYS[name]:
        assert words in out


@pytest.mark.parametrize("name", SAYS)
def test_an_example_says_how_to_run_it(name):
    text = (EXAMPLES / f"{name}.py").read_text(encoding="utf-8")
    assert text.startswith('"""')
    assert f"\n    python examples/{name}.py" in text
    assert text.count("\n") < 80
