"""A headless Chromium, driven by its DevTools protocol over a pair of pipes."""

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

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable", "chrome")

# Codes of keys without a character, and bits of those that are held.
KEYS = {"Enter": 13, "Escape": 27, "Tab": 9, "ArrowUp": 38, "ArrowDown": 40, " ": 32, ",": 188, "/": 191, "?": 191}
MODIFIERS = {"Control": 2, "Shift": 8}

# Chromium reads commands from descriptor 3 and answers on 4; the pipes may come with these very numbers.
LAUNCHER = """
import fcntl, os, sys
pair = [fcntl.fcntl(int(number), fcntl.F_DUPFD, 10) for number in sys.argv[1:3]]
os.dup2(pair[0], 3)
os.dup2(pair[1], 4)
os.execv(sys.argv[3], sys.argv[3:])
"""


def find() -> str | None:
    """The program; CHROMIUM in the environment goes first."""
    return os.environ.get("CHROMIUM") or next(filter(None, map(shutil.which, NAMES)), None)


class Browser:
    """One page. Every method raises AssertionError for what the browser or the page calls an error."""

    def __init__(self, program: str, profile: Path, size: tuple[int, int] = (900, 700)):
        ours, theirs = os.pipe(), os.pipe()
        flags = [
            "--headless=new", "--no-sandbox", "--disable-gpu", "--no-first-run", "--disable-extensions",
            "--disable-background-networking", "--remote-debugging-pipe", f"--user-data-dir={profile}",
            f"--window-size={size[0]},{size[1]}", "about:blank",
        ]  # fmt: skip
        with open(profile.parent / "chromium.log", "wb") as log:
            self.process = subprocess.Popen(
                [sys.executable, "-c", LAUNCHER, str(ours[0]), str(theirs[1]), program, *flags],
                pass_fds=(ours[0], theirs[1]), stdout=log, stderr=log,
            )  # fmt: skip
        os.close(ours[0])
        os.close(theirs[1])
        self._in, self._out, self._held = ours[1], theirs[0], b""
        self._ids = itertools.count(1)
        self._session = None
        self.errors: list[str] = []
        self.requests: list[str] = []
        until = time.monotonic() + 60
        # It answers before it has opened one.
        while not (pages := [one for one in self.call("Target.getTargets")["targetInfos"] if one["type"] == "page"]):
            assert time.monotonic() < until, "Chromium opens no page"
            time.sleep(0.02)
        self._session = self.call("Target.attachToTarget", targetId=pages[0]["targetId"], flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.call(f"{domain}.enable")

    def call(self, method: str, **params) -> dict:
        """The result of one DevTools command."""
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
        while b"\0" not in self._held:
            assert select.select([self._out], [], [], seconds)[0], "Chromium says nothing"
            data = os.read(self._out, 1 << 20)
            assert data, "Chromium has ended"
            self._held += data
        message, self._held = self._held.split(b"\0", 1)
        return json.loads(message)

    def _note(self, event: dict) -> None:
        """Keeps what the console or the network complains about."""
        method, params = event.get("method"), event.get("params", {})
        if method == "Runtime.exceptionThrown":
            self.errors.append(str(params["exceptionDetails"].get("exception", {}).get("description")))
        elif method == "Log.entryAdded" and params["entry"]["level"] == "error":
            self.errors.append(params["entry"]["text"])
        elif method == "Network.requestWillBeSent":
            self.requests.append(params["request"]["url"])

    def open(self, url: str, *, dark: bool = False, again: bool = False) -> None:
        """A page that the browser has never seen, or one seen `again` with all that it kept."""
        self.requests = []
        if not again:
            # What an open page would still keep on its way out.
            self.call("Page.navigate", url="about:blank")
            self.call("Storage.clearDataForOrigin", origin=url.rstrip("/"), storageTypes="all")
        wishes = {"prefers-color-scheme": "dark" if dark else "light", "prefers-reduced-motion": "reduce"}
        self.call("Emulation.setEmulatedMedia", features=[{"name": name, "value": value} for name, value in wishes.items()])
        self.call("Page.navigate", url=url)
        self.wait("document.readyState === 'complete'")

    def throttle(self, bytes_per_second: int) -> None:
        """How fast the page's network is from now on; -1 is as fast as it can be."""
        speeds = {"downloadThroughput": bytes_per_second, "uploadThroughput": -1, "latency": 0, "offline": False}
        self.call("Network.emulateNetworkConditions", **speeds)

    def run(self, script: str):
        """The value of a JavaScript expression in the page."""
        result = self.call("Runtime.evaluate", expression=script, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in result, result["exceptionDetails"]
        return result["result"].get("value")

    def wait(self, condition: str, seconds: float = 30) -> None:
        """Until a JavaScript expression is true."""
        end = time.monotonic() + seconds
        while not self.run(f"!!({condition})"):
            assert time.monotonic() < end, f"this never came true: {condition}"
            time.sleep(0.02)

    def type(self, text: str) -> None:
        """As the keyboard would, into what has the focus."""
        self.call("Input.insertText", text=text)

    def press(self, name: str, *held: str) -> None:
        """A key, by its name or its character, while others are `held`: Shift, Control."""
        code = KEYS.get(name, ord(name.upper()[-1]))
        key = {"key": name, "windowsVirtualKeyCode": code, "modifiers": sum(MODIFIERS[one] for one in held)}
        if name == "Enter" or len(name) == 1 and "Control" not in held:
            key["text"] = "\r" if name == "Enter" else name
        self.call("Input.dispatchKeyEvent", type="keyDown", **key)
        self.call("Input.dispatchKeyEvent", type="keyUp", **key)

    def size(self, width: int, height: int, phone: bool = False) -> None:
        """The window's; a phone has fingers, and two pixels for each of the page's."""
        scale = 2 if phone else 1
        self.call("Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=scale, mobile=phone)
        self.call("Emulation.setTouchEmulationEnabled", enabled=phone)

    def choose_file(self, selector: str, path: Path) -> None:
        """What a person would pick for a field of files."""
        root = self.call("DOM.getDocument")["root"]["nodeId"]
        node = self.call("DOM.querySelector", nodeId=root, selector=selector)["nodeId"]
        self.call("DOM.setFileInputFiles", nodeId=node, files=[str(path)])

    def click(self, selector: str) -> None:
        """In the middle of the first element that the selector finds."""
        x, y = self.run(
            f"(() => {{ const b = document.querySelector({selector!r}).getBoundingClientRect();"
            " return [b.x + b.width / 2, b.y + b.height / 2]; })()"
        )
        for kind in ("mousePressed", "mouseReleased"):
            self.call("Input.dispatchMouseEvent", type=kind, x=x, y=y, button="left", clickCount=1)

    def screenshot(self, path: Path) -> bytes:
        """Writes a PNG and returns it."""
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
