"""How a model is run on calibration batches: in eval mode, with every linear layer called."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any

from torch import Tensor, nn

from einlinear.errors import EinlinearError, quote, reason
from einlinear.models.attention import ProjectedAttention
from einlinear.models.convert.names import LayerNames
from einlinear.models.saving.placing import put_module_

_MASK = "attention_mask"  # of Hugging Face: 0 where there is padding


def iterated(batches: Iterable[Any]) -> Iterable[Any]:
    """The batches; refuses one batch in their place."""
    if isinstance(batches, Tensor | Mapping) or not isinstance(batches, Iterable):
        raise EinlinearError(
            what=f"the calibration is {described(batches)}",
            rule="calibration is a list, a generator or a loader of batches",
            fix="put a single batch into a list: calibration=[batch]",
        )
    return batches


def called(model: nn.Module, batch: Any, number: int) -> Any:
    """The output of the model for a batch, however it is given."""
    if not isinstance(batch, Tensor | Mapping | list | tuple):
        raise EinlinearError(
            what=f"a calibration batch is {quote(batch)}",
            rule="a batch is a tensor, a tuple of arguments or a mapping of keyword arguments",
            fix="give batches as you would call the model: model(batch), model(*batch) or "
            "model(**batch)",
        )
    try:
        if isinstance(batch, Tensor):
            return model(batch)
        return model(**batch) if isinstance(batch, Mapping) else model(*batch)
    except EinlinearError:
        raise
    except Exception as error:
        kind = type(batch).__name__
        labels = "; if a loader adds labels, leave them out: calibration=(x for x, _ in loader)"
        raise EinlinearError(
            what=f"the model fails on calibration batch {number}, given as {kind}: {reason(error)}",
            rule="a tensor is given as model(batch), a tuple or list as model(*batch), a mapping "
            "as model(**batch)",
            fix="give batches that the model takes" + labels * isinstance(batch, list | tuple),
        ) from error


def mask_of(batch: Any, model: nn.Module) -> Tensor | None:
    """Which positions are not padding; None if unknown, or if two sequences have a mask each."""
    mask = batch.get(_MASK) if isinstance(batch, Mapping) else None
    is_pair = getattr(getattr(model, "config", None), "is_encoder_decoder", False)
    is_known = isinstance(mask, Tensor) and mask.dim() == 2 and not is_pair
    return mask.bool() if isinstance(mask, Tensor) and is_known else None


@contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """Put the model into eval mode; afterwards, every module has its flag again."""
    flags = {module: module.training for module in model.modules()}
    model.eval()
    try:
        yield
    finally:
        for module, flag in flags.items():
            module.training = flag


@contextmanager
def opened_attention(model: nn.Module, layers: Iterable[LayerNames]) -> Iterator[None]:
    """Replace attentions that pack measured projections by ones that call them, for a while.

    Encoders of torch leave their fused path, which calls no layers.
    """
    names = [name for group in layers for name in group]
    places = [
        (name, module)
        for name, module in model.named_modules(remove_duplicate=False)
        if isinstance(module, nn.MultiheadAttention)
        and any(other.startswith(f"{name}.") for other in names)
    ]
    opened = {id(module): ProjectedAttention(module, {}).eval() for _, module in places}
    with ExitStack() as stack:
        for name, module in places:
            stack.callback(put_module_, model, [name], module)
            put_module_(model, [name], opened[id(module)])
        for encoder in model.modules():
            if isinstance(encoder, nn.TransformerEncoder):
                stack.callback(setattr, encoder, "use_nested_tensor", encoder.use_nested_tensor)
                encoder.use_nested_tensor = False
            elif isinstance(encoder, nn.TransformerEncoderLayer):
                kept = encoder.activation_relu_or_gelu
                stack.callback(setattr, encoder, "activation_relu_or_gelu", kept)
                encoder.activation_relu_or_gelu = 0
        yield


def input_of(args: Any, kwargs: Any) -> Tensor:
    """The input of a linear layer, however it was given."""
    found: Tensor = args[0] if args else next(iter(kwargs.values()))
    return found


def visible(tensor: Tensor, mask: Tensor | None) -> Tensor:
    """The vectors that are not padding."""
    if mask is None or tensor.shape[:-1] != mask.shape:
        return tensor
    return tensor[mask.to(tensor.device)]


def described(value: object) -> str:
    """A value in a message, a tensor by its shape."""
    return f"a tensor of shape {tuple(value.shape)}" if isinstance(value, Tensor) else quote(value)
