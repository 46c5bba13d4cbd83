"""The agent of a pod and the mirror beside it, as processes of ours that end with us."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dalsegno.protos.own_program import command_of
from dalsegno.protos.processes import ends_with_parent
from dalsegno.protos.shortage import starting

if TYPE_CHECKING:
    from .volume import Volume

__all__ = ("AgentProcess", "MirrorProcess")

# Seconds that the mirror has to end, and a process that was killed: one that waits for a volume that is gone has not
# ended by then, and does as soon as that call returns.
_MIRROR_END_SECONDS, _KILLED_SECONDS = 2.0, 3.0


class AgentProcess:
    """An agent, in a group of its own: a terminal's signals reach it through us.

    It imports what it needs, and does nothing, before it is told to begin.

    Raises:
        CannotStartError: there is no room for a process.
    """

    def __init__(self) -> None:
        self._reader, teller = os.pipe()
        commands, self._commander = os.pipe()
        flags = f"--tell-fd={teller}", f"--command-fd={commands}"
        try:
            with starting("the agent"):
                self._process = subprocess.Popen(
                    [*command_of("dalsegno.agent.commands.dlrover_run"), *flags],
                    pass_fds=[teller, commands],
                    preexec_fn=ends_with_parent(signal.SIGTERM, os.getpid(), own_group=True),
                )
        finally:
            os.close(teller)
            os.close(commands)

    @property
    def waits(self) -> bool:
        """Whether it lives, and has not begun."""
        return self._commander >= 0 and self._process.poll() is None

    def begin(self, arguments: Sequence[str], environment: Mapping[str, str]) -> None:
        """Tells it its command line, and what is added to our environment for it and the trainer."""
        rest = json.dumps({"arguments": list(arguments), "environment": dict(environment)})
        commander, self._commander = self._commander, -1
        with contextlib.suppress(BrokenPipeError), open(commander, "w", encoding="utf-8") as file:
            file.write(rest)  # it may have died; its exit code says so

    def events(self) -> Iterator[dict[str, Any]]:
        """What it tells, until it has ended."""
        with open(self._reader, "rb", closefd=False) as file:
            for line in file:
                with contextlib.suppress(ValueError):  # it was killed in the middle of a line
                    yield json.loads(line)

    def wait(self) -> int:
        """Its exit code, as a shell has it."""
        code = self._process.wait()
        return 128 - code if code < 0 else code

    def signal(self, number: int) -> None:
        """Passes a signal on."""
        self._process.send_signal(number)

    def close(self) -> None:
        """Ends it, if it has not ended."""
        if self._process.poll() is None:
            _kill(self._process)
        for one in (self._reader, self._commander):
            if one >= 0:
                os.close(one)
        self._reader = self._commander = -1


class MirrorProcess:
    """The process that makes milestones, where `run.yaml` wants them.

    Args:
        file: `run.yaml`.
        volume: the run's place.
        say: takes lines for people.
        flags: about certificates.
    """

    def __init__(self, file: Path, volume: Volume, say: Callable[[str], None], flags: Sequence[str] = ()) -> None:
        self._file, self._volume, self._say, self._flags = file, volume, say, flags
        self._process: subprocess.Popen[bytes] | None = None
        self._refused = False

    def start(self) -> None:
        """Starts it, unless it runs. That it cannot be started is said once, and no reason to end."""
        if self._process is not None:
            if (code := self._process.poll()) is None:
                return
            self._say(f"the mirror has ended ({code}): it is started again, and training went on")
        try:
            with starting("the mirror"):
                self._process = self._started()
        except OSError as error:
            if not self._refused:
                self._say(f"the mirror cannot be started: {error}: milestones wait, training goes on")
            self._refused, self._process = True, None

    def _started(self) -> subprocess.Popen[bytes]:
        return subprocess.Popen(
            [
                *command_of("dalsegno.relay.milestones.mirror"),
                str(self._file),
                *("--checkpoints", str(self._volume.job), "--hf", str(self._volume.hf)),
                *("--events", str(self._volume.events)),
                *self._flags,
            ],
            preexec_fn=ends_with_parent(signal.SIGTERM, os.getpid(), own_group=True),
        )

    def ask_to_end(self) -> None:
        """Cancels what it does; nobody waits for it."""
        if self._process is not None and self._process.poll() is None:
            self._process.terminate()

    def end(self) -> None:
        """Ends it; what it has uploaded is not lost."""
        self.ask_to_end()
        if self._process is not None:
            try:
                self._process.wait(_MIRROR_END_SECONDS)
            except subprocess.TimeoutExpired:
                _kill(self._process)
            self._process = None


def _kill(process: subprocess.Popen[bytes]) -> None:
    """Nobody can be waited for without a limit: a pod that ends heeds no signal any more."""
    process.kill()
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(_KILLED_SECONDS)
