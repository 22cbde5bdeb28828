"""The compiled engine seen from Python: plans, addresses and row lengths in, nothing out.

Works on addresses, so that it needs neither torch nor numpy: pass `tensor.data_ptr()` or
`array.ctypes.data`. Rows of x have d_in numbers, rows of y d_out; row lengths are distances between
rows, in numbers. Factors are contiguous, in the order of the plan's steps. An address of 0 stands
for an array that is absent or not wanted. The GIL is released while the engine works.
"""

from __future__ import annotations

import ctypes
import os
import platform
import sysconfig
import warnings
from array import array
from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path
from struct import Struct

from einlinear.errors import EinlinearError, quote
from einlinear.layers.flat import VERSION, compile_program
from einlinear.structures.plan import Plan

DTYPES = {"float32": 0, "float64": 1, "bfloat16": 2}
TARGETS = ("generic", "avx2", "avx512")
_SUFFIXES = (".so", ".pyd", ".dylib")
_FAILURES = {
    -1: "the engine could not get memory for its workspace",
    -3: "the engine was asked for gradients of factors, and given no input",
    -4: "the engine was given pairs of tokens and experts that are out of order or out of range",
    -2: "the engine was built for another version of this package, or the structure is too large",
}


class _Library:
    """The loaded library, its way of using threads, and the target it was made to use."""

    def __init__(self, path: Path):
        library = ctypes.CDLL(str(path))
        if library.einlinear_version() != VERSION:
            raise OSError("it was built from another version: install the package again")
        self.forward = library.einlinear_forward
        self.backward = library.einlinear_backward
        self.experts_forward = library.einlinear_experts_forward
        self.experts_backward = library.einlinear_experts_backward
        self.target = library.einlinear_target
        self.workspace = library.einlinear_workspace
        self.workspace.restype = ctypes.c_int64
        calls = (self.forward, self.backward, self.experts_forward, self.experts_backward)
        for function in calls:
            function.argtypes = [ctypes.c_char_p]
        library.einlinear_use_gomp.argtypes = [ctypes.c_void_p] * 3
        self.has_neon = bool(library.einlinear_has_neon())
        self.pool = "its own threads"
        found = _loaded_gomp()
        if found:
            names = ("GOMP_parallel", "omp_get_thread_num", "omp_get_num_threads")
            addresses = [ctypes.cast(getattr(found, name), ctypes.c_void_p) for name in names]
            library.einlinear_use_gomp(*addresses)
            self.pool = "torch's thread pool"
        self.chosen, self.forced_by = self.target(-1), ""
        wanted = os.environ.get("EINLINEAR_TARGET", "")
        if wanted:
            try:
                self.choose(wanted, "EINLINEAR_TARGET")
            except EinlinearError as error:
                warnings.warn(f"EINLINEAR_TARGET is ignored: {error}", RuntimeWarning, stacklevel=2)

    def choose(self, name: str, forced_by: str) -> None:
        """Use one of TARGETS; it stays as it was if that cannot be."""
        if name not in TARGETS:
            raise EinlinearError(
                what=f"there is no target {quote(name)}",
                rule=f"a target is one of {', '.join(TARGETS)}",
                fix=f"use one of {', '.join(self.supported())}, or leave it out to use the best",
            )
        if self.target(TARGETS.index(name)) < 0:
            raise EinlinearError(
                what=f"this processor cannot run the target {quote(name)}",
                rule="a target needs the instructions it is named after",
                fix=f"use one of {', '.join(self.supported())}, or leave it out to use the best",
            )
        self.chosen, self.forced_by = TARGETS.index(name), forced_by

    def supported(self) -> tuple[str, ...]:
        """The targets that this processor can run."""
        found = tuple(name for i, name in enumerate(TARGETS) if self.target(i) >= 0)
        self.target(self.chosen)
        return found


def _loaded_gomp() -> ctypes.CDLL | None:
    """The libgomp that is in this process already: a second pool would spin against its threads."""
    try:
        lines = Path("/proc/self/maps").read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return None
    paths = {line.split(maxsplit=5)[-1] for line in lines}
    found = [p for p in paths if Path(p).name.startswith("libgomp") and ".so" in Path(p).name]
    for path in sorted(found, key=lambda p: ("torch" not in p, p)):  # other packages bring theirs
        try:
            return ctypes.CDLL(path, mode=os.RTLD_NOW | os.RTLD_NOLOAD)
        except OSError:
            continue
    return None


