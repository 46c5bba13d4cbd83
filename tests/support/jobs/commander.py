"""A real Commander process for tests, and workers that are not ours, which speak to it over HTTP."""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from .master_process import said_by
from .ports import free_port

TOKEN = "0123456789abcdef0123"
ADMIN_TOKEN = "admin-0123456789abcdef"
LEASE_SECONDS = 3.0


def run_file(folder: Path, run_id: str = "my-run", **more: Any) -> Path:
    """Writes a run's file; JSON is YAML."""
    said = {
        "run_id": run_id,
        "commander": "http://127.0.0.1:8443",
        "l1_root": str(folder / "volume"),
        "command": ["train", "${save_dir}"],
        "lease_seconds": LEASE_SECONDS,
        **more,
    }
    path = folder / f"{run_id}.yaml"
    path.write_text(json.dumps(said), encoding="utf-8")
    return path


def own_lines(error: str) -> list[str]:
    """The lines of a command that ran in this process; gRPC adds some about servers of tests before this one."""
    return [line for line in error.splitlines() if "(event_engine)" not in line]


@dataclass
class Commander:
    """One that serves; it may be killed and started again at the same addresses."""

    command: list[str]
    environment: dict[str, str]
    folder: Path | None = None
    process: subprocess.Popen[str] = field(init=False)
    http: str = ""
    runs: dict[str, Any] = field(default_factory=dict)
    # What it has said on stderr so far.
    errors: str = ""

    def start(self) -> None:
        """Starts it, and waits until it serves."""
        self.process = subprocess.Popen(
            self.command,
            env=self.environment,
            cwd=self.folder,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            # What ends a group of processes here does not end it too.
            start_new_session=True,
        )
        said = said_by(self.process)
        self.http, self.runs = said["http"], said["runs"]

    def again(self) -> None:
        """Kills it, and starts it where it was."""
        self.end(signal.SIGKILL)
        at = f"--http-port={self.http.rpartition(':')[2]}"
        self.command = [*(word for word in self.command if not word.startswith("--http-port=")), at]
        self.start()

    def end(self, signum: int = signal.SIGTERM) -> int:
        """Ends it; returns its exit code."""
        self.process.send_signal(signum)
        self.process.send_signal(signal.SIGCONT)
        _, errors = self.process.communicate(timeout=20)
        self.errors += errors
        return self.process.returncode

    def ask(
        self, method: str, path: str, body: object = None, token: str | None = TOKEN, **headers: str
    ) -> tuple[int, Any]:
        """The code and the JSON of an answer; a body of bytes is sent as it is."""
        data = body if isinstance(body, bytes) else b"" if body is None else json.dumps(body).encode()
        if token is not None:
            headers["authorization"] = f"Bearer {token}"
        connection = http.client.HTTPConnection(self.http, timeout=30)
        with contextlib.closing(connection):
            connection.request(method, path, data, {"content-type": "application/json", **headers})
            answer = connection.getresponse()
            return answer.status, json.loads(answer.read() or b"null")

    def run(self, run_id: str = "my-run") -> dict[str, Any]:
        """How a run stands."""
        code, said = self.ask("GET", f"/api/relay/{run_id}")
        assert code == 200, said
        return dict(said)


@contextlib.contextmanager
def commander(store: Path, files: Sequence[Path], *arguments: str, token: str | None = TOKEN) -> Iterator[Commander]:
    """Runs one, and ends it, whatever became of it."""
    # A port that the kernel gives to nobody else while this one is started again.
    port = f"--http-port={free_port()}"
    command = [sys.executable, "-m", "dalsegno.master", f"--store=sqlite:///{store}", port, *arguments]
    command += [f"--relay={path}" for path in files]
    environment = {name: value for name, value in os.environ.items() if not name.startswith("DALSEGNO_")}
    if token is not None:
        environment |= {"DALSEGNO_TOKEN": token, "DALSEGNO_ADMIN_TOKEN": ADMIN_TOKEN}
    one = Commander(command, environment)
    one.start()
    try:
        yield one
    finally:
        if one.process.poll() is None:
            one.process.kill()
            one.process.communicate(timeout=20)


@dataclass
class Worker:
    """A worker that is not ours."""

    commander: Commander
    name: str
    run_id: str = "my-run"
    token: str = ""

    def acquire(self, *, force: bool = False, token: str = TOKEN) -> tuple[int, dict[str, Any]]:
        """Asks for the lease, and keeps its token."""
        wanted = {"worker_id": self.name, "run_id": self.run_id, "cap": {"gpu": "H100", "count": 1}, "force": force}
        code, said = self.commander.ask("POST", "/api/lease/acquire", wanted, token)
        self.token = said.get("lease_token", self.token)
        return code, said

    def renew(self) -> tuple[int, dict[str, Any]]:
        """Keeps it."""
        return self.commander.ask("POST", "/api/lease/renew", {"lease_token": self.token, "worker_id": self.name})

    def report(self, status: str = "RUNNING", **said: Any) -> tuple[int, dict[str, Any]]:
        """Says how it goes on."""
        body = {"lease_token": self.token, "run_id": self.run_id, "status": status, **said}
        return self.commander.ask("POST", "/api/job/report", body)
