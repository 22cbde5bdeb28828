"""Many damaged files, odd arguments and strange command lines: how each is answered.

    python tests/fuzz.py --inputs 20000 [--seed S] [--minutes M] [--only TEXT]
    python tests/fuzz.py --repeat TARGET SEED     one input again, with its traceback

An input is a target and a seed, from which all else follows. Good answers are values and
EinlinearErrors; any other exception, a crash, or more than a few seconds is a finding. Inputs run
in processes that are forked from this one, so that a crash costs one input.
"""

import argparse
import io
import json
import mmap
import os
import random
import resource
import struct
import sys
import tempfile
import time
import traceback
import warnings
from collections import Counter
from contextlib import ExitStack, redirect_stderr, redirect_stdout
from decimal import Decimal
from fractions import Fraction
from inspect import signature
from itertools import count
from math import inf, nan
from pathlib import Path
from unittest.mock import patch

import numpy as np

import einlinear as el
from einlinear import EinlinearError
from einlinear.cli.main import main as command_line
from einlinear.data.prepare import prepare
from einlinear.landscapes.config import LandscapeConfig, make_study
from einlinear.runs.config import RunConfig
from einlinear.structures.edges import all_edges
from einlinear.sweeps.study import Study, as_study
from kit.damage import (
    DAMAGE,
    NUMBERS,
    READERS,
    SECONDS,
    VALUES,
    HangError,
    check,
    check_message,
    csv_table,
    damage_file,
    text_files,
    within,
)

_BATCH = 250  # inputs of a process
_MEMORY = 3 * 2**30  # bytes that an input may take beyond what is there


class ReachedError(BaseException):
    """All checks have passed, and the work would begin."""


def reached(*_, **__):
    """In the place of work that takes long."""
    raise ReachedError


def nested(depth, kind):
    """A value nested deeply."""
    value = 1
    for _ in range(depth):
        value = [value] if kind == "list" else (value,) if kind == "tuple" else {"a": value}
    return value


class Odd:
    """A value whose repr fails."""

    def __repr__(self):
        raise RuntimeError("no repr")


PLAIN = [
    *(None, True, False, 0, 1, -1, 2, 3, 7, 64, 10**9, 10**18, 2**63, 2**64, 10**400, -(10**400)),
    *(10**5000, -(10**5000), 0.5, 1.5, -0.0, 2.0**60, 1e308, 5e-324, inf, -inf, nan, 1j),
    *(Fraction(1, 3), Fraction(1, 2), Fraction(10**5000), Fraction(1, 10**5000)),
    *(Decimal("0.5"), Decimal("1e999999"), Decimal("NaN")),
    *("", " ", "x", "1/2", "0.33", "1/0", "9" * 5000, "\0", "\ud800", "x" * 100_000, b"x"),
    *("dense", "btt(rank=2)", "XA", "true", "text", "ascii", "auto", "a\nb", "/dev/null"),
    *([], [1], [1, 2], (), (0.9, 0.95), {}, {"a": 1}, set(), object(), Odd(), int, len),
    *(Path("a"), Path("a" * 300), Path("/proc/self/mem"), range(10**9), range(3)),
    *(np.int64(3), np.float32(0.5), np.float64("nan"), np.array([1, 2]), np.array(3)),
    *(np.array("x"), np.zeros((2, 2))),
]
# Functions, since some of them can be read once only.
VALUES_IN_CODE = [
    *(lambda value=value: value for value in PLAIN),
    lambda: count(),
    lambda: (pair for pair in [("XA", 1), ("YA", 1)]),
    lambda: nested(30_000, "list"),
    lambda: nested(30_000, "tuple"),
    lambda: nested(500, "dict"),
    lambda: [nested(20_000, "list"), 1],
]


def odd(rng):
    """Any value."""
    return rng.choice(VALUES_IN_CODE)()


def mostly(rng, good, share=0.7):
    """One of some good values, now and then any."""
    return rng.choice(good) if rng.random() < share else odd(rng)


TEXTS = [
    *("dense", "btt(rank=2)", "low_rank(rank_exponent=1/4)", "kronecker(num_factors=3)", "monarch"),
    *("theta(1/2,0,1/2,0,1/2,1/2,0)", "(0.5|0|0.5|0|0.5|0.5|0)", "(0.33|0|0.67|0|0.67|0.33|0)"),
    *(
        "XA^1/2 XAB^1/2 YB^1/2 YAB^1/2 AB:4",
        "XA^1 YB^1 AB:64",
        "tensor_train(rank=3,num_factors=4)",
    ),
]


