"""Reasons a layer cannot be replaced: it does, holds or shares more than a linear layer does."""

from __future__ import annotations

import sys
from collections.abc import Hashable, Iterator
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from torch.nn.utils import parametrize

from einlinear.models.attention import PROJECTIONS, projection_params
from einlinear.models.survey.inferred import own_parameters

_HOOKS = {
    "_forward_pre_hooks": "forward pre-hook",
    "_forward_hooks": "forward hook",
    "_backward_pre_hooks": "backward pre-hook",
    "_backward_hooks": "backward hook",
    "_state_dict_pre_hooks": "state-dict pre-hook",
    "_state_dict_hooks": "state-dict hook",
    "_load_state_dict_pre_hooks": "load-state-dict pre-hook",
    "_load_state_dict_post_hooks": "load-state-dict post-hook",
}
_ADAPTERS = {
    "peft.tuners.tuners_utils": "BaseTunerLayer",
    "peft.utils.other": "AuxiliaryTrainingWrapper",
}
ADAPTER = "part of a PEFT adapter"
"""How reasons that name an adapter begin."""

_TENSOR_HOOKS = ("_backward_hooks", "_post_accumulate_grad_hooks")


@dataclass(frozen=True, slots=True)
class Surroundings:
    """What a model knows about its layers that the layers themselves do not.

    owners: the names of the parameters that occupy a piece of memory.
    holders: where modules are referenced outside the module tree, by id; a replaced layer would
        still be used there.
    adapters: the PEFT adapters that modules are part of, by id; an adapter only fits the weights of
        its base layer that it was trained with.
    """

    owners: dict[Hashable, list[str]]
    holders: dict[int, str]
    adapters: dict[int, str]

    @staticmethod
    def of(model: nn.Module) -> Surroundings:
        """Collect the surroundings of all layers of a model."""
        owners: dict[Hashable, list[str]] = {}
        holders: dict[int, str] = {}
        inside = {id(module) for module in model.modules()}
        for prefix, module in model.named_modules():
            for name, parameter in own_parameters(module).items():
                owners.setdefault(memory(parameter), []).append(f"{prefix}.{name}".lstrip("."))
            for key, value in vars(module).items():
                for held in _modules_in(value, inside) if key != "_modules" else ():
                    holders.setdefault(id(held), f"{key} of {prefix or 'the model'}")
            if compiled := module._modules.get("_orig_mod"):  # torch.compile calls this object
                holders[id(compiled)] = f"torch.compile at {prefix or 'the model'}"
        return Surroundings(owners, holders, adapters(model))

    def linear_obstacle(self, module: nn.Module) -> str:
        """Return why a linear layer cannot be replaced; "" if it can."""
        own = {name: getattr(module, name, None) for name in ("weight", "bias")}
        params: dict[str, Any] = {name: value for name, value in own.items() if value is not None}
        return _linear_obstacle(module, params) or self._held(module) or self._tied(params)

    def adapter(self, module: nn.Module) -> str:
        """Return the PEFT adapter that a module is part of; "" if there is none."""
        return self.adapters.get(id(module), "")

    def projection_obstacle(self, module: nn.MultiheadAttention, part: str) -> str:
        """Return why a projection of an attention cannot be replaced; "" if it can."""
        own = projection_params(module, part)
        # Replacing one projection also unpacks or copies the weights of the others.
        params = {
            k: p for name in PROJECTIONS[:3] for k, p in projection_params(module, name).items()
        }
        params |= own
        return (
            self.adapter(module)  # peft's adapter of an attention reads its packed weights
            or _attention_obstacle(module)
            or self._held(module)
            or self._held(module.out_proj)
            or self._tied(params)
            or _tensor_hook(params)
            or _plain_obstacle(own)
        )

    def _held(self, module: nn.Module) -> str:
        place = self.holders.get(id(module))
        return f"it is also held outside the module tree, by {place}" if place else ""

    def _tied(self, params: dict[str, nn.Parameter]) -> str:
        for parameter in params.values():
            names = self.owners.get(memory(parameter), [])
            if len(names) > 1:
                return f"its weights are tied: {' is '.join(names)}"
        return ""


def adapters(model: nn.Module) -> dict[int, str]:
    """Return the PEFT adapters that modules of a model are part of, by the modules' ids."""
    found: dict[int, str] = {}
    kinds = _adapter_classes()
    for prefix, module in model.named_modules() if kinds else ():
        if isinstance(module, kinds):
            kind = f"{type(module).__module__}.{type(module).__name__}"
            for part in module.modules():
                found.setdefault(id(part), f"{ADAPTER}, {prefix or 'the model'} ({kind})")
    return found


