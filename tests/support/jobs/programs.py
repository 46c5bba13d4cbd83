"""Programs that a test starts itself, one by one: agents, torchrun, masters of agents."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from tests.support.forks import forked
from tests.support.forks.forked import Forked
from tests.support.forks.forked_agents import DLROVER_RUN, start_agent
from tests.support.jobs.local_processes import is_same_process

Started = subprocess.Popen[bytes] | Forked


class Programs:
    """Started programs, ended with the test."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.running: list[Started] = []

    def start(self, name: str, *command: str, **environment: str) -> Started:
        return self._start(name, command, environment, executed=True)

    def agent(self, name: str, *arguments: str, job: str = "job", **environment: str) -> Started:
        """An agent of a job; `job` empty: of what it takes for its job by itself."""
        arguments = ("--checkpoint-dir", "ck", *(("--job-id", job) if job else ()), *arguments)
        return self._start(name, (DLROVER_RUN, *arguments), environment, executed=forked.EXECUTES)

    def _start(self, name: str, command: tuple[str, ...], environment: dict[str, str], *, executed: bool) -> Started:
        log = self.directory / f"{name}.log"
        process = start_agent(command, {**os.environ, **environment}, log, self.directory, executed=executed)
        self.running.append(process)
        return process

    def log(self, name: str) -> str:
        return (self.directory / f"{name}.log").read_text()

    def diagnosis(self) -> str:
        """What everything that was started here has said, and the master's log."""
        logs = [*sorted(self.directory.glob("*.log")), *sorted(self.directory.rglob("master.log"))]
        return "\n".join(f"==== {path.name}\n{path.read_text(errors='replace')}" for path in dict.fromkeys(logs))

    def close(self) -> None:
        for process in self.running:
            process.kill()
            process.wait()
        claim = self.directory / "ck" / ".dalsegno" / "job" / "claim.json"
        if claim.exists():
            master = json.loads(claim.read_text())
            if is_same_process(master["pid"], master["start_time"]):
                os.kill(master["pid"], signal.SIGKILL)


@contextlib.contextmanager
def programs_of(directory: Path, script: str) -> Iterator[Programs]:
    """Programs of a test whose script is `script.py` in its directory; what they said is printed."""
    made = Programs(directory)
    (directory / "script.py").write_text(script, encoding="utf-8")
    try:
        yield made
    finally:
        print(made.diagnosis())
        made.close()


def wait_for(condition: Callable[[], bool], seconds: float, what: str) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, what
        time.sleep(0.01)
