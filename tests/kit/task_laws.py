"""What holds for every task."""

import torch

from einlinear.data.tasks.task import Task


def equal(a, b):
    return (
        a.units == b.units and torch.equal(a.inputs, b.inputs) and torch.equal(a.targets, b.targets)
    )


def check_laws(task, again, rows=12):
    """`again` is the same task, opened a second time."""
    assert isinstance(task, Task)
    assert task.fingerprint == again.fingerprint
    batch = task.batch(7, rows, seed=3)
    assert len(batch.inputs) == len(batch.targets) == rows
    task.batch(100, 5, seed=9)  # what was asked before does not matter
    assert equal(again.batch(7, rows, seed=3), batch)
    for step, seed in ((8, 3), (7, 4), (3, 7)):
        assert not equal(task.batch(step, rows, seed=seed), batch)
    check_shares(task, batch, rows)
    check_validation(task, again)
    torch.manual_seed(0)  # nor does the state of torch
    assert equal(task.batch(7, rows, seed=3), batch)


def check_shares(task, batch, rows):
    cut = rows // 3
    shares = [task.batch(7, rows, seed=3, share=slice(a, b)) for a, b in ((0, cut), (cut, rows))]
    assert sum(share.units for share in shares) == batch.units
    for name in ("inputs", "targets"):
        joined = torch.cat([getattr(share, name) for share in shares])
        torch.testing.assert_close(joined, getattr(batch, name), rtol=1e-5, atol=1e-5)


def check_validation(task, again):
    some, fewer = task.validation(10, batch=4), task.validation(10, batch=3)
    assert [len(batch.inputs) for batch in some] == [4, 4, 2]
    assert all(map(equal, some, again.validation(10, batch=4)))
    for name in ("inputs", "targets"):
        rows, others = (torch.cat([getattr(b, name) for b in bs]) for bs in (some, fewer))
        torch.testing.assert_close(rows, others, rtol=1e-5, atol=1e-5)
        assert len(rows) == 10


def falling_loss(task, model, steps=40, rows=32, lr=1e-2):
    """Validation losses before and after a few steps."""

    def validate():
        with torch.no_grad():
            batches = task.validation(64)
            losses = [float(task.loss(model(b.inputs), b)) * b.units for b in batches]
            return sum(losses) / sum(b.units for b in batches)

    optimizer = torch.optim.Adam(model.parameters(), lr=lr)
    before = validate()
    for step in range(steps):
        batch = task.batch(step, rows, seed=0)
        optimizer.zero_grad()
        task.loss(model(batch.inputs), batch).backward()
        optimizer.step()
    return before, validate()
