"""What a method of a module computes, as a recipe that can be followed step by step.

torch.fx traces the method. A recipe is found only if it calls nothing but modules, activations
between linear layers, products of gated nets and sums of residual connections: whatever else a
method does might not be the same for every input.
"""

from __future__ import annotations

import operator
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from types import BuiltinFunctionType, FunctionType
from typing import Any, NamedTuple

import torch
from torch import Tensor, fx, nn
from torch.nn import functional

from einlinear.layers.engine.abi import Activation
from einlinear.layers.linear import EinsumLinear, SumLinear
from einlinear.layers.moe.routing import Routed
from einlinear.models.adapted import AdaptedLinear
from einlinear.models.fusing.feedforward import (
    FUNCTIONS,
    feed_forward,
    has_global_hooks,
    has_hooks,
)
from einlinear.models.survey.obstacles import linear_class

_LINEAR = (EinsumLinear, SumLinear, Routed, AdaptedLinear)
_SETTINGS = (bool, int, float, str, type(None), FunctionType, BuiltinFunctionType)
_OWN = frozenset(vars(nn.Module()))
_FUNCTIONS: dict[Any, Activation] = {
    functional.relu: Activation.RELU,
    torch.relu: Activation.RELU,
    functional.gelu: Activation.GELU,
    functional.silu: Activation.SILU,
}
_HUGGING_FACE = {
    "GELUActivation": Activation.GELU,
    "GELUTanh": Activation.GELU_TANH,
    "NewGELUActivation": Activation.GELU_TANH,
    "PytorchGELUTanh": Activation.GELU_TANH,
    "SiLUActivation": Activation.SILU,
}


class Net(NamedTuple):
    """A feed-forward net inside a module, by the names of its layers there.

    ups: up; or gate and up, whose results are multiplied.
    activation: its name, or that of a module, which may be replaced by another.
    """

    ups: tuple[str, ...]
    activation: Activation | str
    dropouts: tuple[str, ...]
    down: str

    @property
    def layers(self) -> tuple[str, ...]:
        """The names of its linear layers."""
        return (*self.ups, self.down)

    def __call__(self, module: nn.Module, x: Tensor) -> Tensor:
        """Apply the net, in one pass if possible, or layer by layer."""
        *ups, down = (module.get_submodule(name) for name in self.layers)
        dropouts: list[Any] = [module.get_submodule(name) for name in self.dropouts]
        known, function = self._activation_in(module)
        is_plain = not any([has_hooks(d) or (d.training and d.p > 0) for d in dropouts])
        if known is not None and is_plain:
            y = feed_forward([*ups, down], known, x)
            if y is not None:
                return y
        a: Tensor = function(ups[0](x))
        if len(ups) > 1:
            a = a * ups[1](x)
        for dropout in dropouts:
            a = dropout(a)
        made: Tensor = down(a)
        return made

    def _activation_in(
        self, module: nn.Module
    ) -> tuple[Activation | None, Callable[[Tensor], Tensor]]:
        if isinstance(self.activation, Activation):
            return self.activation, FUNCTIONS[self.activation]
        function = module.get_submodule(self.activation)
        return None if has_hooks(function) else activation_of(function), function


class Action(NamedTuple):
    """One action of a recipe: a net, the name of a module, or a sum with a factor for the second.

    inputs: numbers of the values that it takes: 0 is the input, k the result of the k-th action.
    """

    what: Net | str | float
    inputs: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Recipe:
    """What a method computes from its one input.

    inside: the modules, by name, whose code is part of it.
    settings: plain attributes of these modules and their values; the recipe holds for these only.
    """

    actions: tuple[Action, ...]
    result: int
    inside: tuple[str, ...]
    settings: tuple[tuple[str, str, Any], ...]

    @property
    def nets(self) -> tuple[Net, ...]:
        """Its feed-forward nets."""
        return tuple(action.what for action in self.actions if isinstance(action.what, Net))

    def holds(self, module: nn.Module) -> bool:
        """Whether the module still computes this: its settings are the same, nothing is hooked."""
        for path, name, value in self.settings:
            if vars(module.get_submodule(path)).get(name, ...) != value:
                return False
        inside = [module.get_submodule(path) for path in self.inside if path]
        return not has_global_hooks() and not any([has_hooks(part) for part in inside])

    def follow(self, module: nn.Module, x: Tensor) -> Tensor:
        """Compute what the method computes."""
        values = [x]
        for what, inputs in self.actions:
            given = [values[i] for i in inputs]
            if isinstance(what, Net):
                values.append(what(module, given[0]))
            elif isinstance(what, str):
                values.append(module.get_submodule(what)(given[0]))
            else:
                values.append(torch.add(*given, alpha=what))
        return values[self.result]


