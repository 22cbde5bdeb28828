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
from einlinear.models.mup.groups import param_groups
from einlinear.runs.config import RunConfig
from einlinear.runs.schedule import average_weight, rate_multiplier
from einlinear.training.distributed import DataParallel, Place, Spread, mean, share
from einlinear.training.model import base_inputs


class TrainState:
    """A model in training, with its optimizer.

    `model` owns the parameters; call `module`, which is the same on one device. `losses` is the sum
    of the losses since it was last reset. It stays on the device, so that no step waits for it.
    `data_seconds` is the time spent making batches.
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
        decay: dict[str, Any] = {"weight_decay": config.weight_decay}
        groups: list[dict[str, Any]] = [{"params": self.parameters, "lr": config.lr, **decay}]
        if config.parametrization == "mup":
            base = base_inputs(config, self.model)
            groups = param_groups(self.model, config.lr, base=base, **decay)
        self._rates = [group["lr"] for group in groups]
        self.optimizer = torch.optim.AdamW(groups, betas=config.betas, fused=True)
        self._num_gates = sum(isinstance(module, Routed) for module in self.model.modules())
        self.average = [p.detach().clone() for p in self.parameters] if config.ema else []
        self.losses = torch.zeros((), dtype=torch.float64, device=place.device)
        self.data_seconds = 0.0

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
        config = self.config
        rows = share(config, self.place, part)
        batch = self.task.batch(step, config.batch_size, seed=config.seed, share=rows)
        self.data_seconds += perf_counter() - begin
        return batch

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
            for key in ("step", "exp_avg", "exp_avg_sq"):
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
        """Bytes of the weights, the two moments of the optimizer, and the average."""
        size = sum(tensor.nbytes for tensor in self._locals(self.parameters))
        return size * (4 if self.average else 3)


def spread_model(model: nn.Module, config: RunConfig, place: Place) -> Spread:
    """Spread the model over the devices of a run."""
    if place.count == 1:
        return Spread(model)
    if config.shard == "ddp":
        return DataParallel(model, place)
    from einlinear.training.sharded import Sharded  # loads slowly

    return Sharded(model, place)
