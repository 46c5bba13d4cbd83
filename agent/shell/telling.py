"""Tells a supervisor what happens, as lines of JSON on a file descriptor of its own. Nobody ever waits for it."""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Mapping
from typing import Any

__all__ = ["Teller"]

logger = logging.getLogger(__name__)


class Teller:
    """Writes to an inherited descriptor, which no process of ours inherits in turn.

    Args:
        fd: a pipe's end; None: nobody is told anything.

    Raises:
        OSError: it is not open.
    """

    def __init__(self, fd: int | None) -> None:
        self._fd = fd
        if fd is not None:
            os.set_inheritable(fd, False)
            os.set_blocking(fd, False)

    def tell(self, what: Mapping[str, Any]) -> None:
        """Writes one line. A supervisor that does not read, or is gone, hears nothing more."""
        if self._fd is None:
            return
        line = json.dumps(what).encode() + b"\n"
        try:
            done = os.write(self._fd, line) == len(line)
        except OSError as error:
            logger.warning("the supervisor is not told any more: %s", error)
            done = False
        if not done:
            self._fd = None  # The rest of a line that was cut off would make no sense.
