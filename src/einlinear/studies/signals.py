"""Signals that end a process, held back until the run has saved its work."""

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
    """Ctrl-C and SIGTERM wait until `deliver` is called, or until the end of the with block.

    Then they do what they would have done: raise KeyboardInterrupt, end the process, or call the
    handler of the program. A second signal does so at once. Signals that the process ignores stay
    ignored. Only the main thread can do this; in others signals are as ever.

    Args:
        is_on: whether signals wait at all.
    """

    def __init__(self, is_on: bool) -> None:
        self._is_on = is_on and current_thread() is main_thread()
        self._handlers: dict[int, Any] = {}
        self._asked: int | None = None

    @property
    def is_asked(self) -> bool:
        """Whether a signal waits."""
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
        if self._asked is not None:  # also after an error: who pressed Ctrl-C wants all to stop
            signal.raise_signal(self._asked)

    def deliver(self) -> None:
        """Let the signal that waits do its work; if the program goes on after it, wait again."""
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
        with suppress(OSError):  # not print: the signal may have come in the middle of one
            os.write(2, _WAIT[signal.Signals(number)])

    def _restore(self) -> None:
        for number, handler in self._handlers.items():
            signal.signal(number, handler)
        self._handlers.clear()
