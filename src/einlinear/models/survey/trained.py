"""Weights that look trained: loaded from a checkpoint, or frozen."""

from __future__ import annotations

from torch import nn

from einlinear.errors import quote

_LOADED = "_is_hf_initialized"  # Hugging Face sets it on every parameter that it has loaded
_WAS_LOADED = "_weight_conversions"  # it sets this on a loaded model; deep copies keep it


def checkpoints(model: nn.Module) -> dict[int, str]:
    """Return the checkpoint that each loaded parameter comes from, by the parameter's id.

    Parameters that the checkpoint did not contain, such as a new classifier, are left out. A deep
    copy loses the marks on its parameters, so all parameters of a copied model count as loaded.
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
    """Return why a weight looks trained; "" if it does not."""
    if id(weight) in loaded:
        return loaded_from(loaded[id(weight)])
    return "" if weight.requires_grad else "frozen: requires_grad is False"


def unmarked_source(model: nn.Module, loaded: dict[int, str]) -> str:
    """Return the checkpoint that a config names if no parameter is known to be loaded, or "".

    Such a model was built from a downloaded config, or it is a deep copy of a part of a loaded
    model. Nothing in the model tells the two apart.
    """
    return "" if loaded else next(filter(None, map(_source, model.modules())), "")


def loaded_from(source: str) -> str:
    """Return the reason to give for a loaded weight; a source of "" is an unnamed checkpoint."""
    return f"loaded from {source or 'a checkpoint'}"


def _is_marked(parameter: nn.Parameter) -> bool:
    return getattr(parameter, _LOADED, False) is True


def _source(module: nn.Module) -> str:
    """Return what Hugging Face loaded a model from, quoted; "" for other modules."""
    source = getattr(getattr(module, "config", None), "name_or_path", None)
    return quote(source) if isinstance(source, str) and source else ""
