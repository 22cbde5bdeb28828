"""The layer benchmark: speed and memory of structured layers relative to nn.Linear."""

from __future__ import annotations

import json
import os
import platform
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from html import escape
from statistics import median
from typing import Any

import torch
from torch import Tensor, nn
from torch.profiler import ProfilerActivity, profile

from einlinear import __version__
from einlinear.layers.execute import VARIANTS, choose_variant, multiply
from einlinear.layers.linear import EinsumLinear
from einlinear.layers.tune import interleaved
from einlinear.structures.atlas import plotly_script
from einlinear.structures.text import parse
from einlinear.structures.values import whole_number

STRUCTURES = (
    "btt",
    "btt(rank=4)",
    "kronecker",
    "theta(1/2,1/4,1/4,1/4,1/2,1/4,0)",
    "low_rank",
)
MODES = ("forward", "forward+backward")


@dataclass(frozen=True, slots=True)
class BenchRow:
    """One way to multiply one layer: how many times faster than nn.Linear of the same widths.

    speed is the median over rounds of nn.Linear's time by this one's, low and high the ends of the
    middle four fifths; peak_bytes is the most memory that was held at once beyond what was there.
    """

    structure: str
    width: int
    tokens: int
    dtype: str
    mode: str
    variant: str
    is_chosen: bool
    limit: float
    speed: float
    low: float
    high: float
    milliseconds: float
    peak_bytes: int


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
    }


def bench_case(
    structure: str, width: int, tokens: int, dtype: torch.dtype = torch.float32, *, repeats: int = 9
) -> list[BenchRow]:
    """All variants of one square layer against nn.Linear, timed in turns."""
    tokens = whole_number(tokens, "tokens", 1)
    repeats = whole_number(repeats, "repeats", 1)
    torch.manual_seed(0)
    layer = EinsumLinear(width, width, bias=False, structure=parse(structure), dtype=dtype)
    linear = nn.Linear(width, width, bias=False, dtype=dtype)
    plan = layer.plan
    x = torch.randn(tokens, width, dtype=dtype, requires_grad=True)
    padded = nn.functional.pad(x.detach(), (0, plan.d_in_padded - width)).requires_grad_()
    factors = [factor.detach().requires_grad_() for factor in layer.factors()]

    def ours(variant: str) -> Callable[[], Tensor]:
        return lambda: multiply(plan, padded, factors, variant)

    forward: dict[str, Callable[[], Tensor]] = {"nn.Linear": lambda: linear(x)}
    forward |= {variant: ours(variant) for variant in VARIANTS}
    chosen = choose_variant(plan, tokens, "cpu")
    rows = []
    for mode in MODES:
        actions = {
            name: _action(
                run, [x, linear.weight] if name == "nn.Linear" else [padded, *factors], mode
            )
            for name, run in forward.items()
        }
        times = interleaved(actions, repeats)
        for variant in ("nn.Linear", *VARIANTS):
            ratios = sorted(d / t for d, t in zip(times["nn.Linear"], times[variant], strict=True))
            cut = len(ratios) // 10
            rows.append(
                BenchRow(
                    structure=structure,
                    width=width,
                    tokens=tokens,
                    dtype=str(dtype).removeprefix("torch."),
                    mode=mode,
                    variant=variant,
                    is_chosen=variant == chosen,
                    limit=1.0 if variant == "nn.Linear" else plan.dense_macs / plan.macs,
                    speed=median(ratios),
                    low=ratios[cut],
                    high=ratios[-1 - cut],
                    milliseconds=1e3 * median(times[variant]),
                    peak_bytes=peak_memory(actions[variant]),
                )
            )
    return rows


def _action(
    run: Callable[[], Tensor], tensors: Sequence[Tensor], mode: str
) -> Callable[[], object]:
    if mode == "forward":

        def forward() -> object:
            with torch.no_grad():
                return run()

        return forward

    def both() -> object:
        y = run()
        return torch.autograd.grad(y, list(tensors), torch.ones_like(y))

    return both


