"""The tables of the page, readable without scripts; everything in them is escaped."""

from __future__ import annotations

from collections.abc import Sequence
from fractions import Fraction
from html import escape
from itertools import compress
from math import isfinite

from einlinear.structures.taxonomy import Taxonomy
from einlinear.studies.fit import Interval, PowerLaw
from einlinear.studies.numbers import NONE, amount, between, duration, short
from einlinear.studies.reports.analyse import Analysis, LawRow, Measured
from einlinear.studies.reports.cautions import percent_thirds
from einlinear.studies.reports.figures import measure_name, unit_of
from einlinear.studies.reports.finals import Final, find_finals
from einlinear.studies.reports.looks import Look
from einlinear.studies.reports.shown import ShownRun
from einlinear.studies.reports.words import verdict

Cell = tuple[object, str]
_SAYS = {"better": "needs less", "worse": "needs more", "alike": "cannot be told apart"}


def swatch(look: Look, number: int) -> str:
    """The colour and symbol of a structure; the script draws it anew if colours change."""
    box = 'viewBox="-8 -8 16 16" aria-hidden="true"'
    return f'<svg class="swatch s{number}" {box}>{shape(look)}</svg>'


def shape(look: Look) -> str:
    """The symbol of a structure in a square of 16."""
    shapes = {
        "circle": '<circle r="6"/>',
        "square": '<rect x="-5.5" y="-5.5" width="11" height="11"/>',
        "diamond": '<path d="M0-7 7 0 0 7-7 0z"/>',
        "triangle-up": '<path d="M0-6.5 7 5.5H-7z"/>',
        "triangle-down": '<path d="M0 6.5 7-5.5H-7z"/>',
        "cross": '<path d="M-2.5-7h5v4.5H7v5H2.5V7h-5V2.5H-7v-5h4.5z"/>',
        "star": '<path d="M0-7 2-2 7-2 3 1 5 6 0 3-5 6-3 1-7-2-2-2z"/>',
        "x": '<path d="M-6-3-3-6 0-3 3-6 6-3 3 0 6 3 3 6 0 3-3 6-6 3-3 0z"/>',
        "circle-open": '<circle r="5" fill="none" stroke="currentColor" stroke-width="2.5"/>',
    }
    return shapes[look.symbol]


def table(caption: str, head: Sequence[str], rows: Sequence[str], kind: str = "") -> str:
    """A table that scrolls sideways where it is too wide, also by keyboard."""
    label = escape(caption)
    cells = "".join(head)
    return (
        f'<div class="scroll" tabindex="0" role="region" aria-label="{label}">'
        f'<table class="{kind}"><caption>{label}</caption><thead><tr>{cells}</tr></thead>'
        f"<tbody>{''.join(rows)}</tbody></table></div>"
    )


def head(title: str, is_number: bool = True) -> str:
    """The heading of a column."""
    return f'<th scope="col"{"" if is_number else " class=w"}>{escape(title)}</th>'


def _named(name: str, looks: dict[str, Look], mark: str = "") -> str:
    number = list(looks).index(name)
    return f'<th scope="row">{swatch(looks[name], number)}{escape(name)}{mark}</th>'


def _with_ends(value: float | None, ends: Interval, digits: int = 3) -> str:
    text = between(ends, digits)
    small = f"<small>{escape(text)}</small>" if text else ""
    return f"<td>{short(value, digits)} {small}</td>"


def law_tables(analysis: Analysis, measured: Sequence[Measured], looks: dict[str, Look]) -> str:
    """The power laws of every structure, by each measure; what is said of several stands once."""
    rows = [found.laws[n] for found in measured for n in analysis.structures if n in found.laws]
    notes = list(dict.fromkeys(row.note for row in rows if row.note))
    tables = "".join(_law_table(analysis, found, looks, notes) for found in measured)
    items = "".join(f"<li>{escape(note[:1].upper() + note[1:])}.</li>" for note in notes)
    return f'{tables}<ol class="notes">{items}</ol>' if notes else tables


def _law_table(
    analysis: Analysis, found: Measured, looks: dict[str, Look], notes: Sequence[str]
) -> str:
    titles = ["exponent a", "factor b", "limit L\u221e", "residuals by third", "R\u00b2"]
    titles += ["points", "runs", "decades"]
    laws = [found.laws[name] for name in analysis.structures if name in found.laws]
    rows = [_law_row(row, looks, notes) for row in laws]
    level = f"{100 * analysis.settings.level:.3g} % intervals"
    what = measure_name(analysis, found.measure)
    names = [head("structure", False), *map(head, titles)]
    return table(f"L = L\u221e + b C\u207b\u1d43, where C is {what}, with {level}", names, rows)


