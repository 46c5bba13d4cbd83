"""A mount without rename, links and hard links, as some FUSE and object-store mounts are."""

from __future__ import annotations

import errno
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

REFUSED = ("rename", "replace", "link", "symlink")


@contextmanager
def bare_mount(code: int = errno.EPERM) -> Iterator[list[str]]:
    """Refuses these calls with ``code`` wherever our own code makes them; what tests do on purpose still works.

    Yields the calls that were refused so far.
    """
    refused: list[str] = []

    def refuse(name: str, original: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            frame = sys._getframe(1)
            while frame.f_back is not None and frame.f_globals["__name__"].partition(".")[0] in ("pathlib", "shutil"):
                frame = frame.f_back
            if not frame.f_globals["__name__"].startswith("dalsegno."):
                return original(*args, **kwargs)
            refused.append(name)
            raise OSError(code, os.strerror(code), str(args[0]))

        return call

    with mock.patch.multiple(os, **{name: refuse(name, getattr(os, name)) for name in REFUSED}):
        yield refused
