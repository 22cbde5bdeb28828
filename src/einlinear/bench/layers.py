"""The layer benchmark: speed and memory of structured layers relative to nn.Linear."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import product
from typing import NamedTuple

import torch
from torch import Tensor, nn

from einlinear.bench.peers import failure_line, make_peers
from einlinear.bench.rows import (
    LINEAR,
    LINEAR_BIAS,
    MODES,
    BenchResult,
    BenchRow,
    check_fits,
    timing_fields,
)
from einlinear.errors import EinlinearError
from einlinear.layers.linear import EinsumLinear
from einlinear.layers.measure import interleaved, peak_memory
from einlinear.layers.variants import VARIANTS, choose_variant, multiply
from einlinear.structures.plan import make_plan
from einlinear.structures.text import parse_structure
from einlinear.structures.values import whole_number


class LayerCase(NamedTuple):
    """One square layer to measure."""

    structure: str
    width: int
    tokens: int


@dataclass(frozen=True, slots=True)
class TimedCall:
    """Something to time: what it computes, and the tensors whose gradients it takes."""

    kind: str
    baseline: str
    forward: Callable[[], Tensor]
    tensors: tuple[Tensor, ...]

    def action(self, mode: str) -> Callable[[], object]:
        """The call to time for one of MODES."""
        if mode == "forward":
            return torch.no_grad()(self.forward)

        grads: list[Tensor] = []  # made once: in a model, the next layers make it

        def both() -> object:
            y = self.forward()
            grads.extend([] if grads else [torch.ones_like(y)])
            return torch.autograd.grad(y, self.tensors, grads)

        return both


def bench_cases(
    structures: Sequence[str], widths: Sequence[int], tokens: Sequence[int]
) -> list[LayerCase]:
    """Every structure at every width and number of tokens, each once; all are checked first."""
    for values, name, example in (
        (structures, "structures", "btt low_rank"),
        (widths, "widths", "512 1024"),
        (tokens, "tokens", "2048"),
    ):
        if not values:
            raise EinlinearError(
                what=f"--{name} has no values",
                rule=f"the benchmark runs over one or more {name}",
                fix=f"--{name} {example}, or leave --{name} out",
            )
    cases = [LayerCase(*values) for values in product(structures, widths, tokens)]
    for structure, width, count in cases:
        plan = make_plan(parse_structure(structure), width, width)
        held = plan.dense_macs + plan.params + 2 * whole_number(count, "tokens", 1) * width
        check_fits(f"{structure}, width {width:,}, {count:,} tokens", 2 * held)  # and gradients
    return list(dict.fromkeys(cases))


def bench_case(
    case: LayerCase,
    dtype: torch.dtype = torch.float32,
    *,
    repeats: int = 9,
    on_progress: Callable[[str], None] | None = None,
) -> BenchResult:
    """Time all variants, the layer and the installed peers against nn.Linear, in turns."""
    structure, width, tokens = case
    tokens = whole_number(tokens, "tokens", 1)
    repeats = whole_number(repeats, "repeats", 1)
    torch.manual_seed(0)
    layer = EinsumLinear(width, width, structure=structure, dtype=dtype)
    x = torch.randn(tokens, width, dtype=dtype, requires_grad=True)
    runs, notes = _runs(layer, x, structure)
    limit = layer.plan.dense_macs / layer.plan.macs
    rows = []
    for mode in MODES:
        both = mode != MODES[0]
        chosen = choose_variant(layer.plan, tokens, "cpu", dtype, has_backward=both)
        actions = {name: run.action(mode) for name, run in runs.items()}
        times = interleaved(actions, repeats, on_progress=with_mode(mode, on_progress))
        for name, run in runs.items():
            row = BenchRow(
                structure=structure,
                width=width,
                tokens=tokens,
                dtype=str(dtype).removeprefix("torch."),
                mode=mode,
                variant=name,
                kind=run.kind,
                baseline=run.baseline,
                is_chosen=name == chosen,
                limit=1.0 if run.kind == "baseline" else limit,
                peak_bytes=peak_memory(actions[name]),
                **timing_fields(times[run.baseline], times[name]),
            )
            rows.append(row)
    return BenchResult(tuple(rows), tuple(notes))


def with_mode(mode: str, on_progress: Callable[[str], None] | None) -> Callable[[str], None] | None:
    """Prefix progress messages with the mode."""
    return None if on_progress is None else lambda text: on_progress(f"{mode}, {text}")


def _runs(layer: EinsumLinear, x: Tensor, structure: str) -> tuple[dict[str, TimedCall], list[str]]:
    """What to time, by name: the multiply alone in each way, then whole layers with bias."""
    plan, width = layer.plan, layer.in_features
    padded = nn.functional.pad(x.detach(), (0, plan.d_in_padded - width)).requires_grad_()
    factors = [factor.detach().requires_grad_() for factor in layer.factors()]
    linear, linear_bias = (nn.Linear(width, width, bias=b, dtype=x.dtype) for b in (False, True))
    runs = {LINEAR: TimedCall("baseline", LINEAR, partial(linear, x), (x, *linear.parameters()))}
    for variant in VARIANTS:
        forward = partial(multiply, plan, x, factors, variant)
        runs[variant] = TimedCall("variant", LINEAR, forward, (x, *factors))
    peers, notes = make_peers(plan, factors, structure)
    for peer in peers:
        run = TimedCall("peer", LINEAR, partial(peer.run, padded), (padded, *peer.tensors))
        try:
            run.action(MODES[-1])()
            runs[peer.name] = run
        except Exception as error:  # an error in another library must not stop the benchmark
            notes.append(f"{peer.name} is left out of {structure}: {failure_line(error)}")
    for name, kind, module in (
        (LINEAR_BIAS, "baseline", linear_bias),
        ("layer", "layer", layer),
    ):
        runs[name] = TimedCall(kind, LINEAR_BIAS, partial(module, x), (x, *module.parameters()))
    return runs, notes
