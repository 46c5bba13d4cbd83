"""What scripts saved in epochs that are over goes with `--keep-saves`, as far as the run has a copy."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from dalsegno.agent.storage import adoption, old_saves
from dalsegno.agent.storage.layouts import state_of
from dalsegno.agent.storage.save_dir import Adoption
from dalsegno.agent.storage.taking import Before
from dalsegno.elastic.checkpoint import SavedAs
from tests.unit.agent.storage.test_save_dir import Run, save


@pytest.fixture
def runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Run]:
    monkeypatch.setattr(adoption, "LOOK_EVERY_SECONDS", 0.05)

    def make(keep: int, *flags: str) -> Run:
        run = Run(tmp_path, *flags)
        run.taken = Adoption(run.flags, run.heard.put, "", keep)
        return run

    return make


def three_epochs(run: Run) -> list[Path]:
    """Each saves one checkpoint and a log; returns where the checkpoints are, the copies of resume points included."""
    saved = []
    for step in (10, 20, 30):
        run.next()
        save(run.out / f"step_{step}" / "model.pt", global_step=step)
        (run.out / "train.log").write_text("said\n")
        run.sealed()
        run.quiet()
        saved.append(run.out / f"step_{step}" / "model.pt")
    return saved


def begin_next(run: Run) -> None:
    run.next()
    run.taken.settle(20)
    run.taken.close()


@pytest.mark.slow
@pytest.mark.parametrize(("keep", "left"), [(0, 3), (1, 1), (2, 2), (9, 3)])
def test_the_last_epochs_saves_stay(runs: Callable[..., Run], keep: int, left: int) -> None:
    """Of older epochs what the run has goes, and nothing else: not the log. The run goes on from its own."""
    run = runs(keep)
    saved = three_epochs(run)
    begin_next(run)
    assert [path.exists() for path in saved] == [number >= 3 - left for number in range(3)]
    assert all((path.parents[1] / "train.log").exists() for path in saved)
    assert not any(path.parent.exists() for path in saved[: 3 - left]), "no empty directories"
    assert (run.out / "step_30" / "model.pt").exists(), "the copy of the resume point is in this epoch's directory"


@pytest.mark.slow
def test_what_was_not_adopted_or_has_changed_since_stays(runs: Callable[..., Run]) -> None:
    """A save in the moment before the world changed, and one that was written over."""
    run = runs(1)
    saved = three_epochs(run)
    save(saved[0].parents[1] / "step_11" / "model.pt", global_step=11)
    saved[1].write_bytes(b"another")
    begin_next(run)
    assert [path.exists() for path in saved] == [False, True, True]
    assert (saved[0].parents[1] / "step_11" / "model.pt").exists()


@pytest.mark.slow
def test_an_epoch_without_a_save_does_not_count(runs: Callable[..., Run]) -> None:
    """What could be resumed from counts: of a world that failed at its start nothing could."""
    run = runs(1, "${resume_dir}")
    saved = three_epochs(run)
    for _ in range(3):
        begin_next(run)
    assert [path.exists() for path in saved] == [False, False, True]


@pytest.mark.slow
def test_what_no_checkpoint_has_any_more_stays(runs: Callable[..., Run]) -> None:
    """As runs have it that an earlier version began: the checkpoint with the best model is pruned."""
    run = runs(1, "${resume_path}")
    for step in (1, 2):
        run.next()
        save(run.out / "last.pt", step=step)
        if step == 1:
            save(run.out / "best.pt", step=step)
            save(run.out / "epoch_7.pt", w=1)
        made = run.sealed()
        run.quiet()
    for name in ("best.pt", "epoch_7.pt"):
        (run.directory / made.name / name).unlink()
    begin_next(run)
    assert sorted(path.name for path in (run.directory / "e1").glob("*.pt")) == ["best.pt", "epoch_7.pt"]


def resume_point(run_dir: Path, below: str = "") -> Before:
    """A file that is newer than all that is there."""
    save(run_dir / "step-9.e1.1" / "model.pt")
    os.utime(run_dir / "step-9.e1.1" / "model.pt", (1 << 32, 1 << 32))
    return Before(run_dir / "step-9.e1.1", {}, SavedAs(below, below or "model.pt", ()))


@pytest.mark.parametrize(
    ("name", "below", "goes"),
    [
        ("model.pt", "", True),
        ("other.pt", "", False),
        ("checkpoint-5/model.pt", "checkpoint-9", True),
        ("other-5/model.pt", "checkpoint-9", False),
    ],
)
def test_what_goes_is_what_a_newer_one_has_replaced(tmp_path: Path, name: str, below: str, goes: bool) -> None:
    """A file of the same name or series, also where the resume point has its files at its top; never a newer one."""
    resume = resume_point(tmp_path, below)
    for number in (1, 2):
        save(tmp_path / f"e{number}" / name)
        save(tmp_path / f"e{number}" / name.replace("model.pt", "trainer_state.json"))
        old_saves.note(tmp_path / f"e{number}", state_of(tmp_path / f"e{number}", [name]))
    os.utime(resume.directory / "model.pt", (1, 1))
    assert old_saves.remove(tmp_path, 3, 1, resume) == []
    os.utime(resume.directory / "model.pt", (1 << 32, 1 << 32))
    assert old_saves.remove(tmp_path, 3, 1, None) == []
    assert old_saves.remove(tmp_path, 3, 1, resume) == ([f"e1/{name}"] if goes else [])


def test_no_link_is_followed(tmp_path: Path) -> None:
    """Neither out of an epoch's directory, nor where an epoch's directory or the run's is one."""
    mine = tmp_path / "mine"
    save(mine / "model.pt")
    run_dir = tmp_path / "run"
    for number in (1, 2, 3):
        (run_dir / f"e{number}").mkdir(parents=True)
        save(run_dir / f"e{number}" / "kept.pt")
    (run_dir / "e1" / "step_1").symlink_to(mine)
    (run_dir / "e2" / "here.pt").symlink_to(mine / "model.pt")
    old_saves.note(run_dir / "e1", state_of(run_dir / "e1", ["step_1/model.pt", "../e2/kept.pt"]))
    old_saves.note(run_dir / "e2", state_of(run_dir / "e2", ["here.pt"]))
    old_saves.note(run_dir / "e3", state_of(run_dir / "e3", ["kept.pt"]))
    (run_dir / "e0").symlink_to(run_dir / "e3")
    resume = resume_point(run_dir)
    assert old_saves.remove(run_dir, 4, 1, resume) == []
    (tmp_path / "other").symlink_to(run_dir)
    assert old_saves.remove(tmp_path / "other", 9, 1, resume) == []
    assert (mine / "model.pt").exists()


def test_a_note_that_was_cut_off_removes_nothing(tmp_path: Path) -> None:
    for number in (1, 2):
        save(tmp_path / f"e{number}" / "model.pt")
        old_saves.note(tmp_path / f"e{number}", state_of(tmp_path / f"e{number}", ["model.pt"]))
    notes = next((tmp_path / "e1").glob(".dalsegno*"))
    os.truncate(notes, notes.stat().st_size - 5)
    assert old_saves.remove(tmp_path, 3, 1, resume_point(tmp_path)) == []
