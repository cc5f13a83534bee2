"""A headless Chromium, controlled with its DevTools protocol through a pair of pipes."""

from __future__ import annotations

import base64
import itertools
import json
import os
import select
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable", "chrome")

# Codes of keys without a character, and bits of modifiers.
KEYS = {"Enter": 13, "Escape": 27, "Tab": 9, "ArrowUp": 38, "ArrowDown": 40, " ": 32, ",": 188, "/": 191, "?": 191}
MODIFIERS = {"Control": 2, "Shift": 8}

# Chromium reads commands from descriptor 3 and answers on 4, which may be the pipes' own numbers.
LAUNCHER = """
import fcntl, os, sys
pair = [fcntl.fcntl(int(number), fcntl.F_DUPFD, 10) for number in sys.argv[1:3]]
os.dup2(pair[0], 3)
os.dup2(pair[1], 4)
os.execv(sys.argv[3], sys.argv[3:])
"""


def find() -> str | None:
    """Return the path of Chromium: $CHROMIUM, or the program on the PATH."""
    return os.environ.get("CHROMIUM") or next(filter(None, map(shutil.which, NAMES)), None)


needs_chromium = pytest.mark.skipif(
    find() is None, reason="no Chromium here: apt-get install chromium, or name one with CHROMIUM="
)


class Browser:
    """A browser with one page; every method raises AssertionError for an error of either."""

    def __init__(self, program: str, profile: Path):
        ours, theirs = os.pipe(), os.pipe()
        flags = [
            "--headless=new", "--no-sandbox", "--disable-gpu", "--no-first-run", "--disable-extensions",
            "--disable-background-networking", "--remote-debugging-pipe", f"--user-data-dir={profile}", "about:blank",
        ]  # fmt: skip
        with open(profile.parent / "chromium.log", "wb") as log:
            self.process = subprocess.Popen(
                [sys.executable, "-c", LAUNCHER, str(ours[0]), str(theirs[1]), program, *flags],
                pass_fds=(ours[0], theirs[1]), stdout=log, stderr=log,
            )  # fmt: skip
        os.close(ours[0])
        os.close(theirs[1])
        self._in, self._out, self._buffer = ours[1], theirs[0], b""
        self._ids = itertools.count(1)
        self._session = None
        self.errors: list[str] = []
        self.requests: list[str] = []
        until = time.monotonic() + 60
        # Chromium answers before it has opened a page.
        while not (pages := [one for one in self.call("Target.getTargets")["targetInfos"] if one["type"] == "page"]):
            assert time.monotonic() < until, "Chromium opens no page"
            time.sleep(0.02)
        self._session = self.call("Target.attachToTarget", targetId=pages[0]["targetId"], flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.call(f"{domain}.enable")

    def call(self, method: str, **params) -> dict:
        """Send one DevTools command and return its result."""
        number = next(self._ids)
        message = {"id": number, "method": method, "params": params}
        if self._session:
            message["sessionId"] = self._session
        os.write(self._in, json.dumps(message).encode() + b"\0")
        while True:
            found = self._read()
            if found.get("id") == number:
                assert "error" not in found, f"{method}: {found['error']}"
                return found["result"]
            self._note(found)

    def _read(self, seconds: float = 60) -> dict:
        while b"\0" not in self._buffer:
            assert select.select([self._out], [], [], seconds)[0], "Chromium does not answer"
            data = os.read(self._out, 1 << 20)
            assert data, "Chromium has ended"
            self._buffer += data
        message, self._buffer = self._buffer.split(b"\0", 1)
        return json.loads(message)

    def _note(self, event: dict) -> None:
        """Record an error that the console or the network reports."""
        method, params = event.get("method"), event.get("params", {})
        if method == "Runtime.exceptionThrown":
            self.errors.append(str(params["exceptionDetails"].get("exception", {}).get("description")))
        elif method == "Log.entryAdded" and params["entry"]["level"] == "error":
            self.errors.append(params["entry"]["text"])
        elif method == "Network.requestWillBeSent":
            self.requests.append(params["request"]["url"])

    def open(self, url: str, *, dark: bool = False, again: bool = False) -> None:
        """Open a page; with `again`, the storage of the last page stays."""
        self.requests = []
        if not again:
            # Leaves the open page first, because it stores its conversation then.
            self.call("Page.navigate", url="about:blank")
            self.call("Storage.clearDataForOrigin", origin=url.rstrip("/"), storageTypes="all")
        media = {"prefers-color-scheme": "dark" if dark else "light", "prefers-reduced-motion": "reduce"}
        self.call("Emulation.setEmulatedMedia", features=[{"name": name, "value": value} for name, value in media.items()])
        self.call("Page.navigate", url=url)
        self.wait("document.readyState === 'complete'")

    def throttle(self, bytes_per_second: int) -> None:
        """Set the speed of the page's network; -1 removes the limit."""
        speeds = {"downloadThroughput": bytes_per_second, "uploadThroughput": -1, "latency": 0, "offline": False}
        self.call("Network.emulateNetworkConditions", **speeds)

    def run(self, script: str):
        """Return the value of a JavaScript expression in the page."""
        result = self.call("Runtime.evaluate", expression=script, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in result, result["exceptionDetails"]
        return result["result"].get("value")

    def wait(self, condition: str, seconds: float = 30) -> None:
        """Wait until a JavaScript expression is true."""
        end = time.monotonic() + seconds
        while not self.run(f"!!({condition})"):
            assert time.monotonic() < end, f"timeout: {condition}"
            time.sleep(0.02)

    def type(self, text: str) -> None:
        """Type text into the focused element."""
        self.call("Input.insertText", text=text)

    def press(self, name: str, *modifiers: str) -> None:
        """Press a key, given by its name or character, with `modifiers`: Shift, Control."""
        code = KEYS.get(name, ord(name.upper()[-1]))
        key = {"key": name, "windowsVirtualKeyCode": code, "modifiers": sum(MODIFIERS[one] for one in modifiers)}
        if name == "Enter" or len(name) == 1 and "Control" not in modifiers:
            key["text"] = "\r" if name == "Enter" else name
        self.call("Input.dispatchKeyEvent", type="keyDown", **key)
        self.call("Input.dispatchKeyEvent", type="keyUp", **key)

    def size(self, width: int, height: int, phone: bool = False) -> None:
        """Set the size of the window; a phone also has a touch screen and double resolution."""
        scale = 2 if phone else 1
        self.call("Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=scale, mobile=phone)
        self.call("Emulation.setTouchEmulationEnabled", enabled=phone)

    def click(self, selector: str) -> None:
        """Click in the middle of the first element that matches the selector."""
        x, y = self.run(
            f"(() => {{ const b = document.querySelector({selector!r}).getBoundingClientRect();"
            " return [b.x + b.width / 2, b.y + b.height / 2]; })()"
        )
        for kind in ("mousePressed", "mouseReleased"):
            self.call("Input.dispatchMouseEvent", type=kind, x=x, y=y, button="left", clickCount=1)

    def screenshot(self, path: Path) -> bytes:
        """Write a PNG of the page and return its bytes."""
        data = base64.b64decode(self.call("Page.captureScreenshot")["data"])
        path.write_bytes(data)
        return data

    def close(self) -> None:
        os.close(self._in)
        os.close(self._out)
        self.process.terminate()
        try:
            self.process.wait(10)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
