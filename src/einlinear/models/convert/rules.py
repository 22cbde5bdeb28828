"""Rules: which layers of a model get which structure, by patterns on their names."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from fnmatch import translate
from typing import NoReturn

from einlinear.errors import EinlinearError, quote
from einlinear.models.convert.experts import Experts
from einlinear.models.convert.heads import Heads, heads
from einlinear.models.convert.names import LayerNames, layer_list
from einlinear.structures.named import named_call
from einlinear.structures.structure import Structure, StructureSum, check_structure_or_sum
from einlinear.structures.text import parse

ReadRule = Structure | StructureSum | Heads | Experts | None
"""What a layer becomes; None leaves it alone."""
LayerRule = ReadRule | str
"""The same as a user gives it; a str is the text of a structure."""
Rules = (
    LayerRule
    | Mapping[str, LayerRule]
    | Mapping[re.Pattern[str], LayerRule]
    | Mapping[object, LayerRule]
)

OUTPUT_HEAD = "output head"
"""Why a layer is left alone that rules only replace by name."""


@dataclass(frozen=True, slots=True)
class Pattern:
    """A pattern on the names of layers, and its rule; `typed` is the rule as the user wrote it."""

    text: str
    regex: re.Pattern[str]
    rule: ReadRule
    typed: str

    @property
    def is_catch_all(self) -> bool:
        """Whether it is a glob that matches every name."""
        return not self.text.strip("*")

    def matches(self, names: LayerNames) -> bool:
        """Return whether it matches one of a layer's names in full."""
        return any(self.regex.fullmatch(name) for name in names)


@dataclass(frozen=True, slots=True)
class RuleChoice:
    """The rule for a layer and how the user wrote it; or None and the reason."""

    rule: ReadRule
    typed: str = ""
    reason: str = ""


def read_rules(rules: object) -> tuple[Pattern, ...]:
    """Return the rules as patterns, in order; a structure alone applies to every layer."""
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


def choose_rules(
    patterns: tuple[Pattern, ...],
    layers: Sequence[LayerNames],
    heads: frozenset[str],
    others: Sequence[LayerNames] = (),
) -> dict[str, RuleChoice]:
    """Choose a rule for every layer, by its first name.

    The first matching pattern decides. A pattern skips output heads unless it matches nothing else,
    as the name of a head does. A pattern that matches nothing is an error, and so is one that never
    decides because earlier ones do. `others` are layers that patterns may match to no effect.
    """
    matched = [{names for names in layers if pattern.matches(names)} for pattern in patterns]
    is_for = [_is_for_heads(*pair, heads) for pair in zip(patterns, matched, strict=True)]
    reached: set[int] = set()
    chosen: dict[str, RuleChoice] = {}
    for names in layers:
        is_head = names[0] in heads
        chosen[names[0]] = RuleChoice(None, reason=OUTPUT_HEAD if is_head else "no rule")
        for i, pattern in enumerate(patterns):
            if names in matched[i] and (is_for[i] or not is_head):
                reason = "its rule is None" if pattern.rule is None else ""
                chosen[names[0]] = RuleChoice(pattern.rule, pattern.typed, reason)
                reached.add(i)
                break
    for i, pattern in enumerate(patterns):
        if not matched[i] and not any(map(pattern.matches, others)):
            _refuse_unmatched(pattern, layers)
        if i not in reached and any(is_for[i] or names[0] not in heads for names in matched[i]):
            _refuse_shadowed(pattern, patterns[:i])
    return chosen


def _is_for_heads(pattern: Pattern, found: set[LayerNames], heads: frozenset[str]) -> bool:
    """Return whether a pattern also applies to output heads: it matches only them, and is not *."""
    return not pattern.is_catch_all and all(names[0] in heads for names in found)


def _read_rule(value: object) -> ReadRule:
    if isinstance(value, str):
        return parse(value)
    if value is None or isinstance(value, Heads | Experts):
        return value
    return check_structure_or_sum(value)


def _as_typed(rule: ReadRule) -> str:
    """Return what a user could type to get the rule."""
    if isinstance(rule, Experts):
        return (
            f"moe({_as_typed(rule.structure)}, num_experts={rule.num_experts}, "
            f"num_active={rule.num_active}"
            + ("" if rule.expert_norm == "each" else f", expert_norm={rule.expert_norm}")
            + (", expert_gain=True)" if rule.expert_gain else ")")
        )
    if isinstance(rule, Heads):
        parts = [] if rule.num_heads is None else [str(rule.num_heads)]
        parts += [] if rule.structure == heads().structure else [_as_typed(rule.structure)]
        parts += [f"side={rule.side}"] if rule.side else []
        parts += [] if rule.axis == "shared" else [f"axis={rule.axis}"]
        return f"heads({', '.join(parts)})"
    return "" if rule is None else named_call(rule)


def _refuse_rules(rules: object) -> NoReturn:
    raise EinlinearError(
        what=f"the rules are given as {quote(rules)}",
        rule="rules are a structure, or a mapping from patterns on layer names (globs or compiled "
        "regular expressions) to structures",
        fix='write el.btt(), "btt(rank=2)" or {"*.mlp.*": el.btt(), "*.attn.*": None}',
    )


def _refuse_unmatched(pattern: Pattern, layers: Sequence[LayerNames]) -> NoReturn:
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
        rule=f"the linear layers are {layer_list(nearest_first, 12)}",
        fix=fix,
    )


def _close(text: str, names: list[str]) -> list[str]:
    """Return a few names whose ends are similar to the text."""
    depth = text.count(".") + 1
    ends = {name: ".".join(name.split(".")[-depth:]) for name in names}
    close = get_close_matches(text, sorted(set(ends.values())), 3, 0.6)
    return [next(name for name in names if ends[name] == end) for end in close]


def _refuse_shadowed(pattern: Pattern, before: tuple[Pattern, ...]) -> NoReturn:
    raise EinlinearError(
        what=f"the pattern {quote(pattern.text)} never decides: every layer it matches is already "
        f"matched by {' or '.join(repr(p.text) for p in before)}",
        rule="the first pattern that matches a layer decides",
        fix=f"put {quote(pattern.text)} first, or leave it out",
    )
