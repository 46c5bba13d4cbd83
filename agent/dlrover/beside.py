"""What the agent does for a script that uses DLRover's trainer classes; for all others nothing.

Their saver stands beside the workers of each world (`saver`). Before workers end, it takes the locks without which none
of them begins to write into memory. Once they are gone, it writes what they left, where this node alone can.
"""

from __future__ import annotations

import logging
import math
import threading
import time
from collections.abc import Callable
from pathlib import Path

from dalsegno.protos import worker_pb2
from dalsegno.protos.contract import Variable
from dalsegno.protos.shortage import shortage

from ..decisions import events as ev
from ..own_modules import first_path
from ..processes.lifeline import Lifeline
from ..script import Script
from . import names
from .saver import NodeSaver

__all__ = ["DlroverSupport"]

# Seconds that the end of a worker waits for its last save to be on the disk: DLRover's own limit for one.
_SETTLES_WITHIN_SECONDS = 600.0
# The part of --join-timeout that saving may take, after the end of workers and before this node joins.
_PART_OF_JOINING = 0.75
# What workers change in the library: modules with `install()`.
_HOOKS = ["dalsegno.agent.dlrover.in_worker", "dalsegno.agent.dlrover.latest"]
_FIXES = "dalsegno.elastic.dlrover.fixes"

logger = logging.getLogger(__name__)


class DlroverSupport:
    """One agent's help for DLRover's classes.

    Args:
        wanted: the script uses them.
        fixes: our order and plan behind them: "total" if every world makes the batch of the largest one, "each" if
            each makes its own; empty: theirs stay.
        job_id, directory, log, lifeline: see `NodeSaver`.
        join_timeout: seconds, --join-timeout.
        script: what the workers run.
        deliver: takes events; called on any thread.

    Raises:
        OSError: there is no place for the saver's sockets, or it cannot be started.
    """

    def __init__(
        self,
        wanted: bool,
        fixes: str,
        job_id: str,
        join_timeout: float,
        script: Script,
        directory: Path,
        log: Path,
        lifeline: Lifeline,
        deliver: Callable[[ev.Event], None],
        say: Callable[[str, bool], None],
    ) -> None:
        self._deliver = deliver
        self._saver: NodeSaver | None = None
        self.variables: dict[str, str] = {}
        self.save_timeout = 0.0
        if not wanted:
            return
        self._saver = NodeSaver(job_id, directory, first_path(script.source), log, lifeline, self._heard, say)
        # What the workers get in every world.
        self.variables = {**self._saver.variables, Variable.HOOKS: ",".join(_HOOKS + ([_FIXES] if fixes else []))}
        if fixes:
            self.variables[Variable.DLROVER_FIXES] = fixes
        # Seconds that `save` takes at most.
        self.save_timeout = _PART_OF_JOINING * join_timeout

    def world_variables(self, group_rank: int, nodes: int, max_nodes: int) -> dict[str, str]:
        """What the workers of one world get. `max_nodes`: as the job has it, whatever this agent was told."""
        return names.world_variables(group_rank, nodes, max_nodes) if self._saver is not None else {}

    def enter(self, epoch: int, group_rank: int, nodes: int, arrived: int) -> None:
        """The workers of a world are about to start. See `NodeSaver.enter`.

        Raises:
            OSError: the saver cannot be started.
        """
        if self._saver is not None:
            self._saver.enter(epoch, group_rank, nodes, arrived)

    def freeze(self) -> None:
        """The workers are about to end."""
        if self._saver is not None:
            self._saver.freeze()

    def stopped(self, epoch: int) -> ev.WorkersStopped:
        """The workers are gone: writes what they left, where this node alone can. Returns the event that says so."""
        saver = self._saver
        if saver is None:
            return ev.WorkersStopped(epoch)
        # Of a worker that died with its lock, the memory is now known to be whole or torn.
        part = saver.part()
        return ev.WorkersStopped(epoch, saver.save(self.save_timeout) if part is None else 0, part)

    def save_part(self, epoch: int, step: int, take: Callable[[float], None]) -> None:
        """All nodes hold this step: writes this node's part on a thread of its own, and delivers that it has.

        Args:
            take: makes the script's saves the run's, within so many seconds.
        """

        def save() -> None:
            until, saved = time.monotonic() + self.save_timeout, 0
            try:
                saved = self._saver.save(self.save_timeout, part=True) if self._saver is not None else 0
                if saved == step:
                    take(max(0.0, until - time.monotonic()))
            except Exception:
                logger.exception("what was in memory is not saved, or not taken")
            finally:
                # The decisions wait for this event.
                self._deliver(ev.FlashSaved(epoch, saved if saved == step else 0))

        try:
            threading.Thread(target=save, name="flash-save", daemon=True).start()
        except RuntimeError as error:
            logger.warning("Flash Checkpoint is not saved: %s", shortage(error) or error)
            self._deliver(ev.FlashSaved(epoch, 0))

    def settle(self) -> None:
        """A worker has ended well: waits until all that it saved is on the disk."""
        if self._saver is not None:
            self._saver.settle(_SETTLES_WITHIN_SECONDS)

    def close(self) -> None:
        """Ends the saver, and removes its sockets and its memory."""
        if self._saver is not None:
            self._saver.close()

    def _heard(self, epoch: int, step: int) -> None:
        progress = worker_pb2.Progress(step=step, loss=math.nan)
        self._deliver(ev.WorkerSaid(epoch, 0, worker_pb2.ToAgent(progress=progress)))
