"""Serve a report to this machine only, and rebuild it when its runs change."""

from __future__ import annotations

import json
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from socket import SHUT_RDWR, socket
from socketserver import BaseServer
from sys import exc_info
from threading import Event, Lock, Thread
from time import monotonic
from typing import Any
from urllib.parse import unquote, urlsplit

from einlinear.errors import EinlinearError
from einlinear.reports.analyse import ReportSettings, analyse
from einlinear.reports.gather import fingerprint, gather, under_way
from einlinear.reports.write import write_report
from einlinear.show.numbers import duration
from einlinear.show.pages import render

HOST = "127.0.0.1"
LOOK_SECONDS = 2.0
WAIT_SECONDS = 10.0  # for a client that neither sends nor receives anything
MOST_SECONDS = 30.0  # that a connection may take in all
MOST_CALLERS = 32  # at once; a browser opens six
_TYPES = {
    ".html": "text/html; charset=utf-8",
    ".svg": "image/svg+xml",
    ".png": "image/png",
    ".csv": "text/csv; charset=utf-8",
}
_START = '<html lang="en"'


class Live:
    """A report that follows a directory: its version, and the last error."""

    def __init__(self, source: Path, out: Path, settings: ReportSettings) -> None:
        self.source, self.out, self._settings = source, out, settings
        self.version = 0
        self.error = ""
        self._seen: object = None

    def refresh(self) -> bool:
        """Rebuild the report if something changed; return whether it tried.

        An error keeps the last good page.
        """
        try:
            now = fingerprint(self.source)
            if now == self._seen:
                return False
            self._seen = now
            write_report(analyse(gather(self.source), self._settings), self.out)
            self.version += 1
            self.error = ""
        except EinlinearError as error:
            self.error = error.what
        except Exception as error:  # whatever it was, the next change may fix it
            self.error = repr(error)
        return True

    def follow(self, stop: Event) -> None:
        """Refresh until stopped, for at most a fifth of the time; the runs need the rest."""
        while not stop.is_set():
            begin = monotonic()
            self.refresh()
            stop.wait(max(LOOK_SECONDS, 4 * (monotonic() - begin)))

    def status(self) -> dict[str, Any]:
        """The status that the page polls."""
        count, seconds = under_way(self.source)
        left = "" if seconds is None else duration(seconds)
        return {"version": self.version, "error": self.error, "running": count, "left": left}

    def page(self) -> bytes:
        """The last good page, marked with its version; a waiting page before the first."""
        path = self.out / "index.html"
        if not self.version or not path.exists():
            message = self.error or "The report is being built."
            return render("einlinear.reports", "waiting.html", message=message).encode()
        version = self.version
        text = path.read_text(encoding="utf-8")
        return text.replace(_START, f'{_START} data-live="{version}"', 1).encode()


class _Handler(BaseHTTPRequestHandler):
    """Answers GET for the page, its version, and the files beside it; nothing else."""

    server_version = "einlinear"
    sys_version = ""
    timeout = WAIT_SECONDS

    def __init__(self, live: Live, *arguments: Any) -> None:
        self._live = live
        super().__init__(*arguments)

    def do_GET(self) -> None:
        """Answer one request."""
        port = port_of(self.server)
        # Another host name means that a foreign page is trying to read the report (DNS rebinding).
        if self.headers.get("Host") not in (f"{HOST}:{port}", f"localhost:{port}"):
            self.send_error(HTTPStatus.FORBIDDEN)
            return
        path = unquote(urlsplit(self.path).path)
        if path in ("/", "/index.html"):
            self._answer(self._live.page(), _TYPES[".html"])
        elif path == "/version":
            self._answer(json.dumps(self._live.status()).encode(), "application/json")
        else:
            self._answer_file(path)

    def _answer_file(self, path: str) -> None:
        try:
            root = self._live.out.resolve()
            file = (root / path.lstrip("/")).resolve()
            if file.suffix not in _TYPES or not file.is_relative_to(root) or not file.is_file():
                raise FileNotFoundError(path)
            data = file.read_bytes()
        except (OSError, ValueError):
            self.send_error(HTTPStatus.NOT_FOUND)
            return
        self._answer(data, _TYPES[file.suffix])

    def _answer(self, data: bytes, kind: str) -> None:
        self.send_response(HTTPStatus.OK)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(data)))
        self.send_header("Cache-Control", "no-store")
        self.send_header("X-Content-Type-Options", "nosniff")
        self.send_header("Referrer-Policy", "no-referrer")
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, *_: object) -> None:
        """Log nothing."""


class Server(ThreadingHTTPServer):
    """One thread per connection, up to a limit; slow connections are cut off."""

    def __init__(self, live: Live, port: int) -> None:
        self._callers: dict[socket, float] = {}  # when each connected
        self._lock = Lock()
        super().__init__((HOST, port), partial(_Handler, live))

    def verify_request(self, request: Any, client_address: Any) -> bool:
        """Whether there is room for one more connection; otherwise it is closed."""
        with self._lock:
            has_room = len(self._callers) < MOST_CALLERS
            if has_room:
                self._callers[request] = monotonic()
        return has_room

    def shutdown_request(self, request: Any) -> None:
        """Close a connection."""
        with self._lock:
            self._callers.pop(request, None)
        super().shutdown_request(request)

    def service_actions(self) -> None:
        """Cut off slow connections; called about twice a second."""
        with self._lock:
            now = monotonic()
            late = [one for one, came in self._callers.items() if now - came > MOST_SECONDS]
            for one in late:
                with suppress(OSError):  # it has closed by itself
                    one.shutdown(SHUT_RDWR)

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Report errors, except connections that were closed or cut off."""
        if not isinstance(exc_info()[1], ConnectionError | TimeoutError):
            super().handle_error(request, client_address)


def port_of(server: BaseServer) -> int:
    """The port of a server."""
    address: Any = server.server_address
    return int(address[1])


def make_server(live: Live, port: int) -> Server:
    """A server on this machine; port 0 picks a free one."""
    try:
        return Server(live, port)
    except (OSError, OverflowError) as error:
        raise EinlinearError(
            what=f"cannot serve on port {port}: {error}",
            rule="the report needs a free port on this machine",
            fix="give another --port, or 0 for any free one",
        ) from error


def watch(live: Live, port: int, announce: Callable[[str], None]) -> None:
    """Serve a report until Ctrl-C; calls `announce` with its address."""
    server = make_server(live, port)
    stop = Event()
    follower = Thread(target=live.follow, args=(stop,), daemon=True)
    try:
        announce(f"http://{HOST}:{port_of(server)}/")
        follower.start()
        server.serve_forever()
    except KeyboardInterrupt:
        pass
    finally:
        stop.set()
        server.server_close()
