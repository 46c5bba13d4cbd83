"""What torch's launcher leaves of a run: why workers failed, its events, and the error file that whoever started it
has named.

A scheduler that sets `TORCHELASTIC_ERROR_FILE` for a launcher finds there what the first failed worker's `@record` has
written. Workers have files of their own.
"""

from __future__ import annotations

import contextlib
import logging
import os
from collections.abc import Iterator

from torch.distributed.elastic.agent.server.api import RunResult, SimpleElasticAgent, WorkerGroup, WorkerState
from torch.distributed.elastic.events import record
from torch.distributed.elastic.events.api import EventSource
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, ProcessFailure, get_error_handler

from ..decisions.events import EXIT_FAILED, EXIT_FINISHED, EXIT_LEFT, WorkerExited
from ..workers.workers import WorkersContext

__all__ = ["TorchRecord", "recorded"]

ERROR_FILE = "TORCHELASTIC_ERROR_FILE"

logger = logging.getLogger(__name__)


class TorchRecord:
    """Of one agent, and of the failures of the world that it opened last."""

    def __init__(self) -> None:
        # By local rank, in the order of their ends: process, exit status, file of errors.
        self._failed: dict[int, tuple[int, int, str]] = {}

    def begin(self) -> None:
        """Another world: what failed in the one before did not end the run."""
        self._failed.clear()

    def started(self, agent: SimpleElasticAgent) -> None:
        """Records that each worker has been started, where somebody wants torch's events."""
        group = agent.get_worker_group()
        if _wanted(group):
            for worker in group.workers:
                record(agent._construct_event("START", EventSource.WORKER, worker), _handler(group))

    def exited(self, event: WorkerExited, context: WorkersContext | None) -> None:
        """Notes a worker that failed by itself."""
        if event.code and context is not None and event.local_rank not in self._failed:
            pid, file = context.pids()[event.local_rank], context.error_files[event.local_rank]
            self._failed[event.local_rank] = pid, event.code, file

    def result(self, code: int, group: WorkerGroup) -> RunResult:
        """What an exit code of the agent is for torch. A failed job's first error goes to the launcher's file."""
        if code in (EXIT_FINISHED, EXIT_LEFT):
            return RunResult(WorkerState.SUCCEEDED, {worker.global_rank: None for worker in group.workers})
        ranks = {worker.local_rank: worker.global_rank for worker in group.workers}
        failures = {ranks[local]: _failure(local, *found) for local, found in self._failed.items() if local in ranks}
        if code == EXIT_FAILED and failures and os.environ.get(ERROR_FILE):
            _, first = ChildFailedError("", failures).get_first_failure()
            _hand_on(first)
        return RunResult(WorkerState.FAILED, failures=failures)


@contextlib.contextmanager
def recorded(agent: SimpleElasticAgent) -> Iterator[None]:
    """Around its run: records for torch's events whether the agent itself came to the end of it."""
    wanted, handler = _wanted(agent.get_worker_group()), _handler(agent.get_worker_group())
    try:
        yield
    except Exception:
        if wanted:
            record(agent.get_event_failed(), handler)
        raise
    if wanted:
        record(agent.get_event_succeeded(), handler)


def _handler(group: WorkerGroup) -> str:
    return str(getattr(group.spec, "event_log_handler", "null"))


def _wanted(group: WorkerGroup) -> bool:
    """Each event asks for this machine's full name, which may take seconds."""
    return _handler(group) != "null"


def _failure(local_rank: int, pid: int, code: int, file: str) -> ProcessFailure:
    try:
        return ProcessFailure(local_rank, pid, code, file)
    except Exception as error:  # torch's own of a file that it did not write itself, or not to the end
        logger.warning("the error file %s of worker %d cannot be read: %s", file, local_rank, error)
        return ProcessFailure(local_rank, pid, code, "")


def _hand_on(failure: ProcessFailure) -> None:
    if not os.path.isfile(failure.error_file):
        return  # its script has no `@record`, or a signal ended it
    try:
        get_error_handler().dump_error_file(failure.error_file, failure.exitcode)
    except Exception as error:  # the run ends as it would without it
        logger.warning("%s, which %s names, cannot be written: %s", os.environ[ERROR_FILE], ERROR_FILE, error)
