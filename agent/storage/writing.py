"""Whether a script that was told to end is writing a checkpoint below its directory, on whatever file system."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Sequence
from pathlib import Path

from .foreign import MOST_ENTRIES, OURS
from .naming import is_data, is_unfinished

__all__ = ["FileWrites"]

# Of the flags in /proc/<pid>/fdinfo: opened for writing alone, or for reading and writing.
_FOR_WRITING = os.O_WRONLY | os.O_RDWR


class FileWrites:
    """A sign (`processes.signs`): a file that may be a part of a checkpoint has changed, or is open for writing.

    A file may stay as it is for long while it is written: the next part is copied from a card, or the server of the
    file system does not answer. Logs and notes do not count, which some scripts write all the time.

    Args:
        root: the script's directory.
    """

    def __init__(self, root: Path) -> None:
        self._root = Path(os.path.realpath(root))  # as /proc names it
        self._before: dict[str, tuple[int, int, int]] | None = None

    def __call__(self, pids: Sequence[int]) -> bool:
        now = self._files()
        changed = self._before is not None and any(self._before.get(path) != state for path, state in now.items())
        self._before = now
        return changed or any(_is_part(path) for pid in pids for path in _open_for_writing(pid, self._root))

    def _files(self) -> dict[str, tuple[int, int, int]]:
        """Size, time and inode of each file that may be a part."""
        found: dict[str, tuple[int, int, int]] = {}
        left = MOST_ENTRIES
        for where, directories, names in os.walk(self._root):
            directories[:] = [name for name in directories if not name.startswith(OURS)]
            left -= len(names)
            if left < 0:
                break  # more than anybody looks at: what is open still counts
            for name in filter(_is_part, names):
                path = os.path.join(where, name)
                with contextlib.suppress(OSError):
                    state = os.stat(path, follow_symlinks=False)
                    found[path] = state.st_size, state.st_mtime_ns, state.st_ino
        return found


def _is_part(path: str) -> bool:
    name = path.rpartition("/")[2]
    return not name.startswith(OURS) and (is_data(name) or is_unfinished(name))


def _open_for_writing(pid: int, root: Path) -> list[str]:
    """Files below `root` that a process has open for writing; of a process that is gone, or a stranger's, none."""
    found = []
    with contextlib.suppress(OSError):
        for number in os.listdir(f"/proc/{pid}/fd"):
            with contextlib.suppress(OSError, ValueError, StopIteration):
                path = os.readlink(f"/proc/{pid}/fd/{number}").removesuffix(" (deleted)")
                if path.startswith(f"{root}{os.sep}"):
                    text = Path(f"/proc/{pid}/fdinfo/{number}").read_text(encoding="ascii", errors="replace")
                    flags = next(line.split()[1] for line in text.splitlines() if line.startswith("flags:"))
                    if int(flags, 8) & _FOR_WRITING:
                        found.append(path)
    return found
