"""What of a script's saves is new to the run, by names and numbers alone."""

from __future__ import annotations

from pathlib import Path

import pytest

from dalsegno.agent.storage.foreign import survey
from dalsegno.agent.storage.layouts import Complete, FileState, complete
from dalsegno.agent.storage.slices import SaveSlice, choose

from .test_adoption import states


class Run:
    """What it has taken of a script's directory."""

    def __init__(self, root: Path, resumed: dict[str, int | None] | None = None) -> None:
        self.root, self.resumed, self.step = root, resumed or {}, 0
        self.known: dict[str, FileState] = {}
        self.numbers: dict[str, int | None] = {}

    def look(self) -> list[str]:
        """The files that it takes now; empty: nothing is new."""
        every = [complete(self.root, members[0], 2) for members in survey(self.root).series()]
        units = [one for one in every if isinstance(one, Complete)]
        piece = choose(units, self.known, self.numbers, self.resumed, {}, self.step)
        if piece is None:
            return []
        assert isinstance(piece, SaveSlice)
        self.known, self.step = {file.name: file for file in piece.files}, piece.step
        self.numbers |= dict(piece.numbers)
        return sorted(self.known)


def test_composers_names_count_its_batches(tmp_path: Path) -> None:
    """Their pass stays the same in all of a pretraining. In the next epoch nothing but the name can tell."""
    run = Run(tmp_path)
    for batch in (100, 200):
        states(tmp_path, f"ep0-ba{batch}-rank0.pt")
        assert run.look() == [f"ep0-ba{batch}-rank0.pt"]
    resumed = Run(tmp_path / "e2", run.numbers)
    states(tmp_path / "e2", "ep0-ba300-rank0.pt")
    assert resumed.look() == ["ep0-ba300-rank0.pt"]


def test_another_file_with_the_same_number_is_not_new(tmp_path: Path) -> None:
    """All files of a number are one unit, which would grow with each, and be handed on as a directory."""
    run = Run(tmp_path)
    states(tmp_path, "epoch=0-val_loss=0.53.ckpt")
    assert run.look() == ["epoch=0-val_loss=0.53.ckpt"]
    states(tmp_path, "epoch=0-val_loss=0.49.ckpt")
    assert run.look() == []
    states(tmp_path, "epoch=1-val_loss=0.47.ckpt")
    assert run.look() == ["epoch=1-val_loss=0.47.ckpt"]


def test_saves_in_a_directory_that_is_named_by_a_hash(tmp_path: Path) -> None:
    """Such a name is no number, so each save in it is one by itself."""
    run = Run(tmp_path)
    for epoch in (1, 2):
        states(tmp_path / "1ba2c3d4", f"epoch_{epoch}.pt")
        assert run.look() == [f"1ba2c3d4/epoch_{epoch}.pt"]


@pytest.mark.parametrize("job", ["20260501123", "202605011230", "20260501", "1714561234"])
def test_a_directory_that_is_named_by_the_time_holds_checkpoints(tmp_path: Path, job: str) -> None:
    """LAVIS makes one for each job. It is no step, though it has nothing but digits."""
    run = Run(tmp_path)
    (tmp_path / job / "result").mkdir(parents=True)
    states(tmp_path / job, "checkpoint_best.pth")
    assert run.look() == [f"{job}/checkpoint_best.pth"]
    states(tmp_path / job, "checkpoint_0.pth")
    assert run.look() == [f"{job}/checkpoint_0.pth", f"{job}/checkpoint_best.pth"]
    states(tmp_path / job, "checkpoint_1.pth")
    assert run.look() == [f"{job}/checkpoint_1.pth", f"{job}/checkpoint_best.pth"]
    assert run.step == 3
    resumed = Run(tmp_path / "e2", run.numbers)
    states(tmp_path / "e2" / job, "checkpoint_2.pth")
    assert resumed.look() == [f"{job}/checkpoint_2.pth"]


def test_a_directory_that_is_named_by_the_time_holds_directories(tmp_path: Path) -> None:
    run = Run(tmp_path)
    for step in (10, 20):
        states(tmp_path / "1714561234" / f"step_{step}", "model.pt")
        assert run.look() == [f"1714561234/step_{step}/model.pt"]


def test_saves_that_are_named_by_the_time(tmp_path: Path) -> None:
    """They hold no numbers, as those of FSDP2's example. Neither does a step that is as large as a year."""
    run = Run(tmp_path)
    for name in ("2024", "1714561234567", "1714561239567"):
        states(tmp_path / name, "model_state_dict.pt", "optim_state_dict.pt")
        assert run.look() == [f"{name}/model_state_dict.pt", f"{name}/optim_state_dict.pt"]
    states(tmp_path / "e2" / "0000002025", "model_1.pt")
    assert Run(tmp_path / "e2").look() == ["0000002025/model_1.pt"]
    assert survey(tmp_path / "e2").units[0].path == "0000002025"


@pytest.mark.parametrize(
    "names",
    [
        ("model_0.pt", "model_1.pt"),
        ("model.pt", "optim.pt", "rng_state_0.pth", "rng_state_1.pth"),
        ("0.bin", "1.bin"),
    ],
)
def test_saves_that_are_named_by_the_time_have_files_of_ranks(tmp_path: Path, names: tuple[str, ...]) -> None:
    """Only words of progress tell that such a directory holds several checkpoints."""
    run = Run(tmp_path)
    for time in ("20260501123000", "20260501123500"):
        states(tmp_path / time, *names)
        assert run.look() == [f"{time}/{name}" for name in names]


@pytest.mark.parametrize("name", ["epoch_{}.pth", "ppo_{}00_steps.zip", "ckpt{}0000.pt"])
def test_words_of_progress_tell_that_it_holds_several(tmp_path: Path, name: str) -> None:
    run = Run(tmp_path)
    for number in (1, 2):
        states(tmp_path / "20260501123000", name.format(number))
        assert run.look() == [f"20260501123000/{name.format(number)}"]


@pytest.mark.parametrize("late", ["s0.wav", "pred.npy", "features.npz", "a.mp4", "rows.parquet", "labels"])
def test_what_comes_late_and_is_no_part_of_a_save(tmp_path: Path, late: str) -> None:
    run = Run(tmp_path)
    states(tmp_path / "epoch_1", "model.pt")
    assert run.look() == ["epoch_1/model.pt"]
    (tmp_path / "epoch_1" / late).write_bytes(b"x")
    assert run.look() == []


def test_a_directory_that_gets_its_optimizer_late_is_taken_again(tmp_path: Path) -> None:
    """As FSDP gathers the optimizer's state, no file changes. Pictures and tables come late, too, and are no data."""
    run = Run(tmp_path)
    states(tmp_path / "step_100", "model.pt")
    assert run.look() == ["step_100/model.pt"]
    (tmp_path / "step_100" / "results.json").write_text("{}")
    (tmp_path / "step_100" / "sample.png").write_bytes(b"x")
    assert run.look() == []
    states(tmp_path / "step_100", "optimizer.pt")
    assert {"step_100/model.pt", "step_100/optimizer.pt"} <= {*run.look()}
    states(tmp_path / "step_100", "model.pt")
    assert run.look() == []
    states(tmp_path / "step_200", "model.pt", "optimizer.pt")
    assert run.look() == ["step_200/model.pt", "step_200/optimizer.pt"]
    assert run.step == 200
