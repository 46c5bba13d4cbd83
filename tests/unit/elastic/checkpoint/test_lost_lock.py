"""A directory without a master that is renamed, replaced or deleted under a training: it harms no other training's."""

from __future__ import annotations

import errno
import fcntl
import os
import shutil
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from dalsegno.elastic import Session, background, session
from dalsegno.elastic.checkpoint import CheckpointStore, DirectoryInUse, LocalLock
from tests.support.checkpoints.memory import manifest_of

pytestmark = pytest.mark.timeout(60)

FOREIGN = b"of another training"


@pytest.fixture
def run(tmp_path: Path) -> Path:
    return tmp_path / "run"


@pytest.fixture
def training(run: Path) -> Iterator[Session]:
    """Has saved two steps, of which one stays."""
    with session(run, keep=1) as s:
        for _ in range(2):
            assert step(s) is not None
        yield s


def write(path: Path) -> None:
    (path / "model.pt").write_bytes(b"model")


def step(s: Session, save: Any = write) -> Any:
    s.begin_step()
    s.end_step()
    return s.save(save)


def another(run: Path, *names: str) -> dict[str, bytes]:
    """What another training has sealed there. Returns all that there is."""
    for name in names:
        (run / name).mkdir(parents=True)
        (run / name / "model.pt").write_bytes(FOREIGN)
        (run / name / "MANIFEST.json").write_bytes(
            manifest_of(name, {0: {"model.pt": FOREIGN}}, run_id="", job_id="").to_bytes()
        )
    return content(run)


def content(run: Path) -> dict[str, bytes]:
    return {str(path.relative_to(run)): path.read_bytes() for path in run.rglob("*") if path.is_file()}


def test_another_training_at_work_is_left_alone(training: Session, run: Path, caplog: pytest.LogCaptureFixture) -> None:
    """The two deleted each other's checkpoints. With its own directory back the first one saves again."""
    run.rename(run.with_name("aside"))
    with LocalLock(run):
        before = another(run, "step-2.e0.1", "step-3.e0.1")
        assert step(training) is None
        assert [one.message for one in caplog.records if "this training's lock is gone from here" in one.message]
        assert "another training is at work: nothing is written or deleted here until" in caplog.text
        assert len(caplog.records) == 1
        assert content(run) == before
    run.rename(run.with_name("other"))
    run.with_name("aside").rename(run)
    assert step(training).name == "step-4.e0.1"
    assert [one.name for one in CheckpointStore(run).sealed()] == ["step-4.e0.1"]


@pytest.mark.parametrize("how", ["renamed", "linked"])
def test_what_another_training_left_is_left_alone(training: Session, run: Path, tmp_path: Path, how: str) -> None:
    """It has ended; nobody holds a lock there."""
    run.rename(run.with_name("aside"))
    place = run if how == "renamed" else tmp_path / "elsewhere"
    before = another(place, "step-1.e0.1", "step-3.e0.1")
    if how == "linked":
        run.symlink_to(place)
    assert step(training) is None
    training.finish()
    after = content(place)
    assert after.pop(".lock") == b""
    assert after == before


def test_a_directory_that_was_deleted_is_made_again_and_locked(training: Session, run: Path) -> None:
    shutil.rmtree(run)
    assert step(training).name == "step-3.e0.1"
    with pytest.raises(DirectoryInUse):
        LocalLock(run).acquire()
    training.close()
    with LocalLock(run):
        pass


def test_a_lock_file_that_was_deleted_is_made_again(training: Session, run: Path) -> None:
    """Unless another training has been there since, and has sealed something."""
    os.unlink(run / ".lock")
    assert step(training).name == "step-3.e0.1"
    with pytest.raises(DirectoryInUse):
        LocalLock(run).acquire()
    os.unlink(run / ".lock")
    another(run, "step-9.e1.1")
    assert step(training) is None
    assert [one.name for one in CheckpointStore(run).sealed()] == ["step-3.e0.1", "step-9.e1.1"]


@pytest.mark.parametrize("deleted", [False, True])
@pytest.mark.parametrize(
    ("damaged", "content", "verify"),
    [("model.pt", b"MODEL", True), ("model.pt", b"m", False), ("MANIFEST.json", b"{}", True)],
)
def test_a_lock_file_is_made_again_where_the_newest_checkpoint_is_damaged(
    run: Path, damaged: str, content: bytes, verify: bool, deleted: bool
) -> None:
    """The run goes on from the one before, and the newest is known from its beginning."""
    with session(run, keep=0) as s:
        assert [step(s).name for _ in range(2)] == ["step-1.e0.1", "step-2.e0.1"]
    (run / "step-2.e0.1" / damaged).write_bytes(content)
    with session(run, keep=0, verify=verify) as s:
        assert s.step == 1
        if deleted:  # as the line about it may have people do
            shutil.rmtree(run / "step-2.e0.1")
        os.unlink(run / ".lock")
        assert step(s).name == "step-2.e1.1"
        # From here on that is the newest one.
        shutil.rmtree(run / "step-2.e1.1")
        os.unlink(run / ".lock")
        assert step(s) is None


