"""The page and the figure about adapters, from their record."""

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
    TEAL,
    judged,
    listed,
    million,
    plain_axes,
    signed,
    table,
    with_interval,
)

from einlinear.show.plots import save_figure

_COLORS = (INK, PURPLE, ORANGE, TEAL, GRAY, BLUE)


def write_page(record: Mapping[str, Any], out: Path) -> None:
    """Write adapters.md and adapters.svg."""
    out.mkdir(parents=True, exist_ok=True)
    draw(record, out / "adapters.svg")
    (out / "adapters.md").write_text(page(record), encoding="utf-8")


def page(record: Mapping[str, Any]) -> str:
    start, arms = record["start"], record["arms"]
    settings = start["settings"]
    rates = list(next(iter(arms.values()))["choice"])
    parts = [
        "# Adapters against LoRA",
        f"A small GPT ({million(start['params'])} parameters) is fine-tuned on {record['source']} "
        f"for {settings['steps']:,} steps of {settings['batch']} windows. `el.adapt_` with "
        "three structures is compared with the LoRA of peft at nearly equal numbers of trained "
        "parameters, in the same layers: all linear layers but the head.",
        "![Held-out loss of each kind of adapter, and by learning rate](adapters.svg)",
        "Left: held-out loss, a dot for each seed, with the mean and its 90 % interval. Right: the "
        "choice of the learning rate, by other documents and another seed.",
        "## What it says",
        "\n".join(f"- {sentence}" for sentence in verdicts(record)),
        "## Numbers",
        f"Loss in nats per symbol; before fine-tuning it is {start['loss']['validation']:.3f}.",
        _numbers(record),
        "`tensor_train(rank=r)` with two factors is a sum of r Kronecker products. One Kronecker "
        "product alone has far fewer parameters than the other adapters.",
        "## How it was measured",
        f"Documents 2, 6, 10, ... are held out, and measured on up to {settings['windows']:,} "
        "windows. Documents 4, 8, ... serve to choose rates. The others are for training. All arms "
        "use AdamW, a warm-up, a linear decay, and for each seed the same batches. LoRA has "
        "`lora_alpha=r`, a scale of 1, as `el.adapt_` has none. "
        f"Rates {', '.join(rates)} were tried with one seed, which is not among the "
        f"{len(record['seeds'])} seeds of the comparison. Intervals are 90 %, by Student's t over "
        "seeds; differences from LoRA are taken seed by seed. They cover the random start of the "
        "adapters and the batches, not the choice of the text.",
        "## Reproduce it",
        "RUNS is the folder of the GPT from [the compressed GPT](compress-gpt.md), after its stage "
        "`train`. TEXT.txt has 96 symbols (newline and printable ASCII) and three newlines between "
        "documents.",
        "```sh\n"
        "cd examples/results\n"
        "python adapters.py run    TEXT.txt --gpt RUNS --out ADAPTERS "
        f"--steps {settings['steps']}\n"
        "python adapters.py record --out ADAPTERS --file ../../docs/results/adapters.json\n"
        "python adapters.py page   ../../docs/results/adapters.json --out ../../docs/results\n"
        "```",
        "The last command makes this page and its figure from [the record](adapters.json).",
    ]
    return "\n\n".join(parts) + "\n"


def verdicts(record: Mapping[str, Any]) -> list[str]:
    """The sentences that a reader should take away, decided by the numbers."""
    arms = record["arms"]
    (lora, _), *others, (full, facts) = arms.items()
    words = {name: judged(arm["over_lora"]) for name, arm in others}
    found = []
    for word, text in (
        ("better", "better than LoRA"),
        ("no clear difference", "not clearly different from LoRA"),
        ("worse", "worse than LoRA"),
    ):
        names = [
            f"`{name}` ({signed(arms[name]['over_lora'])})" for name in words if words[name] == word
        ]
        if names:
            found.append(f"**{text[0].upper()}{text[1:]}:** {listed(names)}.")
    start = record["start"]["loss"]["validation"]
    best = min(dict([(lora, arms[lora]), *others]).items(), key=lambda item: item[1]["loss"][0])
    gain = (start - best[1]["loss"][0]) / (start - facts["loss"][0])
    count = best[1]["params"] / facts["params"]
    found.append(
        f"The best adapter, {_code(best[0])}, has {100 * gain:.0f} % of the gain of {full}, "
        f"with {100 * count:.0f} % of its trained parameters."
    )
    rates = list(next(iter(arms.values()))["choice"])
    ends = [name for name, arm in arms.items() if f"{arm['rate']:g}" in (rates[0], rates[-1])]
    if ends:
        found.append(
            "The best rate is at the end of the grid for "
            f"{listed([_code(name) for name in ends])}, so a rate outside it may be better."
        )
    return found


def _code(name: str) -> str:
    return f"`{name}`" if "(" in name else name


def _numbers(record: Mapping[str, Any]) -> str:
    arms = record["arms"]
    lora = next(iter(arms))
    rows = [
        [
            _code(name),
            f"{arm['params']:,}",
            f"{arm['rate']:g}",
            with_interval(arm["loss"], 4),
            "" if name == lora else signed(arm["over_lora"]),
        ]
        for name, arm in arms.items()
    ]
    head = ["adapter", "trained parameters", "rate", "held-out loss", "against LoRA"]
    return table(head, rows)


def draw(record: Mapping[str, Any], path: Path) -> None:
    """Write the figure: losses over seeds, and the choice of rates."""
    from matplotlib.figure import Figure

    arms = record["arms"]
    colors = dict(zip(arms, _COLORS, strict=False))
    figure = Figure(figsize=(8.6, 3.3), layout="constrained", facecolor="white")
    left, right = figure.subplots(1, 2, width_ratios=(1.15, 1))
    plain_axes(left, grid="x")
    for y, (name, arm) in enumerate(arms.items()):
        mean, low, high = arm["loss"]
        left.plot([low, high], [y, y], color=colors[name], linewidth=2)
        left.plot([mean, mean], [y - 0.22, y + 0.22], color=colors[name], linewidth=2.4)
        left.plot(arm["losses"], [y] * len(arm["losses"]), "o", color=colors[name], markersize=4.5)
    left.set_yticks(range(len(arms)), list(arms))
    left.set_ylim(len(arms) - 0.5, -0.5)
    left.set_xlabel("held-out loss, nats per symbol", fontsize=9, color=INK)
    left.set_title("Three seeds", fontsize=10, color=INK, loc="left", weight="bold")
    plain_axes(right)
    for name, arm in arms.items():
        rates = [float(rate) for rate in arm["choice"]]
        right.plot(rates, list(arm["choice"].values()), "o-", color=colors[name], label=name,
                   linewidth=1.6, markersize=4)  # fmt: skip
    right.set_xscale("log")
    right.minorticks_off()
    right.set_xticks(rates, [f"{rate:g}" for rate in rates])
    right.set_xlabel("learning rate", fontsize=9, color=INK)
    right.set_title("Choice of the rate", fontsize=10, color=INK, loc="left", weight="bold")
    right.legend(fontsize=8, frameon=False, labelcolor=INK)
    save_figure(figure, path, ON_DARK)
