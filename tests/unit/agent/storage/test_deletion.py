"""Who deletes checkpoints deletes those and nothing else: links are not followed, and one failure stops nothing."""

from __future__ import annotations

import errno
import os
import queue
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from dalsegno.agent.commands import dalsegno
from dalsegno.agent.storage import room
from dalsegno.agent.storage.job_directory import JobDirectory, Storage
from dalsegno.elastic.checkpoint import CheckpointStore, Manifest
from dalsegno.elastic.universal.journal import JOURNAL
from dalsegno.protos import control_pb2 as pb
from tests.unit.agent.storage.test_storage import make_checkpoint

pytestmark = pytest.mark.timeout(60)

Output = pytest.CaptureFixture[str]


def finished(run: Path, *steps: int) -> Path:
    """A finished run with a checkpoint of each of the steps."""
    run.mkdir(parents=True, exist_ok=True)
    for step in steps:
        make_checkpoint(run, f"step-{step}.e1.1")
    (run / "FINISHED.json").write_text("{}")
    return run


def tree(directory: Path) -> list[str]:
    return sorted(str(path.relative_to(directory)) for path in directory.rglob("*"))


@pytest.fixture
def precious(tmp_path: Path) -> Iterator[Path]:
    """Another run, which must not change."""
    run = finished(tmp_path / "elsewhere" / "run-0001", 1, 2, 3)
    before = tree(run)
    yield run
    assert tree(run) == before
    for name in ("step-1.e1.1", "step-2.e1.1"):
        Manifest.read(run / name)


def prune(directory: Path) -> int:
    return dalsegno.run(["checkpoints", "prune", str(directory), "--keep=1"])


def test_prune_does_not_follow_a_linked_run(tmp_path: Path, precious: Path, capsys: Output) -> None:
    """Neither a run's directory nor what lies above one; what the person names may be a link itself."""
    checkpoints = tmp_path / "ck"
    run = finished(checkpoints / "job" / "run-0001", 1, 2)
    (checkpoints / "job" / "run-0002").symlink_to(precious)
    (checkpoints / "other").symlink_to(precious.parent)
    (checkpoints / "job" / "newest").symlink_to(run)  # not out of the directory
    assert prune(checkpoints) == 1
    lines = capsys.readouterr().out.splitlines()
    assert f"{checkpoints / 'other'}: it is a link out of {checkpoints}: nothing was deleted there" in lines
    assert any(line.startswith(f"{checkpoints / 'job' / 'run-0002'}: it is a link") for line in lines)
    assert not any("newest" in line for line in lines)
    assert sorted(path.name for path in run.glob("step-*")) == ["step-2.e1.1"]
    make_checkpoint(run, "step-1.e1.1")
    (tmp_path / "short").symlink_to(run)
    assert prune(tmp_path / "short") == 0
    assert not (run / "step-1.e1.1").exists()


def _linked_checkpoint(run: Path, precious: Path) -> None:
    shutil.rmtree(run / "step-1.e1.1")
    (run / "step-1.e1.1").symlink_to(precious / "step-1.e1.1")


def _linked_manifest(run: Path, precious: Path) -> None:
    (run / "step-1.e1.1" / "MANIFEST.json").unlink()
    (run / "step-1.e1.1" / "MANIFEST.json").symlink_to(precious / "step-1.e1.1" / "MANIFEST.json")


def _linked_files(run: Path, precious: Path) -> None:
    (run / "step-1.e1.1" / "all").symlink_to(precious)
    (run / "step-1.e1.1" / "one").symlink_to(precious / "step-1.e1.1" / "model.pt")


LINKS = [_linked_checkpoint, _linked_manifest, _linked_files]


