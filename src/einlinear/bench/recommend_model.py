"""recommend_model: what to use for each linear layer of a model, and the time that this saves."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import nn

from einlinear.bench.candidates import check_flops_share
from einlinear.bench.recommend import (
    ABOUT_LOSS,
    WIDTH,
    MeasuredLayer,
    Recommendation,
    busy_notes,
    checked_texts,
    percent,
    recommend,
)
from einlinear.bench.rows import LINEAR
from einlinear.errors import EinlinearError, quote
from einlinear.layers.machine import machine_facts
from einlinear.models.convert.conversion import LayerNote
from einlinear.models.convert.names import LayerNames, grouped, layer_list, patterns_for
from einlinear.models.survey.sites import Site, find_sites, output_heads
from einlinear.show.numbers import counted, short
from einlinear.show.tables import RULE, text_table, wrapped
from einlinear.structures.text import parse_structure

_HEAD = "output head"
_MEASURED_ON = ("cpu", "meta")  # meta has shapes only, which are measured on the CPU


@dataclass(frozen=True, slots=True)
class LayerGroup:
    """The linear layers of a model that have the same shape, and what was measured for them.

    layers: the names of each layer; several if the model uses it in several places.
    reason: why these layers stay dense whatever their speed; "" otherwise.
    """

    layers: tuple[LayerNames, ...]
    recommendation: Recommendation
    reason: str = ""

    @property
    def chosen(self) -> MeasuredLayer | None:
        """The structure to use; None to stay dense."""
        return None if self.reason else self.recommendation.best

    @property
    def count(self) -> int:
        """How often the model computes such a layer in a step: a shared one at each place."""
        return sum(map(len, self.layers))

    @property
    def before(self) -> float:
        """Milliseconds of a step in these layers as they are."""
        return self.count * self.recommendation.dense.milliseconds

    @property
    def after(self) -> float:
        """The same with the chosen structure: less by the speed measured in turns."""
        return self.before / (1.0 if self.chosen is None else self.chosen.speed)


@dataclass(frozen=True, slots=True, repr=False)
class ModelRecommendation:
    """What to use for each linear layer of a model; str(recommendation) is a table.

    groups: layers of the same shape, in the order of the model.
    left: layers that cannot be replaced, with reasons; they are not timed.
    rules: what to give to convert_: patterns on names and the structures to use. Empty if all
        layers stay dense.
    """

    groups: tuple[LayerGroup, ...]
    left: tuple[LayerNote, ...]
    rules: dict[str, str]
    tokens: int

    @property
    def shapes(self) -> tuple[Recommendation, ...]:
        """The shapes for which structures were measured; all shapes if there are none."""
        found = {id(group.recommendation): group.recommendation for group in self.groups}
        return tuple(r for r in found.values() if r.rows) or tuple(found.values())

    @property
    def milliseconds_before(self) -> float:
        """The time of a training step in all timed layers as they are, forward and backward."""
        return sum(group.before for group in self.groups)

    @property
    def milliseconds_after(self) -> float:
        """The same after conversion."""
        return sum(group.after for group in self.groups)

    @property
    def code(self) -> str:
        """Python code that converts the model; "" if all layers stay dense."""
        if not self.rules:
            return ""
        lines = [f'    "{pattern}": "{structure}",' for pattern, structure in self.rules.items()]
        return "\n".join(["el.convert_(model, {", *lines, "})"])

    @property
    def sentences(self) -> list[str]:
        """The time before and after, and what it leaves out."""
        before, after = self.milliseconds_before, self.milliseconds_after
        step = f"for a training step of {counted(self.tokens, 'token')}"
        busy = busy_notes(group.recommendation.dense_spread for group in self.groups)
        if not self.rules:
            said = (
                f"Stay dense: the linear layers take {short(before)} ms {step}, and no structure "
            )
            return [said + "is faster beyond the noise where layers can be replaced.", *busy]
        said = f"Linear layers, {step}: {short(before)} ms now, {short(after)} ms expected, "
        said += f"{short(before / after)} x faster."
        rest = "Attention, norms, losses and the optimizer come on top and stay as they are."
        return [said, rest, *busy, ABOUT_LOSS]

    def text(self, width: int = WIDTH) -> str:
        """The table, the expected time, and the code to paste."""
        lines = [self._table(width)]
        notes = [(note.names, (note.reason,)) for note in self.left]
        for names, (reason,) in grouped(notes):
            lines.append(wrapped(f"left alone, not timed: {names} ({reason})", width))
        lines += ["", *(wrapped(line, width, "") for line in self.sentences)]
        lines += ["", *(f"    {line}" for line in self.code.splitlines())] * bool(self.rules)
        return "\n".join(lines)

    def __str__(self) -> str:
        return self.text()

    def __repr__(self) -> str:
        return str(self)  # what a prompt shows

    def as_dict(self) -> dict[str, object]:
        """Plain data for JSON: the machine, the groups with all rows, the times, the rules."""
        groups = []
        for group in self.groups:
            measured = group.recommendation.as_dict()
            del measured["machine"]
            chosen = None if group.chosen is None else group.chosen.structure
            facts: dict[str, object] = {"layers": [list(names) for names in group.layers]}
            facts |= {"reason": group.reason, "chosen": chosen, "count": group.count}
            facts |= {"milliseconds_before": group.before, "milliseconds_after": group.after}
            groups.append(facts | {"recommendation": measured})
        return {
            "machine": machine_facts() | {"threads": self.shapes[0].threads},
            "tokens": self.tokens,
            "milliseconds_before": self.milliseconds_before,
            "milliseconds_after": self.milliseconds_after,
            "rules": dict(self.rules),
            "left": [{"names": list(note.names), "reason": note.reason} for note in self.left],
            "groups": groups,
        }

    def _table(self, width: int) -> str:
        before, after = self.milliseconds_before, self.milliseconds_after
        rows: list[Sequence[str] | str] = []
        for group in self.groups:
            rows += [layer_list(group.layers) + f" ({group.reason})" * bool(group.reason)]
            rows.append(_cells(group))
        count = counted(sum(group.count for group in self.groups), "layer")
        total = (count, "", short(before / after), "", "", short(before), short(after))
        head = ("layers", "use", "speed", "FLOPs", "params", "ms", "new ms")
        return text_table(head, [*rows, RULE, total], left=2, width=width)


def recommend_model(
    model: nn.Module,
    *,
    tokens: int = 2048,
    share: float = 0.25,
    structures: Sequence[str] | None = None,
    dtype: torch.dtype | None = None,
    repeats: int | None = None,
    threads: int | None = None,
    on_progress: Callable[[str], None] | None = None,
) -> ModelRecommendation:
    """Recommend a structure for each linear layer of a model, without training or changing it.

    Each shape is measured once, see `recommend`. Output heads stay dense, as in convert_. The times
    of all layers add up to the time of a training step in linear layers, before and after.

    Args:
        model: any module with linear layers; only their shapes matter.
        tokens: number of tokens of a step, the same for each layer.
        share: the largest share of the FLOPs of nn.Linear that a structure may have.
        structures: texts of the structures to measure, whatever their FLOPs.
        dtype: the type of weights and input; by default that of each layer.
        repeats: number of timed rounds for each shape.
        threads: of torch while measuring; by default as many as it has.
        on_progress: called with a text before each timed call.
    """
    check_flops_share(share)
    for text in () if structures is None else checked_texts(structures):
        parse_structure(text)  # before minutes of measuring
    sites = _sites(model)
    heads = output_heads(model, sites)
    open_sites = [site for site in sites if not site.obstacle]
    groups: dict[_Shape, dict[str, list[Site]]] = {}
    for site in open_sites:
        shape = _Shape(site.d_in, site.d_out, site.bias is not None, dtype or site.weight.dtype)
        reason = _HEAD if site.name in heads else ""
        groups.setdefault(shape, {}).setdefault(reason, []).append(site)
    found = []
    for number, (shape, by_reason) in enumerate(groups.items(), 1):
        measured = recommend(
            shape.d_in,
            shape.d_out,
            tokens=tokens,
            share=share,
            structures=structures if "" in by_reason else (),
            bias=shape.bias,
            dtype=shape.dtype,
            repeats=repeats,
            threads=threads,
            on_progress=_numbered(f"shape {number} of {len(groups)}, {shape}", on_progress),
        )
        for reason, members in by_reason.items():
            found.append(LayerGroup(tuple(s.names for s in members), measured, reason))
    order = {site.names: number for number, site in enumerate(sites)}
    found.sort(key=lambda group: order[group.layers[0]])
    left = tuple(LayerNote(site.names, site.obstacle) for site in sites if site.obstacle)
    names = [name for site in sites for name in site.names]
    return ModelRecommendation(tuple(found), left, _rules(found, names), tokens)


@dataclass(frozen=True, slots=True)
class _Shape:
    """What decides the time of a dense layer."""

    d_in: int
    d_out: int
    bias: bool
    dtype: torch.dtype

    def __str__(self) -> str:
        return f"{self.d_in:,} -> {self.d_out:,}"


def _sites(model: nn.Module) -> tuple[Site, ...]:
    """The linear layers of the model, at least one of which can be replaced."""
    if not isinstance(model, nn.Module):
        raise EinlinearError(
            what=f"the model is given as {quote(model)}",
            rule="a model is an nn.Module",
            fix="give the model itself: el.recommend_model(model)",
        )
    sites = find_sites(model)
    kind = type(model).__name__
    if not sites:
        raise EinlinearError(
            what=f"{kind} has no linear layer",
            rule="structures replace nn.Linear, the projections of nn.MultiheadAttention and the "
            "Conv1D of Hugging Face",
            fix="give a model with such layers, before it is converted",
        )
    if any(name in ("", site.part) for site in sites for name in site.names):
        raise EinlinearError(
            what=f"the model itself is a {kind}",
            rule="a model contains linear layers, which convert_ can replace",
            fix="give its shape instead: el.recommend(d_in, d_out), or a model around it",
        )
    if all(site.obstacle for site in sites):
        reasons = dict.fromkeys(f"{site.name}: {site.obstacle}" for site in sites)
        raise EinlinearError(
            what=f"no linear layer of {kind} can be replaced: {'; '.join(list(reasons)[:3])}",
            rule="only plain linear layers that own their weights can be replaced",
            fix="remove the obstacles",
        )
    away = [site for site in sites if site.weight.device.type not in _MEASURED_ON]
    if away:
        raise EinlinearError(
            what=f"the layer {quote(away[0].name)} is on the device {away[0].weight.device}",
            rule="recommend measures on the CPU, and its times hold for the CPU only",
            fix='move the model, model.to("cpu"), to know how it does there',
        )
    return sites


def _rules(groups: Iterable[LayerGroup], names: Iterable[str]) -> dict[str, str]:
    """Patterns for the layers to replace, which match no other layer."""
    by_structure: dict[str, list[LayerNames]] = {}
    for group in groups:
        if group.chosen is not None:
            by_structure.setdefault(group.chosen.structure, []).extend(group.layers)
    rules: dict[str, str] = {}
    for structure, layers in by_structure.items():
        own = {name for layer in layers for name in layer}
        others = [name for name in names if name not in own]
        rules |= dict.fromkeys(patterns_for([layer[0] for layer in layers], others), structure)
    return rules


def _numbered(
    shape: str, on_progress: Callable[[str], None] | None
) -> Callable[[str], None] | None:
    return None if on_progress is None else lambda text: on_progress(f"{shape}: {text}")


def _cells(group: LayerGroup) -> tuple[str, ...]:
    chosen, measured = group.chosen, group.recommendation
    shares = ("", "", "")
    if chosen is not None:
        shares = short(chosen.speed), percent(chosen.flops_share), percent(chosen.params_share)
    return (
        f"  {group.count} x {measured.d_in} -> {measured.d_out}",
        LINEAR if chosen is None else chosen.structure,
        *shares,
        short(group.before),
        short(group.after),
    )
