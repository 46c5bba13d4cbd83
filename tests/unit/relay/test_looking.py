"""What people are shown of a run."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("yaml", reason="needs the extra relay")

from dalsegno.relay import looking
from dalsegno.relay.asked_run import AskedRun, _refusal
from dalsegno.relay.looking import status_lines
from dalsegno.relay.milestones.commander_client import Away, Denied
from tests.support.jobs.commander import run_file


def test_a_script_that_tells_no_steps_is_as_far_as_its_newest_commit() -> None:
    """The Commander hears of its saves only: where it resumed is not where it is."""
    run = {"run_id": "it", "state": "RUNNING", "step": 800, "head": {"name": "step-1100.e3.1", "step": 1100}}
    assert next(iter(status_lines(run))) == "it: RUNNING, step 1100"
    assert next(iter(status_lines({**run, "step": 1150}))) == "it: RUNNING, step 1150"
    assert next(iter(status_lines({**run, "step": None, "head": None}))) == "it: RUNNING"


def event(number: int) -> dict[str, Any]:
    return {"sequence": number, "at": 0.0, "kind": "started", "text": f"event {number}"}


class Over(BaseException):
    """Somebody presses Ctrl-C."""


def followed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, *answers: dict[str, Any] | Exception, after: int = 0
) -> tuple[int | None, list[int]]:
    """The exit code, or None once all has been asked; and behind which events was asked."""
    asked, coming = list[int](), iter(answers)

    def get(self: AskedRun, path: str, after: int, wait: float) -> dict[str, Any]:
        asked.append(after)
        answer = next(coming, Over())
        if isinstance(answer, BaseException):
            raise answer
        return answer

    monkeypatch.setattr(AskedRun, "get", get)
    monkeypatch.setattr(looking, "AGAIN_SECONDS", 0.0)
    options = argparse.Namespace(file=run_file(tmp_path), commander=None, tls_ca=None, tls_cert=None, tls_key=None)
    options.json, options.after, options.follow = False, after, True
    try:
        return looking.events(options), asked
    except Over:
        return None, asked


def test_a_commander_that_is_away_is_waited_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Following goes on behind a restart, with one line for each time that it does not answer."""
    away = Away("no answer from http://127.0.0.1:8443: refused")
    first, second = ({"events": [event(n)], "newest": n} for n in (1, 2))
    assert followed(tmp_path, monkeypatch, first, away, away, second, away) == (None, [0, 1, 1, 1, 2, 2])
    out, error = capsys.readouterr()
    assert [line.split()[-1] for line in out.splitlines()] == ["1", "2"]
    assert error.splitlines() == [f"dalsegno relay: {away}; waiting for it"] * 2


def test_a_record_that_was_lost_is_read_from_its_beginning(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Its events are counted anew, and would be older than those that were shown for a long time."""
    lost, anew = {"events": [], "newest": 2}, {"events": [event(1), event(2)], "newest": 2}
    assert followed(tmp_path, monkeypatch, lost, anew, after=40) == (None, [40, 0, 2])
    assert len(capsys.readouterr().out.splitlines()) == 2


def test_who_is_not_let_in_does_not_wait(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Asking again would not help; a proxy's answer has no line of the Commander's."""
    denied = _refusal(403, b'{"detail": "the token is another one"}')
    assert isinstance(denied, Denied)
    assert str(denied) == "the token is another one"
    assert followed(tmp_path, monkeypatch, denied) == (1, [0])
    assert not isinstance(_refusal(404, b"<html>no such tunnel</html>"), Denied)
    assert not isinstance(_refusal(503, b'{"detail": "starting"}'), Denied)
    assert not isinstance(_refusal(429, b'{"detail": "too many readers"}'), Denied)
