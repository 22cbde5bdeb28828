"""Adapters of einlinear against peft's LoRA, at equal numbers of trained parameters.

The small GPT of compress_gpt.py (its stage `train`) is fine-tuned on another text, a file with
three newlines between documents: every fourth document is held out, every fourth serves to choose
learning rates, the others are for training. Results are stored one by one, so start it again to
resume. About 15 minutes on one core.

    python examples/results/adapters.py run    TEXT.txt --gpt RUNS --out ADAPTERS
    python examples/results/adapters.py record --out ADAPTERS --file RECORD.json --source WORDS
    python examples/results/adapters.py page   RECORD.json --out docs/results
"""

import argparse
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from adapters_page import write_page
from small_gpt import fit_, load_gpt, open_text, read, window_losses, write
from torch import nn

import einlinear as el

LAYERS = ("q_proj", "k_proj", "v_proj", "o_proj", "up", "down")
RATES = (1e-3, 3e-3, 1e-2, 3e-2)
SEEDS = (1, 2, 3)
_RATE_SEED = 0
_T90 = 2.919986  # the 0.95 quantile of Student's t with 2 degrees of freedom, for three seeds


def arms_for(model: el.GPT) -> dict[str, Callable[[nn.Module], nn.Module]]:
    """How each arm prepares a model: low rank and sums of Kronecker products as large as btt."""
    target = el.plan_conversion(model, el.btt()).params_after
    rank = nearest(model, lambda rank: el.low_rank(rank=rank), target)
    terms = nearest(model, lambda rank: el.tensor_train(rank=rank), target)

    def lora(model: nn.Module) -> nn.Module:
        from peft import LoraConfig, get_peft_model  # the page does not need it

        config = LoraConfig(r=rank, lora_alpha=rank, target_modules=list(LAYERS))
        return get_peft_model(model, config)

    def adapted(structure: el.Structure) -> Callable[[nn.Module], nn.Module]:
        def prepare(model: nn.Module) -> nn.Module:
            el.adapt_(model, structure)
            return model

        return prepare

    return {
        f"peft LoRA, r={rank}": lora,
        f"low_rank(rank={rank})": adapted(el.low_rank(rank=rank)),
        "btt()": adapted(el.btt()),
        f"tensor_train(rank={terms})": adapted(el.tensor_train(rank=terms)),
        "full fine-tuning": lambda model: model,
    }


def nearest(model: el.GPT, make: Callable[[int], el.Structure], target: int) -> int:
    """The rank whose number of parameters is nearest to the target."""

    def params(rank: int) -> int:
        return el.plan_conversion(model, make(rank)).params_after

    rank = 1
    while params(rank + 1) <= target:
        rank += 1
    return min((rank, rank + 1), key=lambda each: abs(params(each) - target))


def split(text: Path, out: Path) -> dict[str, Path]:
    """Write documents for training, for the choice of rates and for validation."""
    documents = [part for part in text.read_text(encoding="utf-8").split("\n\n\n") if part.strip()]
    held = {"validation": documents[1::4], "choice": documents[3::4]}
    held["train"] = [document for k, document in enumerate(documents) if k % 4 not in (1, 3)]
    paths = {}
    for name, part in held.items():
        paths[name] = out / f"{name}.txt"
        paths[name].write_text("\n\n\n".join(part), encoding="utf-8")
    return paths