def libraries(folder: Path) -> list[Path]:
    """The libraries in a folder, the one to load first.

    setup.py builds _engine.so. Its older versions had a name for each Python in it, and what they
    have left in a checkout must not win.
    """
    suffix = str(sysconfig.get_config_var("EXT_SUFFIX"))
    found = (path for path in folder.glob("_engine.*") if path.suffix in _SUFFIXES)

    def place(path: Path) -> tuple[bool, bool, str]:
        return path.stem != "_engine", not path.name.endswith(suffix), path.name

    return sorted(found, key=place)


@lru_cache(maxsize=1)
def _load() -> tuple[_Library | None, str]:
    """The library, or why there is none."""
    if os.environ.get("EINLINEAR_NO_ENGINE", "") not in ("", "0"):
        return None, "EINLINEAR_NO_ENGINE is set"
    paths = libraries(Path(__file__).parent)
    if not paths:
        return None, "it was not built: install the package where there is a C compiler"
    try:
        return _Library(paths[0]), ""
    except (OSError, AttributeError) as error:
        return None, f"{paths[0].name} could not be loaded: {error}"


def is_available() -> bool:
    """Whether the engine is there and can be used."""
    return _load()[0] is not None


def status() -> str:
    """One line: which engine is in use, or why none is."""
    library, reason = _load()
    if library is None:
        return f"no compiled engine: {reason}"
    name = {"avx2": "AVX2", "avx512": "AVX-512"}.get(TARGETS[library.chosen], "")
    if not name:
        name = "NEON" if library.has_neon else f"generic {platform.machine()}"
    if library.forced_by:
        name += f" (forced by {library.forced_by})"
    return f"compiled engine, {name}, {library.pool}"


def set_target(name: str | None = None) -> str:
    """Make the engine use one of TARGETS, or the best (None). Returns the one in use."""
    library = _library()
    if name is None:
        library.chosen, library.forced_by = library.target(-1), ""
    else:
        library.choose(name, "set_target")
    return TARGETS[library.chosen]


def supported_targets() -> tuple[str, ...]:
    """The targets that this processor can run."""
    return _library().supported()


def workspace_bytes() -> int:
    """How much memory the engine keeps between calls, for the thread that asks."""
    library, _ = _load()
    return 0 if library is None else int(library.workspace(0))


def release_workspace() -> None:
    """Give back the memory that the engine keeps between calls, for the thread that asks."""
    library, _ = _load()
    if library is not None:
        library.workspace(1)


def _library() -> _Library:
    library, reason = _load()
    if library is None:
        raise EinlinearError(
            what="the compiled engine is not in use",
            rule=reason,
            fix="reinstall the package with a C compiler at hand, or use another variant",
        )
    return library


class _Prepared:
    """What a call needs to know of a plan, laid out once."""

    def __init__(self, plan: Plan):
        self.plan = plan
        self.numbers = array("q", compile_program(plan).numbers)
        self.program = self.numbers.buffer_info()[0]
        self.steps = len(plan.steps)
        self.pack_forward = Struct(f"{12 + self.steps}q").pack
        self.pack_backward = Struct(f"{13 + 2 * self.steps}q").pack


# By identity: hashing a plan takes longer than a small layer. Holding the plan keeps its id.
_prepared: dict[int, _Prepared] = {}
_MOST_PREPARED = 4096


def _prepare(plan: Plan) -> _Prepared:
    if not isinstance(plan, Plan):
        raise EinlinearError(
            what=f"the engine was given {quote(plan)} for a plan",
            rule="the engine runs plans",
            fix="pass make_plan(structure, d_in, d_out)",
        )
    if len(_prepared) >= _MOST_PREPARED:
        _prepared.clear()
    prepared = _prepared[id(plan)] = _Prepared(plan)
    return prepared


def call_experts(name: str, plan: Plan, dtype: str, numbers: Sequence[int]) -> None:
    """Run "experts_forward" or "experts_backward", which engine_experts.h describes.

    numbers: their arguments from the third on.
    """
    prepared = _prepared.get(id(plan)) or _prepare(plan)
    try:
        given = (prepared.program, DTYPES[dtype], *numbers)
        packed = Struct(f"{len(given)}q").pack(*given)
    except Exception as error:
        raise _bad_call(dtype, error) from error
    code = getattr(_library(), name)(packed)
    if code:
        raise _failure(code)


