"""A headless Chromium that shows a page and answers questions about it, over the DevTools protocol on two pipes."""

from __future__ import annotations

import base64
import json
import os
import select
import shutil
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import Any

__all__ = ("CHROMIUM", "Browser")

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), "")
SECONDS = 30.0
# It looks for nothing on the network but the page.
FLAGS = (
    *("--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-sync"),
    *("--disable-background-networking", "--disable-component-update", "--disable-dev-shm-usage"),
)


class Browser:
    """One browser with one page, from `with` to its end.

    Args:
        profile: An empty directory.
        width, height: Of the window, in CSS pixels.
    """

    def __init__(self, profile: Path, width: int, height: int) -> None:
        self._profile, self._size = profile, (width, height)
        self._number = 0
        self._buffer = b""

    def __enter__(self) -> Browser:
        # Chromium reads orders from descriptor 3 and writes answers to 4.
        orders, self._orders = os.pipe()
        self._answers, answers = os.pipe()
        script = f'exec 3<&{orders} 4>&{answers}; exec "$@"'
        command = ["bash", "-c", script, "bash", CHROMIUM, *FLAGS, "--remote-debugging-pipe"]
        self._process = subprocess.Popen(
            [*command, f"--user-data-dir={self._profile}", "about:blank"],
            pass_fds=(orders, answers),
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        os.close(orders)
        os.close(answers)
        target = self._ask("Target.createTarget", url="about:blank")["targetId"]
        self._session = self._ask("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        self.resize(*self._size)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._process.kill()
        self._process.wait(10)
        os.close(self._orders)
        os.close(self._answers)

    def open(self, url: str) -> None:
        """Shows a page."""
        self._page("Page.navigate", url=url)

    def resize(self, width: int, height: int) -> None:
        """Makes the window another one, in CSS pixels."""
        self._page("Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=False)

    def tell(self, expression: str) -> Any:
        """The value of an expression in the page. Raises AssertionError with what it throws."""
        found = self._page("Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in found, found["exceptionDetails"]
        return found["result"].get("value")

    def until(self, expression: str, holds: Callable[[Any], bool] = bool) -> Any:
        """The value of an expression once it `holds`. Raises AssertionError if that takes too long."""
        deadline = time.monotonic() + SECONDS
        while True:
            value = self.tell(expression)
            if holds(value):
                return value
            assert time.monotonic() < deadline, f"{expression} is {value!r}"
            time.sleep(0.05)

    def picture(self, file: Path) -> None:
        """Keeps what the page looks like, as PNG, for people."""
        shown = self._page("Page.captureScreenshot", format="png", captureBeyondViewport=True)
        file.write_bytes(base64.b64decode(shown["data"]))

    def _page(self, method: str, **params: Any) -> Any:
        return self._ask(method, self._session, **params)

    def _ask(self, method: str, session: str = "", **params: Any) -> Any:
        self._number += 1
        order = {"id": self._number, "method": method, "params": params} | ({"sessionId": session} if session else {})
        os.write(self._orders, json.dumps(order).encode() + b"\0")
        deadline = time.monotonic() + SECONDS
        while True:
            answer = self._next(deadline)
            if answer.get("id") == self._number:
                assert "error" not in answer, answer["error"]
                return answer["result"]

    def _next(self, deadline: float) -> Any:
        while b"\0" not in self._buffer:
            left = deadline - time.monotonic()
            ready, _, _ = select.select([self._answers], [], [], max(0.0, left))
            assert ready, "the browser does not answer"
            data = os.read(self._answers, 1 << 16)
            assert data, "the browser has ended"
            self._buffer += data
        message, _, self._buffer = self._buffer.partition(b"\0")
        return json.loads(message)
