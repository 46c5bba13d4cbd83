"""Claims: what they say, how their counter moves, and what becomes of locks that cannot be had."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import os
import pwd
import shutil
import threading
from dataclasses import asdict, replace
from pathlib import Path
from types import SimpleNamespace

import pytest

from dalsegno.agent.control import claim, locks
from dalsegno.agent.control.claim import Claim, ClaimFile
from dalsegno.agent.control.machine import LocksUnavailable, Machine, ProcessPlace
from dalsegno.agent.control.spawning import make_token

HERE = ProcessPlace("host", "boot", "pid:[1]", "net:[1]")
CLAIM = Claim("host", "boot", 1, 2, 3, 9, "127.0.0.1:1", "pid:[1]", "net:[1]")
NO_LOCKS = [errno.ENOLCK, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOSYS]


def descriptors_below(directory: Path) -> list[str]:
    """What this process has open there. (What earlier tests left open may be closed at any time.)"""
    found = []
    for number in os.listdir("/proc/self/fd"):
        with contextlib.suppress(FileNotFoundError):
            found.append(os.readlink(f"/proc/self/fd/{number}"))
    return [path for path in found if path.startswith(str(directory))]


@pytest.mark.parametrize(
    ("place", "reached", "seen"),
    [
        (HERE, True, True),
        (replace(HERE, pid_ns="pid:[2]"), True, False),
        (replace(HERE, net_ns="net:[2]"), False, False),
        (replace(HERE, boot_id="other"), False, False),
        (replace(HERE, host="other"), False, False),
        # Nothing is known of the kernel's namespaces: the machine decides, as it did before they were told apart.
        (ProcessPlace("host", "boot"), True, True),
    ],
)
def test_what_can_be_told_of_a_master_from_where(place: ProcessPlace, reached: bool, seen: bool) -> None:
    """Its address counts in its network, its process number among its processes."""
    assert (CLAIM.is_reached_from(place), CLAIM.is_seen_from(place)) == (reached, seen)


@pytest.mark.parametrize(
    ("machine", "boot", "gone"),
    [("m", "after", True), ("m", "boot", False), ("other", "after", False), ("", "after", False)],
)
def test_a_master_ends_with_its_machines_boot(machine: str, boot: str, gone: bool) -> None:
    """Only the machine itself proves it: another one may have the same host name, and a container knows no machine."""
    claim = replace(CLAIM, machine=machine)
    for place in (replace(HERE, boot_id=boot, machine="m"), replace(HERE, boot_id=boot)):
        assert claim.ended_with_boot(place) == (gone and bool(place.machine))


def test_a_claim_of_an_older_version_is_read() -> None:
    """Without namespaces: it is its machine's."""
    old = {key: value for key, value in asdict(CLAIM).items() if not key.endswith("_ns")}
    claim = Claim.parse(json.dumps(old).encode())
    assert claim == replace(CLAIM, pid_ns="", net_ns="")
    assert claim.is_seen_from(HERE)


def test_a_claim_of_a_later_version_is_read() -> None:
    """What it says besides is passed over: taken for damaged, it would cost a living master its job."""
    assert Claim.parse(json.dumps({**asdict(CLAIM), "later": [1]}).encode()) == CLAIM


@pytest.mark.parametrize(
    "wrong",
    [
        *({"pid": "1"}, {"pid": -1}, {"pid": True}, {"pid": 1.0}, {"counter": 1 << 63}, {"address": None}, {"host": 1}),
        *({"host": "h\x1b[2J"}, {"boot_id": "h\n"}, {"address": "n" * 300}),
    ],
)
def test_what_is_no_claim_holds_nothing(tmp_path: Path, wrong: dict[str, object]) -> None:
    """A number of another kind would go on into signals and files."""
    (tmp_path / "claim.json").write_text(json.dumps({**asdict(CLAIM), **wrong}), encoding="utf-8")
    assert ClaimFile(tmp_path).read() is None


@pytest.mark.parametrize("text", [b"", b"\0" * 100, b"[1]", b"{}", b"[" * 100_000, b"\xff\xfe"])
def test_a_damaged_claim_holds_nothing(tmp_path: Path, text: bytes) -> None:
    """Whatever is in the file."""
    (tmp_path / "claim.json").write_bytes(text)
    assert ClaimFile(tmp_path).read() is None


