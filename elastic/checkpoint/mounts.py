"""Which mount a path lies on: where a volume is away, its mount point is an empty directory of another disk."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

__all__ = ["mount_of"]


def mount_of(path: Path) -> tuple[int, str]:
    """The file system and the mount of a path, or of the nearest directory above it that is there.

    A directory that was deleted leaves what it lay in, on the same mount. With a volume that is away its mount goes,
    too, also where both ends of a bind mount are of one file system.

    Raises:
        OSError: nobody can tell.
    """
    while not os.path.exists(path) and path != path.parent:
        path = path.parent
    descriptor = os.open(path, os.O_PATH | os.O_CLOEXEC)
    try:
        about = ""
        with contextlib.suppress(OSError):  # without /proc the file system alone says it
            about = Path(f"/proc/self/fdinfo/{descriptor}").read_text(encoding="ascii", errors="replace")
        mounts = [line for line in about.splitlines() if line.startswith("mnt_id:")]
        return os.fstat(descriptor).st_dev, "".join(mounts)
    finally:
        os.close(descriptor)
