"""The compiled engine on random programs, under sanitizers: `make sanitize`, and test_sanitize.py.

The engine is built together with sanitize.c, a small program that needs neither Python nor torch:
once with AddressSanitizer and UndefinedBehaviorSanitizer, once with ThreadSanitizer. This file
draws the cases, builds and runs.
"""

import argparse
import random
import shutil
import subprocess
import sys
import tempfile
import time
from array import array
from fractions import Fraction
from itertools import accumulate
from pathlib import Path

import einlinear as el
from einlinear.layers.engine import abi, flat
from einlinear.layers.engine.abi import Activation, EngineDtype, ProgramHeader
from einlinear.layers.engine.cache import LARGE, SMALL
from einlinear.structures.edges import all_edges

HERE = Path(__file__).parent
FOLDER = Path(abi.__file__).parent
SOURCES = [HERE / "sanitize.c", *sorted(FOLDER.glob("*.c"))]
SANITIZERS = {
    "address": ["-fsanitize=address,undefined", "-fno-sanitize-recover=all"],
    "thread": ["-fsanitize=thread"],
}
FLAGS = [f"-I{FOLDER}", "-std=gnu11", "-O0", "-DUNROLL=", "-g", "-fno-omit-frame-pointer", "-Wall"]
# Packages gcc-aarch64-linux-gnu, libc6-dev-arm64-cross and qemu-user-static of Debian: NEON, which
# not every test machine has.
ARM, EMULATOR = ["aarch64-linux-gnu-gcc", "-static"], "qemu-aarch64-static"
OPTIONS = {
    "ASAN_OPTIONS": "abort_on_error=0:detect_stack_use_after_return=1:strict_init_order=1",
    "UBSAN_OPTIONS": "print_stacktrace=1",
    "TSAN_OPTIONS": "halt_on_error=1:exitcode=66",
}
TIMEOUT = 1800  # seconds of a run; on a fast machine it takes less than a tenth
# At a great and a small width these have steps whose numbers are gathered, which is rare otherwise.
GATHERED = [el.btt(rank=2), el.btt(rank=3), el.kronecker(), el.tensor_train(rank=3)]


def draw_structure(rng: random.Random) -> el.Structure:
    """1 to 4 factors; up to four edges at each side, up to three among factors."""
    edges = all_edges(rng.randint(1, 4))
    chosen: dict[str, object] = {}
    for side in "XY":
        at_side = [edge for edge in edges if side in edge]
        some = rng.sample(at_side, rng.randint(1, min(4, len(at_side))))
        weights = [rng.randint(1, 6) for _ in some]
        chosen |= {e: Fraction(w, sum(weights)) for e, w in zip(some, weights, strict=True)}
    ranks = [edge for edge in edges if edge[0] not in "XY"]
    for edge in rng.sample(ranks, rng.randint(0, min(3, len(ranks)))):
        chosen[edge] = rng.choice([Fraction(1, 4), Fraction(1, 8), 2, 3, 4])
    return el.Structure.from_edges(chosen)


def draw_plan(rng: random.Random) -> el.Plan:
    """Odd sizes and padding; small enough to be quick under a sanitizer."""
    if rng.random() < 0.2:
        widths = [rng.randint(1800, 2600), rng.randint(40, 70)]
        rng.shuffle(widths)
        return el.make_plan(rng.choice(GATHERED), *widths)
    while True:
        most = rng.choice([5, 40, 120, 120, 250])
        widths = [rng.randint(1, most), rng.randint(1, most)]
        if rng.random() < 0.1:
            widths[rng.randint(0, 1)] = rng.randint(300, 700)
        plan = el.make_plan(draw_structure(rng), *widths)
        if plan.macs < 60e3 and plan.inner_width < 4000:
            return plan


def program_of(rng: random.Random, plan: el.Plan, blocks: tuple[int, int] | None) -> list[int]:
    """A flat program for a small or a large cache."""
    return [*flat.compile_program(plan, blocks, rng.choice([SMALL, LARGE])).numbers]


