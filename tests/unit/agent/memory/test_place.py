"""Where memory checkpoints lie: whose directory is believed, and what of dead agents is removed."""

from __future__ import annotations

import fcntl
import os
import shutil
from pathlib import Path
from typing import Any

import pytest

from dalsegno.agent.memory import place
from dalsegno.agent.memory.place import MemoryPlace, NoMemoryError, default_root, remove_leftovers


def test_an_agent_has_a_directory_of_its_own_that_goes_with_it(tmp_path: Path) -> None:
    """Closed to all others; another agent of the job has another one, and neither removes the other's."""
    root = tmp_path / "root"
    one, two = MemoryPlace(root, "job"), MemoryPlace(root, "job")
    assert one.path != two.path
    assert one.path.parent == two.path.parent == root / "job"
    assert [path.stat().st_mode & 0o777 for path in (root, one.path)] == [0o700, 0o700]
    (one.path / "run").mkdir()
    one.close()
    assert os.listdir(root / "job") == [two.path.name]
    two.close()
    assert os.listdir(root) == []
    two.close()


def test_what_a_dead_agent_left_is_removed(tmp_path: Path) -> None:
    """By the next agent of any job, and on demand; the living keep theirs."""
    root = tmp_path / "root"
    left = root / "other" / "0123"
    alive = MemoryPlace(root, "job")
    (left / "run").mkdir(parents=True)
    (left / "run" / "file").write_bytes(b"12345")
    assert [(one.path, one.size) for one in remove_leftovers(root)] == [(left, 5)]
    assert os.listdir(root) == ["job"]
    left.mkdir(parents=True)
    MemoryPlace(root, "third").close()
    assert sorted(os.listdir(root)) == ["job"]
    assert alive.path.is_dir()
    alive.close()
    assert remove_leftovers(tmp_path / "nothing") == []


@pytest.mark.parametrize("opened", [False, True])
def test_a_directory_that_is_swept_while_it_is_made_is_made_anew(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, opened: bool
) -> None:
    """Between its making and its lock another agent may have taken it for left behind, also once it was opened."""
    root, swept = tmp_path / "root", []
    original = fcntl.flock if opened else place.lock_of

    def sweeping(*arguments: Any) -> Any:
        if not swept:
            (path,) = (root / "job").iterdir()
            path.rmdir()
            swept.append(path)
        return original(*arguments)

    monkeypatch.setattr(*((fcntl, "flock") if opened else (place, "lock_of")), sweeping)
    mine = MemoryPlace(root, "job")
    assert mine.path.is_dir()
    assert mine.path not in swept
    assert remove_leftovers(root) == []
    mine.close()


def _link(root: Path) -> None:
    (root.parent / "elsewhere").mkdir(mode=0o700)
    root.symlink_to(root.parent / "elsewhere")


def _foreign(root: Path) -> None:
    root.mkdir(mode=0o700)
    os.chown(root, 12345, 12345)


def _open(root: Path) -> None:
    root.mkdir()
    root.chmod(0o770)


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (_link, "is a link or a file: delete it"),
        pytest.param(
            _foreign,
            "belongs to user 12345",
            marks=pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a directory away"),
        ),
        (_open, "chmod 700"),
        (lambda root: root.write_bytes(b""), "cannot be made|is a link or a file"),
    ],
    ids=["link", "foreign", "open", "file"],
)
def test_somebody_elses_root_is_not_used(tmp_path: Path, make: object, said: str) -> None:
    """Anybody may make it first: in /dev/shm everybody may write. Nothing is removed there either."""
    root = tmp_path / "root"
    make(root)  # type: ignore[operator]
    with pytest.raises(NoMemoryError, match=said):
        MemoryPlace(root, "job")
    with pytest.raises(NoMemoryError):
        remove_leftovers(root)


def test_links_below_the_root_are_not_followed(tmp_path: Path) -> None:
    """What they lead to stays."""
    precious = tmp_path / "precious" / "0123"
    precious.mkdir(parents=True)
    root = tmp_path / "root"
    (root / "job").mkdir(parents=True)
    root.chmod(0o700)
    (root / "link").symlink_to(precious.parent)
    (root / "job" / "link").symlink_to(precious)
    assert remove_leftovers(root) == []
    assert precious.is_dir()


