"""Weights that look trained: loaded from a checkpoint, or frozen."""

from __future__ import annotations

from torch import nn

from einlinear.errors import quote

_LOADED = "_is_hf_initialized"  # what Hugging Face sets on every parameter that it has loaded
_WAS_LOADED = "_weight_conversions"  # what it sets on a model that it has loaded; copies keep it


def checkpoints(model: nn.Module) -> dict[int, str]:
    """The checkpoint that each loaded parameter of a model comes from, by the parameter's id.

    Parameters that a checkpoint did not hold, such as a new classifier, are not among them. A
    deep copy loses the marks of parameters; there all parameters of the model count as loaded.
    """
    found = {id(parameter): "" for parameter in model.parameters() if _is_marked(parameter)}
    for module in model.modules():
        if source := _source(module):
            own = list(module.parameters())
            marked = [parameter for parameter in own if _is_marked(parameter)]
            is_copy = not marked and _WAS_LOADED in vars(module)
            found |= dict.fromkeys(map(id, own if is_copy else marked), source)
    return found


def why_trained(weight: nn.Parameter, loaded: dict[int, str]) -> str:
    """Why a weight looks trained; "" if it does not."""
    if id(weight) in loaded:
        return loaded_from(loaded[id(weight)])
    return "" if weight.requires_grad else "frozen: requires_grad is False"


def unmarked_source(model: nn.Module, loaded: dict[int, str]) -> str:
    """The checkpoint that a config names although no parameter is known to be loaded; "" if none.

    The model was built from a downloaded config, or it is a copy of a part of a loaded model: a
    deep copy keeps nothing that tells the two apart.
    """
    return "" if loaded else next(filter(None, map(_source, model.modules())), "")


def loaded_from(source: str) -> str:
    """The reason that is a checkpoint, "" being one without a name."""
    return f"loaded from {source or 'a checkpoint'}"


def _is_marked(parameter: nn.Parameter) -> bool:
    return getattr(parameter, _LOADED, False) is True


def _source(module: nn.Module) -> str:
    """What a model of Hugging Face was loaded from, quoted; "" for all other modules."""
    source = getattr(getattr(module, "config", None), "name_or_path", None)
    return quote(source) if isinstance(source, str) and source else ""
