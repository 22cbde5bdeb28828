"""What each of two processes runs, in a module that a spawned process can import."""

import os
import sys

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from cases import STRUCTURES
from einlinear import EinsumLinear


def model_and_input():
    torch.manual_seed(0)
    first, second = (EinsumLinear(64, 64, structure=STRUCTURES[n]) for n in ("monarch", "generic"))
    return nn.Sequential(first, nn.GELU(), second), torch.randn(600, 64)


def train(rank, port, kind, expected):
    """One backward pass on half of the tokens; the gradients must be those of one process."""
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    torch.set_num_threads(1)
    dist.init_process_group("gloo", rank=rank, world_size=2)
    compare(rank, kind, expected)
    dist.barrier()
    dist.destroy_process_group()
    # The threads of gloo now and then hang while the interpreter takes them down: leave at once.
    sys.stderr.flush()
    os._exit(0)


def compare(rank, kind, expected):
    model, x = model_and_input()
    if kind == "ddp":
        model = DistributedDataParallel(model)
    else:
        mesh = init_device_mesh("cpu", (2,))
        for layer in (model[0], model[2], model):
            fully_shard(layer, mesh=mesh)
    model(x[rank * 300 : (rank + 1) * 300]).square().mean().backward()
    for parameter, wanted in zip(model.parameters(), expected, strict=True):
        grad = parameter.grad.full_tensor() if kind == "fsdp2" else parameter.grad
        torch.testing.assert_close(grad, wanted, atol=1e-5, rtol=1e-4)
