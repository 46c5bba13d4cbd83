"""Whether the volume of a path is away: its mount point is an empty directory of another disk then."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

__all__ = ["is_away", "mount_point"]


def mount_point(path: Path) -> Path | None:
    """Where the volume is mounted that has a path, or the nearest directory above it that is there.

    Bind mounts have one of their own. None: nobody can tell, as without ``/proc``, or where that says less (gVisor).
    """
    with contextlib.suppress(OSError, ValueError):
        while not os.path.exists(path) and path != path.parent:
            path = path.parent
        descriptor = os.open(path, os.O_PATH | os.O_CLOEXEC)
        try:
            about = Path(f"/proc/self/fdinfo/{descriptor}").read_bytes()
        finally:
            os.close(descriptor)
        numbers = [line.split()[1] for line in about.splitlines() if line.startswith(b"mnt_id:")]
        for line in Path("/proc/self/mountinfo").read_bytes().splitlines():
            fields = line.split()
            if fields[0] in numbers:
                # Spaces and the like are written as octal numbers.
                return Path(os.fsdecode(fields[4].decode("unicode_escape").encode("latin-1")))
    return None


def is_away(before: Path | None, path: Path) -> bool:
    """Whether a path lies on what is left where its volume was mounted.

    Args:
        before: The volume's mount point, as `mount_point` said.
        path: What was on that volume.
    """
    now = mount_point(path)
    return before is not None and now is not None and now in before.parents
