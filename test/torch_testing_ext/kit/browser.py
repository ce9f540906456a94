"""A headless browser, driven through its debugging pipe: no port, no driver, no package."""

from __future__ import annotations

import base64
import fcntl
import itertools
import json
import os
import shutil
import subprocess
import tempfile
import unittest
from pathlib import Path
from typing import Any

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
FLAGS = [
    *("--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--hide-scrollbars"),
    *("--disable-background-networking", "--disable-component-update", "--disable-sync", "--window-size=1280,1200"),
    "--remote-debugging-pipe",
]

needs_chromium = unittest.skipUnless(CHROMIUM, "HTML REPORT NOT CHECKED: Chromium is not installed")


class Browser:
    """A browser with one page; both end with the `with` block."""

    def __enter__(self) -> Browser:
        self._home = tempfile.TemporaryDirectory(ignore_cleanup_errors=True)
        commands, self._send = _high_pipe()
        self._answers, answers = _high_pipe()
        # The browser reads from 3 and writes to 4: the shell moves them there.
        move = f'exec "$@" 3<&{commands} 4>&{answers} {commands}<&- {answers}>&-'
        command = ["bash", "-c", move, "bash", CHROMIUM, *FLAGS, f"--user-data-dir={self._home.name}", "about:blank"]
        quiet = subprocess.DEVNULL
        self._process = subprocess.Popen(command, pass_fds=(commands, answers), stdout=quiet, stderr=quiet)
        os.close(commands)
        os.close(answers)
        self._rest, self._numbers, self._events = b"", itertools.count(1), []
        self._session = None
        target = next(one for one in self._call("Target.getTargets")["targetInfos"] if one["type"] == "page")
        attached = self._call("Target.attachToTarget", targetId=target["targetId"], flatten=True)
        self._session = attached["sessionId"]
        for domain in "Page", "Runtime", "Network", "Log":
            self._call(f"{domain}.enable")
        return self

    def __exit__(self, *error: object) -> None:
        os.close(self._send)  # the browser ends when its pipe closes
        self._process.wait()
        os.close(self._answers)
        self._home.cleanup()

    def open(self, file: Path, fragment: str = "") -> None:
        self._events.clear()  # including those of the previous page
        self._call("Page.navigate", url=file.as_uri() + fragment)
        while not self._seen("Page.loadEventFired"):
            self._receive()

    def _seen(self, method: str) -> list[dict[str, Any]]:
        return [event["params"] for event in self._events if event.get("method") == method]

    def complaints(self) -> list[Any]:
        """Errors of scripts, and all messages in the console of the browser."""
        return self._seen("Runtime.exceptionThrown") + self._seen("Log.entryAdded")

    def requests(self) -> list[str]:
        return [event["request"]["url"] for event in self._seen("Network.requestWillBeSent")]

    def evaluate(self, expression: str) -> Any:
        done = self._call("Runtime.evaluate", expression=expression, returnByValue=True)
        assert "exceptionDetails" not in done, done
        return done["result"].get("value")

    def measure(self) -> None:
        """Measure processor time, from now on."""
        self._call("Performance.enable", timeDomain="threadTicks")

    def seconds_of_main_thread(self) -> float:
        """The processor time that the page has taken."""
        metrics = self._call("Performance.getMetrics")["metrics"]
        return next(metric["value"] for metric in metrics if metric["name"] == "TaskDuration")

    def scheme(self, name: str) -> None:
        self._call("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": name}])

    def resize(self, width: int, height: int = 1200) -> None:
        """The page gets this size in pixels, whatever the smallest size of a window is."""
        self._call("Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=False)

    def screenshot(self, selector: str) -> bytes:
        """The first element that the selector finds, as PNG."""
        box = self.evaluate(f"document.querySelector({json.dumps(selector)}).getBoundingClientRect().toJSON()")
        clip = {name: box[name] for name in ("x", "y", "width", "height")}
        taken = self._call("Page.captureScreenshot", clip={**clip, "scale": 1}, captureBeyondViewport=True)
        return base64.b64decode(taken["data"])

    def _call(self, method: str, **params: Any) -> Any:
        number = next(self._numbers)
        message = {"id": number, "method": method, "params": params}
        if self._session:
            message["sessionId"] = self._session
        os.write(self._send, json.dumps(message).encode() + b"\0")
        while True:
            answer = self._receive()
            if answer.get("id") == number:
                assert "error" not in answer, answer
                return answer["result"]

    def _receive(self) -> dict[str, Any]:
        while b"\0" not in self._rest:
            data = os.read(self._answers, 1 << 16)
            assert data, "the browser has ended"
            self._rest += data
        first, _, self._rest = self._rest.partition(b"\0")
        message = json.loads(first)
        if "method" in message:
            self._events.append(message)
        return message


def _high_pipe() -> tuple[int, int]:
    """A pipe whose ends are neither 3 nor 4, since the shell redirects these one after the other."""
    low = os.pipe()
    high = tuple(fcntl.fcntl(end, fcntl.F_DUPFD_CLOEXEC, 10) for end in low)
    for end in low:
        os.close(end)
    return high[0], high[1]
