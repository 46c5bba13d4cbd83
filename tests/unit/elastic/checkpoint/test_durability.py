"""Many files made durable in one call: where, in what order, and what happens when the disk fails."""

from __future__ import annotations

import ctypes
import errno
import os
import shutil
import subprocess
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dalsegno.elastic.checkpoint import describe, durability, files, inspect, seal
from dalsegno.elastic.checkpoint.durability import (
    BYTES_PER_SYNC,
    FEWEST,
    MOST_OF_OTHERS_BYTES,
    TELLING,
    FileSystem,
    at_once,
    tells,
    unwritten,
)
from tests.support.checkpoints.disks import sync_as_if
from tests.support.checkpoints.power import Power, only_whole_checkpoints, sealed

from .test_checkpoint import manifest_for

MANY = 40
NAME = "step-4.e2.1"


@pytest.mark.parametrize(
    ("files", "others", "wanted"),
    [
        (1, 0, False),
        (FEWEST - 1, 0, False),
        (FEWEST, 0, True),
        (9600, MOST_OF_OTHERS_BYTES, True),
        (9600, MOST_OF_OTHERS_BYTES + 1, False),
        (100, 100 * BYTES_PER_SYNC, True),
        (100, 100 * BYTES_PER_SYNC + 1, False),
    ],
)
def test_few_files_and_busy_disks_are_synced_file_by_file(files: int, others: int, wanted: bool) -> None:
    assert at_once(files, others) == wanted


@given(st.integers(0, 10**6), st.integers(0, 10**12), st.integers(0, 10**6), st.integers(0, 10**12))
def test_more_files_or_fewer_others_never_speak_against_it(files: int, others: int, more: int, fewer: int) -> None:
    assert not at_once(files, others) or at_once(files + more, max(0, others - fewer))


@pytest.mark.parametrize("kind", [0x6969, 0x65735546, 0x794C7630, 0x0BD00BD0, 0x01021997, 0], ids=hex)
def test_network_file_systems_and_overlays_are_not_asked(kind: int) -> None:
    """NFS, FUSE, overlay, Lustre, 9P, and what is not known: the call may come back too early, or without the error."""
    assert not tells(kind, "6.18.0")


@pytest.mark.parametrize(
    ("release", "wanted"),
    [("5.7.19", False), ("5.8.0", True), ("4.18.0-553.el8", False), ("6.18.44-x", True), ("10.0", True), ("?", False)],
)
def test_kernels_that_keep_errors_to_themselves_are_not_asked(release: str, wanted: bool) -> None:
    assert all(tells(kind, release) == wanted for kind in TELLING)


def test_memory_is_a_file_system_that_tells() -> None:
    """Linux's own tmpfs, as the kernel of this machine names it."""
    if "tmpfs /dev/shm tmpfs" not in Path("/proc/mounts").read_text() or not tells(0x01021994, os.uname().release):
        pytest.skip("/dev/shm is no tmpfs here, or the kernel is too old")
    with FileSystem(Path("/dev/shm")) as system:
        assert system.tells
        system.sync()


def test_a_sandbox_that_forbids_the_call_is_not_asked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A filter of system calls answers that it is not permitted, or not there."""

    def forbid(descriptor: int) -> int:
        ctypes.set_errno(errno.EPERM)
        return -1

    monkeypatch.setattr(durability, "_syncfs", forbid)
    monkeypatch.setattr(durability, "tells", lambda kind, release: True)
    with FileSystem(tmp_path) as system:
        assert not system.tells


def test_what_waits_to_be_written_is_counted(tmp_path: Path) -> None:
    """Both of the kernel's numbers, and not its others of the same beginning."""
    told = tmp_path / "meminfo"
    told.write_text("Dirty:      10 kB\nWriteback:        5 kB\nWritebackTmp:     7 kB\n")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("dalsegno.elastic.checkpoint.durability._MEMINFO", told)
        assert unwritten() == 15 << 10
        told.unlink()
        assert unwritten() == 0


@pytest.mark.parametrize("directories", [2, MANY], ids=["few", "many"])
@pytest.mark.parametrize("telling", [True, False], ids=["local", "network"])
def test_a_power_cut_leaves_a_whole_checkpoint_or_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, directories: int, telling: bool
) -> None:
    """At any moment of a seal: its manifest is never there before the files and names that it lists."""
    sync_as_if(monkeypatch, telling)
    directory = tmp_path / NAME
    for number in range(directories):
        (directory / "zero" / f"{number}").mkdir(parents=True)
        (directory / "zero" / f"{number}" / "fp32.pt").write_bytes(os.urandom(100))
    power = Power(tmp_path, monkeypatch, only_whole_checkpoints)
    seal(directory, manifest_for(directory))
    assert sealed(power.image()) == [NAME], "once it is sealed, it is there"
    assert power.whole == (telling and directories == MANY)


