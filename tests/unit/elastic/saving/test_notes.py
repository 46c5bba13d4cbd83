"""`latest.json` and `best.json`: what people read, and no rank and no notice waits for."""

from __future__ import annotations

import json
import threading
from pathlib import Path

import pytest

from dalsegno.elastic.checkpoint import Best, CheckpointStore, Manifest, Position
from dalsegno.elastic.rank.collective import Solo
from dalsegno.elastic.rank.identity import Identity
from dalsegno.elastic.saving import notes, saving
from tests.support.workers.fake_link import FakeLink

pytestmark = pytest.mark.timeout(60)


class Slow(CheckpointStore):
    """Its disk takes as long for `latest.json` as a test likes."""

    def __init__(self, directory: Path) -> None:
        super().__init__(directory)
        self.asked, self.answers = threading.Event(), threading.Event()
        self.written: list[str] = []

    def write_latest(self, manifest: Manifest) -> None:
        self.asked.set()
        assert self.answers.wait(30)
        super().write_latest(manifest)
        self.written.append(manifest.name)


def saver(store: CheckpointStore, link: FakeLink | None) -> saving.Saver:
    return saving.Saver(Identity(epoch=1), Solo(), store, link, None)  # type: ignore[arg-type]


def save(one: saving.Saver, step: int) -> Manifest:
    manifest = one.save(saving.Content(step, Position(0, step)), _model, create_directory=True, drain=True)
    assert manifest is not None
    return manifest


def _model(path: Path) -> None:
    (path / "model.pt").write_bytes(b"0")


def test_a_save_under_an_agent_is_over_before_its_note_is_written(tmp_path: Path) -> None:
    """What waits for it is a leaver's notice, and every other rank."""
    store, agent = Slow(tmp_path), FakeLink()
    one = saver(store, agent)
    manifest = save(one, 1)
    assert store.asked.wait(30)
    assert [sealed.name for sealed in agent.of("sealed")] == [manifest.name]
    assert store.written == []
    store.answers.set()
    one.close()
    assert json.loads((tmp_path / "latest.json").read_text())["name"] == manifest.name


def test_what_was_noted_last_counts(tmp_path: Path) -> None:
    """Saves that came while the disk was busy with a note: one note more, of the last of them."""
    store = Slow(tmp_path)
    one = saver(store, FakeLink())
    first = save(one, 1)
    assert store.asked.wait(30)
    save(one, 2)
    last = save(one, 3)
    store.answers.set()
    one.close()
    assert store.written == [first.name, last.name]
    assert json.loads((tmp_path / "latest.json").read_text())["step"] == 3


def test_a_saver_that_is_closed_has_written_its_notes(tmp_path: Path) -> None:
    """Nothing of it writes into the run's directory any more: the script may move it."""
    store = Slow(tmp_path)
    one = saver(store, FakeLink())
    manifest = save(one, 1)
    assert store.asked.wait(30)
    answer = threading.Timer(0.2, store.answers.set)
    answer.start()
    one.close()
    assert store.written == [manifest.name]
    assert "dalsegno-notes" not in {thread.name for thread in threading.enumerate()}
    answer.join()


def test_a_saver_is_closed_where_the_disk_does_not_answer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A script is not held up by a copy for people for longer than by a save."""
    monkeypatch.setattr(saving, "LAST_WORDS_SECONDS", 0.05)
    store = Slow(tmp_path)
    one = saver(store, FakeLink())
    save(one, 1)
    one.close()
    assert store.written == []
    monkeypatch.undo()
    store.answers.set()
    one.close()
    assert len(store.written) == 1


def test_alone_a_note_is_there_when_the_save_returns(tmp_path: Path) -> None:
    """Nobody waits for this rank, and its person may look at once."""
    store = Slow(tmp_path)
    store.answers.set()
    manifest = save(saver(store, None), 1)
    assert store.written == [manifest.name]


def test_a_note_that_cannot_be_written_is_a_warning_and_the_next_one_is_tried(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The checkpoint is safe."""
    store = CheckpointStore(tmp_path)
    one = notes.Notes(store, apart=False)
    monkeypatch.setattr(store, "write_best", _full)
    one.write(None, Best("step-1.e1.1", "loss", "min", 1.0))
    assert "no space" in caplog.text
    monkeypatch.undo()
    one.write(None, Best("step-1.e1.1", "loss", "min", 1.0))
    assert json.loads((tmp_path / "best.json").read_text())["name"] == "step-1.e1.1"


def test_where_no_thread_can_be_started_it_is_written_all_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The interpreter is about to end: the thread of a save in the background is its last."""
    store = Slow(tmp_path)
    store.answers.set()
    manifest = save(saver(store, None), 1)
    store.written.clear()
    monkeypatch.setattr(threading.Thread, "start", _no_threads)
    notes.Notes(store, apart=True).write(manifest, None)
    assert store.written == [manifest.name]


def _full(best: Best | None) -> None:
    raise OSError("no space")


def _no_threads(thread: threading.Thread) -> None:
    raise RuntimeError("can't start new thread at interpreter shutdown")
