"""What a search found, in words and as a table."""

from __future__ import annotations

from collections.abc import Iterable

from einlinear.searches.answer import Answer, Effect, LeaderboardRow
from einlinear.show.numbers import listed, short
from einlinear.show.tables import facts_text, text_table

_SURE = 1.645  # standard deviations: better with 95 % probability
_WIDE = 10.0  # an interval from its low to so many times that is too wide
_CHANGES = {
    "omega": "Sharing parameters (ω from 0 to 1/2)",
    "psi": "Low rank (ψ from 1 to 1/2)",
    "nu": "Sparsity (ν from 1 to 1/2)",
}


def leaderboard_table(rows: Iterable[LeaderboardRow], width: int | None = None) -> str:
    """The leaderboard as text."""
    head = ("structure", "loss", "FLOPs x", "90 %", "seen", "time x", "ω", "ψ", "ν", "best")
    lines = []
    for row in rows:
        lines.append(
            (
                row.label,
                f"{row.predicted_loss:.3f}",
                f"{row.multiplier:.2f}",
                f"{row.low:.2f}-{row.high:.2f}",
                "" if row.seen is None else f"{row.seen:.2f}",
                "" if row.seconds_multiplier is None else f"{row.seconds_multiplier:.2f}",
                f"{row.omega:.2f}",
                f"{row.psi:.2f}",
                f"{row.nu:.2f}",
                "-" if row.state == "stopped" else f"{row.wins:.0%}",
            )
        )
    return text_table(head, lines, width=width)


def short_names(rows: Iterable[LeaderboardRow]) -> dict[str, str]:
    """Structures by name, of the rows whose label does not spell the structure."""
    found = {
        row.label.split()[0]: row.structure
        for row in rows
        if row.label.strip() and not row.label.startswith(row.structure)
    }
    return dict(sorted(found.items(), key=lambda item: (len(item[0]), item[0])))


def short_names_text(rows: Iterable[LeaderboardRow], width: int | None = None) -> str:
    """The names as text, one in a line; empty if all labels spell their structures."""
    found = short_names(rows)
    return facts_text(found, width) if found else ""


def conclusions(answer: Answer) -> list[str]:
    """What follows from the runs, a sentence or two each."""
    found = [_winner(answer), _seen(answer), _separation(answer), *map(_effect, answer.effects)]
    for row in answer.rows:
        if (rate := rate_words(row)) is not None:
            found.append(f"{row.label} {rate}; the table has its loss there.")
    for names, what in ((answer.diverged, "diverged"), (answer.failed, "failed")):
        if names:
            found.append(f"Runs of {listed(names, 5)} {what}; they take no further part.")
    found.append(
        f"Losses are predicted for {short(answer.target)} FLOPs from runs of {short(answer.spent)} "
        f"FLOPs in all. L∞ is {answer.linf:.2f} ({answer.linf_interval[0]:.2f} to "
        f"{answer.linf_interval[1]:.2f})."
    )
    found.append(
        f"The largest run has {short(answer.largest)} FLOPs, {answer.target / answer.largest:.0f} "
        "times less than the target. Intervals allow for curves that bend on the way, "
        "as far as runs can tell."
    )
    return [text for text in found if text]


def rate_words(row: LeaderboardRow) -> str | None:
    """What the final check says of a row's learning rate; None if the usual one is best."""
    if row.rate in (None, 1.0) or row.rate_gain is None or row.rate_spread is None:
        return None
    verb = "is" if row.rate_gain > _SURE * row.rate_spread else "may be"
    return f"{verb} better with {row.rate:g} times the learning rate"


def paste_code(row: LeaderboardRow) -> str:
    """Code that gives a model the structure of a row."""
    if row.structure == "dense" and not row.num_experts:
        return "# stay dense"
    if row.experts == "ffn" and row.num_experts:
        return "# a standard MoE: feed-forward nets as experts, see the settings of its runs"
    rule = _with_experts(row, f'el.parse("{row.structure}")')
    if row.head_aligned:
        heads = _with_experts(row, f'el.heads(structure="{row.structure}")')
        return f'el.convert_(model, {{"*attention*": {heads}, "*": {rule}}})'
    return f"el.convert_(model, {rule})"


def _with_experts(row: LeaderboardRow, rule: str) -> str:
    if not row.num_experts:
        return rule
    return f"el.moe({rule}, num_experts={row.num_experts}, num_active={row.num_active})"


def _winner(answer: Answer) -> str:
    first = answer.rows[0]
    if first.label == "dense":
        if any(row.state == "open" for row in answer.rows):
            return "Dense leads: nothing is known to beat it, so stay dense for now."
        return "Nothing beats dense here: stay dense."
    value, low, high = first.multiplier, first.low, first.high
    what = "compute"
    if answer.objective == "seconds" and first.seconds_multiplier and first.seconds_interval:
        value, (low, high), what = first.seconds_multiplier, first.seconds_interval, "time"
    much = f"{value:.2f} times ({low:.2f} to {high:.2f})"
    if low <= 1.0:
        text = (
            f"{first.label} leads, but may be no better than dense: dense needs {much} its {what}."
        )
    else:
        text = f"{first.label} is best: dense needs {much} its {what} for the same loss."
    if high > _WIDE * low:
        text += " So wide an interval says little: the runs are too few or too short."
    return text


def _seen(answer: Answer) -> str:
    """What the runs themselves show of the leader or, if that is dense, of one that is ahead."""
    row = answer.rows[0]
    is_dense = row.label == "dense"
    if is_dense:
        row = next((row for row in answer.rows[1:] if (row.seen or 0.0) > 1.0), row)
    if row.label == "dense" or row.seen is None or row.seen_flops is None:
        return ""
    seen = f"{row.seen:.2f} times the FLOPs of {row.label}, at {short(row.seen_flops)}"
    if is_dense:
        return f"In the runs themselves, dense needs {seen}, but is predicted to win at the target."
    return f"That is predicted. In the runs themselves, dense needs {seen}."


def _separation(answer: Answer) -> str:
    close = [row for row in answer.rows if row.state == "open"]
    if not close:
        return "No other candidate can win by its interval."
    names = listed([row.label for row in close], 3)
    more = answer.more_budget
    how = "more than 100 times" if more is None else f"at least about {more:.1f} times"
    if more is not None and more <= 1.0:
        return f"{names} may still win, though not probably."
    return f"This budget does not tell {answer.rows[0].label} from {names}: that takes {how} it."


def _effect(effect: Effect) -> str:
    range_ = f"{effect.factor:.2f} ({effect.low:.2f} to {effect.high:.2f})"
    if effect.low > 1.0:
        what = "helps"
    elif effect.high < 1.0:
        what = "hurts"
    else:
        what = "has no clear effect"
    name = _CHANGES[effect.name]
    return f"{name} {what}: it multiplies the compute multiplier by {range_}."
