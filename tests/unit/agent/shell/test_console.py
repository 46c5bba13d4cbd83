"""The agent's own lines, at a console and in its log."""

from __future__ import annotations

import logging
import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from dalsegno.agent.commands.status import status_lines
from dalsegno.agent.shell.console import RunConsole, set_up_logging
from dalsegno.agent.shell.output import _Log
from dalsegno.protos import control_pb2 as pb
from dalsegno.protos.outlet import Outlet


def test_a_closed_terminal_harms_nobody(caplog: pytest.LogCaptureFixture) -> None:
    """The drain that follows its SIGHUP goes on; what would have been said is in the log."""
    reader, writer = os.pipe()
    os.close(reader)
    console = RunConsole(Outlet(writer))
    with caplog.at_level("INFO"):
        console.say("saving at the next step boundary")
        console.flush(10)
    assert "saving at the next step boundary" in caplog.text
    os.close(writer)


def test_what_others_wrote_cannot_move_the_cursor(capfd: pytest.CaptureFixture[str]) -> None:
    """Escape sequences and line breaks in a reason or a name are shown, not obeyed: one line for each word."""
    console = RunConsole()
    console.say("node a\x1b[2J left\ndlrover-run: the run finished\u202e")
    console.flush(10)
    assert capfd.readouterr().err == "dlrover-run: node a\\x1b[2J left dlrover-run: the run finished\\u202e\n"
    reply = pb.StatusReply(
        job_id="job", reason="a\nb", nodes=[pb.NodeStatus(node="x\x1b[8m", role="spare", host="h\r")]
    )
    lines = status_lines(reply)
    assert all(line.isprintable() for line in lines)
    assert lines[0].endswith("(a b)")
    assert lines[1].startswith("  spare x\\x1b[8m on h ")


def test_a_path_that_is_not_utf8_is_logged(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """As Python writes it. Its line was missing, with a traceback on the console instead."""
    logger = logging.getLogger("test.surrogates")
    set_up_logging(tmp_path / "agent.log", lambda: "here", names=("test.surrogates",))
    logger.info("the script is %s", os.fsdecode(b"/tmp/d\xe9x"))
    logger.handlers.clear()
    assert (tmp_path / "agent.log").read_text().endswith("the script is /tmp/d\\udce9x\n")
    assert capfd.readouterr().err == ""


def test_a_log_is_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of an agent that runs for months the last of it is kept; what it says of each event is left out."""
    monkeypatch.setattr("dalsegno.protos.log_file.LARGEST_LOG_BYTES", 10_000)
    logger = logging.getLogger("test.bounded")
    set_up_logging(tmp_path / "agent.log", lambda: "here", names=("test.bounded",))
    for number in range(1000):
        logger.info("line %d", number)
        logger.debug("detail")
    logger.handlers.clear()
    files = sorted(tmp_path.iterdir())
    assert [file.name for file in files] == ["agent.log", "agent.log.1"]
    assert sum(file.stat().st_size for file in files) <= 20_000
    assert "line 999" in files[0].read_text()
    assert "detail" not in files[0].read_text()


def test_that_the_outputs_log_is_full_is_said_past_the_pipe(capfd: pytest.CaptureFixture[str]) -> None:
    """Standard error may be that pipe, and who reads it would wait there for itself."""
    said: list[bytes] = []
    outlet: Any = SimpleNamespace(put=said.append)
    log = _Log(Path("/dev/full"), outlet)
    log.write(b"one\n")
    log.write(b"two\n")
    assert [line.decode() for line in said] == [
        "dlrover-run: warning: the log /dev/full cannot be written: No space left on device\n"
    ]
    assert capfd.readouterr() == ("", "")
