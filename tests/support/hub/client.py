"""The tests' side of the hub: starts its process, orders faults, asks what it has."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import urllib.request
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[3]
TOKEN = "hf_" + "s3cret" * 5


class Hub:
    """A hub in a process of its own, until it is closed.

    Args:
        root: an existing directory for what it keeps.
        arguments: see `server.py`.

    Attributes:
        url: for HF_ENDPOINT.
    """

    def __init__(self, root: Path, *arguments: str) -> None:
        self._arguments = [sys.executable, "-m", "tests.support.hub.server", str(root), TOKEN, *arguments]
        self.port = 0
        self.start()

    @property
    def pid(self) -> int:
        return self._process.pid

    def start(self) -> None:
        """Starts it, on the port that it had."""
        self._process = subprocess.Popen(
            [*self._arguments, "--port", str(self.port)],
            stdout=subprocess.PIPE,
            text=True,
            cwd=ROOT,
            start_new_session=True,
        )
        assert self._process.stdout is not None
        self.port = int(self._process.stdout.readline())

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def kill(self) -> None:
        self._process.kill()
        self._process.wait(10)

    def close(self) -> None:
        self.kill()
        if self._process.stdout is not None:
            self._process.stdout.close()

    def environment(self, home: Path) -> dict[str, str]:
        """For processes that are to talk to it."""
        kept = {
            key: value
            for key, value in os.environ.items()
            if not key.startswith("HF_") and not key.lower().endswith("_proxy")
        }
        return {**kept, "HF_ENDPOINT": self.url, "HF_TOKEN": TOKEN, "HF_HOME": str(home), "HF_HUB_OFFLINE": "1"}

    def pod_environment(self, home: Path) -> dict[str, str]:
        """What a pod is told so that it talks to it, by Git LFS."""
        named = {key: value for key, value in self.environment(home).items() if key.startswith("HF_")}
        return {**named, "HF_HUB_DISABLE_XET": "1"}

    def _ask(self, what: str, given: object = None) -> Any:
        data = None if given is None else json.dumps(given).encode()
        opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
        with opener.open(urllib.request.Request(f"{self.url}/_test/{what}", data), timeout=20) as reply:
            return json.loads(reply.read())

    def fault(self, match: str, kind: str, **more: object) -> None:
        """Orders one, see `faults.Fault`."""
        self._ask("fault", {"match": match, "kind": kind, **more})

    def clear(self) -> None:
        """Forgets the open faults, and what was asked until now."""
        self._ask("clear", {})

    def set(self, **values: object) -> None:
        self._ask("set", values)

    def asked(self, word: str = "") -> list[dict[str, Any]]:
        """The requests so far whose line has the word."""
        return [one for one in self._ask("asked") if word in one["line"]]

    def samples(self) -> list[tuple[float, int]]:
        """When how many bytes had come in request bodies."""
        return [(at, count) for at, count in self._ask("samples")]

    def commits(self, repo: str) -> list[dict[str, Any]]:
        """Oldest first; [] where there is no such repository."""
        return list(self._ask("repos").get(repo, {"commits": []})["commits"])

    def is_private(self, repo: str) -> bool:
        """Whether a repository was made a private one."""
        return bool(self._ask("repos")[repo]["private"])
