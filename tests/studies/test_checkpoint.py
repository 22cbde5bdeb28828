import json

import pytest
import torch

from einlinear import EinlinearError
from einlinear.studies.checkpoint import (
    Checkpoint,
    load_checkpoint,
    read_checkpoint,
    read_tensors,
    remove_checkpoints,
    save_checkpoint,
    write_tensors,
)

LONG = 10**9


def checkpoint(step):
    tensors = {"a": torch.full((3,), float(step)), "b": torch.tensor(step, dtype=torch.float64)}
    return Checkpoint(step, tensors, {"metrics_position": step, "x": 0.1 + step})


def flip(path, place):
    data = bytearray(path.read_bytes())
    data[place] ^= 1
    path.write_bytes(data)


def test_a_checkpoint_is_kept(tmp_path):
    assert load_checkpoint(tmp_path / "none", LONG) is None
    for step in (5, 10, 15):
        save_checkpoint(tmp_path, checkpoint(step))
    read = load_checkpoint(tmp_path, LONG)
    assert read.step == 15
    assert read.values == checkpoint(15).values
    for name, tensor in checkpoint(15).tensors.items():
        assert read.tensors[name].dtype == tensor.dtype
        assert torch.equal(read.tensors[name], tensor)
    assert len(list(tmp_path.iterdir())) == 4  # the last two
    assert read_checkpoint(tmp_path, 10).step == 10
    remove_checkpoints(tmp_path)
    assert not tmp_path.exists()


@pytest.mark.parametrize(
    "damage",
    [
        lambda tensors, values: flip(tensors, -1),
        lambda tensors, values: flip(tensors, 20),
        lambda tensors, values: tensors.write_bytes(tensors.read_bytes()[:-5]),
        lambda tensors, values: tensors.unlink(),
        lambda tensors, values: flip(values, 40),
        lambda tensors, values: values.write_bytes(values.read_bytes()[:50]),
        lambda tensors, values: values.write_bytes(b""),
        lambda tensors, values: values.write_bytes(b"[]"),
        lambda tensors, values: values.write_text(json.dumps({"content": 3, "sha256": ""})),
    ],
)
def test_damage_is_noticed(tmp_path, damage):
    for step in (5, 10):
        save_checkpoint(tmp_path, checkpoint(step))
    damage(tmp_path / "step-000000010.safetensors", tmp_path / "step-000000010.json")
    with pytest.warns(UserWarning, match=r"step-000000010.json is damaged"):
        assert load_checkpoint(tmp_path, LONG).step == 5
    with pytest.raises(EinlinearError, match="cannot read the checkpoint of step 10"):
        read_checkpoint(tmp_path, 10)


def test_metrics_that_are_missing_are_noticed(tmp_path):
    for step in (5, 10):
        save_checkpoint(tmp_path, checkpoint(step))
    with pytest.warns(UserWarning, match="the metrics before it are missing"):
        assert load_checkpoint(tmp_path, 7).step == 5


def test_all_damaged(tmp_path):
    save_checkpoint(tmp_path, checkpoint(5))
    (tmp_path / "step-000000005.safetensors").unlink()
    with pytest.warns(UserWarning, match="damaged"):
        assert load_checkpoint(tmp_path, LONG) is None


def test_half_written_files_are_removed(tmp_path):
    save_checkpoint(tmp_path, checkpoint(5))
    (tmp_path / "step-000000010.safetensors.part").write_bytes(b"half")
    assert load_checkpoint(tmp_path, LONG).step == 5
    remove_checkpoints(tmp_path)
    assert not tmp_path.exists()


def test_files_that_cannot_be_written_or_read(tmp_path):
    (tmp_path / "file").write_bytes(b"")
    with pytest.raises(EinlinearError, match="cannot write"):
        write_tensors(tmp_path / "file" / "a.safetensors", {"a": torch.ones(1)})
    for name in ("file", "none"):
        with pytest.raises(EinlinearError, match="cannot read"):
            read_tensors(tmp_path / name)
