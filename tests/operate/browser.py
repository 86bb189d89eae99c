"""A headless Chromium over WebDriver, with nothing but the standard library."""

from __future__ import annotations

import base64
import json
import shutil
import socket
import subprocess
import time
import urllib.request
from pathlib import Path
from types import TracebackType
from typing import Any

DRIVER, BROWSER = shutil.which("chromedriver"), shutil.which("chromium")
KEYS = {"Tab": "\ue004", "Right": "\ue014", "Down": "\ue015", "Enter": "\ue007"}


class Browser:
    """One window. Times are seconds."""

    def __init__(self, profile: Path, width: int = 1280, height: int = 1000, dark: bool = False) -> None:
        assert DRIVER is not None and BROWSER is not None
        with socket.create_server(("127.0.0.1", 0)) as found:
            port = found.getsockname()[1]
        self._process = subprocess.Popen([DRIVER, f"--port={port}"], stdout=subprocess.DEVNULL,
                                         stderr=subprocess.DEVNULL, start_new_session=True)
        self._at = f"http://127.0.0.1:{port}/session"
        options = ["--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--no-first-run",
                   "--disable-background-networking", "--disable-component-update", f"--user-data-dir={profile}",
                   f"--window-size={width},{height}", *(["--blink-settings=preferredColorScheme=0"] if dark else [])]
        wanted = {"alwaysMatch": {"goog:chromeOptions": {"binary": BROWSER, "args": options},
                                  "goog:loggingPrefs": {"browser": "ALL"}}}
        limit = time.monotonic() + 20
        while True:
            try:
                self._at += "/" + self._ask("POST", "", {"capabilities": wanted})["sessionId"]
                return
            except OSError:
                if time.monotonic() > limit or self._process.poll() is not None:
                    self._process.kill()
                    raise
                time.sleep(0.2)

    def __enter__(self) -> Browser:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
                 ) -> None:
        try:
            self._ask("DELETE", "")
        finally:
            self._process.kill()
            self._process.wait()

    def open(self, address: str) -> None:
        self._ask("POST", "/url", {"url": address})

    def run(self, script: str) -> Any:
        """What the JavaScript ``script`` returns."""
        return self._ask("POST", "/execute/sync", {"script": script, "args": []})

    def until(self, script: str, seconds: float) -> float:
        """Wait until ``script`` returns something true; returns how long that took."""
        since = time.monotonic()
        while not self.run(script):
            assert time.monotonic() - since < seconds, (script, self.run("return document.body.innerText"))
            time.sleep(0.05)
        return time.monotonic() - since

    def press(self, *keys: str) -> None:
        """Press these keys, one after the other, where the focus is."""
        presses = [{"type": kind, "value": KEYS[key]} for key in keys for kind in ("keyDown", "keyUp")]
        self._ask("POST", "/actions", {"actions": [{"type": "key", "id": "keyboard", "actions": presses}]})

    def picture(self, path: Path) -> None:
        """The window as a PNG."""
        path.write_bytes(base64.b64decode(self._ask("GET", "/screenshot")))

    def complaints(self) -> list[str]:
        """What the console has of errors."""
        found = self._ask("POST", "/se/log", {"type": "browser"})
        return [one["message"] for one in found if one["level"] == "SEVERE"]

    def _ask(self, method: str, path: str, body: Any = None) -> Any:
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(self._at + path, data, {"Content-Type": "application/json"}, method=method)
        with urllib.request.urlopen(request, timeout=30) as answer:
            return json.loads(answer.read())["value"]
