"""The command sample."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated, Any

import tyro


def sample(
    run: Annotated[Path, tyro.conf.Positional, tyro.conf.arg(metavar="DIR")],
    /,
    *,
    prompt: str = "",
    tokens: int = 400,
    temperature: float = 0.8,
    top_k: int | None = None,
    seed: int = 0,
) -> None:
    """Generate text with the model of a run, token by token.

    Args:
        run: Directory of a run on text, finished or not.
        prompt: Text to continue.
        tokens: Number of tokens to generate.
        temperature: Sampling temperature: 1 samples from the model as it is, lower values prefer
            likely tokens, 0 always takes the likeliest.
        top_k: Sample from the top k tokens only.
        seed: Random seed; the same seed gives the same text.
    """
    import torch  # takes a while to load

    from einlinear.models.generate import stream
    from einlinear.training.load import load_writer

    writer = load_writer(run)
    options: Any = {"temperature": temperature, "top_k": top_k}
    generator = torch.Generator().manual_seed(seed)
    start = writer.encode(prompt)
    sys.stdout.write(prompt)
    pending: list[int] = []
    for token in stream(writer.model, start, tokens, generator=generator, **options):
        pending += token.tolist()
        text = writer.vocabulary.decode(pending)
        if not text.endswith("\ufffd") or len(pending) > 3:  # a character may be several tokens
            sys.stdout.write(text)
            sys.stdout.flush()
            pending = []
    sys.stdout.write(writer.vocabulary.decode(pending) + "\n")
