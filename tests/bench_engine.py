"""How fast the compiled engine is, relative to nn.Linear of the same width in the same run.

    python tests/bench_engine.py [widths] [threads] [names]

Outputs are allocated once: this times the engine, not the memory of the system. The limit is the
ratio of multiply-adds.
"""

import sys
from fractions import Fraction
from time import perf_counter

import torch

import einlinear as el
from einlinear.layers.engine import binding

HALF, QUARTER = Fraction(1, 2), Fraction(1, 4)
STRUCTURES = {
    "btt(rank=1)": el.btt(rank=1),
    "btt(rank=4)": el.btt(rank=4),
    "kronecker": el.kronecker(),
    "generic": el.Structure.from_theta((HALF, QUARTER, QUARTER, QUARTER, HALF, QUARTER, 0)),
    "low_rank": el.low_rank(),
    "btt(num_factors=3)": el.btt(num_factors=3),
}


def timed(function):
    start = perf_counter()
    function()
    return perf_counter() - start


def measure(name, width, tokens=2048, repeats=5):
    plan = el.make_plan(STRUCTURES[name], width, width)
    threads = torch.get_num_threads()
    x, grad_y = torch.randn(tokens, width), torch.randn(tokens, width)
    y, grad_x = torch.zeros(tokens, width), torch.zeros(tokens, width)
    factors = [torch.randn(plan.factor_shapes[s.factor]) for s in plan.steps]
    grads = [torch.zeros_like(f) for f in factors]
    at = [f.data_ptr() for f in factors]
    weight, grad_w = torch.randn(width, width), torch.zeros(width, width)
    rows = x.data_ptr(), width

    def dense_forward():
        torch.mm(x, weight.t(), out=y)

    def dense_backward():
        torch.mm(grad_y, weight, out=grad_x)
        torch.mm(grad_y.t(), x, out=grad_w)

    def forward():
        binding.call_forward(
            plan, "float32", tokens, *rows, at, 0, y.data_ptr(), width, threads=threads
        )

    def backward():
        binding.call_backward(
            plan, "float32", tokens, *rows, at, grad_y.data_ptr(), width, grad_x.data_ptr(), width,
            [g.data_ptr() for g in grads], 0, threads=threads,
        )  # fmt: skip

    parts = [dense_forward, dense_backward, forward, backward]
    times = [[timed(part) for part in parts] for _ in range(repeats + 1)][1:]
    best = [min(column) for column in zip(*times, strict=True)]
    return plan, best


def main():
    widths = [int(w) for w in sys.argv[1].split(",")] if len(sys.argv) > 1 else [1024, 4096]
    if len(sys.argv) > 2:
        torch.set_num_threads(int(sys.argv[2]))
    names = sys.argv[3].split(",") if len(sys.argv) > 3 else STRUCTURES
    print(binding.status(), torch.get_num_threads(), "threads")
    for width in widths:
        for name in names:
            plan, (dense_f, dense_b, f, b) = measure(name, width, repeats=3 if width > 2048 else 9)
            limit = plan.dense_macs / plan.macs
            rate = 2048 * plan.macs / 1e9
            print(
                f"{width:5} {name:20} limit {limit:5.1f}  forward {dense_f / f:5.1f}  "
                f"forward + backward {(dense_f + dense_b) / (f + b):5.1f}   "
                f"GMAC/s {rate / f:5.1f} {3 * rate / (f + b):5.1f} "
                f"dense {2048 * plan.dense_macs / 1e9 / dense_f:5.1f}"
            )


if __name__ == "__main__":
    main()
