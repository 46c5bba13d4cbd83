"""The mirror where its volume fails: what is on the hub is told, and what failed is tried again in the next period."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("yaml", reason="needs the extra relay")

from dalsegno.elastic.checkpoint import Manifest
from dalsegno.protos.run_file import read_run_file
from dalsegno.relay.milestones import mirror as module
from dalsegno.relay.milestones import snapshot
from dalsegno.relay.milestones.commander_client import Milestone
from dalsegno.relay.milestones.mirror import Mirror, Places
from tests.support.hub.scene import Volume
from tests.support.jobs.commander import run_file

INTERVAL_SECONDS = 14400.0


class Commander:
    """Knows one commit, and what it was told."""

    def __init__(self, head: Manifest) -> None:
        self.head, self.told = head, list[Milestone]()

    def run(self) -> dict[str, Any]:
        head = {"name": self.head.name, "step": self.head.step, "digest": self.head.digest}
        return {"head": head, "milestones": []}

    def tell(self, milestone: Milestone) -> bool:
        self.told.append(milestone)
        return True


class Transfer:
    """An upload in whose course the test does something, and which succeeds."""

    meanwhile: Callable[[], None] = staticmethod(lambda: None)

    def __init__(self, job: object, environment: object = None) -> None:
        pass

    def __enter__(self) -> Transfer:
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def result(self, seconds: float, every: float, meanwhile: Callable[[], None], heard: object) -> dict[str, Any]:
        self.meanwhile()
        meanwhile()
        return {"revision": "abc"}


class Bench:
    """A mirror with one commit to publish."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.lines: list[str] = []
        self.volume = Volume(folder / "its")
        self.commander = Commander(self.volume.save(40))
        self.transfer = type("Kind", (Transfer,), {})
        monkeypatch.setattr(module, "Transfer", self.transfer)
        self._patch = monkeypatch
        hf = {"repo": "me/tune", "interval_seconds": INTERVAL_SECONDS}
        monkeypatch.setenv("HF_TOKEN", "hf_word")
        file = read_run_file(run_file(folder, hf=hf))
        places = Places(self.volume.checkpoints, self.volume.hf, self.volume.hf / "events.jsonl")
        self.mirror = Mirror(file, places, self.commander, self.lines.append)  # type: ignore[arg-type]

    def fill(self) -> None:
        """From here on the volume takes no byte more."""

        def full(*_: object, **__: object) -> None:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

        for where, name in ((module, "replace_file"), (snapshot, "replace_file"), (module.os, "write")):
            self._patch.setattr(where, name, full)

    @property
    def rest_seconds(self) -> float:
        return self.mirror._pace.rest_seconds


@pytest.fixture
def bench(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Bench:
    (tmp_path / "its").mkdir()
    (tmp_path / "volume").mkdir()
    return Bench(tmp_path, monkeypatch)


def test_a_volume_that_fills_during_an_upload_costs_no_milestone(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    """The note beside the upload fails, and that of its revision: the Commander hears of it all the same, once."""
    monkeypatch.setattr(module, "NOTE_SECONDS", 0.0)
    bench.transfer.meanwhile = staticmethod(bench.fill)
    bench.mirror._try(bench.mirror._turn)
    assert [(one.revision, one.step) for one in bench.commander.told] == [("abc", 40)]
    assert any("the volume fails" in line for line in bench.lines), bench.lines
    assert bench.volume.snapshots == [], "and its room is free again"
    bench.mirror._try(bench.mirror._turn)
    assert len(bench.commander.told) == 1


def test_a_volume_that_cannot_be_read_ends_no_upload(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is done beside it may fail in any way."""

    def fails(*_: object) -> None:
        raise OSError(errno.EIO, "broken")

    bench.transfer.meanwhile = staticmethod(lambda: monkeypatch.setattr(module, "_newest", fails))
    bench.mirror._try(bench.mirror._turn)
    assert [one.revision for one in bench.commander.told] == ["abc"]


def test_an_upload_that_cannot_be_started_is_tried_again(bench: Bench) -> None:
    """No process, no temporary file: one line, and the next period, as of any other failure."""

    def fails(*_: object) -> None:
        raise OSError(errno.EAGAIN, "no process")

    bench.transfer.__init__ = fails  # type: ignore[misc]
    bench.mirror._try(bench.mirror._turn)
    assert any("no milestone: step-40.e1.0: " in line and "no process" in line for line in bench.lines), bench.lines
    assert INTERVAL_SECONDS - 60 < bench.rest_seconds <= INTERVAL_SECONDS


def test_a_checkpoint_that_cannot_be_frozen_waits_a_period(bench: Bench) -> None:
    """A damaged one is read once in a period, however long ago the try before was."""
    path = bench.volume.run_dir / "step-40.e1.0" / "model.bin"
    path.write_bytes(bytes(path.stat().st_size))
    bench.mirror._pace = module.due.MilestonePace(waited_seconds=INTERVAL_SECONDS + 1)
    bench.mirror._try(bench.mirror._turn)
    assert any("step-40.e1.0 cannot be frozen" in line for line in bench.lines), bench.lines
    assert bench.rest_seconds == INTERVAL_SECONDS


def test_a_checkpoint_whose_file_no_manifest_can_name_waits_a_period(bench: Bench) -> None:
    """A trainer has saved a file with a backslash in its name: one line says which, and the mirror goes on."""
    bench.commander.head = bench.volume.save(41, extra="a\\b")
    bench.mirror._try(bench.mirror._turn)
    assert any("step-41.e1.0 cannot be frozen" in one and "is no path" in one for one in bench.lines), bench.lines
    assert bench.rest_seconds == INTERVAL_SECONDS
    assert bench.volume.snapshots == []


def test_one_that_is_pruned_meanwhile_costs_no_period(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is no failure: the next commit is there already, or comes."""

    def pruned(source: Path, *_: object) -> None:
        (source / "MANIFEST.json").unlink()
        raise FileNotFoundError(errno.ENOENT, "gone", str(source))

    monkeypatch.setattr(module, "freeze", pruned)
    bench.mirror._try(bench.mirror._turn)
    assert any("was pruned" in line for line in bench.lines), bench.lines
    assert (bench.rest_seconds, bench.mirror._pace.waited_seconds) == (0.0, None)