def structure_text(rng):
    """A text that is nearly a structure."""
    data = rng.choice(TEXTS).encode()
    for _ in range(rng.choice([0, 1, 1, 2, 4])):
        data = rng.choice(DAMAGE)(data, rng)
    return data.decode("utf-8", "replace")


def any_structure(rng):
    """A structure, if the numbers happen to make one."""
    way = rng.randrange(6)
    if way == 0:
        return el.parse(structure_text(rng))
    if way == 1:
        numbers = [0, 0, Fraction(1, 2), Fraction(1, 3), 1, 0.5, "1/2", 4, 10**9]
        return el.Structure.from_theta([mostly(rng, numbers, 0.95) for _ in range(7)])
    if way == 2:
        return el.Structure.from_theta(odd(rng))
    if way == 3:
        named = [el.dense, el.low_rank, el.kronecker, el.tensor_train, el.monarch, el.btt]
        names = ["rank", "rank_exponent", "num_factors"]
        keys = rng.sample(names, rng.randrange(3))
        make = rng.choice(named)
        known = signature(make).parameters
        return make(**{key: mostly(rng, [1, 2, 3, "1/2"], 0.5) for key in keys if key in known})
    if way == 4:
        return el.Structure.from_edges(mostly(rng, [{}, {"XA": 1, "YA": 1}], 0.2))
    edges = all_edges(rng.randrange(1, 7))
    values = [mostly(rng, [2, 3, 10**9, "1/9"], 0.9) for _ in range(rng.choice([0, 1, 9, 60]))]
    chosen = {rng.choice(edges): value for value in values}
    chosen |= {f"X{rng.choice('ABCD')}": 1, f"Y{rng.choice('ABCD')}": 1}
    if rng.random() < 0.2:
        chosen[rng.choice(["XAB", "BA", "XY", "Q", "", 5, None, "X" * 10**6])] = 1
    return el.Structure.from_edges(chosen)


def structures(rng):
    """Structures and all that is made of them."""
    structure = any_structure(rng)
    assert el.parse(str(structure)) == structure
    structure.canonical()
    str(el.taxonomy(structure))
    if rng.random() < 0.9:
        widths = [1, 2, 13, 64, 768, 97, 1024, 4096, 50257]
        plan = el.make_plan(structure, mostly(rng, widths, 0.9), mostly(rng, widths, 0.9))
        repr(plan)
    else:
        el.make_plan(odd(rng), 3, 4)


def samples(rng):
    """Random structures, and grids."""
    ranges = [None, 0, 1, 0.5, (0.1, 0.5), "1/2", ("1/3", 1)]
    names = rng.sample(["omega", "psi", "nu"], rng.randrange(3))
    given = {name: mostly(rng, ranges) for name in names}
    if rng.random() < 0.5:
        given["num_factors"] = mostly(rng, [1, 2, 3], 0.9)
        el.sample_structures(mostly(rng, [0, 1, 3], 0.6), seed=mostly(rng, [0, 1]), **given)
    else:  # of three factors even small grids take long
        given["num_factors"] = mostly(rng, [1, 2], 0.9)
        el.grid_structures(mostly(rng, [1, 2, 4], 0.6), **given)


FIELDS = list(RunConfig.__dataclass_fields__)
SETTINGS = {
    "task": ["text", "pixels", "regression", "cifar"],
    "structure": TEXTS,
    "width": [16, 64, 96],
    "steps": [10, 100],
    "lr": [1e-3, 1],
    "betas": [(0.9, 0.95), [0.9, 0.99]],
    "data": ["texts", None, Path("a")],
    "seed": [0, 1],
    "num_experts": [0, 4],
    "head_size": [8, None],
}


def settings(rng, most=6):
    """Settings of a run, few of them odd."""
    names = rng.sample(FIELDS, rng.randrange(most))
    held = {name: mostly(rng, SETTINGS.get(name, [None]), 0.5) for name in names}
    if rng.random() < 0.1:
        held[rng.choice(["widht", "Task", "grid", "", "\ud800", "q" * 10**5])] = 1
    return held


