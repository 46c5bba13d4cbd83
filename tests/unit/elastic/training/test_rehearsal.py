"""All ranks save with the same, or none begins: what checks itself meets the other ranks' before the first step."""

from __future__ import annotations

import json
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from dalsegno.elastic import background
from dalsegno.elastic.rank import meetings
from dalsegno.elastic.rank.collective import Solo
from dalsegno.elastic.rank.meetings import Meetings
from dalsegno.elastic.training import loop
from dalsegno.elastic.training.rehearsal import rehearse


class Two(Solo):
    """One rank of two, that meet in turn."""

    world_size = 2

    def __init__(self, rank: int, place: threading.Barrier, said: list[str]) -> None:
        self.rank, self._place, self._said = rank, place, said  # type: ignore[misc]

    def gather(self, message: Any, *, patience_seconds: float | None = None) -> list[Any]:
        self._said[self.rank] = json.dumps(message)
        self._place.wait(10)
        heard = [json.loads(one) for one in self._said]
        self._place.wait(10)
        return heard


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
    place, said = threading.Barrier(2), ["", ""]
    options = {"order": None, "strategy": "ddp", "any_world_size": None}

    def rank(number: int) -> str:
        met = Meetings(Two(number, place, said), None)
        compare: Any = met.compare
        session: Any = SimpleNamespace(
            meetings=met, can_save=True, compare=lambda told, *, problem, final: compare(told, problem, final=final)
        )
        whole = alike or number == 0
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

    with ThreadPoolExecutor(2) as ranks:
        first, second = ranks.map(rank, (0, 1))
    assert first == second
    assert ("State" in first and " on rank 0" in first) == (not alike)
