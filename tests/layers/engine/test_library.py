"""How the engine's library is found, what it says of itself, and what it says when it fails."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

import einlinear
from cases import STRUCTURES
from einlinear import make_plan
from einlinear.errors import EinlinearError
from einlinear.layers.engine import abi, binding
from einlinear.layers.engine.abi import EngineStatus, ProgramHeader
from einlinear.layers.engine.failures import failure

needs_engine = pytest.mark.skipif(not binding.is_available(), reason=binding.status())
PLAN = make_plan(STRUCTURES["btt(rank=2)"], 64, 64)
DOCTOR = """
import warnings
with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always")
    from einlinear.layers.engine import binding
    for _ in range(3):
        status = binding.status()
print(status, *(f"{w.category.__name__}: {w.message}" for w in caught), sep="\\n")
"""


def say(path=None, code=DOCTOR, **environment):
    """What a fresh interpreter says: the status, then warnings."""
    settings = {k: v for k, v in os.environ.items() if not k.startswith("EINLINEAR_")}
    settings |= {"PYTHONPATH": str(path or Path(einlinear.__file__).parent.parent), **environment}
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, env=settings)
    assert done.returncode == 0, done.stderr
    status, *rest = done.stdout.splitlines()
    return status, "\n".join(rest)


@pytest.fixture
def library():
    """The library, with its target put back in the end."""
    found = binding._library()
    yield found
    binding.set_target()


class Copy:
    """Arrays for calls that are about to fail, and the plan's numbers to be spoiled."""

    def __init__(self, monkeypatch, tokens=None):
        self.arrays = [np.zeros(PLAN.params + 64 * 4, np.float32) for _ in range(8)]
        self.at = [a.ctypes.data for a in self.arrays]
        self.prepared = binding._Prepared(PLAN, tokens)
        monkeypatch.setitem(binding._prepared, id(PLAN), self.prepared)

    def forward(self, tokens=2):
        x, y, a, b, *_ = self.at
        return binding.call_forward(PLAN, "float32", tokens, x, 64, [a, b], 0, y, 64)

    def backward(self, *, dtype="float32", tokens=2, factors=2, gradients=2):
        x, gy, gx, a, b, ga, gb, gbias = self.at
        where = [a, b][:factors], gy, 64, gx, 64, [ga, gb][:gradients], gbias
        binding.call_backward(PLAN, dtype, tokens, x, 64, *where)


@needs_engine
def test_bad_backward_calls_are_refused(monkeypatch):
    copy = Copy(monkeypatch)
    copy.backward()
    with pytest.raises(EinlinearError, match="'float16'"):
        copy.backward(dtype="float16")
    with pytest.raises(EinlinearError, match=r"1 factors\n.*: 2\n"):
        copy.backward(factors=1)
    with pytest.raises(EinlinearError, match=r"1 grad_factors\n.*: 2\n"):
        copy.backward(gradients=1)


@needs_engine
def test_normalised_gradients_are_not_for_bfloat16():
    plan = make_plan(einlinear.btt(), 16, 16)
    rows = "bfloat16", 0, 0, 16, [0, 0], 0, 16, 0, 16, [0, 0], 0
    with pytest.raises(EinlinearError, match=r"(?s)bfloat16.*fix:  normalise the factors first"):
        binding.call_backward(plan, *rows, stds=[1.0, 1.0], scales=[1.0, 1.0])


@needs_engine
@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        (ProgramHeader.VERSION, abi.PROGRAM_VERSION + 1, "another version(.|\n)*fix:  reinstall"),
        (ProgramHeader.STEPS, abi.MAX_PROGRAM_STEPS + 1, "too many factors(.|\n)*up to 32 factors"),
        (ProgramHeader.ROW_BUFFERS, abi.MAX_BUFFERS, "too many inter(.|\n)*up to 256 buffers"),
    ],
)
def test_programs_that_the_engine_cannot_run(field, value, message, monkeypatch):
    copy = Copy(monkeypatch)
    copy.prepared.numbers[field] = value
    for call in (copy.forward, copy.backward):
        with pytest.raises(EinlinearError, match=message):
            call()


