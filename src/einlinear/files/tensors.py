"""Files of tensors in the safetensors format, written atomically."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from hashlib import sha256
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from einlinear.files.seals import check_file
from einlinear.files.whole import write_whole

# The format's names of types. Runs have no float8 and no complex numbers.
_NAMES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}
_ALIGNMENT = 8


def can_write(tensor: Tensor) -> bool:
    """Whether `write_tensors` can write a tensor."""
    return tensor.dtype in _NAMES and tensor.layout == torch.strided


def write_tensors(path: Path, tensors: Mapping[str, Tensor]) -> str:
    """Write CPU tensors to a safetensors file and return the checksum of the file.

    safetensors' own `save_file` creates a file that only its owner can read, under a temporary name
    that stays behind when the process is killed.
    """
    digest = sha256()

    def hashed() -> Iterator[bytes | memoryview]:
        for chunk in _chunks(tensors):
            digest.update(chunk)
            yield chunk

    write_whole(path, hashed())
    return digest.hexdigest()


def load_tensors(path: Path, seal: str) -> dict[str, Tensor]:
    """Read the tensors of a safetensors file; raise a ValueError or OSError if it is damaged."""
    check_file(path, seal)
    return read_tensors(path)


def read_tensors(path: Path) -> dict[str, Tensor]:
    """Read the tensors of a safetensors file without checking a seal."""
    try:
        return load_file(path)
    except SafetensorError as error:
        raise ValueError(str(error)) from error


def _chunks(tensors: Mapping[str, Tensor]) -> Iterator[bytes | memoryview]:
    """The bytes of a file: the length of its header, the header, and the memory of the tensors.

    The format wants numbers at multiples of their size, so the widest come first.
    """
    order = sorted(tensors, key=lambda name: (-tensors[name].element_size(), name))
    header: dict[str, object] = {}
    end = 0
    for name in order:
        tensor = tensors[name]
        start, end = end, end + tensor.nbytes
        header[name] = {
            "dtype": _NAMES[tensor.dtype],
            "shape": list(tensor.shape),
            "data_offsets": [start, end],
        }
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % _ALIGNMENT)
    yield len(text).to_bytes(8, "little")
    yield text
    for name in order:
        yield tensors[name].detach().contiguous().view(-1).view(torch.uint8).numpy().data
