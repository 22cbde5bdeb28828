"""What the pages of the worked results share: tables, numbers and colours."""

from collections.abc import Mapping, Sequence
from typing import Any

INK, GRAY, FAINT = "#222222", "#6b7280", "#dddddd"
PURPLE, TEAL, ORANGE, BLUE = "#7c3aed", "#0d9488", "#d97706", "#2563a8"
ON_DARK = {
    "#ffffff": "#1a1d23",
    "#000000": "#e4e7ec",
    INK: "#e4e7ec",
    GRAY: "#9aa3b2",
    FAINT: "#3a3f4a",
    PURPLE: "#a78bfa",
    TEAL: "#2dd4bf",
    ORANGE: "#fbbf24",
    BLUE: "#60a5fa",
}
"""What a figure shows on a dark page instead of each colour."""


def table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A Markdown table; columns without text are left out."""
    kept = [k for k in range(len(head)) if any(row[k] for row in rows)]
    lines = [[head[k] for k in kept], ["---"] * len(kept), *([r[k] for k in kept] for r in rows)]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def with_interval(values: Sequence[float], digits: int = 3) -> str:
    """A number and its interval: "1.537 (1.525 to 1.549)"."""
    mean, low, high = (f"{value:.{digits}f}" for value in values)
    return f"{mean} ({low} to {high})"


def signed(values: Sequence[float], digits: int = 4) -> str:
    """A difference and its interval, with signs."""
    mean, low, high = (f"{value:+.{digits}f}" for value in values)
    return f"{mean} ({low} to {high})"


def judged(difference: Sequence[float]) -> str:
    """Whether a loss is better or worse, if its interval excludes zero."""
    _, low, high = difference
    return "better" if high < 0 else "worse" if low > 0 else "no clear difference"


def listed(parts: Sequence[str]) -> str:
    """Parts of a sentence: "a, b and c"."""
    return " and ".join([", ".join(parts[:-1]), parts[-1]] if len(parts) > 1 else list(parts))


def plain_axes(axes: Any, *, grid: str = "y") -> None:
    """Draw axes without a frame, with a faint grid."""
    for side in ("top", "right", "left", "bottom"):
        axes.spines[side].set_visible(False)
    axes.grid(axis=grid, color=FAINT, linewidth=0.8)
    axes.set_axisbelow(True)
    axes.tick_params(length=0, labelsize=8.5, labelcolor=INK)


def million(count: int) -> str:
    return f"{count / 1e6:.2f} M"


def tokens_of(settings: Mapping[str, Any]) -> int:
    return settings["steps"] * settings["batch"] * settings["context"]
