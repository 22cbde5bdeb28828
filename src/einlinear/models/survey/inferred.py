"""Modules without a rule: scalings inferred from names and shapes, and code for a rule."""

from __future__ import annotations

import re
import sys
from collections.abc import Mapping, Sequence
from keyword import iskeyword

import torch
from torch import nn
from torch.nn.utils import parametrize

from einlinear.layers.scaling import (
    MatrixAxes,
    Scaling,
    embedding_scaling,
    matrix_scaling,
    vector_scaling,
)

_GAINS = frozenset("weight gain gains scale gamma g alpha lambda1 layer_scale".split())
_BIASES = frozenset("bias beta b shift offset".split())
_NORM = re.compile(r"([Nn]orm|NORM|RMS|LayerScale|^Scale)(\d*d?|_?[Ff][Pp]32|Gated)_*$")
_TOKENS = re.compile(
    "((?P<one>cls|class|mask|dist|distillation)|reg|register|pos|position|positional)_?"
    "(token|emb|embed|embedding)s?(_vlm)?"
)
_VECTORS = re.compile("emb|token", re.IGNORECASE)
_ROUTER = re.compile("router|gate|gating", re.IGNORECASE)
_NUM_EXPERTS = ("num_experts", "n_experts", "num_local_experts", "n_routed_experts")
_CONTAINERS = (nn.ParameterList, nn.ParameterDict, parametrize.ParametrizationList)

_Own = Mapping[str, nn.Parameter]


def own_parameters(module: nn.Module) -> dict[str, nn.Parameter]:
    """Return the parameters that a module owns directly, by name."""
    return dict(module.named_parameters(recurse=False, remove_duplicate=False))


def inferred_scaling(module: nn.Module) -> dict[str, Scaling]:
    """Return the scaling of those parameters whose names and shapes leave no doubt.

    These are the gains and biases of a hand-written norm (a module that owns only vectors), tokens
    and positions that are added to the input, such as cls_token and pos_embed, routers, and the
    fused experts of Hugging Face. Values only decide where a gain starts, so a model has the same
    learning rates before training, after it and on the meta device.
    """
    own = own_parameters(module)
    is_leaf = not any(True for child in module.children() for _ in child.parameters())
    found = _norm(module, own) or _router(module, own) or _experts(own) if own and is_leaf else {}
    tokens = {name: p for name, p in own.items() if _are_tokens(name, p)}
    return {name: embedding_scaling(p.shape[-1]) for name, p in tokens.items()} | found


def unsure_gains(module: nn.Module) -> list[str]:
    """Return the gains of a hand-written norm that are all zero, or not one constant.

    Zeros are right if the norm multiplies by 1 + gain; otherwise they are memory that was never
    filled.
    """
    own, scaling = own_parameters(module), inferred_scaling(module)
    gains = {name: own[name] for name in _GAINS & scaling.keys() if scaling[name].kind == "vector"}
    return sorted(
        name
        for name, gain in gains.items()
        if gain.requires_grad and not gain.is_meta and not constant(gain)
    )


def constant(parameter: nn.Parameter) -> float | None:
    """Return the value that all entries share; None if they differ or cannot be read."""
    if not _is_readable(parameter) or not parameter.numel():
        return None
    values = parameter.detach().flatten()
    return float(values[0]) if bool((values == values[0]).all()) else None


def _is_readable(parameter: nn.Parameter) -> bool:
    return type(parameter.data) is torch.Tensor and not parameter.is_meta


def _varies(parameter: nn.Parameter) -> bool:
    """Return whether the values can be read and differ."""
    return _is_readable(parameter) and parameter.numel() > 1 and constant(parameter) is None


def _start(parameter: nn.Parameter, *, is_gain: bool) -> float:
    """Return the constant that a vector holds, or else the usual start: gains 1, biases 0."""
    start = constant(parameter)
    return float(is_gain) if start is None else start


def _are_tokens(name: str, parameter: nn.Parameter) -> bool:
    """Return whether a parameter has the name of a token or position, and the shape of vectors.

    A table of several classes may be a classifier, and a stack of tables may be matrices.
    """
    found = _TOKENS.fullmatch(name)
    if found is None or not 1 <= parameter.dim() <= 3:
        return False
    is_table = parameter.dim() == 2 and not found["one"]
    return parameter.dim() == 1 or parameter.shape[0] == 1 or is_table


