"""The layer benchmark: speed and memory of structured layers relative to nn.Linear."""

from __future__ import annotations

import json
import os
import platform
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from html import escape
from importlib import resources
from itertools import cycle, product
from statistics import median
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from einlinear import __version__
from einlinear.errors import EinlinearError
from einlinear.layers import engine
from einlinear.layers.execute import VARIANTS, choose_variant, multiply
from einlinear.layers.linear import EinsumLinear
from einlinear.layers.measure import interleaved, peak_memory
from einlinear.peers import failure, make_peers, missing_note
from einlinear.structures.atlas import plotly_script
from einlinear.structures.plan import make_plan
from einlinear.structures.text import parse
from einlinear.structures.values import whole_number

MODES = ("forward", "forward+backward")
LINEAR, LINEAR_BIAS = "nn.Linear", "nn.Linear + bias"


class Case(NamedTuple):
    """One square layer to measure."""

    structure: str
    width: int
    tokens: int


@dataclass(frozen=True, slots=True)
class BenchRow:
    """One way to compute one layer: how many times faster than nn.Linear of the same widths.

    kind is "baseline", "variant" (our multiply alone, one of VARIANTS), "peer" (another library's),
    "layer" (EinsumLinear as it is called, with bias and weight normalisation) or "stack" (a step of
    training transformer blocks, see blocks.py); baseline is the row it is compared with, which has
    a bias if this one has. speed is the median over rounds of the baseline's time by this one's,
    low and high the ends of the middle four fifths; peak_bytes is the most memory that torch held
    at once beyond what was there, plus the engine's workspace.
    """

    structure: str
    width: int
    tokens: int
    dtype: str
    mode: str
    variant: str
    kind: str
    baseline: str
    is_chosen: bool
    limit: float
    speed: float
    low: float
    high: float
    rounds: int
    milliseconds: float
    peak_bytes: int

    @property
    def is_stack(self) -> bool:
        """Whether this is a step of training blocks, dense or not, rather than one layer."""
        return self.mode not in MODES

    @property
    def tokens_per_second(self) -> float:
        """By the median of the times."""
        return 1e3 * self.tokens / self.milliseconds


@dataclass(frozen=True, slots=True)
class BenchResult:
    """The rows of one or more cases, and a line for everything that a reader might miss in them."""

    rows: tuple[BenchRow, ...]
    notes: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class _Run:
    kind: str
    baseline: str
    forward: Callable[[], Tensor]
    tensors: tuple[Tensor, ...]

    def action(self, mode: str) -> Callable[[], object]:
        if mode == "forward":
            return torch.no_grad()(self.forward)

        grads: list[Tensor] = []  # made once: the layers behind make it, not this one

        def both() -> object:
            y = self.forward()
            grads.extend([] if grads else [torch.ones_like(y)])
            return torch.autograd.grad(y, self.tensors, grads)

        return both


def machine_facts() -> dict[str, object]:
    """What a reader must know to compare numbers."""
    return {
        "einlinear": __version__,
        "torch": torch.__version__,
        "threads": torch.get_num_threads(),
        "cores": os.cpu_count(),
        "processor": platform.processor() or platform.machine(),
        "capability": torch.backends.cpu.get_cpu_capability(),
        "python": platform.python_version(),
        "engine": engine.status(),
    }


def bench_cases(
    structures: Sequence[str], widths: Sequence[int], tokens: Sequence[int]
) -> list[Case]:
    """Every structure at every width and number of tokens, each once; all are checked at once."""
    for values, name, example in (
        (structures, "structures", "btt low_rank"),
        (widths, "widths", "512 1024"),
        (tokens, "tokens", "2048"),
    ):
        if not values:
            raise EinlinearError(
                what=f"--{name} has no values",
                rule=f"the benchmark runs over one or more {name}",
                fix=f"--{name} {example}, or leave --{name} out",
            )
    cases = [Case(*values) for values in product(structures, widths, tokens)]
    for structure, width, count in cases:
        make_plan(parse(structure), width, width)
        whole_number(count, "tokens", 1)
    return list(dict.fromkeys(cases))


def bench_case(case: Case, dtype: torch.dtype = torch.float32, *, repeats: int = 9) -> BenchResult:
    """All variants, the layer and the installed peers against nn.Linear, timed in turns."""
    structure, width, tokens = case
    tokens = whole_number(tokens, "tokens", 1)
    repeats = whole_number(repeats, "repeats", 1)
    torch.manual_seed(0)
    layer = EinsumLinear(width, width, structure=structure, dtype=dtype)
    x = torch.randn(tokens, width, dtype=dtype, requires_grad=True)
    runs, notes = _runs(layer, x)
    limit = layer.plan.dense_macs / layer.plan.macs
    rows = []
    for mode in MODES:
        both = mode != MODES[0]
        chosen = choose_variant(layer.plan, tokens, "cpu", dtype, has_backward=both)
        actions = {name: run.action(mode) for name, run in runs.items()}
        times = interleaved(actions, repeats)
        for name, run in runs.items():
            row = BenchRow(
                structure=structure,
                width=width,
                tokens=tokens,
                dtype=str(dtype).removeprefix("torch."),
                mode=mode,
                variant=name,
                kind=run.kind,
                baseline=run.baseline,
                is_chosen=name == chosen,
                limit=1.0 if run.kind == "baseline" else limit,
                peak_bytes=peak_memory(actions[name]),
                **compared(times[run.baseline], times[name]),
            )
            rows.append(row)
    return BenchResult(tuple(rows), tuple(notes))


