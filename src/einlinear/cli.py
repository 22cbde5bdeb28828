"""The command line: all commands, and what is printed when one fails. No logic of its own."""

from __future__ import annotations

import os
import sys
import warnings
from collections.abc import Callable, Sequence
from io import TextIOWrapper

from einlinear import __version__
from einlinear.errors import EinlinearError

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

from einlinear.cli_bench import bench, doctor
from einlinear.cli_landscape import landscape
from einlinear.cli_report import report
from einlinear.cli_structures import atlas, describe
from einlinear.cli_sweep import sweep
from einlinear.cli_train import prepare, sample, train

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

app = tyro.extras.SubcommandApp()
for command in COMMANDS:
    app.command(command)


def main(argv: Sequence[str] | None = None) -> None:
    """Run the command line; bad input ends it with exit code 2 and three lines."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    if arguments == ["--version"]:
        print(f"einlinear {__version__}")
        return
    if isinstance(sys.stdout, TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")  # a terminal may lack the characters of a table
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("always", UserWarning)
            warnings.showwarning = _note  # type: ignore[assignment]
            app.cli(prog="einlinear", description=_ABOUT, args=arguments or ["--help"])
        sys.stdout.flush()
    except EinlinearError as error:
        print(f"einlinear: {error}", file=sys.stderr)
        raise SystemExit(2) from None
    except KeyboardInterrupt:
        print("einlinear: interrupted", file=sys.stderr)
        raise SystemExit(130) from None
    except OSError as error:
        # The reader of the output is gone, or its disk is full: say so, without a second failure.
        sys.stdout = open(os.devnull, "w")
        if not isinstance(error, BrokenPipeError):
            print(f"einlinear: cannot write the output: {error.strerror}", file=sys.stderr)
        raise SystemExit(1) from None


def _note(message: Warning | str, *_: object) -> None:
    print(f"note: {message}", file=sys.stderr)


_ABOUT = f"Linear layers of any structure an einsum can express. Version {__version__}."
