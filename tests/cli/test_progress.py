import io

import pytest
from rich.console import Console

from einlinear.cli import progress
from einlinear.show.progress import Progress
from einlinear.training.pace import TrainProgress


def test_a_bar_in_a_terminal():
    file = io.StringIO()
    console = Console(file=file, force_terminal=True, width=100)
    with progress.progress_bar(console, "runs") as show:
        show(Progress(0, 7, 0.0))
        show(Progress(7, 7, 1.0))
    assert "7 of 7 runs" in file.getvalue()


def test_lines_in_a_log(capsys, monkeypatch):
    now = [100.0]
    monkeypatch.setattr(progress, "monotonic", lambda: now[0])
    with progress.progress_bar(Console(file=io.StringIO()), "runs") as show:
        for seconds, done, share in ((0, 4, 0.2), (5, 5, 0.3), (20, 6, 0.4), (60, 10, 1.0)):
            now[0] = 100.0 + seconds
            show(Progress(done, 10, share))
    # In 20 seconds a fifth of the work was done, 0.2 to 0.4: the rest, 0.6, takes 60.
    assert capsys.readouterr().err.splitlines() == [
        "4 of 10 runs, 0 s",
        "6 of 10 runs, 20 s, about 60 s left",
        "10 of 10 runs, 60 s",
    ]


def test_an_error_passes_through(capsys):
    with pytest.raises(ZeroDivisionError):
        with progress.progress_bar(Console(file=io.StringIO()), "runs"):
            _ = 1 / 0


def test_a_log_of_work_whose_end_is_not_known(capsys):
    with progress.progress_bar(Console(file=io.StringIO()), "MB") as show:
        show(Progress(0, 0, 0.0))  # says nothing
        show(Progress(1, 0, 0.0))
        show(Progress(5, 0, 0.0))  # too soon after the first
        show(Progress(9, 9, 1.0))
    lines = capsys.readouterr().err.splitlines()
    assert [line.split(",")[0] for line in lines] == ["1 MB", "9 of 9 MB"]


def test_a_bar_of_work_that_has_just_begun():
    file = io.StringIO()
    with progress.progress_bar(Console(file=file, force_terminal=True, width=100), "MB") as show:
        show(Progress(0, 0, 0.0))
    assert "0 MB" not in file.getvalue()
    assert "starting" in file.getvalue()


def at(done, left=0.0):
    return TrainProgress(done, 100, 2.5, "token", 12_345.6, left)


def test_a_bar_of_training():
    file = io.StringIO()
    console = Console(file=file, force_terminal=True, width=120)
    with progress.training_bar(console) as show:
        show(at(40, 65.2))
        show(at(100))
    assert "step 100 of 100, training loss 2.5000, 12,346 tokens/s, 0:00 left" in file.getvalue()


def test_lines_of_training(capsys, monkeypatch):
    now = [100.0]
    monkeypatch.setattr(progress, "monotonic", lambda: now[0])
    with progress.training_bar(Console(file=io.StringIO())) as show:
        for seconds, done in ((0, 1), (5, 2), (16, 30), (20, 100)):
            now[0] = 100.0 + seconds
            show(at(done, 65.2))
    lines = capsys.readouterr().err.splitlines()
    assert [line.split(",")[0] for line in lines] == [f"step {n} of 100" for n in (1, 30, 100)]
    assert lines[0].endswith("1:05 left")