@needs_engine
def test_a_dtype_that_the_engine_does_not_know(monkeypatch):
    Copy(monkeypatch)
    arguments = binding.make_arguments(PLAN, "float32", [0, 0])
    arguments.dtype = 9
    with pytest.raises(EinlinearError, match="unknown dtype"):
        binding.run_engine("forward", arguments)


@needs_engine
def test_no_input(monkeypatch):
    copy = Copy(monkeypatch)
    copy.at[0] = 0
    for call in (copy.forward, copy.backward):
        with pytest.raises(EinlinearError, match="no input"):
            call()


@needs_engine
def test_no_memory_for_the_workspace(monkeypatch):
    """A block of so many tokens that no machine has the memory; the next call finds some again."""
    copy = Copy(monkeypatch, (2**40, 2**40))
    for call in (copy.forward, copy.backward):
        with pytest.raises(MemoryError, match="workspace"):
            call(tokens=2**40)
        call(tokens=2)


def test_every_status_has_a_message():
    messages = [str(failure(status)) for status in EngineStatus if status != EngineStatus.OK]
    assert len(set(messages)) == len(messages)
    assert not any("failed with status" in message for message in messages)
    assert "failed with status 99" in str(failure(99))


@needs_engine
def test_prepared_plans_are_bounded(monkeypatch):
    monkeypatch.setattr(binding, "_prepared", {})
    monkeypatch.setattr(binding, "_MOST_PREPARED", 2)
    plans = [make_plan(STRUCTURES["monarch"], 4, n) for n in range(4, 9)]
    for plan in plans:
        binding._prepare(plan)
        assert binding._prepared[id(plan)].plan is plan
        assert len(binding._prepared) <= 2


def test_without_the_engine_calls_say_why(monkeypatch):
    monkeypatch.setattr(binding, "_load", lambda: (None, "it is a test"))
    assert not binding.is_available()
    assert binding.status() == "no compiled engine: it is a test"
    with pytest.raises(EinlinearError, match="it is a test"):
        binding.set_target("generic")
    with pytest.raises(EinlinearError, match="it is a test"):
        Copy(monkeypatch).forward()


@needs_engine
def test_targets(library, monkeypatch):
    supported = binding.supported_targets()
    assert binding.set_target() == supported[-1]
    assert "forced" not in binding.status()
    for name in supported:
        assert binding.set_target(name) == name
        assert "(forced by set_target)" in binding.status()
        assert binding.supported_targets() == supported
    best = binding.set_target()
    with pytest.raises(EinlinearError, match="no target 'mmx'"):
        binding.set_target("mmx")
    run = library.target
    monkeypatch.setattr(library, "target", lambda i: -1 if i == 1 else run(i))
    with pytest.raises(EinlinearError, match=r"cannot run the target 'avx2'(.|\n)*one of generic"):
        binding.set_target("avx2")
    assert library.chosen == binding.TARGETS.index(best)


@needs_engine
def test_what_the_targets_are_called(library, monkeypatch):
    for chosen, has_neon, name in [
        (0, False, "generic riscv64"),
        (0, True, "NEON"),
        (1, False, "AVX2"),
        (2, False, "AVX-512"),
    ]:
        monkeypatch.setattr(library, "chosen", chosen)
        monkeypatch.setattr(library, "has_neon", has_neon)
        monkeypatch.setattr(binding.platform, "machine", lambda: "riscv64")
        assert binding.status().startswith(f"compiled engine, {name}, ")


@needs_engine
def test_a_target_from_the_environment():
    status, caught = say(EINLINEAR_TARGET="generic")
    assert "(forced by EINLINEAR_TARGET)" in status
    assert not caught
    status, caught = say(EINLINEAR_TARGET="")
    assert "forced" not in status
    assert not caught


@needs_engine
def test_an_unknown_target_in_the_environment_is_said_once():
    status, caught = say(EINLINEAR_TARGET="mmx")
    assert status.startswith("compiled engine, ")
    assert "forced" not in status
    assert caught.count("Warning") == 1
    assert "RuntimeWarning: EINLINEAR_TARGET is ignored: there is no target 'mmx'\n" in caught
    assert "rule: a target is one of generic, avx2, avx512\n" in caught
    assert "fix:  use one of generic" in caught


