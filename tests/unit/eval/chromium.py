"""Headless Chromium over its own pipe: open a page as a screen or a phone shows it, measure it, take its picture.

The DevTools protocol without a port: commands go to the browser's file descriptor 3, answers come from 4, each a JSON
object that ends in a zero byte.
"""

from __future__ import annotations

import base64
import json
import os
import select
import shutil
import subprocess
import time
from pathlib import Path
from typing import Any

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
FLAGS = (
    "--headless=new",
    "--no-sandbox",
    "--disable-gpu",
    "--hide-scrollbars",
    "--no-first-run",
    "--disable-extensions",
    "--disable-background-networking",
    "--disable-component-update",
    "--remote-debugging-pipe",
)
PATIENCE = 120.0  # seconds for one answer: a browser starts slowly beside other work


def find_chromium() -> str | None:
    """The browser's path: `CHROMIUM`, or one of the usual names; None where there is none."""
    named = os.environ.get("CHROMIUM")
    return named or next((path for name in NAMES if (path := shutil.which(name))), None)


class Browser:
    """One browser with one page. Close it when done.

    Args:
        path: the program.
        profile: an empty folder for its state.
    """

    def __init__(self, path: str, profile: Path) -> None:
        commands, answers = os.pipe(), os.pipe()
        self._out, self._in = commands[1], answers[0]
        self._process = subprocess.Popen(
            ["/bin/sh", "-c", f'exec "$0" "$@" 3</dev/fd/{commands[0]} 4>/dev/fd/{answers[1]}', path, *FLAGS,
             f"--user-data-dir={profile}", "about:blank"],
            pass_fds=(commands[0], answers[1]),
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )  # fmt: skip
        os.close(commands[0])
        os.close(answers[1])
        self._rest, self._count, self._session = b"", 0, ""
        self.events: list[dict[str, Any]] = []
        targets = self.ask("Target.getTargets")["targetInfos"]
        page = next(one["targetId"] for one in targets if one["type"] == "page")
        self._session = self.ask("Target.attachToTarget", targetId=page, flatten=True)["sessionId"]
        for domain in ("Page", "Network", "Runtime", "Log"):
            self.ask(f"{domain}.enable")

    def close(self) -> None:
        """End the browser."""
        os.close(self._out)  # it ends when its pipe does
        try:
            self._process.wait(20)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        os.close(self._in)

    def ask(self, method: str, **params: Any) -> dict[str, Any]:
        """Send one command and wait for its answer; events that come first are kept in `events`."""
        self._count += 1
        message = {"id": self._count, "method": method, "params": params}
        if self._session:
            message["sessionId"] = self._session
        os.write(self._out, json.dumps(message).encode() + b"\0")
        while True:
            answer = self._receive(PATIENCE)
            if answer.get("id") == self._count:
                assert "error" not in answer, f"{method}: {answer['error']}"
                return answer["result"]  # type: ignore[no-any-return]
            self.events.append(answer)

    def wait_for(self, event: str) -> None:
        """Wait for an event, unless it has come already."""
        while not any(one.get("method") == event for one in self.events):
            self.events.append(self._receive(PATIENCE))

    def _receive(self, patience: float) -> dict[str, Any]:
        end = time.monotonic() + patience
        while b"\0" not in self._rest:
            ready, _, _ = select.select([self._in], [], [], max(0.0, end - time.monotonic()))
            chunk = os.read(self._in, 1 << 20) if ready else b""
            assert chunk, f"the browser says nothing more (its exit code: {self._process.poll()})"
            self._rest += chunk
        line, _, self._rest = self._rest.partition(b"\0")
        return json.loads(line)  # type: ignore[no-any-return]

    def open(self, page: Path, width: int, scheme: str, media: str = "") -> None:
        """Load a file at a width in CSS pixels, in the colour scheme "light" or "dark"."""
        self.events.clear()
        phone = width < 600
        screen = {"width": width, "height": 800, "deviceScaleFactor": 2 if phone else 1, "mobile": phone}
        self.ask("Emulation.setDeviceMetricsOverride", **screen)
        features = [{"name": "prefers-color-scheme", "value": scheme}]
        self.ask("Emulation.setEmulatedMedia", media=media, features=features)
        self.ask("Page.navigate", url=page.resolve().as_uri())
        self.wait_for("Page.loadEventFired")

    def evaluate(self, script: str) -> Any:
        """The JSON-able value of an expression in the page."""
        answer = self.ask("Runtime.evaluate", expression=script, returnByValue=True)
        assert "exceptionDetails" not in answer, answer["exceptionDetails"]
        return answer["result"].get("value")

    def picture(self, path: Path) -> None:
        """Save the whole page as a PNG."""
        data = self.ask("Page.captureScreenshot", format="png", captureBeyondViewport=True)["data"]
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(base64.b64decode(data))

    def complaints(self) -> list[str]:
        """What the browser held against the page since it was opened: failed or foreign requests, errors, warnings."""
        out = []
        for event in self.events:
            params, method = event.get("params", {}), event.get("method")
            if method == "Network.requestWillBeSent" and not params["request"]["url"].startswith(("file:", "data:")):
                out.append(f"asks for {params['request']['url']}")
            if method == "Network.loadingFailed":
                out.append(f"failed to load: {params['errorText']}")
            if method == "Runtime.exceptionThrown":
                out.append(f"exception: {params['exceptionDetails']['text']}")
            if method == "Log.entryAdded":
                out.append(f"{params['entry']['level']}: {params['entry']['text']}")
            if method == "Runtime.consoleAPICalled":
                out.append(f"console: {params['args']}")
        return out
