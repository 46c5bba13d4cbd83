"""What scripts saved in epochs that are over goes with `--keep-saves`, as far as the run has a copy."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from dalsegno.agent.storage import adoption, old_saves
from dalsegno.agent.storage.layouts import state_of
from dalsegno.agent.storage.save_dir import Adoption
from tests.unit.agent.storage.test_save_dir import Run, save


@pytest.fixture
def runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[int], Run]:
    monkeypatch.setattr(adoption, "LOOK_EVERY_SECONDS", 0.05)

    def make(keep: int) -> Run:
        run = Run(tmp_path)
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
def test_the_last_epochs_saves_stay(runs: Callable[[int], Run], keep: int, left: int) -> None:
    """Of older epochs what the run has goes, and nothing else: not the log. The run goes on from its own."""
    run = runs(keep)
    saved = three_epochs(run)
    begin_next(run)
    assert [path.exists() for path in saved] == [number >= 3 - left for number in range(3)]
    assert all((path.parents[1] / "train.log").exists() for path in saved)
    assert not any(path.parent.exists() for path in saved[: 3 - left]), "no empty directories"
    assert (run.out / "step_30" / "model.pt").exists(), "the copy of the resume point is in this epoch's directory"


@pytest.mark.slow
def test_what_was_not_adopted_or_has_changed_since_stays(runs: Callable[[int], Run]) -> None:
    """A save in the moment before the world changed, and one that was written over."""
    run = runs(1)
    saved = three_epochs(run)
    save(saved[0].parents[1] / "step_11" / "model.pt", global_step=11)
    saved[1].write_bytes(b"another")
    begin_next(run)
    assert [path.exists() for path in saved] == [False, True, True]
    assert (saved[0].parents[1] / "step_11" / "model.pt").exists()


@pytest.mark.slow
def test_an_epoch_without_a_save_does_not_count(runs: Callable[[int], Run]) -> None:
    """What could be resumed from counts: of a world that failed at its start nothing could."""
    run = runs(1)
    saved = three_epochs(run)
    run.resume = None
    for _ in range(3):
        begin_next(run)
    assert [path.exists() for path in saved] == [False, False, True]


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
    for name in ("step_2/model.pt", "here.pt"):
        save(run_dir / "e3" / name)
    old_saves.note(run_dir / "e3", state_of(run_dir / "e3", ["kept.pt", "step_2/model.pt", "here.pt"]))
    (run_dir / "e0").symlink_to(run_dir / "e3")
    assert old_saves.remove(run_dir, 4, 1) == []
    (tmp_path / "other").symlink_to(run_dir)
    assert old_saves.remove(tmp_path / "other", 9, 1) == []
    assert (mine / "model.pt").exists()


def test_a_note_that_was_cut_off_removes_nothing(tmp_path: Path) -> None:
    for number in (1, 2):
        save(tmp_path / f"e{number}" / "model.pt")
        old_saves.note(tmp_path / f"e{number}", state_of(tmp_path / f"e{number}", ["model.pt"]))
    notes = next((tmp_path / "e1").glob(".dalsegno*"))
    os.truncate(notes, notes.stat().st_size - 5)
    assert old_saves.remove(tmp_path, 3, 1) == []


def test_the_newest_of_each_series_stays(tmp_path: Path) -> None:
    """A best model that no later epoch has saved again: the run's copies of it may be pruned by now."""
    for number, names in ((1, ("last.pt", "best.pt", "step_1.pt")), (2, ("last.pt", "step_7.pt")), (3, ("last.pt",))):
        root = tmp_path / f"e{number}"
        for name in names:
            save(root / name)
        old_saves.note(root, state_of(root, list(names)))
    assert sorted(old_saves.remove(tmp_path, 4, 1)) == ["e1/last.pt", "e1/step_1.pt", "e2/last.pt"]
    assert (tmp_path / "e1" / "best.pt").exists()
    assert old_saves.remove(tmp_path, 9, 1) == []


def test_notes_that_a_power_cut_has_damaged_end_nothing(tmp_path: Path) -> None:
    """What they name otherwise stays, and the rest goes: whoever looks at the script's saves ended of them."""
    for epoch in (1, 2):
        root = tmp_path / f"e{epoch}"
        root.mkdir()
        (root / "step_1.pt").write_bytes(b"x")
        old_saves.note(root, state_of(root, ["step_1.pt"]))
    with open(tmp_path / "e1" / old_saves._NOTES, "ab") as notes:
        notes.write(b'\xff\xfe\n["a\\u0000b", 1, 2, 3]\n["step_2')
    assert old_saves.remove(tmp_path, 3, 1) == ["e1/step_1.pt"]
