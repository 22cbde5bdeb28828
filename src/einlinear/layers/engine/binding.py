"""The compiled engine as Python calls it: plans, addresses and row lengths in, a status out.

It works on addresses and needs neither torch nor numpy: pass `tensor.data_ptr()` or
`array.ctypes.data`. Rows of x have d_in numbers, rows of y d_out; a row length is the distance
between two rows, in numbers. Factors are contiguous, in the order of the plan's steps. The address
of an array that is absent or not wanted is 0. The GIL is released during a call.
"""

from __future__ import annotations

import ctypes
import os
import platform
import sysconfig
import warnings
from array import array
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import lru_cache, partial
from pathlib import Path

from einlinear.errors import EinlinearError, quote
from einlinear.layers.engine.abi import (
    CallArguments,
    EngineDtype,
    EngineStatus,
    GateArguments,
    Target,
    abi_fingerprint,
)
from einlinear.layers.engine.cache import CacheShape
from einlinear.layers.engine.failures import failure
from einlinear.layers.engine.flat import compile_program
from einlinear.structures.plan import Plan

TARGETS: tuple[str, ...] = tuple(target.name.lower() for target in Target)
DTYPE_CODES = {dtype.name.lower(): int(dtype) for dtype in EngineDtype}
_ADDRESS = "Q" if ctypes.sizeof(ctypes.c_void_p) == 8 else "L"  # typecode of an array
_BAD_TYPES = (KeyError, OverflowError, TypeError)
_SUFFIXES = (".so", ".pyd", ".dylib")


class _Library:
    """The loaded library, the thread pool it uses, and its target."""

    def __init__(self, path: Path):
        library = ctypes.CDLL(str(path))
        _check_abi(library)
        self.functions = {}
        for name in ("forward", "backward", "experts_forward", "experts_backward"):
            self.functions[name] = getattr(library, f"einlinear_{name}")
            self.functions[name].argtypes = [ctypes.c_void_p]  # of POINTER, ctypes makes an object
        self.has_factors = library.einlinear_has_factors
        self.has_factors.argtypes = [ctypes.c_void_p, ctypes.c_char_p]
        for name in ("feedforward_forward", "feedforward_backward"):
            self.functions[name] = getattr(library, f"einlinear_{name}")
            self.functions[name].argtypes = [
                ctypes.POINTER(CallArguments),
                ctypes.c_int64,
                ctypes.c_int64,
            ]
        for name in ("gate_forward", "gate_backward"):
            self.functions[name] = getattr(library, f"einlinear_{name}")
            self.functions[name].argtypes = [ctypes.c_void_p]
        self.target: Callable[[int], int] = library.einlinear_target
        self.workspace = library.einlinear_workspace
        self.workspace.restype = ctypes.c_int64
        library.einlinear_use_gomp.argtypes = [ctypes.c_void_p] * 3
        self.has_neon = bool(library.einlinear_has_neon())
        self.pool = "its own threads"
        found = _loaded_gomp()
        if found:
            names = ("GOMP_parallel", "omp_get_thread_num", "omp_get_num_threads")
            addresses = [ctypes.cast(getattr(found, name), ctypes.c_void_p) for name in names]
            library.einlinear_use_gomp(*addresses)
            self.pool = "torch's thread pool"
        self.chosen: int = self.target(-1)
        self.forced_by = ""
        wanted = os.environ.get("EINLINEAR_TARGET", "")
        if wanted:
            try:
                self.choose(wanted, "EINLINEAR_TARGET")
            except EinlinearError as error:
                warnings.warn(f"EINLINEAR_TARGET is ignored: {error}", RuntimeWarning, stacklevel=2)

    def choose(self, name: str, forced_by: str) -> None:
        """Use one of TARGETS; on an error, keep the one in use."""
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


