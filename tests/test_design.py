"""docs/design.md against the package: rooms, glossary, the walk, where changes go."""

import re
from pathlib import Path

import pytest

from test_rooms import MODULES, ROOMS, ROOT, public_names

TEXT = (Path(__file__).parents[1] / "docs" / "design.md").read_text(encoding="utf-8")


def section(title):
    """The rows of the table below a heading, as lists of cells."""
    body = TEXT.split(f"## {title}\n")[1].split("\n## ")[0]
    rows = [line.strip("|").split(" | ") for line in body.splitlines() if line.startswith("| ")]
    return rows[1:]  # without the head


def quoted(cell):
    return re.findall("`([^`]+)`", cell)


GLOSSARY = [(quoted(noun)[0], quoted(home)[0]) for noun, _, home in section("Glossary")]


def test_the_glossary_is_short():
    assert 20 <= len(GLOSSARY) <= 40
    assert len({noun for noun, _ in GLOSSARY}) == len(GLOSSARY)


@pytest.mark.parametrize(("noun", "home"), GLOSSARY, ids=lambda value: value)
def test_each_noun_is_defined_where_the_glossary_says(noun, home):
    assert noun in public_names(MODULES[f"einlinear.{home}"])


def test_every_room_is_described():
    named = {name.rstrip("/") for row in section("The rooms") for name in quoted(row[0] + row[1])}
    rooms = {str(room.relative_to(ROOT)) for room in ROOMS}
    inner = {room.split("/")[-1] for room in rooms if room not in named}
    assert inner <= named, "every room has a row, or is named in the row of the room around it"


def walk():
    return [name for row in section("A walk through the house") for name in quoted(row[1])]


def test_the_walk_names_each_module_once():
    modules = walk()
    assert len(modules) == len(set(modules)) > 20
    assert [name for name in modules if f"einlinear.{name}" not in MODULES] == []


def test_the_walk_follows_the_arrow():
    """Rooms come in the order of the contracts of import-linter, without going back."""
    order = "structures layers models runs data training sweeps searches laws reports".split()
    rooms = [
        name.split(".")[0] for row in section("A walk through the house") for name in quoted(row[1])
    ]
    places = [order.index(room) for room in rooms if room not in ("runs", "data")]
    assert places == sorted(places)


def test_changes_go_to_places_that_exist():
    rows = section("Where does a change go?")
    assert len(rows) >= 10
    for row in rows:
        for place in quoted(row[1]):
            if "/" in place:
                base = ROOT.parents[1] if place.startswith("tests/") else ROOT
                assert (base / place).exists(), place
