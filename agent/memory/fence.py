"""Which parts are taken: nothing of another job, or of an epoch that is closed, unless it is wanted here."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from dataclasses import dataclass

import grpc

from dalsegno.elastic.checkpoint import CheckpointName
from dalsegno.protos import peer_pb2
from dalsegno.protos.text import is_component, one_line

from .incoming import PartRefusedError

__all__ = ["Fence", "OpenEpoch"]


@dataclass(frozen=True)
class OpenEpoch:
    """The world of a run that was opened last, and this node's place in it."""

    epoch: int
    group_rank: int


class Fence:
    """What was opened, and what is wanted. Thread-safe."""

    def __init__(self, job_id: str) -> None:
        self._job_id = job_id
        self._lock = threading.Lock()
        self._open: dict[str, OpenEpoch] = {}
        # Name and digest, each as often as it is wanted.
        self._wanted: list[tuple[str, str, str]] = []

    def open(self, run_id: str, epoch: int, group_rank: int) -> bool:
        """A world has opened. False: a later one has, too."""
        with self._lock:
            known = self._open.get(run_id)
            if known is not None and known.epoch > epoch:
                return False
            self._open[run_id] = OpenEpoch(epoch, group_rank)
            return True

    def opened(self, run_id: str) -> OpenEpoch | None:
        """The last one of a run."""
        with self._lock:
            return self._open.get(run_id)

    @contextlib.contextmanager
    def wanted(self, run_id: str, name: str, digest: str) -> Iterator[None]:
        """Parts of this checkpoint are taken meanwhile, whatever its epoch."""
        key = run_id, name, digest
        with self._lock:
            self._wanted.append(key)
        try:
            yield
        finally:
            with self._lock:
                self._wanted.remove(key)

    def check_job(self, job_id: str) -> None:
        """Raises PartRefusedError: it is another one."""
        if job_id != self._job_id:
            raise PartRefusedError(
                grpc.StatusCode.NOT_FOUND, f"this agent is of job {self._job_id}, not of {one_line(job_id, 100)}"
            )

    def check(self, header: peer_pb2.Header) -> None:
        """Whether a part that is offered is taken.

        Raises:
            PartRefusedError: it is not.
        """
        self.check_job(header.job_id)
        try:
            name = CheckpointName.parse(header.name)
        except ValueError as error:
            raise PartRefusedError(grpc.StatusCode.INVALID_ARGUMENT, one_line(str(error))) from error
        run_id = header.run_id
        if not is_component(run_id):
            raise PartRefusedError(grpc.StatusCode.INVALID_ARGUMENT, f"not a run id: {one_line(repr(run_id), 100)}")
        if name.epoch != header.epoch or name.lease is not None:
            raise PartRefusedError(
                grpc.StatusCode.INVALID_ARGUMENT, f"{header.name} is no sharded checkpoint of epoch {header.epoch}"
            )
        with self._lock:
            known = self._open.get(run_id)
            wanted = (run_id, header.name, header.digest) in self._wanted
        if known is None or header.epoch > known.epoch:
            return
        if header.epoch < known.epoch and not wanted:
            raise PartRefusedError(
                grpc.StatusCode.FAILED_PRECONDITION, f"epoch {header.epoch} is closed: epoch {known.epoch} has opened"
            )
        if header.epoch == known.epoch and header.group_rank == known.group_rank:
            raise PartRefusedError(
                grpc.StatusCode.INVALID_ARGUMENT, f"part {header.group_rank} of epoch {known.epoch} is this node's own"
            )
