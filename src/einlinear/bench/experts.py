"""The benchmark of mixtures of experts: MoELinear against dense layers and all experts masked."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor, nn

from einlinear.bench.layers import LayerCase, TimedCall, with_mode
from einlinear.bench.peers import all_experts
from einlinear.bench.rows import (
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
from einlinear.layers.moe.layers import MoELinear
from einlinear.structures.plan import make_plan
from einlinear.structures.text import parse_structure
from einlinear.structures.values import whole_number

MIXTURE, ALL = "MoELinear", "all experts"
FEW_ROUNDS = 3
"""Rounds for all experts: they take seconds, and few rounds show a ratio so far from 1."""


class ExpertsCase(NamedTuple):
    """One square mixture to measure."""

    structure: str
    width: int
    tokens: int
    num_experts: int
    num_active: int


def experts_cases(
    cases: Sequence[LayerCase], experts: Sequence[int], num_active: int
) -> list[ExpertsCase]:
    """Every layer as a mixture of each number of experts, once; all are checked first."""
    if not experts:
        raise EinlinearError(
            what="--experts has no values",
            rule="mixtures are measured for one or more numbers of experts",
            fix="--experts 16 64, or leave --experts out",
        )
    whole_number(num_active, "active", 1, fix="--active 2")
    for number in experts:
        whole_number(number, "experts", 1, fix="--experts 16")
        if num_active > number:
            raise EinlinearError(
                what=f"{num_active} of {number} experts are active",
                rule="a token uses at most all experts",
                fix=f"--active {min(experts)}, or --experts {num_active} and more",
            )
    found = [ExpertsCase(*case, number, num_active) for case in cases for number in experts]
    for structure, width, tokens, number, _ in found:
        plan = make_plan(parse_structure(structure), width, width)
        case = f"{structure}, width {width:,}, {tokens:,} tokens, {number:,} experts"
        check_fits(case, 2 * number * plan.params)
    return list(dict.fromkeys(found))


def bench_experts(
    case: ExpertsCase,
    dtype: torch.dtype = torch.float32,
    *,
    repeats: int = 9,
    on_progress: Callable[[str], None] | None = None,
) -> BenchResult:
    """Time the mixture, the same with all experts computed, and dense layers, in turns.

    The gate is random, so that tokens prefer different experts as in a trained model, and the load
    is nearly even.
    """
    repeats = whole_number(repeats, "repeats", 1)
    torch.manual_seed(0)
    layer, x = make_mixture(case, dtype), torch.randn(case.tokens, case.width, dtype=dtype)
    runs = _runs(layer, x.requires_grad_())
    macs = _macs(layer, runs)
    rows = []
    for mode in MODES:
        actions = {name: run.action(mode) for name, run in runs.items()}
        show = with_mode(mode, on_progress)
        times = interleaved(actions, repeats, few={ALL: FEW_ROUNDS}, on_progress=show)
        peaks = {name: peak_memory(action) for name, action in actions.items()}
        others = [name for name in runs if name not in (LINEAR_BIAS, MIXTURE)]
        pairs = [(name, LINEAR_BIAS) for name in runs] + [(MIXTURE, name) for name in others]
        rows += [
            BenchRow(
                **case._asdict(),
                dtype=str(dtype).removeprefix("torch."),
                mode=mode,
                variant=name,
                kind=runs[name].kind,
                baseline=baseline,
                is_chosen=False,
                limit=macs[baseline] / macs[name],
                peak_bytes=peaks[name],
                **timing_fields(times[baseline], times[name]),
            )
            for name, baseline in pairs
        ]
    return BenchResult(tuple(rows), ())


def make_mixture(case: ExpertsCase, dtype: torch.dtype) -> MoELinear:
    """The layer, with a random gate whose logits are of size 1."""
    layer = MoELinear(
        case.width,
        case.width,
        structure=case.structure,
        num_experts=case.num_experts,
        num_active=case.num_active,
        dtype=dtype,
    )
    nn.init.normal_(layer.gate.weight, std=case.width**-0.5)
    return layer


class Summed(nn.Module):
    """The sum of as many layers as a token has active experts: the mixture without routing."""

    def __init__(self, layers: Sequence[nn.Module]) -> None:
        super().__init__()
        self.layers = nn.ModuleList(layers)

    def forward(self, x: Tensor) -> Tensor:
        """Sum the outputs of the layers."""
        y: Tensor = self.layers[0](x)
        for layer in self.layers[1:]:
            y = y + layer(x)
        return y


def _runs(layer: MoELinear, x: Tensor) -> dict[str, TimedCall]:
    """What to time, by name."""
    width, count = layer.in_features, layer.num_active
    is_dense = layer.plan.macs == layer.plan.dense_macs and len(layer.plan.steps) == 1
    make: Callable[..., nn.Module] = nn.Linear
    if not is_dense:
        make = partial(EinsumLinear, structure=layer.structure)
    linear = nn.Linear(width, width, dtype=x.dtype)
    summed = Summed([make(width, width, bias=i == 0, dtype=x.dtype) for i in range(count)])
    name = f"{count} {'nn.Linear' if is_dense else 'EinsumLinear'}"

    def run(kind: str, module: nn.Module, forward: Callable[[], Tensor]) -> TimedCall:
        return TimedCall(kind, LINEAR_BIAS, forward, (x, *module.parameters()))

    return {
        LINEAR_BIAS: run("baseline", linear, partial(linear, x)),
        name: run("active", summed, partial(summed, x)),
        ALL: run("masked", layer, partial(all_experts, layer, x)),
        MIXTURE: run("mixture", layer, partial(layer, x)),
    }


def _macs(layer: MoELinear, runs: dict[str, TimedCall]) -> dict[str, int]:
    """Multiply-adds per token of each run."""
    plan, count = layer.plan, layer.num_active
    of_kind = {
        "baseline": plan.dense_macs,
        "active": count * plan.macs,
        "masked": layer.macs + (layer.num_experts - count) * plan.macs,
        "mixture": layer.macs,
    }
    return {name: of_kind[run.kind] for name, run in runs.items()}