def _law_row(row: LawRow, looks: dict[str, Look], notes: Sequence[str]) -> str:
    law = row.law
    if law is None:
        cells = f"<td>{NONE}</td>" * 8
    else:
        cells = (
            _with_ends(law.a, law.a_interval)
            + _with_ends(law.b, law.b_interval)
            + _limit(law)
            + f'<td class="{"off" if law.is_systematic else ""}">{percent_thirds(law)}</td>'
            f"<td>{law.r2:.4f}</td><td>{law.num_points}</td><td>{law.num_runs}</td>"
            f"<td>{law.decades:.1f}</td>"
        )
    mark = f"<sup>{notes.index(row.note) + 1}</sup>" if row.note else ""
    return f"<tr>{_named(row.structure, looks, mark)}{cells}</tr>"


def final_table(analysis: Analysis, looks: dict[str, Look]) -> str:
    """Final losses and times, a row for each structure and a column for each width."""
    finals = {(one.structure, one.width): one for one in find_finals(analysis)}
    widths = sorted({width for _, width in finals})
    at = {width: [f.loss for f in finals.values() if f.width == width] for width in widths}
    best = {width: min(losses) if len(losses) > 1 else None for width, losses in at.items()}
    rows = [
        f"<tr>{_named(name, looks)}"
        f"{''.join(_final_cell(finals.get((name, w)), best[w]) for w in widths)}</tr>"
        for name in analysis.structures
        if any(structure == name for structure, _ in finals)
    ]
    several = any(final.num_settings > 1 for final in finals.values())
    caption = (
        "Final loss, the mean over seeds, and the time in training steps. Bold: the lowest of "
    )
    caption += "a width." + (" Of several settings the best counts." if several else "")
    names = [head("structure", False), *(head(f"width {width:,}") for width in widths)]
    return table(caption, names, rows, "finals") if rows else ""


def _final_cell(final: Final | None, best: float | None) -> str:
    if final is None:
        return f"<td>{NONE}</td>"
    loss = short(final.loss, 4)
    time = "" if final.seconds is None else f"<small>{escape(duration(final.seconds))}</small>"
    return f"<td>{f'<b>{loss}</b>' if final.loss == best else loss}{time}</td>"


def _limit(law: PowerLaw) -> str:
    """The limit with its interval, and whether it sits on a bound."""
    bound = '<span class="off">at its bound</span>' if law.at_bound else ""
    small = f"<small>{escape(between(law.linf_interval))} {bound}</small>"
    return f"<td>{short(law.linf)} {small}</td>"


def multiplier_table(analysis: Analysis, looks: dict[str, Look]) -> str:
    """Medians, means and deviations by every measure, side by side."""
    compared = [found for found in analysis.measured.values() if found.multipliers]
    names = [head("structure", False)]
    for found in compared:
        what = measure_name(analysis, found.measure)
        names += [head(f"by {what}: median"), head("mean \u00b1 sd"), head("verdict", False)]
    rows = [
        f"<tr>{_named(name, looks)}{''.join(_multiplier_cells(f, name) for f in compared)}</tr>"
        for name in analysis.structures
        if any(name in found.multipliers or name in found.reasons for found in compared)
    ]
    level = f"{100 * analysis.settings.level:.3g} % intervals"
    return table(f"Multipliers against {analysis.reference}, with {level}", names, rows)


def _multiplier_cells(found: Measured, name: str) -> str:
    one = found.multipliers.get(name)
    if one is None:
        reason = escape(found.reasons.get(name, ""))
        return f'<td>{NONE}</td><td>{NONE}</td><td class="w note">{reason}</td>'
    says = _SAYS[verdict(one)] if isfinite(one.median) else "not reached"
    if one.mean_is_extrapolated:
        says += ", extrapolated"
    mean = f"{short(one.mean)} \u00b1 {short(one.std, 2)}" if isfinite(one.mean) else NONE
    return (
        f"{_with_ends(one.median, one.median_interval)}<td>{mean}</td>"
        f'<td class="w note">{escape(says)}</td>'
    )


