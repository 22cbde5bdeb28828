"""Checks of programs made from a model: torch.compile, torch.export, ONNX."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, redirect_stderr
from importlib import import_module
from importlib.util import find_spec
from io import StringIO
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor, nn

from einlinear.bench.doctor.checks import check_finite, random_measure
from einlinear.bench.doctor.inputs import tensors_of
from einlinear.bench.doctor.reasons import CheckFailedError, CheckSkippedError, Note, causes
from einlinear.bench.doctor.subject import Subject
from einlinear.show.numbers import counted, listed, short

_MOST_ERROR = {torch.float64: 1e-8, torch.float32: 1e-3, torch.float16: 1e-2, torch.bfloat16: 5e-2}
"""How far outputs may differ, relative to the largest: sums are taken in other orders."""
_ONNX = ("onnx", "onnxscript", "onnxruntime")
_NO_COMPILER = ("InvalidCxxCompiler", "TritonMissing")


def check_compile(subject: Subject, *, is_plain: bool = False) -> Note:
    """Whether torch.compile gives the same output, and gradients."""
    model = subject.awake(is_plain=is_plain).eval()
    expected = subject.inputs.evaluate(model)
    compiled: Any = torch.compile(model)
    with _compiling() as counters, redirect_stderr(StringIO()):
        try:
            found = tensors_of(subject.inputs.call(compiled))
            has_backward = any(tensor.requires_grad for tensor in found)
            if has_backward:
                random_measure(found).backward()  # type: ignore[no-untyped-call]
        except Exception as error:
            if any(type(each).__name__ in _NO_COMPILER for each in causes(error)):
                raise CheckSkippedError("torch.compile needs a C++ compiler such as g++") from error
            raise
        graphs = int(counters["stats"]["unique_graphs"])
        breaks = [*counters["graph_break"], *counters["unimplemented"]]
    if not graphs:
        raise CheckFailedError(
            "torch.compile compiles none of it. Fix: remove torch.compiler.disable from the forward"
        )
    why = f" ({breaks[0].strip().splitlines()[0]})" if breaks else ""
    parts = f"in {counted(graphs, 'graph')}{why if graphs > 1 else ''}"
    return _compared(found, expected, f"forward{' and backward' * has_backward}, {parts}")


@contextmanager
def _compiling() -> Iterator[Any]:
    """A fresh compiler, whose files are removed afterwards; returns its counters."""
    dynamo = import_module("torch._dynamo")
    with TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        places = {"TORCHINDUCTOR_CACHE_DIR": folder, "TRITON_CACHE_DIR": str(Path(folder) / "t")}
        with patch.dict(os.environ, places):
            dynamo.reset()
            dynamo.utils.counters.clear()
            try:
                yield dynamo.utils.counters
            finally:
                dynamo.reset()


def check_export(subject: Subject, *, is_plain: bool = False) -> Note:
    """Whether the program of torch.export gives the same output."""
    model = subject.awake(is_plain=is_plain).eval()
    expected = subject.inputs.evaluate(model)
    with torch.no_grad(), redirect_stderr(StringIO()):  # torch prints the program if it fails
        program = torch.export.export(model, subject.inputs.args, subject.inputs.kwargs)
        found = tensors_of(subject.inputs.call(program.module()))
    return _compared(found, expected, "torch.export")


def check_onnx(subject: Subject, *, is_plain: bool = False) -> Note:
    """Whether onnxruntime gives the same output as torch."""
    missing = [name for name in _ONNX if find_spec(name) is None]
    if missing:
        raise CheckSkippedError(f"pip install {' '.join(missing)}")
    model = subject.awake(is_plain=is_plain).eval()
    expected = subject.inputs.evaluate(model)
    quiet = redirect_stderr(StringIO())
    with torch.no_grad(), quiet, TemporaryDirectory() as folder:
        path = str(Path(folder) / "model.onnx")
        _export_onnx(model, subject, path)
        found = _run_onnx(path, subject)
    return _compared(found, [tensor.cpu() for tensor in expected], "onnxruntime")


def _export_onnx(model: nn.Module, subject: Subject, path: str) -> None:
    args, kwargs = subject.inputs.args, subject.inputs.kwargs
    torch.onnx.export(model, args, path, kwargs=kwargs, dynamo=True, verbose=False)


def _run_onnx(path: str, subject: Subject) -> list[Tensor]:
    runtime = import_module("onnxruntime")
    session = runtime.InferenceSession(path, providers=["CPUExecutionProvider"])
    names = [entry.name for entry in session.get_inputs()]
    tensors = tensors_of([subject.inputs.args, subject.inputs.kwargs])
    if len(names) != len(tensors):
        raise CheckFailedError(f"the program takes {listed(names)}, not {len(tensors)} inputs")
    arrays = {name: t.detach().cpu().numpy() for name, t in zip(names, tensors, strict=True)}
    return [torch.from_numpy(array) for array in session.run(None, arrays)]


def _compared(found: Sequence[Tensor], expected: Sequence[Tensor], begin: str) -> Note:
    """Say how much outputs differ, after `begin`; raises if that is more than rounding."""
    check_finite(expected)
    if len(found) != len(expected):
        raise CheckFailedError(
            f"it returns {len(found)} tensors; the model returns {len(expected)}"
        )
    worst = 0.0
    for one, other in zip(found, expected, strict=True):
        if one.shape != other.shape:
            raise CheckFailedError(f"its output is {tuple(one.shape)}, not {tuple(other.shape)}")
        if not other.is_floating_point() or not other.numel():
            continue
        scale = other.double().abs().max().clamp_min(torch.finfo(other.dtype).tiny)
        error = float((one.detach().double() - other.double()).abs().max() / scale)
        if not error <= _MOST_ERROR.get(other.dtype, 0.05):
            raise CheckFailedError(
                f"its output differs by {short(100 * error)} % of the largest value. Fix: draw "
                "no random numbers in eval mode; if the model draws none, report this to einlinear"
            )
        worst = max(worst, error)
    said = f"differs by {short(worst, 1)} at most" if worst else "the same output"
    return Note(f"{begin}; {said}", {"error": worst})
