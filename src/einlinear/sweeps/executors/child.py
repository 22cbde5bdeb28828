"""Child: a Python process that exchanges JSON objects with this one, one object per line.

The child leaves as soon as its input ends, even if this process was killed.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import sysconfig
import tempfile
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import IO, Any

from einlinear.files.whole import parse_object

Tell = Callable[[Mapping[str, Any] | None], None]
"""Writes an object to the parent process; None only shows that the child is alive."""


class Child:
    """A running child process: a module with command-line arguments and further variables."""

    def __init__(self, module: str, arguments: Sequence[str], environment: dict[str, str]) -> None:
        self.has_ended = False  # it closed its output; `poll` may see its end a little later
        self._buffer = bytearray()
        self._errors = tempfile.TemporaryFile()
        try:
            self.process = subprocess.Popen(
                [sys.executable, "-m", module, *arguments],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=self._errors,
                env=os.environ | package_path() | environment,
                start_new_session=True,  # Ctrl-C is for the sweep, which stops its children
            )
        except OSError:
            self._errors.close()
            raise
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self._input: IO[bytes] = self.process.stdin
        self._output: IO[bytes] = self.process.stdout

    def fileno(self) -> int:
        """The file descriptor of its output, for selectors."""
        return self._output.fileno()

    def is_alive(self) -> bool:
        """Whether it can take a request."""
        return not self.has_ended and self.process.poll() is None

    def send(self, values: Mapping[str, Any]) -> None:
        """Send an object; raises OSError if the child is dead."""
        self._input.write(json.dumps(values).encode() + b"\n")
        self._input.flush()

    def read(self) -> list[dict[str, Any]]:
        """Return the objects that have arrived, waiting for output; sets `has_ended` at its end.

        Lines that are not objects are skipped: a sitecustomize module may print while Python
        starts.
        """
        data = os.read(self.fileno(), 1 << 16)
        self.has_ended = not data
        self._buffer += data
        end = self._buffer.rfind(b"\n", len(self._buffer) - len(data)) + 1
        lines = bytes(self._buffer[:end]).split(b"\n")
        del self._buffer[:end]
        return [values for values in map(_object, lines) if values is not None]

    def said(self) -> str:
        """Everything that it wrote to its standard error."""
        self._errors.seek(0)
        return self._errors.read().decode(errors="replace").strip()

    def wait(self, seconds: float) -> int | None:
        """Wait up to `seconds` for it to exit; return its exit code, or None if it is running."""
        try:
            return self.process.wait(max(0.0, seconds))
        except subprocess.TimeoutExpired:
            return None

    def leave(self, seconds: float) -> None:
        """Close its input, wait up to `seconds` for it to leave, then kill it."""
        self._close(self._input)
        self.wait(seconds)
        self.end()

    def end(self) -> None:
        """Kill it and close its files."""
        self.process.kill()
        self.process.wait()
        for file in (self._input, self._output, self._errors):
            self._close(file)

    def _close(self, file: IO[bytes]) -> None:
        with suppress(OSError):  # unsent data for a dead process
            file.close()


def speak() -> Tell:
    """In a child: return the function that writes to the parent.

    Everything else that is printed goes to the standard error, so that it is not taken for an
    answer.
    """
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)

    def tell(values: Mapping[str, Any] | None) -> None:
        # On a new line, because Python may have printed half of one while it started.
        print("" if values is None else f"\n{json.dumps(values)}", file=answers, flush=True)

    return tell


def package_path() -> dict[str, str]:
    """Environment variables that make a new process import the same package as this one."""
    root = str(Path(__file__).parents[3])
    # In PYTHONPATH, the folder of all installed packages would hide modules of Python itself.
    is_installed = root in (sysconfig.get_path("purelib"), sysconfig.get_path("platlib"))
    paths = ["" if is_installed else root, *os.environ.get("PYTHONPATH", "").split(os.pathsep)]
    return {
        "PYTHONPATH": os.pathsep.join(filter(None, paths)),
        "PYTHONSAFEPATH": "1",  # modules in the working directory must not hide ours
    }


def _object(line: bytes) -> dict[str, Any] | None:
    try:
        return parse_object(line)
    except ValueError:
        return None
