"""An unfinished job of a script of the same name, in the directory where another one begins."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from dalsegno.agent.storage import namesake
from dalsegno.agent.storage.job_directory import JobDirectory
from dalsegno.agent.storage.namesake import unfinished
from tests.unit.agent.storage.test_survey import put

OWN, OTHER = "mini-0badcafe", "mini-2e13dfe5"


def begun(root: Path, job_id: str = OWN) -> JobDirectory:
    directory = JobDirectory(root, job_id)
    directory.prepare()
    return directory


def trained(root: Path, job_id: str, *names: str, run: str = "run-0001", at: float = 1e9) -> Path:
    """A job with these checkpoints, which an agent began at that time."""
    directory = begun(root, job_id)
    for name in names:
        put(directory.runs / run, name)
    os.utime(directory.runs, (at, at))
    return directory.runs / run


def nobody(private: Path) -> bool:
    """Runs a job."""
    return False


def test_the_newest_unfinished_one_is_named_with_its_step(tmp_path: Path) -> None:
    """What is not sealed is no step of it."""
    assert unfinished(begun(tmp_path), nobody) is None
    trained(tmp_path, "mini-11111111", "step-500.e1.1", at=1e9 - 5)
    run = trained(tmp_path, OTHER, "step-80.e1.1", "step-99.e2.1", "step-90.e1.1")
    (run / "step-120.e2.1").mkdir()
    assert unfinished(begun(tmp_path), nobody) == (OTHER, 99)


@pytest.mark.parametrize(
    "job_id", ["other-2e13dfe5", "mini", "mini-2e13dfe", "mini-2e13dfeg", "mini-2E13DFE5", "mini-b-2e13dfe5", OWN]
)
def test_a_job_of_another_script_or_a_name_that_was_given_is_not(tmp_path: Path, job_id: str) -> None:
    trained(tmp_path, job_id, "step-99.e1.1")
    assert unfinished(begun(tmp_path), nobody) is None


def test_a_finished_one_is_not_and_one_whose_last_run_is_not_finished_is(tmp_path: Path) -> None:
    run = trained(tmp_path, OTHER, "step-99.e1.1")
    (run / "FINISHED.json").touch()
    assert unfinished(begun(tmp_path), nobody) is None
    trained(tmp_path, OTHER, "step-7.e2.1", run="run-0002")
    assert unfinished(begun(tmp_path), nobody) == (OTHER, 7)


def test_a_job_that_has_begun_is_told_of_no_other(tmp_path: Path) -> None:
    """It goes on, or it has been told."""
    trained(tmp_path, OTHER, "step-99.e1.1")
    (begun(tmp_path).runs / "run-0001").mkdir()
    assert unfinished(begun(tmp_path), nobody) is None


def test_one_of_another_user_is_not(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """This one could not go on with it."""
    trained(tmp_path, OTHER, "step-99.e1.1")
    directory = begun(tmp_path)
    monkeypatch.setattr(namesake, "_owner", lambda path: int(path.name == OTHER))
    assert unfinished(directory, nobody) is None


def test_what_cannot_be_read_is_passed_over(tmp_path: Path) -> None:
    (tmp_path / "mini-22222222").touch()
    (tmp_path / "mini-33333333").mkdir()
    trained(tmp_path, "mini-44444444", at=2e9)
    trained(tmp_path, OTHER, "step-99.e1.1")
    assert unfinished(begun(tmp_path), nobody) == (OTHER, 99)
    assert unfinished(JobDirectory(tmp_path / "nowhere", OWN), nobody) is None


def test_one_that_trains_now_is_not_named(tmp_path: Path) -> None:
    """In a sweep it is the sibling in the other terminal: whoever followed the line would join it."""
    trained(tmp_path, OTHER, "step-99.e1.1")
    asked: list[Path] = []

    def somebody(private: Path) -> bool:
        asked.append(private)
        return True

    assert unfinished(begun(tmp_path), somebody) is None
    assert [private.name for private in asked] == [OTHER]
