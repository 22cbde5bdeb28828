"""Is a structured layer ever slower than nn.Linear? Times both over widths, tokens and structures.

    python tests/bench_grid.py FOLDER [--widths 16 32 64] [--seconds 50]
    python tests/bench_grid.py FOLDER --check
    python tests/bench_grid.py FOLDER --fit

Every case is one structure, width and number of tokens, forward alone or forward + backward, with
bias and weight normalisation. nn.Linear and the layer, with each variant in turn, are timed in one
process, in turns. Results are appended to FOLDER/grid.jsonl; run it again to go on after
--seconds. --check prints how often the cost model's choice, and the best variant, take more than
1.05 times as long as nn.Linear: for the half of the cases that the model is fitted to, and for the
other half. --fit prints the tables of layers/cost.py, fitted to the first half.
"""

import argparse
import itertools
import json
from pathlib import Path
from time import perf_counter

import numpy as np
import torch
from torch import nn

import einlinear as el
from einlinear.layers import cost
from einlinear.layers.variants import choose_variant, situation

STRUCTURES = ("btt", "btt(rank=4)", "kronecker", "theta(1/2,1/4,1/4,1/4,1/2,1/4,0)", "low_rank")
WIDTHS = (16, 32, 64, 128, 256, 1024, 4096, 8192)
TOKENS = (1, 8, 64, 512, 2048, 8192)
VARIANTS = ("engine", "dense", "einsum", "strided")
MOST_MACS = 20e9  # of nn.Linear, forward: larger cases only take longer
BOUND = 1.05


def cases():
    """All cases; those of the smallest numbers of multiply-adds first."""
    found = [
        (structure, width, tokens, both)
        for structure, width, tokens in itertools.product(STRUCTURES, WIDTHS, TOKENS)
        for both in (False, True)
        if width**2 * tokens <= MOST_MACS
    ]
    return sorted(found, key=lambda case: case[1] ** 2 * case[2])


def is_held_out(structure, width, tokens):
    """Whether the cost model has not seen a case: a chessboard over the grid."""
    place = STRUCTURES.index(structure) + WIDTHS.index(width) + TOKENS.index(tokens)
    return place % 2 == 1


def action(module, x, both):
    """One call; with gradients of input and parameters if `both`."""
    if not both:
        return lambda: module(x)
    tensors, grad = [x, *module.parameters()], torch.ones_like(module(x))
    return lambda: torch.autograd.grad(module(x), tensors, grad)


def seconds(run, count):
    run()
    start = perf_counter()
    for _ in range(count):
        run()
    return (perf_counter() - start) / count


def measure(structure, width, tokens, both, rounds=9):
    """The best seconds by name, rounds taking turns: others on the machine only add time."""
    torch.manual_seed(0)
    layer = el.EinsumLinear(width, width, structure=structure)
    x = torch.randn(tokens, width, requires_grad=both)
    modules = {"nn.Linear": nn.Linear(width, width)}
    for variant in VARIANTS:
        modules[variant] = el.EinsumLinear(width, width, structure=structure)
        modules[variant].load_state_dict(layer.state_dict())
        modules[variant].choices = {situation(x, tokens, both): variant}
    times = {name: [] for name in modules}
    with torch.set_grad_enabled(both):
        runs = {name: action(module, x, both) for name, module in modules.items()}
        once = {name: min(seconds(run, 1) for _ in range(3)) for name, run in runs.items()}
        limit = 4 * min(once["nn.Linear"], once["engine"])
        runs = {n: r for n, r in runs.items() if n == "nn.Linear" or once[n] < max(limit, 4e-4)}
        counts = {name: max(1, min(100, int(2e-3 / once[name]))) for name in runs}
        rounds = max(3, min(rounds, int(2 / sum(once[n] * (counts[n] + 1) for n in runs))))
        for _ in range(rounds):
            for name, run in runs.items():
                times[name].append(seconds(run, counts[name]))
    return {name: min(values) for name, values in times.items() if values}


