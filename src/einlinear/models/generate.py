"""generate: sample new tokens from a language model."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from math import isfinite

import torch
from torch import Tensor

from einlinear.errors import EinlinearError
from einlinear.models.gpt import GPT, Cache
from einlinear.structures.values import whole_number

_COLDEST = 1e-6  # lower temperatures are the same as 0 in float32


def generate(
    model: GPT,
    tokens: Tensor,
    num_new: int,
    *,
    temperature: float = 1.0,
    top_k: int | None = None,
    generator: torch.Generator | None = None,
) -> Tensor:
    """Append num_new sampled tokens to each prompt; return (batch, length + num_new).

    Args:
        model: a GPT, dense or structured.
        tokens: prompts (batch, length) of equal length, at least one token each.
        num_new: number of tokens to append to each prompt.
        temperature: divides the logits; 0 always takes the likeliest token.
        top_k: sample from the top k tokens only; from all tokens if None.
        generator: random generator, for reproducible tokens; torch's default if None.
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
    """Yield the new tokens of `generate` as they are sampled: num_new tensors (batch,).

    Keys and values are cached, so each new token costs the compute of one token. When the context
    is full, the model drops its older half and reads the newer half again, with positions counted
    from its start. So the model always sees at least the last half context of tokens, if there are
    that many, and never more than one context.
    Checked by: test_generate.py::test_tokens_are_those_of_the_model_without_a_cache.
    """
    _check_prompt(model, tokens)
    draw = partial(
        _sampled,
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
    """Return the logits (batch, vocab_size) of the token after the last."""
    logits: Tensor = model(unread, caches)[:, -1]
    if not logits.isfinite().all():
        raise EinlinearError(
            what="the model returns logits that are not finite",
            rule="sampling needs finite logits",
            fix="load a checkpoint from before training diverged",
        )
    return logits


def _check_prompt(model: GPT, tokens: Tensor) -> None:
    is_whole = not tokens.is_floating_point() and not tokens.is_complex()
    if not is_whole or tokens.dim() != 2 or not tokens.numel():
        raise EinlinearError(
            what=f"the prompts have shape {tuple(tokens.shape)} and dtype {tokens.dtype}",
            rule="prompts are int64 of shape (batch, length), with at least one token each",
            fix="give prompts of equal length; a single one as tokens.unsqueeze(0)",
        )
    lowest, highest = int(tokens.min()), int(tokens.max())
    if lowest < 0 or highest >= model.vocab_size:
        raise EinlinearError(
            what=f"the prompts have tokens from {lowest} to {highest}",
            rule=f"the tokens of this model are 0 to {model.vocab_size - 1}",
            fix="encode the prompts with the vocabulary that the model was trained with",
        )


def _sampled(
    logits: Tensor, *, temperature: float, top_k: int | None, generator: torch.Generator | None
) -> Tensor:
    """Sample one token for each row of logits."""
    if temperature < _COLDEST:
        return logits.argmax(dim=-1)
    logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
    vocab_size = logits.shape[-1]
    logits, tokens = logits.topk(min(top_k or vocab_size, vocab_size), dim=-1)
    # The first logit is the highest; subtracting it keeps all others finite at any temperature.
    probabilities = ((logits - logits[:, :1]) / temperature).softmax(dim=-1)
    place = torch.multinomial(probabilities, 1, generator=generator)
    return tokens.gather(1, place).squeeze(1)


def _checked_temperature(temperature: float) -> float:
    if isfinite(temperature) and temperature >= 0:
        return float(temperature)
    raise EinlinearError(
        what=f"the temperature is {temperature}",
        rule="a temperature is a finite number of 0 or more",
        fix="give 1.0 to sample from the model's probabilities, less to favour likely tokens, or 0 "
        "to always take the likeliest",
    )
