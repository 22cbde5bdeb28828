"""Checks of conversion, training and saving: each takes a subject and returns a note, or raises."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Iterable
from contextlib import redirect_stderr
from io import StringIO
from math import isfinite
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from torch import Tensor, nn

from einlinear.bench.doctor.inputs import tensors_of
from einlinear.bench.doctor.reasons import CheckFailedError, CheckSkippedError, Note
from einlinear.bench.doctor.subject import Subject
from einlinear.models.mup.groups import param_groups
from einlinear.models.saving.folder import load, save
from einlinear.show.numbers import amount, counted, listed, short

_LR = 1e-3
_FEW = 3  # names in a reason


def check_convert(subject: Subject) -> Note:
    """Whether the layers can be replaced."""
    _, conversion = subject.convert("fresh")
    before, after = conversion.model_params_before, conversion.model_params_after
    replaced = len(conversion.swaps)
    return Note(
        f"{counted(replaced, 'layer')} replaced, {len(conversion.left)} left alone; "
        f"{amount(before)} -> {amount(after)} parameters",
        {"layers": replaced, "params_before": before, "params_after": after},
    )


def check_project(subject: Subject) -> Note:
    """Whether structured layers can start from the weights of the model."""
    model, conversion = subject.convert("project")
    check_finite(subject.inputs.evaluate(model))
    errors = [fit.error for fit in conversion.fits]
    low, high = [f"{100 * end:.0f}" for end in (min(errors), max(errors))]
    lost = f"{low} %" if low == high else f"{low} to {high} %"
    return Note(
        f"layers lose {lost} of their squared weights",
        {"least_error": min(errors), "most_error": max(errors)},
    )


def check_forward(subject: Subject, *, is_plain: bool = False) -> Note:
    """Whether the output is finite, and of the shape it had before."""
    before = subject.inputs.evaluate(subject.plain())
    after = before if is_plain else subject.inputs.evaluate(subject.converted())
    shapes = [[tuple(tensor.shape) for tensor in found] for found in (before, after)]
    if shapes[0] != shapes[1]:
        raise CheckFailedError(f"the output has the shapes {shapes[1]}, before: {shapes[0]}")
    check_finite(after)
    return Note(f"output {' x '.join(map(str, shapes[1][0])) or 'one number'}, finite")


def check_finite(tensors: Iterable[Tensor]) -> None:
    """Refuse outputs with NaN or infinity; masks of -inf are not told apart."""
    for tensor in tensors:
        if not torch.isfinite(tensor).all():
            raise CheckFailedError("the output has values that are not finite")


def check_backward(subject: Subject, *, is_plain: bool = False) -> Note:
    """Whether finite gradients reach every parameter that is trained."""
    model = subject.plain() if is_plain else subject.converted()
    gradients = differentiate_(subject, model)
    lost = [name for name, gradient in gradients.items() if gradient is None]
    if lost:
        raise CheckFailedError(
            f"no gradient reaches {listed(lost, _FEW)}. Fix: use it in the forward without detach, "
            "or freeze it with requires_grad_(False); if only other inputs use it, give --inputs"
        )
    bad = [n for n, g in gradients.items() if g is not None and not torch.isfinite(g).all()]
    if bad:
        raise CheckFailedError(f"gradients of {listed(bad, _FEW)} are not finite")
    return Note(
        f"finite gradients reach all {counted(len(gradients), 'parameter')}",
        {"parameters": len(gradients)},
    )


def differentiate_(subject: Subject, model: nn.Module) -> dict[str, Tensor | None]:
    """Go back from a random measure of the output; return the gradients of what is trained."""
    trained = trained_parameters(model.train())
    random_measure(tensors_of(subject.inputs.call(model))).backward()  # type: ignore[no-untyped-call]
    return {name: parameter.grad for name, parameter in trained.items()}


def trained_parameters(model: nn.Module) -> dict[str, nn.Parameter]:
    """The parameters that are not frozen, by name; skips the check if there are none."""
    found = {name: p for name, p in model.named_parameters() if p.requires_grad}
    if not found:
        raise CheckSkippedError("all parameters are frozen, so nothing is trained")
    return found


def random_measure(tensors: Iterable[Tensor]) -> Tensor:
    """A number to differentiate: all outputs times random numbers, since norms fix their sums."""
    open_ones = [tensor for tensor in tensors if tensor.requires_grad]
    if not open_ones:
        raise CheckFailedError(
            "the output has no gradient. Fix: remove torch.no_grad and detach from the forward"
        )
    return torch.stack([(t.float() * torch.randn_like(t).float()).sum() for t in open_ones]).sum()


def check_save(subject: Subject) -> Note:
    """Whether el.load gives the model that el.save wrote, bit for bit."""
    model = subject.awake()
    with TemporaryDirectory() as folder:
        path = Path(folder) / "model"
        save(model, path)
        loaded = load(path, subject.plain)
    _check_same(subject, model, loaded)
    return Note("el.save and el.load: the same weights and output, bit for bit")


def is_pretrained(model: nn.Module) -> bool:
    """Whether this is a model of Hugging Face."""
    library = sys.modules.get("transformers.modeling_utils")
    return library is not None and isinstance(model, library.PreTrainedModel)


def check_pretrained(subject: Subject) -> Note:
    """Whether from_pretrained gives the model that save_pretrained wrote, bit for bit."""
    model: Any = subject.awake()
    dtype = next(iter(model.parameters())).dtype
    bars = redirect_stderr(StringIO())
    with bars, TemporaryDirectory() as folder:
        model.save_pretrained(folder)
        loaded = type(model).from_pretrained(folder, dtype=dtype)
    _check_same(subject, model, loaded.to(model.device))
    return Note("save_pretrained and from_pretrained: the same, bit for bit")


def _check_same(subject: Subject, model: nn.Module, loaded: nn.Module) -> None:
    old, new = model.state_dict(), loaded.state_dict()
    changed = [name for name in old if name not in new or not _is_equal(old[name], new[name])]
    if changed:
        raise CheckFailedError(f"not as it was saved: {listed(changed, _FEW)}")
    outputs = [subject.inputs.evaluate(each) for each in (model, loaded)]
    if len(outputs[0]) != len(outputs[1]) or not all(map(_is_equal, *outputs)):
        raise CheckFailedError(
            "the loaded model has another output. Fix: register all that decides it as "
            "parameters or buffers, so that it is saved"
        )


def _is_equal(one: Any, other: Any) -> bool:
    if isinstance(one, Tensor) and isinstance(other, Tensor):
        return torch.equal(torch.nan_to_num(one), torch.nan_to_num(other))
    return bool(one == other)


def check_groups(subject: Subject) -> Note:
    """Whether every trained parameter has a learning rate of µP, with which Adam makes a step."""
    model = subject.converted()
    trained = trained_parameters(model)
    groups = param_groups(model, _LR, base=subject.plain())
    held = Counter(id(parameter) for group in groups for parameter in group["params"])
    missing = [name for name, parameter in trained.items() if held[id(parameter)] != 1]
    if missing:
        raise CheckFailedError(f"not in exactly one group: {listed(missing, _FEW)}")
    rates = [group["lr"] for group in groups]
    if not all(isfinite(rate) and rate > 0 for rate in rates):
        raise CheckFailedError(f"learning rates are {listed([short(rate) for rate in rates])}")
    optimizer = torch.optim.Adam(groups)
    differentiate_(subject, model)
    optimizer.step()
    broken = [name for name, p in model.named_parameters() if not torch.isfinite(p).all()]
    if broken:
        raise CheckFailedError(f"not finite after a step of Adam: {listed(broken, _FEW)}")
    low, high = min(rates), max(rates)
    return Note(
        f"{counted(len(groups), 'group')}, rates {short(low)} to {short(high)} for lr {short(_LR)}",
        {"groups": len(groups), "lowest_lr": low, "highest_lr": high},
    )
