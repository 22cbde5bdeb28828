"""The command line: all commands, and what is printed when one fails. No logic of its own."""

from __future__ import annotations

import os
import signal
import sys
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from io import TextIOWrapper
from threading import current_thread, main_thread
from types import FrameType
from typing import TextIO

from einlinear import __version__
from einlinear.errors import EinlinearError, quote

try:
    import tyro
    from rich.panel import Panel
    from rich.table import Table
except ImportError:  # pragma: no cover - checked by hand in an environment without them
    print(
        "einlinear: the command line needs tyro and rich, which are not installed\n"
        "  rule: the command line is an extra of the package\n"
        '  fix:  pip install "einlinear[cli]"',
        file=sys.stderr,
    )
    raise SystemExit(2) from None

from einlinear.cli_bench import bench, doctor
from einlinear.cli_landscape import landscape
from einlinear.cli_report import report
from einlinear.cli_structures import atlas, describe
from einlinear.cli_sweep import sweep
from einlinear.cli_train import prepare, sample, train
from einlinear.cli_words import call_of, did_you_mean
from einlinear.terminal import columns, console, wrapped

COMMANDS: tuple[Callable[..., None], ...] = (
    describe,
    atlas,
    bench,
    landscape,
    prepare,
    train,
    sample,
    sweep,
    report,
    doctor,
)
"""In the order of the help text. Each lives in a module cli_*.py; what is slow to load is imported
inside it."""


def main(argv: Sequence[str] | None = None) -> None:
    """Run the command line; bad input ends it with exit code 2 and three lines."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    if sys.stdout is None:  # closed by who called: what is printed goes nowhere
        sys.stdout = open(os.devnull, "w")
    if arguments[:1] in (["--version"], ["-V"]):
        print(f"einlinear {__version__}")
        return
    if isinstance(sys.stdout, TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")  # a terminal may lack the characters of a table
    try:
        with warnings.catch_warnings(), _imports_end_whole():
            warnings.simplefilter("always", UserWarning)
            warnings.showwarning = _note  # type: ignore[assignment]
            _run(arguments)
        sys.stdout.flush()
    except EinlinearError as error:
        print(_wrapped(f"einlinear: {error}"), file=sys.stderr)
        raise SystemExit(2) from None
    except KeyboardInterrupt:
        print(_INTERRUPTED, file=sys.stderr)
        raise SystemExit(_INTERRUPTED_CODE) from None
    except OSError as error:
        # The reader of the output is gone, or its disk is full: say so, without a second failure.
        sys.stdout = open(os.devnull, "w")
        if not isinstance(error, BrokenPipeError):
            print(f"einlinear: cannot write the output: {error.strerror}", file=sys.stderr)
        raise SystemExit(1) from None


def _wrapped(text: str) -> str:
    """The lines of an error, wrapped between words in a terminal, and as they are in a log."""
    if not _is_terminal(sys.stderr):
        return text
    return "\n".join(wrapped(line, " " * 8) for line in text.splitlines())


def _is_terminal(stream: TextIO) -> bool:
    return stream.isatty()


def _run(arguments: Sequence[str]) -> None:
    commands = {command.__name__: command for command in COMMANDS}
    name, *words = arguments or ["--help"]
    if name in commands:
        call_of(commands[name], words)()
    elif name in ("-h", "--help"):
        _print_commands()
    elif name.startswith("--tyro-"):  # scripts that complete words in a shell
        tyro.extras.subcommand_cli_from_dict(commands, prog="einlinear", args=list(arguments))
    else:
        raise EinlinearError(
            what=f"there is no command {quote(name)}",
            rule=f"the commands are {', '.join(commands)}",
            fix=did_you_mean(name, list(commands), "einlinear --help says what each does", 0.7),
        )


def _print_commands() -> None:
    table = Table.grid(padding=(0, 2, 0, 0))
    for command in COMMANDS:
        table.add_row(command.__name__, (command.__doc__ or "").partition("\n")[0])
    screen = console(columns())
    screen.print(_ABOUT, "\nusage: einlinear COMMAND ...\n", markup=False)
    screen.print(Panel(table, title="commands", title_align="left"))
    screen.print("einlinear COMMAND --help says more, and lists the flags.")


@contextmanager
def _imports_end_whole() -> Iterator[None]:
    """Ctrl-C during an import ends the process at once, meanwhile; else it is as ever.

    Packages catch what their imports raise, and go on with half of a module: torch and NumPy then
    fail in strange ways, after seconds. Whatever this process has started sees it end.
    """
    held = signal.getsignal(signal.SIGINT)
    if held is not signal.default_int_handler or current_thread() is not main_thread():
        yield
        return
    signal.signal(signal.SIGINT, _interrupt)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, held)


def _interrupt(number: int, frame: FrameType | None) -> None:
    at = frame
    while at is not None:
        if at.f_code.co_filename == "<frozen importlib._bootstrap>":
            os.write(2, f"{_INTERRUPTED}\n".encode())
            os._exit(_INTERRUPTED_CODE)
        at = at.f_back
    signal.default_int_handler(number, frame)


def _note(message: Warning | str, *_: object) -> None:
    print(_wrapped(f"note: {message}"), file=sys.stderr)


_INTERRUPTED, _INTERRUPTED_CODE = "einlinear: interrupted", 130
_ABOUT = f"Linear layers of any structure an einsum can express. Version {__version__}."
