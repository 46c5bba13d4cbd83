"""Which checkpoint is the best one, while better ones may still be on their way from memory to the disk.

What is the best must outlive the memory of nodes. A checkpoint that goes to memory, and that the agents bring to the
disk, is a *candidate* until it is sealed there. Until then manifests name the best one on the disk as ``best``, and the
candidate beside it. If the candidate is lost with its nodes, the run has the best of before, which was never deleted.

Rank 0 looks at the disk and decides; what it decided reaches all ranks with the next save.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterable

from ..checkpoint import Best, CheckpointDamaged, CheckpointName, CheckpointStore, Manifest, Tracked

log = logging.getLogger(__name__)


class Sight:
    """Looks for checkpoints on the disk, on a thread: nobody waits for a disk that hangs. Thread-safe.

    Args:
        store: Of the run's directory.
    """

    def __init__(self, store: CheckpointStore) -> None:
        self._store = store
        self._lock = threading.Lock()
        self._found: set[str] = set()
        self._wanted: tuple[str, ...] = ()
        self._busy = False

    def found(self, name: str) -> bool:
        """Whether an earlier look has found it sealed."""
        with self._lock:
            return name in self._found

    def look(self, names: Iterable[str]) -> None:
        """Begins to look for these; returns at once."""
        with self._lock:
            self._wanted = tuple(name for name in names if name not in self._found)
            if self._busy or not self._wanted:
                return
            self._busy = True
        thread = threading.Thread(target=self._look, name="dalsegno-sight", daemon=True)
        try:
            thread.start()
        except RuntimeError as error:  # No more threads, or the interpreter ends.
            log.debug("nobody looks for the best checkpoint on the disk: %s", error)
            with self._lock:
                self._busy = False

    def _look(self) -> None:
        while True:
            with self._lock:
                names, self._wanted = self._wanted, ()
                if not names:
                    self._busy = False
                    return
            for name in names:
                if self._is_sealed(name):
                    with self._lock:
                        self._found.add(name)

    def _is_sealed(self, name: str) -> bool:
        try:
            return Manifest.read(self._store.path(name)).name == name
        except (CheckpointDamaged, OSError) as error:
            log.debug("%s is not on the disk: %s", name, error)
            return False


class Bests:
    """The best checkpoint of a session. Alike on all ranks: all note the same saves.

    Args:
        sight: Of the disk.
        best: The best checkpoint as of the resume point.
        candidate: Its candidate. It counts once it is found on the disk; nobody is held up by one that may be lost.
        in_memory: The resume point, in memory: if it is the best one itself, the agents bring it to the disk.

    Attributes:
        best: As of the last save. It is on the disk, or what the run goes on from.
        tracked: What makes one the best; None: the best of before stays it.
    """

    def __init__(self, sight: Sight, best: Best | None, candidate: Best | None = None, in_memory: str = "") -> None:
        self._sight = sight
        self.best = best
        self.tracked: Tracked | None = None
        # Saved in memory by this session, for the agents to bring to the disk.
        self._coming: dict[str, Best] = {}
        self._resumed = candidate
        self._in_memory = in_memory
        self.look()

    def awaited(self, step: int) -> str:
        """The best one, if that is of another step, and was not on the disk when it was saved: its name; else "".

        What `standing` says, without those of this step, which are saved again.
        """
        standing = self._standing(but=step)
        known = standing is not None and (standing.name in self._coming or standing.name == self._in_memory)
        return standing.name if standing is not None and known else ""

    def look(self, *more: str) -> None:
        """Begins to look whether candidates, and `more`, are on the disk by now."""
        names = [*(one.name for one in self._candidates()), *more]
        self._sight.look([*names, self._in_memory] if self._in_memory else names)

    def is_on_disk(self, name: str) -> bool:
        """Whether a look has found it there, sealed."""
        return self._sight.found(name)

    def improves(self, value: float | None, under_way: Best | None) -> bool:
        """Whether a checkpoint with this value would be the best so far. On rank 0.

        Args:
            value: Of the metric.
            under_way: The best one as of a save that is not settled.
        """
        return self.tracked is not None and self.tracked.improves(value, under_way or self._standing())

    def as_of(self, name: str, metric: float | None) -> tuple[Best | None, Best | None]:
        """The best checkpoint as of one with that name and metric, and the candidate. On rank 0."""
        self.look()
        tracked, step = self.tracked, CheckpointName.parse(name).step
        best = self.best
        if tracked is not None and metric is not None and tracked.improves(metric, self._standing(but=step)):
            best = Best(name, tracked.metric, tracked.mode, metric)
        else:
            for one in filter(lambda one: self._sight.found(one.name), self._candidates()):
                best = one if one.beats(best) else best
        again = step if best is not None and best.name == name else None
        return best, self._strongest(best, again)

    def note(self, name: str, best: Best | None, *, awaits_disk: bool) -> None:
        """A checkpoint is sealed. ``awaits_disk``: in memory, and the agents bring it to the disk."""
        if best is not None and best.name == name and awaits_disk:
            self._coming[name] = best
            return
        self.best = best
        self._coming = {one.name: one for one in self._coming.values() if one.beats(best)}
        if self._resumed is not None and not self._resumed.beats(best):
            self._resumed = None

    def credit(self, name: str, value: float) -> Best:
        """Makes a checkpoint that exists the best so far, as all ranks have agreed."""
        assert self.tracked is not None
        self.note("", Best(name, self.tracked.metric, self.tracked.mode, value), awaits_disk=False)
        assert self.best is not None
        return self.best

    def strongest(self) -> Best | None:
        """The candidate as of now."""
        return self._strongest(self.best)

    def _strongest(self, best: Best | None, but: int | None = None) -> Best | None:
        found = None
        for one in self._candidates():
            if one.beats(found or best) and CheckpointName.parse(one.name).step != but:
                found = one
        return found

    def standing(self) -> Best | None:
        """What a better one has to beat: the best, or a candidate of this session."""
        return self._standing()

    def _standing(self, but: int | None = None) -> Best | None:
        """As `standing`, without candidates of one step, which may be saved again."""
        standing = self.best
        for one in self._coming.values():
            if CheckpointName.parse(one.name).step != but and one.beats(standing):
                standing = one
        return standing

    def _candidates(self) -> list[Best]:
        return [*self._coming.values(), *([] if self._resumed is None else [self._resumed])]


def writes_when_new(write: Callable[[Best | None], None]) -> Callable[[Best | None], None]:
    """``write``, left out where it would write what it wrote last."""
    last: list[Best | None] = []

    def written(best: Best | None) -> None:
        if last[-1:] != [best]:
            last[:] = [best]
            write(best)

    return written
