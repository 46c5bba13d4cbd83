"""Commands as a user types them, each to its end, and what they said."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import tempfile
from dataclasses import dataclass
from pathlib import Path

from ..forks import forked
from ..forks.forked_agents import DLROVER_RUN, start_agent
from .local_processes import carriers, command_line, send
from .master_process import eventually


@dataclass(frozen=True)
class Ended:
    """How a command ended; `said` are the agent's own lines, `text` is all of standard error."""

    code: int
    said: list[str]
    text: str


@dataclass(frozen=True)
class Shell:
    """Runs commands as a user would, in a directory of their own, and leaves nothing behind.

    Agents are forked where `forked.EXECUTES` says so.
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
        self, *arguments: str, command: tuple[str, ...] = (DLROVER_RUN,), seconds: float = 90.0, **environment: str
    ) -> Ended:
        executed = forked.EXECUTES or command != (DLROVER_RUN,)
        with tempfile.TemporaryDirectory() as folder:
            errors = Path(folder) / "stderr"
            process = start_agent(
                [*command, *arguments],
                {**self.environment(), **environment},
                errors,
                self.directory,
                executed=executed,
                stdout=Path(os.devnull),
            )
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


def expect_one_line(ended: Ended, *substance: str, code: int = 2) -> None:
    """One line, with the cause and what to change; a non-zero exit; nothing that only a developer can read."""
    assert ended.code == code
    assert "Traceback" not in ended.text
    assert len(ended.text.splitlines()) == 1, ended.text
    for words in substance:
        assert words in ended.text
