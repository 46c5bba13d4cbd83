"""When no process stays, and the line that says so."""

from __future__ import annotations

import pytest
import torch.distributed as dist

from dalsegno.elastic.training.staying import have_talked, none_stays


def test_ranks_that_have_talked(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """One line, by rank 0; in a process without a group nobody knows."""
    monkeypatch.setenv("DALSEGNO_SOCKET", "an agent's")
    assert not none_stays("elastic()", talked=have_talked())
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        assert not none_stays("elastic()", talked=have_talked())
        assert not capsys.readouterr().out
        dist.barrier()
        assert none_stays("elastic()", talked=have_talked())
        line = "stay=True has no effect: before elastic() the ranks of this script talk (a barrier, main_process_first)"
        assert line in capsys.readouterr().out
    finally:
        dist.destroy_process_group()


def test_a_group_that_comes_first(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """New processes would make it before their session, who stays makes it after that."""
    monkeypatch.setenv("DALSEGNO_SOCKET", "an agent's")
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        assert none_stays("fit()", talked=False, group_first=True)
        assert (
            "this script makes the default process group itself, and opens its session later" in capsys.readouterr().out
        )
    finally:
        dist.destroy_process_group()
