"""Files made durable behind the back of who writes them: in batches or each by itself, and what a failing disk does."""

from __future__ import annotations

import errno
import os
import threading
from pathlib import Path

import pytest

from dalsegno.elastic.checkpoint import FileEntry
from dalsegno.elastic.checkpoint.durability import FileSystem
from dalsegno.elastic.universal import syncing
from dalsegno.elastic.universal.syncing import Syncing

FILES = 40


class Disk:
    """Counts what it is asked, and fails or waits where it is told to."""

    def __init__(self, patch: pytest.MonkeyPatch, *, telling: bool = True, others: int = 0) -> None:
        self.whole = self.single = 0
        self.error: OSError | None = None
        self.free = threading.Event()
        self.free.set()
        self.asked = threading.Event()
        plain = FileSystem.__init__

        def init(system: FileSystem, directory: Path) -> None:
            plain(system, directory)
            system.tells = telling

        def sync(system: FileSystem) -> None:
            self.whole += 1
            self._answer()

        def fsync(descriptor: int) -> None:
            os.fstat(descriptor)  # it is open
            self.single += 1
            self._answer()

        patch.setattr(FileSystem, "__init__", init)
        patch.setattr(FileSystem, "sync", sync)
        patch.setattr(os, "fsync", fsync)
        patch.setattr(syncing, "unwritten", lambda: others)
        patch.setattr(syncing, "LINGER_SECONDS", 0.01)

    def _answer(self) -> None:
        self.asked.set()
        assert self.free.wait(30)
        if self.error is not None:
            raise self.error


def hand_over(into: Syncing, directory: Path, name: str, size: int = 10) -> int:
    """A new file, written; its descriptor."""
    descriptor = os.open(directory / name, os.O_WRONLY | os.O_CREAT | os.O_EXCL)
    os.write(descriptor, bytes(size))
    into.add(descriptor, FileEntry(name, size, "0" * 32))
    return descriptor


def is_open(descriptor: int) -> bool:
    try:
        os.fstat(descriptor)
    except OSError:
        return False
    return True


@pytest.mark.parametrize(
    ("telling", "others", "at_once"),
    [(True, 0, True), (False, 0, False), (True, 1 << 40, False)],
    ids=["local", "network", "others write"],
)
def test_every_file_is_durable_before_it_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, telling: bool, others: int, at_once: bool
) -> None:
    """All at once on a disk of ours; file by file where that cannot be, or where we would wait for others' bytes."""
    disk = Disk(monkeypatch, telling=telling, others=others)
    told: list[tuple[str, int]] = []
    into = Syncing(tmp_path, FILES, lambda entry: told.append((entry.path, disk.whole + disk.single)))
    descriptors = [hand_over(into, tmp_path, f"{number}") for number in range(FILES)]
    assert into.close() is None
    assert sorted(name for name, _ in told) == sorted(f"{number}" for number in range(FILES))
    assert all(synced >= 1 for _, synced in told)
    assert (disk.single, 1 <= disk.whole <= FILES) == ((0, True) if at_once else (FILES, False))
    assert not any(map(is_open, descriptors))


def test_files_that_wait_for_their_batch_are_not_held_open(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """However many there are, and however slow the disk is."""
    disk = Disk(monkeypatch)
    disk.free.clear()
    into = Syncing(tmp_path, FILES, lambda entry: None)
    descriptors = [hand_over(into, tmp_path, f"{number}") for number in range(FILES)]
    assert not any(map(is_open, descriptors))
    disk.free.set()
    assert into.close() is None


@pytest.mark.parametrize("bound", ["BATCH_BYTES", "BATCH_FILES"])
def test_a_slow_disk_slows_the_writer_down(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, bound: str) -> None:
    """One batch is being written, the next one is full: whoever brings more waits until there is room."""
    disk = Disk(monkeypatch)
    monkeypatch.setattr(syncing, bound, 2 if bound == "BATCH_FILES" else 20)
    monkeypatch.setattr(syncing, "LINGER_SECONDS", 30.0)  # a batch goes when it is full, however slow this thread is
    disk.free.clear()
    into = Syncing(tmp_path, FILES, lambda entry: None)
    for number in range(2):
        hand_over(into, tmp_path, f"first-{number}")
    assert disk.asked.wait(30)
    for number in range(2):
        hand_over(into, tmp_path, f"second-{number}")
    more = threading.Thread(target=hand_over, args=(into, tmp_path, "more"))
    more.start()
    more.join(0.2)
    assert more.is_alive()
    disk.free.set()
    more.join(30)
    assert not more.is_alive()
    assert into.close() is None


@pytest.mark.parametrize("telling", [True, False], ids=["local", "network"])
def test_a_disk_that_fails_is_told_to_the_writer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, telling: bool
) -> None:
    """Nothing of what it lost counts as finished, although the kernel says it once only, and later syncs go well."""
    disk = Disk(monkeypatch, telling=telling)
    disk.error = OSError(errno.EIO, os.strerror(errno.EIO))
    told: list[str] = []
    into = Syncing(tmp_path, FILES, lambda entry: told.append(entry.path))
    hand_over(into, tmp_path, "lost")
    assert disk.asked.wait(30)
    with pytest.raises(OSError, match="Input/output"):  # noqa: PT012 (it may take the next ones before it has failed)
        for number in range(10_000):
            hand_over(into, tmp_path, f"later-{number}")
    disk.error = None
    assert not is_open(hand_over_and_fail(into, tmp_path))
    failed = into.close()
    assert isinstance(failed, OSError)
    assert failed.errno == errno.EIO
    # Where each has a sync of its own, those that were still to come may be well.
    assert "lost" not in told
    assert not (telling and told)


def hand_over_and_fail(into: Syncing, directory: Path) -> int:
    descriptor = os.open(directory / "after", os.O_WRONLY | os.O_CREAT)
    with pytest.raises(OSError, match="Input/output"):
        into.add(descriptor, FileEntry("after", 0, "0" * 32))
    return descriptor


@pytest.mark.parametrize("telling", [True, False], ids=["local", "network"])
def test_the_others_of_a_batch_are_noted_where_one_cannot_be(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, telling: bool
) -> None:
    """Each is durable: what the next lease finds in the journal it need not make again."""
    disk = Disk(monkeypatch, telling=telling)
    disk.free.clear()
    told: list[str] = []

    def durable(entry: FileEntry) -> None:
        if entry.path == "3":
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        told.append(entry.path)

    into = Syncing(tmp_path, FILES, durable)
    for number in range(6):
        hand_over(into, tmp_path, f"{number}")
    disk.free.set()
    failed = into.close()
    assert isinstance(failed, OSError)
    assert failed.errno == errno.ENOSPC
    assert set(told) == {"0", "1", "2", "4", "5"}