def test_a_counter_moves_from_where_it_was_seen(tmp_path: Path) -> None:
    """Of two who saw the same one moves it; who saw another claim changes nothing."""
    file = ClaimFile(tmp_path)
    file.write(CLAIM, threading.Event())
    moved = replace(CLAIM, counter=10)
    assert [file.bump(CLAIM), file.bump(CLAIM), file.bump(replace(moved, pid=7))] == [moved, None, None]
    assert file.read() == moved


def test_a_copied_claim_is_another_directorys(tmp_path: Path) -> None:
    """Its master serves the directory that it was copied from. A path or a number alone may differ for one."""
    first, copy = tmp_path / "first", tmp_path / os.fsdecode(b"copy\xff\n")
    first.mkdir()
    file = ClaimFile(first)
    file.write(replace(CLAIM, **dict(zip(("directory", "inode"), file.place(), strict=True))), threading.Event())
    (tmp_path / "link").symlink_to(first)
    shutil.copytree(first, copy)
    for directory, copied in ((first, False), (tmp_path / "link", False), (copy, True)):
        read = ClaimFile(directory).read()
        assert read is not None
        assert ClaimFile(directory).is_copied(read) is copied
        # As another container, or a file system that numbers anew, sees the first one.
        assert not ClaimFile(directory).is_copied(replace(read, inode=ClaimFile(directory).place()[1]))
        assert not ClaimFile(directory).is_copied(replace(read, directory=ClaimFile(directory).place()[0]))
        assert not ClaimFile(directory).is_copied(CLAIM)
    placed = replace(CLAIM, **dict(zip(("directory", "inode"), ClaimFile(copy).place(), strict=True)))
    ClaimFile(copy).write(placed, threading.Event())
    assert ClaimFile(copy).read() == placed
    assert not ClaimFile(tmp_path / "gone").is_copied(placed)


def test_a_directory_is_no_copy_of_itself_where_mounts_number_their_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two FUSE mounts at two paths: each agent took the other's master for another directory's, and replaced it.

    One of them may see for a second what was there before the counter moved. A copy is one at once, while its claim is
    still the same, too; also one of hard links, once the original's has moved.
    """
    first, second, copy, linked = (tmp_path / name for name in ("first", "second", "copy", "linked"))
    first.mkdir()
    make_token(first)
    number = os.stat(first).st_ino
    claim = replace(CLAIM, directory=str(first), inode=str(number))
    ClaimFile(first).write(claim, threading.Event())
    second.symlink_to(first)
    shutil.copytree(first, copy)
    shutil.copytree(first, linked, copy_function=os.link)
    monkeypatch.setattr(ClaimFile, "place", lambda self: (str(self._directory), f"9{number}"))
    assert not ClaimFile(second).is_copied(claim)
    assert ClaimFile(copy).is_copied(claim)
    assert ClaimFile(first).bump(claim)
    assert ClaimFile(linked).is_copied(claim)
    assert ClaimFile(copy).is_copied(claim)
    read, late = ClaimFile.read, [claim] * 3

    def reads(self: ClaimFile) -> Claim | None:
        return late.pop() if self.path.parent == second and late else read(self)

    monkeypatch.setattr(ClaimFile, "read", reads)
    assert not ClaimFile(second).is_copied(claim)
    assert late == []
    (first / "token").unlink()
    assert ClaimFile(second).is_copied(claim)


def test_a_claim_that_cannot_be_written_names_one_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The same text with every attempt: people and logs are told once."""

    def refuse(path: object, *args: object, **named: object) -> None:
        raise OSError(errno.EDQUOT, os.strerror(errno.EDQUOT), str(path))

    monkeypatch.setattr(claim, "open", refuse, raising=False)
    said = set()
    for _ in range(2):
        with pytest.raises(OSError, match="quota") as failed:
            ClaimFile(tmp_path).write(CLAIM, threading.Event())
        said.add(str(failed.value))
    assert len(said) == 1
    assert str(tmp_path / "claim.json") in said.pop()


