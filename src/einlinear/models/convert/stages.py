"""Stages: run a model up to its layers one after the other, without running all of it each time.

Most models call a list of blocks in turn, and a block sees nothing of the blocks before it but the
output of the last. So a pass to a layer in block k can start at block k: the blocks before it give
their kept output at once. Whether a model is like that is tried on its first batch. If not, passes
start at the beginning.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten, tree_map_only

from einlinear.errors import EinlinearError
from einlinear.models.convert.batches import called

BlockChain = tuple[str, ...]  # the names of the blocks of a list, in the order of their calls


class Stopped(BaseException):
    """Ends a pass through a model where nothing more is wanted."""


class Stages:
    """A model whose passes start behind the blocks that are complete.

    Args:
        model: the model.
        batches: what the model is called with.
        chains: lists of blocks, from `seen_on`.
    """

    def __init__(
        self, model: nn.Module, batches: Sequence[Any], chains: Sequence[BlockChain]
    ) -> None:
        self.model = model
        self.batches = batches
        self._chains = chains
        self._kept: dict[tuple[BlockChain, int], Any] = {}  # by batch: what the last block gave
        self._complete: set[str] = set()

    def complete(self, blocks: Sequence[str]) -> None:
        """From now on, skip these blocks; they do not change any more."""
        for chain in self._chains:
            done = [name for name in chain if name in blocks and name not in self._complete]
            if done:
                outputs = [self._output(done[-1], number) for number in range(len(self.batches))]
                self._kept.update({(chain, number): o for number, o in enumerate(outputs)})
                self._complete.update(done)

    def run(self, number: int) -> None:
        """Call the model with a batch, counted from 0."""
        with ExitStack() as stack:
            for chain in self._chains:
                given = self._kept.get((chain, number))
                if given is not None:
                    names = [name for name in chain if name in self._complete]
                    stack.enter_context(_giving(self.model, names, given))
            called(self.model, self.batches[number], number + 1)

    def _output(self, block: str, number: int) -> Any:
        """What a block gives for a batch; None if it is not called."""
        found: list[Any] = []

        def keep(module: nn.Module, args: Any, output: Any) -> None:
            found.append(output)
            raise Stopped

        with ExitStack() as stack, suppress(Stopped):
            module = self.model.get_submodule(block)
            stack.callback(module.register_forward_hook(keep).remove)
            self.run(number)
        return found[0] if found else None


@dataclass
class Course:
    """How a pass goes: the blocks that can be skipped, and those that end before each layer."""

    chains: list[BlockChain]
    before: dict[str, list[str]]


def seen_on(model: nn.Module, layers: Sequence[str], batch: Any) -> Course:
    """The course of a batch through a model; without chains if blocks cannot be skipped."""
    lists = _lists_of_blocks(model, layers)
    calls: Counter[str] = Counter()
    inputs: dict[str, list[Tensor]] = {}
    outputs: dict[str, Any] = {}
    before: dict[str, list[str]] = {}

    def enter_block(name: str, args: Any, kwargs: Any) -> None:
        inputs[name] = [tensor.clone() for tensor in _tensors((args, kwargs))]

    def leave_block(name: str, output: Any) -> None:
        calls[name] += 1
        outputs[name] = _cloned(output)

    def enter_layer(name: str, args: Any, kwargs: Any) -> None:
        before.setdefault(name, list(calls))

    with ExitStack() as stack:
        for name in [name for blocks in lists for name in blocks]:
            stack.callback(_before(model, name, partial(enter_block, name)))
            stack.callback(_after(model, name, partial(leave_block, name)))
        for name in layers:
            stack.callback(_before(model, name, partial(enter_layer, name)))
        called(model, batch, 1)
    chains = [tuple(name for name in calls if name in blocks) for blocks in lists]
    is_chained = all(count == 1 for count in calls.values()) and _can_be_skipped(
        model, batch, chains, inputs, outputs
    )
    return Course(chains if is_chained else [], before)


def _can_be_skipped(
    model: nn.Module,
    batch: Any,
    chains: Sequence[BlockChain],
    inputs: dict[str, list[Tensor]],
    outputs: dict[str, Any],
) -> bool:
    """Whether each block gets its inputs if the blocks before it give the output of the last."""
    got: list[Tensor] = []

    def stop(args: Any, kwargs: Any) -> None:
        got[:] = _tensors((args, kwargs))
        raise Stopped

    order = [name for name in inputs if name in outputs]
    for place, name in enumerate(order):
        with ExitStack() as stack, suppress(Stopped):
            for chain in chains:
                passed = [each for each in order[:place] if each in chain]
                if passed:
                    stack.enter_context(_giving(model, passed, outputs[passed[-1]]))
            stack.callback(_before(model, name, stop))
            try:
                called(model, batch, 1)
            except EinlinearError:
                return False
        if len(got) != len(inputs[name]) or not all(map(torch.equal, got, inputs[name])):
            return False
    return True


def _lists_of_blocks(model: nn.Module, layers: Sequence[str]) -> list[BlockChain]:
    """The outermost lists of modules of which several hold layers; not layers themselves."""
    found: list[BlockChain] = []
    for name, module in model.named_modules():
        if isinstance(module, nn.ModuleList | nn.Sequential):
            blocks = [f"{name}.{key}".lstrip(".") for key, _ in module.named_children()]
            own = [b for b in blocks if any(layer.startswith(f"{b}.") for layer in layers)]
            is_inside = any(name.startswith(f"{b}.") for chain in found for b in chain)
            if len(own) > 1 and not is_inside:
                found.append(tuple(own))
    return found


@contextmanager
def _giving(model: nn.Module, names: Iterable[str], output: Any) -> Iterator[None]:
    """Let modules return an output without running, for a while."""
    # Some modules have a forward of their own, which is not that of their class.
    own: dict[nn.Module, dict[str, Any]] = {model.get_submodule(name): {} for name in names}
    for module, kept in own.items():
        kept.update({"forward": vars(module)["forward"]} if "forward" in vars(module) else {})
        module.forward = lambda *args, **kwargs: _cloned(output)
    try:
        yield
    finally:
        for module, kept in own.items():
            del module.forward
            vars(module).update(kept)


def _before(model: nn.Module, name: str, do: Callable[[Any, Any], None]) -> Callable[[], None]:
    """Do something with the arguments of a module; call what is returned to end that."""

    def hook(module: nn.Module, args: Any, kwargs: Any) -> None:
        do(args, kwargs)

    module = model.get_submodule(name)
    return module.register_forward_pre_hook(hook, with_kwargs=True).remove


def _after(model: nn.Module, name: str, do: Callable[[Any], None]) -> Callable[[], None]:
    """Do something with the output of a module; call what is returned to end that."""

    def hook(module: nn.Module, args: Any, output: Any) -> None:
        do(output)

    return model.get_submodule(name).register_forward_hook(hook).remove


def _cloned(output: Any) -> Any:
    return tree_map_only(Tensor, torch.clone, output)


def _tensors(values: Any) -> list[Tensor]:
    return [value for value in tree_flatten(values)[0] if isinstance(value, Tensor)]
