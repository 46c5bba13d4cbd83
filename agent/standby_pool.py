"""The agent's standby workers: started ahead, adopted by a world, replaced afterwards."""

from __future__ import annotations

import dataclasses
import logging
import os
import re
import socket
import struct
import subprocess
import sys
import threading
from collections.abc import Callable, Sequence
from pathlib import Path

from .lifeline import Lifeline
from .processes import kill_group
from .standby import Assignment, receive, send

__all__ = ["ALWAYS", "Standby", "StandbyPool", "modules_of"]

# The first DDP wrap imports torch._dynamo: seconds on a busy machine.
ALWAYS = ("torch", "torch.distributed", "torch._dynamo")
# Worth importing ahead where the script's text imports them: heavy, and silent about CUDA when they are imported.
_HEAVY = (
    "numpy",
    "deepspeed",
    "transformers",
    "accelerate",
    "datasets",
    "peft",
    "lightning",
    "torchvision",
    "dalsegno.elastic",
)
_IMPORT = re.compile(r"^[ \t]*(?:import|from)[ \t]+([\w.]+)", re.MULTILINE)
# A script is text of a person's; more than this is not read to guess what it imports.
_MAX_TEXT = 1 << 20
# Low enough to yield to training, high enough to be done before the next change on a busy machine.
_NICENESS = 15
# Seconds; a standby worker that was stopped does not read.
_SEND_TIMEOUT = 10

logger = logging.getLogger(__name__)


def modules_of(script: Path | None) -> tuple[str, ...]:
    """The heavy modules to import for a script (None: not a file that can be read), from its text alone."""
    if script is None or not script.is_file():
        return ALWAYS
    with open(script, encoding="utf-8", errors="replace") as file:
        text = file.read(_MAX_TEXT)
    named = set(_IMPORT.findall(text))
    wanted = (module for module in _HEAVY if any(name == module or name.startswith(f"{module}.") for name in named))
    return (*ALWAYS, *wanted)


class Standby:
    """One standby worker process, from its start until it is adopted or discarded."""

    def __init__(self, process: subprocess.Popen[bytes], channel: socket.socket) -> None:
        self.process = process
        self.channel = channel
        self.report: dict[str, object] | None = None
        self.ready = threading.Event()

    @property
    def usable(self) -> bool:
        """Whether it lives; it may still be importing."""
        return self.process.poll() is None

    def assign(self, assignment: Assignment) -> None:
        """Gives it its script.

        Raises:
            OSError: it is gone, or did not take it within a few seconds.
        """
        send(self.channel, dataclasses.asdict(assignment))


class StandbyPool:
    """Keeps up to `count` standby workers.

    Args:
        lifeline: each is registered with it from its start.
        count: how many are wanted (nproc per node).
        modules: what they import.
        log: where they write until they are adopted.
        on_warm: called on a thread of the pool's when all `count` have imported everything, once per filling.
        python: the interpreter.
    """

    def __init__(
        self,
        lifeline: Lifeline,
        count: int,
        modules: Sequence[str],
        log: Path,
        on_warm: Callable[[], None],
        python: str = sys.executable,
    ) -> None:
        self._lifeline = lifeline
        self._count = count
        self._modules = tuple(modules)
        self._log = log
        self._on_warm = on_warm
        self._python = python
        self._lock = threading.Lock()
        self._standbys: list[Standby] = []
        self._announced = False
        self._closed = False

    def fill(self, *, low_priority: bool) -> None:
        """Starts what is missing. `low_priority`: their imports yield to the workers that train now."""
        with self._lock:
            if self._closed:
                return
            for dead in [standby for standby in self._standbys if not standby.usable]:
                logger.warning("a standby worker ended by itself (status %s)", dead.process.returncode)
                self._forget(dead)
            missing = self._count - len(self._standbys)
            for _ in range(missing):
                self._standbys.append(self._start(low_priority))
            self._announced = self._announced and not missing

    def warm(self) -> int:
        """How many have imported everything and wait."""
        with self._lock:
            return sum(standby.ready.is_set() and standby.usable for standby in self._standbys)

    def take(self) -> Standby | None:
        """Hands out one for adoption, the warmest first; None when there is none. The caller owns it from here."""
        with self._lock:
            usable = sorted((s for s in self._standbys if s.usable), key=lambda s: not s.ready.is_set())
            if not usable:
                return None
            self._standbys.remove(usable[0])
            return usable[0]

    def close(self) -> None:
        """Ends all that were not handed out."""
        with self._lock:
            self._closed = True
            for standby in list(self._standbys):
                self._forget(standby)

    def _forget(self, standby: Standby) -> None:
        self._standbys.remove(standby)
        kill_group(standby.process.pid)
        standby.process.wait()
        self._lifeline.drop_group(standby.process.pid)

    def _start(self, low_priority: bool) -> Standby:
        ours, theirs = socket.socketpair()
        ours.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, struct.pack("ll", _SEND_TIMEOUT, 0))
        console = (os.dup(1), os.dup(2))
        # PDEATHSIG fires when the spawning thread ends; only the main thread lives as long as the agent.
        parent = os.getpid() if threading.current_thread() is threading.main_thread() else 0
        command = [
            *(self._python, "-u", "-m", "dalsegno.agent.standby"),
            *("--channel", str(theirs.fileno())),
            *("--console", *map(str, console)),
            *("--parent", str(parent)),
            *("--nice", str(_NICENESS if low_priority else 0)),
            *("--", *self._modules),
        ]
        try:
            with open(self._log, "ab") as log:
                process = subprocess.Popen(
                    command,
                    stdout=log,
                    stderr=log,
                    pass_fds=(theirs.fileno(), *console),
                    start_new_session=True,
                    # Whatever modules read while they are imported (OMP_NUM_THREADS, DS_ACCELERATOR) is in here.
                    env={**os.environ, **self._lifeline.environment()},
                )
        finally:
            theirs.close()
            for fd in console:
                os.close(fd)
        self._lifeline.add_group(process.pid)
        standby = Standby(process, ours)
        threading.Thread(target=self._listen, args=(standby,), name="standby", daemon=True).start()
        return standby

    def _listen(self, standby: Standby) -> None:
        """Waits for the report of one standby worker, then for the end of the channel; closes it."""
        with standby.channel:
            try:
                self._reported(standby, receive(standby.channel))
                receive(standby.channel)
            except OSError as error:
                logger.info("standby worker %d: %s", standby.process.pid, error)

    def _reported(self, standby: Standby, report: dict[str, object] | None) -> None:
        if report is None:
            logger.warning("standby worker %d ended before it was ready; see %s", standby.process.pid, self._log)
            return
        standby.report = report
        standby.ready.set()
        if report["failed"]:
            logger.warning("standby worker %d could not import %s", standby.process.pid, report["failed"])
        with self._lock:
            warm = sum(one.ready.is_set() for one in self._standbys)
            announce = not self._announced and not self._closed and warm == self._count
            self._announced = self._announced or announce
        if announce:
            self._on_warm()
