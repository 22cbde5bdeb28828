"""A report that follows its runs: served to this machine only, rebuilt when something changed."""

from __future__ import annotations

import json
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from html import escape
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
from einlinear.studies.numbers import duration
from einlinear.studies.reports.analyse import Settings, analyse
from einlinear.studies.reports.gather import fingerprint, gather, under_way
from einlinear.studies.reports.write import write_report

HOST = "127.0.0.1"
LOOK_SECONDS = 2.0
WAIT_SECONDS = 10.0  # for a caller that neither sends nor takes anything
MOST_SECONDS = 30.0  # that a connection may take in all, however slowly it goes on
MOST_CALLERS = 32  # at once; a browser has six
_TYPES = {
    ".html": "text/html; charset=utf-8",
    ".svg": "image/svg+xml",
    ".png": "image/png",
    ".csv": "text/csv; charset=utf-8",
}
_START = '<html lang="en"'
_WAITING = (
    "<!doctype html>"
    + _START
    + '><meta charset="utf-8"><meta http-equiv="refresh" content="2"><title>report</title>'
    '<link rel="icon" href="data:,">'
    '<body style="font: 16px system-ui; margin: 4em; color-scheme: light dark"><p>%s</p>'
)


class Live:
    """A report of a directory and how it stands: its version, and what went wrong last."""

    def __init__(self, source: Path, out: Path, settings: Settings) -> None:
        self.source, self.out, self._settings = source, out, settings
        self.version = 0
        self.error = ""
        self._seen: object = None

    def refresh(self) -> bool:
        """Build the report anew if something changed; says whether it tried.

        An error leaves the last good page where it is.
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
        except Exception as error:  # whatever it was, the next change may mend it
            self.error = repr(error)
        return True

    def follow(self, stop: Event) -> None:
        """Refresh until told to stop; a fifth of the time at most, for the runs need it, too."""
        while not stop.is_set():
            begin = monotonic()
            self.refresh()
            stop.wait(max(LOOK_SECONDS, 4 * (monotonic() - begin)))

    def status(self) -> dict[str, Any]:
        """What the page asks for every few seconds."""
        count, seconds = under_way(self.source)
        left = "" if seconds is None else duration(seconds)
        return {"version": self.version, "error": self.error, "running": count, "left": left}

    def page(self) -> bytes:
        """The last good page, told which version it is; before the first a page that waits."""
        path = self.out / "index.html"
        if not self.version or not path.exists():
            return (_WAITING % escape(self.error or "The report is being made.")).encode()
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
        """One request."""
        port = port_of(self.server)
        # Another name that leads here belongs to a page that wants to read what is ours.
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
        """Requests are no news."""


class Server(ThreadingHTTPServer):
    """A thread for each caller, up to a number of them; who takes too long is cut off."""

    def __init__(self, live: Live, port: int) -> None:
        self._callers: dict[socket, float] = {}  # when they came
        self._lock = Lock()
        super().__init__((HOST, port), partial(_Handler, live))

    def verify_request(self, request: Any, client_address: Any) -> bool:
        """Whether there is room for one more; whoever is refused is disconnected."""
        with self._lock:
            has_room = len(self._callers) < MOST_CALLERS
            if has_room:
                self._callers[request] = monotonic()
        return has_room

    def shutdown_request(self, request: Any) -> None:
        """End a connection."""
        with self._lock:
            self._callers.pop(request, None)
        super().shutdown_request(request)

    def service_actions(self) -> None:
        """Cut off who takes too long; called about twice a second."""
        with self._lock:
            now = monotonic()
            late = [one for one, came in self._callers.items() if now - came > MOST_SECONDS]
            for one in late:
                with suppress(OSError):  # it has gone by itself
                    one.shutdown(SHUT_RDWR)

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Say what went wrong, unless somebody has hung up or was cut off: that is no news."""
        if not isinstance(exc_info()[1], ConnectionError | TimeoutError):
            super().handle_error(request, client_address)


def port_of(server: BaseServer) -> int:
    """The port that a server has."""
    address: Any = server.server_address
    return int(address[1])


def make_server(live: Live, port: int) -> Server:
    """A server of this machine; port 0 is any that is free."""
    try:
        return Server(live, port)
    except (OSError, OverflowError) as error:
        raise EinlinearError(
            what=f"cannot serve on port {port}: {error}",
            rule="the report is served on a port of this machine that is free",
            fix="give another --port, or 0 for any",
        ) from error


def watch(live: Live, port: int, announce: Callable[[str], None]) -> None:
    """Serve a report until the keyboard interrupts; `announce` is called with its address."""
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
