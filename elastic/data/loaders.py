"""Keeps DataLoader processes alive when a notice is sent to the whole process group.

If one of them dies of SIGTERM, the step fails in which its parent was about to save. Torch has no hook for the start of
such a process, so its loop is replaced by one that begins with ours. If a version of torch has no such loop, nothing
changes. This works with fork, spawn and forkserver. The fork server would die of SIGTERM as well, so it is told which
module to import first.
"""

from __future__ import annotations

import contextlib
import importlib
import logging
import multiprocessing
import os
import signal
import subprocess
import threading
from collections.abc import Callable, Iterator, Sequence
from multiprocessing import forkserver
from typing import Any

from ..rank.notices import noticed

log = logging.getLogger(__name__)

_WORKER = "torch.utils.data._utils.worker"
_SERVER = "dalsegno.elastic.data.fork_server"
# Torch's own loop, if it has been replaced in this process.
_torchs: list[Callable[..., None]] = []


def shield_loaders() -> None:
    """Makes DataLoader processes that start from now on ignore notices: only their parent ends them."""
    worker = importlib.import_module(_WORKER)
    plain = getattr(worker, "_worker_loop", None)
    if plain is None:
        log.warning("this torch starts its DataLoader processes in another way: a signal to the group ends them")
    elif plain is not loop:
        _torchs[:] = [plain]
        worker._worker_loop = loop  # type: ignore[attr-defined]
    server = getattr(forkserver, "_forkserver", None)
    modules = getattr(server, "_preload_modules", None)
    if isinstance(modules, list) and _SERVER not in modules:
        multiprocessing.set_forkserver_preload([*modules, _SERVER])


def loop(*arguments: Any, **options: Any) -> None:
    """The loop of a DataLoader process: torch's, shielded from notices."""
    pass_over(noticed())
    plain = _torchs[0] if _torchs else importlib.import_module(_WORKER)._worker_loop
    plain(*arguments, **options)


def pass_over(signals: Sequence[signal.Signals]) -> None:
    """From now on these signals end this process only if its parent sent them, as ``terminate()`` does.

    They are blocked rather than ignored, because only a process that waits for a blocked signal learns who sent it.
    """
    signal.pthread_sigmask(signal.SIG_BLOCK, signals)
    parent = multiprocessing.parent_process()
    parents = {os.getppid(), parent.pid if parent is not None else os.getppid()}
    threading.Thread(target=_obey, args=(signals, parents), name="notices", daemon=True).start()
    plain = subprocess.Popen._execute_child  # type: ignore[attr-defined]

    def execute(self: Any, *arguments: Any, **options: Any) -> Any:
        # A program would inherit the mask for good, and could not be terminated.
        with _unblocked(signals):
            return plain(self, *arguments, **options)

    subprocess.Popen._execute_child = execute  # type: ignore[attr-defined]


def _obey(signals: Sequence[signal.Signals], parents: set[int]) -> None:
    while True:
        if signal.sigwaitinfo(signals).si_pid in parents:
            # As torch's own handler does.
            os._exit(0)


@contextlib.contextmanager
def _unblocked(signals: Sequence[signal.Signals]) -> Iterator[None]:
    before = signal.pthread_sigmask(signal.SIG_UNBLOCK, signals)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
