"""Where the links lie that DeepSpeed loads by."""

from __future__ import annotations

import tempfile
from pathlib import Path

import pytest

from dalsegno.elastic.deepspeed.view import model_states_file, model_states_of, sharded_view
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


@pytest.mark.parametrize("there", ["zero_pp_rank_0_mp_rank_00", "mp_rank_00"])
def test_the_first_ranks_model_states(tmp_path: Path, there: str) -> None:
    """Of a rank of model parallelism that was not there when it was saved, the first one's."""
    first = tmp_path / f"{there}_model_states.pt"
    with pytest.raises(RuntimeError, match="no model states in"):
        model_states_file(tmp_path)
    first.touch()
    assert model_states_file(tmp_path) == model_states_file(tmp_path, 1) == model_states_of(0, first) == first
    assert model_states_of(12, first).name == "zero_pp_rank_12_mp_rank_00_model_states.pt"
    other = tmp_path / "mp_rank_01_model_states.pt"
    other.touch()
    assert model_states_file(tmp_path, 1) == other