def _norm(module: nn.Module, own: _Own) -> dict[str, Scaling]:
    """Return the scaling of a module that owns only gains and biases.

    A vector called weight may be a linear layer with one output, unless the class has the name of a
    norm; and so may any vector next to a bias of one number.
    """
    if not own.keys() <= _GAINS | _BIASES or any(p.dim() != 1 for p in own.values()):
        return {}
    if "weight" in own and not _NORM.search(type(module).__name__):
        return {}
    sizes = {name: p.numel() for name, p in own.items()}
    width = max(sizes.values())
    if any(size != width and (size != 1 or name in _BIASES) for name, size in sizes.items()):
        return {}
    return {
        name: vector_scaling(sizes[name], init_mean=_start(p, is_gain=name in _GAINS))
        for name, p in own.items()
    }


def _router(module: nn.Module, own: _Own) -> dict[str, Scaling]:
    """Return the scaling of a router (experts, width) whose module states its number of experts."""
    weight = own.get("weight")
    if weight is None or weight.dim() != 2 or not _ROUTER.search(type(module).__name__):
        return {}
    num_experts, width = weight.shape
    counts = [getattr(module, name, None) for name in _NUM_EXPERTS]
    biases = {name: p for name, p in own.items() if name != "weight"}
    are_biases = all(
        name.endswith("bias") and p.shape == (num_experts,) for name, p in biases.items()
    )
    if num_experts == width or num_experts not in counts or not are_biases:
        return {}
    vectors = dict.fromkeys(biases, vector_scaling(num_experts))
    return {"weight": matrix_scaling(width, num_experts)} | vectors


def _experts(own: _Own) -> dict[str, Scaling]:
    """Return the scaling of fused experts, stored as (out, in) or as (in, out).

    gate_up_proj stacks the gates and the values they multiply, so it has twice as many outputs as
    down_proj has inputs. That tells which axis is which.
    """
    names = ("gate_up_proj", "down_proj")
    biases = {f"{name}_bias" for name in names}
    if not set(names) <= own.keys() or not own.keys() <= {*names, *biases}:
        return {}
    first, last = (tuple(own[name].shape) for name in names)
    if len(first) != 3 or len(last) != 3 or first[0] != last[0]:
        return {}
    if (first[2], first[1]) == (last[1], 2 * last[2]):
        width, hidden = last[1:]
        inputs, outputs = -1, -2
    elif (first[1], first[2]) == (last[2], 2 * last[1]):
        hidden, width = last[1:]
        inputs, outputs = -2, -1
    else:
        return {}
    scaling = {
        names[0]: matrix_scaling(width, hidden, MatrixAxes((inputs,), (outputs,), (outputs, 2))),
        names[1]: matrix_scaling(hidden, width, MatrixAxes((inputs,), (outputs,))),
    }
    return scaling | {name: vector_scaling(own[name].shape[-1]) for name in biases & own.keys()}


def rule_code(name: str, module: nn.Module) -> str:
    """Return Python code, ready to paste, that registers a rule for the class of a module.

    Comments point out what shapes do not tell, such as which axis of a matrix is the input.
    """
    imported, kind = _reference(name, type(module))
    lines = ["import einlinear as el", *imported, "", ""]
    if kind.startswith("type("):
        lines.append("# Replace `model` by the name of your model.")
    lines.append(f"@el.register_scaling({kind})")
    lines.append(f"def {_snake(type(module).__name__)}_scaling(module):")
    if isinstance(module, _CONTAINERS):  # others may hold parameters with other names
        return "\n".join([*lines, _CONTAINER_RULE])
    entries = rule_entries(module, list(own_parameters(module)))
    return "\n".join([*lines, "    return {", *entries, "    }"])


_CONTAINER_RULE = """\
    # Vectors keep their values in init_; the rows of matrices are outputs, as in nn.Linear.
    # For the weight of a linear layer with one output use el.matrix_scaling(d, 1),
    # for a table of vectors el.embedding_scaling(d).
    return {
        name: el.vector_scaling(p.numel(), init_mean=None)
        if p.dim() < 2
        else el.matrix_scaling(p.shape[-1], p.shape[-2])
        for name, p in module.named_parameters(recurse=False)
    }"""


