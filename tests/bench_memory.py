"""What el.keep_memory changes: seconds of steps and peak memory, before and after, in one process.

    python tests/bench_memory.py [--peak]

Both halves run the same steps, so the second half shows what the setting changes; it cannot be
undone, so they cannot take turns. --peak prints the peak memory and page faults of fresh processes,
without and with the setting.
"""

import resource
import subprocess
import sys

import torch
from torch import nn

import einlinear as el
from bench_account import seconds

ROUNDS = 7


def make():
    """By name: a step of training, and a single activation."""
    torch.manual_seed(0)
    steps = {}
    for name, width, tokens in (("btt", 256, 9000), ("dense", 256, 9000)):
        model = nn.Sequential(
            nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width), nn.LayerNorm(width)
        )
        if name != "dense":
            el.convert_(model, el.parse(name))
        optimizer = torch.optim.AdamW(model.parameters())
        x = torch.randn(tokens, width)

        def step(model=model, optimizer=optimizer, x=x):
            (model(x) - x).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()

        steps[f"a training step of two {name} layers, width {width}, {tokens} tokens"] = step
    h = torch.randn(2048, 4096, requires_grad=True)
    grad = torch.ones_like(h)
    gelu = nn.functional.gelu
    steps["GELU forward + backward, 2048 x 4096"] = lambda: torch.autograd.grad(gelu(h), h, grad)
    return steps


def peak_megabytes():
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def main():
    if sys.argv[1:2] == ["--one"]:
        if sys.argv[2] == "kept":
            el.keep_memory()
        steps = make()
        seconds(steps, ROUNDS)
        before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
        for step in steps.values():
            step()
        faults = resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before
        return print(f"{peak_megabytes():.0f} MB, {faults:,} page faults in a round")
    if sys.argv[1:] == ["--peak"]:
        for name in ("plain", "kept"):
            print(name, end=": ", flush=True)
            subprocess.run([sys.executable, __file__, "--one", name], check=True)
        return None
    steps = make()
    before, peak = seconds(steps, ROUNDS), peak_megabytes()
    el.keep_memory()
    after = seconds(steps, ROUNDS)
    for name in steps:
        ratio = before[name] / after[name]
        print(f"{ratio:.2f} x  {1e3 * before[name]:.1f} -> {1e3 * after[name]:.1f} ms  {name}")
    print(f"peak {peak:.0f} MB before, {peak_megabytes():.0f} MB in all")
    return None


if __name__ == "__main__":
    main()
