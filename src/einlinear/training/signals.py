"""Signals that end a process, deferred until the run has saved its work."""

from __future__ import annotations

import os
import signal
from contextlib import suppress
from threading import current_thread, main_thread
from types import FrameType, TracebackType
from typing import Any

_WAIT = {
    signal.SIGINT: b"\nstopping after this step, with a checkpoint; Ctrl-C again stops at once\n",
    signal.SIGTERM: b"\nstopping after this step, with a checkpoint; SIGTERM again stops at once\n",
}


class Deferred:
    """Defers Ctrl-C and SIGTERM until you call `deliver`, or until the end of the with block.

    Then they do what they would have done: raise KeyboardInterrupt, end the process, or call the
    program's handler. A second signal does so at once. Signals that the process ignores stay
    ignored. This works in the main thread only; in others, signals are not deferred.

    Args:
        is_on: whether to defer signals at all.
    """

    def __init__(self, is_on: bool) -> None:
        self._is_on = is_on and current_thread() is main_thread()
        self._handlers: dict[int, Any] = {}
        self._asked: int | None = None

    @property
    def is_asked(self) -> bool:
        """Whether a signal is waiting."""
        return self._asked is not None

    def __enter__(self) -> Deferred:
        self._asked = None
        for number in _WAIT if self._is_on else ():
            handler = signal.getsignal(number)
            if handler not in (signal.SIG_IGN, None):  # None: C code has set it
                self._handlers[number] = handler
                signal.signal(number, self._take)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._restore()
        if self._asked is not None:  # also after an error: Ctrl-C is meant to stop everything
            signal.raise_signal(self._asked)

    def deliver(self) -> None:
        """Deliver the waiting signal; if the program continues, defer signals again."""
        assert self._asked is not None, "a signal waits"
        number, self._asked = self._asked, None
        self._restore()
        signal.raise_signal(number)
        self.__enter__()

    def _take(self, number: int, frame: FrameType | None) -> None:
        if self._asked is not None:
            self._asked = None
            self._restore()
            signal.raise_signal(number)
            return
        self._asked = number
        with suppress(OSError):  # not print: the signal may have interrupted one
            os.write(2, _WAIT[signal.Signals(number)])

    def _restore(self) -> None:
        for number, handler in self._handlers.items():
            signal.signal(number, handler)
        self._handlers.clear()