def _runs(layer: EinsumLinear, x: Tensor) -> tuple[dict[str, _Run], list[str]]:
    """What is timed, by name: the multiply alone in each way, then layers with their bias."""
    plan, width = layer.plan, layer.in_features
    padded = nn.functional.pad(x.detach(), (0, plan.d_in_padded - width)).requires_grad_()
    factors = [factor.detach().requires_grad_() for factor in layer.factors()]
    linear, linear_bias = (nn.Linear(width, width, bias=b, dtype=x.dtype) for b in (False, True))
    runs = {LINEAR: _Run("baseline", LINEAR, partial(linear, x), (x, *linear.parameters()))}
    for variant in VARIANTS:
        forward = partial(multiply, plan, x, factors, variant)
        runs[variant] = _Run("variant", LINEAR, forward, (x, *factors))
    peers, notes = make_peers(plan, factors)
    for peer in peers:
        run = _Run("peer", LINEAR, partial(peer.run, padded), (padded, *peer.tensors))
        try:
            run.action(MODES[-1])()
            runs[peer.name] = run
        except Exception as error:  # whatever happens in another library is no reason to stop
            notes.append(f"{peer.name} is left out of {plan.text}: {failure(error)}")
    for name, kind, module in (
        (LINEAR_BIAS, "baseline", linear_bias),
        ("layer", "layer", layer),
    ):
        runs[name] = _Run(kind, LINEAR_BIAS, partial(module, x), (x, *module.parameters()))
    return runs, notes


def compared(dense: Sequence[float], ours: Sequence[float]) -> dict[str, Any]:
    """The fields of a row that follow from the seconds of its baseline and its own, by round."""
    ratios = sorted(before / after for before, after in zip(dense, ours, strict=True))
    return {
        "speed": median(ratios),
        "low": _quantile(ratios, 0.1),
        "high": _quantile(ratios, 0.9),
        "rounds": len(ratios),
        "milliseconds": 1e3 * median(ours),
    }


def _quantile(ordered: Sequence[float], share: float) -> float:
    """The value below which a share of the values lies, between two of them if need be."""
    below = int(share * (len(ordered) - 1))
    above = min(below + 1, len(ordered) - 1)
    part = share * (len(ordered) - 1) - below
    return ordered[below] + part * (ordered[above] - ordered[below])


def bench_page(result: BenchResult) -> str:
    """One page that needs nothing else: bars of speed with their intervals, and the limits."""
    rows = result.rows
    panels = list(dict.fromkeys((r.tokens, r.dtype, r.width, r.mode) for r in rows))
    calls = []
    for number, panel in enumerate(panels):
        held = [row for row in rows if (row.tokens, row.dtype, row.width, row.mode) == panel]
        calls.append(f"draw('figure{number}', {json.dumps(_figure(held))});")
    figures = [
        f"<section><h2>{mode.replace('+', ' + ')}, width {width:,}</h2>"
        f"<p>{tokens:,} tokens, {dtype}</p><div id='figure{number}'></div></section>"
        for number, (tokens, dtype, width, mode) in enumerate(panels)
    ]
    facts = (f"<b>{escape(name)}</b> {escape(str(v))}" for name, v in machine_facts().items())
    page = {
        "FACTS": " &middot; ".join(facts),
        "NOTES": "".join(f"<li>{escape(note)}</li>" for note in result.notes),
        "FIGURES": "".join(figures),
        "LAYERS": "".join(_table_row(row) for row in rows if not row.is_stack),
        "STACKS": "".join(_table_row(row) for row in rows if row.is_stack),
        "CALLS": "\n".join(calls).replace("</", "<\\/"),
        "PLOTLY": plotly_script(),
    }
    template = resources.files("einlinear").joinpath("bench.html").read_text(encoding="utf-8")
    return re.sub("%([A-Z]+)%", lambda match: page[match[1]], template)


