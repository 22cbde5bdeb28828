"""Give a layer of your own learning rates that transfer across widths.

A module declares how its parameters scale, in a method `param_scaling`; `param_groups` and `init_`
do the rest. The coordinate check then trains a few steps at several widths: under µP the change of
a layer's output must not grow with the width. With one learning rate for all parameters it does.

    python examples/own_layer_with_mup.py
"""

import torch
from torch import nn

import einlinear as el


class GatedLinear(nn.Module):
    """A linear layer with a learnable gain for every output."""

    def __init__(self, d_in: int, d_out: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(d_out, d_in))
        self.gain = nn.Parameter(torch.empty(d_out))

    def param_scaling(self) -> dict[str, el.Scaling]:
        d_out, d_in = self.weight.shape
        return {
            "weight": el.matrix_scaling(d_in, d_out),
            "gain": el.vector_scaling(d_out, init_mean=1.0),
        }

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.gain * nn.functional.linear(x, self.weight)


class Model(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(96, width)
        self.mix = GatedLinear(width, width)
        self.structured = el.EinsumLinear(width, width, structure="btt")
        self.head = nn.Linear(width, 96)

    def layer_roles(self) -> dict[str, str]:
        return {"head": "head"}  # starts at zero

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embedding(tokens)
        x = x + torch.relu(self.mix(x))
        return self.head(x + torch.relu(self.structured(x)))


def main() -> None:
    torch.manual_seed(0)
    model = Model(256)
    el.init_(model)
    print(el.scaling_table(model, lr=3e-3, base_width=64))

    tokens, targets = torch.randint(96, (2, 16, 16))
    for parametrization in ("mup", "naive"):
        result = el.coordinate_check(
            Model,
            [64, 256, 1024],
            batch=(tokens, targets),
            lr=3e-3,
            steps=3,
            seeds=1,
            parametrization=parametrization,
        )
        print(f"\n{parametrization}:\n{result}")


if __name__ == "__main__":
    main()
