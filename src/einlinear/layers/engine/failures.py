"""What the engine's statuses mean to a caller: what happened, the rule it broke, what to do."""

from __future__ import annotations

from einlinear.errors import EinlinearError
from einlinear.layers.engine.abi import (
    MAX_BUFFERS,
    MAX_PROGRAM_STEPS,
    EngineDtype,
    EngineStatus,
)

_DTYPES = ", ".join(dtype.name.lower() for dtype in EngineDtype)
_PAIRS = "pairs are sorted by expert; ends[e] is where those of expert e end; tokens count from 0"
_FIX_MIXTURE = "pass the tables that routing makes"
_OTHER_VARIANT = "use another variant"
# EngineStatus.NO_MEMORY is not here: it is a MemoryError.
_FAILURES = {
    EngineStatus.PROGRAM_VERSION: (
        "the engine was given a program of another version",
        "the library and the package are built together",
        f"reinstall the package, or {_OTHER_VARIANT}",
    ),
    EngineStatus.TOO_MANY_STEPS: (
        "the structure has too many factors for the engine",
        f"the engine takes up to {MAX_PROGRAM_STEPS} factors",
        _OTHER_VARIANT,
    ),
    EngineStatus.TOO_MANY_BUFFERS: (
        "the structure has too many intermediates for the engine",
        f"the engine takes up to {MAX_BUFFERS} buffers",
        _OTHER_VARIANT,
    ),
    EngineStatus.UNKNOWN_DTYPE: (
        "the engine was given an unknown dtype",
        f"dtypes are {_DTYPES}",
        _OTHER_VARIANT,
    ),
    EngineStatus.NO_INPUT: (
        "the engine was given no input",
        "only the gradients of x and of the bias can be computed without it",
        "pass the rows of x",
    ),
    EngineStatus.BFLOAT16_NORM: (
        "the engine was asked for gradients through weight normalisation in bfloat16",
        "it computes them in float32 and float64; in bfloat16 sums would be rounded before use",
        "normalise the factors first, and pass those, without stds and scales",
    ),
    EngineStatus.EXPERT_COUNT: ("the engine was given no experts", _PAIRS, _FIX_MIXTURE),
    EngineStatus.PAIR_COUNT: (
        "the engine was given a bad number of (token, expert) pairs",
        "it takes from 0 up to 2**31 - 1 of them",
        "split the batch",
    ),
    EngineStatus.EXPERT_ENDS: (
        "the engine was given ends of experts that are out of order or out of range",
        _PAIRS,
        _FIX_MIXTURE,
    ),
    EngineStatus.PAIR_TOKENS: (
        "the engine was given pairs whose tokens are out of range or come too often",
        _PAIRS,
        _FIX_MIXTURE,
    ),
    EngineStatus.BIAS_ROWS: (
        "the engine was asked for the gradient of the bias, but rows are pairs",
        "it computes that gradient only if rows of x and of y are tokens",
        "sum the rows of the gradient of y",
    ),
    EngineStatus.BAD_NET: (
        "the engine was given layers that do not form a feed-forward net",
        "it takes up and down, or gate, up and down: as many outputs as the next has inputs, one "
        "dtype, as many tokens, and an activation that it knows",
        "pass the layers in this order",
    ),
    EngineStatus.TIED_LOGITS: (
        "the engine was left to choose among experts with equal logits",
        "a hash of the token decides there, which the engine does not compute",
        "use run_gate, and choose_experts where it returns False",
    ),
    EngineStatus.ACTIVE_COUNT: (
        "the engine was given a bad number of active experts",
        "a token uses one expert or more, at most all",
        "pass num_active from 1 to num_experts",
    ),
}


def failure(code: int) -> EinlinearError | MemoryError:
    """The error to raise for a status of the engine."""
    if code == EngineStatus.NO_MEMORY:
        return MemoryError("the engine could not get memory for its workspace")
    unknown = _FAILURES[EngineStatus.PROGRAM_VERSION]
    what, rule, fix = (f"the engine failed with status {code}", *unknown[1:])
    if code in _FAILURES:
        what, rule, fix = _FAILURES[EngineStatus(code)]
    return EinlinearError(what=what, rule=rule, fix=fix)