def keyed(rng, held):
    """The same, perhaps with a key that is no text."""
    if rng.random() < 0.1:
        try:
            held[odd(rng)] = 1
        except (TypeError, RecursionError):
            pass
    return held


def configs(rng):
    """Settings of runs in code."""
    values = keyed(rng, settings(rng)) if rng.random() < 0.95 else odd(rng)
    config = RunConfig.from_dict(values)
    assert RunConfig.from_dict(json.loads(config.to_json())).id == config.id
    config.to_toml()


def studies(rng):
    """Studies in code."""
    if rng.random() < 0.1:
        as_study(mostly(rng, ["none.toml", {}], 0.3))
        return
    grid = {
        name: [mostly(rng, SETTINGS.get(name, [None])) for _ in range(rng.randrange(3))]
        if rng.random() < 0.7
        else odd(rng)
        for name in rng.sample([*FIELDS, "flops"], rng.randrange(4))
    }
    values = {"name": mostly(rng, ["a"], 0.9), "base": mostly(rng, [settings(rng, 4)], 0.9)}
    values["grid"] = mostly(rng, [keyed(rng, grid), [grid], [grid, {"seed": [5, 6]}]], 0.9)
    study = Study.from_dict(keyed(rng, values) if rng.random() < 0.95 else odd(rng))
    study.to_toml()


LANDSCAPE = {
    "structures": [("dense",), ("dense", "btt"), ["monarch"]],
    "widths": [(8,), (8, 16), [64]],
    "rates": [(-6, -5), (-12, -4)],
    "naive_rates": [None, (-6, -5)],
    "parametrizations": [("naive", "mup"), ("mup", "naive", "unit"), ("unit",)],
    "seeds": [1, 3],
    "steps": [10],
    "batch": [4],
    "pool": [1, 2],
    "activation": ["relu", "gelu"],
    "weight_norm": [True],
}


def landscapes(rng):
    """Settings of landscapes."""
    names = rng.sample(list(LANDSCAPE), rng.randrange(5))
    config = LandscapeConfig(**{name: mostly(rng, LANDSCAPE[name], 0.5) for name in names})
    if config.seeds < 100:
        make_study(config)


def observations(rng):
    """Observations out of arrays, and tables by odd paths."""
    if rng.random() < 0.2:
        el.read_observations(odd(rng))
        return
    size = rng.randrange(4)
    columns = {
        name: [mostly(rng, good, 0.9) for _ in range(size)] if rng.random() < 0.9 else odd(rng)
        for name, good in {
            "run": ["a", "b", 1],
            "compute": [1.0, 10, 100.0],
            "loss": [3.0, 2, None],
            **({"structure": ["dense", "btt"]} if rng.random() < 0.3 else {}),
            **({"seed": [0, 1]} if rng.random() < 0.3 else {}),
            **({"group": ["g", (1, 2)]} if rng.random() < 0.3 else {}),
            **({"size": [64, "s"]} if rng.random() < 0.3 else {}),
        }.items()
    }
    if rng.random() < 0.2:
        columns["more"] = mostly(rng, [{"width": [1] * size}, {"a": []}], 0.6)
    held = el.Observations(**columns)
    held.structures, len(held)


TASKS = {
    "text": {"context": [4], "rule": ["drop"], "vocabulary": ["ascii"], "validation_share": [0.1]},
    "pixels": {},
    "regression": {name: [2, 8] for name in ("in_features", "teacher_width", "teacher_depth")},
    "cifar": {"pool": [1, 2]},
}


def tasks(rng):
    """open_task."""
    name = rng.choice(list(TASKS))
    given = {key: mostly(rng, good, 0.6) for key, good in TASKS[name].items() if rng.random() < 0.7}
    if name == "regression":
        given = {"teacher_width": 8, "teacher_depth": 2} | given
    if rng.random() < 0.1:
        given[mostly(rng, ["contxt"], 1.0)] = 1
    data = mostly(rng, [None], 0.6)
    task = el.open_task(mostly(rng, [name], 0.9), data, **given)
    task.batch(0, 2, seed=0)


def preparing(rng):
    """prepare, up to where the work begins."""
    with tempfile.TemporaryDirectory() as folder:
        text = Path(folder) / "a.txt"
        text.write_text(text_files())
        known = ["validation", "vocabulary", "rule", "validation_share", "processes", "chunk_bytes"]
        names = rng.sample(known, 2)
        given = {name: odd(rng) for name in names if rng.random() < 0.7}
        with patch("einlinear.data.prepare._make", reached):
            prepare(mostly(rng, [text, [text], folder]), mostly(rng, [Path(folder) / "o"]), **given)