def forward(
    plan: Plan,
    dtype: str,
    tokens: int,
    x: int,
    x_row: int,
    factors: Sequence[int],
    bias: int,
    y: int,
    y_row: int,
    *,
    stds: Sequence[float] | None = None,
    scales: Sequence[float] | None = None,
    stds_at: int = 0,
    threads: int = 1,
) -> tuple[float, ...] | None:
    """Write y = W x + bias for rows of x.

    With stds every factor M is used as M / max(1, rms(M) / std); the scales found, one per factor,
    are returned. Given as `scales` they are used as they are and not computed again. With stds_at,
    the address of stds as doubles, nothing is returned, which is quicker.
    """
    prepared = _prepared.get(id(plan)) or _prepare(plan)
    if stds is None and scales is None:
        given, scales_at = None, 0
    else:
        given = array("d", stds if scales is None else scales)  # type: ignore[arg-type]
        _check_count(len(given), prepared.steps, "stds or scales")
        given = given + given
        stds_at = given.buffer_info()[0]
        scales_at = stds_at + 8 * prepared.steps
    try:
        packed = prepared.pack_forward(
            prepared.program, DTYPES[dtype], tokens, threads, x, x_row, bias, y, y_row,
            stds_at, scales_at, scales is not None, *factors,
        )  # fmt: skip
    except Exception as error:
        raise _bad_call(dtype, error) from error
    code = _library().forward(packed)
    if code:
        raise _failure(code)
    return tuple(given[prepared.steps :]) if given is not None else None


def backward(
    plan: Plan,
    dtype: str,
    tokens: int,
    x: int,
    x_row: int,
    factors: Sequence[int],
    grad_y: int,
    grad_y_row: int,
    grad_x: int,
    grad_x_row: int,
    grad_factors: Sequence[int],
    grad_bias: int,
    *,
    stds: Sequence[float] | None = None,
    scales: Sequence[float] | None = None,
    threads: int = 1,
) -> None:
    """Write the gradients of x, of the factors and of the bias; 0 for those not wanted.

    With the stds given to `forward` and the scales it returned, they are gradients with respect to
    the factors before normalisation. Not for bfloat16.
    """
    prepared = _prepared.get(id(plan)) or _prepare(plan)
    _check_count(len(grad_factors), prepared.steps, "gradients")
    if stds is None or scales is None:
        stds_at = scales_at = 0
    else:
        if dtype == "bfloat16":
            raise EinlinearError(
                what="the engine was asked for gradients through weight normalisation in bfloat16",
                rule="it has them in float32 and float64; sums would be rounded before their use",
                fix="normalise the factors first, and pass those, without stds and scales",
            )
        _check_count(len(stds), prepared.steps, "stds")
        _check_count(len(scales), prepared.steps, "scales")
        given = array("d", (*stds, *scales))
        stds_at = given.buffer_info()[0]
        scales_at = stds_at + 8 * prepared.steps
    try:
        packed = prepared.pack_backward(
            prepared.program, DTYPES[dtype], tokens, threads, x, x_row, grad_y, grad_y_row,
            grad_x, grad_x_row, grad_bias, stds_at, scales_at, *factors, *grad_factors,
        )  # fmt: skip
    except Exception as error:
        raise _bad_call(dtype, error) from error
    code = _library().backward(packed)
    if code:
        raise _failure(code)


def _check_count(count: int, wanted: int, name: str) -> None:
    if count != wanted:
        raise EinlinearError(
            what=f"the engine was given {count} {name}",
            rule=f"there is one per factor: {wanted}",
            fix="pass them in the order of the plan's steps",
        )


def _bad_call(dtype: object, error: Exception) -> EinlinearError:
    return EinlinearError(
        what=f"the engine cannot be called like this, with dtype {quote(dtype)}: {error}",
        rule=f"dtypes are {', '.join(DTYPES)}; addresses, sizes and row lengths are whole numbers, "
        "and there is one factor per step",
        fix="pass data_ptr() of contiguous tensors, and stride(0) of rows",
    )


def _failure(code: int) -> EinlinearError | MemoryError:
    text = _FAILURES.get(code, f"the engine failed with code {code}")
    if code == -1:
        return MemoryError(text)
    return EinlinearError(
        what=text,
        rule="the library and the package are built together",
        fix="reinstall the package, or use another variant",
    )
