"""Use EinsumLinear wherever you would use nn.Linear.

Builds one block tensor-train layer beside a dense one, compares what they cost, times them, and
trains both on the same small task.

    python examples/drop_in_layer.py
    python examples/drop_in_layer.py --structure "low_rank(rank=32)" --width 1024
"""

import argparse
from time import perf_counter

import torch
from torch import nn

import einlinear as el


def seconds_per_call(layer: nn.Module, x: torch.Tensor, calls: int = 10) -> float:
    """Best time of a forward and backward pass."""
    times = []
    for _ in range(calls):
        start = perf_counter()
        layer(x).sum().backward()
        times.append(perf_counter() - start)
    return min(times)


def final_loss(layer: nn.Module, x: torch.Tensor, labels: torch.Tensor, steps: int = 20) -> float:
    """Train a classifier with this layer in the middle, and return its last loss."""
    model = nn.Sequential(nn.LayerNorm(x.shape[1]), layer, nn.GELU(), nn.Linear(x.shape[1], 10))
    optimizer = torch.optim.AdamW(el.param_groups(model, lr=1e-2, base_width=64))
    for _ in range(steps):
        loss = nn.functional.cross_entropy(model(x), labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return loss.item()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--structure", default="btt(rank=2)")
    parser.add_argument("--width", type=int, default=512)
    args = parser.parse_args()

    torch.manual_seed(0)
    dense = nn.Linear(args.width, args.width)
    structured = el.EinsumLinear(args.width, args.width, structure=args.structure)
    print(structured.plan)

    x = torch.randn(1024, args.width)
    labels = (x @ torch.randn(args.width, 10)).argmax(1)
    print(f"\n{'layer':<24}{'parameters':>12}{'ms / step':>12}{'loss':>8}")
    for name, layer in [("nn.Linear", dense), (args.structure, structured)]:
        count = sum(p.numel() for p in layer.parameters())
        time = 1000 * seconds_per_call(layer, x)
        loss = final_loss(layer, x, labels)
        print(f"{name:<24}{count:>12,}{time:>12.2f}{loss:>8.3f}")

    weight = structured.to_dense()  # laid out like nn.Linear.weight
    assert torch.allclose(structured(x), x @ weight.T + structured.bias, atol=1e-3)


if __name__ == "__main__":
    main()
