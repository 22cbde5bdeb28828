"""generate: new tokens from a language model, each drawn from what it says comes next."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from math import isfinite

import torch
from torch import Tensor

from einlinear.errors import EinlinearError
from einlinear.models.gpt import GPT, Cache
from einlinear.structures.values import whole_number

_COLDEST = 1e-6  # below this, float32 cannot tell a temperature from 0


def generate(
    model: GPT,
    tokens: Tensor,
    num_new: int,
    *,
    temperature: float = 1.0,
    top_k: int | None = None,
    generator: torch.Generator | None = None,
) -> Tensor:
    """The tokens (batch, length) with num_new more: (batch, length + num_new).

    Args:
        model: a GPT, also with structured layers.
        tokens: prompts of one length, one token or more each.
        num_new: how many tokens are added to each.
        temperature: logits are divided by it; 0 takes the likeliest token.
        top_k: only the likeliest so many tokens can be drawn; all unless given.
        generator: of the random numbers, for the same tokens each time; torch's own unless given.
    """
    new = stream(model, tokens, num_new, temperature=temperature, top_k=top_k, generator=generator)
    return torch.cat([tokens, *(token.unsqueeze(1) for token in new)], dim=1)


def stream(
    model: GPT,
    tokens: Tensor,
    num_new: int,
    *,
    temperature: float = 1.0,
    top_k: int | None = None,
    generator: torch.Generator | None = None,
) -> Iterator[Tensor]:
    """The new tokens of `generate` as they come: num_new tensors (batch,).

    Keys and values are kept, so that a new token costs one token. When the context is full, its
    older half is forgotten and the newer one read again, with places counted from its start: each
    token is drawn by a model that sees at least the last half of the context, if there are so many
    tokens, and never sees more than a context.
    Checked by: test_generate.py::test_tokens_are_those_of_the_model_without_a_cache.
    """
    _check_prompt(model, tokens)
    draw = partial(
        _drawn,
        temperature=_checked_temperature(temperature),
        top_k=None if top_k is None else whole_number(top_k, "top_k", 1),
        generator=generator,
    )
    return _stream(model, tokens, whole_number(num_new, "num_new", 0), draw)


def _stream(
    model: GPT, tokens: Tensor, num_new: int, draw: Callable[[Tensor], Tensor]
) -> Iterator[Tensor]:
    text = tokens[:, -model.context :]
    unread, caches = text, model.new_caches()
    for _ in range(num_new):
        if caches[0].length + unread.shape[1] > model.context:
            text = text[:, -max(1, model.context // 2) :]
            unread, caches = text, model.new_caches()
        new = draw(_next_logits(model, unread, caches))
        unread = new.unsqueeze(1)
        text = torch.cat([text, unread], dim=1)
        yield new


@torch.no_grad()
def _next_logits(model: GPT, unread: Tensor, caches: list[Cache]) -> Tensor:
    """The logits (batch, vocab_size) of what follows the last token."""
    logits: Tensor = model(unread, caches)[:, -1]
    if not logits.isfinite().all():
        raise EinlinearError(
            what="the model gives logits that are not finite",
            rule="tokens are drawn from probabilities",
            fix="take weights from before training diverged",
        )
    return logits


def _check_prompt(model: GPT, tokens: Tensor) -> None:
    is_whole = not tokens.is_floating_point() and not tokens.is_complex()
    if not is_whole or tokens.dim() != 2 or not tokens.numel():
        raise EinlinearError(
            what=f"the prompts have shape {tuple(tokens.shape)} and dtype {tokens.dtype}",
            rule="prompts are int64, (batch, length), with one token or more each",
            fix="give prompts of one length; a single one as tokens.unsqueeze(0)",
        )
    lowest, highest = int(tokens.min()), int(tokens.max())
    if lowest < 0 or highest >= model.vocab_size:
        raise EinlinearError(
            what=f"the prompts have tokens from {lowest} to {highest}",
            rule=f"the model knows tokens from 0 to {model.vocab_size - 1}",
            fix="encode the prompts as the text was that the model was trained on",
        )


def _drawn(
    logits: Tensor, *, temperature: float, top_k: int | None, generator: torch.Generator | None
) -> Tensor:
    """One token for each row of logits."""
    if temperature < _COLDEST:
        return logits.argmax(dim=-1)
    logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
    vocab_size = logits.shape[-1]
    logits, tokens = logits.topk(min(top_k or vocab_size, vocab_size), dim=-1)
    # The first is the highest: less it, no temperature makes a logit infinite.
    probabilities = ((logits - logits[:, :1]) / temperature).softmax(dim=-1)
    place = torch.multinomial(probabilities, 1, generator=generator)
    return tokens.gather(1, place).squeeze(1)


def _checked_temperature(temperature: float) -> float:
    if isfinite(temperature) and temperature >= 0:
        return float(temperature)
    raise EinlinearError(
        what=f"the temperature is {temperature}",
        rule="a temperature is a number of 0 or more",
        fix="give 1.0 for the model as it is, less for likelier tokens, 0 for the likeliest",
    )
