"""Full disks: three lines, nothing half written, and the run goes on when there is room."""

import pytest

from einlinear.cli.main import main
from einlinear.runs.directory import RunDirectory, read_record
from einlinear.sweeps.run_job import run_job
from einlinear.training.train import train
from kit.jobs import tiny_job
from kit.runs import numbers, tiny, with_little_room, without_clock

# What cannot be written, by the largest size of a file.
FULL = {1000: "metrics.jsonl", 5000: "checkpoints/step-000000005.safetensors"}
ERROR = """cannot write {}: File too large
  rule: the output goes to a file in a folder that can be written
  fix:  choose another path, or make room and check its permissions
"""


@pytest.fixture(scope="module")
def whole_run(tmp_path_factory):
    """The directory of a run that had room."""
    out = tmp_path_factory.mktemp("whole")
    train(tiny(), out)
    return out


@pytest.mark.parametrize("size", FULL)
def test_train_says_it_in_three_lines(tmp_path, whole_run, size):
    path, out = tmp_path / "run.toml", tmp_path / "out"
    path.write_text(tiny().to_toml(), encoding="utf-8")
    command = ["train", "--config", str(path), "--out", str(out)]
    code, said, _ = with_little_room(tmp_path / "said", size, main, command)
    assert code == 2
    assert said.partition("einlinear: ")[2] == ERROR.format(out / FULL[size])
    assert "Traceback" not in said
    assert not list(out.rglob("*.part"))
    train(tiny(), out)
    assert numbers(out) == numbers(whole_run)
    assert without_clock(read_record(out)) == without_clock(read_record(whole_run))


@pytest.mark.parametrize("size", [0, 100, *FULL])
def test_a_job_of_a_sweep_fails_in_three_lines(tmp_path, size):
    job = tiny_job(tmp_path)
    code, said, outcome = with_little_room(tmp_path / "said", size, run_job, job)
    assert code == 0, said
    assert outcome.end == "error"
    assert outcome.text == ERROR.format(job.directory / FULL.get(size, "config.json"))
    assert run_job(job).end == "done"
    assert not list(job.directory.glob("claim-*"))


def test_closing_raises_nothing(tmp_path):
    directory = RunDirectory(tmp_path)
    directory.open(tiny())
    directory._metrics.close()
    with open("/dev/full", "ab", buffering=0) as full:
        directory._metrics = full
        with pytest.raises(ValueError, match=r"metrics.jsonl: No space left on device"):
            directory.append({"step": 1})
        directory.close()
    directory.close()
