"""Times of the torch-free core, best of several: python tests/bench_structures.py."""

import subprocess
import sys
import time

import einlinear as el
from einlinear.structures import edges, plan, sizes
from einlinear.structures.edges import all_edges

CACHES = [
    plan._make_plan,
    sizes._side_options,
    sizes._rank_options,
    sizes._all_steps,
    sizes._divisors,
    edges.all_cuts,
]


def best_ms(action, repeats):
    times = []
    for _ in range(repeats):
        start = time.perf_counter()
        action()
        times.append(1e3 * (time.perf_counter() - start))
    return min(times)


def cold_plan(structure, d_in, d_out):
    for cache in CACHES:
        cache.cache_clear()
    return best_ms(lambda: el.make_plan(structure, d_in, d_out), 1)


def main():
    eighteen = el.Structure.from_edges({e: 1 / 7 if e[0] in "XY" else 1 / 20 for e in all_edges(3)})
    generic = el.parse("theta(1/2,1/4,1/4,1/4,1/2,1/4,1/8)")
    widths = [(768, 768), (1024, 1024), (4096, 16384), (4093, 4093), (1018, 4072), (5040, 5040)]
    print("cold plans, worst and best over", widths)
    for name, structure in (("btt", el.btt()), ("generic", generic), ("18 edges", eighteen)):
        times = [min(cold_plan(structure, *w) for _ in range(5)) for w in widths]
        print(f"  {name:10} {max(times):8.3f} ms {min(times):8.3f} ms")
    cached = best_ms(lambda: el.make_plan(generic, 768, 768), 100)
    print(f"  cached     {cached:8.4f} ms")
    commands = {
        "python -c pass": ["-c", "pass"],
        "import einlinear": ["-c", "import einlinear"],
        "einlinear describe": ["-m", "einlinear", "describe", "btt(rank=2)", "--width", "1024"],
    }
    for name, arguments in commands.items():
        command = [sys.executable, *arguments]
        run = best_ms(lambda c=command: subprocess.run(c, check=True, capture_output=True), 7)
        print(f"{name:20} {run:8.1f} ms")


if __name__ == "__main__":
    main()
