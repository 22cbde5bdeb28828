"""Signals that wait. What a run does with them is in test_train_signals.py."""

import os
import signal
from contextlib import contextmanager
from threading import Thread

import pytest

from einlinear.training.signals import Deferred


@contextmanager
def handled(handler):
    """SIGTERM handled otherwise, for a while."""
    held = signal.signal(signal.SIGTERM, handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, held)


def ask():
    os.kill(os.getpid(), signal.SIGTERM)


def test_a_handler_of_the_program_is_called_when_it_is_time(capfd):
    seen = []

    def handler(number, frame):
        seen.append(number)

    with handled(handler):
        with Deferred(True) as signals:
            for times in (1, 2):  # a program that goes on can be asked again
                ask()
                assert signals.is_asked
                assert len(seen) == times - 1
                signals.deliver()
                assert not signals.is_asked
                assert len(seen) == times
        assert signal.getsignal(signal.SIGTERM) is handler
        assert capfd.readouterr().err.count("stopping after this step") == 2


def test_the_end_delivers_what_waits(capfd):
    seen = []
    with handled(lambda *_: seen.append(1)):
        with Deferred(True):
            ask()
            assert not seen
        assert seen == [1]
        with pytest.raises(KeyError), Deferred(True):
            {}[ask()]
        assert seen == [1, 1]  # an error does not swallow the signal


def test_a_second_signal_does_not_wait(capfd):
    seen = []
    with handled(lambda *_: seen.append(1)), Deferred(True):
        ask()
        ask()
        assert seen == [1]


def test_signals_that_are_left_alone(capfd):
    with handled(signal.SIG_IGN), Deferred(True) as signals:
        ask()
        assert not signals.is_asked
    seen = []
    with handled(lambda *_: seen.append(1)):
        with Deferred(False):
            ask()
            assert seen == [1]
        kept = []

        def work():
            with Deferred(True) as signals:
                kept.append(signals._handlers)

        thread = Thread(target=work)
        thread.start()
        thread.join()
        assert kept == [{}]