@pytest.mark.parametrize("telling", [True, False], ids=["local", "network"])
def test_names_that_cannot_be_made_durable_are_not_sealed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, telling: bool
) -> None:
    """The one sync fails, or that of one of many directories: no manifest, and so no checkpoint."""
    sync_as_if(monkeypatch, telling)
    directory = tmp_path / NAME
    for number in range(MANY):
        (directory / f"{number}").mkdir(parents=True)
        (directory / f"{number}" / "a").write_bytes(b"1")
    manifest = manifest_for(directory)
    real = os.fsync

    def fail(what: object) -> None:
        if not isinstance(what, int) or os.readlink(f"/proc/self/fd/{what}") == str(directory / "7"):
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        real(what)

    monkeypatch.setattr(os, "fsync", fail)
    monkeypatch.setattr(FileSystem, "sync", fail)
    with pytest.raises(OSError, match="Input/output error"):
        seal(directory, manifest)
    assert [one.name for one in inspect(tmp_path).unsealed] == [NAME]


def test_files_are_summed_while_the_disk_takes_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither waits for the other, and both must be done."""
    for name in "abc":
        (tmp_path / name).write_bytes(name.encode() * 1000)
    summed, told = threading.Event(), threading.Lock()
    counts: list[int] = []

    def moved(count: int) -> None:
        with told:
            counts.append(count)
            if len(counts) == 3:
                summed.set()

    def slow(descriptor: int) -> None:
        assert summed.wait(30)

    monkeypatch.setattr(os, "fsync", slow)
    found = files.checksums(tmp_path, "cab", sync=True, moved=moved)
    assert found == files.checksums(tmp_path, "cab")
    assert counts == [1000] * 6


def test_a_file_that_cannot_be_made_durable_is_not_described(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Although it can be read back: from memory."""
    (tmp_path / "lost").write_bytes(b"1")

    def fail(descriptor: int) -> None:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    monkeypatch.setattr(os, "fsync", fail)
    with pytest.raises(OSError, match="Input/output error"):
        describe(tmp_path)


@dataclass
class Thin:
    """A file system on a disk that has promised more room than there is."""

    path: Path
    behind: Path

    def fill(self) -> None:
        """From here on nothing more reaches the disk; the kernel takes it all the same."""
        with open(self.behind / "filler", "wb", buffering=0) as file, pytest.raises(OSError, match="No space"):  # noqa: PT012
            while True:
                file.write(bytes(1 << 16))


@pytest.fixture
def thin(tmp_path: Path) -> Iterator[Thin]:
    """ext4 in a file without blocks, on a small tmpfs. Needs root, loop devices and mkfs.ext4."""
    behind, path = tmp_path / "behind", tmp_path / "thin"
    behind.mkdir()
    path.mkdir()
    made: list[Path] = []
    try:
        try:
            _run("mount", "-t", "tmpfs", "-o", "size=8m", "none", behind)
            made.append(behind)
            with open(behind / "disk", "wb") as file:
                file.truncate(16 << 20)
            _run("mkfs.ext4", "-q", "-E", "nodiscard,lazy_itable_init=0", behind / "disk")
            _run("mount", "-o", "loop", behind / "disk", path)
            made.append(path)
        except (OSError, subprocess.CalledProcessError) as error:
            pytest.skip(f"a disk cannot be made here: {error}")
        yield Thin(path, behind)
    finally:
        for mounted in reversed(made):
            _run("umount", "-l", mounted)


def _run(program: str, *arguments: object) -> None:
    if shutil.which(program) is None:
        raise FileNotFoundError(f"no {program}")
    subprocess.run([program, *map(str, arguments)], check=True, capture_output=True, timeout=60)


def test_a_real_disk_says_once_to_each_what_it_has_lost(thin: Thin) -> None:
    """And nothing to who comes later: that is why a file system is opened before anything is written."""
    with FileSystem(thin.path) as first, FileSystem(thin.path) as second:
        if not first.tells:
            pytest.skip("the kernel is too old")
        first.sync()
        thin.fill()
        (thin.path / "lost").write_bytes(os.urandom(2 << 20))
        with pytest.raises(OSError, match=f"{os.strerror(errno.EIO)}|{os.strerror(errno.ENOSPC)}"):
            first.sync()
        with pytest.raises(OSError, match=f"{os.strerror(errno.EIO)}|{os.strerror(errno.ENOSPC)}"):
            second.sync()
        with FileSystem(thin.path) as late:
            late.sync()


def test_what_a_real_disk_has_lost_is_not_sealed(thin: Thin) -> None:
    """The files were written without an error; making them durable says it."""
    directory = thin.path / NAME
    directory.mkdir()
    thin.fill()
    (directory / "weights").write_bytes(os.urandom(2 << 20))
    with pytest.raises(OSError):  # noqa: PT011 (which, is the kernel's affair)
        seal(directory, manifest_for(directory, files=describe(directory)))
    assert [one.name for one in inspect(thin.path).unsealed] == [NAME]
