"""Models for the doctor, each with one thing that works or fails: kit.doctor_models:NAME."""

import torch
from torch import nn
from torch.nn.functional import scaled_dot_product_attention

D = 16


class Block(nn.Module):
    """Attention and an MLP, as people write them."""

    def __init__(self):
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(D), nn.LayerNorm(D)
        self.q_proj, self.k_proj = nn.Linear(D, D), nn.Linear(D, D)
        self.v_proj, self.o_proj = nn.Linear(D, D), nn.Linear(D, D)
        self.up, self.down = nn.Linear(D, 4 * D), nn.Linear(4 * D, D)

    def forward(self, x):
        h = self.norm1(x)
        q, k, v = [
            layer(h).unflatten(-1, (2, -1)).transpose(1, 2)
            for layer in (self.q_proj, self.k_proj, self.v_proj)
        ]
        mixed = scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.o_proj(mixed.transpose(1, 2).flatten(-2))
        return x + self.down(nn.functional.gelu(self.up(self.norm2(x))))


class HandWrittenGPT(nn.Module):
    """A language model of 23 tokens and at most 32 positions."""

    def __init__(self):
        super().__init__()
        self.tokens, self.places = nn.Embedding(23, D), nn.Embedding(32, D)
        self.blocks = nn.Sequential(Block())
        self.norm, self.head = nn.LayerNorm(D), nn.Linear(D, 23, bias=False)

    def forward(self, tokens):
        places = torch.arange(tokens.shape[1], device=tokens.device)
        x = self.tokens(tokens) + self.places(places)
        return self.head(self.norm(self.blocks(x)))


class Two(nn.Module):
    """Two layers and a head; the base of models that break something."""

    def __init__(self):
        super().__init__()
        self.first, self.second, self.head = nn.Linear(D, D), nn.Linear(D, D), nn.Linear(D, 3)

    def forward(self, x):
        return self.head(self.between(self.second(self.first(x))))

    def between(self, x):
        return x


class Branching(Two):
    def between(self, x):
        return x + 1 if x.sum() > 0 else x


@torch.library.custom_op("einlinear_tests::opaque", mutates_args=())
def opaque(x: torch.Tensor) -> torch.Tensor:
    return x.clone()


class Opaque(Two):
    """Calls an operator that says nothing of the shape of its output."""

    def between(self, x):
        return x + opaque(x.detach())


class Spare(Two):
    def __init__(self):
        super().__init__()
        self.spare = nn.Linear(D, D)


class Cut(Two):
    def forward(self, x):
        return self.head(self.second(self.first(x).detach()))


class NoGradient(Two):
    def forward(self, x):
        return super().forward(x).detach()


class Infinite(Two):
    def between(self, x):
        return x / 0


class Forgetful(Two):
    """Depends on a number that no checkpoint holds."""

    def __init__(self):
        super().__init__()
        self.shift = float(torch.randn(()))

    def between(self, x):
        return x + self.shift


class Noisy(Two):
    def between(self, x):
        return x + torch.randn_like(x)


class Gained(Two):
    """Owns a parameter whose learning rate nobody has declared."""

    def __init__(self):
        super().__init__()
        self.gain = nn.Parameter(torch.ones(D))

    def between(self, x):
        return x * self.gain


class Picky(Two):
    """Takes two arguments, so no input can be guessed."""

    def forward(self, x, scale):
        return super().forward(x) * scale


class Uncopied(Two):
    def __deepcopy__(self, memo):
        raise RuntimeError("there is only one")


def zero_head():
    model = Two()
    nn.init.zeros_(model.head.weight)
    return model


def frozen():
    return Two().requires_grad_(False)


def half():
    return Two().bfloat16()


def normed():
    model = Two()
    nn.utils.parametrizations.weight_norm(model.first)
    return model


def attention():
    layer = nn.TransformerEncoderLayer(D, 2, 2 * D, batch_first=True)
    return nn.TransformerEncoder(layer, 1, enable_nested_tensor=False)


def on_meta():
    with torch.device("meta"):
        return Two()


def no_layers():
    return nn.ReLU()


def gpt2():
    import transformers

    config = {"vocab_size": 41, "n_positions": 32, "n_embd": D, "n_layer": 1, "n_head": 2}
    return transformers.GPT2LMHeadModel(transformers.GPT2Config(**config))


ready, uncopied = Two(), Uncopied()


def picky_inputs():
    return {"x": torch.ones(4, D), "scale": 2.0}


def picky_tuple():
    return torch.ones(4, D), torch.ones(())


def wrong_inputs():
    return torch.ones(4, D + 1)


def text_inputs():
    return "a text"


numbers = torch.ones(4, D)
