"""What changes while a run trains: weights, optimizer, averaged weights. One step; what to save."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from time import perf_counter
from typing import Any

import torch
from torch import Tensor, nn

from einlinear.data.tasks.regression import RegressionTask
from einlinear.data.tasks.task import Batch, Task
from einlinear.layers.moe.routing import Routed, balance_loss
from einlinear.layers.scaling import Optimizer
from einlinear.models.mup.groups import param_groups, plain_groups
from einlinear.models.mup.muon import Muon
from einlinear.runs.config import RunConfig
from einlinear.runs.schedule import average_weight, rate_multiplier
from einlinear.training.devices.distributed import DataParallel, Place, Spread, mean, share
from einlinear.training.devices.prefetch import prefetcher_for
from einlinear.training.model import base_inputs

_STATE = {False: ("step", "exp_avg", "exp_avg_sq"), True: ("momentum_buffer",)}  # True for Muon


class TrainState:
    """A model in training, with its optimizer.

    `model` owns the parameters; call `module`, which is the same on one device. `losses` is the sum
    of the losses since it was last reset. It stays on the device, so that no step waits for it.
    `data_seconds` is the time in which training waits for batches. On a GPU, a thread makes them
    ahead of time; `close` ends it.
    """

    def __init__(self, config: RunConfig, task: Task, place: Place, model: nn.Module) -> None:
        self.config, self.place = config, place
        # A teacher is larger than most of its students: it answers on the device of the run.
        self.task = task.to(place.device) if isinstance(task, RegressionTask) else task
        self.model = model.to(place.device)
        self.spread = spread_model(self.model, config, place)
        self.module = self.spread.module
        if config.compile:
            self.module.compile()
        self.names = {name: p for name, p in self.model.named_parameters() if p.requires_grad}
        self.parameters = list(self.names.values())
        self.optimizer = make_optimizer(config, self.model)
        self._rates = [group["lr"] for group in self.optimizer.param_groups]
        self._by_muon = {
            id(parameter)
            for group in self.optimizer.param_groups
            if group.get("axes") is not None
            for parameter in group["params"]
        }
        self._num_gates = sum(isinstance(module, Routed) for module in self.model.modules())
        self.average = [p.detach().clone() for p in self.parameters] if config.ema else []
        self.losses = torch.zeros((), dtype=torch.float64, device=place.device)
        self.data_seconds = 0.0
        self._ahead = None
        if place.device.type == "cuda":
            given = self._make_batch, config.steps, config.accumulation
            self._ahead = prefetcher_for(place.device, *given)

    def rate(self, step: int) -> float:
        """The learning rate at a step, at the base width."""
        return self.config.lr * rate_multiplier(self.config, step)

    def step(self, step: int) -> None:
        """Run a training step; the first is 0."""
        multiplier = rate_multiplier(self.config, step)
        for group, rate in zip(self.optimizer.param_groups, self._rates, strict=True):
            group["lr"] = rate * multiplier
        num_parts = self.config.accumulation
        for part in range(num_parts):
            with self.spread.exchanging(part == num_parts - 1):
                self.losses += self.backward(self.batch(step, part)) / num_parts
        if self.config.grad_clip:
            nn.utils.clip_grad_norm_(self.parameters, self.config.grad_clip)
        self.optimizer.step()
        self.optimizer.zero_grad()
        if self.average:
            self._average_(average_weight(self.config.ema, step + 1))

    def batch(self, step: int, part: int) -> Batch:
        """The rows that this process computes in one part of a step."""
        begin = perf_counter()
        batch = (self._ahead or self._make_batch)(step, part)
        self.data_seconds += perf_counter() - begin
        return batch

    def _make_batch(self, step: int, part: int) -> Batch:
        config = self.config
        rows = share(config, self.place, part)
        return self.task.batch(step, config.batch_size, seed=config.seed, share=rows)

    def close(self) -> None:
        """End the thread that makes batches, if there is one."""
        if self._ahead is not None:
            self._ahead.close()

    def backward(self, batch: Batch) -> Tensor:
        """Add the gradients of one part of a step; returns its loss without the balance loss."""
        loss = self.task.loss(*self.outputs(batch))
        total = loss
        if self._num_gates and self.config.balance:
            balance = balance_loss(self.model) / self._num_gates
            total = loss + self.config.balance * balance
        (total / self.config.accumulation).backward()  # type: ignore[no-untyped-call]
        return loss.detach()

    def outputs(self, batch: Batch) -> tuple[Tensor, Batch]:
        """The outputs for a batch, in the precision of the run, and the batch on its device."""
        device = self.place.device
        inputs = batch.inputs.to(device, non_blocking=True)
        with self._autocast():
            outputs: Tensor = self.module(inputs)
        moved = Batch(inputs, batch.targets.to(device, non_blocking=True), batch.units)
        return outputs.float(), moved

    def _autocast(self) -> AbstractContextManager[Any]:
        if self.config.precision == "bfloat16":
            return torch.autocast(self.place.device.type, dtype=torch.bfloat16)
        return nullcontext()

    def _locals(self, tensors: list[Any]) -> list[Tensor]:
        return [self.spread.local(tensor.detach()) for tensor in tensors]

    @torch.no_grad()
    def _average_(self, weight: float) -> None:
        own = self._locals(self.parameters)
        torch._foreach_lerp_(self._locals(self.average), own, weight)

    @contextmanager
    def averaged(self) -> Iterator[None]:
        """Use the averaged weights within the block, if the run keeps an average."""
        if not self.average:
            yield
            return
        own = self._locals(self.parameters)
        kept = [tensor.clone() for tensor in own]
        torch._foreach_copy_(own, self._locals(self.average))
        try:
            yield
        finally:
            torch._foreach_copy_(own, kept)

    def tensors(self) -> dict[str, Tensor]:
        """All tensors of a checkpoint; every process must call this."""
        whole = self.spread.whole
        held = {f"model.{name}": whole(parameter) for name, parameter in self.names.items()}
        for name, parameter in self.names.items():
            for key, value in self.optimizer.state[parameter].items():
                held[f"optimizer.{key}.{name}"] = whole(value)
        for name, average in zip(self.names, self.average, strict=False):
            held[f"average.{name}"] = whole(average)
        held["losses"] = whole(mean(self.place, self.losses))
        held["random.cpu"] = torch.get_rng_state()
        if self.place.device.type == "cuda":
            held["random.cuda"] = torch.cuda.get_rng_state(self.place.device)
        return held

    @torch.no_grad()
    def load_(self, tensors: dict[str, Tensor]) -> None:
        """Restore a checkpoint."""
        like = self.spread.like
        self.optimizer.state.clear()
        for name, parameter in self.names.items():
            parameter.copy_(like(tensors[f"model.{name}"], parameter))
            state: dict[str, Tensor] = {}
            for key in _STATE[self._is_by_muon(parameter)]:
                value = tensors[f"optimizer.{key}.{name}"]
                is_count = key == "step"
                state[key] = value.to(parameter.device) if is_count else like(value, parameter)
            self.optimizer.state[parameter] = state
        for name, average in zip(self.names, self.average, strict=False):
            average.copy_(like(tensors[f"average.{name}"], average))
        self.losses.copy_(tensors["losses"])
        if self.place.is_first:
            torch.set_rng_state(tensors["random.cpu"])
            if "random.cuda" in tensors and self.place.device.type == "cuda":
                torch.cuda.set_rng_state(tensors["random.cuda"], self.place.device)

    def weights(self) -> dict[str, Tensor]:
        """The final weights: the average if there is one; every process must call this."""
        kept = self.average or self.parameters
        return {n: self.spread.whole(tensor) for n, tensor in zip(self.names, kept, strict=True)}

    def held_bytes(self) -> int:
        """Bytes of the weights, what the optimizer keeps, and the average."""
        sizes = [tensor.nbytes for tensor in self._locals(self.parameters)]
        moments = [1 if self._is_by_muon(p) else 2 for p in self.parameters]
        copies = 2 if self.average else 1
        return sum(s * (m + copies) for s, m in zip(sizes, moments, strict=True))

    def _is_by_muon(self, parameter: nn.Parameter) -> bool:
        return id(parameter) in self._by_muon


def make_optimizer(config: RunConfig, model: nn.Module) -> torch.optim.Optimizer:
    """The optimizer of a run: AdamW, or Muon."""
    decay = config.weight_decay
    name: Optimizer = "muon" if config.optimizer == "muon" else "adam"
    if config.parametrization == "mup":
        base = base_inputs(config, model)
        groups = param_groups(
            model,
            config.lr,
            base=base,
            optimizer=name,
            weight_decay=decay,
            decay=config.decay,
        )
    else:
        groups = plain_groups(model, config.lr, optimizer=name, weight_decay=decay)
    if name == "muon":
        return Muon(groups, betas=config.betas)
    return torch.optim.AdamW(groups, betas=config.betas, fused=True)


def spread_model(model: nn.Module, config: RunConfig, place: Place) -> Spread:
    """Spread the model over the devices of a run."""
    if place.count == 1:
        return Spread(model)
    if config.shard == "ddp":
        return DataParallel(model, place)
    from einlinear.training.devices.sharded import Sharded  # loads slowly

    return Sharded(model, place)
