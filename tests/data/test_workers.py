"""Pools of workers that die at a bad moment."""

import pytest

from kit.forked import context
from kit.pools import kill_one_at_the_end


@pytest.mark.parametrize("which", [0, 1])  # one of the two holds the lock of the queue
def test_a_worker_killed_at_the_end_is_not_waited_for(which):
    process = context.Process(target=kill_one_at_the_end, args=(which,))
    process.start()
    process.join(30)
    code = process.exitcode
    process.kill()
    assert code == 0
