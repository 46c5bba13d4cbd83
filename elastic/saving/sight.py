"""Files of another machine, and mounts that fail for a moment: what is looked for again, for a bounded time."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from typing import TypeVar

__all__ = ["SIGHT_PAUSES_SECONDS", "look_again"]

log = logging.getLogger(__name__)

T = TypeVar("T")

# Seconds between two tries while another machine's files are not in sight yet, or the file system fails.
SIGHT_PAUSES_SECONDS = (0.2, 0.5, 1.0, 3.0, 6.0)


def look_again(work: Callable[[], T], passes: Callable[[Exception], bool], off: threading.Event | None = None) -> T:
    """Does ``work``, and again after each of `SIGHT_PAUSES_SECONDS` while it fails.

    Args:
        work: May be done several times.
        passes: Whether an error may pass. Another one is raised at once, and so is the last one.
        off: Set: there is no pause any more.
    """
    off = off or threading.Event()
    for pause in SIGHT_PAUSES_SECONDS:
        try:
            return work()
        except Exception as error:
            if not passes(error):
                raise
            log.debug("it is tried again: %s", error)
        # No event tells when another machine's files come into sight over NFS, or a mount works again.
        off.wait(pause)
    return work()
