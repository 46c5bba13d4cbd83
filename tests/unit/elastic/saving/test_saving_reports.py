"""What a rank tells its agent of a save that goes on: never less than before, and 0 only between its parts."""

from __future__ import annotations

from pathlib import Path

import pytest

from dalsegno.elastic.checkpoint import CheckpointStore, Position
from dalsegno.elastic.rank.collective import Solo
from dalsegno.elastic.rank.identity import Identity
from dalsegno.elastic.saving import saving, tiers
from tests.support.workers.fake_link import FakeLink

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