@needs_engine
def test_an_unsupported_target_in_the_environment_is_said(monkeypatch):
    paths = sorted(Path(binding.__file__).parent.glob("_engine*.so"))
    choose = binding._Library.choose

    def refuse(self, name, forced_by):
        run = self.target
        self.target = lambda i: -1 if i == 2 else run(i)
        choose(self, name, forced_by)

    monkeypatch.setattr(binding._Library, "choose", refuse)
    monkeypatch.setenv("EINLINEAR_TARGET", "avx512")
    with pytest.warns(RuntimeWarning, match=r"cannot run the target 'avx512'(.|\n)*fix:"):
        library = binding._Library(paths[0])
    assert library.chosen >= 0
    assert not library.forced_by
    binding.set_target()


def test_the_engine_can_be_left_out():
    assert say(EINLINEAR_NO_ENGINE="1") == ("no compiled engine: EINLINEAR_NO_ENGINE is set", "")


@pytest.mark.parametrize(
    ("content", "reason"),
    [(None, "it was not built"), (b"not a library", "could not be loaded"), ("c", "einlinear_")],
)
def test_a_package_with_no_library_or_a_broken_one(content, reason, tmp_path):
    """In a copy: no library, one that is no library, one that has nothing of the engine in it."""
    source = Path(einlinear.__file__).parent
    ignore = shutil.ignore_patterns("_engine*", "__pycache__")
    shutil.copytree(source, tmp_path / "einlinear", ignore=ignore)
    library = tmp_path / "einlinear" / "layers" / "engine" / "_engine.so"
    if content == "c":
        if not shutil.which("gcc"):
            pytest.skip("there is no gcc")
        (tmp_path / "nothing.c").write_text("int nothing;\n")
        command = ["gcc", "-shared", "-fPIC", str(tmp_path / "nothing.c"), "-o", str(library)]
        subprocess.run(command, check=True)
    elif content:
        library.write_bytes(content)
    status, caught = say(tmp_path)
    assert status.startswith("no compiled engine: ")
    assert reason in status
    assert not caught


def test_the_header_is_written_from_the_list():
    """After a change of abi.py, run `python -m einlinear.layers.engine.abi`."""
    header = Path(abi.__file__).with_name("abi.h")
    assert header.read_text(encoding="utf-8") == abi.header_text()


@needs_engine
@pytest.mark.parametrize(
    ("before", "after", "reason"),
    [
        ("GY = 2", "GY = 9", "built from another version (ABI "),
        ('("bias", "const void *"', '("bias", "int64_t "', "built from another version (ABI "),
        ('("y_row", "int64_t "', '("y_step", "int64_t "', "built from another version (ABI "),
        ("ctypes.c_int64 if", "ctypes.c_int32 if", "call structs have "),
    ],
    ids=["constant", "type of a field", "name of a field", "size of a field"],
)
def test_a_library_built_from_another_list_is_rejected(before, after, reason, tmp_path):
    """In a copy whose list differs from the one that its library was built from."""
    shutil.copytree(Path(einlinear.__file__).parent, tmp_path / "einlinear")
    changed = tmp_path / "einlinear" / "layers" / "engine" / "abi.py"
    text = changed.read_text(encoding="utf-8")
    assert text.count(before) == 1
    changed.write_text(text.replace(before, after), encoding="utf-8")
    status, caught = say(tmp_path)
    assert status.startswith("no compiled engine: _engine.so could not be loaded: ")
    assert reason in status
    assert "install the package again" in status
    assert not caught


def test_the_pool_of_libgomp_is_optional(monkeypatch, tmp_path):
    """No list of libraries, a list without it, one that names a file that is not loaded."""

    def maps(*texts):
        found = iter(texts)
        monkeypatch.setattr(binding.Path, "read_text", lambda *_, **__: next(found))
        return binding._loaded_gomp()

    assert (
        maps("7f00-7f01 r-xp 0 00:00 1    /usr/lib/libc.so.6\n7f02-7f03 rw-p 0 00:00 0\n") is None
    )
    assert maps(f"7f00-7f01 r-xp 0 00:00 1    {tmp_path}/libgomp.so.1\n") is None

    def fail(*_, **__):
        raise OSError("no such file")

    monkeypatch.setattr(binding.Path, "read_text", fail)
    assert binding._loaded_gomp() is None