def linf_table_html(analysis: Analysis, looks: dict[str, Look]) -> str:
    """The multipliers and the misfit at several given linf."""
    rows = analysis.linf_rows
    names = [n for n in analysis.structures if n in {row.structure for row in rows}]
    titles = [head("limit L\u221e"), head("misfit (rms)")]
    titles += [head(name) for name in names if name != analysis.reference]
    body = []
    for linf in dict.fromkeys(row.linf for row in rows):
        here = {row.structure: row for row in rows if row.linf == linf}
        rms = (sum(row.rms**2 for row in here.values()) / len(here)) ** 0.5
        cells = [f"<td>{short(linf)}</td>", f"<td>{100 * rms:.2f} %</td>"]
        cells += [f"<td>{short(here[n].multiplier)}</td>" for n in names if n != analysis.reference]
        body.append(f"<tr>{''.join(cells)}</tr>")
    return table("Mean multipliers if L\u221e were given", titles, body)


_RUN_COLUMNS = (
    ("run", False),
    ("status", False),
    ("structure", False),
    ("\u03c9", True),
    ("\u03c8", True),
    ("\u03bd", True),
    ("task", False),
    ("width", True),
    ("depth", True),
    ("experts", True),
    ("seed", True),
    ("parameters", True),
    ("training FLOPs / %", True),
    ("steps", True),
    ("compute", True),
    ("loss", True),
    ("best loss", True),
    ("time", True),
    ("%s / s", True),
    ("memory", True),
)


def run_table(analysis: Analysis, looks: dict[str, Look]) -> str:
    """All runs, of every task."""
    unit = unit_of(analysis)
    place = {name: k for k, name in enumerate(looks)}
    runs = sorted(
        analysis.gathered.runs,
        key=lambda run: (place.get(run.structure, 999), run.width or 0, run.seed, run.id),
    )
    cells = [_run_cells(run) for run in runs]
    known = [any(key not in (None, "") for key, _ in column) for column in zip(*cells, strict=True)]
    columns = [*_RUN_COLUMNS[:3], *compress(_RUN_COLUMNS[3:], known)]  # a table knows few of them
    titles = [
        f'<th scope="col"{"" if is_number else " class=w"}>'
        f'<button type="button">{escape(name.replace("%", unit))}</button></th>'
        for name, is_number in columns
    ]
    rows = [
        _run_row(run, looks, list(zip(compress(values, known), columns[3:], strict=True)))
        for run, values in zip(runs, cells, strict=True)
    ]
    return table("All runs", titles, rows, "runs")


def _run_cells(run: ShownRun) -> list[Cell]:
    """What is sorted by and what is shown, in every column but the first three."""
    rate, bytes_, spent = run.units_per_second, run.peak_bytes, run.spent("compute") or None
    return [
        *((None, NONE) if v is None else (float(v), str(v)) for v in _three(run.exponents)),
        (run.task, run.task),
        (run.width, _whole(run.width)),
        (run.depth, _whole(run.depth)),
        (run.experts, run.experts or NONE),
        (run.seed, str(run.seed)),
        (run.params, amount(run.params)),
        (run.flops, amount(run.flops)),
        (run.steps_done, _whole(run.steps_done)),
        (spent, short(spent)),
        (run.loss, short(run.loss, 4)),
        (run.best_loss, short(run.best_loss, 4)),
        (run.seconds, duration(run.seconds)),
        (rate, amount(rate)),
        (bytes_, NONE if bytes_ is None else f"{amount(bytes_)}B"),
    ]


def _run_row(
    run: ShownRun, looks: dict[str, Look], values: list[tuple[Cell, tuple[str, bool]]]
) -> str:
    look = looks.get(run.structure)
    mark = "" if look is None else swatch(look, list(looks).index(run.structure))
    cells = "".join(
        f"<td{'' if is_number else ' class=w'} data-v='{escape(_key(value))}'>{escape(text)}</td>"
        for (value, text), (_, is_number) in values
    )
    return (
        f'<tr class="{run.state}"><th scope="row"><code>{escape(run.id)}</code></th>'
        f'{_state(run)}<td class="w">{mark}{escape(run.structure)}</td>{cells}</tr>'
    )


def _three(place: Taxonomy | None) -> tuple[Fraction | None, ...]:
    return (None, None, None) if place is None else (place.omega, place.psi, place.nu)


def _key(value: object) -> str:
    return "" if value is None else str(value)


def _whole(value: int | None) -> str:
    return NONE if value is None else f"{value:,}"


def _state(run: ShownRun) -> str:
    """What became of a run; what it wrote last if it failed."""
    text = f'<span class="state">{run.state}</span>'
    if run.seconds_left is not None:
        text += f" <small>{escape(duration(run.seconds_left))} left</small>"
    if run.state == "failed":
        last = escape(run.message) or "nothing was written"
        text = f"<details><summary>{text} {last}</summary><pre>{escape(run.log)}</pre></details>"
    return f'<td class="w" data-v="{run.state}">{text}</td>'