def rule_entries(module: nn.Module, names: Sequence[str]) -> list[str]:
    """Return the lines of a rule for some parameters, with comments on what to check."""
    known = inferred_scaling(module)
    lines = []
    for name in names:
        value, comments = _entry(module, name, known.get(name))
        lines += [f"        # {comment}" for comment in comments]
        lines.append(f"        {name!r}: {value},".replace("'", '"'))
    return lines


def _entry(module: nn.Module, key: str, known: Scaling | None) -> tuple[str, list[str]]:
    """Return the scaling of one parameter as Python code, and comments on what to check."""
    parameter = module.get_parameter(key)
    is_attribute = key.isidentifier() and not iskeyword(key)
    own = f"module.{key}" if is_attribute else f"getattr(module, {key!r})"
    vectors = f"el.embedding_scaling({own}.shape[-1])"
    shape = tuple(parameter.shape)
    if known is not None and known.kind == "embedding":
        return vectors, []
    if _is_vector(key, parameter):
        return _vector_entry(module, key, own, known)
    if len(shape) > 2 and sum(size > 1 for size in shape[:-1]) < 2:
        return vectors, []
    if _varies(parameter) and bool((parameter == parameter[:1]).all()) and len(parameter) > 1:
        # Set on purpose, as the decays of Mamba are.
        call = f"el.vector_scaling({own}.shape[0], init_mean=None)"
        return call, [f"{shape} with equal rows, not a random matrix: init_ keeps the values"]
    call = f"el.matrix_scaling(fan_in={own}.shape[-1], fan_out={own}.shape[-2])"
    stack = "" if len(shape) == 2 else "a stack of matrices "
    comments = [f"{stack}{shape}: if the last axis is not the input, swap the two"]
    if len(shape) == 2:
        comments.append(f"if it is a table of vectors: {vectors}")
    if _varies(parameter):
        comments.append("init_ resamples it; dataclasses.replace(..., init_mean=None) keeps it")
    return call, comments


def _vector_entry(
    module: nn.Module, key: str, own: str, known: Scaling | None
) -> tuple[str, list[str]]:
    """Return the entry of a vector: a gain, bias or token, or a linear layer with one output."""
    parameter, others = module.get_parameter(key), own_parameters(module)
    one_output = f"el.matrix_scaling(fan_in={own}.numel(), fan_out=1)"
    is_bias = key in _BIASES or "bias" in key
    may_sum = known is None and key in _GAINS and parameter.numel() > 1
    if may_sum and any(others[name].numel() == 1 for name in _BIASES & others.keys()):
        return one_output, ["next to a bias of one number: a linear layer with one output"]
    comments = []
    if may_sum and key == "weight":
        comments.append(f"if it is a linear layer with one output: {one_output}")
    if _varies(parameter) and known is None:
        if _VECTORS.search(key):
            return f"el.embedding_scaling({own}.shape[-1])", comments
        comments.append("its values differ: init_mean=None keeps them in init_")
        return f"el.vector_scaling({own}.numel(), init_mean=None)", comments
    start = _start(parameter, is_gain=not is_bias)
    if not is_bias and start in (0.0, 1.0):
        comments.append("init_mean: 1.0 for y * gain, 0.0 for y * (1 + gain)")
    return f"el.vector_scaling({own}.numel(), init_mean={start!r})", comments


def _is_vector(key: str, parameter: nn.Parameter) -> bool:
    """Return whether it is one vector, possibly broadcast, as (1, 1, d) is."""
    if parameter.dim() < 2:
        return True
    has_name = key != "weight" and key in _GAINS | _BIASES
    is_broadcast = parameter.dim() > 2 and (constant(parameter) is not None or _varies(parameter))
    return all(size == 1 for size in parameter.shape[:-1]) and (has_name or is_broadcast)


def _reference(name: str, kind: type[nn.Module]) -> tuple[list[str], str]:
    """Return how code can refer to a class: the import it needs, and an expression."""
    outer, *inner = kind.__qualname__.split(".")
    if kind.__module__ == "__main__" and "<locals>" not in inner:
        return [], kind.__qualname__
    found: object = getattr(sys.modules.get(kind.__module__), outer, None)
    for part in inner:
        found = getattr(found, part, None)
    if found is kind:
        return [f"from {kind.__module__} import {outer}"], kind.__qualname__
    return [], f"type(model.get_submodule({name!r}))".replace("'", '"')


def _snake(name: str) -> str:
    return re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", name).lower()
