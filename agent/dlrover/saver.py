"""The agent's side of the companion process, in which DLRover's saver runs (`companion`)."""

from __future__ import annotations

import contextlib
import json
import logging
import os
import subprocess
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from dalsegno.protos.own_program import command_of
from dalsegno.protos.shortage import starting
from dalsegno.protos.signal_names import killed_by
from dalsegno.protos.text import object_in

from ..processes.keeper import DEAF_TO
from ..processes.lifeline import Lifeline
from ..processes.proc import kill_group
from ..processes.signals import held_back
from . import names
from .claims import NameClaim, sweep

__all__ = ["NodeSaver"]

# Seconds for an answer that needs no disk, and for freezing: a worker may just be writing.
_ANSWERS_WITHIN_SECONDS = 10.0
_FREEZES_WITHIN_SECONDS = 35.0
_ENDS_WITHIN_SECONDS = 5.0
# For the thread that reads, where an answer has come and this process stood still until its time was over.
_READS_WITHIN_SECONDS = 1.0
# Seconds between two questions whether it is done; it must twice in a row be.
_ASK_EVERY_SECONDS = 0.1
# Deaths of savers in one world after which there is a reason to give up.
_MOST_DEATHS = 3

logger = logging.getLogger(__name__)


class NodeSaver:
    """One node's companion, through all worlds. Thread-safe.

    Args:
        job_id: the job's.
        directory: a private directory of this agent, for the files that DLRover's classes read and write.
        path: what the script has first on `sys.path`; its storage class may be in a module there.
        log: where the companion's output goes.
        lifeline: the process is registered with it, and so is what it may leave behind.
        heard: called on a thread of its own with (epoch, step) when DLRover's classes tell of a new step.
        say: prints one line for people.

    Raises:
        OSError: there is no place for its sockets or its memory.
    """

    def __init__(
        self,
        job_id: str,
        directory: Path,
        path: str,
        log: Path,
        lifeline: Lifeline,
        heard: Callable[[int, int], None],
        say: Callable[[str, bool], None],
    ) -> None:
        self._log, self._path, self._lifeline, self._heard, self._say = log, path, lifeline, heard, say
        self._claim = NameClaim(job_id)
        # After it, so that no name is taken whose workers a keeper is just ending.
        for name in sweep():
            logger.warning("an agent that is gone had left sockets and memory of Flash Checkpoint: %s; removed", name)
        self.name = self._claim.name
        self._claim.leave_to(lifeline)
        # What the workers get in every world.
        self.variables = names.job_variables(self.name, str(directory))
        self._process: subprocess.Popen[str]
        # One order at a time.
        self._asking = threading.Lock()
        # Held by who asks whether all is on the disk, for all ranks that wait for that; when it last began to be so.
        self._settling = threading.Lock()
        self._calm_since = 0.0
        self._news = threading.Condition()
        self._number = 0
        # What the companion said since the last order, by the number of the order that it answers.
        self._answers: dict[int, dict[str, Any]] = {}
        # The companion that was ended because it did not answer.
        self._silent: subprocess.Popen[str] | None = None
        self._up = self._closed = False
        self._epoch = 0
        # The last world's order, and what its workers have asked for; how often a saver has died in it.
        self._world: dict[str, Any] = {}
        self._made: Any = None
        self._deaths = 0
        # Held by who starts a companion.
        self._starting = threading.RLock()
        try:
            self._start()
        except OSError:
            self._claim.close()
            raise

    def enter(self, epoch: int, group_rank: int, nodes: int, arrived: int) -> int:
        """A new world is about to start here. Starts the companion where none runs.

        What is in memory stays only if this node was part of the world before: otherwise others have gone on without
        it, maybe from an earlier step. Where each node has a part, it stays only if all nodes do.

        Args:
            epoch, group_rank, nodes: the world's, and this node's place in it.
            arrived: how many of its nodes were not in the world before.

        Returns:
            The step in this node's memory; 0: there is none.

        Raises:
            OSError: the companion cannot be started.
        """
        keep, self._epoch = epoch == self._epoch + 1, epoch
        order = {"do": "world", "epoch": epoch, "node_rank": group_rank, "nodes": nodes, "keep": keep}
        order["keep_parts"] = not arrived
        with self._starting:
            self._world, self._made, self._deaths = order, None, 0
            if self._process.poll() is not None:
                self._start()
        with contextlib.suppress(FileNotFoundError):
            # Steps of the world before are no news.
            os.unlink(self.variables["RUNTIME_METRICS_PATH"])
        # One that still imports torch has nothing in memory, and serves no worker before it has read this.
        return int(self._ask(order, _ANSWERS_WITHIN_SECONDS if self._up else 0.0).get("step", 0))

    def freeze(self) -> None:
        """The workers are about to end: none of them begins to write any more."""
        if self._up:
            self._ask({"do": "freeze"}, _FREEZES_WITHIN_SECONDS)

    def part(self) -> int | None:
        """The workers are gone: the step of what is in memory here (0: none), if other nodes have parts of it, too."""
        answer = self._ask({"do": "freeze"}, _FREEZES_WITHIN_SECONDS) if self._up else {}
        return int(answer.get("step", 0)) if answer.get("spread") else None

    def save(self, timeout_seconds: float, *, part: bool = False) -> int:
        """The workers are gone: writes what is in memory, where this node has all of it.

        Args:
            timeout_seconds: seconds to wait for that; then it goes on behind.
            part: also where other nodes have the rest, which do the same.

        Returns:
            The step that is on the disk now; 0: none is, or not yet.
        """
        return int(self._ask({"do": "save", "part": part}, timeout_seconds).get("saved", 0)) if self._up else 0

    def settle(self, timeout_seconds: float) -> bool:
        """Waits at most `timeout_seconds` until all that the workers asked for is on the disk.

        The ranks of a node may all wait at once: one asks for those that came before it, so no order waits for many.
        """
        came = time.monotonic()
        deadline, calm, first = came + timeout_seconds, 0, came
        if not self._settling.acquire(timeout=max(0.0, timeout_seconds)):
            return not self._up
        try:
            while self._up and self._calm_since < came and (left := deadline - time.monotonic()) > 0:
                first = first if calm else time.monotonic()
                # No answer is none: a large save can keep it from hearing us for a while.
                answer = self._ask({"do": "busy"}, min(left, _ANSWERS_WITHIN_SECONDS))
                calm = calm + 1 if answer and not answer.get("busy") else 0
                self._calm_since = first if calm >= 2 else self._calm_since
                time.sleep(_ASK_EVERY_SECONDS)  # why: the library's saver tells nobody when it is done
        finally:
            self._settling.release()
        return self._calm_since >= came or not self._up

    def close(self) -> None:
        """Ends the companion, and removes sockets and memory."""
        with self._starting, self._news:
            self._closed = True
        process = self._process
        assert process.stdin is not None
        with contextlib.suppress(OSError, ValueError):
            process.stdin.close()
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(_ENDS_WITHIN_SECONDS)
        self._end(process)
        self._claim.close()

    # ---- the process ------------------------------------------------------------------------------------------------

    def _start(self) -> None:
        added = {**self.variables, **self._lifeline.environment()}
        with open(self._log, "ab") as log, starting("the saver of Flash Checkpoint"), held_back(DEAF_TO):
            process = subprocess.Popen(
                [*command_of("dalsegno.agent.dlrover.companion", ("-u",)), self._path],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
                start_new_session=True,
                env={**os.environ, **added},
            )
        self._lifeline.add_group(process.pid)
        self._process, self._up = process, False
        reader = threading.Thread(target=self._read, args=(process,), name="flash-saver", daemon=True)
        with starting("the thread that hears the saver of Flash Checkpoint"):
            reader.start()

    def _read(self, process: subprocess.Popen[str]) -> None:
        assert process.stdout is not None
        told = ""
        for line in process.stdout:
            try:
                said = object_in(line) or {}
                epoch, heard = int(said.get("epoch", 0)), int(said.get("heard", 0))
            except (ValueError, TypeError):
                said = {}
            if not said:
                logger.warning("the saver of Flash Checkpoint said %r", line[:200])
                continue
            if said.get("problem"):
                told = str(said["problem"])
                self._say(f"Flash Checkpoint: {told}; more in {self._log}", True)
            if heard:
                self._heard(epoch, heard)
            with self._news:
                self._up = self._up or "up" in said
                if "made" in said and self._process is process:
                    self._made = said["made"]
                if "answers" in said:
                    self._answers[said["answers"]] = said
                self._news.notify_all()
        code = process.wait()
        with self._news:
            lost = not self._closed and self._process is process
            self._up = self._up and self._process is not process
            self._news.notify_all()
        if lost and not told:
            how = killed_by(-code) if code < 0 else f"ended with code {code}"
            if self._silent is process:
                how = "did not answer in time, and was ended"
            self._follow(process, how)

    def _follow(self, dead: subprocess.Popen[str], how: str) -> None:
        """Starts a companion after one that has died in a world. What is in memory waits for the next save."""
        with self._starting:
            if self._closed or self._process is not dead:
                return
            self._deaths += 1
            self._lifeline.drop_group(dead.pid)
            again = self._made is not None and self._deaths <= _MOST_DEATHS
            then = (
                "another one is started, and what is in memory counts from the next save on"
                if again
                else "nothing is saved until the next change of the world, which starts another one"
            )
            if again:
                try:
                    self._start()
                except OSError as error:
                    again, then = False, f"another one cannot be started: {error}"
            self._say(f"the saver of Flash Checkpoint {how}: {then}; more in {self._log}", True)
            if again:
                # Under the lock, so that no order of the next world comes before this one.
                self._ask({**self._world, "again": self._made}, 0.0)

    def _ask(self, order: dict[str, Any], timeout_seconds: float) -> dict[str, Any]:
        """Sends one order. Returns its answer; empty if none comes.

        The question whether it is busy waits for other orders within its time; all others are worth waiting.

        Then that companion is ended, unless it may be saving: what is on its way to the disk is worth more.
        """
        process, last = self._process, time.monotonic() + timeout_seconds
        assert process.stdin is not None
        busy = order["do"] == "busy"
        if not self._asking.acquire(timeout=timeout_seconds if busy else -1):
            return {}
        try:
            self._number += 1
            number = self._number
            with self._news:
                # One to an earlier order may still come, beside the one that is waited for.
                self._answers.clear()
            try:
                process.stdin.write(json.dumps({**order, "number": number}) + "\n")
                process.stdin.flush()
            except (OSError, ValueError):
                return {}
            answer = self._await(process, number, max(0.0, last - time.monotonic()) if busy else timeout_seconds)
            if not answer and timeout_seconds and not busy:
                # This process may have stood still itself: the answer is there, but not read yet.
                answer = self._await(process, number, _READS_WITHIN_SECONDS)
        finally:
            self._asking.release()
        if not answer and timeout_seconds and not self._closed and order["do"] not in ("save", "busy"):
            logger.error("the saver of Flash Checkpoint does not answer (%s)", order["do"])
            self._silent = process
            self._end(process)
        return answer

    def _await(self, process: subprocess.Popen[str], number: int, timeout_seconds: float) -> dict[str, Any]:
        """The answer to an order; empty if none comes."""
        with self._news:
            self._news.wait_for(
                lambda: number in self._answers or self._closed or process.poll() is not None, timeout_seconds
            )
            return self._answers.get(number, {})

    def _end(self, process: subprocess.Popen[str]) -> None:
        with contextlib.suppress(ProcessLookupError):
            kill_group(process.pid)
        try:
            process.wait(_ENDS_WITHIN_SECONDS)
        except subprocess.TimeoutExpired:
            # Stuck in the kernel. The keeper still has it on its list.
            logger.error("the saver of Flash Checkpoint did not end within %.0f s of SIGKILL", _ENDS_WITHIN_SECONDS)
        else:
            self._lifeline.drop_group(process.pid)
