"""Kill commands at random moments, again and again, and see that nothing is lost.

    python tests/soak.py --kills 300

Each round starts a command (train, sweep, prepare, landscape) and kills it, or one of its workers,
with SIGKILL at a random moment; the same command is then given again until it has finished. The
result must equal that of a command that nobody has disturbed: no number may differ (lost), nothing
that was finished may be done again (repeated), no file or process may be left over (leftovers).
"""

import argparse
import json
import os
import random
import re
import shutil
import signal
import sys
import tempfile
import time
from collections import Counter
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from einlinear.cli import main as cli
from einlinear.runs.directory import read_record
from kit.forked import context
from kit.runs import TINY, numbers, without_clock
from kit.sweeping import lives, sweeping, until, workers, write_study

RUN = TINY | {"steps": 400, "checkpoint_every": 9}
ONE_THREAD = ("--processes", "2", "--threads", "1")
MODEL = {"model.safetensors"}  # which runs of a landscape do not keep


@dataclass
class Tally:
    """What has happened to one command."""

    kills: int = 0
    moments: Counter = field(default_factory=Counter)
    finished: int = 0
    lost: list = field(default_factory=list)
    repeated: list = field(default_factory=list)
    leftovers: list = field(default_factory=list)


def children(pid):
    """The numbers of the processes that a process has started and that live."""
    found = []
    for path in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError):
            fields = path.read_text(encoding="utf-8").rpartition(") ")[2].split()
            if fields[1] == str(pid) and fields[0] not in "ZX":
                found.append(int(path.parent.name))
    return found


def _command(words, log):
    printed = os.open(log, os.O_CREAT | os.O_APPEND | os.O_WRONLY, 0o644)
    os.dup2(printed, 1)
    os.dup2(printed, 2)
    cli.main([str(word) for word in words])


def start(words, log):
    """A command in a process that has loaded torch already."""
    process = context.Process(target=_command, args=(words, str(log)))
    process.start()
    return process


def files(folder):
    """The names of all files below a folder."""
    return {str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()}


class Train:
    """One run of some seconds, killed in its steps, evaluations and checkpoints."""

    def __init__(self, folder):
        self.folder, self.config = folder, folder / "config.json"
        self.config.write_text(json.dumps(RUN))

    def start(self, out):
        return start(["train", "--config", self.config, "--out", out], out.with_suffix(".log"))

    def victims(self, process, out):
        return [process.pid]

    def moment(self, out):
        if not (out / "metrics.jsonl").exists():
            return "before training"
        return "after training" if (out / "record.json").exists() else "inside training"

    def stamps(self, out):
        return _stamps(out.glob("record.json"))

    def same(self, out, whole):
        return (
            without_clock(read_record(out)) == without_clock(read_record(whole))
            and numbers(out) == numbers(whole)
            and all(_bytes(out, name) == _bytes(whole, name) for name in files(whole) & MODEL)
        )


class Sweep:
    """Eight runs in two processes; the command or a worker is killed."""

    def __init__(self, folder):
        self.study = write_study(folder / "study.toml", range(4), steps=120, checkpoint_every=9)

    def start(self, out):
        held = sweeping(self.study, out, *ONE_THREAD)
        process = held.__enter__()
        process.held = held
        return process

    def victims(self, process, out):
        return [process.pid, *workers(out)]

    def moment(self, out):
        runs = [path for path in out.glob("runs/*") if (path / "metrics.jsonl").exists()]
        are_open = [path for path in runs if not (path / "record.json").exists()]
        return "inside training" if are_open else "before training"

    def stamps(self, out):
        return _stamps(out.glob("runs/*/record.json"))

    def same(self, out, whole):
        runs = sorted(path.name for path in (whole / "runs").iterdir())
        found = sorted(path.name for path in (out / "runs").iterdir())
        return runs == found and all(
            Train.same(self, out / "runs" / run, whole / "runs" / run) for run in runs
        )


class Prepare:
    """A text of some megabytes made into tokens by two processes."""

    def __init__(self, folder):
        self.text = folder / "text.txt"
        draw = random.Random(0)
        words = ["".join(chr(draw.randrange(97, 123)) for _ in range(7)) for _ in range(3000)]
        pages = (" ".join(draw.choices(words, k=4000)) for _ in range(700))
        self.text.write_text("\n\n\n".join(pages))

    def start(self, out):
        words = ["prepare", self.text, "--out", out, "--processes", 2]
        return start(words, out.with_suffix(".log"))

    def victims(self, process, out):
        return [process.pid, *children(process.pid)]

    def moment(self, out):
        return "inside the work" if out.exists() and any(out.rglob("*")) else "before the work"

    def stamps(self, out):
        return _stamps(out.glob("tokens.json"))

    def same(self, out, whole):
        return all(_bytes(out, name) == _bytes(whole, name) for name in files(whole))


