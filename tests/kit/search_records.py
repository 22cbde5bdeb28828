"""The directory of a search, made of synthetic records: chains of runs, choices and an answer."""

import json
from dataclasses import asdict, replace

from einlinear.runs.record import Point, RunRecord
from einlinear.searches.answer import (
    Answer,
    Effect,
    LeaderboardRow,
    MadeChoice,
    add_choice,
    write_answer,
)
from kit.report_records import DENSE, Kind, make_record, write_record

LINF = 0.5
STEPS = (40, 80, 160)
SAMPLED = "XA^11/20 XB^1/12 XAB^11/30 YA^41/120 YB^71/120 YAB^1/15 AB^1/6"
CANDIDATES = (
    (Kind("monarch", 2.0, 1.2), "monarch", (0.0, 1.0, 0.5), "leader"),
    (DENSE, "dense", (0.0, 1.0, 1.0), "open"),
    (Kind(SAMPLED, 1.2, 1.5), "s1", (0.19, 1.0, 0.68), "stopped"),
    (Kind("low_rank", 0.4, 1.1), "low_rank", (0.0, 0.5, 0.5), "stopped"),
)
DIVERGES = Kind("kronecker", 0.5, 1.1)


def make_row(label="btt", **changes):
    """A row of a leaderboard."""
    row = LeaderboardRow(
        structure=label,
        num_experts=0,
        num_active=2,
        experts="linear",
        head_aligned=False,
        label=label,
        predicted_loss=2.5,
        loss_interval=(2.4, 2.6),
        multiplier=1.5,
        low=1.2,
        high=1.9,
        seen=1.6,
        seen_flops=2e12,
        seconds_multiplier=1.1,
        seconds_interval=(0.9, 1.4),
        speed=1.4,
        params=123_456,
        omega=0.0,
        psi=1.0,
        nu=0.5,
        wins=0.5,
        runs=6,
        flops=1e9,
        rate=None,
        rate_gain=None,
        rate_spread=None,
        state="open",
    )
    return replace(row, **changes)


def make_answer(rows, **changes):
    """An answer with these rows."""
    effects = (Effect("omega", 0.5, 0.8, 0.7, 0.9), Effect("nu", -0.5, 1.4, 1.1, 1.7))
    answer = Answer(
        tuple(rows), effects, 1e15, "flops", 1e14, 1e13, LINF, (0.4, 0.6), 3.0, ("kronecker",), ()
    )
    return replace(answer, **changes)


def usual_rows():
    """The rows of all candidates that did not diverge."""
    return [
        make_row(
            label,
            structure=kind.structure,
            multiplier=kind.multiplier,
            low=kind.multiplier if label == "dense" else 0.8 * kind.multiplier,
            high=kind.multiplier if label == "dense" else 1.2 * kind.multiplier,
            omega=exponents[0],
            psi=exponents[1],
            nu=exponents[2],
            state=state,
        )
        for kind, label, exponents, state in CANDIDATES
    ]


def write_search(directory, answer=None, with_choices=True):
    """Two sizes of every candidate at growing steps, one rate of a final check, one divergence.

    Records are returned in the order in which they were chosen.
    """
    records = [
        _record(kind, width, steps)
        for steps in STEPS
        for kind, *_ in CANDIDATES
        for width in (32, 64)
    ]
    records.insert(4, _diverged(_record(DIVERGES, 32, STEPS[0])))
    usual = records[0].config.lr
    records.append(_record(CANDIDATES[0][0], 32, STEPS[-1], lr=2 * usual))
    spent, done = 0.0, {}
    for number, record in enumerate(records):
        write_record(directory / "runs" / record.id, record)
        chain = (record.config.structure, record.config.width, record.config.lr)
        total = 6.0 * record.curve[-1].macs
        cost, done[chain] = total - done.get(chain, 0.0), total
        if with_choices:
            add_choice(MadeChoice(record.id, None, f"reason {number}", cost, spent), directory)
        spent += cost
    (directory / "search.json").write_text(json.dumps({}), encoding="utf-8")
    write_answer(answer or make_answer(usual_rows(), spent=spent), directory)
    return records


def _record(kind, width, steps, **settings):
    own = {"schedule": "constant", "warmup": 2, "checkpoint_every": steps // 10}
    return make_record(kind, width, 0, steps=steps, points=8, **own | settings)


def _diverged(record):
    last = {**asdict(record.curve[-1]), "loss": None, "train_loss": None}
    curve = (*record.curve[:-1], Point.from_dict(last))
    values = {**record.as_dict(), "status": "diverged"}
    return RunRecord.from_dict({**values, "curve": [asdict(point) for point in curve]})
