"""A report that is served while runs go on: real requests, a real process, a real browser."""

import http.client
import json
import re
import signal
import socket
import struct
import subprocess
import sys
from contextlib import contextmanager, suppress
from threading import Event, Thread
from time import monotonic, sleep

import pytest

from einlinear.cli.main import main
from einlinear.reports import live as live_module
from einlinear.reports.analyse import ReportSettings
from einlinear.reports.live import Live, make_server, port_of
from kit.browser import CHROMIUM, browser
from kit.report_records import (
    DENSE,
    KINDS,
    make_record,
    write_claim,
    write_record,
    write_runs,
    write_unfinished,
)


@pytest.fixture
def drawn(monkeypatch):
    """Drawing is slow, and no test here looks at the drawings."""
    monkeypatch.setattr("einlinear.reports.write.drawings", lambda _: [])
    monkeypatch.setattr("einlinear.reports.write.draw_routing", None)


def make_live(path):
    return Live(path, path / "report", ReportSettings(resamples=0))


@contextmanager
def served(live):
    server = make_server(live, 0)
    thread = Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
    thread.start()
    try:
        yield port_of(server)
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


def ask(port, path="/", method="GET", host=None):
    """The status, type and text of an answer."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=10)
    try:
        connection.putrequest(method, path, skip_host=True)
        connection.putheader("Host", host or f"127.0.0.1:{port}")
        connection.endheaders()
        answer = connection.getresponse()
        return answer.status, answer.headers.get("Content-Type"), answer.read()
    finally:
        connection.close()


def test_only_what_changed_is_built(tmp_path, drawn):
    (record,) = write_runs(tmp_path, (DENSE,), (64,), 1, points=4)
    live = make_live(tmp_path)
    assert live.refresh()
    assert not live.refresh()
    assert live.version == 1
    write_record(tmp_path / "runs" / "b", make_record(KINDS[1], 64, 0, points=4))
    assert live.refresh()
    assert live.version == 2
    assert record.id in live.page().decode()
    claim = write_unfinished(tmp_path)
    assert live.refresh(), "points of a run under way are new, too"
    write_claim(claim)
    assert not live.refresh(), "a heartbeat is no news"
    assert live.status() == {"version": 3, "error": "", "running": 1, "left": "20.6 min"}
    assert "still running" in live.page().decode()
    write_claim(claim, age=500.0)
    assert live.refresh(), "its process is gone"
    assert "still running" not in live.page().decode()


def test_answers(tmp_path, drawn):
    write_runs(tmp_path, (DENSE,), (64,), 1, points=4)
    live = make_live(tmp_path)
    with served(live) as port:
        status, _, text = ask(port)
        assert status == 200
        assert b"being built" in text
        live.refresh()
        status, kind, text = ask(port)
        assert (status, kind) == (200, "text/html; charset=utf-8")
        assert b'<html lang="en" data-live="1">' in text
        assert b"data-live=" not in (tmp_path / "report" / "index.html").read_bytes()[:300]
        status, kind, text = ask(port, "/version")
        assert kind == "application/json"
        assert json.loads(text)["version"] == 1
        status, kind, text = ask(port, "/tables/runs.csv")
        assert (status, kind) == (200, "text/csv; charset=utf-8")
        assert text.startswith(b"run,status")


@pytest.mark.parametrize(
    "path",
    [
        "/../secret.csv",
        "/tables/../../secret.csv",
        "/%2e%2e/secret.csv",
        "/tables/..%2f..%2fsecret.csv",
        "//etc/passwd",
        "/link.csv",
        "/tables",
        "/tables/",
        "/nothing.csv",
        "/%00.csv",
        "/record.json",
    ],
)
def test_nothing_outside_is_served(tmp_path, drawn, path):
    write_runs(tmp_path, (DENSE,), (64,), 1, points=4)
    (tmp_path / "secret.csv").write_text("secret")
    live = make_live(tmp_path)
    live.refresh()
    (tmp_path / "report" / "record.json").write_text("secret")
    (tmp_path / "report" / "link.csv").symlink_to(tmp_path / "secret.csv")
    with served(live) as port:
        status, _, text = ask(port, path)
        assert status == 404
        assert b"secret" not in text.replace(path.encode(), b"")


def test_who_hangs_up_is_no_error(tmp_path, drawn, capfd):
    write_runs(tmp_path, (DENSE,), (64,), 1, points=4)
    live = make_live(tmp_path)
    live.refresh()
    with served(live) as port:
        for _ in range(3):
            with socket.create_connection(("127.0.0.1", port)) as caller:
                caller.sendall(f"GET / HTTP/1.1\r\nHost: 127.0.0.1:{port}\r\n\r\n".encode())
                caller.recv(100)
        assert ask(port)[0] == 200
    assert capfd.readouterr().err == ""


def test_who_hangs_up_before_the_answer_is_no_error(tmp_path, drawn, capfd, monkeypatch):
    """The connection is reset while headers are written, or while the request is read."""
    live = make_live(tmp_path)
    gone, answered = Event(), Event()

    def page():
        gone.wait(10)
        answered.set()
        return b"x" * 2**22

    monkeypatch.setattr(live, "page", page)
    with served(live) as port:
        reset = struct.pack("ii", 1, 0)  # closing sends a reset
        for text in (f"GET / HTTP/1.1\r\nHost: 127.0.0.1:{port}\r\n\r\n", "GET / HT"):
            caller = socket.create_connection(("127.0.0.1", port))
            caller.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, reset)
            caller.sendall(text.encode())
            sleep(0.05)
            caller.close()
        gone.set()
        assert answered.wait(10)
        assert ask(port, "/version")[0] == 200
    assert capfd.readouterr().err == ""


def test_errors_of_our_own_are_still_printed(tmp_path, drawn, capfd, monkeypatch):
    live = make_live(tmp_path)
    monkeypatch.setattr(live, "page", lambda: 1 / 0)
    with served(live) as port, pytest.raises(http.client.HTTPException):
        ask(port)
    assert "ZeroDivisionError" in capfd.readouterr().err


def test_slow_callers_are_cut_off(tmp_path, drawn, monkeypatch):
    """One sends nothing, one a letter now and then: both are gone in time."""
    monkeypatch.setattr(live_module, "MOST_SECONDS", 0.3)
    with served(make_live(tmp_path)) as port:
        silent, slow = (socket.create_connection(("127.0.0.1", port)) for _ in range(2))
        with silent, slow:
            begin = monotonic()
            with suppress(ConnectionError):
                while monotonic() < begin + 10:
                    slow.sendall(b"G")
                    sleep(0.05)
            silent.settimeout(5)
            assert silent.recv(1) == b""
            assert monotonic() < begin + 5
    assert live_module._Handler.timeout == live_module.WAIT_SECONDS == 10


def test_callers_are_counted(tmp_path, drawn, monkeypatch):
    """There are no more threads than that; who comes later is disconnected at once."""
    monkeypatch.setattr(live_module, "MOST_CALLERS", 2)
    with served(make_live(tmp_path)) as port:
        held = [socket.create_connection(("127.0.0.1", port)) for _ in range(2)]
        with held[0], held[1], socket.create_connection(("127.0.0.1", port)) as late:
            late.settimeout(5)
            assert late.recv(1) == b""
        end = monotonic() + 5
        status = None
        while status != 200 and monotonic() < end:
            with suppress(ConnectionError, http.client.HTTPException):
                status = ask(port)[0]
        assert status == 200


def test_others_are_refused(tmp_path, drawn):
    write_runs(tmp_path, (DENSE,), (64,), 1, points=4)
    live = make_live(tmp_path)
    live.refresh()
    with served(live) as port:
        assert ask(port, host=f"localhost:{port}")[0] == 200
        for host in ("evil.example", f"evil.example:{port}", "127.0.0.1", f"[::1]:{port}"):
            assert ask(port, host=host)[0] == 403
        for method in ("POST", "PUT", "DELETE", "OPTIONS"):
            assert ask(port, method=method)[0] in (405, 501)


def test_an_error_keeps_the_last_good_page(tmp_path, drawn, monkeypatch):
    write_runs(tmp_path, (DENSE,), (64,), 1, points=4)
    live = make_live(tmp_path)
    live.refresh()
    good = live.page()

    def fail(*_):
        raise RuntimeError("no ink")

    with monkeypatch.context() as broken:
        broken.setattr(live_module, "write_report", fail)
        write_record(tmp_path / "runs" / "b", make_record(DENSE, 128, 0, points=4))
        live.refresh()
    assert "no ink" in live.status()["error"]
    assert live.page() == good
    write_record(tmp_path / "runs" / "c", make_record(DENSE, 256, 0, points=4))
    live.refresh()
    assert (live.status()["error"], live.version) == ("", 2)


def test_a_folder_without_runs_waits(tmp_path, drawn):
    live = make_live(tmp_path)
    live.refresh()
    assert b"there are no runs in" in live.page()
    write_runs(tmp_path, (DENSE,), (64,), 1, points=4)
    live.refresh()
    assert live.version == 1


def test_bad_input(tmp_path, capsys):
    with pytest.raises(SystemExit):
        main(["report", str(tmp_path / "nowhere"), "--watch"])
    assert "there is no" in capsys.readouterr().err
    live = make_live(tmp_path)
    with served(live) as port, pytest.raises(SystemExit):
        main(["report", str(tmp_path), "--watch", "--port", str(port)])
    assert f"cannot serve on port {port}" in capsys.readouterr().err


@pytest.mark.slow
def test_the_command_ends_by_the_keyboard(tmp_path):
    write_runs(tmp_path, (DENSE,), (64,), 1, points=4)
    command = [sys.executable, "-m", "einlinear", "report", str(tmp_path), "--watch"]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    with subprocess.Popen(command, **pipes) as process:
        line = process.stdout.readline()
        port = int(re.search(r"http://127\.0\.0\.1:(\d+)/", line)[1])
        end = monotonic() + 60
        while json.loads(ask(port, "/version")[2])["version"] < 1 and monotonic() < end:
            sleep(0.1)
        assert b'data-live="1"' in ask(port)[2]
        process.send_signal(signal.SIGINT)
        assert process.wait(30) == 0
        assert process.stderr.read() == ""


def until(page, expression):
    """Wait for something in a page to become true."""
    end = monotonic() + 30
    while monotonic() < end:
        try:
            if page.run(expression):
                return
        except RuntimeError:  # the page is being loaded at this moment
            pass
        sleep(0.2)
    pytest.fail(expression)


@pytest.mark.slow
@pytest.mark.skipif(CHROMIUM is None, reason="there is no chromium on the PATH")
def test_the_browser_follows(tmp_path, drawn):
    """New points come by themselves; toggles, colours, the filter and the place stay."""
    write_runs(tmp_path, (DENSE, KINDS[3]), (32, 64), 1, points=6)
    write_claim(write_unfinished(tmp_path))
    live = make_live(tmp_path)
    live.refresh()
    with served(live) as port, browser() as page:
        page.open(f"http://127.0.0.1:{port}/", height=500)
        badge = "document.getElementById('live').textContent"
        until(page, f"{badge}.includes('1 running') && {badge}.includes('left')")
        page.click(".chip:nth-child(2)")
        page.click('#colour [data-by="2"]')
        page.run("document.getElementById('filter').value = 'dense'; report.showAll()")
        page.run("for (const k of [1, 2]) document.querySelectorAll('.runs th button')[14].click()")
        page.run("document.getElementById('filter').focus({ preventScroll: true })")
        order = "document.querySelectorAll('.runs th')[14].getAttribute('aria-sort')"
        place = (
            "document.querySelector('[aria-labelledby=h-multipliers]').getBoundingClientRect().top"
        )
        page.run(f"scrollBy({{top: {place} - 100, behavior: 'instant'}})")
        assert page.run(place) == pytest.approx(100, abs=2)
        hidden = page.run("report.data.structures[1].structure")
        write_record(tmp_path / "runs" / "new", make_record(KINDS[1], 64, 0, points=6))
        live.refresh()
        until(page, "document.documentElement.dataset.live === '2' && !!window.report")
        names = page.run("report.data.structures.map(s => s.structure)")
        assert "btt(rank=2)" in names
        shown = page.run("[...report.state.hidden].map(k => report.data.structures[k].structure)")
        assert shown == [hidden]
        assert page.run("report.state.by") == 2
        assert page.run("document.getElementById('filter').value") == "dense"
        assert page.run("document.activeElement.id") == "filter"
        assert page.run(order) == "descending"
        assert page.run(place) == pytest.approx(100, abs=2)
        live.error = "no ink"
        until(page, f"{badge}.includes('no ink')")
        assert page.errors == []
