"""Programs that were exported are loaded after a bare `import einlinear`."""

import importlib
import subprocess
import sys

import pytest
import torch

import einlinear as el
from einlinear import registration

CHECK = """
loaded = [name for name in sys.modules if name.startswith("einlinear.layers")]
assert not loaded, loaded  # nothing of ours is imported before it is needed
assert not [finder for finder in sys.meta_path if type(finder).__name__ == "_AfterTorch"]
assert "exec_module" not in vars(torch.__spec__.loader)
assert not hasattr(torch.ops.einlinear, "nothing")
"""
LOOK_UP = """
for name in ("experts", "multiply"):  # what torch.export.load does
    assert str(getattr(torch.ops.einlinear, name).default) == f"einlinear.{name}.default"
"""
LOAD = """
program = torch.export.load("program.pt2").module()
x, wanted = torch.load("tensors.pt")
torch.testing.assert_close(program(x), wanted)
"""


def run_in_either_order(code, folder):
    """The code in fresh processes, after both imports and nothing else."""
    runs = [
        subprocess.Popen(
            [sys.executable, "-W", "ignore", "-c", f"import sys, {first}, {second}{CHECK}{code}"],
            cwd=folder,
            stderr=subprocess.PIPE,
            text=True,
        )
        for first, second in (("einlinear", "torch"), ("torch", "einlinear"))
    ]
    for run in runs:
        _, errors = run.communicate()
        assert run.returncode == 0, errors


def test_operators_are_found_in_either_order_of_imports(tmp_path):
    run_in_either_order(LOOK_UP, tmp_path)


class Sum(torch.nn.Module):
    """Both kinds of operators, on the same input."""

    def __init__(self):
        super().__init__()
        self.plain = el.EinsumLinear(64, 64, structure="btt")
        self.mixed = el.MoELinear(64, 64, structure="btt", num_experts=4)

    def forward(self, x):
        return self.plain(x) + self.mixed(x)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_exported_programs_are_loaded_in_either_order_of_imports(tmp_path):
    torch.manual_seed(0)
    model, x = Sum().eval(), torch.randn(5, 64)
    with torch.no_grad():
        program = torch.export.export(model, (x,))
        torch.save((x, model(x)), tmp_path / "tensors.pt")
    targets = {str(node.target) for node in program.graph.nodes if "einlinear" in str(node.target)}
    assert targets == {"einlinear.multiply.default", "einlinear.experts.default"}
    torch.export.save(program, tmp_path / "program.pt2")
    run_in_either_order(LOAD, tmp_path)


def fake_torch(path, body):
    path.joinpath("torch.py").write_text(body)


@pytest.fixture
def no_torch(tmp_path, monkeypatch):
    """As if torch were not imported yet, and a file in tmp_path were it."""
    monkeypatch.setattr(sys, "modules", sys.modules.copy())
    monkeypatch.setattr(sys, "meta_path", sys.meta_path.copy())
    monkeypatch.syspath_prepend(tmp_path)
    for name in [n for n in sys.modules if n.split(".")[0] == "torch" or n in HOMES]:
        del sys.modules[name]
    registration.register_on_demand()
    return tmp_path


HOMES = set(registration.HOMES.values())


def is_waiting():
    return any(isinstance(finder, registration._AfterTorch) for finder in sys.meta_path)


def test_an_import_of_torch_that_fails_is_tried_again(no_torch):
    fake_torch(no_torch, "raise OSError('no such library')")
    with pytest.raises(OSError, match="no such library"):
        importlib.import_module("torch")
    assert is_waiting()
    fake_torch(no_torch, "class ops: pass\nname = 'another torch'")
    importlib.invalidate_caches()
    torch_again = importlib.import_module("torch")  # its operators are not as we know them
    assert torch_again.name == "another torch"
    assert not is_waiting()


def test_a_torch_that_is_not_there(no_torch, monkeypatch):
    monkeypatch.setattr(sys, "path", [str(no_torch)])
    monkeypatch.setattr(sys, "meta_path", [f for f in sys.meta_path if "editable" not in str(f)])
    with pytest.raises(ModuleNotFoundError):
        importlib.import_module("torch")


def test_every_operator_has_a_home():
    for home in HOMES:
        importlib.import_module(home)
    registered = {
        name.removeprefix("einlinear::").split(".")[0]
        for name in torch._C._dispatch_get_all_op_names()
        if name.startswith("einlinear::")
    }
    assert registered == set(registration.HOMES)