def peak_memory(action: Callable[[], object]) -> int:
    """The most bytes that torch held at once during the action, beyond those it held before."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as record:
        action()
    results: Any = record.profiler.kineto_results
    held = peak = 0
    for event in sorted(
        (e for e in results.events() if e.name() == "[memory]"), key=lambda e: e.start_ns()
    ):
        held += event.nbytes()
        peak = max(peak, held)
    return peak


def bench_page(rows: Sequence[BenchRow]) -> str:
    """One page that needs nothing else: bars of speed with their intervals, and the limits."""
    groups = sorted({(row.mode, row.dtype, row.tokens) for row in rows}, reverse=True)
    calls = []
    for number, group in enumerate(groups):
        mode, dtype, tokens = group
        held = [row for row in rows if (row.mode, row.dtype, row.tokens) == group]
        data = [_bars(held, variant) for variant in VARIANTS]
        data.append(_limits(held))
        layout = {
            "title": {"text": f"{mode}, {dtype}, {tokens:,} tokens"},
            "yaxis": {"title": {"text": "times faster than nn.Linear"}, "gridcolor": "#e5e7eb"},
            "xaxis": {"automargin": True, "tickangle": -35},
            "legend": {"orientation": "h", "y": 1.1},
            "barmode": "group",
            "height": 460,
            "plot_bgcolor": "#ffffff",
            "font": {"family": "system-ui, sans-serif", "color": "#374151"},
            "shapes": [_one_line()],
        }
        calls.append(
            f"Plotly.newPlot('figure{number}', {json.dumps(data)}, {json.dumps(layout)}, "
            "{responsive: true, displayModeBar: false});"
        )
    figures = "".join(f"<div class='panel' id='figure{i}'></div>" for i in range(len(groups)))
    facts = ", ".join(f"{name} {escape(str(value))}" for name, value in machine_facts().items())
    return _PAGE.format(
        facts=facts, figures=figures, plotly=plotly_script(), calls="\n".join(calls)
    )


def _bars(rows: Sequence[BenchRow], variant: str) -> dict[str, object]:
    held = [row for row in rows if row.variant == variant]
    return {
        "type": "bar",
        "name": variant,
        "x": [_label(row) for row in held],
        "y": [row.speed for row in held],
        "error_y": {
            "type": "data",
            "symmetric": False,
            "array": [row.high - row.speed for row in held],
            "arrayminus": [row.speed - row.low for row in held],
        },
        "marker": {
            "color": {"einsum": "#9ca3af", "strided": "#2563a8", "dense": "#d97706"}[variant],
            "opacity": [1.0 if row.is_chosen else 0.45 for row in held],
        },
    }


def _limits(rows: Sequence[BenchRow]) -> dict[str, object]:
    held = [row for row in rows if row.is_chosen]
    return {
        "type": "scatter",
        "mode": "markers",
        "name": "limit: FLOPs saved",
        "x": [_label(row) for row in held],
        "y": [row.limit for row in held],
        "marker": {"symbol": "line-ew-open", "size": 36, "color": "#0f9d58"},
    }


def _one_line() -> dict[str, object]:
    line = {"color": "#6b7280", "dash": "dot"}
    return {"type": "line", "xref": "paper", "x0": 0, "x1": 1, "y0": 1, "y1": 1, "line": line}


def _label(row: BenchRow) -> str:
    return f"{row.structure}<br>width {row.width}"


_PAGE = """<!doctype html>
<html lang="en"><head><meta charset="utf-8"><title>einlinear benchmark</title><style>
body {{ font: 16px/1.5 system-ui, sans-serif; color: #1f2937; background: #f8fafc; margin: 0 auto;
max-width: 1180px; padding: 32px 24px; }}
.panel {{ background: #fff; border: 1px solid #e5e7eb; border-radius: 14px; margin: 16px 0; }}
p {{ color: #4b5563; }}
</style></head><body><h1>Structured layers against nn.Linear</h1>
<p>{facts}</p>
<p>The multiply alone, without bias, weight normalisation and padding. Bars are medians over rounds
taken in turns, with the middle four fifths; solid bars are the
variants that the layer chooses by itself.</p>
{figures}<script>{plotly}</script><script>{calls}</script></body></html>
"""


def as_json(rows: Sequence[BenchRow]) -> dict[str, object]:
    """The facts of the machine and all rows, as plain data."""
    return {"machine": machine_facts(), "rows": [asdict(row) for row in rows]}
