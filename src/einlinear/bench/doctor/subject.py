"""Subject: the model to examine, as often as checks need a fresh one."""

from __future__ import annotations

from copy import deepcopy
from dataclasses import dataclass
from typing import Literal

import torch
from torch import nn

from einlinear.bench.doctor.inputs import ModelInput, find_input
from einlinear.bench.factory import build_inputs, build_model
from einlinear.errors import EinlinearError, reason
from einlinear.models.convert.conversion import Conversion
from einlinear.models.convert.convert import convert_
from einlinear.models.convert.rules import read_rules
from einlinear.models.survey.sites import find_sites


@dataclass(frozen=True, slots=True, eq=False)
class Subject:
    """A model by its name, the structure to convert it to, and an input that it takes.

    kept: the model itself, if its name does not stand for a new one each time; checks get copies.
    """

    name: str
    kind: str
    structure: str
    inputs: ModelInput
    kept: nn.Module | None = None

    def plain(self) -> nn.Module:
        """A fresh model, as the user has it."""
        return build_model(self.name) if self.kept is None else deepcopy(self.kept)

    def converted(self, init: Literal["fresh", "project"] = "fresh") -> nn.Module:
        """A fresh model with structured layers."""
        return self.convert(init)[0]

    def awake(self, *, is_plain: bool = False) -> nn.Module:
        """A fresh model without matrices of zeros, such as heads at the start of training.

        Its output would be zero whatever the layers before compute, and so hide differences.
        """
        model = self.plain() if is_plain else self.converted()
        with torch.no_grad():
            for parameter in model.parameters():
                if parameter.ndim > 1 and parameter.is_floating_point() and not parameter.any():
                    parameter.normal_(std=parameter[0].numel() ** -0.5)
        return model

    def convert(self, init: Literal["fresh", "project"]) -> tuple[nn.Module, Conversion]:
        """A fresh model with structured layers, and what was done."""
        model = self.plain()
        return model, convert_(model, self.structure, init=init)


def read_subject(name: str, structure: str, inputs: str | None = None) -> Subject:
    """Build the model once, find its input, and make sure that checks can have fresh ones."""
    read_rules(structure)
    model = build_model(name)
    kind = type(model).__name__
    if not find_sites(model):
        raise EinlinearError(
            what=f"{kind} has no linear layer to replace",
            rule="structures replace nn.Linear, the projections of nn.MultiheadAttention and the "
            "Conv1D of Hugging Face",
            fix="name a model with such layers, before it is converted",
        )
    _check_device(model)
    is_kept = build_model(name) is model
    if is_kept:
        _check_copy(name, model)
    found = find_input(model, None if inputs is None else build_inputs(inputs))
    return Subject(name, kind, structure, found, model if is_kept else None)


def _check_device(model: nn.Module) -> None:
    if any(parameter.device.type == "meta" for parameter in model.parameters()):
        raise EinlinearError(
            what=f"{type(model).__name__} is on the device meta",
            rule="the doctor runs the model, for which its weights need memory",
            fix="let the factory create it on the CPU or a GPU",
        )


def _check_copy(name: str, model: nn.Module) -> None:
    try:
        deepcopy(model)
    except Exception as error:
        raise EinlinearError(
            what=f"{name} stands for the same model each time, which cannot be copied: "
            f"{type(error).__name__}: {reason(error)}",
            rule="each check starts from a fresh model",
            fix="name a function that builds a new model whenever it is called",
        ) from error
