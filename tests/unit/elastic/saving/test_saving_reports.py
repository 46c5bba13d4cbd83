"""What a rank tells its agent of a save that goes on: never less than before, and 0 only between its parts."""

from __future__ import annotations

import errno
import itertools
import os
from pathlib import Path
from typing import Any

import pytest

from dalsegno.elastic.checkpoint import CheckpointStore, Position
from dalsegno.elastic.rank.collective import Solo
from dalsegno.elastic.rank.identity import Identity
from dalsegno.elastic.saving import saving, saving_reports, tiers
from tests.support.workers.fake_link import FakeLink
from tests.support.workers.threads import Threads, together

pytestmark = pytest.mark.timeout(60)


class Agent(FakeLink):
    def told(self) -> list[int]:
        """What it was told of the files, in order."""
        return [saving.written for saving in self.of("saving")]


def test_no_part_of_a_save_begins_anew(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """They are written, synced and sealed: the second and the third part begin with what the first has written."""
    agent, at_the_seal = Agent(), []
    plain = tiers.seal

    def seal(*arguments: object) -> str:
        at_the_seal.extend(agent.told())
        return plain(*arguments)  # type: ignore[arg-type]

    monkeypatch.setattr(tiers, "seal", seal)
    one = saving.Saver(Identity(epoch=1), Solo(), CheckpointStore(tmp_path), agent, None)  # type: ignore[arg-type]
    manifest = one.save(saving.Content(1, Position(0, 1)), _model, create_directory=True, drain=True)
    one.close()
    assert manifest is not None
    size = sum(entry.size for entry in manifest.files)
    assert size > 1000
    assert at_the_seal == [1, 0, size, 0, size]
    assert agent.told()[-1] == 0


def _model(path: Path) -> None:
    (path / "model.pt").write_bytes(bytes(1000))


def test_without_an_agent_nobody_looks_at_what_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A directory with many files costs a call for each."""
    looked: list[Path] = []
    plain = saving_reports._trace

    def trace(path: Path) -> tuple[int, int, int]:
        looked.append(path)
        return plain(path)

    monkeypatch.setattr(saving_reports, "_trace", trace)
    written = saving_reports.Written(tmp_path)
    assert looked == []
    (tmp_path / "model").write_bytes(bytes(7))
    assert [written.read(), written.read()] == [7, 7]
    assert looked == [tmp_path] * 2


def test_what_is_written_in_a_file_that_has_its_size_counts(tmp_path: Path) -> None:
    """A memory map: one more each time that something has changed, so that nobody takes it for a save that hangs."""
    (tmp_path / "mapped").write_bytes(bytes(1000))
    written = saving_reports.Written(tmp_path)
    assert [written.read(), written.read()] == [1000, 1000]
    os.utime(tmp_path / "mapped", ns=(0, 1))
    assert [written.read(), written.read()] == [1001, 1001]
    (tmp_path / "other").write_bytes(bytes(10))
    assert [written.read(), written.read()] == [1011, 1011]


@pytest.mark.parametrize("number", [errno.EIO, errno.ESTALE, errno.ENOTDIR])
@pytest.mark.parametrize("call", range(3))
def test_a_size_that_cannot_be_told_ends_no_save(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int, call: int
) -> None:
    """On no rank: the others would wait for that one in the next part of the save."""
    plain, calls = os.lstat, itertools.count()

    def lstat(path: str, **options: Any) -> os.stat_result:
        if str(path).endswith("model.pt") and next(calls) == call:
            raise OSError(number, os.strerror(number), path)
        return plain(path, **options)

    monkeypatch.setattr(os, "lstat", lstat)

    def one(group: Threads) -> Any:
        identity = Identity(epoch=1, rank=group.rank, world_size=2, local_rank=group.rank, local_world_size=2)
        link: Any = Agent()
        saver = saving.Saver(identity, group, CheckpointStore(tmp_path), link, None)
        manifest = saver.save(saving.Content(1, Position(0, 1)), _model, create_directory=True, drain=True)
        saver.close()
        return manifest

    first, second = together(2, one)
    assert first is not None
    assert first == second
    assert next(calls) > call


def test_any_reason_reaches_the_agent() -> None:
    """A library's error may have several lines, or characters that no message takes: this rank would go alone."""
    agent = Agent()
    reports = saving_reports.SavingReports(agent, "step-1.e1.1", lambda: 1, problem="disk\nfull \udcff \x1b[2J")  # type: ignore[arg-type]
    with reports:
        reports._send(agent, 1)  # type: ignore[arg-type]
    assert r"disk full \udcff \x1b[2J" in [saving.problem for saving in agent.of("saving")]
