"""Which world has a place for a process that has stayed."""

from __future__ import annotations

import threading
from unittest.mock import MagicMock

import pytest

from dalsegno.agent.standby.stayed_workers import StayedWorkers, fits
from dalsegno.agent.standby.worker_main import Assignment
from dalsegno.protos.contract import Variable


def held(name: str, digest: str) -> dict[str, str]:
    return {Variable.RESUME_NAME: name, Variable.RESUME_DIGEST: digest}


@pytest.mark.parametrize(
    ("holds", "wanted", "has"),
    [
        (("step-7.e1.1", "d"), ("step-7.e1.1", "d"), True),
        (("step-7.e1.1", "d"), ("step-7.e1.1", "other"), False),
        (("step-7.e1.1", "d"), ("step-7.e1.2", "e"), False),
        # Ranks of two nodes have saved the same boundary by themselves.
        (("step-7.e1.1000", "d"), ("step-7.e1.1002", "e"), True),
        (("step-7.e1.1000", "d"), ("step-8.e1.1002", "e"), False),
        (("step-7.e1.1000", "d"), ("step-7.e2.1002", "e"), False),
        (("step-7.e1.1000", "d"), ("step-7.e1.1", "e"), False),
        (("step-7.e1.1", "d"), ("step-7.e1.1000", "e"), False),
        (("step-7.e1.1000", "d"), ("step-7.e1.1002.universal.3", "e"), False),
        (("", ""), ("step-7.e1.1000", "e"), False),
        (("nonsense", "d"), ("step-7.e1.1000", "e"), False),
    ],
)
def test_a_process_fits_a_world_that_resumes_from_what_it_holds(
    holds: tuple[str, str], wanted: tuple[str, str], has: bool
) -> None:
    assert fits(held(*holds), held(*wanted)) is has


def test_a_world_that_begins_anew_has_no_place() -> None:
    assert not fits(held("step-7.e1.1000", "d"), {})


def test_a_process_that_nobody_could_end_later_ends_now(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without room for a thread. It has no place, and is told to leave."""

    def no_room(_: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", no_room)
    stayed, worker = StayedWorkers(), MagicMock(returncode=None)
    stayed.add(0, Assignment(["train.py"], False, {}, "/"), (MagicMock(), worker))
    assert stayed.dismiss() == [worker]
    assert worker.discard.called
