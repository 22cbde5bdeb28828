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
from dataclasses import dataclass, is_dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn

from einlinear.errors import EinlinearError
from einlinear.layers.projection.metric import Metric
from einlinear.layers.projection.moments import Moments
from einlinear.models.convert.batches import (
    called,
    described,
    evaluating,
    input_of,
    iterated,
    mask_of,
    opened_attention,
    visible,
)
from einlinear.models.convert.names import LayerNames
from einlinear.show.progress import show_nothing

Weighting = Literal["inputs", "both"]
LossOf = Callable[[Any, Any], Tensor]
"""From the output of a model and its batch to a loss."""

_SEED = 0
_NAMED = ("logits", "last_hidden_state")  # the output to measure, if a model returns several


@dataclass(frozen=True, slots=True)
class LayerMoments:
    """The second moments of the inputs of a layer and of the gradients of its outputs."""

    inputs: Moments
    outputs: Moments | None

    @property
    def has_gradient(self) -> bool:
        """Whether the output of the model was seen to depend on the layer."""
        return self.outputs is not None and not self.outputs.is_zero

    @property
    def metric(self) -> Metric:
        """What errors of the weight count; the Frobenius norm if the layer was never called.

        If no gradient reached the layer, its inputs decide alone.
        """
        outputs = self.outputs.mean if self.outputs is not None and self.has_gradient else None
        return Metric(self.inputs.mean if self.inputs.count else None, outputs)


def measure_moments(
    model: nn.Module,
    layers: Mapping[LayerNames, tuple[int, int]],
    batches: Iterable[Any],
    *,
    weighting: Weighting = "both",
    loss: LossOf | None = None,
    on_progress: Callable[[str], None] = show_nothing,
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
        on_progress: called with a text for each batch.
    """
    found = {
        names: LayerMoments(
            Moments(d_in, what=f"inputs of layer {names[0]!r}"),
            Moments(d_out, what=f"gradients at layer {names[0]!r}")
            if weighting == "both"
            else None,
        )
        for names, (d_in, d_out) in layers.items()
    }
    generator = torch.Generator().manual_seed(_SEED)
    count = 0
    with ExitStack() as stack:
        stack.enter_context(torch.random.fork_rng(devices=[]))
        stack.enter_context(torch.inference_mode(False))
        stack.enter_context(torch.set_grad_enabled(weighting == "both"))
        stack.enter_context(evaluating(model))
        stack.enter_context(opened_attention(model, layers))
        watch = _Watch(found)
        stack.enter_context(watch.hooked(model))
        for batch in iterated(batches):
            count += 1
            on_progress(f"calibrating: batch {count}")
            watch.mask = mask_of(batch, model)
            output = called(model, batch, count)
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
        self._is_going_back = False

    @contextmanager
    def hooked(self, model: nn.Module) -> Iterator[None]:
        with ExitStack() as stack:
            for names, found in self._moments.items():
                module = model.get_submodule(names[0])
                handle = module.register_forward_hook(self._hook(found), with_kwargs=True)
                stack.callback(handle.remove)
            yield

    def _hook(self, found: LayerMoments) -> Callable[..., Tensor | None]:
        def hook(module: nn.Module, args: Any, kwargs: Any, output: Tensor) -> Tensor | None:
            if self._is_going_back:  # checkpointed modules are called again
                return None
            found.inputs.add(visible(input_of(args, kwargs), self.mask))
            if found.outputs is None:
                return None
            watched = output if output.requires_grad else output.detach().requires_grad_()
            self._outputs.append((found.outputs, watched))
            return watched.clone()  # what follows may write into it

        return hook

    def differentiate(self, measure: Tensor) -> None:
        """Add the gradients of a measure with respect to all outputs of this batch."""
        tensors = [tensor for _, tensor in self._outputs]
        self._is_going_back = True
        gradients = torch.autograd.grad(measure, tensors, allow_unused=True) if tensors else ()
        self._is_going_back = False
        for (moments, _), gradient in zip(self._outputs, gradients, strict=True):
            if gradient is not None:
                moments.add(visible(gradient, self.mask))
        self._outputs.clear()


def _measure(
    output: Any, batch: Any, mask: Tensor | None, loss: LossOf | None, generator: torch.Generator
) -> Tensor:
    """The number whose gradients say what matters."""
    if loss is not None:
        found = loss(output, batch)
        if not (isinstance(found, Tensor) and found.dim() == 0 and found.requires_grad):
            raise EinlinearError(
                what=f"loss returns {described(found)}",
                rule="the loss of a batch is one number that can be differentiated",
                fix="return a tensor computed from the output of the model, such as losses.sum()",
            )
        return found
    name, numbers = _main_output(output)
    if not numbers.requires_grad:
        raise EinlinearError(
            what="the output of the model cannot be differentiated",
            rule="calibration on both sides needs gradients of the output",
            fix="remove no_grad and detach from the model's forward, or give weighting='inputs'",
        )
    if mask is not None and numbers.shape[:-1] == mask.shape:
        numbers = numbers[mask.to(numbers.device)]
    numbers = numbers.float()
    if name == "logits" and numbers.shape[-1] > 1:
        logs = numbers.flatten(0, -2).log_softmax(-1)
        drawn = torch.multinomial(logs.detach().exp().cpu(), 1, generator=generator)
        return logs.gather(1, drawn.to(logs.device)).sum()
    signs = torch.randint(0, 2, numbers.shape, generator=generator) * 2.0 - 1.0
    return (numbers * signs.to(numbers.device)).sum()


def _main_output(output: Any) -> tuple[str, Tensor]:
    """The output of a model that its errors are measured by, and its name if it has one."""
    if isinstance(output, Tensor):
        return "", output
    values: dict[str, Any] = {}
    if isinstance(output, Mapping):
        values = dict(output)
    elif is_dataclass(output):
        values = dict(vars(output))
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
