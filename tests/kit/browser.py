"""A real browser for tests: Chromium, spoken to over its own debugging pipe, without packages."""

import base64
import fcntl
import json
import os
import select
import shutil
import subprocess
import tempfile
from contextlib import contextmanager
from time import monotonic

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser")
_FLAGS = (
    "--headless=new",
    "--remote-debugging-pipe",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-dev-shm-usage",
    "--disable-background-networking",
    "--disable-component-update",
    "--no-first-run",
    "--hide-scrollbars",
)


class Page:
    """One tab. `requests` and `errors` are what it asked for and complained about.

    shown: for tests to remember what they have opened.
    """

    def __init__(self, write, read):
        self._write, self._read, self._rest, self._number = write, read, b"", 0
        self.requests, self.errors, self._events = [], [], []
        self.shown = None
        target = self._call("Target.createTarget", url="about:blank")["targetId"]
        self._session = None
        flat = self._call("Target.attachToTarget", targetId=target, flatten=True)
        self._session = flat["sessionId"]
        for domain in ("Page", "Runtime", "Network", "Log"):
            self._call(f"{domain}.enable")

    def _message(self, seconds):
        """The next message of the browser; None if there is none in time."""
        end = monotonic() + seconds
        while b"\0" not in self._rest:
            if not select.select([self._read], [], [], max(0, end - monotonic()))[0]:
                return None
            part = os.read(self._read, 1 << 20)
            if not part:
                raise EOFError("the browser has ended")
            self._rest += part
        text, self._rest = self._rest.split(b"\0", 1)
        return json.loads(text)

    def _call(self, method, **params):
        self._number += 1
        request = {"id": self._number, "method": method, "params": params}
        if getattr(self, "_session", None):
            request["sessionId"] = self._session
        os.write(self._write, json.dumps(request).encode() + b"\0")
        while (message := self._message(60)) is not None:
            if message.get("id") == self._number:
                if "error" in message:
                    raise RuntimeError(f"{method}: {message['error']}")
                return message["result"]
            self._note(message)
        raise TimeoutError(method)

    def _note(self, message):
        method, params = message.get("method"), message.get("params", {})
        if method == "Network.requestWillBeSent":
            self.requests.append(params["request"]["url"])
        elif method == "Runtime.exceptionThrown":
            self.errors.append(str(params["exceptionDetails"]))
        elif method == "Runtime.consoleAPICalled" and params["type"] in ("error", "assert"):
            self.errors.append(str(params["args"]))
        elif method == "Log.entryAdded" and params["entry"]["level"] == "error":
            self.errors.append(params["entry"]["text"])
        elif method == "Page.javascriptDialogOpening":
            self.errors.append(f"a dialog: {params['message']}")
        self._events.append(method)

    def open(self, url, *, width=1280, height=900, dark=False, script=True):
        """Load a page in a window of this size."""
        self._call(
            "Emulation.setDeviceMetricsOverride",
            width=width,
            height=height,
            deviceScaleFactor=1,
            mobile=width < 600,
        )
        value = "dark" if dark else "light"
        features = [{"name": "prefers-color-scheme", "value": value}]
        self._call("Emulation.setEmulatedMedia", features=features)
        self._call("Emulation.setScriptExecutionDisabled", value=not script)
        self._events.clear()
        self._call("Page.navigate", url=str(url))
        end = monotonic() + 60
        while "Page.loadEventFired" not in self._events:
            message = self._message(end - monotonic())
            if message is None:
                raise TimeoutError(url)
            self._note(message)

    def run(self, expression):
        """The value of an expression in the page; waits for promises."""
        found = self._call(
            "Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True
        )
        if "exceptionDetails" in found:
            raise RuntimeError(f"{expression}: {found['exceptionDetails']}")
        return found["result"].get("value")

    def click(self, selector):
        """Press what a selector finds, as a mouse would."""
        place = self.run(
            f"(() => {{ const e = document.querySelector({json.dumps(selector)});"
            "e.scrollIntoView({block: 'center', behavior: 'instant'});"
            "const r = e.getBoundingClientRect();"
            "return [r.x + r.width / 2, r.y + r.height / 2] })()"
        )
        for kind in ("mousePressed", "mouseReleased"):
            self._call(
                "Input.dispatchMouseEvent",
                type=kind,
                x=place[0],
                y=place[1],
                button="left",
                clickCount=1,
            )

    def key(self, name, text=""):
        """Press a key."""
        for kind in ("keyDown", "keyUp"):
            code = {"Enter": 13, "Tab": 9, " ": 32}.get(name, 0)
            typed = {"text": text} if text and kind == "keyDown" else {}
            self._call(
                "Input.dispatchKeyEvent",
                type=kind,
                key=name,
                windowsVirtualKeyCode=code,
                **typed,
            )

    def screenshot(self, path, whole=True):
        """A picture of the window, or of the whole page."""
        found = self._call("Page.captureScreenshot", format="png", captureBeyondViewport=whole)
        path.write_bytes(base64.b64decode(found["data"]))

    def pdf(self, path):
        """The page as it is printed."""
        found = self._call("Page.printToPDF", printBackground=True)
        path.write_bytes(base64.b64decode(found["data"]))


@contextmanager
def browser():
    """A page of a fresh browser, which ends with the block."""
    ends = [os.pipe(), os.pipe()]
    # Moved out of the way: the browser speaks through the files number 3 and 4.
    theirs = [fcntl.fcntl(end, fcntl.F_DUPFD, 10) for end in (ends[0][0], ends[1][1])]
    write, read = ends[0][1], ends[1][0]

    def connect():
        for end, number in zip(theirs, (3, 4), strict=True):
            os.dup2(end, number)

    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as profile:
        process = subprocess.Popen(
            [CHROMIUM, *_FLAGS, f"--user-data-dir={profile}", "about:blank"],
            preexec_fn=connect,
            pass_fds=(3, 4),
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        # Not before: numbers 3 and 4 would be free for the pipe by which a failed start is told.
        for end in (*theirs, ends[0][0], ends[1][1]):
            os.close(end)
        try:
            yield Page(write, read)
        finally:
            process.kill()
            process.wait()
            os.close(write)
            os.close(read)
