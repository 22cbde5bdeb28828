"""Programs that were exported are loaded after a bare `import einlinear`."""

import importlib
import subprocess
import sys

import pytest
import torch

import einlinear as el
from einlinear.layers.export import registration
from kit.exported import as_torch_2_6, our_operators

CHECK = """
ours = [f"einlinear.layers{name}" for name in ("", ".export", ".export.registration")]
loaded = [name for name in sys.modules if name.startswith("einlinear.layers") and name not in ours]
assert not loaded, loaded  # nothing of ours is imported before it is needed
assert not [finder for finder in sys.meta_path if type(finder).__name__ == "_WhenTorchLoads"]
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


def run_each(codes, folder):
    """The codes in fresh processes, at the same time."""
    runs = [
        subprocess.Popen(
            [sys.executable, "-W", "ignore", "-c", f"import sys\n{code}"],
            cwd=folder,
            stderr=subprocess.PIPE,
            text=True,
        )
        for code in codes
    ]
    for run in runs:
        _, errors = run.communicate()
        assert run.returncode == 0, errors


ORDERS = ("import einlinear, torch", "import torch, einlinear")
"""Both imports and nothing else."""


@pytest.mark.slow
def test_operators_are_found_in_either_order_of_imports(tmp_path):
    run_each([order + CHECK + LOOK_UP for order in ORDERS], tmp_path)


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
def test_exported_programs_are_loaded_in_either_order_of_imports(tmp_path, monkeypatch):
    as_torch_2_6(monkeypatch)
    torch.manual_seed(0)
    model, x = Sum().eval(), torch.randn(5, 64)
    with torch.no_grad():
        program = torch.export.export(model, (x,))
        torch.save((x, model(x)), tmp_path / "tensors.pt")
    assert our_operators(program) == {"einlinear.multiply.default", "einlinear.experts.default"}
    torch.export.save(program, tmp_path / "program.pt2")
    run_each([order + CHECK + LOAD for order in ORDERS], tmp_path)


FAKE = {
    "__init__": "from torch._ops import ops\nfrom torch import other",
    "_ops": """
from types import ModuleType

class _OpNamespace(ModuleType):
    def __getattr__(self, name):
        raise AttributeError(name)

class _Ops(ModuleType):
    def __getattr__(self, name):
        setattr(self, name, _OpNamespace(name))
        return getattr(self, name)

ops = _Ops("torch.ops")
""",
    "other": "",
}
"""As much of torch as imports are about: a package that imports something after its operators."""


@pytest.fixture
def fake_torch(tmp_path):
    """A folder that holds it, for processes that start there."""
    folder = tmp_path / "torch"
    folder.mkdir()
    for name, body in FAKE.items():
        (folder / f"{name}.py").write_text(body)
    return tmp_path


IS_OURS = """
assert "install" in type(torch.ops.einlinear).__qualname__
"""
DETOURS = {
    "none": "import einlinear, torch",
    "reload": "import einlinear, importlib; importlib.reload(einlinear); import torch",
    "again": """
import einlinear
for name in [name for name in sys.modules if name.startswith("einlinear")]: del sys.modules[name]
import einlinear, torch
""",
    # Asked before it is imported, as transformers does.
    "find_spec": """
import einlinear
from importlib.util import find_spec
assert find_spec("torch") is not None
import torch
""",
    "lazy": """
import einlinear
from importlib.util import LazyLoader, find_spec, module_from_spec
spec = find_spec("torch")
spec.loader = LazyLoader(spec.loader)
torch = sys.modules["torch"] = module_from_spec(spec)
spec.loader.exec_module(torch)
assert "torch._ops" not in sys.modules
""",
    "threads": """
import einlinear, threading
names = ["torch.other", "torch", "wave", "colorsys", "torch.other"]
threads = [threading.Thread(target=__import__, args=[name]) for name in names]
for thread in threads: thread.start()
for thread in threads: thread.join()
assert set(names) <= sys.modules.keys()
import torch
""",
    "asked before": "import torch; torch.ops.einlinear; import einlinear",
    "absent at first": """
import einlinear
path, sys.path[:] = sys.path[:], []
try:
    import torch
except ModuleNotFoundError:
    sys.path[:] = path
import torch
""",
    "failed at first": """
import einlinear, pathlib
file = pathlib.Path("torch/other.py")
file.write_text("raise OSError('no such library')")
try:
    import torch
except OSError:
    file.write_text("")
import torch
""",
    "another finder": """
import einlinear
class Finder:  # of which an import must not lose sight
    @staticmethod
    def find_spec(name, path=None, target=None):
        if name == "torch.other":
            found.append(name)
found = []
sys.meta_path.insert(1, Finder)
import torch
assert found
""",
}


@pytest.mark.parametrize("detour", DETOURS.values(), ids=DETOURS)
def test_operators_are_found_on_detours(detour, fake_torch):
    run_each([f"{detour}\ntorch.ops{CHECK}{IS_OURS}"], fake_torch)


def test_a_torch_that_is_not_as_we_know_it(fake_torch):
    (fake_torch / "torch" / "_ops.py").write_text("ops = 0")
    run_each([f"{order}\nassert torch.ops == 0" for order in ORDERS], fake_torch)


HOMES = set(registration.HOMES.values())


def test_every_operator_has_a_home():
    for home in HOMES:
        importlib.import_module(home)
    registered = {
        name.removeprefix("einlinear::").split(".")[0]
        for name in torch._C._dispatch_get_all_op_names()
        if name.startswith("einlinear::")
    }
    assert registered == set(registration.HOMES)
