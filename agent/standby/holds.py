"""Holds back what a script must not do before it has its place: functions whose effects others would see.

Python's own functions are replaced by functions that wait for the place, and restored when the place is known. So
nothing is slower in training. What native code does by itself is not seen, except for the first use of a card.
"""

from __future__ import annotations

import builtins
import contextlib
import functools
import io
import os
import socket
import subprocess
import sys
from collections.abc import Callable
from importlib.machinery import ModuleSpec, SourceFileLoader
from types import ModuleType
from typing import Any

from dalsegno.protos.replacements import Replacements

from .looked import Looked

__all__ = ["Holds"]

_WRITING = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND
# Functions of `os`, by the number of paths that they change.
_ONE_PATH = (
    *("mkdir", "rmdir", "remove", "unlink", "truncate", "chmod", "chown", "lchown", "utime", "mkfifo", "mknod"),
    *("setxattr", "removexattr"),
)
_TWO_PATHS = ("rename", "replace", "link", "symlink")
_LOOKS = ("stat", "lstat", "access", "readlink")
_PROCESSES = (
    *("fork", "forkpty", "posix_spawn", "posix_spawnp", "system", "execv", "execve", "kill", "killpg"),
    *("sched_setaffinity", "setpriority"),
)
_SOCKETS = ("connect", "connect_ex", "bind", "sendto", "sendmsg")
_PROCESS, _CONNECTION, _CARD, _GROUP = "it starts a process", "it opens a connection", "it uses a card", "its group"
_DATABASE, _SHARED_MEMORY = "it opens a database", "it uses shared memory"
# Functions of other modules, held as soon as these are imported: calls wait in any case. They are native code.
_ELSEWHERE = (
    ("_posixsubprocess", "fork_exec", _PROCESS),
    ("_posixshmem", "shm_open", _SHARED_MEMORY),
    ("_posixshmem", "shm_unlink", _SHARED_MEMORY),
    *((name, "connect", _DATABASE) for name in ("_sqlite3", "sqlite3", "sqlite3.dbapi2")),
    *((name, "open", _DATABASE) for name in ("_dbm", "_gdbm")),
    ("h5py", "File.__init__", "it opens a file of HDF5"),
    *((name, "serialize_file", "it writes safetensors") for name in ("safetensors", "safetensors._safetensors_rust")),
    *((name, "serialize_file", "it writes safetensors") for name in ("safetensors.torch", "safetensors.numpy")),
    ("torch", "save", "torch.save"),
    ("torch.serialization", "save", "torch.save"),
    ("torch.cuda", "_lazy_init", _CARD),
    ("torch.xpu", "_lazy_init", _CARD),
    ("torch.distributed", "init_process_group", _GROUP),
    ("torch.distributed.distributed_c10d", "init_process_group", _GROUP),
    ("torch.distributed", "TCPStore.__init__", _CONNECTION),
    ("torch.distributed", "FileStore.__init__", "it opens a store"),
)
# Copies of `open` in modules that may have been imported before, and functions of native code that read a named file.
_COPIES = (("tarfile", "bltn_open"), ("bz2", "_builtin_open"), ("tokenize", "_builtin_open"))
_READERS = tuple((name, "safe_open") for name in ("safetensors", "safetensors._safetensors_rust", "safetensors.torch"))

# Modules that list every directory of sys.path; and who has called a held function, as its check sees it.
_SEARCH_PACKAGES, _CALLER = ("importlib.metadata", "importlib_metadata"), 2

_Function = Callable[..., Any]


_NAMED = frozenset(module for module, *_ in (*_ELSEWHERE, *_COPIES, *_READERS))


class _Imports:
    """An import hook that tells when modules with functions to hold are imported. It finds no module itself.

    It stays on `sys.meta_path`: were it taken out, an import on another thread would pass over a finder, and not find
    a module that is there.

    Attributes:
        over: It does nothing any more.
    """

    def __init__(self, imported: Callable[[str], None]) -> None:
        self._imported = imported
        self.over = False

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        if self.over or name not in _NAMED:
            return None
        for finder in sys.meta_path:
            spec = None if finder is self else finder.find_spec(name, path, target)
            if spec is not None:
                self._tell(name, spec.loader)
                return spec
        return None

    def _tell(self, name: str, loader: Any) -> None:
        run = getattr(loader, "exec_module", None)
        if run is None:
            return

        def exec_module(module: ModuleType) -> None:
            run(module)
            if not self.over:
                self._imported(name)

        with contextlib.suppress(AttributeError):  # a class of Python's own modules, which are imported by now
            loader.exec_module = exec_module


