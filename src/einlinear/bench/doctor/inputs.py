"""What a model is called with: given by the user, or found by trying; and what it returns."""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping
from copy import deepcopy
from dataclasses import dataclass, field, is_dataclass
from typing import Any

import torch
from torch import Tensor, nn

from einlinear.errors import EinlinearError, quote, reason
from einlinear.models.survey.sites import find_sites

_CPU = torch.device("cpu")
_BATCH = 8
_LENGTHS = (128, 64, 32, 16, 8, 4, 1)
"""Lengths of sequences to try: the first that the model takes is used."""
_MOST_WIDTHS = 4  # distinct widths to try for a model without embeddings
_INPUTS_FIX = (
    "give --inputs my_project.models:inputs, a function that returns what the model is called "
    "with: a tensor, a tuple of arguments, or a dict of keyword arguments"
)


@dataclass(frozen=True, slots=True)
class ModelInput:
    """Arguments of a model; `source` says where they come from, "" if a user gave them."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any] = field(default_factory=dict)
    source: str = ""

    def __str__(self) -> str:
        named = [_shown(value) for value in self.args]
        named += [f"{name} {_shown(value)}" for name, value in self.kwargs.items()]
        return ", ".join(named) + f" ({self.source})" * bool(self.source)

    def call(self, model: nn.Module) -> Any:
        """The output of the model."""
        return model(*self.args, **self.kwargs)

    def to(self, device: torch.device) -> ModelInput:
        """The same arguments with tensors on a device."""
        args = tuple(_moved(value, device) for value in self.args)
        kwargs = {name: _moved(value, device) for name, value in self.kwargs.items()}
        return ModelInput(args, kwargs, self.source)

    def evaluate(self, model: nn.Module) -> list[Tensor]:
        """All tensors of the output in eval mode, without gradients; random draws are seeded."""
        model.eval()
        with torch.no_grad(), torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            return tensors_of(self.call(model))


def tensors_of(output: Any) -> list[Tensor]:
    """The tensors in what a model returns, in order."""
    if isinstance(output, Tensor):
        return [output]
    values: list[Any] = []
    if isinstance(output, Mapping):
        values = list(output.values())
    elif isinstance(output, list | tuple):
        values = list(output)
    elif is_dataclass(output):
        values = list(vars(output).values())
    return [tensor for value in values for tensor in tensors_of(value)]


def find_input(model: nn.Module, given: object = None) -> ModelInput:
    """The input that a user gave, or the first of some likely ones that the model takes."""
    if given is not None:
        chosen = _as_input(given)
        error = _refusal(model, chosen)
        if error is not None:
            raise EinlinearError(
                what=f"the model fails on its input, {chosen}: {error}",
                rule="a tensor is given as model(x), a tuple as model(*x), a dict as model(**x)",
                fix="return an input that the model takes, on its device; leave labels out",
            )
        return chosen
    weight = next(model.parameters(), None)
    device = _CPU if weight is None else weight.device
    # Trials are made on the CPU: a token out of range would leave a GPU unusable.
    trial = model if device.type == "cpu" else deepcopy(model).cpu()
    first = ""
    for candidate in _candidates(trial):
        error = _refusal(trial, candidate)
        if error is None:
            return candidate.to(device)
        first = first or f"; {candidate} fails: {error}"
    raise EinlinearError(
        what=f"no input is known for {type(model).__name__}{first}",
        rule="without --inputs, the doctor tries tokens for models with embeddings, and random "
        "numbers as wide as the linear layers for others",
        fix=_INPUTS_FIX,
    )


def _as_input(given: object) -> ModelInput:
    if isinstance(given, Tensor):
        return ModelInput((given,))
    if isinstance(given, Mapping):
        return ModelInput((), dict(given))
    if isinstance(given, list | tuple):
        return ModelInput(tuple(given))
    raise EinlinearError(
        what=f"the inputs are {quote(given)}",
        rule="inputs are a tensor, a tuple of arguments, or a dict of keyword arguments",
        fix="return one of these, as you would call the model",
    )


def _refusal(model: nn.Module, candidate: ModelInput) -> str | None:
    """Why the model does not take an input; None if it does."""
    flags = {module: module.training for module in model.modules()}
    try:
        found = candidate.evaluate(model)
    except Exception as error:
        return f"{type(error).__name__}: {reason(error)}"
    finally:
        for module, flag in flags.items():
            module.training = flag
    return None if found else "it returns no tensor"


def _candidates(model: nn.Module) -> Iterator[ModelInput]:
    """Likely inputs of a model, its own example first."""
    own = getattr(model, "example_input_array", None)  # of Lightning
    if own is not None:
        example = _as_input(own)
        yield ModelInput(example.args, example.kwargs, "its example_input_array").to(_CPU)
    kwargs = _without_cache(model)
    rows = [m.num_embeddings for m in model.modules() if isinstance(m, nn.Embedding)]
    generator = torch.Generator().manual_seed(0)
    for limit in dict.fromkeys((rows[0], min(rows)) if rows else ()):
        for length in _LENGTHS:
            tokens = torch.randint(0, limit, (_BATCH, length), generator=generator)
            yield ModelInput((tokens,), kwargs, "made up")
    if rows:
        own = getattr(model, "dummy_inputs", None)  # of Hugging Face
        if isinstance(own, Mapping):
            yield ModelInput((), {**own, **kwargs}, "its dummy_inputs").to(_CPU)
        return
    for shape, dtype in _float_shapes(model):
        numbers = torch.randn(shape, generator=generator)
        yield ModelInput((numbers.to(dtype),), kwargs, "made up")


def _float_shapes(model: nn.Module) -> Iterator[tuple[tuple[int, ...], torch.dtype]]:
    """Shapes of inputs of numbers, with the type of the weights that multiply them."""
    config = getattr(model, "config", None)
    size, channels = [getattr(config, name, None) for name in ("image_size", "num_channels")]
    if isinstance(size, int) and isinstance(channels, int):
        yield (_BATCH, channels, size, size), next(model.parameters()).dtype
    widths = {site.d_in: site.weight.dtype for site in reversed(find_sites(model))}
    has_attention = any(isinstance(m, nn.MultiheadAttention) for m in model.modules())
    for width in list(reversed(widths))[:_MOST_WIDTHS]:
        flat, batched = (_BATCH * _LENGTHS[0], width), (_BATCH, _LENGTHS[0], width)
        for shape in (batched, flat) if has_attention else (flat, batched):
            yield shape, widths[width]


def _without_cache(model: nn.Module) -> dict[str, Any]:
    """Keyword arguments that keep models of Hugging Face from returning a cache for generation."""
    is_cached = "use_cache" in inspect.signature(model.forward).parameters
    return {"use_cache": False} if is_cached else {}


def _moved(value: Any, device: torch.device) -> Any:
    return value.to(device) if isinstance(value, Tensor) else value


def _shown(value: object) -> str:
    if not isinstance(value, Tensor):
        return quote(value)
    shape = " x ".join(map(str, value.shape)) or "one number"
    return f"{str(value.dtype).removeprefix('torch.')} {shape}"
