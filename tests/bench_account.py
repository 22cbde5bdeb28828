"""Where the time of a layer goes: a table of shares for each structure.

    python tests/bench_account.py [--widths 1024 4096] [--structures btt low_rank] [--rounds 15]

A layer with bias and weight normalisation is timed through autograd, forward + backward, in turns
with nn.Linear, with the engine alone (outputs allocated once), and with the engine without one of
its operations at a time: what the call then saves is the time of that operation. "Arithmetic" is
what the multiply-adds would take at the rate of nn.Linear, so 100 / arithmetic is how far the layer
is from the limit. Parts that take less time than their arithmetic have negative shares.
"""

import argparse
import ctypes
from statistics import median
from time import perf_counter

import torch

import einlinear as el
from einlinear.layers.engine import binding, flat
from einlinear.layers.engine.abi import (
    TOKENS_EXTENT,
    MultiplyField,
    OpField,
    OpKind,
    OpRole,
    ProgramHeader,
)
from einlinear.layers.engine.memory import keep_memory_if_possible

SECTIONS = "forward", "backward"
PARTS = "forward + backward", "recomputed", "multiplies", "packing", "copies and sums", "calls"


def without(program, section, left_out):
    """The numbers of a program whose section has only the other operations, as a C array."""
    place = ProgramHeader[section.upper()]
    operations = [op for i, op in enumerate(program.section(section)) if i not in left_out]
    numbers = [*program.numbers, len(operations), *(n for op in operations for n in op)]
    numbers[place] = len(program.numbers)
    return (ctypes.c_int64 * len(numbers))(*numbers)


def multiply_adds(op, tokens):
    """Those of an operation; 0 for a copy."""
    if op[OpField.KIND] == OpKind.COPY:
        return 0
    total = op[MultiplyField.N]
    for size in (op[MultiplyField.ROWS], op[MultiplyField.K], *(n for n, *_ in flat.loops_of(op))):
        total *= tokens if size == TOKENS_EXTENT else size
    return total


class Engine:
    """Calls of the engine for the parameters of a layer, with outputs allocated once."""

    def __init__(self, layer, x, grad_y):
        plan, factors = layer.plan, layer.factors()
        self.program = flat.compile_program(plan)
        outs = [torch.empty_like(t) for t in (grad_y, x, layer.bias, *factors)]
        addresses = [factor.data_ptr() for factor in factors]
        call = binding.make_arguments(plan, "float32", addresses)
        call.tokens, call.threads = len(x), torch.get_num_threads()
        call.x, call.y, call.grad_y, call.grad_x, call.grad_bias = (
            t.data_ptr() for t in (x, outs[0], grad_y, *outs[1:3])
        )
        call.x_row = call.grad_x_row = plan.d_in
        call.y_row = call.grad_y_row = plan.d_out
        call.bias = layer.bias.data_ptr()
        grads = [grad.data_ptr() for grad in outs[3:]]
        binding.set_array(call, "grad_factors", grads, len(grads))
        stds = [1.0] * len(factors)
        for name in ("stds", "scales"):
            binding.set_array(call, name, stds, len(stds))
        self.call, self.kept = call, (layer, x, grad_y, outs)

    def runs(self):
        """By (section, operations left out): a function that runs the pass."""
        made = {}
        for section in SECTIONS:
            count = len(self.program.section(section))
            for left_out in [(), tuple(range(count)), *((i,) for i in range(count))]:
                made[section, left_out] = self.run(section, left_out)
        return made

    def run(self, section, left_out):
        numbers = without(self.program, section, left_out)

        def run():
            self.call.program = ctypes.addressof(numbers)
            binding.run_engine(section, self.call)

        return run


def seconds(runs, rounds):
    """The median seconds by name, taking turns; two rounds before do not count."""
    times = {name: [] for name in runs}
    for number in range(rounds + 2):
        for name, run in runs.items():
            start = perf_counter()
            run()
            times[name] += [perf_counter() - start] * (number > 1)
    return {name: median(values) for name, values in times.items()}


def differentiated(module, x, grad_y):
    wanted = [x, *module.parameters()]
    return lambda: torch.autograd.grad(module(x), wanted, grad_y)


def account(structure, width, tokens, rounds):
    """Print the table of one structure."""
    torch.manual_seed(0)
    layer = el.EinsumLinear(width, width, structure=structure)
    x, grad_y = torch.randn(tokens, width, requires_grad=True), torch.randn(tokens, width)
    engine = Engine(layer, x, grad_y)
    runs = {
        "linear": differentiated(torch.nn.Linear(width, width), x, grad_y),
        "layer": differentiated(layer, x, grad_y),
        **engine.runs(),
    }
    times = seconds(runs, rounds)
    plan, whole = layer.plan, times["layer"]
    each = times["linear"] / (3 * plan.dense_macs * tokens)  # seconds of a multiply-add
    lines = []
    parts = dict.fromkeys(PARTS, 0.0)
    parts["forward + backward"] = 3 * plan.macs * tokens * each
    for section in SECTIONS:
        full = times[section, ()]
        operations = engine.program.section(section)
        parts["copies and sums"] += times[section, tuple(range(len(operations)))]
        for i, op in enumerate(operations):
            spent, macs = full - times[section, (i,)], multiply_adds(op, tokens)
            role = OpRole(op[OpField.ROLE])
            if section == "backward" and role == OpRole.FORWARD:
                parts["recomputed"] += macs * each
            kind = "packing" if role == OpRole.PACK else "multiplies"
            parts[kind] += spent - macs * each
            name = f"{section}: {role.name.lower().replace('_', ' ')}, step {op[OpField.STEP] + 1}"
            rate = f"{macs * each / spent:5.2f} of nn.Linear's rate" if macs and spent > 0 else ""
            lines.append(f"    {name:40} {100 * spent / whole:5.1f} %  {rate}")
    parts["calls"] = whole - sum(times[section, ()] for section in SECTIONS)
    left = whole - sum(parts.values())
    limit = plan.dense_macs / plan.macs
    print(
        f"{structure}, width {width}: {times['linear'] / whole:.1f} x nn.Linear of {limit:.0f}, "
        f"{1e3 * whole:.2f} ms"
    )
    for name, value in {**parts, "operations that slow each other": left}.items():
        print(f"  {name:42} {100 * value / whole:5.1f} %")
    print("\n".join(lines), flush=True)


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--widths", type=int, nargs="+", default=[1024])
    parser.add_argument(
        "--structures", nargs="+", default=["btt", "low_rank", "btt(num_factors=3)"]
    )
    parser.add_argument("--tokens", type=int, default=2048)
    parser.add_argument("--rounds", type=int, default=15)
    given = parser.parse_args()
    keep_memory_if_possible()
    print(binding.status(), torch.get_num_threads(), "threads")
    for width in given.widths:
        for structure in given.structures:
            account(structure, width, given.tokens, given.rounds)


if __name__ == "__main__":
    main()
