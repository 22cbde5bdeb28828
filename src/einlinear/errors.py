"""The one exception of the package."""

from __future__ import annotations

from pathlib import Path


class EinlinearError(ValueError):
    """Bad input from a user: what was given, the rule it broke, what to type instead.

    All three parts are required, so that no message lacks a remedy.
    """

    def __init__(self, *, what: str, rule: str, fix: str) -> None:
        super().__init__(f"{what}\n  rule: {rule}\n  fix:  {fix}")
        self.what = what
        self.rule = rule
        self.fix = fix

    def __reduce__(self) -> tuple[object, ...]:
        """The parts, so that the error survives the way back from a worker process."""
        return _rebuild, (self.what, self.rule, self.fix)


def _rebuild(what: str, rule: str, fix: str) -> EinlinearError:
    return EinlinearError(what=what, rule=rule, fix=fix)


def cannot_write(path: Path, error: OSError) -> EinlinearError:
    """What to raise where a file cannot be written."""
    return EinlinearError(
        what=f"cannot write {path}: {error.strerror or error}",
        rule="the output goes to a file in a folder that can be written",
        fix="choose another path, or make room and check its permissions",
    )
