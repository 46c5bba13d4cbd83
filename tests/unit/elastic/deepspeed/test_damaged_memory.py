"""An engine is loaded from memory beside the verification, which says whether an error is the checkpoint's."""

from __future__ import annotations

import dataclasses
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from pickle import UnpicklingError
from types import SimpleNamespace
from typing import Any

import pytest
from torch import nn

pytest.importorskip("deepspeed")

from dalsegno.elastic.checkpoint import SHARDED, CheckpointName, Shape
from dalsegno.elastic.deepspeed import beside, engine
from dalsegno.elastic.rank.board import Board, LocalStore
from dalsegno.elastic.rank.collective import Solo
from dalsegno.elastic.rank.exits import BadResumePoint
from dalsegno.elastic.rank.identity import ResumeOrder
from dalsegno.elastic.rank.meetings import Meetings
from dalsegno.elastic.saving.resuming import ResumePoint, handed_out
from dalsegno.elastic.saving.verification import JointVerification, Note
from tests.unit.elastic.saving.test_resuming import write

ERRORS = (UnpicklingError("opcode"), UnicodeDecodeError("utf-8", b"x", 0, 1, ""), KeyError(7), AttributeError("get"))


@pytest.mark.parametrize("error", ERRORS)
@pytest.mark.parametrize("broken", [True, False])
@pytest.mark.parametrize("place", ["engine", "kind", "parts"])
def test_damage_ends_no_job(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, place: str, broken: bool, error: Exception
) -> None:
    """What a flipped byte makes of a description is no mistake of the script's. Of a sound one it is."""
    reads, frames = threading.Event(), []

    def work(go_on: Callable[[int], None]) -> Note:
        reads.wait(30)
        return {"damage": "model states"} if broken else {}

    def judge(notes: Sequence[Note]) -> None:
        if any(notes):
            raise BadResumePoint

    def read(*given: Any) -> None:
        reads.set()
        raise error

    source = write(tmp_path, CheckpointName(4, 2, 1), shape=Shape(1, "deepspeed-zero-1", True))
    point = handed_out(ResumeOrder(source.ref, SHARDED, None), tmp_path, Solo(), verify=False)
    assert isinstance(point, ResumePoint)
    verification = JointVerification(Board(LocalStore()), 0, 1, work, lambda notes: None, judge)
    resume = dataclasses.replace(point, verification=verification, in_memory=True)
    meetings = Meetings(Solo(), SimpleNamespace(send=frames.append))  # type: ignore[arg-type]
    for module in (engine, beside):
        monkeypatch.setattr(module, "refused_together", meetings.together)
    for name in ("tell", "_check"):
        monkeypatch.setattr(engine, name, lambda *given: None)
    monkeypatch.setattr(engine, "check_groups", read)
    monkeypatch.setattr(beside, "_saved", read)

    made = SimpleNamespace(module=nn.Linear(1, 1))

    def load() -> None:
        with resume.loading() as files:
            if place == "engine":
                engine.restore(SimpleNamespace(module=None, optimizer=None), files)
            elif place == "kind":
                beside.BesideEngine(made, {}).begins_anew(files, weights_only=False)
            else:
                beside.BesideEngine(made, {"part": Part()}).load(files)

    with pytest.raises(BadResumePoint if broken else (type(error), RuntimeError)):
        load()
    assert [frame.WhichOneof("body") for frame in frames] == ([] if broken else ["refused"])


class Part:
    """Beside an engine."""

    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        raise AssertionError("it is loaded from what is damaged")
