"""Commands as a user types them, each to its end, and what they said."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import sysconfig
import tempfile
from dataclasses import dataclass
from pathlib import Path

from . import forked
from .forked import Forked
from .forked_agents import fork_agent
from .local_processes import carriers, command_line, send
from .master_process import eventually

RUNNER = str(Path(sysconfig.get_path("scripts")) / "dlrover-run")


@dataclass(frozen=True)
class Ended:
    """How a command ended; `said` are the agent's own lines, `text` is all of standard error."""

    code: int
    said: list[str]
    text: str


@dataclass(frozen=True)
class Shell:
    """Runs commands as a user would, in a directory of their own, and leaves nothing behind.

    In a test's repetitions agents are forked (`forked_agents`).
    """

    directory: Path

    @property
    def mark(self) -> str:
        """What every process of this test carries in its environment."""
        return f"DALSEGNO_TEST_SHELL={self.directory}"

    def environment(self) -> dict[str, str]:
        kept = {key: value for key, value in os.environ.items() if not key.startswith(("DALSEGNO_", "PET_"))}
        return {**kept, "DALSEGNO_TEST_SHELL": str(self.directory)}

    def run(
        self, *arguments: str, command: tuple[str, ...] = (RUNNER,), seconds: float = 90.0, **environment: str
    ) -> Ended:
        start = _fork if forked.REPEATED and command == (RUNNER,) else _execute
        with tempfile.TemporaryDirectory() as folder:
            errors = Path(folder) / "stderr"
            process = start([*command, *arguments], {**self.environment(), **environment}, errors, self.directory)
            try:
                code = process.wait(seconds)
            finally:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)
                process.wait()
            text = errors.read_text(encoding="utf-8", errors="replace")
        print(f"$ {' '.join(arguments)}\n{text}-> {code}")
        said = [line for line in text.splitlines() if re.match(r"(dlrover-run|torchrun): ", line)]
        return Ended(code, said, text)

    def close(self) -> None:
        """Ends what is left. An embedded master stays for a moment after its job; nothing else may be left."""
        left = [pid for pid in carriers(self.mark) if "dalsegno.master" not in command_line(pid)]
        said = [command_line(pid) for pid in left]
        send(carriers(self.mark))
        eventually(lambda: not carriers(self.mark))
        assert not said


def _execute(command: list[str], environment: dict[str, str], errors: Path, cwd: Path) -> subprocess.Popen[bytes]:
    with errors.open("wb") as file:
        return subprocess.Popen(
            command, cwd=cwd, stdout=subprocess.DEVNULL, stderr=file, start_new_session=True, env=environment
        )


def _fork(command: list[str], environment: dict[str, str], errors: Path, cwd: Path) -> Forked:
    return fork_agent(command, environment, errors, cwd, stdout=Path(os.devnull))


def expect_one_line(ended: Ended, *substance: str, code: int = 2) -> None:
    """One line, with the cause and what to change; a non-zero exit; nothing that only a developer can read."""
    assert ended.code == code
    assert "Traceback" not in ended.text
    assert len(ended.text.splitlines()) == 1, ended.text
    for words in substance:
        assert words in ended.text