def _figure(rows: Sequence[BenchRow]) -> dict[str, object]:
    """Groups of bars, one for each structure: variants, then the layer, then peers."""
    rows = [row for row in rows if row.kind != "baseline"]
    places = {name: place for place, name in enumerate(dict.fromkeys(r.structure for r in rows))}
    series = []
    for kind, colors in _COLORS.items():
        names = dict.fromkeys(row.variant for row in rows if row.kind == kind)
        series += [(kind, name, color) for name, color in zip(names, cycle(colors))]
    data: list[dict[str, object]] = [
        _bars([row for row in rows if row.variant == name], places, kind, color)
        for kind, name, color in series
    ]
    limits = {places[row.structure]: row.limit for row in rows if row.kind in _WHOLE}
    line = {"color": "#0f9d58", "width": 2.5}
    data.append(
        {
            "type": "scatter",
            "mode": "lines+text",
            "name": "limit: FLOPs saved",
            "x": [x for place in limits for x in (place - 0.44, place, place + 0.44, None)],
            "y": [y for limit in limits.values() for y in (limit, limit, limit, None)],
            "text": [t for v in limits.values() for t in ("", f"limit {v:.3g}", "", "")],
            "textposition": "top center",
            "textfont": {"color": line["color"], "size": 12},
            "line": line,
            "hoverinfo": "skip",
        }
    )
    return {"data": data, "labels": [_label(name) for name in places]}


def _bars(
    rows: Sequence[BenchRow], places: Mapping[str, int], kind: str, color: str
) -> dict[str, object]:
    faint = [kind == "variant" and not row.is_chosen for row in rows]
    return {
        "type": "bar",
        "name": _WHOLE.get(kind, rows[0].variant),
        "x": [places[row.structure] for row in rows],
        "y": [row.speed for row in rows],
        "customdata": [[row.structure, row.low, row.high, row.milliseconds] for row in rows],
        "error_y": {
            "type": "data",
            "symmetric": False,
            "array": [row.high - row.speed for row in rows],
            "arrayminus": [row.speed - row.low for row in rows],
            "color": "#1f2937",
            "thickness": 1.2,
            "width": 3,
        },
        "marker": {
            "color": color,
            "opacity": [0.35 if is_faint else 1.0 for is_faint in faint],
            "pattern": {"shape": "/" if kind == "peer" else "", "size": 6, "solidity": 0.25},
        },
    }


def _label(structure: str) -> str:
    """The structure's text in lines of about 20 characters."""
    lines = [""]
    for word in re.split("(?<=[, ])", structure):
        if lines[-1] and len(lines[-1]) + len(word) > 20:
            lines.append("")
        lines[-1] += word
    return "<br>".join(map(escape, lines))


def _table_row(row: BenchRow) -> str:
    name = f"<b>{escape(row.variant)}</b>" if row.is_chosen else escape(row.variant)
    words = [escape(row.structure), f"{row.width}", f"{row.tokens}", row.dtype, row.mode, name]
    words += [f"{row.limit:.1f}", f"{row.speed:.2f}", interval(row)]
    words += [f"{row.speed / row.limit:.0%}", f"{row.milliseconds:.2f}"]
    words += [f"{row.peak_bytes / 1e6:.1f}"]
    words += [f"{row.tokens_per_second:,.0f}"]
    return "<tr>" + "".join(f"<td>{word}" for word in words) + "</tr>\n"


def interval(row: BenchRow) -> str:
    """The middle four fifths of the rounds; one round has none."""
    return f"{row.low:.2f} - {row.high:.2f}" if row.rounds > 1 else "one round"


_WHOLE = {
    "layer": "layer, with bias and normalisation",
    "stack": "blocks with the structure in all linear layers",
}
_COLORS = {
    "variant": ("#93a3b8", "#2563a8", "#0d9488", "#0ea5e9", "#84a98c"),
    "layer": ("#7c3aed",),
    "stack": ("#7c3aed",),
    "peer": ("#d97706", "#f2b866", "#be185d", "#f472b6"),
}


def as_json(result: BenchResult) -> dict[str, object]:
    """The facts of the machine, all rows and the notes, as plain data."""
    rows = [asdict(row) | {"tokens_per_second": row.tokens_per_second} for row in result.rows]
    return {"machine": machine_facts(), "notes": list(result.notes), "rows": rows}


def merged(results: Sequence[BenchResult]) -> BenchResult:
    """All rows; each note once, and how to add the peers that are missing."""
    missing = missing_note()
    notes = [note for result in results for note in result.notes] + ([missing] if missing else [])
    rows = [row for result in results for row in result.rows]
    return BenchResult(tuple(rows), tuple(dict.fromkeys(notes)))


_KEY = ("structure", "width", "tokens", "dtype", "mode", "variant")


def speeds(text: str, name: str) -> dict[tuple[object, ...], float]:
    """The speed of every row of a bench.json, by what identifies the row."""
    try:
        rows = json.loads(text)["rows"]
        return {tuple(row[key] for key in _KEY): float(row["speed"]) for row in rows}
    except (ValueError, KeyError, TypeError) as error:
        raise EinlinearError(
            what=f"{name} holds no rows of a benchmark: {failure(error)}",
            rule="a run is compared with the bench.json of another run",
            fix="name a file that einlinear bench has written",
        ) from error


def row_key(row: BenchRow) -> tuple[object, ...]:
    """What identifies a row in two runs."""
    return tuple(getattr(row, key) for key in _KEY)
