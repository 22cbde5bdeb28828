"""What each linear layer of a model sees on calibration batches: second moments on both sides.

The moments of inputs say how much an error of the weight changes the outputs of a layer. Those of
gradients say how much a change of these outputs changes the output of the model. Gradients are of
a random measure of that output: of random signs times all its numbers, whose mean squared gradient
is that of the squared change of the output; of logits, of the log-probability of a class drawn from
them, whose mean squared gradient is the Fisher information.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn

from einlinear.errors import EinlinearError, quote
from einlinear.layers.projection.metric import Metric
from einlinear.layers.projection.moments import Moments
from einlinear.models.attention import ProjectedAttention
from einlinear.models.convert.names import LayerNames
from einlinear.models.saving.placing import put_module_

Weighting = Literal["inputs", "both"]
LossOf = Callable[[Any, Any], Tensor]
"""From the output of a model and its batch to a loss."""

_SEED = 0
_MASK = "attention_mask"  # of Hugging Face: 0 where there is padding
_NAMED = ("logits", "last_hidden_state")  # the output to measure, if a model returns several


@dataclass(frozen=True, slots=True)
class LayerMoments:
    """The second moments of the inputs of a layer and of the gradients of its outputs."""

    inputs: Moments
    outputs: Moments | None

    @property
    def metric(self) -> Metric:
        """What errors of the weight count; the Frobenius norm if the layer was never called."""
        outputs = None if self.outputs is None or not self.outputs.count else self.outputs.mean
        return Metric(self.inputs.mean if self.inputs.count else None, outputs)


def measure_moments(
    model: nn.Module,
    layers: Mapping[LayerNames, tuple[int, int]],
    batches: Iterable[Any],
    *,
    weighting: Weighting = "both",
    loss: LossOf | None = None,
) -> dict[LayerNames, LayerMoments]:
    """Run the model on all batches, in eval mode, and return the moments of its layers.

    The model, its gradients and the random state are as before afterwards.

    Args:
        model: the model.
        layers: the layers to measure, with their widths.
        batches: inputs of the model: tensors, tuples of arguments, or mappings of keyword
            arguments. Positions that a mapping's attention_mask hides are left out.
        weighting: "inputs" measures only the inputs, which needs no gradients.
        loss: what to differentiate, from output and batch; by default, a random measure.
    """
    found = {
        names: LayerMoments(Moments(d_in), Moments(d_out) if weighting == "both" else None)
        for names, (d_in, d_out) in layers.items()
    }
    generator = torch.Generator().manual_seed(_SEED)
    count = 0
    with ExitStack() as stack:
        stack.enter_context(torch.set_grad_enabled(weighting == "both"))
        stack.enter_context(_evaluating(model))
        stack.enter_context(_opened_attention(model))
        watch = _Watch(found)
        stack.enter_context(watch.hooked(model))
        for batch in batches:
            count += 1
            watch.mask = _mask_of(batch)
            output = _called(model, batch)
            if weighting == "both":
                watch.differentiate(_measure(output, batch, watch.mask, loss, generator))
    if not count:
        raise EinlinearError(
            what="there are no calibration batches",
            rule="calibration runs the model on a few batches of typical inputs",
            fix="give a list of batches; a generator is empty after its first use",
        )
    return found


class _Watch:
    """Hooks that add what passes through layers to their moments."""

    def __init__(self, moments: Mapping[LayerNames, LayerMoments]) -> None:
        self.mask: Tensor | None = None
        self._moments = moments
        self._outputs: list[tuple[Moments, Tensor]] = []

    @contextmanager
    def hooked(self, model: nn.Module) -> Iterator[None]:
        with ExitStack() as stack:
            for names, found in self._moments.items():
                module = model.get_submodule(names[0])
                handle = module.register_forward_hook(self._hook(found))
                stack.callback(handle.remove)
            yield

    def _hook(self, found: LayerMoments) -> Callable[[nn.Module, Any, Tensor], Tensor | None]:
        def hook(module: nn.Module, args: Any, output: Tensor) -> Tensor | None:
            found.inputs.add(self._visible(args[0]))
            if found.outputs is None:
                return None
            watched = output if output.requires_grad else output.detach().requires_grad_()
            self._outputs.append((found.outputs, watched))
            return watched

        return hook

    def differentiate(self, measure: Tensor) -> None:
        """Add the gradients of a measure with respect to all outputs of this batch."""
        tensors = [tensor for _, tensor in self._outputs]
        gradients = torch.autograd.grad(measure, tensors, allow_unused=True)
        for (moments, _), gradient in zip(self._outputs, gradients, strict=True):
            if gradient is not None:
                moments.add(self._visible(gradient))
        self._outputs.clear()

    def _visible(self, tensor: Tensor) -> Tensor:
        """The vectors that are not padding."""
        if self.mask is None or tensor.shape[:-1] != self.mask.shape:
            return tensor
        return tensor[self.mask.to(tensor.device)]


def _measure(
    output: Any, batch: Any, mask: Tensor | None, loss: LossOf | None, generator: torch.Generator
) -> Tensor:
    """The number whose gradients say what matters."""
    if loss is not None:
        return loss(output, batch)
    name, numbers = _main_output(output)
    if mask is not None and numbers.shape[: mask.dim()] == mask.shape:
        numbers = numbers[mask.to(numbers.device)]
    numbers = numbers.float()
    if name == "logits":
        logs = numbers.flatten(0, -2).log_softmax(-1)
        drawn = torch.multinomial(logs.detach().exp().cpu(), 1, generator=generator)
        return logs.gather(1, drawn.to(logs.device)).sum()
    signs = torch.randint(0, 2, numbers.shape, generator=generator) * 2.0 - 1.0
    return (numbers * signs.to(numbers.device)).sum()


def _main_output(output: Any) -> tuple[str, Tensor]:
    """The output of a model that its errors are measured by, and its name if it has one."""
    if isinstance(output, Tensor):
        return "", output
    values = {}
    if isinstance(output, Mapping):
        values = dict(output)
    elif isinstance(output, list | tuple):
        values = {str(place): value for place, value in enumerate(output)}
    floating = {
        name: value
        for name, value in values.items()
        if isinstance(value, Tensor) and value.is_floating_point() and value.dim()
    }
    if not floating:
        raise EinlinearError(
            what=f"the model returns {type(output).__name__}, without a floating-point tensor",
            rule="calibration on both sides differentiates the output of the model",
            fix="give loss=, a function of output and batch, or weighting='inputs'",
        )
    name = next((known for known in _NAMED if known in floating), next(iter(floating)))
    return name, floating[name]


def _called(model: nn.Module, batch: Any) -> Any:
    if isinstance(batch, Tensor):
        return model(batch)
    if isinstance(batch, Mapping):
        return model(**batch)
    if isinstance(batch, list | tuple):
        return model(*batch)
    raise EinlinearError(
        what=f"a calibration batch is {quote(batch)}",
        rule="a batch is a tensor, a tuple of arguments or a mapping of keyword arguments",
        fix="give batches as you would call the model: model(batch), model(*batch) or "
        "model(**batch)",
    )


def _mask_of(batch: Any) -> Tensor | None:
    mask = batch.get(_MASK) if isinstance(batch, Mapping) else None
    return mask.bool() if isinstance(mask, Tensor) and mask.dim() == 2 else None


@contextmanager
def _evaluating(model: nn.Module) -> Iterator[None]:
    """Put the model into eval mode; afterwards, every module has its flag again."""
    flags = {module: module.training for module in model.modules()}
    model.eval()
    try:
        yield
    finally:
        for module, flag in flags.items():
            module.training = flag


@contextmanager
def _opened_attention(model: nn.Module) -> Iterator[None]:
    """Replace attentions that pack their projections by ones that call them, for a while.

    All of them: with one left, torch's encoder may take its fused path, which calls no layers.
    """
    places = [
        (name, module)
        for name, module in model.named_modules(remove_duplicate=False)
        if isinstance(module, nn.MultiheadAttention)
    ]
    opened = {id(module): ProjectedAttention(module, {}).eval() for _, module in places}
    try:
        for name, module in places:
            put_module_(model, [name], opened[id(module)])
        yield
    finally:
        for name, module in places:
            put_module_(model, [name], module)
