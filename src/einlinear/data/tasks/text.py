"""text: predict the next token."""

from __future__ import annotations

import gzip
from collections.abc import Sequence
from dataclasses import dataclass
from importlib import resources
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn

from einlinear.data.documents import HUB, Source, split_documents
from einlinear.data.tasks.task import VALIDATION_BATCH, Batch, batches, random_rows, spread
from einlinear.data.token_folder import is_token_folder, open_tokens
from einlinear.data.tokens import SHARE, Tokens, check_validation_share, open_text, text_tokens
from einlinear.data.vocabulary import Vocabulary, check_rule, open_vocabulary
from einlinear.errors import EinlinearError, quote
from einlinear.files.whole import as_path
from einlinear.structures.values import whole_number

_OWN_SHARE = 0.1  # of the addresses in the package, for validation


@dataclass(frozen=True, slots=True, eq=False)
class TextTask:
    """Windows of a text: given the tokens so far, predict the next one."""

    tokens: Tokens
    context: int
    name: str = "text"
    unit: str = "token"

    def __post_init__(self) -> None:
        whole_number(self.context, "context", 1)
        for part in ("train", "validation"):
            count = len(getattr(self.tokens, part))
            if count < self.context + 1:
                raise EinlinearError(
                    what=f"the context is {self.context}, and the text for {part} has "
                    f"{count} tokens",
                    rule="a text has at least one token more than the context",
                    fix="give a longer text or a shorter context; for validation, a larger "
                    "validation_share or a separate file",
                )

    @property
    def vocabulary(self) -> Vocabulary:
        """The vocabulary of the tokens."""
        return self.tokens.vocabulary

    @property
    def vocab_size(self) -> int:
        """The size of the vocabulary."""
        return self.tokens.vocabulary.size

    @property
    def fingerprint(self) -> str:
        """A hash of the tokens."""
        return self.tokens.fingerprint

    def batch(self, step: int, size: int, *, seed: int, share: slice | None = None) -> Batch:
        """Windows at random places of the training text."""
        available = len(self.tokens.train) - self.context
        places = random_rows(available, step, size, seed=seed, share=share)
        return self._windows(self.tokens.train, places)

    def validation(self, size: int, *, batch: int = VALIDATION_BATCH) -> Sequence[Batch]:
        """Windows of the validation text, evenly spread, with disjoint targets."""
        stream = self.tokens.validation
        windows = spread((len(stream) - 1) // self.context, size)
        return batches(windows, batch, lambda rows: self._windows(stream, rows * self.context))

    def loss(self, outputs: Tensor, batch: Batch) -> Tensor:
        """The mean cross entropy of the tokens, in nats."""
        return nn.functional.cross_entropy(outputs.flatten(0, -2).float(), batch.targets.flatten())

    def _windows(self, stream: npt.NDArray[np.int64], places: npt.NDArray[np.int64]) -> Batch:
        gathered = stream[places[:, None] + np.arange(self.context + 1)]
        windows = torch.from_numpy(gathered.astype(np.int64))
        inputs, targets = windows[:, :-1].contiguous(), windows[:, 1:].contiguous()
        return Batch(inputs, targets, targets.numel())


def open_text_task(
    data: Source | Sequence[Source] | None = None,
    *,
    validation: Source | Sequence[Source] | None = None,
    vocabulary: str | None = None,
    context: int = 128,
    rule: str = "drop",
    validation_share: float | None = None,
) -> TextTask:
    """Open the task on a folder of tokens, on text files, or on the texts of the package.

    Args:
        data: a folder made by `prepare`; or text files, or a folder of them, of up to 64 MiB; or
            None for eleven State of the Union addresses.
        validation: texts for validation if data is text; by default a part of data.
        vocabulary: "ascii" or "gpt2"; by default that of the folder, or "ascii".
        context: tokens in a window.
        rule: for characters outside "ascii": "drop" the document or "fold" them.
        validation_share: share of the documents for validation.
    """
    is_path = isinstance(data, (str, Path)) and not str(data).startswith(HUB)
    is_folder = is_path and is_token_folder(as_path(data, "the text"))
    if validation is not None and (data is None or is_folder):
        raise EinlinearError(
            what=f"texts for validation are given, {quote(validation)}, and the data is "
            + (f"the folder of tokens {data}" if is_folder else "that of the package"),
            rule="only text files take files for validation; other data has its own",
            fix="leave validation out, or give it to einlinear prepare",
        )
    if data is None:
        share = _OWN_SHARE if validation_share is None else validation_share
        tokens = own_tokens("ascii" if vocabulary is None else vocabulary, share)
    elif is_folder:
        tokens = open_tokens(data, vocabulary)  # type: ignore[arg-type]
    else:
        tokens = open_text(
            data,
            validation=validation,
            vocabulary="ascii" if vocabulary is None else vocabulary,
            rule=rule,
            validation_share=SHARE if validation_share is None else validation_share,
        )
    return TextTask(tokens, context)


def own_tokens(vocabulary: str = "ascii", share: float = _OWN_SHARE) -> Tokens:
    """Encode the addresses in the package; the end of the last one is for validation."""
    file = resources.files("einlinear").joinpath("data/embedded/sotu_recent_96.txt.gz")
    documents = [d.strip() for d in split_documents([gzip.decompress(file.read_bytes())])]
    parts = [(documents, check_validation_share(share))]
    return text_tokens(parts, open_vocabulary(vocabulary), check_rule("drop"))
