"""Processes that are forked from one that has loaded torch, so that none loads it again."""

import multiprocessing

# What takes long to load. Modules of the tests cannot be named: the server does not find them.
LOADED = ["torch._dynamo", "torch.testing", "torch.distributed.fsdp", "hypothesis", "pytest"]
LOADED += ["einlinear.cli", "einlinear.studies.train", "einlinear.studies.sharded"]
LOADED += ["einlinear.studies.sweeps.sweep", "einlinear.studies.sweeps.worker"]

context = multiprocessing.get_context("forkserver")
context.set_forkserver_preload(LOADED)
