"""What a script has looked at in the file system while it ran ahead, and whether that is still so."""

from __future__ import annotations

import os
import stat
import sys
import sysconfig
import tempfile

__all__ = ["Looked"]

# The functions as they are while nobody waits.
_stat = os.stat
_abspath = os.path.abspath
# Variables that name a cache, and where caches are without them. Their libraries write them from many processes at
# once, and look a thing up by what it is: whether it is there makes no other training.
_CACHES = (
    *("XDG_CACHE_HOME", "HF_HOME", "HF_HUB_CACHE", "HF_DATASETS_CACHE", "TORCH_HOME", "TORCH_EXTENSIONS_DIR"),
    *("TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR", "TRITON_HOME", "MPLCONFIGDIR", "NUMBA_CACHE_DIR"),
)
_DEFAULT_CACHES = ("~/.cache", "~/.triton", "~/.config/matplotlib")
# Not the work of a training.
_SYSTEM = ("/proc", "/sys", "/dev")
# Of files and directories; a script that looks at more waits.
_MOST = 100_000

# Existence and kind; of a file its size, time and number, too; of a directory whose entries were read, its time.
_Print = tuple[int, ...] | None


def _below(path: str, roots: tuple[str, ...]) -> bool:
    return any(path == root or path.startswith(f"{root}/") for root in roots)


def _caches() -> tuple[str, ...]:
    named = [os.environ[name] for name in _CACHES if os.environ.get(name)]
    return tuple(_abspath(os.path.expanduser(path)) for path in (*named, *_DEFAULT_CACHES))


def _installed() -> tuple[str, ...]:
    paths = sysconfig.get_paths()
    return tuple({_abspath(path) for path in (sys.prefix, sys.base_prefix, paths["stdlib"], paths["purelib"])})


class Looked:
    """Prints of files and directories, taken before the script had what it asked for."""

    def __init__(self) -> None:
        self._shared = (*_SYSTEM, *_caches())
        self._passed_over = (*self._shared, *_installed())
        # Found out by writing there, the first time.
        self._temporary = _abspath(tempfile.gettempdir())
        self._prints: dict[tuple[str, bool], _Print] = {}

    def is_shared(self, path: str, *, new: bool = False) -> bool:
        """Whether anybody may write this file ahead: a cache's, compiled Python, a device, a `new` temporary one."""
        path = _abspath(path)
        shared = _below(path, self._shared) or "/__pycache__/" in path
        return shared or (new and os.path.dirname(path) == self._temporary)

    @property
    def full(self) -> bool:
        """There is no room for more."""
        return len(self._prints) >= _MOST

    def note(self, path: object, *, entries: bool = False) -> None:
        """The script looks at a path, which may not be there; `entries`: at what a directory holds."""
        if not isinstance(path, (str, bytes, os.PathLike)):
            return  # A descriptor: what it is of was looked at when it was opened.
        name = _abspath(os.fsdecode(path))
        if (name, entries) in self._prints or _below(name, self._passed_over) or "/__pycache__/" in name:
            return
        self._prints[name, entries] = _print(name, entries)

    def changed(self) -> str:
        """The first path that is another one now; "": none."""
        for (name, entries), before in self._prints.items():
            if _print(name, entries) != before:
                return name
        return ""


def _print(name: str, entries: bool) -> _Print:
    try:
        found = _stat(name)
    except (OSError, ValueError):
        return None
    kind = stat.S_IFMT(found.st_mode)
    if stat.S_ISDIR(found.st_mode) and not entries:
        return (kind, found.st_dev, found.st_ino)
    return (kind, found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns)
