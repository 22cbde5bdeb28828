"""Synthetic records with known laws, to test and look at reports.

    python tests/kit/report_records.py DIR     writes the directory of a sweep

A run of N multiply-adds a token that has seen D tokens has the loss

    LINF + 12 (m N)^-0.35 + 14 D^-0.35     times exp(noise of its seed)

where m is the multiplier of its structure. The best loss for N D = C is then a power law of m C
with exponent 0.175, so a structure needs 1 / m of the compute of one with m = 1, at every loss.
"""

import json
import os
import sys
from collections import defaultdict
from dataclasses import asdict, dataclass, field
from math import exp, log
from pathlib import Path

import numpy as np

from einlinear.reports.analyse import ReportSettings, analyse
from einlinear.reports.figures.figures import make_figures
from einlinear.reports.figures.panels import make_looks
from einlinear.reports.gather import gather
from einlinear.reports.page import make_page
from einlinear.reports.words import conclude
from einlinear.runs.config import RunConfig
from einlinear.runs.directory import RunDirectory
from einlinear.runs.record import Counts, LayerRouting, Point, RunRecord
from einlinear.runs.schedule import eval_steps

LINF, POWER, BY_SIZE, BY_DATA = 1.0, 0.35, 12.0, 14.0
WIDTHS = (32, 48, 64, 96, 128, 192, 256, 384)
UNITS = 2048  # of a step
ENVIRONMENT = {
    "einlinear": "0.1.0",
    "torch": "2.13.0",
    "threads": 1,
    "cores": 2,
    "processor": "x86_64",
    "python": "3.11.7",
    "engine": "avx512",
    "processes": 1,
    "device": "cpu",
    "data": "5f3a",
}


@dataclass(frozen=True)
class Kind:
    """A structure: its multiplier, the time of a multiply-add against dense, and its experts."""

    structure: str
    multiplier: float = 1.0
    slowness: float = 1.0
    share: float = 0.25  # of the multiply-adds of a dense layer at width 64
    growth: float = 1.5  # exponent of the multiply-adds
    settings: dict = field(default_factory=dict)


DENSE = Kind("dense", share=1.0, growth=2.0)
KINDS = (
    DENSE,
    Kind("btt(rank=2)", 1.6, 1.25),
    Kind("monarch", 1.0, 1.3),
    Kind("low_rank", 0.25, 1.1),
    Kind("monarch", 2.4, 2.0, settings={"num_experts": 8, "balance": 0.01}),
)


def best_units(kind, macs):
    """The number of tokens at which a size is the best for its compute."""
    return (BY_DATA / BY_SIZE) ** (1 / POWER) * kind.multiplier * macs


def make_record(kind, width, seed, *, noise=0.002, overtime=12.0, steps=None, points=20, **more):
    """One run; its length is `overtime` times that at which its size is the best, or `steps`."""
    macs = int(kind.share * 98304 * (width / 64) ** kind.growth) + 400 * width
    if steps is None:
        steps = max(40, round(overtime * best_units(kind, macs) / UNITS))
    settings = {"task": "text", "structure": kind.structure, "width": width, "depth": 2}
    config = RunConfig(**settings | {"steps": steps, "seed": seed} | kind.settings | more)
    random = np.random.default_rng([width, seed, len(kind.structure), int(100 * kind.multiplier)])
    off = exp(noise * random.normal())
    is_fixed = config.eval_spacing == "fixed"
    at = eval_steps(steps, config.eval_points, "fixed") if is_fixed else _steps(steps, points)
    curve = [_point(kind, config, macs, step, off) for step in at]
    counts = Counts(5 * macs, macs, macs - 300 * width, 100 * width, 150 * width, 50 * width)
    return RunRecord(
        config=config,
        status="finished",
        steps_done=steps,
        curve=tuple(curve),
        unit="token",
        counts=counts,
        peak_bytes=40 * macs,
        environment=dict(ENVIRONMENT),
    )


def _steps(steps, points):
    return [0, *sorted({round(x) for x in np.geomspace(max(1, steps / 300), steps, points)})]


def _point(kind, config, macs, step, off):
    units = step * UNITS
    data = BY_DATA * max(units, UNITS / 2) ** -POWER
    loss = (LINF + BY_SIZE * (kind.multiplier * macs) ** -POWER + data) * off
    seconds = units * macs * kind.slowness / 4e10
    routing = ()
    if config.num_experts:
        routing = tuple(_routing(config, layer, step) for layer in range(config.depth * 2))
    return Point(step, units, units * macs, seconds, seconds / 50, loss, loss, config.lr, routing)


def _routing(config, layer, step):
    experts = config.num_experts
    tilt = 1.2 * exp(-step / (0.2 * config.steps)) + 0.1 * layer
    share = np.exp(-tilt * np.arange(experts) / experts)
    load = np.roll(share / share.sum(), layer)
    entropy = float(-(load * np.log(load)).sum() / log(experts))
    name = f"blocks.{layer // 2}.{'mlp.up' if layer % 2 else 'attention.query'}"
    return LayerRouting(name, tuple(load.tolist()), entropy, 0.1 if step else None)


def write_record(folder, record):
    """A run as el.train leaves it, without its weights."""
    directory = RunDirectory(folder)
    directory.keep_config(record.config)
    directory.write_record(record)


def write_runs(directory, kinds=KINDS, widths=(32, 64, 128, 256, 512), seeds=2, **settings):
    """Finished runs of all kinds, widths and seeds in a sweep's directory."""
    records = [
        make_record(kind, width, seed, **settings)
        for kind in kinds
        for width in widths
        for seed in range(seeds)
    ]
    for record in records:
        write_record(directory / "runs" / record.id, record)
    return records


