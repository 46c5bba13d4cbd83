"""What a script does not do before it has its place: the functions whose effects others would see, as long as it waits.

Python's own functions are replaced by ones that wait, and put back when the place is there, so that nothing is slower
in training. What native code does by itself is not seen, except for a card's first use.
"""

from __future__ import annotations

import builtins
import functools
import io
import os
import socket
import subprocess
import sys
from collections.abc import Callable
from importlib.machinery import SourceFileLoader
from typing import Any

from .looked import Looked

__all__ = ["Holds"]

_WRITING = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND
# Of `os`, by the number of paths that they change.
_ONE_PATH = (
    *("mkdir", "rmdir", "remove", "unlink", "truncate", "chmod", "chown", "lchown", "utime", "mkfifo", "mknod"),
    *("setxattr", "removexattr"),
)
_TWO_PATHS = ("rename", "replace", "link", "symlink")
_LOOKS = ("stat", "lstat", "access")
_LISTS = ("listdir", "scandir")
_PROCESSES = (
    *("fork", "forkpty", "posix_spawn", "posix_spawnp", "system", "execv", "execve", "kill", "killpg"),
    *("sched_setaffinity", "setpriority"),
)
_SOCKETS = ("connect", "connect_ex", "bind", "sendto", "sendmsg")
_PROCESS, _CONNECTION, _CARD, _GROUP = "it starts a process", "it opens a connection", "it uses a card", "its group"
# Of other modules, where they are imported: what is called there waits in any case.
_ELSEWHERE = (
    ("_posixsubprocess", "fork_exec", _PROCESS),
    ("torch.cuda", "_lazy_init", _CARD),
    ("torch.xpu", "_lazy_init", _CARD),
    ("torch.distributed", "init_process_group", _GROUP),
    ("torch.distributed.distributed_c10d", "init_process_group", _GROUP),
)
# Written by native code.
_SAVES = (("torch", "save"), ("torch.serialization", "save"))

_Function = Callable[..., Any]


class Holds:
    """Replaces the functions, and puts them back.

    Args:
        meet: Waits for the place, told what for.
        looked: Told what the script looks at.
    """

    def __init__(self, meet: Callable[[str], None], looked: Looked) -> None:
        self._meet = meet
        self._looked = looked
        self._over = False
        # Where, under which name, ours, and what was there; None: a base class has it.
        self._replaced: list[tuple[Any, str, _Function, _Function | None]] = []

    def begin(self) -> None:
        """From now on they wait."""
        for owner in (builtins, io):
            self._replace(owner, "open", self._before_open)
        self._replace(os, "open", self._before_os_open)
        for name in _ONE_PATH:
            self._replace(os, name, functools.partial(self._before_change, name, 1))
        for name in _TWO_PATHS:
            self._replace(os, name, functools.partial(self._before_change, name, 2))
        for name in _LOOKS:
            self._replace(os, name, functools.partial(self._before_look, False))
        for name in _LISTS:
            self._replace(os, name, functools.partial(self._before_look, True))
        for name in _PROCESSES:
            self._replace(os, name, self._always(_PROCESS))
        for name in _SOCKETS:
            self._replace(socket.socket, name, self._always(_CONNECTION))
        self._replace(subprocess, "_fork_exec", self._always(_PROCESS))
        # Whether a module's source is still what was imported.
        self._replace(SourceFileLoader, "path_stats", lambda loader, path: self._look(path))
        for module, name, need in _ELSEWHERE:
            self._replace(sys.modules.get(module), name, self._always(need))
        for module, name in _SAVES:
            self._replace(sys.modules.get(module), name, self._always("torch.save"))

    def end(self) -> None:
        """They are again what they were. One that somebody has wrapped meanwhile stays, and lets everything pass."""
        self._over = True
        for owner, name, ours, before in reversed(self._replaced):
            if owner.__dict__.get(name) is not ours:
                continue
            if before is None:
                delattr(owner, name)
            else:
                setattr(owner, name, before)

    def _replace(self, owner: Any, name: str, before: _Function) -> None:
        function = getattr(owner, name, None)
        if function is None:
            return

        @functools.wraps(function)
        def ours(*args: Any, **options: Any) -> Any:
            if not self._over:
                before(*args, **options)
            return function(*args, **options)

        self._replaced.append((owner, name, ours, owner.__dict__.get(name)))
        setattr(owner, name, ours)

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
            return  # As `makedirs(…, exist_ok=True)` does: nothing comes of it.
        if len(args) < paths or any(key.endswith("dir_fd") and value is not None for key, value in options.items()):
            self._meet(f"os.{name}")
            return
        for path in args[:paths]:
            self._before_writing(path)

    def _before_look(self, entries: bool, path: Any = ".", *args: object, **options: object) -> None:
        if options.get("dir_fd") is None:
            self._look(path, entries=entries)

    def _before_writing(self, path: Any, *, new: bool = False) -> None:
        if not isinstance(path, (str, bytes, os.PathLike)):
            self._meet("it writes a file")
        elif not self._looked.is_shared(name := os.fsdecode(path), new=new):
            self._meet(f"it writes {name}")

    def _look(self, path: Any, *, entries: bool = False) -> None:
        if self._looked.full:
            self._meet("it looks at very many files")
        self._looked.note(path, entries=entries)
