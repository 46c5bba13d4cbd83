"""On PYTHONPATH: below one directory there is neither rename nor links, and listings are late, as on object stores.

In the environment of all processes of a pod:
    DALSEGNO_TEST_BARE       the directory
    DALSEGNO_TEST_BARE_CODE  the error's number
    DALSEGNO_TEST_BARE_LATE  seconds for which a new name is in no listing; it can be opened all the time
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from typing import Any

ROOT = os.environ.get("DALSEGNO_TEST_BARE", "")
CODE = int(os.environ.get("DALSEGNO_TEST_BARE_CODE", "1"))
LATE = float(os.environ.get("DALSEGNO_TEST_BARE_LATE", "0"))


def below(path: Any) -> bool:
    return isinstance(path, (str, os.PathLike)) and os.path.abspath(path).startswith(ROOT)


def refusing(original: Callable[..., Any]) -> Callable[..., Any]:
    def call(source: Any, target: Any, *rest: Any, **more: Any) -> Any:
        if below(target):
            raise OSError(CODE, os.strerror(CODE), os.fspath(target))
        return original(source, target, *rest, **more)

    return call


def is_late(path: str) -> bool:
    try:
        # A directory's own time changes with what is in it; it was made when its first file was.
        return time.time() - os.lstat(path).st_ctime < LATE
    except OSError:
        return False


class Listing:
    """What `os.scandir` returns, without late names."""

    def __init__(self, path: Any) -> None:
        self._entries = scandir(path)
        self._late = below(path)

    def __enter__(self) -> Listing:
        return self

    def __exit__(self, *_: object) -> None:
        self._entries.close()

    def close(self) -> None:
        self._entries.close()

    def __iter__(self) -> Iterator[Any]:
        return self

    def __next__(self) -> Any:
        while True:
            entry = next(self._entries)
            if not (self._late and is_late(entry.path)):
                return entry


def listdir_late(path: Any = ".") -> list[Any]:
    names = listdir(path)
    return [name for name in names if not is_late(os.path.join(path, name))] if below(path) else names


if ROOT:
    for name in ("rename", "replace", "link", "symlink"):
        setattr(os, name, refusing(getattr(os, name)))
    if LATE:
        scandir, listdir = os.scandir, os.listdir
        os.scandir, os.listdir = Listing, listdir_late  # type: ignore[assignment,misc]