def activation_of(module: nn.Module) -> Activation | None:
    """The activation that a module computes; None if it is not a known one."""
    kind = type(module)
    if kind is nn.GELU:
        return _gelu(str(getattr(module, "approximate", "")))
    if kind in (nn.ReLU, nn.SiLU):
        return Activation.RELU if kind is nn.ReLU else Activation.SILU
    home = sys.modules.get("transformers.activations")
    found = _HUGGING_FACE.get(kind.__name__)
    return found if found is not None and kind is getattr(home, kind.__name__, None) else None


def is_linear(module: nn.Module) -> bool:
    """Whether a module is a linear layer, structured or not."""
    return isinstance(module, _LINEAR) or linear_class(module) is not None


def find_recipe(module: nn.Module, method: str) -> Recipe | str:
    """What a method of a module computes, or why that is not known."""
    found: list[tuple[list[Action], int]] = []
    inside: list[str] = []
    for is_training in (True, False):
        tracer = _Tracer(method)
        try:
            with _prepared(module, is_training):
                graph = tracer.trace(module)
        except Exception as error:  # whatever the code of a module raises when it is traced
            reason = str(error).strip().splitlines() or [""]
            return f"torch.fx cannot trace it: {type(error).__name__} {reason[0]}".strip()
        made = _actions(graph, module)
        if isinstance(made, str):
            return made
        found.append(made)
        inside = tracer.inside
    if found[0] != found[1]:
        return "it computes something else in training"
    actions, result = found[0]
    return Recipe(tuple(actions), result, tuple(inside), tuple(_settings(module, inside)))


class _Tracer(fx.Tracer):
    """Looks inside modules that hold others, except linear layers."""

    def __init__(self, method: str) -> None:
        super().__init__()
        self.traced_func_name = method
        self.inside: list[str] = [""]

    def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
        if is_linear(m) or not any(True for _ in m.children()):
            return True
        self.inside.append(module_qualified_name)
        return False


@contextmanager
def _prepared(module: nn.Module, is_training: bool) -> Iterator[None]:
    """Trace with all training flags set; afterwards all attributes are as before."""
    before = [(inner, dict(vars(inner))) for inner in module.modules()]
    try:
        for inner, _ in before:
            inner.training = is_training
        yield
        for inner, state in before:
            changed = [
                k for k, v in vars(inner).items() if k != "training" and state.get(k) is not v
            ]
            if changed:
                raise RuntimeError(f"it sets {changed[0]}")
    finally:
        for inner, state in before:
            vars(inner).clear()
            vars(inner).update(state)


def _settings(module: nn.Module, inside: list[str]) -> Iterator[tuple[str, str, Any]]:
    for path in inside:
        for name, value in vars(module.get_submodule(path)).items():
            if name not in _OWN and isinstance(value, _SETTINGS):
                yield path, name, value


def _actions(graph: fx.Graph, module: nn.Module) -> tuple[list[Action], int] | str:
    """The actions of a graph and the number of its result; or why it is not only such actions."""
    nodes = list(graph.nodes)
    nets = {node: place for node in nodes if (place := _net_at(node, module)) is not None}
    if not nets:
        return "it has no linear layer after an activation of another"
    within = {part for _, parts, _ in nets.values() for part in parts}
    actions: list[Action] = []
    numbers: dict[fx.Node, int] = {}
    what: Net | str | float | None
    for node in nodes:
        if node in within:
            continue
        if node.op == "placeholder":
            if numbers and node.users:
                return "it takes more than one input"
            numbers.setdefault(nodes[0], 0)
            continue
        if node.op == "output":
            (result,) = node.args
            if not isinstance(result, fx.Node):
                return "it returns more than a tensor"
            return actions, numbers[result]
        if node in nets:
            what, _, source = nets[node]
            inputs = [source]
        else:
            what, inputs = _plain_action(node)
        if what is None or not node.users:
            name = getattr(node.target, "__name__", node.target)
            return f"besides its layers, it calls {name}"
        actions.append(Action(what, tuple(numbers[i] for i in inputs)))
        numbers[node] = len(actions)
    raise AssertionError("a graph ends with its output")


