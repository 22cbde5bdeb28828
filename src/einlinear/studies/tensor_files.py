"""Files of tensors in the safetensors format, written whole or not at all."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from hashlib import sha256
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from einlinear.files import write_whole
from einlinear.studies.seals import check_file, counted_in

# The names of the format. Those of float8 and complex numbers are left out: no run has them.
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


def write_tensors(path: Path, tensors: Mapping[str, Tensor]) -> str:
    """Write tensors of the processor as a safetensors file; returns the checksum of the file.

    safetensors' own `save_file` makes a file that only its owner may read, under a name of its own,
    which stays behind when the process is killed.
    """
    digest = sha256()
    write_whole(path, counted_in(digest, _chunks(tensors)))
    return digest.hexdigest()


def load_tensors(path: Path, seal: str) -> dict[str, Tensor]:
    """The tensors of a safetensors file, by name; a ValueError or OSError if it is damaged."""
    check_file(path, seal)
    return read_tensors(path)


def read_tensors(path: Path) -> dict[str, Tensor]:
    """The tensors of a safetensors file that has no seal, by name."""
    try:
        return load_file(path)
    except SafetensorError as error:
        raise ValueError(str(error)) from error


def _chunks(tensors: Mapping[str, Tensor]) -> Iterator[bytes | memoryview]:
    """The bytes of a file: the length of its header, the header, and the memory of the tensors.

    The format wants numbers at addresses that are multiples of their size: the widest come first.
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
