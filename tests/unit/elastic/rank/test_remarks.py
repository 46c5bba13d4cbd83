"""What people should know is where they look."""

from __future__ import annotations

import errno
import io
import os
import sys
import threading

import pytest

from dalsegno.elastic.rank import remarks
from dalsegno.elastic.rank.remarks import remark


def test_a_remark_is_on_the_console_of_an_agent(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    """It is always in the log; an agent shows what is printed."""
    monkeypatch.delenv("DALSEGNO_SOCKET", raising=False)
    remark("%d ranks share %s", 3, "a card")
    assert capsys.readouterr().out == ""
    monkeypatch.setenv("DALSEGNO_SOCKET", "there")
    remark("100 %")
    assert capsys.readouterr().out == "dalsegno: 100 %\n"
    assert [record.getMessage() for record in caplog.records] == ["3 ranks share a card", "100 %"]


class Full(io.StringIO):
    """A disk that takes no more."""

    def flush(self) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


@pytest.mark.parametrize("output", ["full", "closed", "none"])
def test_an_output_that_takes_nothing_ends_no_training(monkeypatch: pytest.MonkeyPatch, output: str) -> None:
    monkeypatch.setenv("DALSEGNO_SOCKET", "socket")
    closed = io.StringIO()
    closed.close()
    monkeypatch.setattr(sys, "stdout", {"full": Full(), "closed": closed, "none": None}[output])
    remark("step %d", 1)


def test_a_line_where_it_takes_long(monkeypatch: pytest.MonkeyPatch) -> None:
    """And only there; nor does it matter whether a thread for it can be started."""
    said = threading.Event()
    monkeypatch.setattr(remarks, "remark", lambda line: said.set())
    with remarks.remarked_after(0.01, "a line"):
        assert said.wait(10)
    said.clear()
    with remarks.remarked_after(60.0, "a line"):
        pass

    def start(thread: threading.Thread) -> None:
        raise RuntimeError("cannot start new thread")

    monkeypatch.setattr(threading.Thread, "start", start)
    with remarks.remarked_after(0.0, "a line"):
        pass
    assert not said.is_set()
