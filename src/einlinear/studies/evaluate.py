"""Evaluation of a run: the loss on a fixed validation set, and where experts send its tokens."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from einlinear.layers.routing import Routed, Routing
from einlinear.studies.distributed import summed
from einlinear.studies.record import LayerRouting
from einlinear.studies.state import State
from einlinear.studies.tasks.task import Batch


class Evaluator:
    """The validation set of a run, and the routing of its first batch at the last evaluation."""

    def __init__(self, state: State, batches: Sequence[Batch]) -> None:
        self._state, self._batches = state, batches
        self._routed: dict[str, Tensor] = {}

    @torch.no_grad()
    def __call__(self) -> tuple[float, tuple[LayerRouting, ...]]:
        """The mean loss over the units of the set, by the averaged weights; the routing."""
        state = self._state
        total = torch.zeros((), dtype=torch.float64, device=state.place.device)
        routing: tuple[LayerRouting, ...] = ()
        state.module.eval()
        with state.averaged():
            for number, (batch, weight) in enumerate(self._own_batches()):
                total += state.loss(batch) * (batch.units * weight)
                if number == 0:
                    routing = self._note_routing()
        state.module.train()
        units = sum(batch.units for batch in self._batches)
        return float(summed(state.place, total)) / units, routing

    def _own_batches(self) -> list[tuple[Batch, int]]:
        """The batches of this process; the others wait for it, so each takes as many as the first.

        What is taken in excess has weight 0.
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
        """The routing for a checkpoint."""
        return {f"routing.{name}": experts.cpu() for name, experts in self._routed.items()}

    def load_(self, tensors: dict[str, Tensor]) -> None:
        """Go back to a checkpoint, which holds the routing of the first process."""
        if not self._state.place.is_first:
            return  # the first batch of this process is another, and its routing is not written
        prefix = "routing."
        self._routed = {
            k.removeprefix(prefix): v for k, v in tensors.items() if k.startswith(prefix)
        }
