"""Compress a small GPT that was trained on text: what each level of projection is worth.

The stages store their results in an output folder and resume when they are started again. The
texts hold 96 symbols, with three newlines between documents. With the default settings, all of
them together take about an hour on one core.

    python examples/results/compress_gpt.py train   TRAIN.txt VAL.txt --out RUNS
    python examples/results/compress_gpt.py project TRAIN.txt VAL.txt --out RUNS
    python examples/results/compress_gpt.py tune    TRAIN.txt VAL.txt --out RUNS
    python examples/results/compress_gpt.py speed   --out RUNS      (optional, on a quiet machine)
    python examples/results/compress_gpt.py record  --out RUNS --file RECORD.json --source WORDS
    python examples/results/compress_gpt.py page    RECORD.json --out docs/results
"""

import argparse
import copy
from collections.abc import Iterator
from pathlib import Path
from time import perf_counter
from typing import Any

import numpy as np
import torch
from compress_page import write_page
from small_gpt import (
    fit_,
    interval,
    load_gpt,
    make_gpt,
    open_text,
    read,
    store_losses,
    stored_losses,
    train_dense,
    window_losses,
    write,
)

import einlinear as el

SHARES = (50, 25)
"""Budgets in percent of the FLOPs of the dense layers, without the head."""

FAMILIES = ("uniform", "unequal", "btt")
"""Low rank with one rank for all layers; with a rank for each layer, by budget=; btt."""

LEVELS = ("plain", "inputs", "both", "anchored")
TUNED = (
    ("uniform", "plain"),
    ("uniform", "anchored"),
    ("uniform", "fresh"),
    ("unequal", "anchored"),
    ("btt", "anchored"),
    ("btt", "fresh"),
)
"""What is fine-tuned; fresh is the same structure, trained from scratch."""

_FACTORS = (1.0, 0.3, 0.1)  # of the rate of training, to choose the rate of fine-tuning from
_CALIBRATION_SEED, _RATE_SEED, _CHOICE_SEED, _TUNE_SEED = 101, 102, 103, 104


def project(out: Path, task: Any, batches: int) -> None:
    """Convert the trained model in every way and measure its loss, without training."""
    base = load_gpt(out)
    settings = read(out / "dense.json")["settings"]
    calibration = [task.batch(k, 32, seed=_CALIBRATION_SEED).inputs for k in range(batches)]
    for name, share, family, level in arms():
        if (out / "projected" / f"{name}.json").exists():
            continue
        model = copy.deepcopy(base)
        start = perf_counter()
        options: dict[str, Any] = {}
        if level != "plain":
            options["calibration"] = calibration
        if level == "inputs":
            options["weighting"] = "inputs"
        if level == "anchored":
            options["anchored"] = True
        if family == "unequal":
            conversion = el.convert_(model, budget=share / 100, **options)
        else:
            conversion = el.convert_(model, chosen(base, family, share), init="project", **options)
        seconds = perf_counter() - start
        losses = window_losses(model, task, settings["windows"])
        store_losses(out, name, losses)
        el.save(model, out / "models" / name)
        left = [layer.names[0] for layer in conversion.left if "head" not in layer.names]
        facts = {
            "structure": structure_text(conversion),
            "flops": flops_share(base, conversion),
            "params": sum(p.numel() for p in model.parameters()),
            "left_dense": left,
            "tokens": 0 if level == "plain" else sum(batch.numel() for batch in calibration),
            "seconds": round(seconds, 2),
        }
        write(out / "projected" / f"{name}.json", facts)
        print(f"{name:20}  loss {losses.mean():.4f}   {seconds:5.1f} s", flush=True)


def arms() -> Iterator[tuple[str, int, str, str]]:
    for share in SHARES:
        for family in FAMILIES:
            for level in LEVELS:
                yield f"{share}-{family}-{level}", share, family, level


def chosen(model: el.GPT, family: str, share: int) -> el.Structure:
    """The structure with the largest rank whose FLOPs are within the share."""
    make = el.btt if family == "btt" else el.low_rank
    rank = 1
    while True:
        plan = el.plan_conversion(model, make(rank=rank + 1))
        if 100 * plan.macs_after > share * plan.macs_before:
            return make(rank=rank)
        rank += 1


def structure_text(conversion: Any) -> str:
    """The structure of all layers, or the smallest and the largest rank."""
    names = {swap.shown for swap in conversion.swaps}
    if len(names) == 1:
        return names.pop()
    ranks = [swap.plan.rank for swap in conversion.swaps]
    return f"low_rank, ranks {min(ranks)} to {max(ranks)}"


