"""All checks of a subject, one result each: a failure of one does not stop the others."""

from __future__ import annotations

import logging
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Literal

import torch

from einlinear.bench.doctor.checks import (
    check_backward,
    check_convert,
    check_forward,
    check_groups,
    check_pretrained,
    check_project,
    check_save,
    is_pretrained,
)
from einlinear.bench.doctor.programs import check_compile, check_export, check_onnx
from einlinear.bench.doctor.reasons import CheckSkippedError, Note, long_fix, plain_reason
from einlinear.bench.doctor.speed import check_speed
from einlinear.bench.doctor.subject import Subject
from einlinear.show.numbers import counted, listed
from einlinear.show.tables import text_table, wrapped

CheckStatus = Literal["works", "failed", "skipped"]
CheckName = Literal[
    "convert",
    "project",
    "forward",
    "backward",
    "compile",
    "export",
    "onnx",
    "save",
    "pretrained",
    "mup",
    "speed",
    "speed-training",
]
CONVERT: CheckName = "convert"
_LEGEND = (
    "speed: before / after, measured in turns: the median over rounds and, in brackets, the middle "
    "four fifths of them; s: seconds that the check took"
)


@dataclass(frozen=True, slots=True)
class Check:
    """A check by its name.

    run: takes a subject and returns a Note; raises if something does not work.
    has_plain: whether it can be made of the model before conversion, is_plain=True, to tell whose
        fault a failure is.
    shows_rounds: whether it takes on_progress.
    hint: what to say while it runs.
    """

    name: CheckName
    run: Callable[..., Note]
    has_plain: bool = False
    shows_rounds: bool = False
    hint: str = ""


CHECKS = (
    Check(CONVERT, check_convert),
    Check("project", check_project),
    Check("forward", check_forward, has_plain=True),
    Check("backward", check_backward, has_plain=True),
    Check("compile", check_compile, has_plain=True, hint="; the compiler can take minutes"),
    Check("export", check_export, has_plain=True),
    Check("onnx", check_onnx, has_plain=True),
    Check("save", check_save),
    Check("pretrained", check_pretrained),
    Check("mup", check_groups),
    Check("speed", partial(check_speed, has_backward=False), shows_rounds=True),
    Check("speed-training", partial(check_speed, has_backward=True), shows_rounds=True),
)


@dataclass(frozen=True, slots=True)
class CheckResult:
    """What a check found.

    note: what works, or the reason why not, in one line.
    wall_seconds: how long the check took.
    numbers: the numbers of the note.
    fix: code to paste or another fix of many lines, if there is one.
    """

    name: str
    status: CheckStatus
    note: str
    wall_seconds: float
    numbers: Mapping[str, float] = field(default_factory=dict)
    fix: str = ""


def checks_for(subject: Subject, skip: Sequence[str] = ()) -> tuple[Check, ...]:
    """The checks that apply to a model; "pretrained" only to those of Hugging Face."""
    left_out = {*skip, *([] if is_pretrained(subject.plain()) else ["pretrained"])}
    return tuple(check for check in CHECKS if check.name not in left_out)


def examine(
    check: Check, subject: Subject, on_progress: Callable[[str], None] | None = None
) -> CheckResult:
    """Make one check of a fresh model; whatever it raises becomes a result."""
    options: dict[str, Any] = {"on_progress": on_progress} if check.shows_rounds else {}
    begin = time.perf_counter()
    status: CheckStatus = "works"
    fix = ""
    with _quiet():
        try:
            note = check.run(subject, **options)
        except CheckSkippedError as error:
            status, note = "skipped", Note(str(error))
        except Exception as error:
            status, fix = "failed", long_fix(error)
            is_old = check.has_plain and _fails_before_conversion(check, subject)
            note = Note(plain_reason(error) + ". The model fails before conversion, too" * is_old)
    seconds = time.perf_counter() - begin
    return CheckResult(check.name, status, note.text, seconds, note.numbers, fix)


def diagnose(
    checks: Sequence[Check],
    subject: Subject,
    show: Callable[[str], Callable[[str], None]] | None = None,
) -> list[CheckResult]:
    """Make all checks in turn; if the model cannot be converted, there is nothing else to check.

    show: called with the name of each check; returns a function that shows where the check is.
    """
    results: list[CheckResult] = []
    for number, check in enumerate(checks, 1):
        if any(r.name == CONVERT and r.status == "failed" for r in results):
            results.append(CheckResult(check.name, "skipped", "needs a converted model", 0.0))
            continue
        case = f"check {number} of {len(checks)}: {check.name}{check.hint}"
        results.append(examine(check, subject, None if show is None else show(case)))
    return results


def _fails_before_conversion(check: Check, subject: Subject) -> bool:
    try:
        check.run(subject, is_plain=True)
    except Exception:
        return True
    return False


@contextmanager
def _quiet() -> Iterator[None]:
    """Seeded random numbers, and nothing of what torch logs while it makes programs."""
    disabled = logging.root.manager.disable
    with warnings.catch_warnings(), torch.random.fork_rng(devices=[]):
        warnings.simplefilter("ignore")
        torch.manual_seed(0)
        logging.disable(logging.CRITICAL)
        try:
            yield
        finally:
            logging.disable(disabled)


def results_table(results: Sequence[CheckResult], width: int) -> str:
    """One row for each result; notes are wrapped. Below, what the speeds mean and long fixes."""
    rows = [(r.name, r.status, r.note, f"{r.wall_seconds:.1f}") for r in results]
    parts = [text_table(("check", "result", "notes", "s"), rows, left=3, width=width)]
    if any("speed" in r.numbers for r in results):
        parts[0] += "\n" + wrapped(_LEGEND, width, "")
    parts += [f"{r.name}: {r.fix}" for r in results if r.fix]
    return "\n\n".join(parts)


def conclusion(results: Sequence[CheckResult]) -> str:
    """What to remember of all results."""
    named = {
        status: [r.name for r in results if r.status == status] for status in ("failed", "skipped")
    }
    skipped = f" Skipped: {listed(named['skipped'])}." * bool(named["skipped"])
    if named["failed"]:
        number = f"{len(named['failed'])} of {counted(len(results), 'check')}"
        return f"{number} failed: {listed(named['failed'])}.{skipped}"
    made = len(results) - len(named["skipped"])
    return f"{'All ' * (made > 1)}{counted(made, 'check')} passed.{skipped}"
