"""A small GPT, and text for it."""

import torch

import einlinear as el

POSITIONS = ("learned", "rotary", "alibi")


def drawn(model, std=0.3):
    """Add noise to all parameters, so that no zero hides a mistake."""
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn(parameter.shape, generator=generator), alpha=std)
    return model


def small(positions="learned", **options):
    sizes = {"context": 24, "width": 32, "depth": 2, "head_size": 8} | options
    return el.GPT(17, positions=positions, **sizes)


def tokens(batch=3, length=19, vocab_size=17):
    generator = torch.Generator().manual_seed(0)
    return torch.randint(vocab_size, (batch, length), generator=generator)
