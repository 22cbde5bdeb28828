"""recommend: measure structures against nn.Linear at one shape, and say which one to use."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from fractions import Fraction
from functools import partial

import numpy as np
import torch
from torch import nn

from einlinear.bench.candidates import cheap_structures, check_flops_share
from einlinear.bench.layers import TimedCall
from einlinear.bench.rows import LINEAR, MODES, check_fits, timing_fields
from einlinear.errors import EinlinearError, quote
from einlinear.layers.linear import EinsumLinear
from einlinear.layers.machine import machine_facts
from einlinear.layers.measure import interleaved, peak_memory
from einlinear.show.numbers import counted, short
from einlinear.show.tables import text_table, wrapped
from einlinear.structures.named import dense
from einlinear.structures.plan import Plan, make_plan
from einlinear.structures.taxonomy import taxonomy
from einlinear.structures.text import parse_structure
from einlinear.structures.values import taken, whole_number

ABOUT_LOSS = "Speed says nothing about the loss: einlinear search compares structures by training."
WIDTH = 80
"""Columns of the text of a recommendation, unless a terminal has another width."""

_LEAST = 1.05  # the speed from which a layer counts as faster; below, it rounds to 1.0
_DISPENSABLE = ("ms", "rank")  # columns that a narrow terminal lacks
LEGEND = (
    "speed: times faster than nn.Linear, the median over rounds; from - to: the middle four fifths "
    "of the rounds; FLOPs, params: relative to nn.Linear; MB: peak memory beyond weights and input"
)
"""What the columns of a table mean."""
_SECONDS = 5.0  # of measuring, unless the number of rounds is given
_FEWEST_ROUNDS, _MOST_ROUNDS = 9, 101
_BUSY = 1.5  # the spread of nn.Linear's own times from which the machine counts as busy
_MOST_STRUCTURES, _MOST_REPEATS, _MOST_THREADS = 1000, 10_000, 1024


@dataclass(frozen=True, slots=True)
class MeasuredLayer:
    """A layer as it was measured, forward + backward, in turns with nn.Linear.

    structure: its text, or "nn.Linear".
    macs, params: multiply-adds per token and weights; flops_share and params_share are relative to
        nn.Linear. The bias is left out.
    rank: the largest rank that its matrix can have.
    speed: how many times faster than nn.Linear: the median over rounds; low and high are the ends
        of the middle four fifths.
    peak_bytes: the most memory held at once beyond weights and input.
    omega, psi, nu: the exponents of the structure, see Taxonomy.
    """

    structure: str
    macs: int
    params: int
    flops_share: float
    params_share: float
    rank: int
    speed: float
    low: float
    high: float
    rounds: int
    milliseconds: float
    peak_bytes: int
    omega: Fraction
    psi: Fraction
    nu: Fraction

    @property
    def is_faster(self) -> bool:
        """Whether it is faster than nn.Linear beyond the noise."""
        return self.low > 1 and self.speed >= _LEAST

    def as_dict(self) -> dict[str, object]:
        """Plain data; exponents are texts such as "1/2"."""
        return asdict(self) | {name: str(getattr(self, name)) for name in ("omega", "psi", "nu")}


@dataclass(frozen=True, slots=True, repr=False)
class Recommendation:
    """What was measured at one shape, and what to use; str(recommendation) is a table.

    dense: nn.Linear.
    rows: the structures, fastest first.
    share: the share of FLOPs that structures could have; None if you named the structures.
    dense_spread: the slowest time of nn.Linear divided by the fastest, within the middle four
        fifths of the rounds; far above 1 on a busy machine.
    """

    d_in: int
    d_out: int
    tokens: int
    dtype: str
    bias: bool
    threads: int
    share: float | None
    dense: MeasuredLayer
    rows: tuple[MeasuredLayer, ...]
    dense_spread: float

    @property
    def best(self) -> MeasuredLayer | None:
        """The structure to use; None if nn.Linear is the best choice.

        It is the fastest of those that are faster than nn.Linear beyond the noise. Structures of
        full rank that use each parameter once per token come first: they learn the most per FLOP.
        Ref: [P24].
        """
        faster = [row for row in self.rows if row.is_faster]
        return next(iter([row for row in faster if self._is_whole(row)] or faster), None)

    @property
    def shapes(self) -> tuple[Recommendation, ...]:
        """The shapes that were measured: this one."""
        return (self,)

    @property
    def code(self) -> str:
        """Python code that creates the recommended layer."""
        bias = "" if self.bias else ", bias=False"
        if self.best is None:
            return f"torch.nn.Linear({self.d_in}, {self.d_out}{bias})"
        structure = f'structure="{self.best.structure}"'
        return f"el.EinsumLinear({self.d_in}, {self.d_out}{bias}, {structure})"

    @property
    def sentences(self) -> list[str]:
        """What to use, and why."""
        best = self.best
        if best is None:
            return [f"Stay dense: {self._why_dense()}."]
        said = [
            f"Use {best.structure}: {_times(best.speed)} faster than {LINEAR} here"
            + (f" ({best.low:.1f} to {best.high:.1f})" if best.rounds > 1 else "")
            + f", with {percent(best.flops_share)} of its FLOPs, {percent(best.params_share)} of "
            f"its parameters and rank {best.rank:,} of {self.dense.rank:,}."
        ]
        first = self.rows[0]
        if first is not best:
            said.append(
                f"{first.structure} is faster still ({_times(first.speed)}), but "
                + (
                    f"its rank is at most {first.rank:,}."
                    if first.rank < self.dense.rank
                    else "it uses each parameter many times per token. Layers of full rank that "
                    "use each parameter once learn more per FLOP."
                )
            )
        return said

    @property
    def notes(self) -> list[str]:
        """What to keep in mind: the machine was busy, and speed is not loss."""
        return busy_notes([self.dense_spread]) + [ABOUT_LOSS] * (self.best is not None)

    def text(self, width: int = WIDTH) -> str:
        """The table, what to use, and the code to paste, in lines of at most `width` characters."""
        said = [wrapped(line, width, "") for line in [*self.sentences, *self.notes]]
        parts = [self.table(width), wrapped(LEGEND, width, ""), "", *said, "", f"    {self.code}"]
        return "\n".join(parts)

    def table(self, width: int = WIDTH) -> str:
        """The setting and all rows; the best structure has a star."""
        bias = "" if self.bias else ", no bias"
        heading = (
            f"{self.d_in:,} -> {self.d_out:,}, {counted(self.tokens, 'token')}, {self.dtype}"
            f"{bias}, {counted(self.threads, 'thread')}, forward + backward"
        )
        rows = [self.dense, *self.rows]
        lines = [_cells(row, is_best=row is self.best) for row in rows]
        names = list(lines[0])
        for spare in (*_DISPENSABLE, ""):
            cells = [[line[name] for name in names] for line in lines]
            if max(map(len, text_table(names, cells).splitlines())) <= width or not spare:
                break
            names.remove(spare)
        return "\n".join([wrapped(heading, width), text_table(names, cells, width=width)])

    def __str__(self) -> str:
        return self.text()

    def __repr__(self) -> str:
        return str(self)  # what a prompt shows

    def as_dict(self) -> dict[str, object]:
        """Plain data for JSON: the machine, the setting, the rows, and what to use."""
        setting = {
            name: getattr(self, name)
            for name in ("d_in", "d_out", "tokens", "dtype", "bias", "threads", "share")
        }
        return {
            "machine": machine_facts() | {"threads": self.threads},
            **setting,
            "best": None if self.best is None else self.best.structure,
            "code": self.code,
            "dense_spread": self.dense_spread,
            "dense": self.dense.as_dict(),
            "rows": [row.as_dict() for row in self.rows],
        }

    def _is_whole(self, row: MeasuredLayer) -> bool:
        return row.rank == self.dense.rank and row.params == row.macs

    def _why_dense(self) -> str:
        if not self.rows:
            least = (
                "" if self.share is None else f" with at most {percent(self.share)} of its FLOPs"
            )
            return f"there is no structure{least} for this shape"
        first = self.rows[0]
        spread = (
            f"{first.low:.2f} to {first.high:.2f}" if first.rounds > 1 else f"{first.speed:.2f}"
        )
        reached = f"{first.structure} reaches {spread} x the speed of {LINEAR}"
        if len(self.rows) == 1:
            return f"{reached}, which is not faster beyond the noise"
        count = len(self.rows)
        return f"none of the {count} structures is faster beyond the noise; at best, {reached}"


def recommend(
    d_in: int,
    d_out: int,
    *,
    tokens: int = 2048,
    share: float = 0.25,
    structures: Sequence[str] | None = None,
    bias: bool = True,
    dtype: torch.dtype = torch.float32,
    repeats: int | None = None,
    threads: int | None = None,
    on_progress: Callable[[str], None] | None = None,
) -> Recommendation:
    """Measure structures against nn.Linear on this machine's CPU; return which one to use.

    Nothing is trained: this is about time and memory, not about the loss.

    Args:
        d_in: width of the input.
        d_out: width of the output.
        tokens: number of rows of the input.
        share: the largest share of the FLOPs of nn.Linear that a structure may have.
        structures: texts of the structures to measure, whatever their FLOPs; by default, a list of
            common ones within `share`.
        bias: whether the layers have a bias.
        dtype: the type of weights and input.
        repeats: number of timed rounds; by default as many as take five seconds, but at least 9.
        threads: of torch while measuring; by default as many as it has.
        on_progress: called with a text before each timed call.
    """
    limit = check_flops_share(share)
    base = make_plan(dense(), d_in, d_out)
    tokens = whole_number(tokens, "tokens", 1)
    if repeats is not None:
        whole_number(repeats, "repeats", 1, _MOST_REPEATS)
    named = (
        cheap_structures(d_in, d_out, limit) if structures is None else checked_texts(structures)
    )
    plans = {text: make_plan(parse_structure(text), d_in, d_out) for text in dict.fromkeys(named)}
    weights = sum(plan.params for plan in (base, *plans.values()))
    check_fits(
        f"a layer from {d_in:,} to {d_out:,} with {tokens:,} tokens",
        2 * (weights + tokens * (d_in + d_out)),  # and gradients
        fix="give smaller widths or fewer tokens",
    )
    with _on_threads(threads), torch.inference_mode(False), torch.enable_grad():
        used = torch.get_num_threads()
        actions = _actions({LINEAR: base, **plans}, tokens, bias, dtype)
        rounds = rounds_for(actions, on_progress) if repeats is None else repeats
        times = interleaved(actions, rounds, on_progress=on_progress)
        peaks = {text: peak_memory(action) for text, action in actions.items()}
    first, *others = [
        MeasuredLayer(
            structure=text,
            macs=plan.macs,
            params=plan.params,
            flops_share=plan.macs / base.macs,
            params_share=plan.params / base.params,
            rank=plan.rank,
            peak_bytes=peaks[text],
            **asdict(taxonomy(plan.structure)),
            **timing_fields(times[LINEAR], times[text]),
        )
        for text, plan in {LINEAR: base, **plans}.items()
    ]
    fast, slow = np.quantile(times[LINEAR], [0.1, 0.9]).tolist()
    return Recommendation(
        d_in=base.d_in,
        d_out=base.d_out,
        tokens=tokens,
        dtype=str(dtype).removeprefix("torch."),
        bias=bias,
        threads=used,
        share=limit if structures is None else None,
        dense=first,
        rows=tuple(sorted(others, key=lambda row: -row.speed)),
        dense_spread=slow / fast,
    )


def checked_texts(structures: object) -> list[str]:
    """Return the texts of structures that a user named."""
    texts = taken(structures, _MOST_STRUCTURES)
    if texts is None or not all(isinstance(text, str) for text in texts):
        raise EinlinearError(
            what=f"structures is {quote(structures)}",
            rule=f"structures are texts, at most {_MOST_STRUCTURES:,}",
            fix='give a list such as ["btt", "low_rank(rank=d/8)"], or leave structures out',
        )
    return [text.strip() for text in texts]


def busy_notes(spreads: Iterable[float]) -> list[str]:
    """A warning if the times of nn.Linear itself vary: times of a busy machine mean little."""
    worst = max(spreads)
    text = f"This machine is busy: the times of {LINEAR} itself differ by a factor of {worst:.1f}. "
    return [text + "Measure again when it is idle."] * (worst > _BUSY)


def percent(share: float) -> str:
    """A share with two significant digits: 6.2%, 25%."""
    value = 100 * share
    return (
        f"{value:.0f}%" if value >= 9.95 else f"{value:.1f}%" if value >= 0.995 else f"{value:.2g}%"
    )


def _actions(
    plans: Mapping[str, Plan], tokens: int, bias: bool, dtype: torch.dtype
) -> dict[str, Callable[[], object]]:
    """The calls to time: forward and backward of each layer, on the same input."""
    base = plans[LINEAR]
    x = torch.randn(tokens, base.d_in, dtype=dtype, requires_grad=True)
    found = {}
    for text, plan in plans.items():
        widths = base.d_in, base.d_out
        layer: nn.Module = (
            nn.Linear(*widths, bias=bias, dtype=dtype)
            if text == LINEAR
            else EinsumLinear(*widths, bias=bias, structure=plan.structure, dtype=dtype)
        )
        call = TimedCall("layer", LINEAR, partial(layer, x), (x, *layer.parameters()))
        found[text] = call.action(MODES[1])
    return found


def rounds_for(
    actions: Mapping[str, Callable[[], object]], on_progress: Callable[[str], None] | None
) -> int:
    """The number of rounds that take a few seconds, by a first one that also warms up."""
    if on_progress is not None:
        on_progress("warming up")
    seconds = 2 * sum(times[0] for times in interleaved(actions, 1).values())  # one call untimed
    return min(_MOST_ROUNDS, max(_FEWEST_ROUNDS, int(_SECONDS / seconds)))


@contextmanager
def _on_threads(count: int | None) -> Iterator[None]:
    held = torch.get_num_threads()
    if count is not None:
        torch.set_num_threads(whole_number(count, "threads", 1, _MOST_THREADS))
    try:
        yield
    finally:
        torch.set_num_threads(held)


def _cells(row: MeasuredLayer, is_best: bool) -> dict[str, str]:
    is_alone = row.structure == LINEAR or row.rounds == 1
    return {
        "structure": row.structure + " *" * is_best,
        "speed": short(row.speed),
        "from - to": "" if is_alone else f"{short(row.low)} - {short(row.high)}",
        "ms": short(row.milliseconds),
        "FLOPs": percent(row.flops_share),
        "params": percent(row.params_share),
        "rank": str(row.rank),
        "MB": f"{row.peak_bytes / 1e6:.1f}",
        "ω": str(row.omega),
        "ψ": str(row.psi),
        "ν": str(row.nu),
    }


def _times(speed: float) -> str:
    return f"{speed:.1f} x" if speed < 9.95 else f"{speed:.0f} x"
