"""A scratch copy of the checkout in which commands are typed as they are printed, in terminals of their own."""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import sys
import sysconfig
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from ..pages.sources import ROOT
from .local_processes import carriers, command_line, send
from .master_process import eventually

# What the commands need of the checkout. The product is the installed one, as everywhere in the tests.
_COPIED = (
    "agent",
    "benchmarks",
    "deploy",
    "docs",
    "elastic",
    "examples",
    "master",
    "protos",
    "relay",
    "swift_plugin",
    "tests",
)
_COPIED_FILES = (
    "CHANGELOG.md",
    "CONTRIBUTING.md",
    "LICENSE",
    "Makefile",
    "README.md",
    "ROADMAP.md",
    "constraints.txt",
    "pyproject.toml",
    "ruff.toml",
    "setup.cfg",
)
_MARK = "DALSEGNO_TEST_STAGE"
# Generous: other tests share the cores.
PATIENCE = 240.0


@dataclass
class Terminal:
    """One command that runs."""

    process: subprocess.Popen[bytes]
    screen: Path

    @property
    def text(self) -> str:
        """All that it has said so far."""
        return self.screen.read_text(encoding="utf-8", errors="replace")

    def wait_for(self, pattern: str, seconds: float = PATIENCE) -> re.Match[str]:
        """The first match in what it says."""
        deadline = time.monotonic() + seconds
        while True:
            over = self.process.poll() is not None
            if match := re.search(pattern, self.text):
                return match
            if over or time.monotonic() > deadline:
                raise AssertionError(f"{pattern!r} was not said ({self.process.returncode}):\n{self.text[-6000:]}")
            time.sleep(0.05)  # a file that another process writes gives no event

    def wait(self, seconds: float = PATIENCE) -> int:
        """Its exit code."""
        try:
            return self.process.wait(seconds)
        except subprocess.TimeoutExpired:
            raise AssertionError(f"still running after {seconds:.0f} s:\n{self.text[-6000:]}") from None

    def press_ctrl_c(self) -> None:
        """SIGINT to all that the terminal has in its foreground."""
        os.killpg(self.process.pid, signal.SIGINT)

    def terminate(self) -> None:
        """SIGTERM to the program alone."""
        self.process.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        """`kill -9`."""
        self.process.kill()


class Stage:
    """Types commands.

    Args:
        directory: becomes the copy.
        environment: variables that a person would have set.
    """

    def __init__(self, directory: Path, environment: Mapping[str, str] | None = None) -> None:
        self.directory, self._given = directory, dict(environment or {})
        self._count = 0
        directory.mkdir(exist_ok=True)
        for name in _COPIED:
            ignored = shutil.ignore_patterns("__pycache__")
            shutil.copytree(ROOT / name, directory / name, ignore=ignored)
        for name in _COPIED_FILES:
            shutil.copy(ROOT / name, directory / name)
        self._bin = directory / ".venv" / "bin"
        self._bin.mkdir(parents=True)
        self._offer("python", "")
        self._offer("python3", "")
        self._offer("pip", "-m pip")
        self._offer("swift", "-m swift.cli.main")
        # Not its fixed port, which another test may have.
        self._offer("torchrun", "-m torch.distributed.run --standalone")
        # So that `make` finds what it would install first.
        for mark in (".torch", ".trains", ".relays", ".installed"):
            (directory / ".venv" / mark).touch()

    def _offer(self, program: str, arguments: str) -> None:
        """A program that is this interpreter: the wheel's environment has not all of them. It installs nothing into its
        environment, whose dalsegno the stage would take the place of."""
        script = self._bin / program
        words = f'{sys.executable} {arguments} "$@"'
        refusal = 'case " $* " in *" install "*) echo "the stage installs nothing: $*" >&2; exit 1;; esac'
        script.write_text(f"#!/bin/sh\n{refusal}\nexec {words}\n")
        script.chmod(0o755)

    @property
    def mark(self) -> str:
        """What everything that was started here carries in its environment."""
        return f"{_MARK}={self.directory}"

    def environment(self) -> dict[str, str]:
        kept = {key: value for key, value in os.environ.items() if not key.startswith(("DALSEGNO_", "PET_"))}
        path = os.pathsep.join((str(self._bin), sysconfig.get_path("scripts"), os.environ["PATH"]))
        return {**kept, **self._given, "PATH": path, _MARK: str(self.directory)}

    def start(self, line: str) -> Terminal:
        """A terminal in which this line was typed."""
        self._count += 1
        screen = self.directory / f"screen-{self._count}.txt"
        with screen.open("wb") as out:
            process = subprocess.Popen(
                ["bash", "-c", line],
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=out,
                start_new_session=True,
                env=self.environment(),
                cwd=self.directory,
            )
        return Terminal(process, screen)

    def type(self, line: str, *, code: int = 0, seconds: float = PATIENCE) -> str:
        """What it says until it ends with that exit code."""
        terminal = self.start(line)
        ended = terminal.wait(seconds)
        print(f"$ {line}\n{terminal.text}-> {ended}")
        assert ended == code, f"$ {line}\n{terminal.text[-6000:]}-> {ended}"
        assert "Traceback" not in terminal.text
        return terminal.text

    def close(self) -> None:
        """Ends what is left. An embedded master stays for a moment after its job; nothing else may stay for long."""
        try:
            eventually(lambda: not self._left())
        finally:
            left = self._left()
            send(carriers(self.mark))
            eventually(lambda: not carriers(self.mark))
        assert not left

    def _left(self) -> list[str]:
        lines = [command_line(pid) for pid in carriers(self.mark)]
        return [line for line in lines if "dalsegno.master" not in line and line != "(gone)"]
