"""Whether a run's directory is still the one on its volume, and not what is left where the volume was mounted."""

from __future__ import annotations

import errno
import os
from pathlib import Path

from .private import read_private

__all__ = ["Standing"]


class Standing:
    """The volume as it was when an epoch began; the job's probe file tells one from another.

    A script makes its directories again where a mount is gone. What it saves there lies on the machine's own disk,
    which nobody else sees, so that must not become the run's.

    Args:
        run_dir: the run's directory.
    """

    def __init__(self, run_dir: Path) -> None:
        self._run_dir = run_dir
        self._probe = run_dir.parent.parent / ".dalsegno" / run_dir.parent.name / "probe"
        # Without a master of ours there is none.
        self._was = self._read() if os.path.lexists(self._probe) else b""

    def check(self) -> None:
        """Raises OSError if it is another one now, or gone."""
        if self._was and self._read() != self._was:
            raise OSError(errno.ESTALE, "another volume is mounted here now", str(self._run_dir))

    def _read(self) -> bytes:
        try:
            return read_private(self._probe)
        except FileNotFoundError as error:
            text = "the volume that the run began on is not mounted here any more: mount it again"
            raise OSError(errno.ESTALE, text, str(self._run_dir)) from error