def flops_share(model: el.GPT, conversion: Any) -> float:
    """The FLOPs of all linear layers but the head, as a share of those before."""
    dense = 12 * model.depth * model.width**2
    return (dense - conversion.macs_before + conversion.macs_after) / dense


def tune(out: Path, task: Any, steps: int) -> None:
    """Train the converted models further, and others like them from scratch."""
    settings = read(out / "dense.json")["settings"]
    rates = choose_rates(out, task, max(1, steps // 5))
    names = [f"{share}-{family}-{level}" for share in SHARES for family, level in TUNED]
    for name in ["dense", *names]:
        if (out / "tuned" / f"{name}.json").exists():
            continue
        model = starting_point(out, name)
        lr = rates["fresh" if name.endswith("fresh") else "projected"]
        seconds = fit_(
            model,
            task,
            el.param_groups(model, lr=lr, base_width=64),
            steps=steps,
            batch=settings["batch"],
            seed=_TUNE_SEED,
        )
        losses = window_losses(model, task, settings["windows"])
        store_losses(out, f"{name}-tuned", losses)
        facts = {"lr": lr, "steps": steps, "seconds": round(seconds, 1)}
        write(out / "tuned" / f"{name}.json", facts)
        print(f"{name:20}  loss {losses.mean():.4f}   {seconds:5.1f} s", flush=True)


def starting_point(out: Path, name: str) -> torch.nn.Module:
    """The stored model of this name; if it is to be fresh, the same structure, initialised."""
    settings = read(out / "dense.json")["settings"]
    if name == "dense":
        return load_gpt(out)
    if not name.endswith("fresh"):
        return el.load(out / "models" / name, lambda: make_gpt(settings))
    torch.manual_seed(_TUNE_SEED)
    model = make_gpt(settings)
    share, family, _ = name.split("-")
    el.convert_(model, chosen(model, family, int(share)))
    el.init_(model)
    return model


def choose_rates(out: Path, task: Any, steps: int) -> dict[str, float]:
    """The best rate for projected and for fresh models, by short runs on other training text."""
    path = out / "rates.json"
    if path.exists():
        return read(path)["best"]
    settings = read(out / "dense.json")["settings"]
    tried: dict[str, dict[str, float]] = {}
    for kind, name in (("projected", "25-uniform-anchored"), ("fresh", "25-uniform-fresh")):
        for factor in _FACTORS:
            model = starting_point(out, name)
            lr = factor * settings["lr"]
            groups = el.param_groups(model, lr=lr, base_width=64)
            fit_(model, task, groups, steps=steps, batch=settings["batch"], seed=_RATE_SEED)
            with torch.no_grad():
                rows = [task.batch(k, 32, seed=_CHOICE_SEED) for k in range(8)]
                losses = [task.loss(model(row.inputs), row).item() for row in rows]
            tried.setdefault(kind, {})[f"{lr:g}"] = round(float(np.mean(losses)), 4)
            print(f"{kind:10} rate {lr:g}   loss {np.mean(losses):.4f}", flush=True)
    best = {kind: float(min(losses, key=losses.__getitem__)) for kind, losses in tried.items()}
    write(path, {"best": best, "tried": tried, "steps": steps})
    return best


@torch.no_grad()
def speed(out: Path, rounds: int, batch: int) -> None:
    """Time inference of the dense model and the converted ones in turns."""
    settings = read(out / "dense.json")["settings"]
    names = [f"{share}-{family}-anchored" for share in SHARES for family in FAMILIES]
    models = {name: starting_point(out, name).eval() for name in ["dense", *names]}
    tokens = torch.randint(96, (batch, settings["context"]))
    seconds: dict[str, list[float]] = {name: [] for name in models}
    for turn in range(rounds + 2):  # the first two warm up
        for name, model in models.items():
            start = perf_counter()
            model(tokens)
            if turn >= 2:
                seconds[name].append(perf_counter() - start)
    ratios = {name: np.divide(seconds["dense"], seconds[name]) for name in models}
    facts = {
        "rounds": rounds,
        "batch": batch,
        "threads": torch.get_num_threads(),
        "torch": torch.__version__,
        "tokens_per_second": {
            name: [round(float(q)) for q in spread(tokens.numel() / np.array(times))]
            for name, times in seconds.items()
        },
        "ratio": {name: [round(float(q), 3) for q in spread(r)] for name, r in ratios.items()},
    }
    write(out / "speed.json", facts)
    for name, (median, low, high) in facts["ratio"].items():
        print(f"{name:20}  {median:.2f} x the speed ({low:.2f} to {high:.2f} x)")


def spread(values: np.ndarray) -> np.ndarray:
    """The median, and the middle four fifths."""
    return np.quantile(values, [0.5, 0.1, 0.9])


def record(out: Path, file: Path, source: str) -> None:
    """Gather all results, with intervals, in one small file."""
    dense = stored_losses(out, "dense")
    found: dict[str, Any] = {
        "source": source,
        "dense": {**read(out / "dense.json"), "loss": interval(dense)},
        "rates": read(out / "rates.json"),
        "projected": {},
        "tuned": {},
    }
    before = dense
    for name, share, family, level in arms():
        losses = stored_losses(out, name)
        facts = {"share": share, "family": family, "level": level}
        facts |= {**read(out / "projected" / f"{name}.json"), "loss": interval(losses)}
        facts["over_dense"] = interval(losses - dense)
        if level != "plain":
            facts["over_previous"] = interval(losses - before)
        if family == "unequal":
            facts["over_uniform"] = interval(
                losses - stored_losses(out, f"{share}-uniform-{level}")
            )
        before = losses
        found["projected"][name] = facts
    for path in sorted((out / "tuned").glob("*.json")):
        losses = stored_losses(out, f"{path.stem}-tuned")
        facts = {**read(path), "loss": interval(losses), "over_dense": interval(losses - dense)}
        share, family, level = ("", "", "") if path.stem == "dense" else path.stem.split("-")
        facts |= {"share": int(share or 100), "family": family, "level": level}
        facts["over_tuned_dense"] = interval(losses - stored_losses(out, "dense-tuned"))
        fresh = f"{share}-{family}-fresh"
        if level not in ("", "fresh") and (out / "tuned" / f"{fresh}.json").exists():
            facts["over_fresh"] = interval(losses - stored_losses(out, f"{fresh}-tuned"))
        found["tuned"][path.stem] = facts
    if (out / "speed.json").exists():
        found["speed"] = read(out / "speed.json")
    write(file, found)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    stages = parser.add_subparsers(dest="stage", required=True)
    commands = {name: stages.add_parser(name) for name in ("train", "project", "tune")}
    for command in commands.values():
        command.add_argument("text", type=Path)
        command.add_argument("validation", type=Path)
    for name in ("speed", "record", "page"):
        commands[name] = stages.add_parser(name)
    commands["page"].add_argument("record", type=Path)
    for command in commands.values():
        command.add_argument("--out", type=Path, required=True)
    train = commands["train"]
    train.add_argument("--width", type=int, default=192)
    train.add_argument("--depth", type=int, default=3)
    train.add_argument("--context", type=int, default=128)
    train.add_argument("--steps", type=int, default=6000)
    train.add_argument("--batch", type=int, default=8)
    train.add_argument("--lr", type=float, default=1e-2)
    train.add_argument("--seed", type=int, default=0)
    train.add_argument("--windows", type=int, default=1024)
    commands["project"].add_argument("--batches", type=int, default=16, help="of 32 windows")
    commands["tune"].add_argument("--steps", type=int, default=1200)
    commands["speed"].add_argument("--rounds", type=int, default=50)
    commands["speed"].add_argument("--batch", type=int, default=16)
    commands["record"].add_argument("--file", type=Path, required=True)
    commands["record"].add_argument("--source", default="a text", help="what the text is")
    args = parser.parse_args()

    torch.set_num_threads(1)
    args.out.mkdir(parents=True, exist_ok=True)
    if args.stage == "speed":
        speed(args.out, args.rounds, args.batch)
    elif args.stage == "record":
        record(args.out, args.file, args.source)
    elif args.stage == "page":
        write_page(read(args.record), args.out)
    elif args.stage == "train":
        names = ("width", "depth", "context", "steps", "batch", "lr", "seed", "windows")
        task = open_text(args.text, args.validation, args.context)
        train_dense(args.out, task, {name: getattr(args, name) for name in names})
    else:
        context = read(args.out / "dense.json")["settings"]["context"]
        task = open_text(args.text, args.validation, context)
        if args.stage == "project":
            project(args.out, task, args.batches)
        else:
            tune(args.out, task, args.steps)


if __name__ == "__main__":
    main()
