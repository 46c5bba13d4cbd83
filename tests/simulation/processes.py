"""Worker processes as the product's watchers see them: a number, an exit status to wait for, signals to the group."""

from __future__ import annotations

import signal
from collections.abc import Callable

from .threads import Event, Kernel, running


class Worker:
    """One rank's process, in place of a `subprocess.Popen`."""

    def __init__(self, pid: int, killed: Callable[[], None], ends: Callable[[], float], kernel: Kernel) -> None:
        """`killed`: its part in the training is over at once; `ends`: how many seconds it then takes to be gone."""
        self.pid = pid
        self.code: int | None = None
        self.reaped = False
        self._killed = killed
        self._ends = ends
        self._kernel = kernel
        self._over = Event()

    def end(self, code: int) -> None:
        """By itself, or because it was killed."""
        if self.code is None:
            self.code = code
            self._over.set()

    def signalled(self, signum: int) -> None:
        if self.code is None:
            self._killed()
            self._kernel.clock.after(self._ends(), self.end, -signum)

    def await_end(self) -> None:
        self._over.wait()

    def wait(self) -> int:
        self._over.wait()
        self.reaped = True
        assert self.code is not None
        return self.code


class Table:
    """All worker processes of a schedule, by number."""

    def __init__(self, kernel: Kernel) -> None:
        self._kernel = kernel
        self._workers: dict[int, Worker] = {}

    def start(self, killed: Callable[[], None], ends: Callable[[], float]) -> Worker:
        pid = 1000 + len(self._workers)
        worker = self._workers[pid] = Worker(pid, killed, ends, self._kernel)
        return worker

    def __getitem__(self, pid: int) -> Worker:
        return self._workers[pid]


def waitid(kind: int, pid: int, options: int) -> None:
    """`os.waitid` of a child, which is left unreaped."""
    worker = _table()[pid]
    if worker.reaped:
        raise ChildProcessError(10, "No child processes")
    worker.await_end()


def kill_group(pgid: int, signum: int = signal.SIGKILL) -> bool:
    """Of `dalsegno.agent.processes.proc`. A number that was reaped may be somebody else's by now."""
    worker = _table()[pgid]
    if worker.reaped:
        return False
    worker.signalled(signum)
    return True


def descendants(root: int) -> list[int]:
    """Of `dalsegno.agent.processes.proc`: virtual workers start nothing."""
    del root
    return []


def written_bytes(pid: int) -> int:
    """Of `dalsegno.agent.processes.signs`: none of them writes to a disk that is counted."""
    return 0


def start_time(pid: int) -> int | None:
    worker = _table()[pid]
    return None if worker.reaped else 1


def _table() -> Table:
    return running().processes