@pytest.mark.parametrize("link", LINKS)
@pytest.mark.parametrize("deleter", ["prune", "store", "agent"])
def test_what_a_link_leads_to_stays(
    tmp_path: Path, precious: Path, link: Callable[[Path, Path], None], deleter: str
) -> None:
    """A checkpoint or a file of it that is a link: the link goes. Without a manifest of its own it is no old one."""
    directory = JobDirectory(tmp_path / "ck", "job")
    run = finished(directory.run("run-0001"), 1, 2)
    link(run, precious)
    if deleter == "prune":
        assert prune(run) == 0
    elif deleter == "store":
        assert CheckpointStore(run).prune(["step-1.e1.1"]) == {}
    else:
        storage = Storage(directory)
        told: queue.SimpleQueue[Any] = queue.SimpleQueue()
        storage.prune("run-0001", [pb.CheckpointRef(name="step-1.e1.1")], told.put)
        assert [ref.name for ref in told.get(timeout=20).refs] == ["step-1.e1.1"]
        storage.close()
    unknown = deleter == "prune" and link is _linked_manifest
    assert os.path.lexists(run / "step-1.e1.1") == unknown
    assert (run / "step-2.e1.1").exists()


def test_an_agent_deletes_nothing_through_a_linked_run(tmp_path: Path, precious: Path) -> None:
    """Neither what is retired nor what was never sealed; the master is told that it is still there."""
    directory = JobDirectory(tmp_path / "ck", "job")
    directory.prepare()
    (precious / "step-9.e0.1").mkdir()
    directory.run("run-0001").symlink_to(precious)
    storage = Storage(directory)
    told: queue.SimpleQueue[Any] = queue.SimpleQueue()
    # Two threads work on these, so the second prune begins when the sweep has ended, or beside it.
    storage.sweep("run-0001", 5)
    storage.prune("run-0001", [pb.CheckpointRef(name="step-1.e1.1")], told.put)
    assert told.get(timeout=20).refs == ()
    storage.close()
    storage._slow.shutdown(wait=True)
    (precious / "step-9.e0.1").rmdir()


