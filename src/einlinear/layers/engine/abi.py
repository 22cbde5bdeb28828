"""The constants and structs of arguments that Python and the C engine share: the only list of them.

`abi.h` is this list in C. After a change, rewrite it by `python -m einlinear.layers.engine.abi`;
a test fails while the two differ. At load time, `binding` compares the fingerprint of the list and
the sizes of the structs with those the library was compiled with, and rejects another library.

Why Python holds the list: flat programs are compiled without the library and without a C compiler,
and mypy checks the names. Why the header is kept in the repository: building the engine then
takes only a C compiler, and C tools see ordinary declarations.
"""

from __future__ import annotations

import ctypes
from enum import IntEnum
from pathlib import Path
from zlib import crc32

PROGRAM_VERSION = 6
"""Increase it when a program or a call keeps its layout but changes its meaning."""
TOKENS_EXTENT = -1
LOOP_LENGTH = 4
DIM_LENGTH = 3
MAX_PROGRAM_STEPS = 32
MAX_BUFFERS = 256
MAX_LOOPS = 64


class ProgramHeader(IntEnum):
    """Fields at the start of a flat program."""

    VERSION = 0
    D_IN = 1
    D_OUT = 2
    D_IN_PADDED = 3
    D_OUT_PADDED = 4
    MACS = 5
    STEPS = 6
    BLOCK = 7
    CHUNK = 8
    SCRATCH = 9
    COPIES_ROWS = 10
    ROW_BUFFERS = 11
    FORWARD = 12
    BACKWARD = 13
    TRANSPOSES = 14
    COLLECTS = 15
    LENGTH = 16


class OpField(IntEnum):
    """Fields at the start of every operation."""

    LENGTH = 0
    KIND = 1
    ROLE = 2
    STEP = 3


class MultiplyField(IntEnum):
    """Further fields of a multiply: C[i, n] (+)= sum over k of S[i, k] * W[k, n]."""

    C = 4
    S = 5
    W = 6
    ROWS = 7
    N = 8
    K = 9
    C_I = 10
    S_I = 11
    S_K = 12
    W_K = 13
    GROUP = 14
    K_BLOCK = 15
    N_BLOCK = 16
    GATHER = 17
    MOST_ROWS = 18  # of a tile of two vectors
    LOOPS = 19


class CopyField(IntEnum):
    """Further fields of a copy."""

    TO = 4
    FROM = 5
    DIMS = 6


class OpKind(IntEnum):
    """What an operation does."""

    MULTIPLY = 1
    COPY = 2


class OpRole(IntEnum):
    """What an operation is for."""

    FORWARD = 0
    INPUT_GRADIENT = 1
    WEIGHT_GRADIENT = 2
    PACK = 3
    TRANSPOSE = 4
    COLLECT = 5


class RowBuffer(IntEnum):
    """Numbers of the buffers that hold rows of tokens; INNER is the first intermediate."""

    X = 0
    Y = 1
    GY = 2
    GX = 3
    INNER = 4


class EngineDtype(IntEnum):
    """Data types of rows, factors and bias."""

    FLOAT32 = 0
    FLOAT64 = 1
    BFLOAT16 = 2


class Target(IntEnum):
    """Instruction sets that the kernels are compiled for; NEON is GENERIC on aarch64."""

    GENERIC = 0
    AVX2 = 1
    AVX512 = 2


class Activation(IntEnum):
    """Activations of feed-forward nets; GELU_TANH is the approximation by tanh."""

    RELU = 0
    GELU = 1
    GELU_TANH = 2
    SILU = 3


class EngineStatus(IntEnum):
    """What a call returns: OK, or the one reason why it did nothing."""

    OK = 0
    NO_MEMORY = 1
    PROGRAM_VERSION = 2
    TOO_MANY_STEPS = 3
    TOO_MANY_BUFFERS = 4
    UNKNOWN_DTYPE = 5
    NO_INPUT = 6
    BFLOAT16_NORM = 7
    EXPERT_COUNT = 8
    PAIR_COUNT = 9
    EXPERT_ENDS = 10
    PAIR_TOKENS = 11
    BIAS_ROWS = 12
    BAD_NET = 13
    TIED_LOGITS = 14
    ACTIVE_COUNT = 15


