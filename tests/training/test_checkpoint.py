import json

import pytest
import torch

from einlinear import EinlinearError
from einlinear.files.seals import sealed
from einlinear.training.checkpoint import (
    Checkpoint,
    load_checkpoint,
    read_checkpoint,
    save_checkpoint,
)


def checkpoint(step):
    tensors = {"a": torch.full((3,), float(step)), "b": torch.tensor(step, dtype=torch.float64)}
    return Checkpoint(step, tensors, {"x": 0.1 + step})


def flip(path, place):
    data = bytearray(path.read_bytes())
    data[place] ^= 1
    path.write_bytes(data)


def test_a_checkpoint_is_kept(tmp_path):
    assert load_checkpoint(tmp_path / "none") is None
    for step in (5, 10, 15):
        save_checkpoint(tmp_path, checkpoint(step))
    read = load_checkpoint(tmp_path)
    assert read.step == 15
    assert read.values == checkpoint(15).values
    for name, tensor in checkpoint(15).tensors.items():
        assert read.tensors[name].dtype == tensor.dtype
        assert torch.equal(read.tensors[name], tensor)
    assert len(list(tmp_path.iterdir())) == 4  # the last two
    assert read_checkpoint(tmp_path, 10).step == 10


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
        lambda tensors, values: values.write_text(json.dumps({"content": 3, "seal": ""})),
        lambda tensors, values: values.write_bytes(b'{"values": ' + b"[" * 10**5),
        lambda tensors, values: values.write_bytes(sealed({"schema": 1, "step": 10})),
        lambda tensors, values: values.write_bytes(sealed({"schema": 2, "step": 10})),
    ],
)
def test_damage_is_noticed(tmp_path, damage):
    for step in (5, 10):
        save_checkpoint(tmp_path, checkpoint(step))
    damage(tmp_path / "step-000000010.safetensors", tmp_path / "step-000000010.json")
    with pytest.warns(UserWarning, match=r"step-000000010.json is damaged"):
        assert load_checkpoint(tmp_path).step == 5
    with pytest.raises(EinlinearError, match="cannot read the checkpoint of step 10"):
        read_checkpoint(tmp_path, 10)


def test_a_checkpoint_is_kept_beside_those_of_later_steps(tmp_path):
    """As after two that were damaged: the run has come back to an earlier step."""
    for step in (80, 82, 5, 10):
        save_checkpoint(tmp_path, checkpoint(step))
    assert load_checkpoint(tmp_path).step == 10
    assert read_checkpoint(tmp_path, 5).step == 5
    assert len(list(tmp_path.iterdir())) == 4


def test_what_cannot_be_read_now_is_not_damaged(tmp_path):
    save_checkpoint(tmp_path, checkpoint(5))
    (tmp_path / "step-000000007.json").symlink_to("step-000000007.json")  # a loop
    with pytest.raises(EinlinearError, match=r"cannot read the checkpoint .*step-000000007.json"):
        load_checkpoint(tmp_path)


def test_a_checkpoint_of_an_earlier_version(tmp_path):
    save_checkpoint(tmp_path, checkpoint(5))
    (tmp_path / "step-000000007.json").write_text(json.dumps({"content": "{}", "sha256": "0"}))
    with pytest.raises(EinlinearError, match="written by an earlier version") as error:
        load_checkpoint(tmp_path)
    assert error.value.fix.endswith(f"or remove {tmp_path} to start again")


def test_all_damaged(tmp_path):
    save_checkpoint(tmp_path, checkpoint(5))
    (tmp_path / "step-000000005.safetensors").unlink()
    with pytest.warns(UserWarning, match="damaged .*; starting again from step 0"):
        assert load_checkpoint(tmp_path) is None
