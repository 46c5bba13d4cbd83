"""Starts the process of one upload or download, hears it, and ends it."""

from __future__ import annotations

import contextlib
import errno
import json
import os
import selectors
import subprocess
import tempfile
import time
from collections.abc import Callable, Mapping
from types import TracebackType
from typing import Any

from dalsegno.protos.own_program import command_of
from dalsegno.protos.text import one_line

__all__ = ("FULL_ERRNOS", "VOLUME_ERRNOS", "Outcome", "Transfer", "patience")

_SLOWEST_BYTES_PER_SECOND = 64 << 10
_LEAST_PATIENCE_SECONDS = 900.0
_END_SECONDS = 0.3

# What a volume says that has no room, and what one says that fails: never a network. See errno(3).
FULL_ERRNOS = frozenset({errno.ENOSPC, errno.EDQUOT})
VOLUME_ERRNOS = FULL_ERRNOS | {errno.EIO, errno.EROFS, errno.ESTALE}

Outcome = dict[str, Any]


def patience(count: int, rate: float | None) -> float:
    """How long a transfer of so many bytes may take, in seconds, before it is given up."""
    return _LEAST_PATIENCE_SECONDS + 4 * count / min(rate or _SLOWEST_BYTES_PER_SECOND, _SLOWEST_BYTES_PER_SECOND)


class Transfer:
    """One such process. A context manager, which ends it at once.

    Args:
        job: what it does, see ``transfer``.
        environment: what is different for it.
    """

    def __init__(self, job: Mapping[str, Any], environment: Mapping[str, str] | None = None) -> None:
        self._errors = tempfile.TemporaryFile()  # noqa: SIM115  `__exit__` closes it
        self._process = subprocess.Popen(
            command_of("dalsegno.relay.milestones.transfer"),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._errors,
            env={**os.environ, **(environment or {})},
            start_new_session=True,  # an upload yields, see `priority`
        )
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(json.dumps(dict(job)).encode() + b"\n")
            self._process.stdin.flush()
        except BrokenPipeError:
            pass  # it is gone already, and `result` says so

    def __enter__(self) -> Transfer:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self._process.kill()
        # It has the lowest priority: where the cores are busy its end may take a moment. Nobody needs to wait for it.
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(_END_SECONDS)
        for pipe in (self._process.stdin, self._process.stdout):
            if pipe is not None:
                try:
                    pipe.close()
                except BrokenPipeError:
                    continue
        self._errors.close()

    def result(
        self, seconds: float, every_seconds: float, meanwhile: Callable[[], None], heard: Callable[[Outcome], None]
    ) -> Outcome:
        """Waits for the last word of it.

        Args:
            seconds: how long at most.
            every_seconds: how often ``meanwhile`` is called.
            meanwhile: what else there is to do.
            heard: gets what it says before.

        Returns:
            What it said last: ``revision``, ``downloaded``, ``refused`` or ``failed``; with the last an ``errno`` where
            it was the volume, and ``lacking`` where the libraries that speak to the hub cannot be imported.
        """
        assert self._process.stdout is not None
        descriptor, text = self._process.stdout.fileno(), b""
        until = time.monotonic() + seconds
        with selectors.DefaultSelector() as selector:
            selector.register(descriptor, selectors.EVENT_READ)
            while (left := until - time.monotonic()) > 0:
                if selector.select(min(left, every_seconds)):
                    piece = os.read(descriptor, 1 << 16)
                    if not piece:
                        return {"failed": self._last_words()}
                    text += piece
                    *lines, text = text.split(b"\n")
                    for line in lines:
                        event = _event(line)
                        if event.keys() & {"revision", "downloaded", "refused", "failed"}:
                            return event
                        heard(event)
                meanwhile()
        return {"failed": f"it was not done within {seconds:.0f} s"}

    def _last_words(self) -> str:
        code = self._process.wait()
        size = self._errors.seek(0, os.SEEK_END)
        self._errors.seek(max(0, size - 4096))
        lines = self._errors.read().decode(errors="replace").strip().splitlines()
        token = os.environ.get("HF_TOKEN", "").strip()
        said = lines[-1] if lines else "it said nothing"
        return one_line(f"its process ended with {code}: {said.replace(token, '***') if token else said}", 300)


def _event(line: bytes) -> Outcome:
    """What a line says; nothing if it is not the transfer's: its interpreter may print something at its start."""
    try:
        event = json.loads(line)
    except ValueError:
        return {}
    return event if isinstance(event, dict) else {}