def draw_case(rng: random.Random) -> list[int]:
    """The numbers of a case as sanitize.c reads them.

    Most programs take few tokens at a time and claim to be long, so that they are cut into blocks
    and shared out to threads although they are small.
    """
    plan = draw_plan(rng)
    most = int(min(70, max(4, 15e4 // plan.macs)))
    tokens = rng.randint(1, most) if rng.random() < 0.98 else 0
    if rng.random() < 0.8:
        numbers = program_of(rng, plan, (rng.randint(1, 12), rng.randint(1, 12)))
        numbers[ProgramHeader.MACS] = 10**9
    else:
        numbers = program_of(rng, plan, None)
    everything = 2 ** (2 + len(plan.steps)) - 1
    wanted = everything if rng.random() < 0.6 else rng.randint(0, everything)
    dtype = rng.choice(list(EngineDtype))
    gap = rng.choice([0, 0, 1, 3, 8])
    return [
        dtype,
        tokens,
        gap,
        rng.randint(0, 1),
        rng.randint(0, 1),
        wanted,
        len(numbers),
        *numbers,
    ]


def draw_pairs(rng: random.Random, most: int) -> tuple[int, list[list[int]]]:
    """How many tokens there are, and the tokens of each expert: `most` pairs or fewer."""
    kind = rng.choice(["spread", "spread", "one expert", "many each", "none"])
    num_experts = rng.randint(1, 9)
    if kind == "none":
        return rng.randint(0, 5), [[] for _ in range(num_experts)]
    most_each = 12 if kind == "many each" else 3
    pairs: list[tuple[int, int]] = []
    tokens = 0
    while len(pairs) < most - most_each:
        count = rng.randint(0, most_each)
        chosen = rng.choices(range(num_experts), k=count)
        pairs += [(num_experts // 2 if kind == "one expert" else e, tokens) for e in chosen]
        tokens += 1
        if rng.random() < 0.01:
            break
    pairs.sort()
    return tokens, [[t for e, t in pairs if e == expert] for expert in range(num_experts)]


def draw_expert_case(rng: random.Random) -> list[int]:
    """The numbers of a case of many experts as sanitize_experts.h reads them."""
    plan = draw_plan(rng)
    while plan.macs > 5e3 and rng.random() < 0.8:  # more pairs, to be cut among threads
        plan = draw_plan(rng)
    num_tokens, experts = draw_pairs(rng, int(min(90, max(16, 12e4 // plan.macs))))
    tokens = [token for own in experts for token in own]
    ends = list(accumulate(len(own) for own in experts))
    blocks = (rng.randint(1, 12), rng.randint(1, 12))
    numbers = program_of(rng, plan, blocks if rng.random() < 0.8 else None)
    numbers[ProgramHeader.MACS] = 10**9
    takes, adds = rng.random() < 0.7, rng.random() < 0.7
    everything = 2 ** (3 + len(plan.steps)) - 1
    wanted = everything if rng.random() < 0.5 else rng.randint(0, everything)
    wanted = wanted if rng.random() < 0.9 else wanted & 1
    if not (takes and adds):
        wanted &= ~2  # there is no gradient of the bias
    dtype, gap = rng.choice(list(EngineDtype)), rng.choice([0, 0, 1, 3, 8])
    norm, weighted, bias = (rng.randint(0, 1) for _ in range(3))
    head = [dtype, gap, norm, weighted, bias, wanted, int(takes), int(adds)]
    sizes = [len(ends), num_tokens, len(tokens), len(numbers)]
    return [*head, *sizes, *ends, *tokens, *numbers]


def draw_net_case(rng: random.Random) -> list[int]:
    """The numbers of a case of a feed-forward net as sanitize_feedforward.h reads them."""
    d_in, hidden, d_out = (rng.choice([rng.randint(1, 40), rng.randint(1, 120)]) for _ in "xhy")
    shapes = [(d_in, hidden)] * rng.randint(1, 2) + [(hidden, d_out)]
    plans = [draw_plan_of(rng, *shape) for shape in shapes]
    macs = sum(plan.macs for plan in plans)
    tokens = rng.randint(1, int(min(70, max(4, 15e4 // macs)))) if rng.random() < 0.95 else 0
    head = [rng.choice(list(EngineDtype)), tokens, rng.choice([0, 0, 1, 3, 8])]
    head += [rng.randint(0, 1), rng.randint(0, 1), rng.choice([7, 7, 7, rng.randint(0, 7)])]
    numbers = [*head, rng.choice(list(Activation)), len(plans)]
    blocks = (rng.randint(1, 12), rng.randint(1, 12)) if rng.random() < 0.8 else None
    for plan in plans:
        program = program_of(rng, plan, blocks)
        program[ProgramHeader.MACS] = 10**9
        numbers += [len(program), *program]
    return numbers


def draw_plan_of(rng: random.Random, d_in: int, d_out: int) -> el.Plan:
    """A small plan of the given widths."""
    while True:
        plan = el.make_plan(draw_structure(rng), d_in, d_out)
        if plan.macs < 60e3 and plan.inner_width < 4000:
            return plan


def write_cases(path: Path, count: int, expert_count: int, net_count: int, seed: int = 0) -> None:
    """A file of random cases, the same for the same seed."""
    numbers = array("q")
    draws = (draw_case, count), (draw_expert_case, expert_count), (draw_net_case, net_count)
    for draw, wanted in draws:
        rng = random.Random(seed)
        numbers.append(wanted)
        for _ in range(wanted):
            numbers.extend(draw(rng))
    path.write_bytes(numbers.tobytes())


def find_prefix(name: str, folder: Path) -> list[str] | str:
    """What to put before a program built with a sanitizer, or why there can be none.

    The runtimes want their places in the address space: on some kernels only without randomisation.
    """
    if not shutil.which("gcc"):
        return "there is no gcc"
    source, program = folder / f"probe_{name}.c", folder / f"probe_{name}"
    source.write_text("int main(void) { return 0; }\n")
    command = ["gcc", *SANITIZERS[name], str(source), "-o", str(program)]
    if subprocess.run(command, capture_output=True).returncode:
        return f"gcc has no runtime of the {name} sanitizer"
    prefixes: list[list[str]] = [[]]
    if shutil.which("setarch"):
        prefixes.append(["setarch", "-R"])
    for prefix in prefixes:
        if not subprocess.run([*prefix, str(program)], capture_output=True).returncode:
            return prefix
    return f"programs with the {name} sanitizer do not run here"


def find_emulator() -> list[str] | str:
    """What to put before a program for ARM, or why there can be none."""
    missing = [tool for tool in (ARM[0], EMULATOR) if not shutil.which(tool)]
    return f"there is no {' and no '.join(missing)}" if missing else [EMULATOR]


def build(name: str, folder: Path) -> Path:
    """The engine and sanitize.c as a program."""
    program = folder / f"engine_{name}"
    sources = [str(source) for source in SOURCES]
    start = ["gcc", *FLAGS, *SANITIZERS[name]] if name in SANITIZERS else [*ARM, *FLAGS, "-O2"]
    command = [*start, *sources, "-o", str(program), "-pthread", "-lm"]
    subprocess.run(command, check=True)
    return program


def run(
    name: str, program: Path, cases: Path, prefix: list[str], timeout: float, **options: str
) -> subprocess.CompletedProcess[str]:
    """The program on a file of cases. ThreadSanitizer cannot follow a fork of several threads."""
    command = [*prefix, str(program), str(cases), *(["--threads"] if name == "thread" else [])]
    environment = {**OPTIONS, **options}
    return subprocess.run(command, capture_output=True, text=True, timeout=timeout, env=environment)


def main() -> int:
    """Build, run and say how it went. The number of sanitizers that found something."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--cases", type=int, default=100)
    parser.add_argument("--expert-cases", type=int, default=45)
    parser.add_argument("--net-cases", type=int, default=45)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--arm", action="store_true", help="for ARM instead, under emulation")
    arguments = parser.parse_args()
    failures = 0
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        counts = arguments.cases, arguments.expert_cases, arguments.net_cases
        write_cases(folder / "cases", *counts, arguments.seed)
        for name in ["arm"] if arguments.arm else SANITIZERS:
            prefix = find_emulator() if arguments.arm else find_prefix(name, folder)
            if isinstance(prefix, str):
                print(f"{name}: left out, {prefix}")
                continue
            start = time.monotonic()
            program = build(name, folder)
            middle = time.monotonic()
            done = run(name, program, folder / "cases", prefix, timeout=TIMEOUT)
            failures += done.returncode != 0
            seconds = f"built in {middle - start:.0f} s, run in {time.monotonic() - middle:.0f} s"
            print(f"{name}: {done.stdout.strip() or 'FAILED'}; {seconds}\n{done.stderr}", end="")
    return failures


if __name__ == "__main__":
    sys.exit(main())