class Holds:
    """Replaces the functions, and restores them.

    Args:
        meet: Waits for the place; gets the reason.
        looked: Records what the script looks at.
    """

    def __init__(self, meet: Callable[[str], None], looked: Looked) -> None:
        self._meet = meet
        self._looked = looked
        self._imports = _Imports(self._hold)
        self._replaced = Replacements()

    def begin(self) -> None:
        """Makes the functions wait from now on."""
        for owner in (builtins, io):
            self._replace(owner, "open", self._before_open)
        self._replace(os, "open", self._before_os_open)
        for name in _ONE_PATH:
            self._replace(os, name, functools.partial(self._before_change, name, 1))
        for name in _TWO_PATHS:
            self._replace(os, name, functools.partial(self._before_change, name, 2))
        for name in _LOOKS:
            self._replace(os, name, functools.partial(self._before_look, False))
        self._replace(os, "listdir", functools.partial(self._before_look, True))
        self._replace(os, "scandir", self._before_scan)
        for name in _PROCESSES:
            self._replace(os, name, self._always(_PROCESS))
        for name in _SOCKETS:
            self._replace(socket.socket, name, self._always(_CONNECTION))
        self._replace(subprocess, "_fork_exec", self._always(_PROCESS))
        # Checked later: whether a module's source is still what was imported.
        self._replace(SourceFileLoader, "path_stats", lambda loader, path: self._look(path))
        for module in {*_NAMED} & set(sys.modules):
            self._hold(module)
        sys.meta_path.insert(0, self._imports)

    def _hold(self, module: str) -> None:
        """Holds the functions of a module that is imported."""
        holds = [(name, self._always(need)) for owner, name, need in _ELSEWHERE if owner == module]
        holds += [(name, self._before_open) for owner, name in _COPIES if owner == module]
        holds += [
            (name, lambda path, *args, **options: self._look(path)) for owner, name in _READERS if owner == module
        ]
        for name, before in holds:
            owner: Any = sys.modules[module]
            *classes, last = name.split(".")
            for one in classes:
                owner = getattr(owner, one, None)
            self._replace(owner, last, before)

    def end(self) -> None:
        """Restores the functions. A function that somebody has wrapped meanwhile stays, and lets every call pass."""
        self._imports.over = True
        self._replaced.put_back()

    def _replace(self, owner: Any, name: str, before: _Function) -> None:
        function = getattr(owner, name, None)
        if function is None:
            return

        @functools.wraps(function)
        def ours(*args: Any, **options: Any) -> Any:
            if not self._imports.over:
                before(*args, **options)
            return function(*args, **options)

        self._replaced.put(owner, name, ours)

    def _always(self, need: str) -> _Function:
        def before(*args: object, **options: object) -> None:
            self._meet(need)

        return before

    def _before_open(self, file: Any, mode: str = "r", *args: object, **options: object) -> None:
        if not isinstance(mode, str) or isinstance(file, int):
            return
        if any(letter in mode for letter in "wax+"):
            self._before_writing(file, new="x" in mode)
        else:
            self._look(file)

    def _before_os_open(self, path: Any, flags: int = 0, *args: object, **options: object) -> None:
        if flags & _WRITING:
            self._before_writing(path, new=bool(flags & os.O_EXCL))
        else:
            self._look(path)

    def _before_change(self, name: str, paths: int, *args: Any, **options: Any) -> None:
        if name == "mkdir" and args and os.path.lexists(args[0]):
            return  # as in `makedirs(…, exist_ok=True)`: the call changes nothing
        if len(args) < paths or any(key.endswith("dir_fd") and value is not None for key, value in options.items()):
            self._meet(f"os.{name}")
            return
        for path in args[:paths]:
            self._before_writing(path)

    def _before_look(self, entries: bool, path: Any = ".", *args: object, **options: object) -> None:
        if entries and sys._getframe(_CALLER).f_globals.get("__name__") in _SEARCH_PACKAGES:
            self._looked.note_packages(path)
        elif options.get("dir_fd") is None:
            self._look(path, entries=entries)

    def _before_scan(self, path: Any = ".") -> None:
        self._look(path, entries=True)
        # Its DirEntry objects tell sizes and times without a further call.
        for name in self._looked.few_entries(path):
            self._look(name)

    def _before_writing(self, path: Any, *, new: bool = False) -> None:
        if not isinstance(path, (str, bytes, os.PathLike)):
            self._meet("it writes a file")
            return
        name = os.fsdecode(path)
        if new and self._looked.is_shared(name) and os.path.lexists(name):
            return  # The call fails: so locks of caches find out whether their file is there.
        if not self._looked.is_shared(name, new=new):
            self._meet(f"it writes {name}")

    def _look(self, path: Any, *, entries: bool = False) -> None:
        if self._looked.full:
            self._meet("it looks at very many files")
        self._looked.note(path, entries=entries)
