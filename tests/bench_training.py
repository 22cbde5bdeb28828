"""How fast models train: against the rate of matrix multiplies, and against what layers promise.

    python tests/bench_training.py [width] [steps] [structures]

A GPT of 3 layers, context 128, batch 32, on the embedded text, by the steps of `einlinear train`.
Everything is measured in turns:

- the rate of a float32 product of tokens x d and d x 4d, the largest of the model;
- steps of the dense and of structured models; a model's work is 3 x the multiply-adds of a forward
  pass, and its rate is that work by the median time of a step;
- the linear layers of the blocks alone, forward and backward, each counted as often as in a step.
  What a structured step should take: that of the dense model, less its layers, plus structured.
"""

import sys
from statistics import median
from time import perf_counter

import torch
from torch import nn

import einlinear as el
from einlinear.training.devices.distributed import Place
from einlinear.training.loop import RunLoop
from einlinear.training.plan import plan_run

BATCH, CONTEXT, DEPTH = 32, 128, 3


def make_run(structure, width, steps):
    config = el.RunConfig(
        task="text", structure=structure, width=width, depth=DEPTH, context=CONTEXT,
        batch_size=BATCH, head_size=min(64, width), steps=steps, eval_points=2, eval_size=BATCH,
    )  # fmt: skip
    torch.manual_seed(0)
    place = Place(0, 1, torch.device("cpu"))
    return RunLoop(config, place, plan_run(config, is_checked=False), None, ())


def layers_of(run):
    """One layer of each shape, with how often a step uses it, and rows for it."""
    found = {}
    for name, module in run.state.model.named_modules():
        if name.startswith("blocks.") and isinstance(module, nn.Linear | el.EinsumLinear):
            shape = (module.in_features, module.out_features)
            layer, count = found.get(shape, (module, 0))
            found[shape] = (layer, count + 1)
    rows = {shape: [torch.randn(BATCH * CONTEXT, d) for d in shape] for shape in found}
    return [(layer, count, *rows[shape]) for shape, (layer, count) in found.items()]


def seconds_of(function, *arguments):
    start = perf_counter()
    function(*arguments)
    return perf_counter() - start


def passes(layer, x, grad):
    layer(x.requires_grad_()).backward(grad)
    layer.zero_grad()
    x.grad = None


def main(width=256, steps=12, *structures):
    width, steps = int(width), int(steps)
    names = ["dense", *(structures or ("btt", "low_rank", "kronecker"))]
    runs = {name: make_run(name, width, steps) for name in names}
    layers = {name: layers_of(run) for name, run in runs.items()}
    x, w = torch.randn(BATCH * CONTEXT, width), torch.randn(width, 4 * width)
    out = torch.empty(BATCH * CONTEXT, 4 * width)
    rates, taken, inside = [], {name: [] for name in names}, {name: [] for name in names}
    for step in range(steps):
        for name, run in runs.items():
            spent = seconds_of(lambda: torch.mm(x, w, out=out))
            rates.append(x.numel() * w.shape[1] / spent)
            taken[name].append(seconds_of(run.state.step, step))
            parts = [(count, (layer, *rows)) for layer, count, *rows in layers[name]]
            for _, arguments in parts:
                passes(*arguments)
            inside[name].append(sum(count * seconds_of(passes, *given) for count, given in parts))
    best, usual = max(rates), median(rates)
    print(f"float32 multiplies: {best / 1e9:.1f} GMAC/s at best, {usual / 1e9:.1f} usually")
    for name, run in runs.items():
        time = median(taken[name][2:])
        rate = 3 * run.plan.counts.macs * run.plan.units_per_step / time
        rest = median(a - b for a, b in zip(taken["dense"][2:], inside["dense"][2:], strict=True))
        promised = rest + median(inside[name][2:])
        gain = median(taken["dense"][2:]) / time
        print(
            f"{name:10s} {time * 1e3:6.0f} ms a step, {rate / 1e9:5.1f} GMAC/s: {rate / usual:4.0%}"
            f" of the usual, {rate / best:4.0%} of the best; {gain:.2f}"
            f" x dense, its layers promise {promised * 1e3:.0f} ms; "
            f"batches {run.state.data_seconds / sum(taken[name]):.2%}"
        )


if __name__ == "__main__":
    main(*sys.argv[1:])
