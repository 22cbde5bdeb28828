"""Names of layers in tables and messages: those that differ in one number share an entry."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from fnmatch import fnmatchcase

from einlinear.show.numbers import listed

LayerNames = tuple[str, ...]
"""All names of one layer; several if it is used in several places."""
NamedRow = tuple[str, tuple[str, ...]]
"""The text for some layers, and the facts that they share."""


def grouped(rows: Iterable[tuple[Sequence[str], tuple[str, ...]]]) -> list[NamedRow]:
    """Join the rows whose names differ in one number and whose facts are the same.

    "layers.0.fc" and "layers.1.fc" become "layers.{0..1}.fc". The names of a shared layer are
    joined by " = ".
    """
    found: dict[tuple[str, str, tuple[str, ...]], list[int]] = {}
    for names, facts in rows:
        parts = names[0].split(".")
        at = next((i for i, part in enumerate(parts) if part.isdecimal()), None)
        if at is None or len(names) > 1:
            found[" = ".join(names), "", facts] = []
            continue
        before, after = ".".join(parts[:at]), ".".join(parts[at + 1 :])
        found.setdefault((before, after, facts), []).append(int(parts[at]))
    return [
        (".".join(filter(None, [before, _runs(numbers), after])), facts)
        for (before, after, facts), numbers in found.items()
    ]


def layer_list(layers: Iterable[Sequence[str]], most: int | None = None) -> str:
    """Return the names of layers as a list in a sentence, shortened to `most` entries."""
    return listed([text for text, _ in grouped((names, ()) for names in layers)], most)


def split_names(rows: Iterable[NamedRow]) -> list[NamedRow]:
    """Put rows under the modules that hold the layers, indented; shared layers stay whole."""
    split: list[NamedRow] = []
    holder = ""
    for text, facts in rows:
        parent, _, last = text.rpartition(".")
        if " = " in text or not parent:
            parent, last = "", text
        if parent and parent != holder:
            split.append((f"  {parent}", ()))
        split.append((f"    {last}" if parent else f"  {last}", facts))
        holder = parent
    return split


def patterns_for(names: Sequence[str], others: Sequence[str]) -> list[str]:
    """Return a few globs that match all of the names and none of the others."""
    patterns: list[str] = []
    for name in names:
        if any(fnmatchcase(name, pattern) for pattern in patterns):
            continue
        parts = name.split(".")
        every_block = ".".join("*" if part.isdecimal() else part for part in parts)
        wide = [f"*.{parts[-1]}", every_block] if len(names) > 1 and len(parts) > 1 else []
        fits = [glob for glob in wide if not any(fnmatchcase(other, glob) for other in others)]
        patterns += [*fits, name][:1]
    return patterns


def _runs(numbers: list[int]) -> str:
    """Format numbers: "7", "{0..11}", "{0..3,5}"; "" for none."""
    runs: list[list[int]] = []
    for number in sorted(numbers):
        if runs and number == runs[-1][-1] + 1:
            runs[-1][1:] = [number]
        else:
            runs.append([number])
    text = ",".join("..".join(map(str, run)) for run in runs)
    return text if len(numbers) < 2 else f"{{{text}}}"
