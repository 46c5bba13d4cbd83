"""The mark of what was sealed once: without it a checkpoint that lost its manifest is deleted as one never finished."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from dalsegno.agent.commands import dalsegno
from dalsegno.elastic.checkpoint import CheckpointStore, inspect
from dalsegno.elastic.checkpoint.deletion import delete
from dalsegno.elastic.checkpoint.marks import mark, marked
from tests.unit.agent.storage.test_storage import make_checkpoint

Output = pytest.CaptureFixture[str]


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """Two sealed checkpoints and one that was given up."""
    for step in (1, 2):
        make_checkpoint(tmp_path / "run-0001", f"step-{step}.e1.1")
    (tmp_path / "run-0001" / "step-3.e1.1").mkdir()
    return tmp_path / "run-0001"


def test_a_checkpoint_without_its_manifest_is_not_taken_for_one_given_up(run: Path) -> None:
    """It is called damaged; what was given up goes."""
    (run / "step-1.e1.1" / "MANIFEST.json").unlink()
    store = CheckpointStore(run)
    assert (store.never_sealed(2), store.lost_manifest(2)) == (["step-3.e1.1"], ["step-1.e1.1"])
    assert [(one.name, one.damaged) for one in inspect(run).unsealed] == [("step-1.e1.1", True), ("step-3.e1.1", False)]


def test_prune_says_that_it_stays(run: Path, capsys: Output) -> None:
    """A person may know where the manifest is."""
    (run / "FINISHED.json").touch()
    (run / "step-1.e1.1" / "MANIFEST.json").unlink()
    assert dalsegno.run(["checkpoints", "prune", str(run), "--keep=1"]) == 0
    assert "step-1.e1.1: it was sealed and has lost its manifest: it stays" in capsys.readouterr().out
    assert sorted(path.name for path in run.glob("step-*")) == ["step-1.e1.1", "step-2.e1.1"]


def test_what_is_deleted_on_purpose_leaves_no_mark(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nor does what an interrupted deletion leaves: it goes with the next sweep."""

    def interrupted(*arguments: object, **options: object) -> None:
        raise KeyboardInterrupt

    delete(run / "step-1.e1.1")
    with monkeypatch.context() as patch:
        patch.setattr("shutil.rmtree", interrupted)
        with pytest.raises(KeyboardInterrupt):
            delete(run / "step-2.e1.1")
    assert marked(run) == frozenset()
    assert CheckpointStore(run).never_sealed(2) == ["step-2.e1.1", "step-3.e1.1"]


@pytest.mark.parametrize("what", ["file", "link", "pipe"])
def test_marks_are_made_nowhere_else(run: Path, tmp_path: Path, what: str) -> None:
    """Whatever lies in the place of their directory: sealing, deleting and looking go on without them."""
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    (elsewhere / "step-2.e1.1").touch()
    for name in os.listdir(run / ".sealed"):
        (run / ".sealed" / name).unlink()
    (run / ".sealed").rmdir()
    if what == "file":
        (run / ".sealed").touch()
    elif what == "link":
        (run / ".sealed").symlink_to(elsewhere)
    else:
        os.mkfifo(run / ".sealed")
    mark(run / "step-1.e1.1")
    delete(run / "step-2.e1.1")
    assert os.listdir(elsewhere) == ["step-2.e1.1"]
    assert marked(run) == frozenset()
    assert [manifest.name for manifest in inspect(run).sealed] == ["step-1.e1.1"]
