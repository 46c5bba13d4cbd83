"""The working directory: somebody may delete it while we run, and make it anew. Workers start there.

A process whose working directory is deleted stays in it, even where the same path exists again.
"""

from __future__ import annotations

import os

from dalsegno.protos.shortage import CannotStartError

__all__ = ["WorkingDirectory", "WorkingDirectoryGoneError"]


class WorkingDirectoryGoneError(CannotStartError):
    """The working directory is gone: no worker can be started on this node any more."""

    unfit = True


class WorkingDirectory:
    """The working directory in which the command was given."""

    def __init__(self) -> None:
        try:
            self._path = os.getcwd()
        except OSError:
            self._path = ""  # found out, and told, at the first start

    def enter(self) -> str:
        """Goes back to it if it was made anew meanwhile. Returns its path.

        Raises:
            WorkingDirectoryGoneError: It is not there.
        """
        try:
            return os.getcwd()
        except OSError as error:
            gone = error
        try:
            os.chdir(self._path)
        except OSError as error:
            path, why = self._path or "of this process", error.strerror or gone.strerror
            raise WorkingDirectoryGoneError(
                f"the working directory {path} is gone ({why}), so this node can start no workers: make it again, and"
                " start the same command there"
            ) from error
        return self._path
