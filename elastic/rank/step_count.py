"""How many steps this rank has made, where its agent finds it behind its end, however that comes.

Progress is told now and then, so what is told lacks the last steps where they take milliseconds. This is written with
each step, into memory that outlives the process: it costs no system call.
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
    """One rank's, beside its agent's socket.

    Args:
        socket: The agent's, from ``DALSEGNO_SOCKET``.
        epoch, rank: Whose.
        step: What it begins from.
    """

    def __init__(self, socket: str, epoch: int, rank: int, step: int) -> None:
        path = Path(socket).parent / step_count_name(epoch, rank)
        flags = os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC | os.O_NOFOLLOW
        self._memory: mmap.mmap | None = None
        try:
            descriptor = os.open(path, flags, 0o600)
            try:
                # Written, not only made longer: a full disk is found here, and not by a signal in the middle of a step.
                os.write(descriptor, STEP_COUNT.pack(step))
                self._memory = mmap.mmap(descriptor, STEP_COUNT.size)
            finally:
                os.close(descriptor)
        except (OSError, ValueError) as error:
            log.debug("steps are told, and not counted in %s: %s", path, error)

    def set(self, step: int) -> None:
        """The last step that is done."""
        if self._memory is not None:
            STEP_COUNT.pack_into(self._memory, 0, step)


def count_steps(identity: Identity, step: int) -> StepCount | None:
    """The present process's, which begins behind ``step``; None where no agent asks for it."""
    if identity.socket is None or not os.path.isabs(identity.socket):
        return None
    return StepCount(identity.socket, identity.epoch, identity.rank, step)
