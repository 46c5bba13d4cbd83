"""ZeRO checkpoints that several tests start from."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.workers.zero_runs import Sources


@pytest.fixture(scope="session")
def sources(tmp_path_factory: pytest.TempPathFactory) -> Sources:
    """Sealed checkpoints, each made by a real world when it is first asked for. Never to be changed."""
    return Sources(Path(tmp_path_factory.mktemp("sources")))