def test_a_sweep_leaves_alone_what_it_cannot_look_into(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A manifest that the file system does not show just now is no reason to take the checkpoint for unsealed."""
    run = finished(tmp_path / "run-0001", 1)
    (run / "step-2.e1.1").mkdir()
    (run / "step-3.e1.1").symlink_to(tmp_path)
    (run / "step-4.e1.1").touch()
    store = CheckpointStore(run)
    assert store.never_sealed(2) == ["step-2.e1.1"]
    look = os.lstat

    def spoiled(path: Any, **options: Any) -> os.stat_result:
        if str(path).endswith("MANIFEST.json"):
            raise OSError(errno.ESTALE, os.strerror(errno.ESTALE), str(path))
        return look(path, **options)

    monkeypatch.setattr(os, "lstat", spoiled)
    assert store.never_sealed(2) == []


def _refuse(monkeypatch: pytest.MonkeyPatch, *names: str) -> None:
    """Deleting a file of these checkpoints fails. (Permissions would not stop root.)"""
    unlink = os.unlink

    def refuses(path: Any, *, dir_fd: int | None = None) -> None:
        where = os.readlink(f"/proc/self/fd/{dir_fd}") if dir_fd is not None else os.path.dirname(path)
        if os.path.basename(where) in names and os.path.basename(path) == "model.pt":
            raise PermissionError(errno.EPERM, os.strerror(errno.EPERM), str(path))
        unlink(path, dir_fd=dir_fd)

    monkeypatch.setattr(os, "unlink", refuses)


def test_one_failure_does_not_stop_the_rest(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Output) -> None:
    """The others go, the line says which did not and why, and the exit code says so; the next run is looked at too."""
    first, second = finished(tmp_path / "run-0001", 1, 2, 3), finished(tmp_path / "run-0002", 1, 2)
    (first / "step-1.e1.1" / "more").mkdir()
    (first / "step-1.e1.1" / "more" / "file").touch()
    _refuse(monkeypatch, "step-1.e1.1")
    assert prune(tmp_path) == 1
    lines = capsys.readouterr().out.splitlines()
    assert lines[:2] == [f"{first}: deleted 1", "  step-2.e1.1"]
    assert lines[2].startswith(f"{first / 'step-1.e1.1'}: it could not be deleted: ")
    assert tree(first / "step-1.e1.1") == ["model.pt"]
    assert not (first / "step-2.e1.1").exists()
    assert (first / "step-3.e1.1" / "MANIFEST.json").exists()
    assert lines[3] == f"{second}: deleted 0"


def test_a_run_that_cannot_be_locked_does_not_stop_the_next(tmp_path: Path, capsys: Output) -> None:
    """Whatever is in the place of its lock."""
    first, second = finished(tmp_path / "run-0001", 1, 2), finished(tmp_path / "run-0002", 1, 2)
    (first / ".lock").symlink_to(tmp_path / "made")
    assert prune(tmp_path) == 1
    assert f"{first}: nothing was deleted: " in capsys.readouterr().out
    assert not (tmp_path / "made").exists()
    assert (first / "step-1.e1.1").exists()
    assert not (second / "step-1.e1.1").exists()


def test_a_source_stays_with_a_form_that_could_not_go(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A form without its source is nothing that anybody would find again; the master hears that both are there."""
    directory = JobDirectory(tmp_path, "job")
    run = finished(directory.run("run-0001"), 1, 2)
    form = make_checkpoint(run, "step-1.e1.1.universal.4")
    _refuse(monkeypatch, form.name)
    assert set(CheckpointStore(run).prune([form.name, "step-1.e1.1"])) == {form.name, "step-1.e1.1"}
    assert (run / "step-1.e1.1" / "model.pt").exists()
    storage = Storage(directory)
    told: queue.SimpleQueue[Any] = queue.SimpleQueue()
    storage.prune("run-0001", [pb.CheckpointRef(name=f"step-{step}.e1.1") for step in (1, 2)], told.put)
    assert [ref.name for ref in told.get(timeout=20).refs] == ["step-2.e1.1"]
    storage.close()


def _tries(storage: Storage, *steps: int) -> list[str]:
    """What is gone after the master has once asked for these."""
    told: queue.SimpleQueue[Any] = queue.SimpleQueue()
    storage.prune("run-0001", [pb.CheckpointRef(name=f"step-{step}.e1.1") for step in steps], told.put)
    return [ref.name for ref in told.get(timeout=20).refs]


def test_people_hear_once_of_what_cannot_be_deleted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is tried again and again, and the disk fills. One line for all that one mount or directory forbids."""
    monkeypatch.setattr(room, "UNDELETED_SECONDS", 1e-6)
    directory = JobDirectory(tmp_path, "job")
    said: list[str] = []
    directory.complaint.say = lambda text, warning: said.append(text)
    make_checkpoint(finished(directory.run("run-0001"), 1, 2), "step-1.e1.1.universal.4")
    _refuse(monkeypatch, "step-1.e1.1.universal.4", "step-2.e1.1")
    storage = Storage(directory)
    assert _tries(storage, 1, 2) == []
    assert said == [], "what fails once may go at the next try"
    for _ in range(2):
        assert _tries(storage, 1, 2) == []
    storage.close()
    (line,) = said
    assert line.startswith(
        "checkpoint step-1.e1.1.universal.4 cannot be deleted yet ([Errno 1] Operation not permitted: "
    )
    assert line.endswith("; it is tried again")


def test_what_cannot_be_deleted_for_a_moment_is_not_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """NFS keeps the name of a file that somebody has open; and a mount's server may have been started again."""
    directory = JobDirectory(tmp_path, "job")
    said: list[str] = []
    directory.complaint.say = lambda text, warning: said.append(text)
    finished(directory.run("run-0001"), 1, 2)
    storage = Storage(directory)
    with monkeypatch.context() as fails:
        _refuse(fails, "step-1.e1.1")
        assert (_tries(storage, 1), _tries(storage, 1)) == ([], [])
    assert _tries(storage, 1) == ["step-1.e1.1"]
    monkeypatch.setattr(room, "UNDELETED_SECONDS", 1e-6)
    finished(directory.run("run-0001"), 1)
    _refuse(monkeypatch, "step-1.e1.1")
    assert _tries(storage, 1) == []
    storage.close()
    assert said == [], "it was deleted meanwhile"


def test_prune_is_not_held_up_by_a_pipe(tmp_path: Path) -> None:
    """In the place of a conversion's journal, of a manifest or of a file."""
    run = finished(tmp_path / "run-0001", 1, 2, 3)
    os.mkfifo(run / "step-1.e1.1" / JOURNAL)
    (run / "step-2.e1.1" / "model.pt").unlink()
    os.mkfifo(run / "step-2.e1.1" / "model.pt")
    assert prune(tmp_path) == 0
    assert sorted(path.name for path in run.glob("step-*")) == ["step-3.e1.1"]
