"""Asks who is at an address: the job's own master, or somebody else."""

from __future__ import annotations

import logging
from collections.abc import Callable

import grpc

from dalsegno.protos import control_pb2, control_pb2_grpc
from dalsegno.protos.contract import CONTROL_PROTOCOL
from dalsegno.protos.text import one_line

from .connection import RETRIED, Credentials, code_of, detail_of, unconnected
from .spawning import TokenLostError, with_limit

__all__ = ["MasterInquiry"]

# Seconds.
ANSWER_TIMEOUT_SECONDS = 2.0
# SQLite's words where a disk is full.
_FULL = "database or disk is full"
# Answers of a process that is not our master: one of another job, or another program's server on the same port.
_STRANGERS = (
    grpc.StatusCode.UNAUTHENTICATED,
    grpc.StatusCode.INVALID_ARGUMENT,
    grpc.StatusCode.UNIMPLEMENTED,
    grpc.StatusCode.PERMISSION_DENIED,
    grpc.StatusCode.UNKNOWN,
)

logger = logging.getLogger(__name__)


class MasterInquiry:
    """Asks for one agent. For one thread at a time.

    Args:
        job_id: the job's.
        credentials: what all agents of the job share; raises TokenLostError.
        say: prints one line for people.

    Attributes:
        trouble: why the master could not even be asked, or not be connected to; empty: it could.
    """

    def __init__(self, job_id: str, credentials: Callable[[], Credentials], say: Callable[[str, bool], None]) -> None:
        self._job_id = job_id
        self._credentials = credentials
        self._say = say
        # That there is no token was noted; what the master cannot record, as people were told it last.
        self._tokenless = False
        self._unrecorded = ""
        self.trouble = ""

    def ask(self, address: str) -> grpc.StatusCode | None:
        """Asks who is at an address. None: the job's master. Otherwise the status with which it failed."""
        try:
            credentials = self._credentials()
        except TokenLostError as error:
            if not self._tokenless:
                logger.warning("the master cannot be asked: %s", error)
            self._tokenless, self.trouble = True, f"cannot be asked: {error}"
            return grpc.StatusCode.UNAUTHENTICATED
        self._tokenless, self.trouble = False, ""
        with credentials.channel(address) as channel:
            try:
                request = control_pb2.StatusRequest(job_id=self._job_id, protocol=CONTROL_PROTOCOL)
                status = control_pb2_grpc.ControlStub(channel).GetStatus(
                    request, timeout=ANSWER_TIMEOUT_SECONDS, metadata=credentials.metadata
                )
                self._tell_unrecorded(status.store_trouble)
            except grpc.RpcError as error:
                code, detail = code_of(error), detail_of(error)
                if code is grpc.StatusCode.UNAVAILABLE and "connect" in detail:
                    self.trouble = unconnected(address, detail)
                return code if code in RETRIED or code in _STRANGERS else None
            return None

    def _tell_unrecorded(self, why: str) -> None:
        """Says what the master cannot record. A full disk has a line of its own."""
        if why and why != self._unrecorded and _FULL not in why:
            self._say(f"the job's own master can record nothing: {with_limit(one_line(why))}", True)
        self._unrecorded = why