COMMANDS = {
    "describe": (["STRUCTURE"], "width out-width svg"),
    "atlas": ([], "width samples seed"),
    "bench": ([], "structures widths tokens dtype repeats blocks experts active compare"),
    "landscape": ([], "structures widths rates seeds steps batch pool activation data processes"),
    "prepare": (["FILE"], "validation vocabulary rule validation-share processes"),
    "train": ([], " ".join([*FIELDS, "config", "mirror"]).replace("_", "-")),
    "sample": (["DIR"], "prompt tokens temperature top-k seed"),
    "sweep": (["FILE"], "executor processes threads address slurm records dry-run"),
    "pack": (["SOURCE"], ""),
    "time": (["SOURCE"], "repeats threads"),
    "report": (["FILE"], "reference linf task level resamples seed times"),
    "reproduce": (["NAME"], "scale data validation settings processes threads slurm dry-run"),
    "nonsense": ([], "out"),
}
WORDS = "64 2 dense btt relu text cpu local a=b shared 0.5 True None".split()
GIVEN = {"describe": "btt", "prepare": "a.txt", "sweep": "a.toml", "report": "a.csv", "sample": "."}
GIVEN |= {"pack": "a.csv", "reproduce": "heads", "time": "."}
STUBBED = [
    "einlinear.training.train.train",
    "einlinear.cli.commands.sweep.plan_sweep",
    "einlinear.cli.commands.sweep.train_all",
    "einlinear.data.prepare._make",
    "einlinear.landscapes.landscape.sweep",
    "einlinear.structures.atlas.atlas_rows",
    "einlinear.bench.layers.bench_case",
    "einlinear.bench.experts.bench_experts",
    "einlinear.bench.blocks.bench_stack",
    "einlinear.bench.steps.measure_steps",
    "einlinear.training.load.make_model",
    "einlinear.training.mirrors.open_mirror",
]


def word(rng, folder):
    """An argument of a command line."""
    way = rng.random()
    if way < 0.4:
        return rng.choice(WORDS)
    if way < 0.6:
        return rng.choice(NUMBERS)
    if way < 0.75:
        return structure_text(rng)[:3000].replace("\0", "")
    if way < 0.9:
        return str(folder / rng.choice(["a.csv", "a.txt", "a.toml", "none", "", "x" * 300]))
    return rng.choice([*VALUES, "-", "--", "\udcff", "--width", "{", "%s", "[bold]"])[:3000]


def command_lines(rng):
    """Command lines, up to where the work begins."""
    with tempfile.TemporaryDirectory() as name, ExitStack() as stack:
        folder = Path(name)
        (folder / "a.csv").write_text(csv_table())
        (folder / "a.txt").write_text(text_files())
        (folder / "a.toml").write_text('[base]\ntask = "text"\n[grid]\nwidth = [32, 64]\n')
        command, (positional, names) = rng.choice(list(COMMANDS.items()))
        arguments = [command]
        for _ in positional:
            arguments.append(GIVEN[command] if rng.random() < 0.7 else word(rng, folder))
        if command == "report":
            arguments += ["--resamples", "0"]
        if rng.random() < 0.9:
            arguments += ["--width", "64"] if command == "describe" else ["--out", "out"]
        flags = names.split()
        for flag in rng.sample(flags, min(len(flags), rng.randrange(4))):
            values = [word(rng, folder) for _ in range(rng.choice([0, 1, 1, 1, 1, 2]))]
            arguments += [f"--{flag}", *values]
        for target in STUBBED:
            stack.enter_context(patch(target, reached))
        stack.enter_context(patch.dict(os.environ, {"COLUMNS": "80"}))
        stack.callback(os.chdir, os.getcwd())
        os.chdir(folder)
        said = stack.enter_context(redirect_stdout(io.StringIO()))
        wrong = stack.enter_context(redirect_stderr(io.StringIO()))
        try:
            command_line(arguments)
        except SystemExit:
            pass
        assert "Traceback" not in said.getvalue() + wrong.getvalue(), wrong.getvalue()


