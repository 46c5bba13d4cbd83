"""Starts nursery processes: an agent's first one before the agent itself imports torch, all others for the pool."""

from __future__ import annotations

import logging
import os
import socket
import struct
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from dalsegno.protos.own_program import command_of
from dalsegno.protos.shortage import starting

from ..processes.lifeline import Lifeline
from ..processes.proc import kill_group
from ..processes.signals import held_back

__all__ = ["NurserySpec", "StartedNursery", "reap", "start_nursery"]

# Low enough to yield to training, and still done before the next change on a busy machine.
_NICENESS = 15
# Seconds to wait for a nursery to take a request; a stopped one does not read.
_SEND_TIMEOUT_SECONDS = 10
# Seconds to wait for its end after SIGKILL; one that waits for a missing file system may be stuck in the kernel.
_KILL_TIMEOUT_SECONDS = 5.0

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class NurserySpec:
    """What a nursery begins with.

    Attributes:
        modules: what it imports.
        log: where it writes; workers write where their assignment says.
        notices: signals that it ignores, because they may be sent to all processes of the node.
        environment: all of it, with the variables that modules read while they are imported (OMP_NUM_THREADS,
            DS_ACCELERATOR).
        python: the interpreter.
        single: it becomes its only worker itself.
        first: the directory that the script has first on `sys.path`; "": none.
    """

    modules: tuple[str, ...]
    log: Path
    notices: tuple[int, ...]
    environment: Mapping[str, str]
    python: str = sys.executable
    single: bool = False
    first: str = ""

    def command(self, channel: int, console: Sequence[int], parent: int, niceness: int) -> list[str]:
        """Its command line; the numbers are descriptors, and a process that it ends with (0: none)."""
        return [
            *command_of("dalsegno.agent.standby.nursery", ("-u",), self.python),
            *("--channel", str(channel)),
            *("--console", *map(str, console)),
            *("--parent", str(parent)),
            *("--nice", str(niceness)),
            *(("--single",) if self.single else ()),
            f"--first={self.first}",
            *("--notices", *map(str, self.notices)),
            *("--", *self.modules),
        ]


@dataclass(frozen=True)
class StartedNursery:
    """A nursery's process, and our end of its channel. It is on the lifeline's list."""

    spec: NurserySpec
    process: subprocess.Popen[bytes]
    channel: socket.socket

    def end(self, lifeline: Lifeline) -> None:
        """Ends it, where nobody has asked it for a worker."""
        kill_group(self.process.pid)
        self.channel.close()
        reap(self.process, lifeline)


def reap(process: subprocess.Popen[bytes], lifeline: Lifeline) -> None:
    """Waits for the end of a nursery that was killed, and takes it from the lifeline's list."""
    try:
        process.wait(_KILL_TIMEOUT_SECONDS)
    except subprocess.TimeoutExpired:
        # The keeper still has it on its list.
        logger.error("nursery %d did not end within %.0f s of SIGKILL", process.pid, _KILL_TIMEOUT_SECONDS)
    else:
        lifeline.drop_group(process.pid)


def start_nursery(spec: NurserySpec, lifeline: Lifeline, *, low_priority: bool) -> StartedNursery:
    """Starts one, and registers it with the lifeline, whose mark is part of its environment.

    Raises:
        OSError: it cannot be started.
    """
    ours, theirs = socket.socketpair()
    ours.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, struct.pack("ll", _SEND_TIMEOUT_SECONDS, 0))
    console = (os.dup(1), os.dup(2))
    # PDEATHSIG fires when the spawning thread ends, and only the main thread lives as long as the agent.
    parent = os.getpid() if threading.current_thread() is threading.main_thread() else 0
    command = spec.command(theirs.fileno(), console, parent, _NICENESS if low_priority else 0)
    try:
        with open(spec.log, "ab") as log, starting("a standby worker"), held_back(spec.notices):
            process = subprocess.Popen(
                command,
                stdout=log,
                stderr=log,
                pass_fds=(theirs.fileno(), *console),
                start_new_session=True,
                env=dict(spec.environment),
            )
    except BaseException:
        ours.close()
        raise
    finally:
        theirs.close()
        for fd in console:
            os.close(fd)
    lifeline.add_group(process.pid)
    return StartedNursery(spec, process, ours)
