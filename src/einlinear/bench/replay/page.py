"""The page of the comparison, search.md, and its picture, search.svg."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from einlinear.bench.replay.score import BY_LAW, CLOSE, OURS, SURROGATE, Score, mean_interval
from einlinear.show.pages import render
from einlinear.show.plots import FAINT, INK, check_matplotlib, save_figure

_SURE = 0.9
_COLORS = {
    OURS: "#7c3aed",
    "full grid": "#64748b",
    "random": "#d97706",
    "ASHA": "#0d9488",
    "TPE + Hyperband": "#2563a8",
}
_LIGHT, _DARK = "#e4e7ec", "#1a1d23"
_ON_DARK = {
    "#ffffff": _DARK,
    "#000000": _LIGHT,
    INK: _LIGHT,
    FAINT: "#3a3f4a",
    "#7c3aed": "#a78bfa",
}
_FAMILIES = {
    "usual": "noise as in real runs: 0.3 % of the loss for each run, 0.3 % for each seed, 0.15 % "
    "for each evaluation",
    "noisy": "twice that noise",
    "bent": "curves that leave the law, each in its own way, by 0.05 % of the loss one doubling "
    "from the middle and 0.5 % at three, and noise of runs that changes as they go on",
    "very bent": "curves that leave the law by twice as much",
    "dense wins": "no structure is better than dense; the best has a multiplier of 0.85 to 0.95",
}


def search_page(methods: Sequence[Score], proposers: Sequence[Score]) -> str:
    """The page in Markdown."""
    families = list(dict.fromkeys(score.family for score in methods))
    groups = {name: [s for s in methods if s.family == name] for name in families}
    return render(
        "einlinear.bench",
        "search.md",
        verdicts=[_verdict(name, scores) for name, scores in groups.items()],
        families={name: _FAMILIES.get(name, "") for name in families},
        results={name: _table(scores) for name, scores in groups.items()},
        proposers=_proposers(proposers),
        close=f"{CLOSE:.0%}",
        sure=f"{_SURE:.0%}",
    )


def _verdict(name: str, scores: Sequence[Score]) -> str:
    """The search against the best of the others, at the largest budget."""
    last = max(score.share for score in scores)
    (ours,) = (s for s in scores if s.method == OURS and s.share == last)
    rivals = [s for s in scores if s.method != OURS and s.share == last]
    best = min(rivals, key=lambda score: score.mean)
    apart = np.array(best.regrets) - np.array(ours.regrets)
    low, high = mean_interval(apart)
    truth = ""
    if ours.true_regrets:
        nearest = min(rivals, key=lambda score: np.mean(score.true_regrets))
        more = np.array(nearest.true_regrets) - np.array(ours.true_regrets)
        ends = mean_interval(more)
        truth = (
            f" By the truth, the regret of the search is {np.mean(ours.true_regrets):.2%} and that "
            f"of the best of the others, {nearest.method}, {np.mean(nearest.true_regrets):.2%}: a "
            f"difference of {more.mean():+.2%} ({ends[0]:+.2%} to {ends[1]:+.2%})."
        )
    return (
        f"*{name}*, {len(ours.regrets)} tables: with {_share(last)} of the compute of the grid, "
        f"the search is within {CLOSE:.0%} of the best in {ours.close:.0%} of the tables, with a "
        f"mean regret of {ours.mean:.2%}. It reaches {_SURE:.0%} of the tables with "
        f"{_needed(scores, OURS)} of the grid. The best of the others at {_share(last)}, "
        f"{best.method}, is within {CLOSE:.0%} in {best.close:.0%}; its regret is "
        f"{best.mean:.2%}, and the difference {apart.mean():+.2%} ({low:+.2%} to {high:+.2%})."
        + truth
    )


def _table(scores: Sequence[Score]) -> str:
    shares = list(dict.fromkeys(score.share for score in scores))
    budgets = [f"{_share(share)} of the grid" for share in shares]
    head = ["method", *budgets, f"within {CLOSE:.0%}", f"compute for {_SURE:.0%}", "by the truth"]
    lines = [_line(head), _line(["---"] * len(head))]
    for method in dict.fromkeys(score.method for score in scores):
        own = [score for score in scores if score.method == method]
        cells = [f"{s.mean:.2%} ({s.interval[0]:.2%} to {s.interval[1]:.2%})" for s in own]
        true = own[-1].true_regrets
        words = [method, *cells, f"{own[-1].close:.0%}", _needed(own, method)]
        words.append(f"{np.mean(true):.2%}" if true else "unknown")
        lines.append(_line([f"**{word}**" for word in words] if method == OURS else words))
    return "\n".join(lines)


def _proposers(scores: Sequence[Score]) -> str:
    """The proposers against our surrogate, table by table."""
    shares = list(dict.fromkeys(score.share for score in scores))
    head = ["proposer", *(f"{_share(share)} of the grid" for share in shares)]
    lines = [_line(head), _line(["---"] * len(head))]
    base = {score.share: np.array(score.regrets) for score in scores if score.method == SURROGATE}
    for method in dict.fromkeys(score.method for score in scores):
        cells = []
        for score in (score for score in scores if score.method == method):
            apart = np.array(score.regrets) - base[score.share]
            low, high = mean_interval(apart)
            more = f", {apart.mean():+.2%} ({low:+.2%} to {high:+.2%})"
            cells.append(f"{score.mean:.2%}{more if method != SURROGATE else ''}")
        lines.append(_line([method, *cells]))
    return "\n".join(lines)


def _needed(scores: Sequence[Score], method: str) -> str:
    """The least budget with which the choice is close to the best in most tables."""
    own = [s.share for s in scores if s.method == method and s.close >= _SURE]
    return _share(min(own)) if own else f"more than {_share(max(s.share for s in scores))}"


def _share(share: float) -> str:
    return f"1/{round(1 / share)}"


def _line(cells: Iterable[str]) -> str:
    return f"| {' | '.join(cells)} |"


def better_rules(scores: Sequence[Score]) -> dict[str, list[Score]]:
    """Every method with the rule, loss or our law, that has the lower regret at the last budget."""
    found: dict[str, list[Score]] = {}
    for method in dict.fromkeys(score.method for score in scores):
        own = [score for score in scores if score.method == method]
        name = method.removesuffix(BY_LAW)
        if name not in found or own[-1].mean < found[name][-1].mean:
            found[name] = own
    return found


def draw_regrets(methods: Sequence[Score], path: Path) -> Path:
    """Write a panel for each kind of tables: mean regret against compute, with intervals."""
    check_matplotlib()
    from matplotlib.figure import Figure

    families = list(dict.fromkeys(score.family for score in methods))
    figure = Figure(figsize=(3.3 * len(families) + 0.6, 3.4), layout="constrained")
    figure.patch.set_facecolor("white")
    panels = figure.subplots(1, len(families), squeeze=False, sharey=True)[0]
    for axes, family in zip(panels, families, strict=True):
        _draw_panel(axes, [score for score in methods if score.family == family], family)
    panels[0].set_ylabel("mean regret in %", fontsize=8.5, color=INK)
    handles, labels = panels[0].get_legend_handles_labels()
    figure.legend(
        handles, labels, loc="outside lower center", ncols=len(labels), frameon=False, fontsize=8.5
    )
    return save_figure(figure, path, dark=_ON_DARK)


def _draw_panel(axes: Any, scores: Sequence[Score], family: str) -> None:
    for method, own in better_rules(scores).items():
        color = _COLORS.get(method, INK)
        shares = [score.share for score in own]
        low, high = ([100 * score.interval[k] for score in own] for k in (0, 1))
        axes.fill_between(shares, low, high, color=color, alpha=0.15, linewidth=0)
        wide = 2.2 if method == OURS else 1.3
        mean = [100 * score.mean for score in own]
        axes.plot(shares, mean, color=color, linewidth=wide, marker="o", markersize=3, label=method)
    axes.axhline(100 * CLOSE, color=INK, linewidth=0.8, linestyle=(0, (2, 2)))
    axes.set_xscale("log", base=2)
    axes.set_yscale("symlog", linthresh=1)
    axes.set_ylim(0, 100)
    axes.set_yticks([0, 1, 2, 5, 10, 50], ["0", "1", "2", "5", "10", "50"])
    shares = sorted({score.share for score in scores})
    axes.set_xticks(shares, [_share(share) for share in shares])
    axes.minorticks_off()
    axes.set_title(f"tables: {family}", fontsize=9.5, color=INK, loc="left")
    axes.set_xlabel("compute, of the grid's", fontsize=8.5, color=INK)
    axes.tick_params(labelsize=8, colors=INK, length=2)
    axes.grid(color=FAINT, linewidth=0.6)
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
