"""The logs of a pod: written on the machine's own disk, and copied to the volume beside it.

A trainer whose output goes to a file on the volume dies of its next line when that is full, or goes away.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import tempfile
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

from dalsegno.protos.options import UsageError
from dalsegno.protos.shortage import starting

__all__ = ("Logs",)

# Seconds between two copies, and those that the last one has.
_EVERY_SECONDS, _LAST_SECONDS = 3.0, 3.0
_CHUNK_BYTES = 1 << 20
_PREFIX = "dalsegno-relay-logs-"
# Pods whose logs stay on the volume as they are: a run may go through hundreds. See `architecture.md`, "Logs".
KEPT = 50
_OWN = ("agent.log", "agent.log.1", "output.log", "output.log.1", "standby.log", "conversion.log")


class Logs:
    """Copies all below `directory` until it is closed. What is lost with the machine is of the last seconds.

    Args:
        target: where to; made.
        say: takes lines for people.

    Attributes:
        directory: for the agent's `--log-dir`; it is removed in the end.

    Raises:
        UsageError: the machine's own disk says no.
        CannotStartError: there is no room for a thread.
    """

    def __init__(self, target: Path, say: Callable[[str], None]) -> None:
        try:
            self.directory = Path(tempfile.mkdtemp(prefix=_PREFIX))
        except OSError as error:
            raise UsageError(
                f"the logs have no place on this machine: {error.strerror or error}; make room for temporary files, or "
                "have TMPDIR name a directory that can be written"
            ) from error
        self._target, self._say = target, say
        self._over = threading.Event()
        self._failed = False
        self._thread = threading.Thread(target=self._run, name="logs", daemon=True)
        try:
            with starting("the thread that copies the logs"):
                self._thread.start()
        except BaseException:
            shutil.rmtree(self.directory, ignore_errors=True)
            raise

    def close(self) -> None:
        """Copies what is left. What the volume does not take, or not in time, stays on the machine."""
        self._over.set()
        self._thread.join(_LAST_SECONDS)
        if not self._failed and not self._thread.is_alive():
            shutil.rmtree(self.directory, ignore_errors=True)

    def _run(self) -> None:
        forgetting = forget_old(self._target, self._over)
        while not self._over.wait(_EVERY_SECONDS):
            self._copy_all()
            next(forgetting, None)  # one for each copy: on a slow volume nothing waits for all of them
        self._copy_all()

    def _copy_all(self) -> None:
        """A volume that is full now may have room at the next time."""
        try:
            for where, _, names in os.walk(self.directory):
                for path in (Path(where, name) for name in names):
                    if not _is_empty(path):
                        copy_news(path, self._place(path))
            self._failed = False
        except OSError as error:
            if not self._failed:
                self._say(f"warning: the logs cannot be copied to the volume: {error}; they are in {self.directory}")
            self._failed = True

    def _place(self, path: Path) -> Path:
        """Where a log is copied to: what is HOST-PID here has a random part there, which is this pod's alone.

        A pod may come again with the same host name, and in a container with the same process numbers, too.
        """
        first, *rest = path.relative_to(self.directory).parts
        own = self.directory.name.removeprefix(_PREFIX)
        return Path(self._target, f"{first}-{own}", *rest) if rest else self._target / first


def _is_empty(path: Path) -> bool:
    """Also what is gone: of old epochs the agent removes what stayed empty."""
    try:
        return path.stat().st_size == 0
    except FileNotFoundError:
        return True


def forget_old(target: Path, over: threading.Event) -> Iterator[None]:
    """Removes the agents' logs, and empty files, of all pods but the newest `KEPT`; what their trainers wrote stays.

    Args:
        target: with a directory for each pod. What cannot be read or removed stays.
        over: set when there is no time for more.

    Yields:
        Nothing, behind each pod.
    """
    pods: list[tuple[float, Path]] = []
    with contextlib.suppress(OSError):
        for path in target.iterdir():
            with contextlib.suppress(OSError):  # no agent's, or gone since
                pods.append(((path / _OWN[0]).stat().st_mtime, path))
    for _, pod in sorted(pods)[:-KEPT]:
        _forget(pod, over)
        yield


def _forget(pod: Path, over: threading.Event) -> None:
    for where, _, names in os.walk(pod, topdown=False):
        for path in (Path(where, name) for name in names):
            if over.is_set():
                return
            with contextlib.suppress(OSError):
                if _is_empty(path) or (path.parent == pod and path.name in _OWN):
                    path.unlink(missing_ok=True)
        with contextlib.suppress(OSError):  # something is left in it
            os.rmdir(where)


def copy_news(source: Path, target: Path) -> None:
    """Appends what `target` does not have yet; begins anew if `source` has become shorter.

    Raises:
        OSError: the file system says no.
    """
    target.parent.mkdir(parents=True, exist_ok=True)
    with open(source, "rb") as reader, open(target, "ab") as writer:
        done = writer.tell()
        if os.fstat(reader.fileno()).st_size < done:
            writer.truncate(0)
            done = 0
        reader.seek(done)
        while data := reader.read(_CHUNK_BYTES):
            writer.write(data)
            writer.flush()