def write_diverged(directory, kind=KINDS[1], width=256):
    """A run whose loss was not finite from the middle on."""
    record = make_record(kind, width, 7, lr=0.5)
    half = len(record.curve) // 2
    last = {**asdict(record.curve[half]), "loss": None, "train_loss": None}
    curve = (*record.curve[:half], Point.from_dict(last))
    values = {**record.as_dict(), "status": "diverged", "steps_done": last["step"]}
    bad = RunRecord.from_dict({**values, "curve": [asdict(point) for point in curve]})
    write_record(directory / "runs" / bad.id, bad)
    return bad


def write_unfinished(directory, kind=DENSE, width=768, share=0.6):
    """A run with a config and the points of the first part of its steps; its folder."""
    record = make_record(kind, width, 0)
    folder = directory / "runs" / record.id
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(record.config.to_json(), encoding="utf-8")
    points = [p for p in record.curve if p.step <= share * record.config.steps]
    lines = [json.dumps({"kind": "point", **asdict(point)}) for point in points]
    train = {"kind": "train", "step": 1, "train_loss": 4.0, "rate": 0.1, "seconds": 1.0}
    text = "\n".join([*lines[:1], json.dumps(train), *lines[1:]]) + '\n{"kind": "poi'
    (folder / "metrics.jsonl").write_text(text, encoding="utf-8")
    return folder


def write_claim(folder, seconds_left=1234.0, age=0.0):
    """A process works on the run, or did so some seconds ago."""
    claim = {"host": "here", "pid": 1, "started": 0.0, "token": "a"}
    claim |= {"done": 10, "total": 20, "loss": 2.0, "seconds_left": seconds_left}
    path = folder / "claim-000001"
    path.write_text(json.dumps(claim), encoding="utf-8")
    written = path.stat().st_mtime - age
    os.utime(path, (written, written))


def write_failure(folder, error="RuntimeError: out of memory", log=None):
    """The last attempt at the run failed."""
    line = {"attempt": 1, "time": 0.0, "error": error, "kind": "error"}
    (folder / "failures.jsonl").write_text(json.dumps(line) + "\n", encoding="utf-8")
    log = f"Traceback (most recent call last):\n  ...\n{error}\n" if log is None else log
    (folder / "log.txt").write_text(log, encoding="utf-8")


HOSTILE = (
    "<script>alert(1)</script>",
    "\"><img src=x onerror='alert(2)'>",
    "</script><script>alert(3)</script>",
    "<!-- \u2028 ]]> `x` %DATA% $x$ \\",
    "' onmouseover='alert(4)",
)


def hostile_table(path):
    lines = [
        {"run": f"{name}{k}", "compute": 10.0**k, "loss": 3 + 2.0**-k, "structure": name}
        for name in (*HOSTILE, "dense")
        for k in range(1, 6)
    ]
    path.write_text("\n".join(map(json.dumps, lines)), encoding="utf-8")
    return path


def hostile_sweep(path):
    """Hostile texts in every place that a run can bring."""
    text = "".join(HOSTILE)
    record = make_record(DENSE, 64, 0, data=text)
    record = RunRecord.from_dict(
        record.as_dict() | {"environment": {text: text}, "unit": HOSTILE[1]}
    )
    write_record(path / "runs" / "a", record)
    write_failure(write_unfinished(path), text, "\n".join(HOSTILE))
    (path / "studies").mkdir()
    study = f"name = {json.dumps(text)}\n[base]\n"
    (path / "studies" / "0123456789ab.toml").write_text(study, encoding="utf-8")
    bad = path / "runs" / "<img src=x onerror=alert(5)>"
    bad.mkdir()
    (bad / "record.json").write_text(text, encoding="utf-8")
    return path


def write_bent(path):
    """Dense layers follow a law to 2.164; the losses of others stop at 2.6, as no law does."""
    place = np.linspace(0, 1, 12)
    losses = {
        "dense": 2.1640337 + 0.5 * (np.exp(-3 * place) - np.exp(-3)),
        "low_rank": 2.6 + 1.5 * np.exp(-6 * place),
    }
    rows = [
        f"{name}{k},{10 ** (12 + 2 * x)},{loss[k]},{name}"
        for name, loss in losses.items()
        for k, x in enumerate(place)
    ]
    path.write_text("\n".join(["run,compute,loss,structure", *rows]), encoding="utf-8")
    return path


def page_of(path, **settings):
    """The page of a directory, without its static figures."""
    found = analyse(gather(path), ReportSettings(resamples=50, **settings))
    parts = (make_figures(found), make_looks(found))
    return make_page(found, conclude(found), *parts, defaultdict(str))


STUDY = """name = "structures at equal compute"

[base]
task = "text"
depth = 2

[[grid]]
structure = ["dense", "btt(rank=2)", "monarch", "low_rank"]
width = [32, 64, 128, 256, 512]
seed = [0, 1]
"""


def write_sweep(directory, **settings):
    """A whole sweep: finished runs, one that diverged, one that failed, one under way."""
    records = write_runs(directory, **settings)
    (directory / "studies").mkdir()
    (directory / "studies" / "0123456789ab.toml").write_text(STUDY, encoding="utf-8")
    write_diverged(directory)
    write_failure(write_unfinished(directory, KINDS[2], 1024, 0.1))
    write_claim(write_unfinished(directory))
    return records


if __name__ == "__main__":
    write_sweep(Path(sys.argv[1]), widths=WIDTHS)
