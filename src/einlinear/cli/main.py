"""The command line: all commands, and what is printed when one fails."""

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

from einlinear.errors import EinlinearError, did_you_mean, quote
from einlinear.version import __version__

try:
    import rich  # noqa: F401
    import tyro
except ImportError:  # pragma: no cover - checked by hand in an environment without them
    print(
        "einlinear: the command line needs tyro and rich, which are not installed\n"
        "  rule: the command line is an extra of the package\n"
        '  fix:  pip install "einlinear[cli]"',
        file=sys.stderr,
    )
    raise SystemExit(2) from None

from einlinear.cli.arguments import flag_names, in_flags, parse_call
from einlinear.cli.commands.atlas import atlas
from einlinear.cli.commands.bench import bench
from einlinear.cli.commands.describe import describe
from einlinear.cli.commands.doctor import doctor
from einlinear.cli.commands.landscape import landscape
from einlinear.cli.commands.pack import pack
from einlinear.cli.commands.prepare import prepare
from einlinear.cli.commands.recommend import recommend
from einlinear.cli.commands.report import report
from einlinear.cli.commands.reproduce import reproduce
from einlinear.cli.commands.sample import sample
from einlinear.cli.commands.search import search
from einlinear.cli.commands.sweep import sweep
from einlinear.cli.commands.time import time
from einlinear.cli.commands.train import train
from einlinear.cli.terminal import columns
from einlinear.show.symbols import ASCII_ERRORS
from einlinear.show.tables import facts_text, wrapped

COMMANDS: tuple[Callable[..., None], ...] = (
    describe,
    atlas,
    bench,
    recommend,
    landscape,
    prepare,
    train,
    sample,
    sweep,
    search,
    pack,
    time,
    report,
    reproduce,
    doctor,
)
"""In the order of the help text. Commands import what is slow to load when they are called."""


def main(argv: Sequence[str] | None = None) -> None:
    """Run the command line; bad input ends it with exit code 2 and three lines."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    if sys.stdout is None:  # closed by the caller: print nowhere
        sys.stdout = open(os.devnull, "w")
    if arguments[:1] in (["--version"], ["-V"]):
        print(f"einlinear {__version__}")
        return
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, TextIOWrapper):
            stream.reconfigure(errors=ASCII_ERRORS)  # omega for ω where a terminal lacks it
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
        # The reader of the output is gone, or the disk is full: do not fail again at exit.
        sys.stdout = open(os.devnull, "w")
        if not isinstance(error, BrokenPipeError):
            print(f"einlinear: cannot write the output: {error.strerror}", file=sys.stderr)
        raise SystemExit(1) from None


def _wrapped(text: str) -> str:
    """The lines of an error: wrapped in a terminal, as they are in a log."""
    if not _is_terminal(sys.stderr):
        return text
    return "\n".join(wrapped(line, columns(), " " * 6) for line in text.splitlines())


def _is_terminal(stream: TextIO) -> bool:
    return stream.isatty()


def _run(arguments: Sequence[str]) -> None:
    commands = {command.__name__: command for command in COMMANDS}
    name, *words = arguments or ["--help"]
    if name in commands:
        call = parse_call(commands[name], words)
        try:
            call()
        except EinlinearError as error:
            raise in_flags(error, flag_names(commands[name])) from error
    elif name in ("-h", "--help"):
        _print_commands()
    elif name.startswith("--tyro-"):  # scripts that complete words in a shell
        tyro.extras.subcommand_cli_from_dict(commands, prog="einlinear", args=list(arguments))
    else:
        raise EinlinearError(
            what=f"there is no command {quote(name)}",
            rule=f"the commands are {', '.join(commands)}",
            fix=did_you_mean(name, list(commands), "see einlinear --help", 0.7),
        )


def _print_commands() -> None:
    texts = {f"  {c.__name__}": (c.__doc__ or "").partition("\n")[0] for c in COMMANDS}
    for line in (_ABOUT, "", "usage: einlinear COMMAND ...", "", "commands:"):
        print(wrapped(line, columns(), ""))
    print(facts_text(texts, columns()))
    print("\nSee einlinear COMMAND --help for the flags of a command.")


@contextmanager
def _imports_end_whole() -> Iterator[None]:
    """Let Ctrl-C during an import end the process at once; otherwise it raises as usual.

    Packages catch exceptions of their imports and continue with half of a module: torch and NumPy
    then fail in strange ways, seconds later.
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
