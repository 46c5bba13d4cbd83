"""Lets a process, or a thread, yield to whatever else the machine does, a training above all. Standard library only."""

from __future__ import annotations

import errno
import os
import threading
import time

__all__ = ["yield_of_thread", "yield_to_others"]

# Without privileges the kernel takes one change per tenth of a second, of all processes together.
_TRIES, _PAUSE_SECONDS = 10, 0.1
# A session is a tenth of another one then. With less it would stand still beside several that are busy.
_MOST_FOR_A_SESSION = 10


def yield_to_others(niceness: int) -> None:
    """Lowers the priority of the calling thread, of those that it starts from now on, and of the session that it leads.

    Linux may share a processor between sessions before it looks at priorities (autogroup, sched(7)): it does outside of
    containers, unless it was told otherwise. A priority then counts among the processes of one session only. So start
    what is to yield in a session of its own.

    Args:
        niceness: from 1 to 19, as in nice(1).
    """
    os.nice(niceness)
    if os.getsid(0) == os.getpid():
        _lower_session(min(niceness, _MOST_FOR_A_SESSION))


def yield_of_thread(niceness: int) -> None:
    """Lowers the priority of the calling thread alone. One that is lower already stays as it is.

    On Linux a priority belongs to a thread. Without privileges the kernel refuses to raise it again.

    Args:
        niceness: from 1 to 19, as in nice(1).
    """
    thread = threading.get_native_id()
    if os.getpriority(os.PRIO_PROCESS, thread) < niceness:
        os.setpriority(os.PRIO_PROCESS, thread, niceness)


def _lower_session(niceness: int) -> None:
    for _ in range(_TRIES):
        try:
            with open("/proc/self/autogroup", "w", encoding="ascii") as file:
                file.write(str(niceness))
            return
        except OSError as error:
            if error.errno != errno.EAGAIN:
                return  # This kernel has no such groups.
        time.sleep(_PAUSE_SECONDS)  # why: nothing tells when the kernel takes the next change
