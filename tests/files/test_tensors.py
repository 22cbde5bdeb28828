"""Files of tensors: the format of safetensors, written by our own writer."""

import os

import pytest
import torch
from safetensors.torch import load_file, save_file

from einlinear import EinlinearError
from einlinear.files.seals import file_seal
from einlinear.files.tensors import load_tensors, read_tensors, write_tensors

TENSORS = {
    "a": torch.arange(6, dtype=torch.float32).reshape(2, 3),
    "b": torch.tensor(7, dtype=torch.float64),
    "c": torch.tensor([1, 0, 1], dtype=torch.bool),
    "d": torch.randn(5).bfloat16(),
    "e": torch.arange(3, dtype=torch.int64),
    "f": torch.zeros(0, 4),
    "g": torch.arange(256).to(torch.uint8),
    'name with "quotes" and \u00e9': torch.ones(2, dtype=torch.float16),
    "not contiguous": torch.arange(6.0).reshape(2, 3).T,
}


def test_safetensors_reads_what_is_written(tmp_path):
    path = tmp_path / "a.safetensors"
    seal = write_tensors(path, TENSORS)
    assert seal == file_seal(path)
    for read in (load_file(path), load_tensors(path, seal)):
        assert read.keys() == TENSORS.keys()
        for name, tensor in TENSORS.items():
            assert read[name].dtype == tensor.dtype
            assert torch.equal(read[name], tensor)
    other = tmp_path / "b.safetensors"
    save_file({name: tensor.contiguous() for name, tensor in TENSORS.items()}, other)
    assert other.stat().st_size == path.stat().st_size


@pytest.mark.parametrize("mask", [0o022, 0o027])
def test_others_may_read_what_the_umask_lets_them(tmp_path, mask):
    held = os.umask(mask)
    try:
        write_tensors(tmp_path / "a.safetensors", TENSORS)
    finally:
        os.umask(held)
    assert (tmp_path / "a.safetensors").stat().st_mode & 0o777 == 0o666 & ~mask


def test_damage(tmp_path):
    path = tmp_path / "a.safetensors"
    seal = write_tensors(path, TENSORS)
    data = path.read_bytes()
    path.write_bytes(data[:-1] + b"?")
    with pytest.raises(ValueError, match=r"the checksum of a.safetensors is wrong"):
        load_tensors(path, seal)
    path.write_bytes(data[:9])
    with pytest.raises(ValueError, match="header"):
        read_tensors(path)
    with pytest.raises(FileNotFoundError):
        read_tensors(tmp_path / "none")


def test_a_file_that_cannot_be_written(tmp_path):
    (tmp_path / "file").write_bytes(b"")
    with pytest.raises(EinlinearError, match="cannot write"):
        write_tensors(tmp_path / "file" / "a.safetensors", TENSORS)
