"""Load the language model that a run has trained."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from einlinear.data.vocabulary import Vocabulary, open_vocabulary
from einlinear.errors import EinlinearError
from einlinear.files.tensors import read_tensors
from einlinear.models.gpt import GPT
from einlinear.runs.config import RunConfig
from einlinear.runs.directory import MODEL, RunDirectory, damaged
from einlinear.training.checkpoint import check_owner, check_shapes, load_checkpoint
from einlinear.training.model import make_model


@dataclass(frozen=True, slots=True, eq=False)
class Writer:
    """A trained language model with its vocabulary, after `step` steps."""

    config: RunConfig
    model: GPT
    vocabulary: Vocabulary
    step: int

    def encode(self, prompt: str) -> Tensor:
        """The tokens of a prompt, (1, length); an empty prompt starts a new document."""
        tokens = self.vocabulary.encode(prompt.encode(), "fold").tokens
        held = [] if tokens is None else [int(token) for token in tokens]
        return torch.tensor([held or [self.vocabulary.end]])


def load_writer(path: str | Path) -> Writer:
    """Load the language model of a run: its final weights, or those of its last checkpoint."""
    directory = RunDirectory(path)
    config = directory.owner()
    if config is None:
        raise EinlinearError(
            what=f"{path} holds no run",
            rule="a run keeps its config in config.json",
            fix="name the directory that einlinear train was given with --out",
        )
    if config.task != "text":
        raise EinlinearError(
            what=f"the task of the run in {path} is {config.task}",
            rule="only a model trained on text can write text",
            fix="train one: einlinear train --task text --out DIR",
        )
    assert config.vocabulary is not None, "a run on text has a vocabulary"
    assert config.context is not None, "a run on text has a context"
    step, weights = _weights(directory, config)
    vocabulary = open_vocabulary(config.vocabulary)
    model = make_model(config, (vocabulary.size, config.context))
    assert isinstance(model, GPT), "text is written by a GPT"
    check_shapes(weights, dict(model.named_parameters()), directory.path)
    model.load_state_dict(weights, strict=False)  # a tied head is kept once
    return Writer(config, model.eval(), vocabulary, step)


def _weights(directory: RunDirectory, config: RunConfig) -> tuple[int, dict[str, Tensor]]:
    """The step of the weights, and the weights, averaged if the run averages them."""
    record = directory.read_finished(config)
    if record is not None:
        path = directory.path / MODEL
        try:
            return record.steps_done, read_tensors(path)
        except (OSError, ValueError) as error:  # of an old run, which has no checksum
            raise damaged(directory.path, f"cannot read {path}: {error}") from error
    checkpoint = load_checkpoint(directory.checkpoints)
    if checkpoint is None:
        raise EinlinearError(
            what=f"the run in {directory.path} has no checkpoint yet",
            rule="a model is loaded from a finished run, or from its last checkpoint",
            fix="let it train longer",
        )
    check_owner(checkpoint, config, directory.path)
    return checkpoint.step, checkpoint.weights("average." if config.ema else "model.")
