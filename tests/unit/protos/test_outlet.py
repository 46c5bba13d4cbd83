"""What is written where nobody may wait: a disk that is full once takes the next line."""

from __future__ import annotations

import errno
import os
import pty
import time
from pathlib import Path

import pytest

from dalsegno.protos.outlet import Outlet


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EDQUOT, errno.EIO, errno.ESTALE])
def test_a_file_that_took_no_line_once_gets_the_next(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    """How many are missing stands behind it."""
    write, fails = os.write, [True]

    def refuse(fd: int, data: bytes) -> int:
        if fd == log and fails[0]:
            raise OSError(number, os.strerror(number))
        return write(fd, data)

    log = os.open(tmp_path / "log", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    monkeypatch.setattr(os, "write", refuse)
    outlet = Outlet(log, "me")
    assert outlet.put(b"lost\n")
    assert outlet.flush(10)
    assert outlet.put(b"lost\ntoo\n")
    assert outlet.flush(10)
    fails[0] = False
    assert outlet.put(b"shown\n")
    end = f"me: warning: 3 lines are not shown here: {os.strerror(number)}\n"
    until = time.monotonic() + 10
    while (tmp_path / "log").read_text() != f"shown\n{end}":
        assert time.monotonic() < until, (tmp_path / "log").read_text()
        time.sleep(0.01)  # why: a thread writes it
    os.close(log)


@pytest.mark.parametrize("kind", ["pipe", "terminal"])
def test_nothing_waits_for_a_reader_that_is_gone(kind: str) -> None:
    """Who asks hears that it is dropped."""
    reader, writer = os.pipe() if kind == "pipe" else pty.openpty()
    outlet = Outlet(writer)
    os.close(reader)
    until = time.monotonic() + 10
    while outlet.put(b"a line\n"):
        assert time.monotonic() < until
        time.sleep(0.01)  # why: a thread finds it out
    assert outlet.flush(0)
    os.close(writer)
