"""What is built of the package: wheels for every Python, a source distribution with its pages."""

import os
import re
import shutil
import subprocess
import sys
import sysconfig
import tarfile
from pathlib import Path
from zipfile import ZipFile

import pytest

from einlinear.layers.engine import binding

ROOT = Path(__file__).parents[1]
OUTPUTS = (".git", ".venv", "build", "dist", "demo", "__pycache__", "*.egg-info", "_engine.*")
OUTPUTS += (".*_cache", ".hypothesis", ".coverage*")
STALE = "_engine.cpython-39-x86_64-linux-gnu.so"
BUILD = "import sys; from setuptools import build_meta; print(build_meta.build_{}('dist'))"


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    """A copy of the project, with an engine that compiles at once."""
    path = tmp_path_factory.mktemp("project") / "einlinear"
    shutil.copytree(ROOT, path, ignore=shutil.ignore_patterns(*OUTPUTS))
    for file in (path / "src/einlinear/layers/engine").glob("*.c"):
        file.write_text(f"int einlinear_{file.stem};\n")
    return path


def build(source, kind, **environment):
    """The name of what was built, and what was said."""
    command = [sys.executable, "-c", BUILD.format(kind)]
    environment = os.environ | {"EINLINEAR_NO_ENGINE": ""} | environment
    done = subprocess.run(
        command, cwd=source, env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    return source / "dist" / done.stdout.splitlines()[-1], done.stdout + done.stderr


def libraries(wheel):
    return [name for name in ZipFile(wheel).namelist() if "_engine." in name]


@pytest.mark.skipif(not shutil.which("cc"), reason="there is no C compiler")
def test_a_wheel_with_the_engine_is_for_every_python(source):
    machine = f"{sys.platform}_{os.uname().machine}"
    built = source / f"build/lib.{sysconfig.get_platform()}-{sys.implementation.cache_tag}"
    (built / "einlinear/layers/engine").mkdir(parents=True)
    (built / "einlinear/layers/engine" / STALE).touch()  # of an older setup.py
    wheel, said = build(source, "wheel")
    assert (built / "einlinear/layers/engine/_engine.so").exists()
    assert re.fullmatch(rf"einlinear-[\d.]+-py3-none-{machine}\.whl", wheel.name)
    assert libraries(wheel) == ["einlinear/layers/engine/_engine.so"]
    assert re.search(r"^einlinear: compiling the engine \(about \d+ s\)$", said, re.MULTILINE)


def test_a_wheel_without_the_engine_is_for_every_machine(source):
    shutil.rmtree(source / "build", ignore_errors=True)
    wheel, said = build(source, "wheel", EINLINEAR_NO_ENGINE="1")
    assert wheel.name.endswith("-py3-none-any.whl")
    assert libraries(wheel) == []
    assert "without the compiled engine: EINLINEAR_NO_ENGINE is set" in said
    with ZipFile(wheel) as held:
        names = held.namelist()
        (facts,) = (name for name in names if name.endswith("/WHEEL"))
        assert "Root-Is-Purelib: true" in held.read(facts).decode()
    assert "einlinear/structures/templates/atlas.html" in names
    assert not [name for name in names if ".data/" in name]


@pytest.mark.skipif(not shutil.which("cc"), reason="there is no C compiler")
def test_an_editable_install_has_the_engine_that_was_built_last(source):
    folder = source / "src/einlinear/layers/engine"
    (folder / STALE).touch()
    build(source, "editable")
    assert [path.name for path in folder.glob("_engine.*")] == ["_engine.so"]
    _, said = build(source, "editable", EINLINEAR_NO_ENGINE="1")
    assert "EINLINEAR_NO_ENGINE is set" in said
    assert list(folder.glob("_engine.*")) == []


@pytest.mark.slow
def test_a_source_distribution_has_every_page_that_its_pages_link_to(source):
    archive, _ = build(source, "sdist")
    with tarfile.open(archive) as held:
        names = {name.partition("/")[2] for name in held.getnames()}
    pages = [name for name in names if name.endswith(".md") and not name.startswith("src")]
    assert {"README.md", "CONTRIBUTING.md", "STYLE.md", "docs/design.md"} <= set(pages)
    for page in pages:
        for link in re.findall(r"\]\(([^)#\s]+)[^)]*\)", (ROOT / page).read_text("utf-8")):
            if "://" not in link and not link.startswith("mailto:"):
                target = os.path.normpath(os.path.join(os.path.dirname(page), link))
                assert target in names, f"{page} links to {link}"
    assert {"setup.py", "src/einlinear/layers/engine/kernel.h", "tests/cases.py"} <= names
    assert not [name for name in names if name.endswith((".so", ".pyc"))]


def test_the_library_of_an_older_build_does_not_win(tmp_path):
    this = f"_engine{sysconfig.get_config_var('EXT_SUFFIX')}"
    for name in ("_engine.cpython-27.so", STALE, this, "_engine.txt"):
        (tmp_path / name).touch()
    assert binding.libraries(tmp_path)[0].name == this
    (tmp_path / "_engine.so").touch()
    assert [path.name for path in binding.libraries(tmp_path)][:2] == ["_engine.so", this]
    assert len(binding.libraries(tmp_path)) == 4
    assert binding.libraries(tmp_path / "nothing") == []
