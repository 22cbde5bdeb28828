import json
from dataclasses import replace
from random import Random

import pytest

from einlinear import EinlinearError, RunConfig, RunRecord, load_config, read_record
from einlinear.files.seals import sealed
from einlinear.runs.directory import DamagedError, RunDirectory, read_metrics
from einlinear.runs.record import Counts, LayerRouting, Point

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


def test_records_of_earlier_versions_have_no_training_loss_or_accuracy():
    done = replace(record(), train_loss=2.5, accuracy=0.5)
    values = json.loads(json.dumps(done.as_dict()))
    assert RunRecord.from_dict(values) == done
    del values["train_loss"], values["accuracy"]
    assert RunRecord.from_dict(values) == record()


def test_a_directory_keeps_a_record(tmp_path):
    directory = RunDirectory(tmp_path)
    assert directory.read_record() is None
    directory.write_record(record())
    assert read_record(tmp_path) == read_record(tmp_path / "record.json") == record()


@pytest.mark.parametrize("is_old", [False, True])
@pytest.mark.parametrize(
    ("damage", "words"),
    [
        (lambda values: values.pop("status"), "it lacks 'status'"),
        (lambda values: values.update(schema=0), "its schema is 0, not 2"),
        (lambda values: values.update(schema=True), "its schema is True, not 2"),
        (lambda values: values.update(status="finmshed"), "status is 'finmshed', not 'finished'"),
        (lambda values: values.update(steps_done=True), "steps_done is True, not a whole number"),
        (lambda values: values.update(steps_done=-1), "steps_done is -1, not a whole number"),
        (lambda values: values.update(peak_bytes=10**400), "peak_bytes is a number of about 400"),
        (lambda values: values.update(unit=3), "unit is 3, not a text"),
        (lambda values: values.update(environment=[]), r"environment is \[\], not an object"),
        (lambda values: values.update(curve=3), "curve is 3, not a list"),
        (lambda values: values.update(curve=[]), "it has no points"),
        (lambda values: values.update(counts=None), "counts is None, not an object"),
        (lambda values: values["counts"].pop("macs"), "counts lacks macs"),
        (lambda values: values["curve"][0].pop("loss"), r"curve\[0\] lacks loss"),
        (lambda values: values["curve"][1].update(x=1), r"curve\[1\] has a field 'x'"),
        (lambda values: values["curve"][1].update(step={"a": 1}), r"curve\[1\].step is {'a': 1}"),
        (lambda values: values["curve"][2].update(loss=float("inf")), r"curve\[2\].loss is inf"),
        (lambda values: values["curve"][2].update(loss=None), "finished without a loss"),
        (
            lambda values: values["curve"][2].update(rate=10**400),
            r"curve\[2\].rate is a number of about 400",
        ),
        (
            lambda values: values["curve"][0]["routing"][0].update(load=[1, "2"]),
            r"load\[1\] is '2'",
        ),
        (lambda values: values["config"].update(widht=3), "unknown config key 'widht'"),
        (lambda values: values["config"].update(lr=10**400), "cannot read|lr is"),
        (lambda values: values.update(config=[]), r"the config in .*/record.json is \[\]"),
        (lambda values: values.update(config=1), "the config in .*/record.json is 1"),
    ],
)
def test_every_field_is_checked(tmp_path, damage, words, is_old):
    values = json.loads(json.dumps(record().as_dict())) | {"schema": 1 if is_old else 2}
    damage(values)
    path = tmp_path / "record.json"
    path.write_bytes(json.dumps(values).encode() if is_old else sealed(values))
    words = words if "schema" not in words else "its schema is|it has no seal"
    with pytest.raises(DamagedError, match=words) as caught:
        read_record(path)
    assert len(str(caught.value)) < 800
    assert caught.value.fix == (
        f"train the run again: einlinear train --config {tmp_path}/config.json --out {tmp_path}"
    )


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("{", "Expecting"),
        ("[]", "it is not a JSON object"),
        ("[" * 10**5, "nested too deeply"),
        ('{"schema": 1, "curve": ' + "[" * 10**5, "nested too deeply"),
        (json.dumps(record().as_dict()), "it has no seal"),
        (sealed(record().as_dict()).decode().replace("finished", "diverged"), "checksum is wrong"),
    ],
)
def test_files_that_are_no_records(tmp_path, text, words):
    path = tmp_path / "record.json"
    path.write_text(text, encoding="utf-8")
    with pytest.raises(DamagedError, match=words):
        read_record(path)


