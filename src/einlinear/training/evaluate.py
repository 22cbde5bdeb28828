"""Evaluation of a run on a fixed validation set: loss, accuracy, and where experts send tokens."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from einlinear.data.tasks.cifar import CifarTask
from einlinear.data.tasks.task import Batch
from einlinear.layers.moe.routing import Routed, Routing
from einlinear.runs.record import LayerRouting
from einlinear.training.devices.distributed import summed
from einlinear.training.state import TrainState


@dataclass(frozen=True, slots=True)
class Evaluation:
    """The mean loss, the share of rows whose class is right (of images), and the routing."""

    loss: float
    accuracy: float | None
    routing: tuple[LayerRouting, ...]


class Evaluator:
    """Evaluates the averaged weights; keeps the routing of the first batch for the next time."""

    def __init__(self, state: TrainState, batches: Sequence[Batch]) -> None:
        self._state, self._batches = state, batches
        self._routed: dict[str, Tensor] = {}

    @torch.no_grad()
    def __call__(self) -> Evaluation:
        """Evaluate the model as it is now."""
        state = self._state
        has_classes = isinstance(state.task, CifarTask)
        totals = torch.zeros(2, dtype=torch.float64, device=state.place.device)
        routing: tuple[LayerRouting, ...] = ()
        state.module.eval()
        with state.averaged():
            for number, (batch, weight) in enumerate(self._own_batches()):
                outputs, batch = state.outputs(batch)
                totals[0] += state.task.loss(outputs, batch) * (batch.units * weight)
                if has_classes:
                    totals[1] += (outputs.argmax(-1) == batch.targets).sum() * weight
                if number == 0:
                    routing = self._note_routing()
        state.module.train()
        units = sum(batch.units for batch in self._batches)
        loss, accuracy = (float(total) / units for total in summed(state.place, totals))
        return Evaluation(loss, accuracy if has_classes else None, routing)

    def _own_batches(self) -> list[tuple[Batch, int]]:
        """The batches of this process, with their weights.

        Processes wait for each other, so all take the same number of batches: a process that has
        fewer repeats one with weight 0.
        """
        place = self._state.place
        own = [(batch, 1) for batch in self._batches[place.rank :: place.count]]
        most = -(-len(self._batches) // place.count)
        return own + [(self._batches[0], 0)] * (most - len(own))

    def _note_routing(self) -> tuple[LayerRouting, ...]:
        """Statistics of every layer of experts in the last forward pass."""
        rows = []
        for name, module in self._state.model.named_modules():
            routing = module.last_routing if isinstance(module, Routed) else None
            if routing is None:
                continue
            before = self._routed.get(name)
            old = None if before is None else Routing(routing.logits, before.to(routing.experts))
            changed = None if old is None else routing.changed_since(old)
            rows.append(LayerRouting(name, routing.load, routing.entropy, changed))
            self._routed[name] = routing.experts
        return tuple(rows)

    def tensors(self) -> dict[str, Tensor]:
        """The routing, as tensors of a checkpoint."""
        return {f"routing.{name}": experts.cpu() for name, experts in self._routed.items()}

    def load_(self, tensors: dict[str, Tensor]) -> None:
        """Restore the routing of the first process from a checkpoint."""
        if not self._state.place.is_first:
            return  # other processes evaluate other batches, and their routing is not recorded
        prefix = "routing."
        self._routed = {
            k.removeprefix(prefix): v for k, v in tensors.items() if k.startswith(prefix)
        }
