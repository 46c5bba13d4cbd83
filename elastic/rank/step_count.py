"""Counts this rank's steps where its agent finds the number after the rank's end, however it ends.

Progress is reported only now and then, so reports lack the last steps if steps take milliseconds. This count is written
with each step, into memory that outlives the process: it costs no system call.
"""

from __future__ import annotations

import logging
import mmap
import os
from pathlib import Path

from dalsegno.protos.contract import STEP_COUNT, step_count_name

from .identity import Identity

log = logging.getLogger(__name__)


class StepCount:
    """One rank's count, in a file beside its agent's socket.

    Args:
        socket: The agent's, from ``DALSEGNO_SOCKET``.
        epoch, rank: The epoch and the rank that it counts for.
        step: The step that the rank begins from.
    """

    def __init__(self, socket: str, epoch: int, rank: int, step: int) -> None:
        path = Path(socket).parent / step_count_name(epoch, rank)
        flags = os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC | os.O_NOFOLLOW
        self._memory: mmap.mmap | None = None
        try:
            descriptor = os.open(path, flags, 0o600)
            try:
                # Written, not only extended: so a full disk is found here, and not by a signal in the middle of a step.
                os.write(descriptor, STEP_COUNT.pack(step))
                self._memory = mmap.mmap(descriptor, STEP_COUNT.size)
            finally:
                os.close(descriptor)
        except (OSError, ValueError) as error:
            log.debug("steps are told, and not counted in %s: %s", path, error)

    def set(self, step: int) -> None:
        """Notes the last step that is done."""
        if self._memory is not None:
            STEP_COUNT.pack_into(self._memory, 0, step)


def count_steps(identity: Identity, step: int) -> StepCount | None:
    """The count of the present process, which begins after ``step``; None if no agent asks for one."""
    if identity.socket is None or not os.path.isabs(identity.socket):
        return None
    return StepCount(identity.socket, identity.epoch, identity.rank, step)
