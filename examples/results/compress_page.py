"""The page and the figure about the compressed GPT, from its record."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from page_parts import (
    BLUE,
    GRAY,
    INK,
    ON_DARK,
    ORANGE,
    PURPLE,
    judged,
    listed,
    million,
    plain_axes,
    signed,
    table,
    tokens_of,
    with_interval,
)

from einlinear.show.plots import save_figure

_FAMILIES = {
    "uniform": "low rank, one rank",
    "unequal": "low rank, `budget=`",
    "btt": "btt, one rank",
}
_LEVELS = {"plain": "plain", "inputs": "inputs", "both": "both sides", "anchored": "anchored"}
_COLORS = {"uniform": PURPLE, "unequal": BLUE, "btt": ORANGE}
_SHIFT = {"uniform": -0.09, "unequal": 0.0, "btt": 0.09}  # so that intervals do not overlap
_TICKS = (0, 0.01, 0.03, 0.1, 0.3, 1, 3)
_LINEAR = 0.03  # the axis is linear up to here
_CODE = {
    "plain": 'init="project"',
    "inputs": 'calibration=batches, weighting="inputs"',
    "both": "calibration=batches",
    "anchored": "calibration=batches, anchored=True",
}


def write_page(record: Mapping[str, Any], out: Path) -> None:
    """Write compress-gpt.md and compress-gpt.svg."""
    out.mkdir(parents=True, exist_ok=True)
    draw(record, out / "compress-gpt.svg")
    (out / "compress-gpt.md").write_text(page(record), encoding="utf-8")


def page(record: Mapping[str, Any]) -> str:
    dense, tuned, settings = record["dense"], record["tuned"], record["dense"]["settings"]
    arms = record["projected"]
    shares = sorted({arm["share"] for arm in arms.values()}, reverse=True)
    steps = tuned["dense"]["steps"]
    calibrated = max(arm["tokens"] for arm in arms.values())
    rates = record["rates"]
    parts = [
        "# A small GPT, compressed",
        f"A GPT of width {settings['width']} with {settings['depth']} blocks "
        f"({million(dense['params'])} parameters) was trained on {tokens_of(settings) / 1e6:.1f} M "
        f"symbols of {record['source']}. Its linear layers, without the head, were then "
        "replaced by structured ones with at most "
        f"{listed([f'{share} %' for share in shares])} of their FLOPs, in four ways:",
        table(
            ["level", "`el.convert_(model, ...)`"],
            [[f"**{_LEVELS[level]}**", f"`{code}`"] for level, code in _CODE.items()],
        ),
        "![Loss above that of the dense model at each level of projection and after "
        "fine-tuning, for three families of structures](compress-gpt.svg)",
        "Loss above that of the dense model, on held-out text, with 90 % intervals. Filled: "
        "projected; hollow: the same structure from scratch, trained for as many steps as the "
        "others are fine-tuned. Dashed: the dense model, trained further in the same way.",
        "## What it says",
        "\n".join(f"- {sentence}" for sentence in verdicts(record)),
        "## Without training",
        "Loss in nats per symbol. Differences are taken on the same windows of text. "
        "With `budget=`, each level also chooses its own ranks, except that anchored ones are "
        "those of both sides.",
        *(_projected(record, share) for share in shares),
        "## After fine-tuning",
        f"{steps:,} steps of {settings['batch']} windows: "
        f"{100 * steps / settings['steps']:.0f} % of the training of the dense model. "
        "A fresh model has the same structure and starts from `el.init_`. One run each. "
        "Rates were chosen by runs of "
        f"{rates['steps']} steps of low rank with one rank and 25 % of the FLOPs, on other "
        f"training text: {rates['best']['projected']:g} for projected models and "
        f"the dense one, {rates['best']['fresh']:g} for fresh ones.",
        _tuned(record),
        "## How it was measured",
        f"Held-out articles, {settings['windows']:,} windows of {settings['context']} symbols; the "
        "loss is the mean over windows. Intervals are 90 %, by bootstrap over windows. Differences "
        "are taken window by window, so they are much more certain than the losses themselves. "
        "They do not cover what another "
        f"training run or other calibration batches would change. Calibration: {calibrated:,} "
        "symbols of the training text. Learning rates follow µP (`el.param_groups`), with a "
        "warm-up and a linear decay.",
        _speed_note(record),
        "## Reproduce it",
        "TRAIN.txt and VAL.txt are text of 96 symbols (newline and printable ASCII), with three "
        "newlines between documents; those used here are not part of the project. Each stage "
        "resumes where it was interrupted.",
        "```sh\n"
        "cd examples/results\n"
        "python compress_gpt.py train   TRAIN.txt VAL.txt --out RUNS"
        f" --steps {settings['steps']}\n"
        "python compress_gpt.py project TRAIN.txt VAL.txt --out RUNS\n"
        f"python compress_gpt.py tune    TRAIN.txt VAL.txt --out RUNS --steps {steps}\n"
        "python compress_gpt.py speed   --out RUNS          # optional, on a quiet machine\n"
        "python compress_gpt.py record  --out RUNS --file ../../docs/results/compress-gpt.json\n"
        "python compress_gpt.py page    ../../docs/results/compress-gpt.json "
        "--out ../../docs/results\n```",
        "The last command makes this page and its figure from [the record](compress-gpt.json).",
    ]
    return "\n\n".join(part for part in parts if part) + "\n"


def verdicts(record: Mapping[str, Any]) -> list[str]:
    """The sentences that a reader should take away, decided by the numbers."""
    arms, tuned = record["projected"], record["tuned"]
    found = []
    shares = sorted({arm["share"] for arm in arms.values()}, reverse=True)
    for share in shares:
        own = [arm for arm in arms.values() if arm["share"] == share]
        best = min(own, key=lambda arm: arm["loss"][0])
        text = (
            f"**{share} % of the FLOPs, no training:** the best is {_FAMILIES[best['family']]}, "
            f"{_LEVELS[best['level']]}: {_percent(best, record)} above the dense loss"
        )
        plain = arms[f"{share}-uniform-plain"]
        text += f"; plain projection with one rank is {_percent(plain, record)} above it."
        after = [arm for arm in tuned.values() if arm["share"] == share and arm["level"] != "fresh"]
        if after:
            top = min(after, key=lambda arm: arm["loss"][0])
            text += (
                f" After fine-tuning, the best is {_FAMILIES[top['family']]}, "
                f"{signed(top['over_dense'])} nats from the dense model as it was, and "
                f"{signed(top['over_tuned_dense'])} from the dense model trained as much further."
            )
        found.append(text)
    steps = [arm for arm in arms.values() if "over_previous" in arm]
    worse = [arm for arm in steps if judged(arm["over_previous"]) == "worse"]
    unclear = [arm for arm in steps if judged(arm["over_previous"]) == "no clear difference"]
    text = (
        "**Each level against the one before it:** better in "
        f"{len(steps) - len(worse) - len(unclear)} of {len(steps)} cases"
    )
    for word, cases in (("worse", worse), ("no clear difference", unclear)):
        if cases:
            text += f"; {word}: " + listed([_case(arm) for arm in cases])
    found.append(text + ".")
    pairs = [arm for arm in arms.values() if "over_uniform" in arm]
    better = [arm for arm in pairs if judged(arm["over_uniform"]) == "better"]
    worse = [arm for arm in pairs if judged(arm["over_uniform"]) == "worse"]
    text = (
        f"**Unequal ranks (`budget=`) against one rank,** at the same level: better in "
        f"{len(better)} of {len(pairs)} cases"
    )
    if worse:
        text += "; worse: " + listed([_case(arm, "over_uniform") for arm in worse])
        if all(arm["level"] == "plain" for arm in worse):
            text += (
                ". Without calibration, `budget=` only knows how much of its weight each layer "
                "loses: give it calibration batches"
            )
    found.append(text + ".")
    families = []
    for share in shares:
        btt, low = (arms[f"{share}-{family}-anchored"] for family in ("btt", "uniform"))
        families.append(
            f"{btt['over_dense'][0]:+.3f} against {low['over_dense'][0]:+.3f} nats at {share} %"
        )
    found.append(f"**btt against low rank,** both with one rank and anchored: {listed(families)}.")
    gains = [arm for arm in tuned.values() if "over_fresh" in arm and arm["level"] == "anchored"]
    if gains:
        low, high = sorted(-arm["over_fresh"][0] for arm in gains)[:: max(1, len(gains) - 1)][:2]
        held = sum(judged(arm["over_fresh"]) == "better" for arm in gains)
        found.append(
            f"**What projection is worth:** after the same {gains[0]['steps']:,} steps, anchored "
            f"models are {low:.2f} to {high:.2f} nats better than fresh ones of the same structure "
            f"({held} of {len(gains)} clearly)."
        )
    return found


def _case(arm: Mapping[str, Any], key: str = "over_previous") -> str:
    family = _FAMILIES[arm["family"]]
    return f"{family}, {_LEVELS[arm['level']]} at {arm['share']} % ({signed(arm[key])})"


def _percent(arm: Mapping[str, Any], record: Mapping[str, Any]) -> str:
    """How much higher the loss is than the dense one, with its interval."""
    base = record["dense"]["loss"][0]
    mean, low, high = (f"{100 * value / base:.1f}" for value in arm["over_dense"])
    return f"{mean} % ({low} to {high} %)"


def _projected(record: Mapping[str, Any], share: int) -> str:
    speeds = record.get("speed", {}).get("ratio", {})
    dense = record["dense"]
    rows = [["dense", "", "100 %", million(dense["params"]), with_interval(dense["loss"]), "", "",
             "1.00 x" if speeds else ""]]  # fmt: skip
    for name, arm in record["projected"].items():
        if arm["share"] != share:
            continue
        speed = speeds.get(f"{share}-{arm['family']}-anchored")
        rows.append(
            [
                f"{_FAMILIES[arm['family']]}: {arm['structure']}",
                _LEVELS[arm["level"]],
                f"{100 * arm['flops']:.1f} %",
                million(arm["params"]),
                with_interval(arm["loss"]),
                signed(arm["over_dense"]),
                signed(arm["over_previous"]) if "over_previous" in arm else "",
                f"{speed[0]:.2f} x ({speed[1]:.2f} to {speed[2]:.2f} x)"
                if speed and name.endswith("anchored")
                else "",
            ]
        )
    head = ["structure", "level", "FLOPs", "parameters", "loss", "above dense",
            "against the level before", "speed"]  # fmt: skip
    return f"### {share} % of the FLOPs\n\n" + table(head, rows)


def _tuned(record: Mapping[str, Any]) -> str:
    rows = []
    order = ["plain", "anchored", "fresh", ""]
    tuned = record["tuned"].values()
    for arm in sorted(
        tuned, key=lambda arm: (-arm["share"], arm["family"], order.index(arm["level"]))
    ):
        start = {"": "trained", "fresh": "fresh"}.get(arm["level"], arm["level"] + " projection")
        rows.append(
            [
                _FAMILIES.get(arm["family"], "dense"),
                f"{arm['share']} %",
                start,
                with_interval(arm["loss"]),
                signed(arm["over_dense"]),
                signed(arm["over_fresh"], 3) if "over_fresh" in arm else "",
            ]
        )
    head = ["structure", "FLOPs up to", "start", "loss", "above dense before", "against fresh"]
    return table(head, rows)


def _speed_note(record: Mapping[str, Any]) -> str:
    if "speed" not in record:
        return ""
    facts = record["speed"]
    median, low, high = facts["tokens_per_second"]["dense"]
    return (
        f"Speed: inference of {facts['batch']} windows on {facts['threads']} thread, all models in "
        f"turns, {facts['rounds']} rounds; the median ratio to the dense model of the same round "
        f"and, in brackets, the middle four fifths. The dense model reads {median:,} symbols per "
        f"second ({low:,} to {high:,}). The FLOPs of attention and the head are the same in all "
        "models."
    )


def draw(record: Mapping[str, Any], path: Path) -> None:
    """Write the figure: a panel for each budget, a line for each family."""
    from matplotlib.figure import Figure

    arms, tuned = record["projected"], record["tuned"]
    shares = sorted({arm["share"] for arm in arms.values()}, reverse=True)
    figure = Figure(figsize=(8.6, 4.1), layout="constrained", facecolor="white")
    panels = figure.subplots(1, len(shares), sharey=True, squeeze=False)[0]
    for share, axes in zip(shares, panels, strict=True):
        plain_axes(axes)
        for family, color in _COLORS.items():
            own = [arms[f"{share}-{family}-{level}"] for level in _LEVELS]
            points = [(k + _SHIFT[family], arm["over_dense"]) for k, arm in enumerate(own)]
            if last := tuned.get(f"{share}-{family}-anchored"):
                points.append((len(_LEVELS) + _SHIFT[family], last["over_dense"]))
            name = _FAMILIES[family].replace("`", "")
            x = [at for at, _ in points]
            axes.plot(x[: len(_LEVELS)], [v[0] for _, v in points[: len(_LEVELS)]], color=color,
                      linewidth=1.8, label=name)  # fmt: skip
            axes.plot(x[len(_LEVELS) - 1 :], [v[0] for _, v in points[len(_LEVELS) - 1 :]],
                      color=color, linewidth=1.2, linestyle=(0, (1, 1.5)))  # fmt: skip
            for at, (mean, low, high) in points:
                _point(axes, at, mean, low, high, color)
            if fresh := tuned.get(f"{share}-{family}-fresh"):
                _point(
                    axes, len(_LEVELS) + _SHIFT[family], *fresh["over_dense"], color, hollow=True
                )
        reference = tuned["dense"]["over_dense"][0]
        axes.plot([len(_LEVELS) - 0.35, len(_LEVELS) + 0.35], [reference] * 2, color=GRAY,
                  linestyle="--", linewidth=1.3)  # fmt: skip
        axes.axhline(0, color=INK, linewidth=1)
        axes.axvline(len(_LEVELS) - 0.5, color=GRAY, linewidth=0.8, linestyle=":")
        axes.set_xticks(range(len(_LEVELS) + 1), [*_LEVELS.values(), "fine-tuned"])
        axes.set_xlim(-0.4, len(_LEVELS) + 0.5)
        axes.set_yscale("symlog", linthresh=_LINEAR, linscale=0.9)
        axes.set_title(f"{share} % of the FLOPs", fontsize=10, color=INK, loc="left", weight="bold")
    _label_references(panels[0], record)
    panels[0].set_yticks(_TICKS, [f"+{tick:g}" if tick else "dense" for tick in _TICKS])
    panels[0].yaxis.set_minor_locator(_no_minor())
    panels[0].set_ylabel("loss above dense, nats per symbol", fontsize=9, color=INK)
    panels[-1].legend(loc=(0.03, 0.2), fontsize=8.5, frameon=False, labelcolor=INK)
    save_figure(figure, path, ON_DARK)


def _label_references(axes: Any, record: Mapping[str, Any]) -> None:
    """Name the hollow points and the dashed line."""
    tuned = record["tuned"]
    fresh = max(arm["over_dense"][0] for arm in tuned.values() if arm["level"] == "fresh")
    style = {"fontsize": 8, "color": GRAY, "ha": "center"}
    offset = {"textcoords": "offset points", "annotation_clip": False}
    at = len(_LEVELS)
    axes.annotate("from scratch", (at, fresh), (0, 9), **offset, **style)
    dense = tuned["dense"]["over_dense"][0]
    axes.annotate("dense, too", (at, dense), (0, -11), **offset, **style)


def _no_minor() -> Any:
    from matplotlib.ticker import NullLocator

    return NullLocator()


def _point(
    axes: Any, at: float, mean: float, low: float, high: float, color: str, *, hollow: bool = False
) -> None:
    axes.plot([at, at], [low, high], color=color, linewidth=1.4)
    face = "#ffffff" if hollow else color
    axes.plot(
        [at], [mean], "o", markersize=5.5, markeredgecolor=color, markerfacecolor=face, zorder=3
    )
