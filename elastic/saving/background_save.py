"""A save that is written while the training goes on.

    def state() -> dict[str, object]:      # on every rank: what this rank writes, by path below the checkpoint
        return {"model.pt": {"model": model.state_dict(), "optimizer": optimizer.state_dict()}} if s.rank == 0 else {}

    for batch in s.steps(batches, save=background(state), save_every=100): ...

The training waits only while ``state`` is copied to host memory. (A copy from a card runs beside the training, and
still shows the state of this moment.) A thread of each rank writes this rank's files, then a file that lists them with
checksums. Rank 0's thread seals the checkpoint when the lists of all ranks are there. No thread takes part in a
collective: that a rank could not write is told with the steps' own exchange, and all main threads settle the result of
the save together, before the next save, a drain, or the end.
"""

from __future__ import annotations

import errno
import inspect
import json
import math
import os
import threading
import time
from collections.abc import Callable, Collection, Mapping
from contextlib import AbstractContextManager
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path, PurePosixPath
from typing import Any

from dalsegno.protos.collector import paused
from dalsegno.protos.shortage import shortage
from dalsegno.protos.trace import mark

from ..checkpoint import MANIFEST, CheckpointDamaged, FileEntry
from ..checkpoint.files import checksums
from ..rank import rng
from .content import Own
from .declared import HOW_LOADED
from .replicas import check_unsharded
from .saving_reports import Count
from .sealing import Sealing
from .sight import look_again
from .writing import Summed, SummedFile, save

PARTS = "parts"
# Seconds between two looks of rank 0 for the other ranks' files: at first, and at most.
FIRST_LOOK_SECONDS, LAST_LOOK_SECONDS = 0.02, 1.0
# Seconds that the other ranks have to write something more after the script has left its loop without a word.
LAST_WORDS_SECONDS = 30.0
# Seconds without another rank's list, once all ranks have said that theirs are written, after which the rest never come
# into sight: file systems remember a missing name for up to a minute.
OUT_OF_SIGHT_SECONDS = 60.0
STUCK = "the disk has not answered for {:.0f} s (as --stall-timeout allows)"


@dataclass(frozen=True)
class Background:
    """Marks the argument of ``save=`` as a state that is written in the background. Made by ``background``.

    Attributes:
        state: Returns this rank's files.
        owner: Whose files they are, if it says more of them: ``strategy``, ``engine``, and how they are loaded, as of
            a ``write`` that a session is given.
        copies: ``state`` is called with what makes copies, and with the checkpoint's directory, and returns copies: it
            may change afterwards what it has copied. What it writes there it deletes.
    """

    state: Callable[..., Mapping[str, Any]]
    owner: Any = None
    copies: bool = False
    # Not empty: the files of a script's own have been looked at.
    _looked: list[bool] = field(default_factory=list, init=False, repr=False, compare=False)

    def staged(self, copy: Callable[[Any], Any], path: Path) -> Mapping[str, Any]:
        """This rank's files for the checkpoint at ``path``, of which ``copy`` has made copies.

        Raises:
            ValueError: What a script's own state gives first has sharded tensors in it. Owners look by themselves.
        """
        # Thousands of tensors are as many new objects: to look through all took longer than the copies.
        with paused():
            return self._staged(copy, path)

    def _staged(self, copy: Callable[[Any], Any], path: Path) -> Mapping[str, Any]:
        if self.copies:
            return self.state(copy, path)
        given = self.state()
        if self.owner is None and not self._looked and isinstance(given, Mapping):
            for name, content in given.items():
                check_unsharded(content, str(name))
            self._looked.append(True)
        found: Mapping[str, Any] = copy(given)
        return found

    def __getattr__(self, name: str) -> Any:
        if name not in ("strategy", "engine", *HOW_LOADED):
            raise AttributeError(name)
        return getattr(self.owner, name)


def background(state: Any) -> Background:
    """For ``save=``: writes what ``state`` returns while the training goes on.

    Args:
        state: Called on every rank when a save is due. Returns this rank's files: a path below the checkpoint (with
            "/") and what ``torch.save`` is to write there; ``bytes`` are written as they are. No two ranks write the
            same path. Or what has such a method ``files``: ``elastic.deepspeed.save(engine)``.

    Raises:
        ValueError: It writes by itself, and says why.
    """
    if not hasattr(state, "files"):
        return Background(state)
    problem = getattr(state, "why_no_files", None)
    if problem is not None:
        raise ValueError(f"not in the background: {problem}")
    return Background(state.files, state)


def in_background(write: Callable[[Path], None] | Background) -> Callable[[Path], None] | Background:
    """The same save in the background, if that is possible; otherwise ``write`` itself.

    What a script writes by itself is not: whatever is called ``files`` beside that need not be what it writes.
    """
    owner: Any = getattr(write, "__self__", None)
    if inspect.ismethod(write) and write.__name__ == "write" and hasattr(owner, "files") and _is_ours(write.__func__):
        return Background(owner.files, owner)  # of a `TrainingState`
    if isinstance(write, Background) or not hasattr(write, "files") or getattr(write, "why_no_files", None):
        return write
    return background(write) if _is_ours(type(write)) else write