TARGETS = {
    target.__name__: target
    for target in (
        structures,
        samples,
        configs,
        studies,
        landscapes,
        observations,
        tasks,
        preparing,
        command_lines,
    )
}


def choose(seed, only=""):
    """The target of a seed: a reader of files, or a function, with some text in its name."""
    rng = random.Random(f"target {seed}")
    names = [reader.name for reader in READERS] + 3 * list(TARGETS)
    return rng.choice([name for name in names if only in name])


def run(name, seed, folder):
    """One input; raises what it must not raise."""
    rng = random.Random(f"{name} {seed}")
    reader = next((reader for reader in READERS if reader.name == name), None)
    try:
        if reader is not None:
            check(reader, damage_file(reader, rng)[0], folder)
            return "read"
        with within(SECONDS), warnings.catch_warnings():
            warnings.simplefilter("error")
            warnings.simplefilter("ignore", UserWarning)
            TARGETS[name](rng)
    except EinlinearError as error:
        check_message(error)
        return "refused"
    except ReachedError:
        return "accepted"
    return "accepted"


def work(inputs, place):
    """Run inputs one after the other; what was found, as JSON. `place` says which is under way."""
    now = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (now + _MEMORY, now + _MEMORY))
    counts, found = Counter(), []
    with tempfile.TemporaryDirectory() as folder:
        for index, (name, seed) in enumerate(inputs):
            place[:8] = struct.pack("<q", index)
            begin = time.monotonic()
            try:
                run(name, seed, Path(folder))
            except (Exception, HangError) as error:
                lines = traceback.format_exception(error)
                found.append([name, seed, f"{type(error).__name__}: {str(error)[:200]}", lines[-2]])
            counts[name] += 1
            spent = time.monotonic() - begin
            if spent > SECONDS / 2:
                found.append([name, seed, f"slow: {spent:.1f} s", ""])
    return json.dumps([counts, found])


def forked(inputs):
    """The counts and findings of some inputs, run in a process of its own; and how many ran."""
    place = mmap.mmap(-1, 8)
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        code = 1
        try:
            os.close(read)
            with os.fdopen(write, "w") as file:
                file.write(work(inputs, place))
            code = 0
        finally:
            os._exit(code)
    os.close(write)
    with os.fdopen(read) as file:
        text = file.read()
    _, status = os.waitpid(child, 0)
    if status == 0:
        counts, found = json.loads(text)
        return Counter(counts), found, len(inputs)
    index = struct.unpack("<q", place[:8])[0]
    names = Counter(name for name, _ in inputs[: index + 1])
    return names, [[*inputs[index], f"the process ended: status {status}", ""]], index + 1


def main():
    """Run the inputs, print a table of targets and all findings."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--inputs", type=int, default=20_000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--minutes", type=float, default=inf)
    parser.add_argument("--only", default="", metavar="TEXT")
    parser.add_argument("--repeat", nargs=2, metavar=("TARGET", "SEED"))
    given = parser.parse_args()
    if given.repeat:
        with tempfile.TemporaryDirectory() as folder:
            print(run(*given.repeat, Path(folder)))
        return
    for reader in READERS:
        reader.files()  # once, before processes are forked
    seeds = [f"{given.seed}:{number}" for number in range(given.inputs)]
    inputs = [(choose(seed, given.only), seed) for seed in seeds]
    counts, found, done = Counter(), [], 0
    begin = time.monotonic()
    while done < len(inputs) and time.monotonic() - begin < 60 * given.minutes:
        more, findings, ran = forked(inputs[done : done + _BATCH])
        counts, found, done = counts + more, found + findings, done + ran
        print(f"{done} of {len(inputs)}, {len(found)} findings", file=sys.stderr)
    bad = Counter(name for name, *_ in found)
    print(f"{'target':24}{'inputs':>8}{'findings':>10}")
    for name in [reader.name for reader in READERS] + list(TARGETS):
        print(f"{name:24}{counts[name]:8}{bad[name]:10}")
    print(f"{'all':24}{done:8}{len(found):10}   in {time.monotonic() - begin:.0f} s")
    for name, seed, text, where in found:
        print(f"\n{text}\n{where.rstrip()}\n  python tests/fuzz.py --repeat {name!r} {seed}")
    sys.exit(bool(found) or done < min(given.inputs, 1))


if __name__ == "__main__":
    main()
