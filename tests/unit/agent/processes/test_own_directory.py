"""Directories of processes that are gone: which are removed, and which must stay."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from dalsegno.agent.processes import own_directory
from dalsegno.agent.processes.mounts import file_system_of
from dalsegno.agent.processes.own_directory import claim, remove_leftovers

OWNER = """
import sys, tempfile
from pathlib import Path
from dalsegno.agent.processes.own_directory import claim
directory = Path(tempfile.mkdtemp(prefix="dalsegno-", dir=sys.argv[1]))
(directory / "folder").mkdir()
(directory / "folder" / "file").write_text("x")
descriptor = claim(directory)
print(directory, flush=True)
sys.stdin.read()
"""

Owner = tuple[Path, "subprocess.Popen[str]"]


@pytest.fixture
def owners(tmp_path: Path) -> Iterator[Callable[..., Owner]]:
    """Starts processes that each own a directory; what is put before their command line is given."""
    made: list[subprocess.Popen[str]] = []

    def make(*before: str) -> Owner:
        command = [*before, sys.executable, "-c", OWNER, str(tmp_path)]
        process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        made.append(process)
        assert process.stdout is not None
        return Path(process.stdout.readline().strip()), process

    yield make
    for process in made:
        process.kill()
        process.communicate(timeout=30)


def claimed(directory: Path) -> Path:
    """As a process that is gone has left it."""
    directory.mkdir(mode=0o700)
    descriptor = claim(directory)
    assert descriptor is not None
    os.close(descriptor)
    return directory


def test_what_a_killed_process_left_is_removed(tmp_path: Path, owners: Callable[..., Owner]) -> None:
    """The living keep theirs, whatever their process ids are; nothing else of that name is touched."""
    (gone, killed), (kept, _) = owners(), owners()
    assert remove_leftovers(tmp_path, "dalsegno-") == []
    killed.send_signal(signal.SIGKILL)
    killed.wait(30)
    other, unclaimed = claimed(tmp_path / "other-1234"), tmp_path / "dalsegno-job-1234"
    unclaimed.mkdir(mode=0o700)
    (tmp_path / "dalsegno-file").touch()
    assert remove_leftovers(tmp_path, "dalsegno-") == [gone]
    assert not gone.exists()
    assert (kept / "folder" / "file").exists()
    assert other.exists()
    assert unclaimed.exists()


def test_a_living_process_of_another_pid_namespace_keeps_its_own(tmp_path: Path, owners: Callable[..., Owner]) -> None:
    """Containers may share /tmp: their processes' numbers mean nothing here."""
    if os.geteuid() != 0 or not shutil.which("unshare"):
        pytest.skip("namespaces want root and unshare")
    kept, inside = owners("unshare", "--pid", "--fork", "--kill-child")
    if not kept.name:
        pytest.skip("no namespace of one's own can be made here")
    assert remove_leftovers(tmp_path, "dalsegno-") == []
    inside.kill()
    inside.wait(30)
    for _ in range(1000):
        if remove_leftovers(tmp_path, "dalsegno-"):
            break
        assert kept.exists()
    assert not kept.exists()


def test_what_others_could_have_put_there_is_left_alone(tmp_path: Path) -> None:
    """Links, directories of other users, and those that others may write to."""
    elsewhere = claimed(tmp_path / "elsewhere")
    (tmp_path / "dalsegno-link").symlink_to(elsewhere)
    claimed(tmp_path / "dalsegno-open").chmod(0o777)
    linked = tmp_path / "dalsegno-owner-is-a-link"
    linked.mkdir(mode=0o700)
    (linked / ".owner").symlink_to(elsewhere / ".owner")
    if os.geteuid() == 0:
        os.chown(claimed(tmp_path / "dalsegno-foreign"), 12345, 12345)
    before = sorted(tmp_path.rglob("*"))
    assert remove_leftovers(tmp_path, "dalsegno-") == []
    assert sorted(tmp_path.rglob("*")) == before
    inside = claimed(tmp_path / "dalsegno-with-a-link")
    (inside / "link").symlink_to(elsewhere)
    assert remove_leftovers(tmp_path, "dalsegno-") == [inside]
    assert (elsewhere / ".owner").exists()


@pytest.mark.parametrize("kind", ["nfs4", "fuse.sshfs", "virtiofs", ""])
def test_what_other_machines_may_have_open_is_left_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    """Their locks may not be seen here. A space in the path does not hide what it is mounted on."""
    place = tmp_path / "a place"
    place.mkdir()
    left = claimed(place / "dalsegno-1234")
    mounts = tmp_path / "mounts"
    monkeypatch.setattr("dalsegno.agent.processes.mounts._MOUNTS", mounts)
    if kind:
        escaped = str(place).replace(" ", "\\040")
        mounts.write_text(f"root / ext4 rw 0 0\nthere {escaped} {kind} rw 0 0\n")
        assert file_system_of(place) == kind
    assert remove_leftovers(place, "dalsegno-") == []
    mounts.write_text("root / ext4 rw 0 0\n")
    assert remove_leftovers(place, "dalsegno-") == [left]


def test_without_locks_nothing_is_removed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody can tell whether the owner lives."""

    def refuse(*_: object) -> None:
        raise OSError(37, "No locks available")

    monkeypatch.setattr(own_directory.fcntl, "flock", refuse)
    mine = tmp_path / "dalsegno-1234"
    mine.mkdir(mode=0o700)
    assert claim(mine) is None
    monkeypatch.undo()
    assert remove_leftovers(tmp_path, "dalsegno-") == []
    assert mine.exists()


@pytest.mark.parametrize("fails", ["rmtree", "unlink"])
def test_what_was_half_removed_is_found_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fails: str) -> None:
    """Whoever removed it may have been killed in the middle."""
    left = claimed(tmp_path / "dalsegno-1234")
    (left / "folder").mkdir()
    (left / "file").touch()

    def fail(*_: object) -> None:
        raise OSError(5, "Input/output error")

    target = own_directory.shutil if fails == "rmtree" else own_directory.os
    with monkeypatch.context() as patch:
        patch.setattr(target, fails, fail)
        assert remove_leftovers(tmp_path, "dalsegno-") == []
    assert remove_leftovers(tmp_path, "dalsegno-") == [left]
