"""Whether a run's directory is still the one on its volume, and not what is left where the volume was mounted."""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import secrets
import time
from collections.abc import Callable, Iterable
from pathlib import Path

from dalsegno.elastic.checkpoint.errors import printable
from dalsegno.elastic.checkpoint.files import list_files

from .private import PRIVATE, read_private

__all__ = ["VolumeCheck"]

logger = logging.getLogger(__name__)

# Seconds that the listing of a copy may lag behind its files, and the pause between two looks.
SIGHT_SECONDS, _PAUSE_SECONDS = 20.0, 0.1


class VolumeCheck:
    """The volume as it was when an epoch began; the job's probe file tells one from another.

    A script makes its directories again where a mount is gone. What it saves there lies on the machine's own disk,
    which nobody else sees, so that must not become the run's.

    Args:
        run_dir: the run's directory.

    Attributes:
        lag: the longest time in seconds that its listings were seen to lag behind what was written; 0: none.
    """

    def __init__(self, run_dir: Path) -> None:
        self._run_dir = run_dir
        self.lag = 0.0
        self._probe = run_dir.parent.parent / PRIVATE / run_dir.parent.name / "probe"
        self._was = b""
        with contextlib.suppress(FileNotFoundError):  # without a master of ours there is none
            self._was = read_private(self._probe)

    def check(self) -> None:
        """Raises OSError if it is another one now, or gone."""
        if self._was and self._read() != self._was:
            raise OSError(errno.ESTALE, "another volume is mounted here now", str(self._run_dir))

    def measure(self) -> None:
        """Sees how late listings are, before anybody has to rely on them. Not where there is no probe file."""
        if not self._was:
            return
        path = self._probe.with_name(f"listed-{secrets.token_hex(8)}")
        try:
            path.write_bytes(b"")
            self.wait_listed(path.parent, {path.name}, listing=os.listdir)
        except OSError as error:
            logger.warning("nobody knows how late listings are: %s", error)
        finally:
            with contextlib.suppress(OSError):
                path.unlink()

    def wait_listed(
        self,
        directory: Path,
        names: set[str],
        seconds: float = SIGHT_SECONDS,
        listing: Callable[[Path], Iterable[str]] | None = None,
    ) -> None:
        """Until the listing of a directory has all these files, or it would be sealed without some of them.

        Args:
            directory, names: where, and which.
            seconds: the longest time.
            listing: lists a directory; None: `list_files`, which goes down, too.

        Raises:
            OSError: it does not have them after so many seconds.
        """
        began = time.monotonic()
        while missing := names.difference((listing or list_files)(directory)):
            waited = time.monotonic() - began
            self.lag = max(self.lag, waited)
            if waited > seconds:
                late = f"{printable(min(missing))} was written {seconds:.0f} s ago, and the volume does not list it"
                raise OSError(errno.EAGAIN, late, str(directory))
            time.sleep(_PAUSE_SECONDS)  # why: no event tells when an object store lists what was written

    def _read(self) -> bytes:
        try:
            return read_private(self._probe)
        except FileNotFoundError as error:
            text = "the volume that the run began on is not mounted here any more: mount it again"
            raise OSError(errno.ESTALE, text, str(self._run_dir)) from error
