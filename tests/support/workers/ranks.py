"""Training processes of a test, forked (`forked`); the script is `__main__`, as in an agent's standby workers."""

from __future__ import annotations

import os
import subprocess
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from ..forks.forked import PRELOADED, fork_script


class Rank:
    """One training process.

    Args:
        command: the script's path, or the module's name, and its arguments.
        environment: all of its environment.
        module: the first of `command` names a module.
        preloaded: what is imported already (`forked`).
    """

    def __init__(
        self,
        command: Sequence[str],
        environment: Mapping[str, str],
        *,
        module: bool = False,
        preloaded: str = PRELOADED,
    ) -> None:
        number, name = tempfile.mkstemp(prefix="rank-", suffix=".log")
        os.close(number)
        self._output = Path(name)
        self._process = fork_script(command, environment, self._output, Path.cwd(), module=module, preloaded=preloaded)

    def poll(self) -> int | None:
        """Its exit code (negative: the signal that killed it); None while it runs."""
        return self._process.poll()

    def send_signal(self, number: int) -> None:
        self._process.send_signal(number)

    def kill(self) -> None:
        self._process.kill()

    def wait(self, seconds: float) -> tuple[int, str]:
        """Exit code and all that it wrote.

        Raises:
            TimeoutError: It still runs after so many seconds.
        """
        try:
            return self._process.wait(seconds), self.said()
        except subprocess.TimeoutExpired:
            raise TimeoutError(f"a rank still runs after {seconds:.0f} s; it wrote:\n{self.said()}") from None

    def close(self) -> None:
        """Kills it if it still runs, and forgets its output."""
        self.kill()
        self._process.wait(10)
        self._output.unlink(missing_ok=True)

    def said(self) -> str:
        """All that it has written so far."""
        return self._output.read_text(encoding="utf-8", errors="replace")


def wait_all(ranks: Sequence[Rank], seconds: float) -> list[tuple[int, str]]:
    """Exit codes and outputs of all, in order, within so many seconds together."""
    deadline = time.monotonic() + seconds
    return [rank.wait(max(0.1, deadline - time.monotonic())) for rank in ranks]