def check(rows):
    """Print how many cases are slower than nn.Linear, for both halves."""
    for is_out, both in itertools.product((False, True), repeat=2):
        half = [r for r in rows if is_held_out(*r["case"][:3]) == is_out and r["case"][3] == both]
        chosen, best = [], []
        for row in half:
            structure, width, tokens, _ = row["case"]
            plan = el.make_plan(el.parse(structure), width, width)
            picked = choose_variant(plan, tokens, "cpu", torch.float32, has_backward=both)
            times = {name: t for name, t in row["seconds"].items() if name != "nn.Linear"}
            linear = row["seconds"]["nn.Linear"]
            best.append((min(times.values()) / linear, row["case"], min(times, key=times.get)))
            chosen.append((times.get(picked, 9 * linear) / linear, row["case"], picked))
        what = ("held out" if is_out else "fitted to") + (", forward + backward" * both)
        for name, found in (("chosen", chosen), ("best", best)):
            slow = sorted((r for r in found if r[0] > BOUND), reverse=True)
            print(f"{what}: {len(slow)} of {len(found)} above {BOUND}, {name} variant")
            for ratio, case, variant in slow[:12]:
                print(f"    {ratio:.2f}  {variant:8} {case[0]}, width {case[1]}, {case[2]} tokens")


def table_of(variant, width, both):
    """The name of the table in layers/cost.py, and how many of its numbers a fit may change."""
    if variant != "dense":
        return "_BOTH" if both else "_FORWARD", 7
    if width**2 > cost.MOST_KEPT:
        return "_DENSE_BOTH" if both else "_DENSE_FORWARD", 5
    return ("_SMALL_BOTH", 5) if both else ("_SMALL_FORWARD", 3)  # a kept matrix costs nothing


def features(case, variant, table, count):
    """The model's time for each coefficient alone, at 1: it is linear in them."""
    structure, width, tokens, both = case
    plan, known, found = el.make_plan(el.parse(structure), width, width), getattr(cost, table), []
    length = len(known[variant] if isinstance(known, dict) else known)
    for i in range(count):
        ones = tuple(float(i == j) for j in range(length))
        setattr(cost, table, {variant: ones} if isinstance(known, dict) else ones)
        found.append(cost.nanoseconds(plan, tokens, variant, both, has_engine=True))
    setattr(cost, table, known)
    return found


def least_squares(matrix, targets):
    """The coefficients >= 0 with the least squared error: the best of all sets of positive ones.

    Of equally good sets the last: a cost per call and one per step share what all cases have.
    """
    best, least = np.zeros(matrix.shape[1]), float(targets @ targets)
    for chosen in itertools.product((False, True), repeat=matrix.shape[1]):
        found = np.linalg.lstsq(matrix[:, chosen], targets, rcond=None)[0]
        error = float(((matrix[:, chosen] @ found - targets) ** 2).sum())
        if (found >= 0).all() and error <= least * (1 + 1e-9) + 1e-18:
            best, least = np.zeros(matrix.shape[1]), min(error, least)
            best[list(chosen)] = found
    return best


def fit(rows):
    """By table and variant: coefficients with least squared relative errors, cases, usual error."""
    groups = {}
    for row in (r for r in rows if not is_held_out(*r["case"][:3])):
        for variant in set(row["seconds"]) - {"nn.Linear"}:
            table, count = table_of(variant, row["case"][1], row["case"][3])
            groups.setdefault((table, variant, count), []).append(row)
    fitted = {}
    for (table, variant, count), found in sorted(groups.items()):
        times = np.array([1e9 * row["seconds"][variant] for row in found])
        matrix = np.array([features(row["case"], variant, table, count) for row in found])
        numbers = least_squares(matrix / times[:, None], np.ones(len(times)))
        error = float(np.median(np.abs(matrix @ numbers / times - 1)))
        fitted[table, variant] = numbers, len(found), error
    return fitted


def print_fit(rows):
    for (table, variant), (numbers, count, error) in fit(rows).items():
        text = ", ".join(f"{number:.3g}" for number in numbers)
        print(f"{table:15} {variant:8} ({text})  # {count} cases, usually {error:.0%} off")


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folder", type=Path)
    parser.add_argument("--seconds", type=float, default=float("inf"))
    parser.add_argument("--widths", type=int, nargs="+", choices=WIDTHS, default=WIDTHS)
    parser.add_argument("--check", action="store_true")
    parser.add_argument("--fit", action="store_true")
    given = parser.parse_args()
    path = given.folder / "grid.jsonl"
    rows = [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
    if given.check or given.fit:
        return (check if given.check else print_fit)(rows)
    given.folder.mkdir(parents=True, exist_ok=True)
    done, start = {tuple(row["case"]) for row in rows}, perf_counter()
    wanted = [case for case in cases() if case[1] in given.widths]
    left = [case for case in wanted if case not in done]
    for case in left:
        if perf_counter() - start > given.seconds:
            break
        row = {"case": case, "seconds": measure(*case)}
        with path.open("a") as file:
            file.write(json.dumps(row) + "\n")
        done.add(case)
    print(f"{len(done & set(wanted))} of {len(wanted)} cases are done")


if __name__ == "__main__":
    main()