def _is_ours(code: Any) -> bool:
    return str(getattr(code, "__module__", "")).partition(".")[0] == __name__.partition(".")[0]


def part_name(rank: int) -> str:
    """Path, relative to the checkpoint, of the list of files that a rank wrote."""
    return f"{PARTS}/rank-{rank}.json"


def check_paths(files: Mapping[str, Any]) -> None:
    """Raises ValueError for a path that is not below the checkpoint, or is the session's own."""
    for path in files:
        pure = PurePosixPath(path)
        if not path or pure.is_absolute() or ".." in pure.parts or str(pure) != path or path == MANIFEST:
            raise ValueError(f"{path!r} is no path below a checkpoint")
        if pure.parts[0] in (PARTS, "rng"):
            raise ValueError(f"{path!r}: files below {pure.parts[0]}/ are the session's own, choose another name")


class Flight:
    """One rank's part of one save under way. The main thread calls all methods here, unless they say otherwise.

    Args:
        path: The checkpoint's directory, which exists.
        rank, world_size: Of the session.
        files: What this rank writes, copied already, or being copied.
        copied: Waits on the thread until it is.
        seal: Rank 0: called on its thread when all parts are there; returns the digest. None: it goes to memory. Then
            nothing is synced, and no rank says in a file what it wrote: others would not see that.
        done: The bytes that the thread has written.
        patience_seconds: Seconds without a byte after which this rank's part has failed; 0: never.
        reports: A context that is entered while the thread is at work.
        then: Called at the thread's end with what this rank has written, and why not.
        check_room: Raises OSError where files must not take more.
    """

    def __init__(
        self,
        path: Path,
        rank: int,
        world_size: int,
        files: Mapping[str, Any],
        copied: Callable[[], None],
        seal: Callable[[tuple[FileEntry, ...]], str] | None,
        done: Count,
        patience_seconds: float,
        reports: AbstractContextManager[None],
        then: Callable[[tuple[FileEntry, ...], BaseException | None], None] | None = None,
        check_room: Callable[[], None] = lambda: None,
    ) -> None:
        self._path, self._rank, self._world_size = path, rank, world_size
        self._files, self._copied = files, copied
        self._seal, self._done, self._patience, self._reports = seal, done, patience_seconds, reports
        self._written, self._over, self._cancelled = threading.Event(), threading.Event(), threading.Event()
        self._then, self._check_room = then, check_room
        self._error: BaseException | None = None
        self._stuck: TimeoutError | None = None
        self._digest = ""
        self._entries: tuple[FileEntry, ...] = ()
        self._may_begin = threading.Event()
        # When it was known that all ranks have written, in monotonic seconds.
        self._all_written = math.inf
        # Not a daemon: a script that ends while a save is under way waits for it.
        self._thread = threading.Thread(target=self._run, name="dalsegno-save")
        try:
            self._thread.start()
        except RuntimeError as error:  # no more threads are allowed: this save fails, and the next one may not
            self._end(OSError(errno.EAGAIN, shortage(error) or str(error)))
        # What packs thousands of tensors keeps the interpreter for a while: only now, or `start` would wait for that.
        self._may_begin.set()

    @property
    def failed(self) -> bool:
        """Whether this rank could not do its part."""
        return self._over.is_set() and self._error is not None

    def written(self) -> BaseException | None:
        """Waits until this rank's files are written. Returns the error if they could not be."""
        while not self._written.wait(LAST_LOOK_SECONDS):
            if 0 < self._patience <= self._done.still():
                self._stuck = TimeoutError(STUCK.format(self._patience))
                break
        return self._stuck or self._error

    @property
    def entries(self) -> tuple[FileEntry, ...]:
        """What this rank has written, once `written` says so."""
        return self._entries

    def sealed(self) -> tuple[str, BaseException | None]:
        """Waits until the thread has ended. Rank 0 gets the digest, or the error if it could not seal.

        Called once all ranks have said that their files are written: rank 0 then looks for their lists for a bounded
        time.
        """
        self._all_written = time.monotonic()
        self._join()
        return self._digest, self._error

    def wait(self, seconds: float) -> bool:
        """Whether the thread has ended within so many seconds."""
        return self._over.wait(seconds)

    def cancel(self) -> None:
        """Called if some rank failed: nothing is sealed any more. Waits for the thread unless the disk is stuck."""
        self._cancelled.set()
        if self._stuck is None:
            self._join()

    def _join(self) -> None:
        if self._thread.ident is not None:  # else it could not be started, and all is done
            self._thread.join()

    # The methods below run on the thread.

    def _run(self) -> None:
        try:
            self._may_begin.wait(LAST_LOOK_SECONDS)  # Whoever started this may have been interrupted.
            with self._reports, Summed(self._check_room):
                self._work()
        # The main thread must hear of every error, and through it the other ranks.
        except BaseException as error:
            self._end(error)
        else:
            self._end(None)

    def _end(self, error: BaseException | None) -> None:
        self._error, self._files = error, {}
        try:
            if self._then is not None:
                self._then(self._entries, error)
        finally:
            self._over.set()
            self._written.set()

    def _work(self) -> None:
        self._copied()
        entries = tuple(self._write(path, value) for path, value in self._files.items())
        if self._seal is None:
            self._entries = entries
            return
        own = json.dumps({"files": [asdict(entry) for entry in entries]}, sort_keys=True).encode() + b"\n"
        self._write(part_name(self._rank), own)
        mark("synced")
        self._written.set()
        found = self._gather_parts() if self._rank == 0 else None
        if found is not None:
            seal = partial(self._seal, found)
            self._digest = look_again(seal, lambda error: isinstance(error, CheckpointDamaged), self._cancelled)

    def _write(self, path: str, value: Any) -> FileEntry:
        if isinstance(value, rng.Taken):
            value = rng.encoded(value)  # here, because that takes a hundred times as long as to take them
        target = self._path / path
        target.parent.mkdir(parents=True, exist_ok=True)
        with SummedFile(target, self._done.add) as file:
            save(value, file)
            return FileEntry(path, file.size, file.finish(lasting=self._seal is not None))

    @property
    def _sight_seconds(self) -> float:
        return min(OUT_OF_SIGHT_SECONDS, self._patience or math.inf)

    def _gather_parts(self) -> tuple[FileEntry, ...] | None:
        """Entries of every rank's files, once all ranks have listed theirs; None if some rank never will.

        Raises:
            TimeoutError: All have, as they say, and some list does not come into sight here.
        """
        found: dict[int, list[FileEntry]] = {}
        pause, changed = FIRST_LOOK_SECONDS, time.monotonic()
        while True:
            # One look for all ranks, of which there may be thousands.
            names = _listed(self._path / PARTS)
            for rank in range(self._world_size):
                path = self._path / part_name(rank)
                if rank in found or path.name not in names:
                    continue
                if self._cancelled.is_set():
                    return None
                part = _read_part(path)
                if part is not None:
                    found[rank] = [*part, *checksums(self._path, [part_name(rank)], sync=True)]
                    changed = time.monotonic()
            if len(found) == self._world_size:
                entries = [entry for part in found.values() for entry in part]
                return tuple(sorted(entries, key=lambda entry: entry.path))
            if time.monotonic() - max(changed, self._all_written) > self._sight_seconds:
                raise TimeoutError(_out_of_sight(set(range(self._world_size)) - set(found), self._sight_seconds))
            gone = not threading.main_thread().is_alive() and time.monotonic() - changed > LAST_WORDS_SECONDS
            # No event tells when another machine makes a file over NFS.
            if gone or self._cancelled.wait(pause):
                return None
            pause = min(2 * pause, LAST_LOOK_SECONDS)


