"""All ranks save with the same, or none begins: what checks itself meets the other ranks' before the first step."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from dalsegno.elastic import background
from dalsegno.elastic.rank import meetings
from dalsegno.elastic.rank.meetings import Meetings
from dalsegno.elastic.training import loop
from dalsegno.elastic.training.rehearsal import rehearse
from tests.support.workers.threads import Threads, together


class State:
    """What checks itself."""

    def write(self, path: Path) -> None: ...

    def files(self) -> dict[str, Any]:
        return {}

    def rehearse(self) -> None: ...


@pytest.mark.parametrize("in_background", [False, True])
@pytest.mark.parametrize("alike", [False, True])
def test_rank_0_alone_saves_is_not_said_with_a_function_that_does_nothing(
    monkeypatch: pytest.MonkeyPatch, in_background: bool, alike: bool
) -> None:
    """`save=state.write if s.rank == 0 else (lambda path: None)`: one line on both ranks, before anything crosses."""
    monkeypatch.setattr(meetings, "check_main_thread", lambda: None)
    options = {"order": None, "strategy": "ddp", "any_world_size": None}

    def rank(group: Threads) -> str:
        met = Meetings(group, None)
        compare: Any = met.compare
        session: Any = SimpleNamespace(
            meetings=met,
            can_save=True,
            step=0,
            compare=lambda told, *, problem, final: compare(told, problem, final=final),
        )
        whole = alike or group.rank == 0
        if in_background:
            save: Any = background(State().files if whole else dict)
        else:
            save = State().write if whole else (lambda path: None)
        try:
            loop._compare(session, [], None, options, 3, save, loop.Cadences(0, 0), advanced=True)
            rehearse(session, save)
        except ValueError as error:
            return str(error)
        return ""

    first, second = together(2, rank)
    assert isinstance(first, str)
    assert first == second
    assert ("State" in first and " on rank 0" in first) == (not alike)
