"""Chromium without a window, asked through a pipe by its DevTools protocol: no driver and no package is needed."""

import base64
import contextlib
import json
import os
import select
import shutil
import subprocess
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
_PATIENCE_S = 60.0


class Page:
    """One page of a browser."""

    def __init__(self, to_browser: int, from_browser: int) -> None:
        self._to, self._from, self._rest, self._number = to_browser, from_browser, b"", 0
        self.complaints: list[str] = []
        """what was written to the console as an error or warning, thrown, or asked for and not found"""
        self.requests: list[str] = []
        """addresses that the page asked for"""
        target = self._ask("Target.createTarget", url="about:blank")["targetId"]
        self._session: str | None = self._ask("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network"):
            self._ask(f"{domain}.enable")

    _session = None

    def show(self, what: Path | str, width: int, dark: bool = False, height: int = 800) -> None:
        """Open a file or an address as on a screen of this width; a phone's below 500."""
        address = what if isinstance(what, str) else what.resolve().as_uri()
        size = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": width < 500}
        self._ask("Emulation.setDeviceMetricsOverride", **size)
        feature = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self._ask("Emulation.setEmulatedMedia", features=[feature])
        self._ask("Page.navigate", url=address)
        deadline = time.monotonic() + _PATIENCE_S
        while self.value("document.readyState") != "complete" or self.value("location.href") != address:
            assert time.monotonic() < deadline, "the page was not loaded in time"
            time.sleep(0.05)

    def value(self, expression: str) -> Any:
        """Return what an expression gives in the page."""
        answer = self._ask("Runtime.evaluate", expression=expression, returnByValue=True)
        assert "exceptionDetails" not in answer, answer
        return answer["result"].get("value")

    def screenshot(self, path: Path) -> None:
        """Write the whole page as a PNG."""
        answer = self._ask("Page.captureScreenshot", captureBeyondViewport=True)
        path.write_bytes(base64.b64decode(answer["data"]))

    def _ask(self, method: str, **parameters: Any) -> dict[str, Any]:
        self._number += 1
        message: dict[str, Any] = {"id": self._number, "method": method, "params": parameters}
        if self._session is not None:
            message["sessionId"] = self._session
        os.write(self._to, json.dumps(message).encode() + b"\0")
        while True:
            answer = self._next()
            if answer.get("id") == self._number:
                assert "error" not in answer, (method, answer["error"])
                return answer["result"]
            self._note(answer.get("method"), answer.get("params", {}))

    def _next(self) -> dict[str, Any]:
        while b"\0" not in self._rest:
            ready, _, _ = select.select([self._from], [], [], _PATIENCE_S)
            assert ready, "the browser does not answer"
            got = os.read(self._from, 1 << 20)
            assert got, "the browser has ended"
            self._rest += got
        message, _, self._rest = self._rest.partition(b"\0")
        return json.loads(message)

    def _note(self, event: str | None, about: dict[str, Any]) -> None:
        if event == "Runtime.exceptionThrown":
            self.complaints.append(str(about["exceptionDetails"]))
        elif event == "Runtime.consoleAPICalled" and about["type"] in ("error", "warning", "assert"):
            self.complaints.append(str(about["args"]))
        elif event == "Log.entryAdded" and about["entry"]["level"] in ("error", "warning"):
            self.complaints.append(str(about["entry"]))
        elif event == "Network.loadingFailed":
            self.complaints.append(str(about))
        elif event == "Network.requestWillBeSent":
            self.requests.append(about["request"]["url"])


@contextlib.contextmanager
def browser() -> Iterator[Page]:
    """Start Chromium, give a page, and end it."""
    assert CHROMIUM is not None
    (their_in, our_out), (our_in, their_out) = os.pipe(), os.pipe()
    with tempfile.TemporaryDirectory() as profile:
        options = "--headless --no-sandbox --disable-gpu --disable-dev-shm-usage --no-first-run --remote-debugging-pipe"
        # The protocol is spoken on file descriptors 3 and 4.
        command = f'exec "$0" "$@" 3<&{their_in} 4>&{their_out}'
        process = subprocess.Popen(
            ["bash", "-c", command, CHROMIUM, *options.split(), f"--user-data-dir={profile}"],
            pass_fds=(their_in, their_out),
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        os.close(their_in)
        os.close(their_out)
        try:
            yield Page(our_out, our_in)
        finally:
            os.close(our_out)
            os.close(our_in)
            process.terminate()
            process.wait(timeout=20)
            time.sleep(0.2)  # its children write to the profile until they notice
            shutil.rmtree(profile, ignore_errors=True)
            Path(profile).mkdir(exist_ok=True)
