"""Whether there is room for the next checkpoint: after each commit, and where a disk becomes full."""

from __future__ import annotations

import errno
import os
import queue
import threading
from collections import namedtuple
from collections.abc import Iterator
from pathlib import Path

import pytest

from dalsegno.agent.storage import room
from dalsegno.protos import control_pb2 as pb

MIB = 1 << 20
GIB = 1 << 30
Usage = namedtuple("Usage", "total used free")


@pytest.mark.parametrize(
    ("free", "next_bytes", "at_commit", "missing"),
    [
        (2 * GIB, GIB, True, 0),
        (GIB, GIB, True, GIB // 20 + 32 * MIB),
        (GIB // 2, GIB, False, 0),  # half of it may be written
        (16 * MIB, GIB, False, 0),
        (16 * MIB - 1, 100 * MIB, False, 121 * MIB + 1),
        (0, 0, True, 32 * MIB),
    ],
)
def test_what_is_missing(free: int, next_bytes: int, at_commit: bool, missing: int) -> None:
    """With what else is written beside it."""
    assert room.missing_bytes(free, next_bytes, at_commit) == missing


class Disk:
    """As large as a test says."""

    def __init__(self) -> None:
        self.free = 10 * GIB
        self.total = 20 * GIB

    def usage(self, directory: Path) -> Usage:
        if self.free < 0:
            raise OSError(5, "it is away")
        return Usage(self.total, 0, self.free)


@pytest.fixture
def disk(monkeypatch: pytest.MonkeyPatch) -> Disk:
    one = Disk()
    monkeypatch.setattr(room.shutil, "disk_usage", one.usage)
    monkeypatch.setattr(room, "LOOK_EVERY_SECONDS", 0.02)
    return one


Told = queue.Queue[int]


@pytest.fixture
def watch(disk: Disk) -> Iterator[tuple[room.RoomWatch, Told, threading.Lock]]:
    told: Told = queue.Queue()
    deletion = threading.Lock()
    one = room.RoomWatch(2, deletion, told.put)
    yield one, told, deletion
    one.close()


def head(digest: str, size: int = GIB) -> pb.Checkpoint:
    return pb.Checkpoint(ref=pb.CheckpointRef(name="step-1", digest=digest), bytes=size)


def nothing(told: Told) -> bool:
    try:
        told.get(timeout=0.3)
    except queue.Empty:
        return True
    return False


@pytest.mark.slow
def test_each_commit_is_looked_at_once(
    disk: Disk, watch: tuple[room.RoomWatch, Told, threading.Lock], tmp_path: Path
) -> None:
    """Two copies of it are needed. Afterwards less is free because the next one is being written."""
    one, told, _ = watch
    one.committed(tmp_path, head("a"))
    assert nothing(told)
    disk.free = GIB
    one.committed(tmp_path, head("a"))
    assert nothing(told)
    one.committed(tmp_path, head("b"))
    assert told.get(timeout=5) == GIB + 2 * GIB // 20 + 32 * MIB
    assert nothing(told)


def test_the_room_is_looked_at_once_there_is_some_for_a_thread(
    watch: tuple[room.RoomWatch, Told, threading.Lock], disk: Disk, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Who tells of a commit goes on, and so does the end of the agent."""

    def no_room(_: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    one, told, _ = watch
    disk.free = GIB
    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", no_room)
        one.committed(tmp_path, head("a"))
        room.give_back_spares(tmp_path)
    one.committed(tmp_path, head("a"))
    assert told.get(timeout=5) == GIB + 2 * GIB // 20 + 32 * MIB


@pytest.mark.slow
def test_a_disk_that_others_fill(
    disk: Disk, watch: tuple[room.RoomWatch, Told, threading.Lock], tmp_path: Path
) -> None:
    """It is told while it is full; one that does not answer tells nothing."""
    one, told, _ = watch
    one.committed(tmp_path, head("a"))
    assert nothing(told)
    disk.free = -1
    assert nothing(told)
    disk.free = 0
    assert told.get(timeout=5) == told.get(timeout=5) == 2 * GIB + 2 * GIB // 20 + 32 * MIB


def test_a_save_that_a_quota_refuses_is_told(
    disk: Disk, watch: tuple[room.RoomWatch, Told, threading.Lock], tmp_path: Path
) -> None:
    """No look sees a quota, nor inodes. Once for each failed save; a commit is over it."""
    one, told, _ = watch
    one.refused("[Errno 28] No space left on device")
    one.committed(tmp_path, head("a"))
    assert nothing(told)
    one.refused("rank 0: [Errno 122] Disk quota exceeded: 'model.pt'")
    assert told.get(timeout=5) == int(GIB * 0.95), "one copy lacks room, whoever else has one"
    one.refused("[Errno 13] Permission denied")
    assert nothing(told)


class Deletion:
    """Its lock, which tells when somebody is about to wait for it."""

    def __init__(self) -> None:
        self._lock, self.awaited = threading.Lock(), threading.Event()

    def __enter__(self) -> None:
        self._lock.acquire()

    def __exit__(self, *_: object) -> None:
        self._lock.release()

    def locked(self) -> bool:
        found = self._lock.locked()
        if found:
            self.awaited.set()
        return found


def test_what_was_refused_while_files_are_deleted_is_not_told(disk: Disk, tmp_path: Path) -> None:
    """One more would go, although what goes may be enough. The next save that fails tells that it was not."""
    told, deletion = Told(), Deletion()
    one = room.RoomWatch(2, deletion, told.put)  # type: ignore[arg-type]
    one.committed(tmp_path, head("a"))
    with deletion:
        assert deletion.awaited.wait(30)
        one.refused(os.strerror(errno.EDQUOT))
        assert nothing(told)
    assert nothing(told)
    one.refused(os.strerror(errno.EDQUOT))
    assert told.get(timeout=30)
    one.close()


def test_a_save_that_was_refused_while_files_are_deleted_is_told(disk: Disk, tmp_path: Path) -> None:
    """It comes again with the next `save_every` only, and would fail once more first."""
    told, deletion = Told(), Deletion()
    one = room.RoomWatch(1, deletion, told.put)  # type: ignore[arg-type]
    one.committed(tmp_path, head("a"))
    with deletion:
        assert deletion.awaited.wait(30)
        one.refused(os.strerror(errno.EDQUOT))
        assert nothing(told)
    assert told.get(timeout=30)
    one.close()


def test_spare_files_go_before_a_checkpoint(
    disk: Disk, watch: tuple[room.RoomWatch, Told, threading.Lock], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They may be what a quota counts. The next save that fails tells that they were not enough."""
    spares = [GIB]
    monkeypatch.setattr(room, "spare_bytes", lambda directory: sum(spares))
    monkeypatch.setattr(room, "clear_spares", lambda directory: spares.clear())
    one, told, _ = watch
    one.committed(tmp_path, head("a"))
    one.refused(os.strerror(errno.EDQUOT))
    assert nothing(told)
    assert spares == []
    one.refused(os.strerror(errno.EDQUOT))
    assert told.get(timeout=5)


def test_spare_files_that_ranks_have_given_back_go_before_a_checkpoint(
    disk: Disk, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They did so before each of them told that their save failed. The next save that fails had none any more."""
    monkeypatch.setattr(room, "LOOK_EVERY_SECONDS", 100.0)
    spares, told = [GIB], list[int]()
    monkeypatch.setattr(room, "spare_bytes", lambda directory: sum(spares))
    one = room.RoomWatch(1, threading.Lock(), told.append)
    one._look(tmp_path, head("a"), at_commit=False, refused=False)
    spares.clear()
    for refused in (False, True, True):
        one._look(tmp_path, head("a"), at_commit=False, refused=refused)
    assert told == []
    disk.free = 0
    one._look(tmp_path, head("a"), at_commit=False, refused=True)
    assert told.pop() > GIB, "the disk is full all the same"
    disk.free = 10 * GIB
    monkeypatch.setattr(room, "LOOK_EVERY_SECONDS", 0.0)
    one._look(tmp_path, head("a"), at_commit=False, refused=True)
    assert told == [int(GIB * 0.95)]


@pytest.mark.slow
def test_a_file_system_without_a_limit(
    disk: Disk, watch: tuple[room.RoomWatch, Told, threading.Lock], tmp_path: Path
) -> None:
    """It says that it has no size, and nothing free."""
    one, told, _ = watch
    disk.total = disk.free = 0
    one.committed(tmp_path, head("a"))
    assert nothing(told)


@pytest.mark.slow
def test_a_look_waits_for_a_deletion(
    disk: Disk, watch: tuple[room.RoomWatch, Told, threading.Lock], tmp_path: Path
) -> None:
    """What was free in its middle would make more go than need be."""
    one, told, deletion = watch
    with deletion:
        disk.free = 0
        one.committed(tmp_path, head("a"))
        assert nothing(told)
        disk.free = 10 * GIB
    assert nothing(told)


@pytest.mark.slow
def test_a_closed_watch_looks_no_more(
    disk: Disk, watch: tuple[room.RoomWatch, Told, threading.Lock], tmp_path: Path
) -> None:
    """Nor does it begin."""
    one, told, _ = watch
    one.close()
    disk.free = 0
    one.committed(tmp_path, head("a"))
    assert nothing(told)


def test_nothing_is_kept_for_later_saves_once_the_agent_ends(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A deletion that was under way then keeps nothing either."""
    kept = []
    monkeypatch.setattr(room.CheckpointStore, "prune", lambda self, names, *, replaced: kept.append(replaced) or {})
    monkeypatch.setattr(room, "clear_spares", kept.append)
    ends = threading.Event()
    assert room.prune_replaced(room.CheckpointStore(tmp_path), ["step-1.e1.1"], ends) == {}
    ends.set()
    assert room.prune_replaced(room.CheckpointStore(tmp_path), ["step-1.e1.1"], ends) == {}
    assert kept == [True, True, tmp_path]