def _check_abi(library: ctypes.CDLL) -> None:
    """Reject a library that was compiled with other constants or another call struct."""
    built, wanted = library.einlinear_abi_fingerprint(), abi_fingerprint()
    if built != wanted:
        raise OSError(
            f"it was built from another version (ABI {built:08x}, here it is {wanted:08x}): "
            "install the package again"
        )
    built = library.einlinear_sizeof_arguments()
    wanted = ctypes.sizeof(CallArguments) + ctypes.sizeof(GateArguments)
    if built != wanted:
        raise OSError(
            f"its call structs have {built} bytes, here they have {wanted}: "
            "install the package again, with a compiler for this Python's platform"
        )


def _loaded_gomp() -> ctypes.CDLL | None:
    """The libgomp that this process has already loaded; a second pool would spin against it."""
    try:
        lines = Path("/proc/self/maps").read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return None
    paths = {line.split(maxsplit=5)[-1] for line in lines}
    found = [p for p in paths if Path(p).name.startswith("libgomp") and ".so" in Path(p).name]
    for path in sorted(found, key=lambda p: ("torch" not in p, p)):  # torch's first
        with suppress(OSError):
            return ctypes.CDLL(path, mode=os.RTLD_NOW | os.RTLD_NOLOAD)
    return None


def libraries(folder: Path) -> list[Path]:
    """The libraries in a folder, the one to load first.

    setup.py builds _engine.so. Older versions of it had the version of Python in the name; a
    library that they left in a checkout must not win.
    """
    suffix = str(sysconfig.get_config_var("EXT_SUFFIX"))
    found = (path for path in folder.glob("_engine.*") if path.suffix in _SUFFIXES)

    def place(path: Path) -> tuple[bool, bool, str]:
        return path.stem != "_engine", not path.name.endswith(suffix), path.name

    return sorted(found, key=place)


@lru_cache(maxsize=1)
def _load() -> tuple[_Library | None, str]:
    """The library, or the reason why there is none."""
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
    """Whether the engine is built and can be used."""
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
    """Use one of TARGETS, or the best one (None). Returns the target in use."""
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
    """How much memory the engine keeps between calls for the calling thread."""
    library, _ = _load()
    return 0 if library is None else int(library.workspace(0))


def release_workspace() -> None:
    """Free the memory that the engine keeps between calls for the calling thread."""
    library, _ = _load()
    if library is not None:
        library.workspace(1)


def _library() -> _Library:
    library, reason = _load()
    if library is None:
        raise EinlinearError(
            what="the compiled engine is not available",
            rule=reason,
            fix="reinstall the package with a C compiler at hand, or use another variant",
        )
    return library


class _Prepared:
    """A plan with its flat program in memory."""

    def __init__(
        self, plan: Plan, tokens: tuple[int, int] | None = None, cache: CacheShape | None = None
    ):
        numbers = compile_program(plan, tokens, cache).numbers
        self.plan = plan
        self.numbers = (ctypes.c_int64 * len(numbers))(*numbers)
        self.program = ctypes.addressof(self.numbers)
        self.shapes = [plan.factor_shapes[step.factor] for step in plan.steps]


# Keyed by identity: hashing a plan takes longer than a small layer. Holding the plan keeps its id.
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


def factor_shapes(plan: Plan) -> list[tuple[int, ...]]:
    """The shapes of the factors of a plan, in the order of its steps."""
    return (_prepared.get(id(plan)) or _prepare(plan)).shapes


def make_arguments(plan: Plan, dtype: str, factors: Sequence[int]) -> CallArguments:
    """The arguments of a call, with program, dtype and factors filled in.

    Set the other fields by name: assignments are the fastest way to fill a struct of ctypes.
    """
    prepared = _prepared.get(id(plan)) or _prepare(plan)
    arguments = CallArguments()
    arguments.kept = [prepared]
    arguments.program = prepared.program
    arguments.dtype = DTYPE_CODES[dtype]
    set_array(arguments, "factors", factors, len(prepared.shapes))
    return arguments


