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

pytest.importorskip("deepspeed")

from dalsegno.elastic.checkpoint import SHARDED, CheckpointName, Shape
from dalsegno.elastic.deepspeed import engine as module
from dalsegno.elastic.rank.board import Board, LocalStore
from dalsegno.elastic.rank.collective import Solo
from dalsegno.elastic.rank.exits import BadResumePoint
from dalsegno.elastic.rank.identity import ResumeOrder
from dalsegno.elastic.rank.meetings import Meetings
from dalsegno.elastic.saving.resuming import ResumePoint, handed_out
from dalsegno.elastic.saving.verification import JointVerification, Note
from tests.unit.elastic.saving.test_resuming import write


@pytest.mark.parametrize("error", [UnpicklingError("opcode"), UnicodeDecodeError("utf-8", b"x", 0, 1, ""), KeyError(7)])
@pytest.mark.parametrize("broken", [True, False])
def test_damage_ends_no_job(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, broken: bool, error: Exception) -> None:
    """What a flipped byte makes of a description is no mistake of the script's. Of a sound one it is."""
    reads, frames = threading.Event(), []

    def work(go_on: Callable[[int], None]) -> Note:
        reads.wait(30)
        return {"damage": "model states"} if broken else {}

    def judge(notes: Sequence[Note]) -> None:
        if any(notes):
            raise BadResumePoint

    def check_groups(engine: Any, directory: Path) -> None:
        reads.set()
        raise error

    source = write(tmp_path, CheckpointName(4, 2, 1), shape=Shape(1, "deepspeed-zero-1", True))
    point = handed_out(ResumeOrder(source.ref, SHARDED, None), tmp_path, Solo(), verify=False)
    assert isinstance(point, ResumePoint)
    verification = JointVerification(Board(LocalStore()), 0, 1, work, lambda notes: None, judge)
    resume = dataclasses.replace(point, verification=verification, in_memory=True)
    meetings = Meetings(Solo(), SimpleNamespace(send=frames.append))  # type: ignore[arg-type]
    monkeypatch.setattr(module, "refused_together", meetings.together)
    monkeypatch.setattr(module, "check_groups", check_groups)
    for name in ("tell", "_check"):
        monkeypatch.setattr(module, name, lambda *given: None)
    with pytest.raises(BadResumePoint if broken else (type(error), RuntimeError)):
        module.restore(SimpleNamespace(module=None), resume)
    assert [frame.WhichOneof("body") for frame in frames] == ([] if broken else ["refused"])
