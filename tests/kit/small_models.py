"""Small models whose inner linear layers have any structure: an MLP and a transformer."""

import torch
from torch import nn

from einlinear import EinsumLinear

STRUCTURES = ["dense", "btt(rank=2)", "low_rank", "kronecker", "theta(1/2,1/4,1/4,1/4,1/2,1/4,0)"]


def linear(d_in, d_out, structure, **options):
    """A layer without weight normalisation, which would hide learning rates that are too high."""
    if structure == "dense":
        return nn.Linear(d_in, d_out, **options)
    return EinsumLinear(d_in, d_out, structure=structure, weight_norm=False, **options)


class Perceptron(nn.Module):
    def __init__(self, width, structure):
        super().__init__()
        self.input = nn.Linear(16, width)
        self.first = linear(width, width, structure)
        self.second = linear(width, width, structure)
        self.head = nn.Linear(width, 10)

    def layer_roles(self):
        return {"head": "head"}

    def forward(self, x):
        x = torch.relu(self.input(x))
        return self.head(torch.relu(self.second(torch.relu(self.first(x)))))


class Block(nn.Module):
    """A pre-norm block: attention with scores q k / d_head, and a feed-forward network."""

    def __init__(self, width, structure):
        super().__init__()
        self.norm, self.norm_again = nn.LayerNorm(width), nn.LayerNorm(width)
        self.query = linear(width, width, structure, bias=False)
        self.key = linear(width, width, structure, bias=False)
        self.value = linear(width, width, structure, bias=False)
        self.out = linear(width, width, structure, bias=False)
        self.up = linear(width, 4 * width, structure, bias=False)
        self.down = linear(4 * width, width, structure, bias=False)

    def forward(self, x):
        y = self.norm(x)
        q, k, v = (
            layer(y).unflatten(-1, (4, -1)).transpose(-2, -3)
            for layer in (self.query, self.key, self.value)
        )
        mixed = nn.functional.scaled_dot_product_attention(
            q, k, v, is_causal=True, scale=1 / q.shape[-1]
        )
        x = x + self.out(mixed.transpose(-2, -3).flatten(-2))
        return x + self.down(nn.functional.gelu(self.up(self.norm_again(x))))


class Transformer(nn.Module):
    """Four heads at every width, so that the width of a head grows too."""

    def __init__(self, width, structure):
        super().__init__()
        self.embedding = nn.Embedding(16, width)
        self.place = nn.Embedding(12, width)
        self.blocks = nn.Sequential(Block(width, structure), Block(width, structure))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, 16, bias=False)

    def layer_roles(self):
        return {"head": "head"}

    def forward(self, tokens):
        x = self.embedding(tokens) + self.place.weight[: tokens.shape[-1]]
        return self.head(self.norm(self.blocks(x)))


def vectors():
    g = torch.Generator().manual_seed(0)
    return torch.randn(64, 16, generator=g), torch.randint(10, (64,), generator=g)


def tokens():
    g = torch.Generator().manual_seed(0)
    text = torch.randint(16, (8, 13), generator=g)
    return text[:, :-1], text[:, 1:]