# Field, its type in C, what it holds.
_CALL_FIELDS = (
    ("program", "const int64_t *", "flat program"),
    ("dtype", "int64_t ", "one of DTYPE_*"),
    ("tokens", "int64_t ", "number of tokens"),
    ("threads", "int64_t ", "most threads to use"),
    ("x", "const void *", "rows of input; NULL if no gradient of a factor is wanted"),
    ("x_row", "int64_t ", "distance between rows, in numbers, as all fields named *_row"),
    ("factors", "const void *const *", "one address per step; of experts one after the other"),
    ("bias", "const void *", "added to every row of y, or NULL"),
    ("y", "void *", "rows of output"),
    ("y_row", "int64_t ", ""),
    ("stds", "const double *", "one per step: scale factor M by 1 / max(1, rms(M) / std); or NULL"),
    (
        "scales",
        "void *",
        "these scales: double, per step; experts: as pair_weights, per step, expert",
    ),
    ("scales_known", "int64_t ", "nonzero: read the scales instead of writing them"),
    ("grad_y", "const void *", "from here on for backward calls; NULL: gradient not wanted"),
    ("grad_y_row", "int64_t ", ""),
    ("grad_x", "void *", ""),
    ("grad_x_row", "int64_t ", ""),
    ("grad_bias", "void *", ""),
    ("grad_factors", "void *const *", "one address per step"),
    ("grad_pair_weights", "void *", ""),
    ("num_experts", "int64_t ", "from here on for calls of experts"),
    ("num_pairs", "int64_t ", "number of (token, expert) pairs, sorted by expert"),
    ("pair_tokens", "const int64_t *", "the token of each pair"),
    ("expert_ends", "const int64_t *", "where the pairs of each expert end"),
    ("pair_weights", "const void *", "double for DTYPE_FLOAT64, else float; NULL: all are 1"),
    ("x_by_token", "int64_t ", "nonzero: x has one row per token, else one per pair"),
    ("y_by_token", "int64_t ", "nonzero: y has one row per token, else one per pair"),
)
_GATE_FIELDS = (
    ("dtype", "int64_t ", "DTYPE_FLOAT32 or DTYPE_FLOAT64"),
    ("tokens", "int64_t ", "number of tokens"),
    ("width", "int64_t ", "numbers of a row of x"),
    ("num_experts", "int64_t ", ""),
    ("num_active", "int64_t ", "how many experts each token uses"),
    ("threads", "int64_t ", "most threads to use"),
    ("x", "const void *", "rows of input"),
    ("x_row", "int64_t ", "distance between rows, in numbers"),
    ("gate", "const void *", "one row of weights per expert, as x"),
    ("logits", "void *", "written forward: one row per token, one number per expert"),
    ("chosen", "int64_t *", "written forward: the active experts of each token, the best first"),
    ("pair_order", "int64_t *", "written forward: where each pair is in `chosen`"),
    ("pair_tokens", "int64_t *", "written forward, read backward: as in the call of experts"),
    ("expert_ends", "int64_t *", "so are this"),
    ("pair_weights", "void *", "and this"),
    ("grad_pair_weights", "const void *", "from here on for backward calls"),
    ("grad_logits", "const void *", "to be added to what comes from the weights; or NULL"),
    ("grad_x", "void *", "the share of the gate is added to it; NULL: not wanted"),
    ("grad_x_row", "int64_t ", ""),
    ("grad_gate", "void *", "NULL: not wanted"),
)


def _ctypes_of(fields: tuple[tuple[str, str, str], ...]) -> list[tuple[str, type]]:
    """Addresses are plain integers: unlike c_void_p, c_size_t does not take None for 0."""
    return [
        (name, ctypes.c_int64 if c_type == "int64_t " else ctypes.c_size_t)
        for name, c_type, _ in fields
    ]


class CallArguments(ctypes.Structure):
    """The arguments of every call of a program; fields that are not set are 0 or NULL."""

    _fields_ = _ctypes_of(_CALL_FIELDS)


class GateArguments(ctypes.Structure):
    """The arguments of every call of a gate; fields that are not set are 0 or NULL."""

    _fields_ = _ctypes_of(_GATE_FIELDS)


_STRUCTS = {CallArguments: _CALL_FIELDS, GateArguments: _GATE_FIELDS}


_CONSTANTS = {
    "PROGRAM_VERSION": PROGRAM_VERSION,
    "TOKENS_EXTENT": TOKENS_EXTENT,
    "LOOP_LENGTH": LOOP_LENGTH,
    "DIM_LENGTH": DIM_LENGTH,
    "MAX_STEPS": MAX_PROGRAM_STEPS,
    "MAX_BUFFERS": MAX_BUFFERS,
    "MAX_LOOPS": MAX_LOOPS,
}
_PREFIXES: dict[str, type[IntEnum]] = {
    "HEADER": ProgramHeader,
    "OP": OpField,
    "MULTIPLY": MultiplyField,
    "COPY": CopyField,
    "KIND": OpKind,
    "ROLE": OpRole,
    "BUFFER": RowBuffer,
    "DTYPE": EngineDtype,
    "TARGET": Target,
    "ACTIVATION": Activation,
    "STATUS": EngineStatus,
}


def _enums() -> list[tuple[str, dict[str, int]]]:
    """The comment and the names of every enum of the header."""
    enums = [("Versions, lengths of entries, and limits.", _CONSTANTS)]
    for prefix, members in _PREFIXES.items():
        names = {f"{prefix}_{member.name}": int(member) for member in members}
        enums.append((str(members.__doc__), names))
    return enums


def abi_fingerprint() -> int:
    """A number that differs, almost surely, between two lists; the library has its own."""
    values = [names for _, names in _enums()]
    fields = [(name, c_type) for name, c_type, _ in (*_CALL_FIELDS, *_GATE_FIELDS)]
    return crc32(repr((values, fields)).encode()) & 0x7FFFFFFF


def header_text() -> str:
    """The list as a C header."""
    lines = [
        "/* The constants and structs of arguments that C and Python share. To change this file,",
        "   edit abi.py and run `python -m einlinear.layers.engine.abi`. */",
        "",
        "#ifndef EINLINEAR_ABI_H",
        "#define EINLINEAR_ABI_H",
        "",
        "#include <stdint.h>",
    ]
    for comment, names in (
        *_enums(),
        ("Identifies this list.", {"ABI_FINGERPRINT": abi_fingerprint()}),
    ):
        members = [f"    {name} = {value}," for name, value in names.items()]
        lines += ["", f"/* {comment} */", "enum {", *members, "};"]
    for struct, fields in _STRUCTS.items():
        lines += ["", f"/* {struct.__doc__} */", "typedef struct {"]
        for name, c_type, comment in fields:
            lines += [f"    /* {comment} */"] if comment else []
            lines += [f"    {c_type}{name};"]
        lines += [f"}} {struct.__name__};"]
    return "\n".join([*lines, "", "#endif", ""])


if __name__ == "__main__":
    Path(__file__).with_name("abi.h").write_text(header_text(), encoding="utf-8")