def _plain_action(node: fx.Node) -> tuple[str | float | None, list[fx.Node]]:
    """A call of a module, or a sum; None if the node is neither."""
    inputs = [value for value in node.args if isinstance(value, fx.Node)]
    is_whole = len(inputs) == len(node.args)
    if node.op == "call_module" and is_whole and len(inputs) == 1 and not node.kwargs:
        return str(node.target), inputs
    if node.op == "call_function" and is_whole and len(inputs) == 2:
        alpha = node.kwargs.get("alpha", 1) if node.target is torch.add else 1
        is_sum = node.target in (operator.add, torch.add) and not set(node.kwargs) - {"alpha"}
        if is_sum and isinstance(alpha, int | float):
            return float(alpha), inputs
    return None, inputs


_Place = tuple[Net, list[fx.Node], fx.Node]


def _net_at(node: fx.Node, module: nn.Module) -> _Place | None:
    """The net that ends at a linear layer, the nodes before it, and the node of its input."""
    if not _is_layer(node, module):
        return None
    at, parts = node.args[0], []
    dropouts: list[str] = []
    while isinstance(at, fx.Node) and _is_dropout(at, module):
        dropouts.insert(0, str(at.target))
        parts.append(at)
        at = at.args[0]
    pair = [at]
    if isinstance(at, fx.Node) and at.target in (operator.mul, torch.mul) and len(at.args) == 2:
        pair = list(at.args)
        parts.append(at)
        if not _activation_at(pair[0], module):
            pair.reverse()
    activation = _activation_at(pair[0], module)
    if activation is None:
        return None
    assert isinstance(pair[0], fx.Node), "an activation is a node"
    ups = [pair[0].args[0], *pair[1:]]
    parts += [part for part in [*pair, *ups] if isinstance(part, fx.Node) and part not in parts]
    if not all(_is_layer(up, module) for up in ups):
        return None
    sources = {up.args[0] for up in ups if isinstance(up, fx.Node)}
    source = sources.pop()
    if sources or any(len(part.users) != 1 for part in parts) or not isinstance(source, fx.Node):
        return None
    names = tuple(str(up.target) for up in ups if isinstance(up, fx.Node))
    return Net(names, activation, tuple(dropouts), str(node.target)), parts, source


def _is_layer(node: object, module: nn.Module) -> bool:
    found = _module_at(node, module)
    return found is not None and is_linear(found)


def _is_dropout(node: fx.Node, module: nn.Module) -> bool:
    return type(_module_at(node, module)) is nn.Dropout


def _module_at(node: object, module: nn.Module) -> nn.Module | None:
    """The module that a node calls with one argument."""
    if not isinstance(node, fx.Node) or node.op != "call_module":
        return None
    is_simple = len(node.args) == 1 and not node.kwargs
    return module.get_submodule(str(node.target)) if is_simple else None


def _activation_at(node: object, module: nn.Module) -> Activation | str | None:
    """The activation that a node computes, or the name of its module."""
    if not isinstance(node, fx.Node) or len(node.args) != 1:
        return None
    called = _module_at(node, module)
    if called is not None:
        return None if activation_of(called) is None else str(node.target)
    if node.op != "call_function" or node.kwargs.get("inplace"):
        return None
    found = _FUNCTIONS.get(node.target)
    if found == Activation.GELU:
        return _gelu(str(node.kwargs.get("approximate", "none")))
    return found


def _gelu(approximate: str) -> Activation | None:
    return {"none": Activation.GELU, "tanh": Activation.GELU_TANH}.get(approximate)
