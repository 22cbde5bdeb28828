import json

import pytest

from einlinear import EinlinearError, RunConfig, RunRecord, read_record
from einlinear.studies.directory import RunDirectory, read_metrics
from einlinear.studies.record import Counts, LayerRouting, Point

ROUTING = (LayerRouting("blocks.0.up", (0.25, 0.75), 0.8, None),)


def record(losses=(4.5, 3.0, 3.5), status="finished"):
    curve = tuple(
        Point(
            step=10 * i,
            units=100 * i,
            macs=700 * i,
            seconds=2.0 * i,
            data_seconds=0.1 * i,
            loss=loss,
            train_loss=loss if i else None,
            rate=0.1,
            routing=ROUTING,
        )
        for i, loss in enumerate(losses)
    )
    return RunRecord(
        config=RunConfig(structure="btt"),
        status=status,
        steps_done=20,
        curve=curve,
        unit="token",
        counts=Counts(1, 7, 4, 1, 1, 1),
        peak_bytes=5,
        environment={"torch": "2"},
    )


def test_what_follows_from_the_curve():
    done = record()
    assert (done.final_loss, done.best_loss) == (3.5, 3.0)
    assert (done.seconds, done.units_per_second) == (4.0, 50.0)
    assert done.counts.product_macs == 6
    assert done.id == done.config.id
    lost = record((4.5, None), "diverged")
    assert (lost.final_loss, lost.best_loss) == (None, 4.5)


def test_json_keeps_a_record():
    for done in (record(), record((4.5, None), "diverged")):
        text = json.dumps(done.as_dict(), allow_nan=False)
        assert RunRecord.from_dict(json.loads(text)) == done


def test_a_directory_keeps_a_record(tmp_path):
    directory = RunDirectory(tmp_path)
    assert directory.read_record() is None
    directory.write_record(record())
    assert read_record(tmp_path) == read_record(tmp_path / "record.json") == record()


@pytest.mark.parametrize(
    "damage",
    [
        lambda values: values.pop("status"),
        lambda values: values.update(schema=99),
        lambda values: values["curve"][0].pop("loss"),
        lambda values: values["config"].update(widht=3),
        lambda values: values.update(curve=3),
    ],
)
def test_records_that_cannot_be_read(tmp_path, damage):
    values = record().as_dict()
    damage(values)
    path = tmp_path / "record.json"
    path.write_text(json.dumps(values), encoding="utf-8")
    with pytest.raises(EinlinearError):
        read_record(path)
    path.write_text("{", encoding="utf-8")
    with pytest.raises(EinlinearError, match="cannot read"):
        read_record(path)


def test_metrics_grow_and_are_rewound(tmp_path):
    directory = RunDirectory(tmp_path)
    directory.open(RunConfig())
    directory.append({"step": 1})
    position = directory.metrics_position()
    directory.append({"step": 2})
    directory.close()
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(path.read_bytes() + b'{"step":')
    assert read_metrics(tmp_path) == [{"step": 1}, {"step": 2}]
    again = RunDirectory(tmp_path)
    again.open(RunConfig())
    again.rewind(position)
    again.append({"step": 3})
    again.close()
    assert read_metrics(tmp_path) == [{"step": 1}, {"step": 3}]


def test_a_directory_is_that_of_one_run(tmp_path):
    directory = RunDirectory(tmp_path)
    directory.open(RunConfig())
    directory.check(RunConfig(checkpoint_every=7))
    with pytest.raises(EinlinearError, match=r"holds another run: .*lr 0.01, not 0.5"):
        directory.check(RunConfig(lr=0.5))
    with pytest.raises(EinlinearError, match="another process is training"):
        RunDirectory(tmp_path).open(RunConfig())
    directory.close()


def test_a_directory_that_cannot_be_written(tmp_path):
    (tmp_path / "file").write_text("", encoding="utf-8")
    with pytest.raises(EinlinearError, match="cannot write"):
        RunDirectory(tmp_path / "file").open(RunConfig())
    with pytest.raises(EinlinearError, match="cannot write"):
        RunDirectory(tmp_path / "file").write_record(record())


@pytest.mark.parametrize(
    "damage", [{"curve": []}, {"curve": 3}, {"counts": None}, {"config": []}, {"config": 1}]
)
def test_a_record_of_wrong_shape(damage):
    values = json.loads(json.dumps(record().as_dict()))
    with pytest.raises(EinlinearError):
        RunRecord.from_dict(values | damage)