@dataclass
class UnderWay:
    """A save in the background, as this rank knows it.

    Attributes:
        sealing: In memory: seals it on a thread of its own; None: it is sealed as it is settled.
    """

    own: Own
    drain: bool
    flight: Flight
    began: float
    sealing: Sealing | None = None

    @property
    def over(self) -> bool:
        """This rank's threads have ended."""
        return self.flight.wait(0.0) and (self.sealing is None or self.sealing.over.is_set())

    @property
    def failed(self) -> bool:
        """This rank could not do its part."""
        return self.flight.failed or (self.sealing is not None and self.sealing.failed)

    def cancel(self) -> None:
        """Nobody waits for it any more: its peers may be gone, and never say that they have written theirs."""
        if self.sealing is not None:
            self.sealing.stop()
        self.flight.cancel()


def _out_of_sight(ranks: Collection[int], seconds: float) -> str:
    first, more = min(ranks), f", nor the lists of {len(ranks) - 1} more" if len(ranks) > 1 else ""
    return (
        f"rank {first} has written its files, and rank 0 has not seen {part_name(first)} within {seconds:g} s{more}:"
        " all ranks must see one checkpoint directory, so look whether its mount is gone from a node"
    )


def _listed(parts: Path) -> frozenset[str]:
    """The lists that are there. Opening their directory makes NFS look again if it remembers that there was none."""
    try:
        return frozenset(os.listdir(parts))
    except FileNotFoundError:
        return frozenset()


def _read_part(path: Path) -> list[FileEntry] | None:
    """The list of files that a rank wrote; None while the list is not complete."""
    try:
        data = path.read_bytes()
    except FileNotFoundError:
        return None
    if not data.endswith(b"\n"):
        return None
    return [FileEntry(**entry) for entry in json.loads(data)["files"]]
