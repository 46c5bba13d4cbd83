"""The files that torch makes for each epoch's workers: empty ones of old epochs go, nothing else does."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, Std

from dalsegno.agent.workers import attempts
from dalsegno.agent.workers.attempts import drop_if_empty, forgetting


def _begin(specs: object, epoch: int, ranks: int = 2) -> Path:
    """The directory of one epoch, whose workers have their files."""
    given = {"TORCHELASTIC_RUN_ID": "job", "TORCHELASTIC_RESTART_COUNT": str(epoch)}
    made = specs.reify({rank: dict(given) for rank in range(ranks)})  # type: ignore[attr-defined]
    for path in made.stderrs.values():
        Path(path).touch()
    return Path(made.error_files[0]).parent.parent


def test_empty_attempts_go_and_the_newest_stay(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A job of thousands of changes has the files of its newest epochs, and of each in which something was written."""
    monkeypatch.setattr(attempts, "KEPT", 3)
    specs = forgetting(DefaultLogsSpecs(log_dir=str(tmp_path), redirects=Std.ERR))
    made = [_begin(specs, 0)]
    (made[0] / "1" / "stderr.log").write_text("ValueError: boom\n")
    made += [_begin(specs, epoch) for epoch in range(1, 10)]
    assert [path.exists() for path in made] == [True, *[False] * 6, *[True] * 3]
    assert (made[0] / "1" / "stderr.log").read_text() == "ValueError: boom\n"
    assert (made[9] / "0" / "stderr.log").exists()
    assert made[9].parent == made[0].parent


def test_the_same_epoch_again_is_not_an_old_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its files are in use, however often it began."""
    monkeypatch.setattr(attempts, "KEPT", 1)
    specs = forgetting(DefaultLogsSpecs(log_dir=str(tmp_path), redirects=Std.ERR))
    for _ in range(3):
        made = _begin(specs, 4)
    assert made.is_dir()


def test_nothing_but_empty_files_is_removed(tmp_path: Path) -> None:
    """What a script has put there, or somebody a link to, is not ours."""
    for number, put in enumerate(
        (
            lambda path: path.write_text("x"),
            lambda path: path.symlink_to(tmp_path / "elsewhere"),
            lambda path: os.mkfifo(path),
        )
    ):
        attempt = tmp_path / f"attempt_{number}"
        (attempt / "0").mkdir(parents=True)
        (attempt / "0" / "stderr.log").touch()
        (attempt / "1").mkdir()
        put(attempt / "1" / "own")
        drop_if_empty(attempt)
        assert (attempt / "0" / "stderr.log").exists(), number
    drop_if_empty(tmp_path / "nothing")


def test_files_of_an_own_choice_stay(tmp_path: Path) -> None:
    """Nobody knows where another class of specifications puts its files; without files there is nothing to do."""

    class Own(DefaultLogsSpecs):
        pass

    own = Own(log_dir=str(tmp_path))
    assert forgetting(own) is own
    nowhere = forgetting(DefaultLogsSpecs(log_dir=os.devnull))
    nowhere.reify({0: {"TORCHELASTIC_RUN_ID": "job"}})
