"""Records what a script has looked at in the file system while it ran ahead, and checks whether that has changed."""

from __future__ import annotations

import os
import stat
import sys
import sysconfig
import tempfile

__all__ = ["Looked", "holds_a_lock"]

# The original functions, which wait for nothing.
_stat = os.stat
_abspath = os.path.abspath
_open = open
_listdir = os.listdir
# Variables that name a cache, and where caches are without them. Libraries write their caches from many processes at
# once, and look things up by content, so their state cannot change a training.
_CACHES = (
    *("XDG_CACHE_HOME", "HF_HOME", "HF_HUB_CACHE", "HF_DATASETS_CACHE", "TORCH_HOME", "TORCH_EXTENSIONS_DIR"),
    *("TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR", "TRITON_HOME", "MPLCONFIGDIR", "NUMBA_CACHE_DIR"),
)
# The parts of such a directory that are a cache; people keep other things there, too.
_INSIDE = {"HF_HOME": ("hub", "datasets", "modules", "assets", "xet", "evaluate", "metrics"), "TORCH_HOME": ("hub",)}
_DEFAULT_CACHES = ("~/.cache", "~/.triton", "~/.config/matplotlib")
# Directories with nothing of a training, except what people keep in shared memory. Anybody may write to some of them.
_SYSTEM = ("/proc", "/sys", "/dev")
_SHARED_MEMORY = ("/dev/shm", "/dev/mqueue", "/dev/hugepages")
_WRITABLE = (
    *("/dev/null", "/dev/zero", "/dev/full", "/dev/random", "/dev/urandom", "/dev/stdout", "/dev/stderr", "/dev/fd"),
    *("/proc/self", "/proc/thread-self"),
)
# Up to so many entries of a directory are each looked at, if their sizes and times come with the list.
_FEW = 256
# The most files and directories; a script that looks at more waits.
_MOST = 100_000

# Existence and kind; for a file also size, times and number; for a directory whose entries were read, its times.
_Print = tuple[int, ...] | None
# What describes an installed package in a directory of sys.path, by the end of its name.
_PACKAGES = (".dist-info", ".egg-info", ".egg")


def _below(path: str, roots: tuple[str, ...]) -> bool:
    return any(path == root or path.startswith(f"{root}/") for root in roots)


def _caches() -> tuple[str, ...]:
    """Cache directories that hold nothing else: a directory with other things is not one, whatever a variable says."""
    named = [
        os.path.join(os.environ[name], inside)
        for name in _CACHES
        for inside in _INSIDE.get(name, ("",))
        if os.environ.get(name)
    ]
    paths = {_abspath(os.path.expanduser(path)) for path in (*named, *_DEFAULT_CACHES)}
    return tuple(path for path in paths if not _below(os.getcwd(), (path,)))


def _installed() -> tuple[str, ...]:
    paths = sysconfig.get_paths()
    return tuple({_abspath(path) for path in (sys.prefix, sys.base_prefix, paths["stdlib"], paths["purelib"])})


class Looked:
    """Prints of files and directories, each taken before the script got its answer."""

    def __init__(self) -> None:
        caches = _caches()
        self._shared = (*_WRITABLE, *caches)
        self._passed_over = (*_SYSTEM, *caches, *_installed())
        # Found out the first time, by writing there.
        self._temporary = _abspath(tempfile.gettempdir())
        self._prints: dict[tuple[str, bool], _Print] = {}
        # For directories that were searched for packages: those that are there.
        self._packages: dict[str, list[str]] = {}

    def is_shared(self, path: str, *, new: bool = False) -> bool:
        """Whether any process may write this file ahead: a cache's, compiled Python, a device, a temporary one.

        A file that must be `new` may be a lock, for which others would wait until this process has its place. It is
        none if it has the name of a temporary file.
        """
        path = _abspath(path)
        shared = _below(path, self._shared) or "/__pycache__/" in path
        if not new or "/__pycache__/" in path:
            return shared
        temporary = os.path.basename(path).startswith(tempfile.gettempprefix())
        return temporary and (shared or os.path.dirname(path) == self._temporary)

    @property
    def full(self) -> bool:
        """Whether there is no room for more."""
        return len(self._prints) >= _MOST

    def note(self, path: object, *, entries: bool = False) -> None:
        """The script looks at a path, which may not exist; `entries`: it reads what a directory contains."""
        if not isinstance(path, (str, bytes, os.PathLike)):
            return  # a descriptor: its file was looked at when it was opened
        name = _abspath(os.fsdecode(path))
        if (name, entries) in self._prints or self._is_passed_over(name):
            return
        self._prints[name, entries] = _print(name, entries)

    def note_packages(self, path: object) -> None:
        """The script has a directory searched for installed packages: what else is there it does not see."""
        if isinstance(path, (str, bytes, os.PathLike)):
            name = _abspath(os.fsdecode(path))
            if name not in self._packages and not self._is_passed_over(name):
                self._packages[name] = _packages(name)

    def few_entries(self, path: object) -> list[str]:
        """The paths of a directory's entries, if they are few."""
        if not isinstance(path, (str, bytes, os.PathLike)) or self._is_passed_over(root := _abspath(os.fsdecode(path))):
            return []
        try:
            names = _listdir(root)
        except OSError:
            return []
        return [os.path.join(root, name) for name in names] if len(names) <= _FEW else []

    def _is_passed_over(self, name: str) -> bool:
        passed_over = _below(name, self._passed_over) or "/__pycache__/" in name
        return passed_over and not _below(name, _SHARED_MEMORY)

    def changed(self) -> str:
        """The first path whose print has changed; "": none."""
        # The script may still run, and look at more.
        for (name, entries), before in list(self._prints.items()):
            if _print(name, entries) != before:
                return name
        for name, packages in list(self._packages.items()):
            if _packages(name) != packages:
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
    # `st_ctime`, because a copy may have been given the size and the time of what it replaced.
    return (kind, found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns, found.st_ctime_ns)


def _packages(name: str) -> list[str]:
    try:
        return sorted(entry for entry in _listdir(name) if entry.endswith(_PACKAGES))
    except OSError:
        return []


def holds_a_lock() -> bool:
    """Whether this process has a lock on some file (proc_locks(5)), by whatever call."""
    try:
        with _open("/proc/locks", encoding="ascii") as file:
            lines = [line.split() for line in file]
    except (OSError, ValueError):
        return False
    # A line is "1: FLOCK ADVISORY WRITE 7493 …"; one with "->" is a lock that somebody waits for.
    return any(line[4:5] == [str(os.getpid())] and "->" not in line for line in lines)
