"""The stack benchmark: training steps of transformer blocks, structured against dense."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import mse_loss, scaled_dot_product_attention
from torch.utils.flop_counter import FlopCounterMode

from einlinear.bench.rows import LINEAR, BenchResult, BenchRow, check_fits, timing_fields
from einlinear.errors import EinlinearError
from einlinear.layers.linear import EinsumLinear
from einlinear.layers.measure import interleaved, peak_memory
from einlinear.layers.variants import situation
from einlinear.models.fusing.fuse import fuse_
from einlinear.structures.values import whole_number

HEAD = 64
SEQUENCE = 128
DENSE = "dense"
FUSED = ", fused"

MakeLinear = Callable[[int, int], nn.Module]
"""A linear layer from the widths of its input and output."""


class StackCase(NamedTuple):
    """A stack to measure at one width, with each structure in turn."""

    structures: tuple[str, ...]
    width: int
    tokens: int
    num_blocks: int


class StackBlock(nn.Module):
    """A pre-norm transformer block: causal attention with heads of 64, then an MLP of 4 x."""

    def __init__(self, width: int, linear: MakeLinear) -> None:
        super().__init__()
        self.attention_norm = nn.LayerNorm(width)
        self.qkv = linear(width, 3 * width)
        self.out = linear(width, width)
        self.mlp_norm = nn.LayerNorm(width)
        self.mlp = nn.Sequential(linear(width, 4 * width), nn.GELU(), linear(4 * width, width))

    def forward(self, x: Tensor) -> Tensor:
        """Apply the block to sequences of shape (batch, sequence, width)."""
        qkv = self.qkv(self.attention_norm(x)).unflatten(-1, (3, -1, HEAD))
        q, k, v = qkv.permute(2, 0, 3, 1, 4)
        mixed = scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).flatten(2))
        y: Tensor = x + self.mlp(self.mlp_norm(x))
        return y


def make_stack(
    structure: str | None, width: int, num_blocks: int, *, fused: bool = False
) -> nn.Sequential:
    """Blocks with the structure in all their linear layers; None is nn.Linear.

    fused: whether their feed-forward nets are computed in one pass.
    """
    linear: MakeLinear = nn.Linear
    if structure is not None:
        linear = partial(EinsumLinear, structure=structure)
    stack = nn.Sequential(*(StackBlock(width, linear) for _ in range(num_blocks)))
    if fused:
        fuse_(stack)
    return stack


def stack_cases(
    structures: Sequence[str], widths: Sequence[int], tokens: Sequence[int], num_blocks: int
) -> list[StackCase]:
    """Every width and number of tokens, in whole sequences, each once; none for no blocks."""
    fix = "--blocks 2, or leave --blocks out"
    if not whole_number(num_blocks, "blocks", 0, fix=fix):
        return []
    for width in widths:
        if width % HEAD:
            raise EinlinearError(
                what=f"--blocks was given with width {width}",
                rule=f"blocks have attention heads of {HEAD}, so the width must be a multiple",
                fix=f"--widths {max(HEAD, width - width % HEAD)}, or leave --blocks out",
            )
        numbers = 4 * 12 * width**2 * num_blocks  # with gradients and the two moments of AdamW
        check_fits(f"{num_blocks:,} blocks, width {width:,}", numbers)
    names = tuple(dict.fromkeys(structures))
    counts = [max(1, count // SEQUENCE) * SEQUENCE for count in tokens]
    cases = [StackCase(names, width, count, num_blocks) for width in widths for count in counts]
    return list(dict.fromkeys(cases))


def bench_stack(
    case: StackCase,
    dtype: torch.dtype = torch.float32,
    *,
    repeats: int = 9,
    on_progress: Callable[[str], None] | None = None,
) -> BenchResult:
    """Time training steps of the stack with nn.Linear and with each structure, in turns.

    Stacks of each structure are timed as they are, and with fused feed-forward nets.
    """
    structures, width, tokens, num_blocks = case
    repeats = whole_number(repeats, "repeats", 1)
    stacks = {name: (name, False) for name in structures}
    stacks |= {f"{name}{FUSED}": (name, True) for name in structures}
    torch.manual_seed(0)
    x, target = torch.randn(2, tokens // SEQUENCE, SEQUENCE, width, dtype=dtype)
    models = {LINEAR: make_stack(None, width, num_blocks)}
    models |= {
        label: make_stack(name, width, num_blocks, fused=fused)
        for label, (name, fused) in stacks.items()
    }
    steps = {label: training_step(model.to(dtype), x, target) for label, model in models.items()}
    times = interleaved(steps, repeats, on_progress=on_progress)
    dense_flops = step_flops(None, width, tokens, num_blocks)
    flops = {name: step_flops(name, width, tokens, num_blocks) for name in structures}
    limits = {label: dense_flops / flops[name] for label, (name, _) in stacks.items()}
    rows = [
        BenchRow(
            structure=DENSE if label == LINEAR else label,
            width=width,
            tokens=tokens,
            dtype=str(dtype).removeprefix("torch."),
            mode=f"training, {num_blocks} block{'s' * (num_blocks > 1)}",
            variant=LINEAR if label == LINEAR else "layer",
            kind="baseline" if label == LINEAR else "stack",
            baseline=LINEAR,
            is_chosen=False,
            limit=limits.get(label, 1.0),
            peak_bytes=peak_memory(step),
            **timing_fields(times[LINEAR], times[label]),
        )
        for label, step in steps.items()
    ]
    return BenchResult(tuple(rows), ())


def training_step(model: nn.Module, x: Tensor, target: Tensor) -> Callable[[], None]:
    """What to time: forward, loss, backward, AdamW, and releasing the gradients."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)

    def step() -> None:
        mse_loss(model(x), target).backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        optimizer.zero_grad()

    return step


def step_flops(structure: str | None, width: int, tokens: int, num_blocks: int) -> int:
    """FLOPs of forward and backward, counted without computing anything: linears and attention.

    Layers use the einsum variant, since others compute some products twice to save memory.
    Attention counts in full although half of it is masked, because torch counts it so.
    """
    with torch.device("meta"):
        model = make_stack(structure, width, num_blocks)
        x = torch.empty(tokens // SEQUENCE, SEQUENCE, width)
    for module in model.modules():
        if isinstance(module, EinsumLinear):
            module.choices = {situation(x, tokens, True): "einsum"}
    with sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as counter:
        model(x).sum().backward()
    return int(counter.get_total_flops())
