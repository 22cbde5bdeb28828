"""The files around the code say what is true: citation, hooks, workflow, reference."""

import re
import sys
from pathlib import Path

import pytest
import yaml

import einlinear as el

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

ROOT = Path(__file__).parents[1]
TEMPLATES = sorted((ROOT / ".github/ISSUE_TEMPLATE").glob("*.yml"))
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
MAKEFILE = (ROOT / "Makefile").read_text(encoding="utf-8")
API = {path.stem: path.read_text("utf-8") for path in (ROOT / "docs/api").glob("*.md")}


def read(path):
    return yaml.safe_load((ROOT / path).read_text(encoding="utf-8"))


def packages(lines):
    """The names of the packages that requirements name."""
    return {re.split(r"[^\w.-]", line)[0].lower() for line in lines if line and line[0] != "#"}


def test_the_version_is_said_once():
    assert PROJECT["tool"]["setuptools"]["dynamic"]["version"]["attr"].startswith(
        "einlinear.version"
    )
    assert "version" not in PROJECT["project"]
    assert re.fullmatch(r"\d+\.\d+\.\d+", el.__version__)
    assert read("CITATION.cff").get("version", el.__version__) == el.__version__


def test_the_citation_has_what_the_format_requires():
    citation = read("CITATION.cff")
    assert citation["cff-version"] == "1.2.0"
    assert {"message", "title", "authors"} <= set(citation)
    assert citation["license"] == PROJECT["project"]["license"]


def test_every_tool_is_pinned_once():
    extras = PROJECT["project"]["optional-dependencies"]
    wanted = packages(line for name in ("dev", "docs") for line in extras[name])
    pins = (ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines()
    assert wanted - {"einlinear", "setuptools"} <= packages(pins)


def test_hooks_are_the_tools_of_make_lint():
    (repository,) = read(".pre-commit-config.yaml")["repos"]
    assert repository["repo"] == "local"
    tools = {hook["entry"].split()[0].removeprefix(".venv/bin/") for hook in repository["hooks"]}
    assert tools == set(re.findall(r"^\t\$\(BIN\)/([\w-]+)", _recipe("lint"), re.MULTILINE))


def _recipe(target):
    return re.search(rf"^{target}:.*\n((?:\t.*\n)+)", MAKEFILE, re.MULTILINE)[1]


def test_the_workflow_calls_commands_that_exist():
    workflow = read(".github/workflows/ci.yml")
    assert workflow[True]["pull_request"] is None  # YAML reads the key `on` as true
    runs = [
        step["run"]
        for job in workflow["jobs"].values()
        for step in job["steps"]
        if set(step) & {"run", "uses"} and "run" in step
    ]
    targets = [word for run in runs for word in re.findall(r"^make ([\w-]+)$", run)]
    assert targets
    for target in targets:
        assert re.search(rf"^{target}:", MAKEFILE, re.MULTILINE)
    assert ".ci/run" in runs
    assert any("cibuildwheel" in run for run in runs)


@pytest.mark.parametrize("path", TEMPLATES, ids=lambda path: path.name)
def test_a_form_for_issues_is_whole(path):
    form = yaml.safe_load(path.read_text(encoding="utf-8"))
    if path.name != "config.yml":
        assert {"name", "description", "body"} <= set(form)
        assert len({field["id"] for field in form["body"]}) == len(form["body"])


def test_the_reference_has_every_public_name_once():
    listed = [
        name for page in API.values() for name in re.findall(r"^\.\. auto\w+:: (\w+)$", page, re.M)
    ]
    assert sorted(listed) == sorted(set(el.__all__) - {"__version__"})


def test_the_reference_has_every_command_once():
    from einlinear.cli.main import COMMANDS

    assert re.findall(r"^```\{command-help\} (\w+)$", API["cli"], re.MULTILINE) == [
        command.__name__ for command in COMMANDS
    ]


def test_the_site_shows_every_page():
    pages = {
        path.relative_to(ROOT / "docs").with_suffix("") for path in (ROOT / "docs").rglob("*.md")
    }
    shown = {Path("index")}
    for index in ("index", "api/index"):
        text = (ROOT / f"docs/{index}.md").read_text(encoding="utf-8")
        for tree in re.findall(r"^```\{toctree\}\n(.*?)^```", text, re.MULTILINE | re.DOTALL):
            for line in tree.splitlines():
                if line and not line.startswith(":"):
                    name = re.sub(r".*<(.*)>$", r"\1", line)
                    shown.add(Path(index).parent / name)
    assert pages == shown


def test_contributing_is_short():
    assert (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8").count("\n") < 60
