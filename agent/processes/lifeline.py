"""The agent's side of the keeper: registers process groups with it and replaces it when it dies.

A node has one lifeline. Whatever the agent starts carries `environment()` and is registered with `add_group`;
it then dies with the agent (see `keeper`).
"""

from __future__ import annotations

import logging
import os
import secrets
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

from dalsegno.protos.contract import Variable
from dalsegno.protos.shortage import starting

from . import keeper
from .proc import is_stopped, start_time
from .signals import held_back

__all__ = ["Lifeline"]

# Seconds between two keepers if they die one after another; the first is replaced at once.
_RESPAWN_PAUSE_SECONDS = 0.2
# How many keepers are told to end everything, if they die before they have done so.
_LAST_KEEPERS = 3
# Seconds that another one has for it, where one was told in time and did not come to its end.
_ONCE_MORE_SECONDS = 5.0

logger = logging.getLogger(__name__)


class Lifeline:
    """One keeper process, always alive while this object is open. Thread-safe.

    Args:
        on_respawn: called with the number of replacements so far, after a dead keeper was replaced.
    """

    def __init__(self, on_respawn: Callable[[int], None] | None = None) -> None:
        self.token = secrets.token_hex(16)
        self._on_respawn = on_respawn
        self._lock = threading.Lock()
        self._groups: dict[int, int] = {}
        # Lines about what is to be removed.
        self._removals: list[str] = []
        self._closing = threading.Event()
        self._respawns = 0
        self._process = self._spawn()
        self._register_all()
        self._watcher = threading.Thread(target=self._watch, name="keeper-watch", daemon=True)
        try:
            with starting("the thread that watches the keeper"):
                self._watcher.start()
        except OSError:
            self._end_now()
            raise

    @property
    def keeper_pid(self) -> int:
        """The process id of the present keeper."""
        return self._process.pid

    def environment(self) -> dict[str, str]:
        """What every process of this node must carry in its environment from its start."""
        return {Variable.LIFELINE: self.token}

    def add_group(self, pgid: int) -> None:
        """Registers a process group whose leader, `pgid`, is a child of this process that was not yet reaped.

        One that cannot be looked at (no descriptor left) is not: the keeper finds it by what it carries.
        """
        try:
            started = start_time(pgid)
        except OSError as error:
            logger.warning("process group %d is not registered with the keeper: %s", pgid, error)
            return
        if started is None:
            # It is not reaped, so it cannot be gone; a caller that reaped it first has nothing left to register.
            return
        with self._lock:
            self._groups[pgid] = started
            self._send(f"add {pgid} {started}")

    def drop_group(self, pgid: int) -> None:
        """Removes a group from the list, once all of it has ended."""
        with self._lock:
            if self._groups.pop(pgid, None) is not None:
                self._send(f"drop {pgid}")

    def add_path(self, path: Path) -> None:
        """Registers a private directory that is removed after the agent is gone."""
        self._remove_later(keeper.written("path", str(path.absolute())))

    def add_prefix(self, prefix: str) -> None:
        """Registers files whose paths begin so. They are removed after the agent is gone, and before directories."""
        self._remove_later(keeper.written("prefix", prefix))

    def add_claim(self, owner: Path, directory: Path, prefix: str) -> None:
        """Registers what stands under a name that others may have later. It is removed only while it is this agent's.

        Args:
            owner, directory: of both this agent holds the locks (flock), until it ends or gives the name back.
            prefix: of the files that are removed, `owner` last.
        """
        self._remove_later(keeper.written("claim", str(owner), str(directory), prefix))

    def _remove_later(self, line: str) -> None:
        with self._lock:
            self._removals.append(line)
            self._send(line)

    def close(self, timeout_seconds: float = 10.0) -> None:
        """Ends everything that is registered or carries the token, and the keeper.

        Only the first call does. If the keeper has died, even just now, or is stopped, another one is started for that.

        Args:
            timeout_seconds: how long that may take. If the keeper does not end within that, another one has 5 seconds.
        """
        deadline, once_more = time.monotonic() + timeout_seconds, True
        with self._lock:
            if self._closing.is_set():
                return
            self._closing.set()
        for _ in range(_LAST_KEEPERS):
            with self._lock:
                if is_stopped(self._process.pid):
                    self._end_now()
                if self._process.poll():
                    self._replace()
                assert self._process.stdin is not None
                self._process.stdin.close()
            try:
                if self._process.wait(max(0.0, deadline - time.monotonic())) == 0:
                    break
            except subprocess.TimeoutExpired:
                logger.error("the keeper (process %d) did not end in time: killed", self._process.pid)
                self._end_now()
                if not once_more:
                    break
                # It may have been stopped just now: nobody else finds what has left its process group.
                deadline, once_more = time.monotonic() + _ONCE_MORE_SECONDS, False
        self._watcher.join(timeout_seconds)

    def _end_now(self) -> None:
        self._process.kill()
        self._process.wait()

    def _spawn(self) -> subprocess.Popen[bytes]:
        with starting("this node's keeper process"), held_back(keeper.DEAF_TO):
            process = subprocess.Popen(
                [sys.executable, "-I", "-S", keeper.__file__],
                stdin=subprocess.PIPE,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                # Neither a signal to the agent's group nor the keeper of an outer agent may reach this one.
                start_new_session=True,
                env={"LANG": os.environ.get("LANG", "C")},
                cwd="/",
                bufsize=0,
            )
        assert process.stdin is not None
        # A stopped keeper must not stop the agent with it, so a full pipe is an error, not a wait.
        os.set_blocking(process.stdin.fileno(), False)
        return process

    def _send(self, line: str) -> None:
        """Writes one line to the keeper; the caller holds the lock."""
        assert self._process.stdin is not None
        if self._process.stdin.closed:
            return
        try:
            # Shorter than PIPE_BUF, so written as a whole or not at all (None, because the pipe does not block).
            written = self._process.stdin.write(os.fsencode(line + "\n"))
        except BrokenPipeError:
            # It died; the watcher replaces it and registers everything again.
            logger.warning("the keeper (process %d) is gone; starting another", self._process.pid)
            return
        if written is None:
            logger.error("the keeper (process %d) does not read any more; replacing it", self._process.pid)
            self._process.kill()

    def _replace(self) -> None:
        """Starts another keeper and tells it everything; the caller holds the lock."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process = self._spawn()
        self._respawns += 1
        self._register_all()

    def _register_all(self) -> None:
        self._send(f"mark {Variable.LIFELINE}={self.token}")
        for pgid, started in self._groups.items():
            self._send(f"add {pgid} {started}")
        for line in self._removals:
            self._send(line)

    def _watch(self) -> None:
        while True:
            self._process.wait()
            if self._respawns and self._closing.wait(_RESPAWN_PAUSE_SECONDS):
                return
            with self._lock:
                if self._closing.is_set():
                    return  # `close` takes care of it
                try:
                    self._replace()
                except OSError as error:
                    # Tried again, because without a keeper nothing would end with this agent.
                    self._respawns += 1
                    logger.error("%s", error)
                    continue
            logger.warning("keeper replaced (%d so far)", self._respawns)
            if self._on_respawn is not None:
                self._on_respawn(self._respawns)
