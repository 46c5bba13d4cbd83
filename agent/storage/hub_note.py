"""What the nodes of a job have found of a hub, for nodes that come later: that nobody answers there."""

from __future__ import annotations

import contextlib
import logging
import os
import secrets
from pathlib import Path

from .private import open_private, read_private

__all__ = ["HubNote"]

# In the job's private directory.
_NAME = "hub"
# Seconds for which it counts. Whoever wrote it does so again after each question, about once a minute.
FRESH_SECONDS = 180.0

logger = logging.getLogger(__name__)


class HubNote:
    """Its age goes by the clock of the file system, as nodes' clocks differ.

    Args:
        directory: the job's private one.
        url: of the hub.
    """

    def __init__(self, directory: Path, url: str) -> None:
        self._path, self._url = directory / _NAME, url

    def is_fresh(self) -> bool:
        """Whether some node has lately found that nobody answers there."""
        try:
            if read_private(self._path).decode("utf-8", errors="replace") != self._url:
                return False
            return self._now() - os.stat(self._path).st_mtime <= FRESH_SECONDS
        except OSError as error:
            logger.debug("no node has found anything of the hub: %s", error)
            return False

    def write(self) -> None:
        """Nobody answers."""
        aside = self._path.with_name(f"{_NAME}.{secrets.token_hex(4)}")
        try:
            with open(open_private(aside, os.O_WRONLY | os.O_CREAT | os.O_EXCL), "w", encoding="utf-8") as file:
                file.write(self._url)
            os.replace(aside, self._path)
        except OSError as error:
            logger.warning("other nodes are not told that the hub does not answer: %s", error)

    def remove(self) -> None:
        """Somebody answers."""
        with contextlib.suppress(OSError):
            self._path.unlink()

    def _now(self) -> float:
        trial = self._path.with_name(f"{_NAME}.{secrets.token_hex(4)}")
        trial.touch(mode=0o600, exist_ok=False)
        try:
            return os.stat(trial).st_mtime
        finally:
            trial.unlink()