@pytest.mark.parametrize("kind", ["file", "link", "link to nothing"])
def test_what_is_in_the_jobs_place_is_named(tmp_path: Path, kind: str) -> None:
    """Parts would lie elsewhere, perhaps on a disk, and other nodes refuse what lies behind a link."""
    root = tmp_path / "root"
    root.mkdir(mode=0o700)
    if kind == "file":
        (root / "job").touch()
    else:
        (root / "job").symlink_to(tmp_path if kind == "link" else tmp_path / "nowhere")
    with pytest.raises(NoMemoryError, match=f"{root}/job is a link or a file: delete it"):
        MemoryPlace(root, "job")


def test_dockers_shared_memory_is_not_enough(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The line says what helps."""
    real = os.statvfs(tmp_path)

    class Tiny:
        f_frsize, f_blocks, f_bavail = 4096, (64 << 20) // 4096, 1000

    monkeypatch.setattr(place.os, "statvfs", lambda path: Tiny)
    with pytest.raises(NoMemoryError, match=r"only 64 MiB in all; .*--shm-size.*medium: Memory"):
        MemoryPlace(tmp_path / "root", "job")
    Tiny.f_blocks += 1
    MemoryPlace(tmp_path / "root", "job").close()
    Tiny.f_blocks = 0  # without a limit
    mine = MemoryPlace(tmp_path / "root", "job")
    assert mine.free_bytes() > real.f_bavail * real.f_frsize
    mine.close()


def test_shared_memory_must_be_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Not there, or on a disk: no memory checkpoints."""
    shm, mounts = tmp_path / "shm", tmp_path / "mounts"
    monkeypatch.setattr(place, "SHARED_MEMORY", shm)
    monkeypatch.setattr("dalsegno.agent.processes.mounts._MOUNTS", mounts)
    with pytest.raises(NoMemoryError, match="there is no"):
        default_root()
    shm.mkdir()
    mounts.write_text(f"overlay / overlay rw 0 0\nproc /proc proc rw 0 0\next4 {shm}x ext4 rw 0 0\n")
    with pytest.raises(NoMemoryError, match="but overlay"):
        default_root()
    mounts.write_text(f"overlay / overlay rw 0 0\ntmpfs {shm} tmpfs rw 0 0\n")
    assert default_root() == shm / f"dalsegno-{os.geteuid()}"
    mounts.unlink()  # where it cannot be told
    assert default_root().parent == shm


@pytest.mark.parametrize("job", ["", "..", "a/b"])
def test_a_job_is_one_directory(tmp_path: Path, job: str) -> None:
    with pytest.raises(NoMemoryError, match="--job-id"):
        MemoryPlace(tmp_path / "root", job)


@pytest.mark.parametrize("writes", [False, True])
@pytest.mark.parametrize("gone", ["own", "job", "root"])
def test_what_a_cleaner_has_deleted_is_made_again(tmp_path: Path, gone: str, *, writes: bool) -> None:
    """Under the same name, as the keeper knows it, and locked; also where a rank that writes has made it meanwhile."""
    root = tmp_path / "root"
    one = MemoryPlace(root, "job")
    assert not one.stand()
    shutil.rmtree({"own": one.path, "job": one.path.parent, "root": root}[gone])
    if writes:
        (one.path / "run-0001" / "step-1.e1.1").mkdir(parents=True)
    assert one.stand()
    assert one.path.is_dir()
    assert not one.stand()
    assert remove_leftovers(root) == [], "it is locked"
    assert root.stat().st_mode & 0o777 == 0o700
    one.close()
    assert os.listdir(root) == []
    assert not one.stand(), "its agent is gone"


def test_nothing_is_made_again_below_what_somebody_else_has_put_there(tmp_path: Path) -> None:
    root = tmp_path / "root"
    one = MemoryPlace(root, "job")
    shutil.rmtree(root)
    (tmp_path / "elsewhere").mkdir(mode=0o700)
    root.symlink_to(tmp_path / "elsewhere")
    with pytest.raises(NoMemoryError, match="is a link"):
        one.stand()
    assert os.listdir(tmp_path / "elsewhere") == []
