"""The command search."""

from __future__ import annotations

import sys
from contextlib import ExitStack
from pathlib import Path
from time import monotonic
from typing import TYPE_CHECKING, Annotated, Any, Literal

import tyro

from einlinear.cli.sweep_display import sweep_display
from einlinear.cli.terminal import columns, console
from einlinear.errors import EinlinearError, quote
from einlinear.runs.presets import TaskName
from einlinear.searches.answer import ANSWER
from einlinear.searches.words import conclusions, leaderboard_table, paste_code, short_names_text
from einlinear.show.numbers import counted, duration, short
from einlinear.show.tables import wrapped
from einlinear.sweeps.placing import ExecutorName

if TYPE_CHECKING:
    from einlinear.searches.next_run import NextRun
    from einlinear.searches.search import SearchResult
    from einlinear.searches.spec import SearchSpec
    from einlinear.searches.state import SearchState
    from einlinear.sweeps.driver import OnSweepProgress, SweepProgress

_LISTS = ("structures", "factors", "num_experts")


def search(
    study: Annotated[Path | None, tyro.conf.Positional, tyro.conf.arg(metavar="STUDY.toml")] = None,
    /,
    *,
    out: Annotated[Path, tyro.conf.arg(metavar="DIR")],
    task: TaskName | None = None,
    minutes: float | None = None,
    flops: float | None = None,
    target_flops: float | None = None,
    structures: tuple[str, ...] = (),
    space: tuple[str, ...] = (),
    widths: tuple[int, ...] = (),
    steps: tuple[int, ...] = (),
    objective: Literal["flops", "seconds"] | None = None,
    seeds: int | None = None,
    seed: int | None = None,
    executor: ExecutorName = "local",
    processes: int | None = None,
    threads: int | None = None,
    address: str | None = None,
) -> None:
    """Search for the structure with the lowest loss at a target compute, within a budget.

    Trains dense layers and other structures at growing sizes and lengths, stops what cannot win,
    and ends with a leaderboard. Interrupt it at any time to see the leaderboard so far; rerun it to
    go on. Several searches on one directory share the work.

    STUDY.toml is optional: [base] holds settings of einlinear train for all runs, [search] any of
    the options below, and [space] which structures to try.

    Args:
        study: File with settings of the runs and of the search.
        out: Directory of the search; each run gets its own in DIR/runs.
        task: What to train on.
        minutes: How long the search may take.
        flops: Or how many FLOPs all runs may have; decisions then do not depend on the clock.
        target_flops: Compute at which losses are compared; by default, ten times the largest run.
        structures: Structures to try first, such as btt "low_rank(rank=8)".
        space: What else to try, such as omega=0 psi=1 nu=0.3:0.7 factors=2,3 sample=50
            num_experts=0,8 head_aligned=true; sample=0 for the listed structures only.
        widths: Widths of dense models, one for each size; by default chosen by the budget.
        steps: Numbers of steps to train for; by default chosen by the budget.
        objective: Compare losses at equal FLOPs, or at equal seconds on this machine.
        seeds: How many runs may differ only in their seed.
        seed: Random seed of the decisions.
        executor: Train in local processes, in this process (inline), on a Ray cluster, or on Slurm.
        processes: Number of runs at once; by default, as many as there are cores, or room on Ray.
        threads: Threads of each run.
        address: Address of a Ray cluster; by default, one is started on this machine.
    """
    from einlinear.searches.search import search as run_search  # loads torch
    from einlinear.searches.search import search_result
    from einlinear.searches.study_file import read_study

    given = read_study(study) if study is not None else {}
    flags: dict[str, Any] = {
        "task": task,
        "minutes": minutes,
        "flops": flops,
        "target_flops": target_flops,
        "widths": widths or None,
        "steps": steps or None,
        "objective": objective,
        "seeds": seeds,
        "seed": seed,
    }
    options = given | {name: value for name, value in flags.items() if value is not None}
    if minutes is not None or flops is not None:  # a flag replaces the budget of the file
        options |= {"minutes": minutes, "flops": flops}
    own = dict(options.pop("space", {})) | _space(space)
    if structures:
        own["structures"] = structures
    try:
        with ExitStack() as stack:
            screen = _Screen(stack, out)
            result = run_search(
                **options,
                space=own,
                out=out,
                executor=executor,
                processes=processes,
                threads=threads,
                address=address,
                on_start=screen.start,
                on_choice=screen.choose,
                on_progress=screen.show,
            )
    except KeyboardInterrupt:
        print("\nstopped; the leaderboard so far:\n")
        try:
            _print_result(search_result(out))
        except EinlinearError:
            print("no run of dense layers has finished yet")
        print("note: rerun the same command to go on", file=sys.stderr)
        raise
    if screen.is_complete:
        print(f"{screen.completion}\n")
    _print_result(result)
    _write_page(result.path)