class Landscape(Sweep):
    """Sixteen runs of a landscape in two processes."""

    def __init__(self, folder):
        pass

    def start(self, out):
        words = ["landscape", "--out", out, "--structures", "dense", "btt", "--widths", 16, 32]
        words += ["--rates", -8, -7, "--seeds", 1, "--steps", 60]
        return start(words, out.with_suffix(".log"))


TARGETS = {"train": Train, "sweep": Sweep, "prepare": Prepare, "landscape": Landscape}
# Files that tell of kills, which a command that nobody disturbs does not have.
TOLD = ("failures.jsonl", "log.txt")

# What Python itself says in a worker whose command was killed while it started the worker.
ORPHAN = re.compile(
    r"Traceback \(most recent call last\):\n  File \"<string>\", line 1, in <module>\n"
    r"(  .*\n)*(EOFError|_pickle\.UnpicklingError): .*\n"
)


def _stamps(paths):
    """What changes if a file is written again."""
    return {path: (path.stat().st_ino, path.stat().st_mtime_ns) for path in sorted(paths)}


def _bytes(folder, name):
    return (folder / name).read_bytes()


def _ended(process, out, seconds):
    process.join(seconds)
    held = getattr(process, "held", None)
    if held is not None:
        held.__exit__(None, None, None)


def soak(name, folder, kills, draw):
    """Kill one command so many times; gives what has happened."""
    target, tally = TARGETS[name](folder), Tally()
    whole = folder / "whole"
    begin = time.monotonic()
    process = target.start(whole)
    _ended(process, whole, 600)
    assert process.exitcode == 0, f"{name} fails undisturbed: see {folder}"
    seconds = time.monotonic() - begin
    unit = 0
    while tally.kills < kills:
        out = folder / f"unit-{unit:03d}"
        unit += 1
        done = {}
        while True:
            process = target.start(out)
            process.join(draw.uniform(0, 0.7 * seconds))
            if process.exitcode is None:
                _kill(target, process, out, tally, draw)
            _ended(process, out, 120)
            until(lambda out=out: not workers(out))
            _note_repeated(target, out, done, tally)
            if process.exitcode == 0:
                break
            if process.exitcode not in (1, 2, -signal.SIGKILL):
                tally.lost.append(f"{out}: exit code {process.exitcode}")
        tally.finished += 1
        _check(target, out, whole, tally)
        if not (tally.lost or tally.repeated or tally.leftovers):
            shutil.rmtree(out)
    return tally


def _kill(target, process, out, tally, draw):
    victims = target.victims(process, out)
    victim = draw.choice([victims[0], *victims[1:]]) if draw.random() < 0.5 else victims[0]
    below = children(process.pid)
    moment = target.moment(out)
    try:
        os.kill(victim, signal.SIGKILL)
    except ProcessLookupError:
        return
    tally.kills += 1
    tally.moments[moment] += 1
    if victim == process.pid:
        until(lambda: not any(map(lives, below)))  # no process outlives its command


def _note_repeated(target, out, done, tally):
    now = target.stamps(out)
    for key, stamp in done.items():
        if now.get(key) != stamp:
            tally.repeated.append(f"{out}: {key!r}")
    done.update(now)


def _check(target, out, whole, tally):
    if not target.same(out, whole):
        tally.lost.append(f"{out} differs from {whole}")
    extra = files(out) - files(whole)
    extra = [name for name in extra if Path(name).name not in TOLD]
    tally.leftovers += [f"{out}/{name}" for name in sorted(extra)]
    log = Path(f"{out}.printed") if Path(f"{out}.printed").exists() else out.with_suffix(".log")
    text = log.read_text(encoding="utf-8", errors="replace") if log.exists() else ""
    if "Traceback" in ORPHAN.sub("", text):
        tally.lost.append(f"a traceback in {log}")


def main():
    """Soak the commands that were named, and print a line for each."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--kills", type=int, default=300, help="how many in all")
    parser.add_argument("--only", choices=TARGETS, nargs="+", default=list(TARGETS))
    parser.add_argument("--seed", type=int, default=random.randrange(10**6))
    parser.add_argument("--out", type=Path, help="a new folder to keep, instead of a temporary one")
    options = parser.parse_args()
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    root = options.out or Path(tempfile.mkdtemp(prefix="soak-"))
    draw = random.Random(options.seed)
    print(f"seed {options.seed}, {root}", flush=True)
    is_bad = False
    for name in options.only:
        folder = root / name
        folder.mkdir(parents=True)
        tally = soak(name, folder, -(-options.kills // len(options.only)), draw)
        moments = ", ".join(f"{count} {moment}" for moment, count in tally.moments.items())
        print(
            f"{name}: {tally.kills} kills ({moments}), {tally.finished} finished, "
            f"{len(tally.lost)} lost, {len(tally.repeated)} repeated, "
            f"{len(tally.leftovers)} leftovers",
            flush=True,
        )
        for line in (*tally.lost, *tally.repeated, *tally.leftovers):
            print(f"  {line}")
            is_bad = True
    if not is_bad and options.out is None:
        shutil.rmtree(root)
    sys.exit(is_bad)


if __name__ == "__main__":
    main()
