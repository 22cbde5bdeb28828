"""Rules: which layers of a model get which structure, by patterns on their names."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from fnmatch import translate
from typing import NoReturn

from einlinear.errors import EinlinearError, quote
from einlinear.models.conversion import grouped
from einlinear.models.experts import Experts
from einlinear.models.heads import Heads, heads
from einlinear.structures.named import call_of
from einlinear.structures.structure import Structure, check_structure
from einlinear.structures.text import parse

Rule = Structure | Heads | Experts | str | None
Read = Structure | Heads | Experts | None
Rules = Rule | Mapping[str, Rule] | Mapping[re.Pattern[str], Rule] | Mapping[object, Rule]
Names = tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Pattern:
    """A pattern on names, and what it gives: a structure, heads, experts, or None for nothing.

    `typed` is what it gives as the user wrote it, or could have.
    """

    text: str
    regex: re.Pattern[str]
    rule: Read
    typed: str

    @property
    def is_catch_all(self) -> bool:
        """Whether it is a glob that says nothing at all of the name."""
        return not self.text.strip("*")

    def matches(self, names: Names) -> bool:
        """Whether it fits one of a layer's names, all of it."""
        return any(self.regex.fullmatch(name) for name in names)


@dataclass(frozen=True, slots=True)
class Choice:
    """What a layer gets and how the user wrote that; or None, and the reason."""

    rule: Read
    typed: str = ""
    reason: str = ""


def read_rules(rules: object) -> tuple[Pattern, ...]:
    """The rules as patterns, in order; a structure alone is for every layer."""
    if not rules:
        _refuse_rules(rules)
    patterns = []
    for key, value in (rules if isinstance(rules, Mapping) else {"*": rules}).items():
        rule = _read_rule(value)
        typed = value.strip() if isinstance(value, str) else _as_typed(rule)
        if isinstance(key, re.Pattern) and isinstance(key.pattern, str):
            patterns.append(Pattern(f"re:{key.pattern}", key, rule, typed))
        elif isinstance(key, str) and key:
            patterns.append(Pattern(key, re.compile(translate(key)), rule, typed))
        else:
            _refuse_rules(rules)
    return tuple(patterns)


def choose(
    patterns: tuple[Pattern, ...],
    layers: Sequence[Names],
    heads: frozenset[str],
    others: Sequence[Names] = (),
) -> dict[str, Choice]:
    """For every layer, by its first name: what it gets, or None and the reason.

    The first pattern that matches decides. Patterns pass by an output head unless they match heads
    only, as its very name does. A pattern without any match, or that never decides because
    others come before it, is an error; `others` are layers that may be named but get nothing.
    """
    matched = [{names for names in layers if pattern.matches(names)} for pattern in patterns]
    is_for = [_is_for_heads(*pair, heads) for pair in zip(patterns, matched, strict=True)]
    reached: set[int] = set()
    chosen: dict[str, Choice] = {}
    for names in layers:
        is_head = names[0] in heads
        chosen[names[0]] = Choice(None, reason="output head" if is_head else "no rule")
        for i, pattern in enumerate(patterns):
            if names in matched[i] and (is_for[i] or not is_head):
                reason = "its rule is None" if pattern.rule is None else ""
                chosen[names[0]] = Choice(pattern.rule, pattern.typed, reason)
                reached.add(i)
                break
    for i, pattern in enumerate(patterns):
        if not matched[i] and not any(map(pattern.matches, others)):
            _refuse_unmatched(pattern, layers)
        if i not in reached and any(is_for[i] or names[0] not in heads for names in matched[i]):
            _refuse_shadowed(pattern, patterns[:i])
    return chosen


def listed(names: Sequence[Names], most: int = 12) -> str:
    """Names as text, those that differ in a number joined, and shortened to a few."""
    lines = [line for line, _ in grouped((name, ()) for name in names)]
    more = f" and {len(lines) - most} more" if len(lines) > most else ""
    return ", ".join(lines[:most]) + more


def _is_for_heads(pattern: Pattern, found: set[Names], heads: frozenset[str]) -> bool:
    """Whether a pattern decides on output heads, too: it matches nothing else, and is not "*"."""
    return not pattern.is_catch_all and all(names[0] in heads for names in found)


def _read_rule(value: object) -> Read:
    if isinstance(value, str):
        return parse(value)
    return value if value is None or isinstance(value, Heads | Experts) else check_structure(value)


def _as_typed(rule: Read) -> str:
    """What someone could type to get the rule."""
    if isinstance(rule, Experts):
        return (
            f"moe({_as_typed(rule.structure)}, num_experts={rule.num_experts}, "
            f"num_active={rule.num_active})"
        )
    if isinstance(rule, Heads):
        parts = [] if rule.num_heads is None else [str(rule.num_heads)]
        parts += [] if rule.structure == heads().structure else [_as_typed(rule.structure)]
        parts += [f"side={rule.side}"] if rule.side else []
        return f"heads({', '.join(parts)})"
    return "" if rule is None else call_of(rule)


def _refuse_rules(rules: object) -> NoReturn:
    raise EinlinearError(
        what=f"the rules are given as {quote(rules)}",
        rule="rules are a structure, or a mapping from patterns (globs, or compiled regular "
        "expressions) on the names of layers to structures",
        fix='write el.btt(), "btt(rank=2)" or {"*.mlp.*": el.btt(), "*.attn.*": None}',
    )


def _refuse_unmatched(pattern: Pattern, layers: Sequence[Names]) -> NoReturn:
    names = [name for layer in layers for name in layer]
    close = _close(pattern.text.strip("*."), names)
    inside = [name for name in names if name.startswith(f"{pattern.text}.")]
    fix = "use one of these names, or * for any part of them"
    if inside:
        fix = f'write "{pattern.text}.*" for the layers inside {pattern.text}'
    elif close:
        fix = f"did you mean {' or '.join(map(repr, close))}?"
    nearest_first = sorted(layers, key=lambda layer: min(map([*close, *layer].index, layer)))
    raise EinlinearError(
        what=f"the pattern {quote(pattern.text)} matches no linear layer",
        rule=f"the linear layers are {listed(nearest_first)}",
        fix=fix,
    )


def _close(text: str, names: list[str]) -> list[str]:
    """A few names that end almost like the text."""
    depth = text.count(".") + 1
    ends = {name: ".".join(name.split(".")[-depth:]) for name in names}
    close = get_close_matches(text, sorted(set(ends.values())), 3, 0.6)
    return [next(name for name in names if ends[name] == end) for end in close]


def _refuse_shadowed(pattern: Pattern, before: tuple[Pattern, ...]) -> NoReturn:
    raise EinlinearError(
        what=f"the pattern {quote(pattern.text)} never decides: every layer it matches is matched "
        f"earlier, by {' or '.join(repr(p.text) for p in before)}",
        rule="the first pattern that matches a layer decides",
        fix=f"put {quote(pattern.text)} before them, or leave it out",
    )