def run(text: Path, gpt: Path, out: Path, settings: Mapping[str, int]) -> None:
    """Choose a rate for each arm on one seed, then train with three others."""
    base = load_gpt(gpt)
    paths = split(text, out)
    tasks = {
        name: open_text(paths["train"], paths[name], base.context)
        for name in ("choice", "validation")
    }
    if not (out / "start.json").exists():
        losses = {
            name: round(float(window_losses(base, task, settings["windows"]).mean()), 5)
            for name, task in tasks.items()
        }
        tokens = settings["steps"] * settings["batch"] * base.context
        params = sum(p.numel() for p in base.parameters())
        facts = {"loss": losses, "params": params, "tokens": tokens, "settings": dict(settings)}
        write(out / "start.json", facts)
    for number, (arm, prepare) in enumerate(arms_for(base).items()):

        def loss(
            seed: int, rate: float, name: str, arm: str = arm, number: int = number,
            prepare: Callable[[nn.Module], nn.Module] = prepare,
        ) -> float:  # fmt: skip
            path = out / "runs" / f"{number}-{name}-{seed}-{rate:g}.json"
            if not path.exists():
                torch.manual_seed(seed)
                model = prepare(load_gpt(gpt))
                trained = [p for p in model.parameters() if p.requires_grad]
                groups = [{"params": trained, "lr": rate}]
                seconds = fit_(
                    model,
                    tasks[name],
                    groups,
                    steps=settings["steps"],
                    batch=settings["batch"],
                    seed=seed,
                )
                losses = window_losses(model, tasks[name], settings["windows"])
                facts = {"arm": arm, "seed": seed, "rate": rate, "measured_on": name}
                facts["params"] = sum(p.numel() for p in trained)
                facts |= {"loss": round(float(losses.mean()), 5), "seconds": round(seconds, 1)}
                write(path, facts)
                print(f"{arm:24} {name:10} seed {seed} rate {rate:g}   loss {facts['loss']:.4f}")
            return read(path)["loss"]

        best = min(RATES, key=lambda rate: loss(_RATE_SEED, rate, "choice"))
        for seed in SEEDS:
            loss(seed, best, "validation")


def record(out: Path, file: Path, source: str) -> None:
    """Gather all results, with intervals over the seeds, in one small file."""
    runs = [read(path) for path in sorted((out / "runs").glob("*.json"))]
    arms: dict[str, Any] = {}
    for arm in dict.fromkeys(run["arm"] for run in runs):
        own = [run for run in runs if run["arm"] == arm]
        last = sorted(
            (run for run in own if run["measured_on"] == "validation"), key=lambda run: run["seed"]
        )
        arms[arm] = {
            "params": last[0]["params"],
            "rate": last[0]["rate"],
            "choice": {f"{run['rate']:g}": run["loss"] for run in own if run not in last},
            "losses": [run["loss"] for run in last],
            "loss": over_seeds([run["loss"] for run in last]),
            "seconds": [run["seconds"] for run in last],
        }
    lora = next(iter(arms.values()))["losses"]
    for facts in arms.values():  # seeds have the same batches in all arms
        facts["over_lora"] = over_seeds(np.subtract(facts["losses"], lora))
    facts = {"source": source, "start": read(out / "start.json"), "seeds": list(SEEDS)}
    write(file, {**facts, "arms": arms})


def over_seeds(values: Any) -> list[float]:
    """The mean over three seeds, and its 90 % interval by Student's t."""
    half = _T90 * np.std(values, ddof=1) / len(values) ** 0.5
    mean = np.mean(values)
    return [round(float(number), 5) for number in (mean, mean - half, mean + half)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    stages = parser.add_subparsers(dest="stage", required=True)
    commands = {name: stages.add_parser(name) for name in ("run", "record", "page")}
    commands["run"].add_argument("text", type=Path)
    commands["run"].add_argument("--gpt", type=Path, required=True, help="where the GPT is stored")
    commands["run"].add_argument("--steps", type=int, default=250)
    commands["run"].add_argument("--batch", type=int, default=8)
    commands["run"].add_argument("--windows", type=int, default=512)
    commands["record"].add_argument("--file", type=Path, required=True)
    commands["record"].add_argument("--source", default="a text", help="what the text is")
    commands["page"].add_argument("record", type=Path)
    for command in commands.values():
        command.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()

    torch.set_num_threads(1)
    args.out.mkdir(parents=True, exist_ok=True)
    if args.stage == "run":
        settings = {name: getattr(args, name) for name in ("steps", "batch", "windows")}
        run(args.text, args.gpt, args.out, settings)
    elif args.stage == "record":
        record(args.out, args.file, args.source)
    else:
        write_page(read(args.record), args.out)


if __name__ == "__main__":
    main()