def test_what_failed_first_is_told_of_a_claim(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Not that the rest of it cannot be removed, on a mount that is away."""

    def fails(*_: object, **__: object) -> None:
        raise OSError(errno.ESTALE, os.strerror(errno.ESTALE))

    def full(*_: object) -> None:
        raise OSError(errno.EDQUOT, os.strerror(errno.EDQUOT))

    monkeypatch.setattr(os, "fsync", full)
    monkeypatch.setattr(Path, "unlink", fails)
    with pytest.raises(OSError, match="quota"):
        ClaimFile(tmp_path).write(CLAIM, threading.Event())


def holding(directory: Path, name: str) -> contextlib.AbstractContextManager[object]:
    """Another process's lock."""
    free = Machine().lock(directory / name)
    assert free is not None
    return contextlib.closing(SimpleNamespace(close=free))


def test_a_lock_that_another_holds_is_named_by_its_own_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever looks for its holder has to look at that file: nobody locks the claim itself."""
    file = ClaimFile(tmp_path)
    timeout = pytest.raises(locks.LockTimeout)
    with holding(tmp_path, "start.lock"), timeout as refused, file.starting(0.0, threading.Event()):
        pass
    assert str(refused.value) == f"{tmp_path / 'start.lock'} is locked by another process for more than 0 s"
    monkeypatch.setattr(claim, "_WRITE_TIMEOUT_SECONDS", 0.0)
    with holding(tmp_path, "claim.lock"), pytest.raises(locks.LockTimeout) as refused:
        file.write(CLAIM, threading.Event())
    assert str(refused.value).startswith(str(tmp_path / "claim.lock"))


def test_who_is_told_to_go_while_it_waits_has_not_waited_too_long(tmp_path: Path) -> None:
    """That would be said to people, of a lock that may have been held for a second."""
    closing = threading.Event()
    closing.set()
    file = ClaimFile(tmp_path)
    with holding(tmp_path, "start.lock"), pytest.raises(locks.LockGivenUp), file.starting(90.0, closing):
        pass
    with holding(tmp_path, "claim.lock"), pytest.raises(locks.LockGivenUp):
        file.write(CLAIM, closing)


@pytest.mark.parametrize("number", [*NO_LOCKS, errno.EIO])
def test_a_lock_that_cannot_be_had_leaks_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int) -> None:
    """On every path, however often it is tried; where the mount has no locks at all the line says what to do."""
    file, machine = ClaimFile(tmp_path), Machine()
    file.write(CLAIM, threading.Event())

    def refuse(fd: int, operation: int) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(fcntl, "flock", refuse)
    expected = LocksUnavailable if number in NO_LOCKS else OSError
    for _ in range(20):
        with pytest.raises(expected) as refused:
            machine.lock(tmp_path / "lock")
        with pytest.raises(expected):
            file.bump(CLAIM)
        with pytest.raises(expected), file.starting(1.0, threading.Event()):
            pass
    assert descriptors_below(tmp_path) == []
    if number in NO_LOCKS:
        assert "--master HOST:PORT" in str(refused.value)
        assert len(str(refused.value).splitlines()) == 1
    monkeypatch.undo()
    assert file.read() == CLAIM


def test_a_claim_that_is_not_for_this_user_is_told_with_what_it_means(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Somebody has given the job's own directory to another user in mid-run: "[Errno 13]" and the path were all."""
    directory = tmp_path / ".dalsegno" / "job"
    directory.mkdir(parents=True, mode=0o700)
    path = directory / "claim.json"
    forbidden = PermissionError(errno.EACCES, "Permission denied", str(path))
    path.touch(mode=0o600)
    here = pwd.getpwuid(os.geteuid()).pw_name
    meaning = "the job's master cannot be looked for, so this agent starts no other one if it ends; training goes on"
    mine = f"{meaning} meanwhile. {path} cannot be used (Permission denied): `chmod -R u+rwX {directory}`"
    assert claim.not_looked_for(directory, forbidden) == mine
    monkeypatch.setattr(os, "geteuid", lambda: 6001)
    assert claim.not_looked_for(directory, forbidden) == (
        f"{meaning} meanwhile. {path} belongs to user {here} (mode 600), and user 6001 cannot use it (Permission"
        " denied): let one user run all of a job, or give another --checkpoint-dir or --job-id. For this run, give"
        f" {directory} back to user 6001, with all in it"
    )
    assert claim.not_looked_for(directory, OSError(errno.EIO, "Input/output error")) == "[Errno 5] Input/output error"
    assert claim.not_looked_for(directory, ValueError("it is as it is")) == "it is as it is"
