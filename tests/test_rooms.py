"""The house: rooms, what they import, and names that mean one thing. See docs/design.md.

The order of the rooms is held by import-linter (`lint-imports`, in `make test`); its contracts
stand in pyproject.toml.
"""

import ast
import subprocess
import sys
from collections import defaultdict
from pathlib import Path

import pytest

import einlinear as el

ROOT = Path(el.__file__).parent
ROOMS = sorted(path.parent for path in ROOT.rglob("__init__.py") if path.parent != ROOT)
MODULES = {
    ".".join(path.relative_to(ROOT.parent).with_suffix("").parts): path
    for path in sorted(ROOT.rglob("*.py"))
    if path.name != "__init__.py"
}
WITHOUT_TORCH = [
    "files",
    "show",
    "structures",
    "data",
    "runs",
    "laws",
    "sweeps",
    "reports",
    "reproductions",
]
"""Rooms that load no torch, but for the modules below."""
WITH_TORCH = [
    "einlinear.files.tensors",
    "einlinear.data.tasks",
    "einlinear.sweeps.planner",
    "einlinear.sweeps.run_job",
]
ALSO_WITHOUT = [
    "einlinear.errors",
    "einlinear.layers.scaling",
    "einlinear.layers.cost",
    "einlinear.models.choices",
    "einlinear.models.saving.hook",
    "einlinear.layers.export.registration",
    "einlinear.layers.engine.abi",
    "einlinear.layers.engine.program",
    "einlinear.layers.engine.flat",
    "einlinear.layers.engine.binding",
    "einlinear.cli.main",
    "einlinear.cli.sweep_display",
    "einlinear.cli.commands.sweep",
]


def torch_free():
    """The modules that must not load torch."""
    for name in MODULES:
        is_free = name.split(".")[1] in WITHOUT_TORCH or name in ALSO_WITHOUT
        if is_free and not any(name.startswith(heavy) for heavy in WITH_TORCH):
            yield name


def public_names(path):
    """What a module defines at its top, without a leading underscore."""
    for node in ast.parse(path.read_text(encoding="utf-8")).body:
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            names = [node.name]
        elif isinstance(node, ast.Assign | ast.AnnAssign):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            names = [
                leaf.id
                for target in targets
                for leaf in ast.walk(target)
                if isinstance(leaf, ast.Name)
            ]
        else:
            names = []
        yield from (name for name in names if not name.startswith("_"))


def test_a_fresh_interpreter_finds_no_torch_after_importing_rooms_that_need_none():
    imports = "import sys, " + ", ".join(torch_free())
    code = f"{imports}; print('torch' in sys.modules)"
    assert (
        subprocess.run(
            [sys.executable, "-c", code], capture_output=True, text=True, check=True
        ).stdout
        == "False\n"
    )


@pytest.mark.parametrize("room", ROOMS, ids=lambda room: str(room.relative_to(ROOT)))
def test_a_room_says_what_it_is_for_and_is_not_crowded(room):
    tree = ast.parse((room / "__init__.py").read_text(encoding="utf-8"))
    text = ast.get_docstring(tree) or ""
    assert len(tree.body) == 1, "an __init__.py holds a docstring only"
    assert "In: " in text
    assert "Out: " in text
    assert "May import: " in text
    assert len([path for path in room.glob("*.py") if path.name != "__init__.py"]) <= 15


def test_no_room_is_called_like_a_public_name():
    """Importing `einlinear.report` would replace the function `el.report` by a module."""
    assert not {room.relative_to(ROOT).parts[0] for room in ROOMS} & set(el.__all__)


def test_no_two_modules_define_the_same_public_name():
    homes = defaultdict(set)
    for name, path in MODULES.items():
        if not name.startswith("einlinear.cli.commands."):  # a command is called like its function
            for public in public_names(path):
                homes[public].add(name)
    homes.pop("main")  # of each module that is run as a process
    assert {name: found for name, found in homes.items() if len(found) > 1} == {}


def test_imports_are_written_in_full():
    for name, path in MODULES.items():
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            assert not isinstance(node, ast.ImportFrom) or node.level == 0, name