def memory(parameter: Tensor) -> Hashable:
    """Return a key that two parameters share if and only if they use the same memory."""
    if type(parameter) is nn.Parameter and not parameter.is_meta and parameter.data_ptr():
        return parameter.device, parameter.data_ptr(), parameter.numel()
    return id(parameter)


def linear_class(module: nn.Module) -> type[nn.Module] | None:
    """Return nn.Linear or the Conv1D of Hugging Face, if the module is one; otherwise None."""
    home = sys.modules.get("transformers.pytorch_utils")
    known: tuple[type[nn.Module] | None, ...] = (nn.Linear, getattr(home, "Conv1D", None))
    return next((kind for kind in known if kind is not None and isinstance(module, kind)), None)


def _adapter_classes() -> tuple[type[nn.Module], ...]:
    """Return the classes of peft's adapters; none if peft is not loaded."""
    found = [getattr(sys.modules.get(home), name, None) for home, name in _ADAPTERS.items()]
    return tuple(kind for kind in found if isinstance(kind, type))


def _modules_in(value: object, inside: set[int]) -> Iterator[nn.Module]:
    """Yield the modules in a value, inside lists, tuples, sets, dicts and foreign modules too."""
    seen: set[int] = set()
    stack = [value]
    while stack:
        item = stack.pop()
        if id(item) in seen:
            continue
        seen.add(id(item))
        if isinstance(item, nn.Module):
            yield item
            if id(item) not in inside:  # modules of the tree are visited on their own
                stack += vars(item).values()
        elif isinstance(item, dict):
            stack += [*item.keys(), *item.values()]
        elif isinstance(item, list | tuple | set | frozenset):
            stack += item


def _attention_obstacle(module: nn.MultiheadAttention) -> str:
    """Return why an attention cannot be replaced by a ProjectedAttention; "" if it can."""
    if module.bias_k is not None:
        return "its attention has add_bias_kv=True"
    if module.add_zero_attn:
        return "its attention has add_zero_attn=True"
    if method := _own_method(module, nn.MultiheadAttention):
        return f"its attention is a {type(module).__name__}, which overrides {method}"
    return _attached(module) or _attached(module.out_proj)


def _linear_obstacle(module: nn.Module, params: dict[str, nn.Parameter]) -> str:
    """Return what a layer does or holds beyond a linear layer; "" if nothing."""
    if any(map(is_lazy, params.values())):
        return "its width is not known yet: it is lazy, so run the model once"
    if attached := _attached(module):
        return attached
    kind = type(module)
    if method := _own_method(module, linear_class(module)):
        return f"it is a {kind.__module__}.{kind.__name__}, which overrides {method}"
    more = [*dict(module.named_parameters()), *dict(module.named_buffers())]
    if more := [name for name in more if name not in ("weight", "bias")]:
        return f"it also holds {', '.join(more)}"
    return _plain_obstacle(params) or _tensor_hook(params)


def _own_method(module: nn.Module, plain: type[nn.Module] | None) -> str:
    """Return the overridden method that may compute something else; "" if there is none."""
    for method in ("forward", "__call__"):
        if getattr(type(module), method) is not getattr(plain, method, None):
            return method
    return ""


def _attached(module: nn.Module) -> str:
    """Return what is attached to a module and would be lost with it; "" if nothing is."""
    if parametrize.is_parametrized(module):
        lists = module.get_submodule("parametrizations").children()
        parts = ", ".join(type(part).__name__ for parts in lists for part in parts.children())
        return f"it has a parametrization: {parts}"
    for attribute, kind in _HOOKS.items():
        for hook in getattr(module, attribute).values():
            return f"it has a {kind}, {_hook_name(hook)}"
    return "its forward was replaced on the instance" if "forward" in vars(module) else ""


def _tensor_hook(params: dict[str, nn.Parameter]) -> str:
    """Return which parameter has a hook that would be lost with it; "" if none has."""
    for name, parameter in params.items():
        for attribute in _TENSOR_HOOKS:
            for hook in (getattr(parameter, attribute, None) or {}).values():
                return f"its {name} has a gradient hook, {_hook_name(hook)}"
    return ""


def _hook_name(hook: object) -> str:
    return str(getattr(hook, "__name__", type(hook).__name__))


def _plain_obstacle(params: dict[str, nn.Parameter]) -> str:
    """Return which parameter is quantised, sharded or not of floats; "" if none is."""
    for name, parameter in params.items():
        if type(parameter) is not nn.Parameter:
            return f"its {name} is a {type(parameter).__name__}, not a plain nn.Parameter"
        if not parameter.is_floating_point():
            return f"its {name} has dtype {parameter.dtype}"
    return ""