def set_array(
    arguments: CallArguments, name: str, values: Sequence[float], count: int
) -> array[float]:
    """Point a field at an array of addresses or, for stds and scales, of doubles."""
    made: array[float] = array("d" if name in ("stds", "scales") else _ADDRESS, values)
    if len(made) != count:
        raise EinlinearError(
            what=f"the engine was given {len(made)} {name}",
            rule=f"there is one per factor: {count}",
            fix="pass them in the order of the plan's steps",
        )
    setattr(arguments, name, made.buffer_info()[0])
    arguments.kept.append(made)  # it must live as long as the arguments
    return made


def run_engine(name: str, arguments: CallArguments | GateArguments) -> None:
    """Call "forward", "backward", or one of these of "experts" or of a "gate"."""
    library = _load()[0] or _library()
    code = library.functions[name](ctypes.addressof(arguments))
    if code:
        raise failure(code)


def factor_comparison(
    arguments: CallArguments, addresses: Sequence[int], sizes: Sequence[int]
) -> Callable[[], int]:
    """A function: are the factors of a call, bit for bit, what they are now?

    They must stay at their addresses; sizes are in bytes.
    """
    copy = b"".join(map(ctypes.string_at, addresses, sizes))
    return partial(_library().has_factors, ctypes.addressof(arguments), copy)


def run_net(name: str, layers: Sequence[CallArguments], activation: int) -> None:
    """Call "feedforward_forward" or "feedforward_backward" with the arguments of each layer."""
    together = (CallArguments * len(layers))(*layers)
    code = _library().functions[name](together, len(layers), activation)
    if code:
        raise failure(code)


def run_gate(arguments: GateArguments) -> bool:
    """Call "gate_forward". Returns whether experts were chosen: equal logits leave it to you."""
    code = _library().functions["gate_forward"](ctypes.addressof(arguments))
    if code not in (EngineStatus.OK, EngineStatus.TIED_LOGITS):
        raise failure(code)
    return bool(code == EngineStatus.OK)


def call_forward(
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
    threads: int = 1,
) -> tuple[float, ...] | None:
    """Write y = W x + bias for rows of x.

    With stds, every factor M is used as M / max(1, rms(M) / std), and the scales, one per factor,
    are returned. Pass them as `scales` to use them without computing them again.
    """
    used = None
    try:
        arguments = make_arguments(plan, dtype, factors)
        arguments.tokens, arguments.threads = tokens, threads
        arguments.x, arguments.x_row = x, x_row
        arguments.y, arguments.y_row = y, y_row
        arguments.bias = bias
        if scales is not None:
            used = set_array(arguments, "scales", scales, len(factors))
            arguments.scales_known = True
        elif stds is not None:
            set_array(arguments, "stds", stds, len(factors))
            used = set_array(arguments, "scales", stds, len(factors))  # written by the engine
    except _BAD_TYPES as error:
        raise _bad_call(dtype, error) from error
    run_engine("forward", arguments)
    return None if used is None else tuple(used)


def call_backward(
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
    """Write the gradients of x, of the factors and of the bias; pass 0 for those not wanted.

    With the stds given to `call_forward` and the scales it returned, they are gradients of the
    factors before normalisation (not in bfloat16).
    """
    try:
        arguments = make_arguments(plan, dtype, factors)
        arguments.tokens, arguments.threads = tokens, threads
        arguments.x, arguments.x_row = x, x_row
        arguments.grad_y, arguments.grad_y_row = grad_y, grad_y_row
        arguments.grad_x, arguments.grad_x_row = grad_x, grad_x_row
        arguments.grad_bias = grad_bias
        set_array(arguments, "grad_factors", grad_factors, len(factors))
        if stds is not None and scales is not None:
            set_array(arguments, "stds", stds, len(factors))
            set_array(arguments, "scales", scales, len(factors))
    except _BAD_TYPES as error:
        raise _bad_call(dtype, error) from error
    run_engine("backward", arguments)


def _bad_call(dtype: object, error: Exception) -> EinlinearError:
    return EinlinearError(
        what=f"the engine cannot be called like this, with dtype {quote(dtype)}: {error}",
        rule=f"dtypes are {', '.join(DTYPE_CODES)}; addresses, sizes and row lengths are integers",
        fix="pass data_ptr() of contiguous tensors, and stride(0) of rows",
    )
