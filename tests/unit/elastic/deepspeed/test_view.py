"""Where the links lie that DeepSpeed loads by."""

from __future__ import annotations

import tempfile
from pathlib import Path

import pytest

from dalsegno.elastic.deepspeed.view import sharded_view
from dalsegno.protos.contract import Variable


@pytest.mark.parametrize("agents", ["agent", "gone", "with[1]", ""])
def test_links_go_with_the_agent(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, agents: str) -> None:
    """A rank that is killed while it loads removes nothing; without an agent, they lie where all temporary files do."""
    elsewhere, checkpoint = tmp_path / "elsewhere", tmp_path / "step[1]"
    for made in (elsewhere, checkpoint, tmp_path / "agent", tmp_path / "with[1]"):
        made.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(elsewhere))
    monkeypatch.setenv(Variable.SOCKET, str(tmp_path / agents / "agent.sock") if agents else "")
    with sharded_view(checkpoint) as view:
        assert view.resolve() == checkpoint
        assert view.parents[1] == (tmp_path / "agent" if agents == "agent" else elsewhere)
    assert not list(elsewhere.iterdir())