@pytest.mark.parametrize("depth", [200, 500, 800, 900, 940, 960, 980])
def test_values_that_are_nested_deeply(tmp_path, depth):
    """As deeply as can be read, and hardly be written."""
    nested = "[" * depth + "]" * depth
    path = tmp_path / "config.json"
    path.write_text(f'{{"width": {nested}}}', encoding="utf-8")
    for read in (RunDirectory(tmp_path).read_config, lambda: load_config(path)):
        with pytest.raises(EinlinearError, match=r"width is|cannot read"):
            read()
    for text in (f'{{"schema": 1, "config": {nested}}}', f'{{"seal": "", "config": {nested}}}'):
        (tmp_path / "record.json").write_text(text, encoding="utf-8")
        with pytest.raises(DamagedError, match="cannot read"):
            read_record(tmp_path)


def test_a_record_of_a_later_version_is_not_damaged(tmp_path):
    (tmp_path / "record.json").write_bytes(sealed(record().as_dict() | {"schema": 3}))
    with pytest.raises(EinlinearError, match="its schema is 3, not 2") as caught:
        read_record(tmp_path)
    assert not isinstance(caught.value, DamagedError)
    assert caught.value.fix == "pip install --upgrade einlinear"


def test_records_without_a_seal_are_still_read(tmp_path):
    text = json.dumps(record().as_dict() | {"schema": 1})
    (tmp_path / "record.json").write_text(text, encoding="utf-8")
    assert read_record(tmp_path) == record()


def test_no_byte_of_a_record_changes_unnoticed(tmp_path):
    path = tmp_path / "record.json"
    RunDirectory(tmp_path).write_record(record())
    data = path.read_bytes()
    random = Random(0)
    noticed = 0
    for place in random.sample(range(len(data)), 600):
        changed = bytes([random.choice([data[place] ^ 1 << random.randrange(8), 48, 49, 57])])
        path.write_bytes(data[:place] + changed + data[place + 1 :])
        try:
            assert read_record(tmp_path) == record(), (place, changed)
        except EinlinearError:
            noticed += 1
    assert noticed > 0.6 * 600  # the rest is space


def test_metrics_of_a_finished_run_are_checked(tmp_path):
    directory = RunDirectory(tmp_path)
    directory.open(RunConfig(structure="btt"))
    directory.append({"step": 1})
    directory.write_record(record())
    directory.close()
    assert read_metrics(tmp_path) == [{"step": 1}]
    (tmp_path / "metrics.jsonl").write_bytes(b'{"step": 2}\n')
    with pytest.raises(DamagedError, match=r"the checksum of metrics.jsonl is wrong"):
        read_metrics(tmp_path)
    (tmp_path / "metrics.jsonl").unlink()
    with pytest.raises(DamagedError, match=r"metrics.jsonl: No such file"):
        read_metrics(tmp_path)


def test_metrics_grow_and_are_rewound(tmp_path):
    directory = RunDirectory(tmp_path)
    directory.open(RunConfig())
    directory.append({"step": 1})
    lines = directory.metrics()
    directory.append({"step": 2})
    directory.close()
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(path.read_bytes() + b'{"step":')
    assert read_metrics(tmp_path) == [{"step": 1}, {"step": 2}]
    for damage, is_whole in ((b"", True), (b"?", False)):
        path.write_bytes(damage + path.read_bytes())
        again = RunDirectory(tmp_path)
        again.open(RunConfig())
        assert again.rewind(lines) == is_whole
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


def test_leftovers_of_processes_that_were_killed(tmp_path):
    directory = RunDirectory(tmp_path)
    names = ["model.safetensors.part", "record.json.part", ".tmpAb12Xy", "notes.txt"]
    names += [f"checkpoints/{name}" for name in (".tmpPfpKbw", "step-000000005.safetensors")]
    names += ["checkpoints/step-000000010.json", "checkpoints/step-000000010.safetensors"]
    names += ["checkpoints/step-000000015.safetensors.part"]
    directory.checkpoints.mkdir()
    for name in names:
        (tmp_path / name).write_bytes(b"")
    directory.open(RunConfig())
    directory.close()
    left = {str(path.relative_to(tmp_path)) for path in tmp_path.rglob("*") if path.is_file()}
    assert left == {"config.json", "metrics.jsonl", "notes.txt", *names[6:8]}
    directory.remove_checkpoints()
    assert not directory.checkpoints.exists()


def test_a_directory_of_another_run_that_has_lost_its_config(tmp_path):
    RunDirectory(tmp_path).write_record(record())
    with pytest.raises(EinlinearError, match=r"holds another run: structure 'btt', not 'dense'"):
        RunDirectory(tmp_path).check(RunConfig())
