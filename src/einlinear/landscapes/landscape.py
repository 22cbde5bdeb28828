"""landscape: train all runs of a landscape as a sweep, and analyse their records."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path

from einlinear.data.images import Images, load_images
from einlinear.data.workers import count_processes
from einlinear.errors import EinlinearError
from einlinear.landscapes.config import LandscapeConfig, make_study
from einlinear.landscapes.verdict import Landscape, make_landscape
from einlinear.runs.record import RunRecord
from einlinear.show.progress import Progress
from einlinear.sweeps.driver import SweepProgress
from einlinear.sweeps.job import all_finished
from einlinear.sweeps.sweep import sweep

_OLD_RESULTS = "landscape.jsonl"


def landscape(
    config: LandscapeConfig,
    *,
    out: str | Path,
    data: str | Path | None = None,
    processes: int = 2,
    on_progress: Callable[[Progress], None] = lambda progress: None,
) -> Landscape:
    """Train MLPs over widths, rates, structures and seeds, with and without µP.

    The runs are a sweep in `out`: interrupt it at any time, and call this again to train only the
    runs that are missing. Ref: [P24 §4].

    Args:
        config: what to run.
        out: directory of the sweep.
        data: an .npz file of images, see `load_images`; by default the patches in the package.
        processes: number of runs at once, each on one thread.
        on_progress: called at the start, and then about twice a second.
    """
    processes, out = count_processes(processes), Path(out)
    _check_directory(out)
    images = load_images(data, config.pool)
    study = make_study(config, data)
    records = all_finished(out, {cell.config.id for cell in study.cells})
    _check_data(records.values(), images, out)

    def show(at: SweepProgress) -> None:
        on_progress(Progress(at.finished + at.diverged, at.total, at.share))

    if all(cell.config.id in records for cell in study.cells):
        on_progress(Progress(len(records), len(records), 1.0))
        return make_landscape(config, study, records.values(), images.name)
    result = sweep(study, out, processes=processes, threads=1, on_progress=show)
    if result.failures:
        raise EinlinearError(
            what=f"{len(result.failures)} of {len(result.plan.runs)} runs failed; the first: "
            f"{result.failures[0].reason}",
            rule="a landscape needs the records of all its runs",
            fix=f"see log.txt in {result.failures[0].directory}, then give the same command again",
        )
    _check_data(result.records, images, out)
    return make_landscape(config, study, result.records, images.name)


def _check_directory(out: Path) -> None:
    """Refuse the results of earlier versions, which trained and stored runs in another way."""
    if (out / _OLD_RESULTS).exists():
        raise EinlinearError(
            what=f"{out / _OLD_RESULTS} was written by an earlier version of einlinear",
            rule="a landscape keeps its runs in a folder named runs",
            fix=f"choose another folder; or delete {_OLD_RESULTS} to train its runs again here",
        )


def _check_data(records: Iterable[RunRecord], images: Images, out: Path) -> None:
    """Refuse runs that were trained on other images, although their settings are the same."""
    for record in records:
        if record.environment.get("data") != images.fingerprint:
            raise EinlinearError(
                what=f"the images have changed since run {record.id} in {out}",
                rule="all runs of a landscape see the same images",
                fix="restore the images, or choose another folder",
            )
