"""Parameters of modules that have no rule: those that name and shape tell, and code for others."""

from __future__ import annotations

import re
import sys
from collections.abc import Mapping, Sequence
from keyword import iskeyword

import torch
from torch import nn
from torch.nn.utils import parametrize

from einlinear.layers.scaling import (
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

Own = Mapping[str, nn.Parameter]


def free_scaling(module: nn.Module) -> dict[str, Scaling]:
    """The scaling of those parameters of a module that their names and shapes tell for sure.

    These are the gains and biases of a hand-written norm, that is of a module with nothing but
    vectors; tokens and positions that are added to the input, such as cls_token and pos_embed;
    routers; and the fused experts of Hugging Face. Values tell only where a gain starts, so that a
    model has the same rates before training, after it and on the meta device.
    """
    own = dict(module.named_parameters(recurse=False, remove_duplicate=False))
    is_leaf = not any(True for child in module.children() for _ in child.parameters())
    found = _norm(module, own) or _router(module, own) or _experts(own) if own and is_leaf else {}
    tokens = {name: p for name, p in own.items() if _are_tokens(name, p)}
    return {name: embedding_scaling(p.shape[-1]) for name, p in tokens.items()} | found


def unsure_gains(module: nn.Module) -> list[str]:
    """The gains of a hand-written norm whose start cannot be told: not one number, or all zero.

    A gain of zeros is right where the norm multiplies by 1 + gain, and else memory that was never
    filled.
    """
    own = dict(module.named_parameters(recurse=False, remove_duplicate=False))
    scaling = free_scaling(module)
    gains = {name: own[name] for name in _GAINS & scaling.keys() if scaling[name].kind == "vector"}
    return sorted(
        name
        for name, gain in gains.items()
        if gain.requires_grad and not gain.is_meta and not constant(gain)
    )


def constant(parameter: nn.Parameter) -> float | None:
    """The one number that all entries are; None if they differ or cannot be read."""
    plain = type(parameter.data) is torch.Tensor and not parameter.is_meta and parameter.numel()
    if not plain:
        return None
    values = parameter.detach().flatten()
    return float(values[0]) if bool((values == values[0]).all()) else None


def _are_tokens(name: str, parameter: nn.Parameter) -> bool:
    """Whether a parameter is called a token or a position, and has the shape of vectors.

    A table of several classes may be a classifier, and a stack of tables a layer's matrices.
    """
    found = _TOKENS.fullmatch(name)
    if found is None or not 1 <= parameter.dim() <= 3:
        return False
    if parameter.dim() == 3:
        return parameter.shape[0] == 1
    return parameter.dim() == 1 or parameter.shape[0] == 1 or not found["one"]


def _norm(module: nn.Module, own: Own) -> dict[str, Scaling]:
    """Gains and biases of a module that has nothing else.

    A vector that is called weight may also be a linear layer with one output, unless the class is
    called a norm; and so may any vector beside a bias of one number.
    """
    if not own.keys() <= _GAINS | _BIASES or any(p.dim() != 1 for p in own.values()):
        return {}
    if "weight" in own and not _NORM.search(type(module).__name__):
        return {}
    width = max(p.numel() for p in own.values())
    sizes = {name: p.numel() for name, p in own.items()}
    if any(size != width and (size != 1 or name in _BIASES) for name, size in sizes.items()):
        return {}
    starts = {name: constant(p) for name, p in own.items()}
    usual = {name: float(name in _GAINS) for name in own}
    return {
        name: vector_scaling(sizes[name], init_mean=usual[name] if start is None else start)
        for name, start in starts.items()
    }


def _router(module: nn.Module, own: Own) -> dict[str, Scaling]:
    """The matrix of a router, (experts, width), in a module that says how many experts it has."""
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
    return {"weight": matrix_scaling(width, num_experts)} | {
        name: vector_scaling(num_experts) for name in biases
    }


def _experts(own: Own) -> dict[str, Scaling]:
    """Fused experts: gate_up_proj and down_proj of all of them, as (out, in) or as (in, out).

    Gates and the values they multiply are stacked, so the first matrix makes twice as many numbers
    as the second reads. That tells which axis is which.
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
    elif (first[1], first[2]) == (last[2], 2 * last[1]):
        hidden, width = last[1:]
    else:
        return {}
    scaling = {names[0]: matrix_scaling(width, hidden), names[1]: matrix_scaling(hidden, width)}
    return scaling | {name: vector_scaling(own[name].shape[-1]) for name in biases & own.keys()}


def rule_code(name: str, module: nn.Module) -> str:
    """Python that registers a rule for the class of a module, complete and ready to paste.

    What shapes do not tell, such as which axis of a matrix is the input, is said in comments.
    """
    own = dict(module.named_parameters(recurse=False, remove_duplicate=False))
    imported, kind = _reference(name, type(module))
    lines = ["import einlinear as el", *imported, "", ""]
    if kind.startswith("type("):
        lines.append("# model is the model of the call: write your own name for it here.")
    lines.append(f"@el.register_scaling({kind})")
    lines.append(f"def {_snake(type(module).__name__)}_scaling(module):")
    if isinstance(module, _CONTAINERS):  # others may hold parameters of other names
        return "\n".join([*lines, *_CONTAINER])
    return "\n".join([*lines, "    return {", *rule_entries(module, list(own)), "    }"])


def rule_entries(module: nn.Module, names: Sequence[str]) -> list[str]:
    """The lines of a rule for some parameters of a module, with comments where to check them."""
    known = free_scaling(module)
    lines = []
    for name in names:
        value, comments = _entry(module, name, known.get(name))
        lines += [f"        # {comment}" for comment in comments]
        lines.append(f"        {name!r}: {value},".replace("'", '"'))
    return lines


_CONTAINERS = (nn.ParameterList, nn.ParameterDict, parametrize.ParametrizationList)
_CONTAINER = [
    "    # Vectors, which init_ leaves as they are, and matrices whose rows are outputs, as in",
    "    # nn.Linear. The weight of a linear layer with one output: el.matrix_scaling(d, 1).",
    "    # A table of vectors: el.embedding_scaling(d).",
    "    return {",
    "        name: el.vector_scaling(p.numel(), init_mean=None)",
    "        if p.dim() < 2",
    "        else el.matrix_scaling(p.shape[-1], p.shape[-2])",
    "        for name, p in module.named_parameters(recurse=False)",
    "    }",
]


def _entry(module: nn.Module, key: str, known: Scaling | None) -> tuple[str, list[str]]:
    """The scaling of one parameter as Python, and comments where it has to be checked."""
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
    if _has_equal_rows(parameter):
        call = f"el.vector_scaling({own}.shape[0], init_mean=None)"
        return call, [f"{shape}, all rows equal, so no random matrix: init_ keeps it"]
    call = f"el.matrix_scaling(fan_in={own}.shape[-1], fan_out={own}.shape[-2])"
    stack = "" if len(shape) == 2 else "a stack of matrices "
    comments = [f"{stack}{shape}: the last axis is the input, else swap the two"]
    if len(shape) == 2:
        comments.append(f"if it is a table of vectors: {vectors}")
    if _varies(parameter):
        comments.append("init_ draws it anew; dataclasses.replace(..., init_mean=None) keeps it")
    return call, comments


def _vector_entry(
    module: nn.Module, key: str, own: str, known: Scaling | None
) -> tuple[str, list[str]]:
    """The entry of a vector: gain, bias, token, or the weight of a linear layer of one output."""
    parameter = module.get_parameter(key)
    one_output = f"el.matrix_scaling(fan_in={own}.numel(), fan_out=1)"
    is_bias = key in _BIASES or "bias" in key
    may_sum = known is None and key in _GAINS and parameter.numel() > 1
    if may_sum and any(b in module._parameters and _size(module, b) == 1 for b in _BIASES):
        return one_output, ["beside a bias of one number: a linear layer with one output"]
    comments = []
    if may_sum and key == "weight":
        comments.append(f"if it is a linear layer with one output: {one_output}")
    if _varies(parameter) and known is None:
        if _VECTORS.search(key):
            return f"el.embedding_scaling({own}.shape[-1])", comments
        comments.append("its values differ: init_mean=None keeps them in init_")
        return f"el.vector_scaling({own}.numel(), init_mean=None)", comments
    start = constant(parameter)
    start = float(not is_bias) if start is None else start
    if not is_bias and start in (0.0, 1.0):
        comments.append("init_mean: 1.0 for y * gain, 0.0 for y * (1 + gain)")
    return f"el.vector_scaling({own}.numel(), init_mean={start!r})", comments


def _size(module: nn.Module, key: str) -> int:
    parameter = module._parameters[key]
    return 0 if parameter is None else parameter.numel()


def _is_vector(key: str, parameter: nn.Parameter) -> bool:
    """Whether it is one vector, also one that is broadcast, as (1, 1, d) is."""
    if parameter.dim() < 2:
        return True
    is_called_so = key != "weight" and key in _GAINS | _BIASES
    is_read = constant(parameter) is not None or _varies(parameter)
    is_broadcast = parameter.dim() > 2 and is_read
    return all(size == 1 for size in parameter.shape[:-1]) and (is_called_so or is_broadcast)


def _varies(parameter: nn.Parameter) -> bool:
    """Whether its values can be read and are not one number."""
    is_readable = type(parameter.data) is torch.Tensor and not parameter.is_meta
    return is_readable and parameter.numel() > 1 and constant(parameter) is None


def _has_equal_rows(parameter: nn.Parameter) -> bool:
    """Whether values were set on purpose, the same in every row, as the decays of Mamba are."""
    values = parameter.detach()
    return len(values) > 1 and _varies(parameter) and bool((values == values[:1]).all())


def _reference(name: str, kind: type[nn.Module]) -> tuple[list[str], str]:
    """How code can name a class: the import it needs, and the name."""
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
