"""Which kind of file system a path is on."""

from __future__ import annotations

import os
import re
from pathlib import Path

__all__ = ["file_system_of"]

_MOUNTS = Path("/proc/self/mounts")
# How proc(5) writes a space, a tab, a newline or a backslash in a path.
_ESCAPED = re.compile(rb"\\([0-7]{3})")


def file_system_of(path: Path) -> str:
    """The kind of file system that `path` is on, such as "ext4"; empty where it cannot be told."""
    try:
        lines = [line.split(b" ") for line in _MOUNTS.read_bytes().splitlines()]
        mounts = [(_unescaped(line[1]), line[2].decode("ascii")) for line in lines]
    except (OSError, ValueError, IndexError):
        return ""
    real = os.path.realpath(os.fsencode(path))
    on = [(len(mount), index, kind) for index, (mount, kind) in enumerate(mounts) if _is_below(real, mount)]
    return max(on)[2] if on else ""


def _unescaped(path: bytes) -> bytes:
    return _ESCAPED.sub(lambda found: bytes([int(found[1], 8) & 0xFF]), path)


def _is_below(path: bytes, mount: bytes) -> bool:
    return path == mount or path.startswith(mount.rstrip(b"/") + b"/")
