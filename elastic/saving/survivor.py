"""A memory checkpoint by one rank: of a replicated state each rank has all of it.

A rank that has lost its peers cannot ask them anything. So it writes the whole checkpoint into its own node's memory,
in a directory that no other node uses, and says of all other nodes' parts that there is nothing in them.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from dalsegno.protos import worker_pb2
from dalsegno.protos.contract import FIRST_OF_SURVIVORS

from ..checkpoint import CheckpointName, CheckpointStore, FileEntry, Manifest, Ref
from ..checkpoint.errors import is_full
from ..checkpoint.files import write_exclusive
from ..checkpoint.layout import MANIFEST
from ..checkpoint.parts import delete_parts, part_path, write_part
from ..rank import rng
from ..rank.identity import Identity
from ..rank.link import Link
from ..rank.reports import Reports
from .content import Content
from .saving_reports import bytes_below
from .staging import pinned_bytes, storage_sizes
from .tiers import Memory
from .writing import Summed, SummedFile, save

# Seconds in which room may come, as what a save leaves that broke off goes. Then nobody waits for this rank any more.
NO_ROOM_SECONDS = 1.0


class Survivor:
    """What one session saves by itself after its world has broken.

    Args:
        identity: Who saves.
        link: The agent, which is told.
        resumed_from: The resume point of this epoch.
        reports: Tell the agent that this rank may do so.

    Attributes:
        peer_lost: Called when this rank ends because a peer is gone, and with whether its process stays. Returns what
            it holds, in the words of a world that resumes from it; None: that is not known.
        loop_stays: The loop takes a ``Stays``, behind a step.
        anywhere: At this moment also inside of one, wherever its body is.
    """

    def __init__(self, identity: Identity, link: Link | None, resumed_from: Ref | None, reports: Reports) -> None:
        self._identity, self._link, self._resumed_from = identity, link, resumed_from
        self._reports = reports
        self.peer_lost: Callable[[bool], Mapping[str, str] | None] = _nothing
        self.loop_stays = self.anywhere = False
        # Bytes that a try had as its room was at an end, since when it has none, and the agent knows that.
        self._had, self._without_room, self._gave_up = 0, 0.0, False

    @property
    def may_stay(self) -> bool:
        """Whether there is somebody who gives this process a place in the next world."""
        return self._link is not None and self._link.may_stay

    @property
    def is_busy(self) -> bool:
        """The agent is being told something just now, perhaps by the thread that asks."""
        return self._link is not None and self._link.is_sending

    def when_broken(self, lost: Callable[[bool], Mapping[str, str] | None], told: Callable[[], None]) -> None:
        """Calls ``lost`` when this rank ends because a peer is gone, and ``told``, on any thread, as the agent says."""
        self.peer_lost = lost
        if self._link is not None:
            self._link.when_told_to_keep(told)

    def may_keep(self, may: bool) -> None:
        """Tells the agent, with each progress, whether this rank may be able to save by itself."""
        self._reports.may_keep = may

    def name_of(self, step: int) -> str:
        """What is saved of a step; all ranks of a node have the same name for it."""
        return str(CheckpointName(step, self._identity.epoch, FIRST_OF_SURVIVORS + self._identity.group_rank))

    def save(
        self,
        content: Content,
        files: Mapping[str, Any],
        generators: bytes,
        *,
        stays: bool = False,
        fetch: Callable[[Any], Any] | None = None,
    ) -> Manifest | None:
        """Writes and seals it, and tells the agent. None: another rank of this node has done it.

        Blocks while another rank of this node is at it, which may end before it is done.

        Args:
            content: What is saved.
            files: As rank 0 would write them, see ``background``.
            generators: This rank's, as of that step.
            stays: This process then leaves its world, and waits for a place in the next one.
            fetch: Copies what one file has to the host's memory. None: it is there.

        Raises:
            OSError: There is no room, of --memory-budget or of the machine's or container's memory either.
        """
        try:
            return self._save(content, {**files, rng.file_name(self._identity.rank): generators}, stays, fetch)
        except OSError as error:
            if is_full(error):
                self._has_no_room(content.step)
            raise

    def _save(
        self, content: Content, files: Mapping[str, Any], stays: bool, fetch: Callable[[Any], Any] | None
    ) -> Manifest | None:
        identity, link, began = self._identity, self._link, time.monotonic()
        assert identity.memory_dir is not None
        assert link is not None
        # This process has written none of which it would know how much room that takes.
        tier = Memory(CheckpointStore(identity.memory_dir), identity, alone=True)
        path = tier.store.path(self.name_of(content.step))
        takes = (self._had, 0) if fetch is None else _takes(files)
        if self._without_room and not self._is_whole(path):
            # It is called again and again. Where others have given nothing back it would write as much once more.
            tier.check_takes(*takes)
        if stays or not self._is_whole(path):
            link.send(worker_pb2.ToAgent(keeping=worker_pb2.Keeping(step=content.step, stays=stays)))
        with _alone_in(path):
            if self._is_whole(path):
                return None
            try:
                _empty(path)  # What a rank has left there that was killed.
                tier.look()
                tier.enter(path.name, create=False)
                if fetch is not None:
                    # Behind the word to the agent, which waits for that, and by one rank of a node at a time.
                    tier.check_takes(*takes)
                with Summed(tier.check_room):
                    manifest = self._write(path, content, files, fetch or _as_it_is)
            except BaseException as error:
                if is_full(error):
                    self._had = bytes_below(path)
                with contextlib.suppress(OSError):
                    _empty(path)
                    path.rmdir()
                raise
        sealed = worker_pb2.Sealed(name=manifest.name, digest=manifest.digest, step=content.step, in_memory=True)
        sealed.seconds = time.monotonic() - began
        link.send(worker_pb2.ToAgent(sealed=sealed))
        return manifest

    def _has_no_room(self, step: int) -> None:
        self._without_room = self._without_room or time.monotonic()
        if not self._gave_up and time.monotonic() - self._without_room >= NO_ROOM_SECONDS:
            self._gave_up = True
            self._reports.keeps_nothing(step)

    def _is_whole(self, path: Path) -> bool:
        return part_path(path, self._identity.group_rank).exists()

    def _write(self, path: Path, content: Content, files: Mapping[str, Any], fetch: Callable[[Any], Any]) -> Manifest:
        identity, entries = self._identity, list[FileEntry]()
        for file, value in sorted(files.items()):
            target = path / file
            target.parent.mkdir(parents=True, exist_ok=True)
            with SummedFile(target) as summed:
                save(fetch(value), summed)
                digest = summed.finish(lasting=False)
            entries.append(FileEntry(file, summed.size, digest))
        manifest = content.manifest(path.name, identity, self._resumed_from, tuple(entries))
        write_exclusive(path / MANIFEST, manifest.to_bytes(), lasting=False)
        for other in range(identity.nodes):
            if other != identity.group_rank:
                write_part(path, other, ())
        # Last: the agent looks for it.
        write_part(path, identity.group_rank, [entry.path for entry in entries])
        return manifest


@contextlib.contextmanager
def _alone_in(path: Path) -> Iterator[None]:
    """Makes a directory, in which no other rank writes within this. A rank that is killed is out of it, too."""
    while True:
        path.mkdir(exist_ok=True)
        with contextlib.ExitStack() as opened:
            try:
                directory = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
                opened.callback(os.close, directory)
                fcntl.flock(directory, fcntl.LOCK_EX)
                same = os.path.samestat(os.fstat(directory), path.stat())
            except FileNotFoundError:
                continue  # Whoever was at it could not do it, and has deleted the directory.
            if same:
                yield
                return


def _takes(files: Mapping[str, Any]) -> tuple[int, int]:
    """Bytes that these take once they are written, and those that copies take beside, of one file at a time."""
    written, copied = 0, Counter[int]()
    for content in files.values():
        sizes = storage_sizes(content)
        written += sum(sizes)
        # What a copy gives back torch keeps for the next one of the same size.
        copied |= Counter(map(pinned_bytes, sizes))
    return written, sum(size * count for size, count in copied.items())


def _as_it_is(content: Any) -> Any:
    """What lies in the host's memory already."""
    return content


def _empty(path: Path) -> None:
    delete_parts(path)
    for entry in path.iterdir():
        if entry.is_dir():
            shutil.rmtree(entry)
        else:
            entry.unlink()


def _nothing(stays: bool) -> None:
    """Where no loop can save by itself."""
