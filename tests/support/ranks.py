"""Training processes of a test, forked from one that has imported torch and DeepSpeed once.

Those imports are most of what a short world of several ranks costs. A rank is a process of its own all the same, with
its own environment, arguments, directory and output, and the script is `__main__`: as in an agent's standby workers.
"""

from __future__ import annotations

import multiprocessing
import os
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

PRELOAD = ["torch", "torch.distributed", "torch._dynamo", "deepspeed", "numpy", "dalsegno.agent.standby", __name__]
_context = multiprocessing.get_context("forkserver")


class Rank:
    """One training process.

    Args:
        command: the script's path, or the module's name, and its arguments.
        environment: all of its environment.
        module: the first of `command` names a module.
    """

    def __init__(self, command: Sequence[str], environment: Mapping[str, str], *, module: bool = False) -> None:
        number, name = tempfile.mkstemp(prefix="rank-", suffix=".log")
        os.close(number)
        self._output = Path(name)
        _context.set_forkserver_preload(PRELOAD)
        self._process = _context.Process(
            target=_become, args=(list(command), module, dict(environment), name, os.getcwd())
        )
        self._process.start()

    def poll(self) -> int | None:
        """Its exit code (negative: the signal that killed it); None while it runs."""
        return self._process.exitcode

    def kill(self) -> None:
        self._process.kill()

    def wait(self, seconds: float) -> tuple[int, str]:
        """Exit code and all that it wrote.

        Raises:
            TimeoutError: It still runs after so many seconds.
        """
        self._process.join(seconds)
        code = self._process.exitcode
        if code is None:
            raise TimeoutError(f"a rank still runs after {seconds:.0f} s; it wrote:\n{self._text()}")
        return code, self._text()

    def close(self) -> None:
        """Kills it if it still runs, and forgets its output."""
        if self.poll() is None:
            self.kill()
        self._process.join(10)
        self._output.unlink(missing_ok=True)

    def _text(self) -> str:
        return self._output.read_text(encoding="utf-8", errors="replace")


def wait_all(ranks: Sequence[Rank], seconds: float) -> list[tuple[int, str]]:
    """Exit codes and outputs of all, in order, within so many seconds together."""
    deadline = time.monotonic() + seconds
    return [rank.wait(max(0.1, deadline - time.monotonic())) for rank in ranks]


def _become(command: list[str], module: bool, environment: dict[str, str], output: str, cwd: str) -> None:
    from dalsegno.agent import standby

    console = os.open(output, os.O_WRONLY | os.O_APPEND)
    assignment = standby.Assignment(command, module, environment, cwd)
    standby.become(assignment, (console, os.dup(console)), fresh=False)
