import os
import signal
import sys
from zlib import crc32

# Several tests run at once, on as many cores: threads that wait for each other would only spin.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")  # for tests that ask for more threads

# Tests press Ctrl-C in processes that they start, which ignore it where this one was told to, as
# all that a shell starts in the background are.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

import pytest
from hypothesis import HealthCheck, settings

from kit.forked import use_forked_workers

# Machines that run the tests may be busy: no test fails because it was slow once. Laws are tried
# with other examples in every run; `make test-all` tries twice as many.
_PATIENT = settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.register_profile("tests", _PATIENT, max_examples=50)
settings.register_profile("thorough", _PATIENT, max_examples=100)
settings.load_profile(os.environ.get("EINLINEAR_LAWS", "tests"))


@pytest.hookimpl(hookwrapper=True, trylast=True)
def pytest_runtest_call(item):
    """Watch no lines in a test that is marked no_cover, in workers of xdist either.

    pytest-cov starts two tracers there, and where it stops one the other takes over.
    """
    if not item.get_closest_marker("no_cover"):
        yield
        return
    tracer = sys.gettrace()
    sys.settrace(None)
    yield
    sys.settrace(tracer)


@pytest.fixture(autouse=True)
def _forked_workers(request, monkeypatch):
    """Fork the workers of sweeps, except in the tests of executors, which start real ones."""
    if "executors" not in request.path.parts:
        use_forked_workers(monkeypatch)


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config, items):
    """Run tests that share a fixture of their module in one worker, which sets it up once.

    Where tests are split among workers, they are mixed: those of a folder wait for processes, or
    compute, all alike. Groups come early, so that no worker has a long one left at the end.
    """
    for item in items:
        fixtures = item._fixtureinfo.name2fixturedefs.values()
        if any(found[-1].scope == "module" for found in fixtures):
            item.add_marker(pytest.mark.xdist_group(item.location[0]))
    if hasattr(config, "workerinput"):
        items.sort(key=_place)


def _place(item):
    """Where in the order a test runs, from 0 to 1: the same in every worker."""
    mark = item.get_closest_marker("xdist_group")
    name = mark.args[0] if mark else item.nodeid
    return crc32(name.encode()) / 2**32 * (0.6 if mark else 1.0)


def pytest_collection_finish(session):
    """Fail where pytest-xdist ignores the groups, which would set up every fixture many times."""
    is_split = getattr(session.config.option, "loadgroup", False)
    for item in session.items if is_split else ():
        if item.get_closest_marker("xdist_group") and "@" not in item.nodeid:
            raise pytest.UsageError("this pytest-xdist does not group tests under this pytest")