def test_forms_are_no_newer_checkpoints(training: Session, run: Path) -> None:
    """They are made of one that is here, by others, at any time."""
    newest = CheckpointStore(run).newest()
    assert newest is not None
    form = run / f"{newest.name.replace('step-2', 'step-9')}.universal.1"
    form.mkdir()
    made = replace(newest, name=form.name, step=9, form="universal", source=replace(newest.ref, name="step-9.e0.1"))
    (form / "MANIFEST.json").write_bytes(made.to_bytes())
    with LocalLock(run.with_name("another")) as lock:
        assert CheckpointStore(run, lock).begun_with() == newest.ref
    assert CheckpointStore(run).begun_with() is None


def test_an_old_lock_that_cannot_be_given_back_keeps_nobody_from_the_new_one(
    training: Session, run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A mount that forgets deleted files says ESTALE. The training then wrote on without any lock."""
    take = fcntl.flock

    def flock(descriptor: int, how: int) -> None:
        if how == fcntl.LOCK_UN and os.fstat(descriptor).st_nlink == 0:
            raise OSError(errno.ESTALE, "Stale file handle")
        take(descriptor, how)

    shutil.rmtree(run)
    monkeypatch.setattr(fcntl, "flock", flock)
    before = len(os.listdir("/proc/self/fd"))
    assert step(training).name == "step-3.e0.1"
    with pytest.raises(DirectoryInUse):
        LocalLock(run).acquire()
    assert len(os.listdir("/proc/self/fd")) == before
    os.unlink(run / ".lock")
    assert step(training).name == "step-4.e0.1"
    with pytest.raises(DirectoryInUse):
        LocalLock(run).acquire()


@pytest.mark.parametrize("saves", [True, False])
def test_the_end_is_noted_in_a_directory_that_was_deleted(
    run: Path, caplog: pytest.LogCaptureFixture, saves: bool
) -> None:
    """Nobody else is there: no line says so."""
    with session(run) as s:
        if saves:
            assert step(s) is not None
        shutil.rmtree(run)
        s.begin_step()
        s.end_step()
        caplog.clear()
        s.finish()
    assert (run / "FINISHED.json").exists()
    assert [one.message for one in caplog.records if "is finished at step" not in one.message] == []


def test_a_directory_that_is_deleted_during_a_save_makes_one_line(
    training: Session, run: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Of another training nothing is known, and what the save has left is gone."""

    def deletes(path: Path) -> None:
        shutil.rmtree(run)
        write(path)

    assert step(training, deletes) is None
    (line,) = [one.message for one in caplog.records]
    assert "saving step-3.e0.1 failed" in line
    assert "another training" not in line
    assert step(training).name == "step-4.e0.1"


def test_spares_of_another_training_stay(training: Session, run: Path) -> None:
    """Behind a save that was refused, and as the session is closed."""
    run.rename(run.with_name("aside"))
    (run / ".spare").mkdir(parents=True)
    (run / ".spare" / "=x").write_bytes(FOREIGN)
    with LocalLock(run):
        another(run, "step-2.e0.1")
        assert step(training) is None
        assert (run / ".spare" / "=x").exists()
        training.close()
        assert (run / ".spare" / "=x").exists()


def test_a_lock_file_that_is_deleted_during_a_save_is_made_again_by_the_next(
    training: Session, run: Path, caplog: pytest.LogCaptureFixture
) -> None:
    def deletes(path: Path) -> None:
        write(path)
        os.unlink(run / ".lock")

    assert step(training, deletes) is None
    assert "was deleted: the next save makes it again" in caplog.text
    assert "another training" not in caplog.text
    assert step(training) is not None


@pytest.mark.parametrize("ends", ["fails", "is sealed"])
def test_a_save_under_way_seals_and_deletes_nothing_there(training: Session, run: Path, ends: str) -> None:
    """The other one's checkpoint may have the same name."""
    before: dict[str, bytes] = {}

    def replaced(path: Path) -> None:
        run.rename(run.with_name("aside"))
        before.update(another(run, "step-2.e0.1", path.name))
        if ends == "fails":
            raise OSError("no space")
        (path / "MANIFEST.json").unlink()
        del before[f"{path.name}/MANIFEST.json"]

    assert step(training, replaced) is None
    after = content(run)
    assert {path: after.get(path) for path in before} == before
    assert "step-3.e0.1/MANIFEST.json" not in after or ends == "fails"


def test_nor_does_one_in_the_background(training: Session, run: Path) -> None:
    before: dict[str, bytes] = {}

    def state() -> dict[str, bytes]:
        run.rename(run.with_name("aside"))
        before.update(another(run, "step-2.e0.1"))
        return {"model.pt": b"model"}

    assert step(training, background(state)) is None
    assert [one.name for one in CheckpointStore(run).sealed()] == ["step-2.e0.1"]
    after = content(run)
    assert {path: after.get(path) for path in before} == before


def test_old_checkpoints_of_another_training_stay(training: Session, run: Path) -> None:
    """Where the directory is replaced between a save and the deletion behind it."""
    run.rename(run.with_name("aside"))
    before = another(run, "step-1.e0.1", "step-3.e0.1")
    training.saves.prune()
    training.saves.note_the_end(3)
    after = content(run)
    assert after.pop(".lock") == b""
    assert after == before
