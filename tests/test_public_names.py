import ast
import subprocess
import sys
from pathlib import Path

import pytest
from mypy import api

import einlinear as el

CONTRACT = [
    "Structure",
    "dense",
    "low_rank",
    "kronecker",
    "tensor_train",
    "monarch",
    "btt",
    "paper_structures",
    "parse",
    "taxonomy",
    "make_plan",
    "sample_structures",
    "EinlinearError",
    "EinsumLinear",
    "MoELinear",
    "MoEFeedForward",
    "balance_loss",
    "shard_experts_",
    "average_gradients_",
    "clip_grad_norm_",
    "full_state_dict",
    "convert_",
    "heads",
    "moe",
    "lora",
    "upcycle_",
    "fuse_",
    "unfuse_",
    "adapt_",
    "merge_",
    "remove_adapters_",
    "save_adapters",
    "load_adapters_",
    "save",
    "load",
    "model_card",
    "param_groups",
    "scaling_table",
    "register_scaling",
    "init_",
    "rsgd_rates",
    "coordinate_check",
    "GPT",
    "generate",
    "MLP",
    "ResidualMLP",
    "LandscapeConfig",
    "landscape",
    "prepare",
    "open_task",
    "RunConfig",
    "load_config",
    "RunRecord",
    "read_record",
    "read_records",
    "train",
    "Observations",
    "read_observations",
    "frontier",
    "fit_power_law",
    "compute_multiplier",
    "linf_table",
    "report",
    "recommend",
    "Recommendation",
    "recommend_model",
    "ModelRecommendation",
]


def fresh(code):
    result = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True
    )
    return result.stdout.strip()


def fresh_error(code):
    command = [sys.executable, "-c", code]
    return subprocess.run(command, capture_output=True, text=True, check=False).stderr


def test_importing_the_package_imports_nothing_heavy():
    heavy = "{'torch', 'numpy', 'tyro', 'rich', 'plotly', 'matplotlib'} & set(sys.modules)"
    assert fresh(f"import einlinear, sys; print({heavy})") == "set()"


def test_structures_work_without_torch_or_numpy():
    code = (
        "import sys; sys.modules['torch'] = sys.modules['numpy'] = None\n"
        "import einlinear as el\n"
        "plan = el.make_plan(el.parse('btt(rank=2)'), 64, 64)\n"
        "print(plan.macs, el.taxonomy(plan.structure).nu, len(el.draw_structure(plan)) > 1000)"
    )
    assert fresh(code) == "2048 1/2 True"


@pytest.mark.parametrize("name", CONTRACT)
def test_contract(name):
    assert name in dir(el)
    assert getattr(el, name).__doc__


def test_the_table_and_the_types_agree():
    tree = ast.parse(Path(el.__file__).read_text(encoding="utf-8"))
    typed = {
        alias.name: node.module.removeprefix("einlinear.")
        for block in tree.body
        if isinstance(block, ast.If)
        for node in block.body
        if isinstance(node, ast.ImportFrom)
        for alias in node.names
    }
    assert typed == el._HOMES
    for name in el.__all__:
        assert getattr(el, name) is not None


def test_an_unknown_name():
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        _ = el.nothing
    assert "Did you mean: 'low_rank'?" in fresh_error("import einlinear as el; el.low_ranc")


def test_a_type_checker_knows_every_name_and_no_other(tmp_path):
    """What the modules hold is skipped: that takes minutes, and the names are all in one file."""
    use = tmp_path / "use.py"
    used = [f"el.{name}" for name in el.__all__]
    use.write_text("\n".join(["import einlinear as el", *used, "el.low_ranc", "el._HOMES.get"]))
    options = ["--config-file=", "--follow-imports=skip", "--no-site-packages"]
    out, err, code = api.run([*options, "--cache-dir=/dev/null", str(use), el.__file__])
    assert (err, code) == ("", 1)
    wrong, total = out.splitlines()
    assert wrong.startswith(f'{use}:{2 + len(used)}: error: Module has no attribute "low_ranc"')
    assert total.startswith("Found 1 error in 1 file")
