import platform
import subprocess
import sys

import pytest

import einlinear as el
from einlinear.layers.engine import memory

HAS_GLIBC = sys.platform == "linux" and platform.libc_ver()[0] == "glibc"

# Page faults of writing to a fresh block of 64 MB, twice, as the C library hands them out. The
# first use would fault anyway, so only the second block counts. "plain" only imports the module.
FAULTS = """
import ctypes, resource, sys
from einlinear.layers.engine.memory import keep_memory
if sys.argv[1] == "kept":
    keep_memory()
libc = ctypes.CDLL(None)
libc.malloc.restype = ctypes.c_void_p
libc.free.argtypes = [ctypes.c_void_p]

def faults():
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    block = libc.malloc(ctypes.c_size_t(64 << 20))
    ctypes.memset(block, 1, 64 << 20)
    libc.free(block)
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before

first = faults()
print(faults(), resource.getrusage(resource.RUSAGE_SELF).ru_maxrss)
"""


@pytest.mark.skipif(not HAS_GLIBC, reason="settings of glibc")
def test_memory_is_used_again_without_page_faults_or_more_memory():
    def run(name):
        text = subprocess.check_output([sys.executable, "-c", FAULTS, name], text=True)
        return map(int, text.split())

    faults, most = run("kept")
    faults_without, most_without = run("plain")
    assert faults < 100 < faults_without
    assert most < 1.1 * most_without


@pytest.mark.parametrize(
    ("system", "libc"), [("darwin", ("", "")), ("linux", ("musl", "1.2")), ("win32", ("", ""))]
)
def test_a_clear_no_elsewhere(system, libc, monkeypatch):
    monkeypatch.setattr(memory.sys, "platform", system)
    monkeypatch.setattr(memory.platform, "libc_ver", lambda: libc)
    with pytest.raises(el.EinlinearError, match=f"its C library is .*on {system}"):
        el.keep_memory()
    memory.keep_memory_if_possible()  # says nothing


def test_settings_that_are_refused(monkeypatch):
    class Refusing:
        mallopt = staticmethod(lambda name, value: 0)

    monkeypatch.setattr(memory.sys, "platform", "linux")
    monkeypatch.setattr(memory.platform, "libc_ver", lambda: ("glibc", "2.36"))
    monkeypatch.setattr(memory.ctypes, "CDLL", lambda path: Refusing)
    with pytest.raises(el.EinlinearError, match="refuses"):
        el.keep_memory()