def _write_page(out: Path) -> None:
    """Write the report of the search; without it, the answer still stands."""
    try:
        from einlinear.reports.write import report  # plots need more packages

        with console().status("drawing the report"):
            page = report(out, resamples=100).page
        print(f"open {page}")
    except (EinlinearError, ArithmeticError, ValueError) as error:
        print(f"note: no report: {error}", file=sys.stderr)


def _print_result(result: SearchResult) -> None:
    width = columns()
    print(leaderboard_table(result.leaderboard, width))
    if names := short_names_text(result.leaderboard, width):
        print(f"\n{names}")
    print()
    for text in conclusions(result.answer):
        print(wrapped(f"- {text}", width))
    print(f"\n    {paste_code(result.leaderboard[0])}\n")
    print(f"wrote {result.path / ANSWER}")


class _Screen:
    """A spinner while the search is prepared, then its choices and the progress of its runs.

    is_complete: whether the search found no run to train.
    """

    def __init__(self, stack: ExitStack, out: Path) -> None:
        self._stack, self._out = stack, out
        self._status = stack.enter_context(console().status("measuring speed"))
        self._display: OnSweepProgress | None = None
        self._labels: dict[str, str] = {}
        self._spec: SearchSpec | None = None
        self._runs, self._spent = 0, 0.0  # runs from before; FLOPs of all
        self.is_complete = True
        self._leader = ""
        self._begin = monotonic()

    def start(self, spec: SearchSpec) -> None:
        self._status.stop()
        self._spec = spec
        self._count_runs(spec)
        candidates = counted(len(spec.space.candidates), "candidate")
        print(f"search: {candidates}, {short(spec.flops)} FLOPs, target {short(spec.target)} FLOPs")
        widths, steps = (", ".join(map(str, v)) for v in (spec.rungs.widths, spec.rungs.steps))
        print(f"sizes:  dense widths {widths}; steps {steps}", flush=True)
        display = sweep_display(console(), self._labels, self._summary)
        self._display = self._stack.enter_context(display)

    def _count_runs(self, spec: SearchSpec) -> None:
        """Count the runs that the directory has already."""
        from einlinear.searches.ladder import Ladder  # loads torch
        from einlinear.searches.state import SearchState
        from einlinear.searches.supply import RunFolder

        records = RunFolder(self._out).read().records
        found = SearchState(spec, Ladder(spec.settings, spec.rungs), records)
        self._runs, self._spent = len(records), found.tally.spent

    @property
    def completion(self) -> str:
        """That nothing is left to train within the budget."""
        return f"The search is complete: {self._so_far(0)}. Give a larger budget to go on."

    def _so_far(self, new: int) -> str:
        assert self._spec is not None, "a search starts before it makes progress"
        share = min(1.0, self._spent / self._spec.flops)
        return f"{counted(self._runs + new, 'run')}, {share:.0%} of the FLOPs"

    def choose(self, choice: NextRun, state: SearchState) -> None:
        from einlinear.searches.next_run import chosen_label  # loads torch

        self.is_complete = False
        self._labels[choice.config.id] = f"{chosen_label(state, choice.config)} ({choice.why})"
        self._spent = state.tally.spent
        if state.trained:
            view = state.outlook()
            self._leader = state.candidates[state.order[view.leader]].label

    def show(self, at: SweepProgress) -> None:
        assert self._display is not None, "a search starts before it makes progress"
        self._display(at)

    def _summary(self, at: SweepProgress) -> str:
        words = f"{self._so_far(at.finished + at.diverged)}, {duration(monotonic() - self._begin)}"
        return words + (f"; {self._leader} leads" if self._leader else "")


def _space(pairs: tuple[str, ...]) -> dict[str, Any]:
    """Settings of a space out of name=value."""
    found: dict[str, Any] = {}
    for pair in pairs:
        name, sign, text = pair.partition("=")
        if not sign or not name or not text:
            raise EinlinearError(
                what=f"--space has {quote(pair)}",
                rule="a space is given as name=value",
                fix="try --space omega=0 psi=1",
            )
        found[name] = _value(name, text)
    return found


def _value(name: str, text: str) -> Any:
    if text in ("true", "false"):
        return text == "true"
    try:
        if ":" in text:
            low, high = text.split(":")
            return (float(low), float(high))
        numbers = [int(part) if part.isdecimal() else float(part) for part in text.split(",")]
    except ValueError:
        raise EinlinearError(
            what=f"--space has {quote(f'{name}={text}')}",
            rule="a value of a space is a number, a range LOW:HIGH, or numbers with commas",
            fix="try --space omega=0 nu=0.3:0.7 factors=2,3",
        ) from None
    return tuple(numbers) if name in _LISTS or len(numbers) > 1 else numbers[0]
