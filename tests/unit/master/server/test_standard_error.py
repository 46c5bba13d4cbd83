"""A master whose stderr nobody reads (Ctrl-S in its terminal, a log driver that hangs) serves on."""

from __future__ import annotations

import os
import subprocess
import sys

from dalsegno.protos.contract import MASTER_HUNG

LOGS = """
import logging, sys
from pathlib import Path
from dalsegno.master import cli, serving
from dalsegno.master.record.store import StoreError
from dalsegno.master.server.watchdog import Watchdog

cli._set_up_logging(Path(sys.argv[3]) if sys.argv[3:] else None, "job")
for number in range(int(sys.argv[1])):
    logging.getLogger("dalsegno.master.brain").warning("vm-%d was lost", number)
if sys.argv[2] == "hangs":
    logging.getLogger("asyncio").error("a library's line")
print("logged", flush=True)
if sys.argv[2] == "hangs":
    Watchdog(1.0, None)._end(300)
serving.say_end(StoreError("the store is gone"))
"""


def full_pipe() -> tuple[int, int]:
    """A pipe that nobody reads, to the brim."""
    reader, writer = os.pipe()
    os.set_blocking(writer, False)
    try:
        while True:
            os.write(writer, b"x" * 4096)
    except BlockingIOError:
        os.set_blocking(writer, True)
    return reader, writer


def run(count: int, then: str, stderr: int, *log_file: str) -> subprocess.CompletedProcess[str]:
    line = [sys.executable, "-c", LOGS, str(count), then, *log_file]
    return subprocess.run(line, stdout=subprocess.PIPE, stderr=stderr, text=True, timeout=60, check=False)


def test_nobody_waits_for_who_reads_the_log() -> None:
    """Neither a line, nor the process's end, nor the end of a process whose loop hangs."""
    reader, writer = full_pipe()
    try:
        logged = run(50_000, "ends", writer)
        assert (logged.stdout, logged.returncode) == ("logged\n", 0)
        # What it says of its log, and why it ends.
        no_room = run(100, "ends", writer, "/dev/full")
        assert (no_room.stdout, no_room.returncode) == ("logged\n", 0)
        hung = run(1, "hangs", writer)
        assert (hung.stdout, hung.returncode) == ("logged\n", MASTER_HUNG)
    finally:
        os.close(reader)
        os.close(writer)


def test_all_lines_arrive_in_order_where_somebody_reads() -> None:
    """The last one says why the master ends."""
    said = run(100, "ends", subprocess.PIPE).stderr.splitlines()
    assert [line.rpartition("] ")[2] for line in said[:-1]] == [f"vm-{number} was lost" for number in range(100)]
    assert said[-1] == "dlrover-master: the store is gone"


def test_that_the_log_file_is_full_is_said_once() -> None:
    """It was a traceback for every line."""
    assert sorted(run(100, "ends", subprocess.PIPE, "/dev/full").stderr.splitlines()) == [
        "dlrover-master: the store is gone",
        "dlrover-master: warning: the log /dev/full cannot be written: No space left on device",
    ]


def test_a_process_that_hangs_shows_all_stacks() -> None:
    """As far as they are read."""
    hung = run(1, "hangs", subprocess.PIPE)
    assert hung.returncode == MASTER_HUNG
    assert "event loop has stood still for 300 s" in hung.stderr
    assert "in _end" in hung.stderr
    assert "[job/master] a library's line" in hung.stderr


THREADLESS = """
import sys, threading
from pathlib import Path
from dalsegno.master import cli, serving
from dalsegno.master.record.store import StoreError

cli._set_up_logging(Path("/dev/full"), "job")
def no_room(self):
    raise RuntimeError("can't start new thread")
threading.Thread.start = no_room
cli.log.warning("a line for which there is no room")
serving.say_end(StoreError("the store is gone"))
"""


def test_why_it_ends_is_said_where_no_thread_can_be_started() -> None:
    """That may be the reason. It was a traceback instead."""
    ended = subprocess.run([sys.executable, "-c", THREADLESS], capture_output=True, text=True, timeout=60, check=False)
    assert (ended.returncode, ended.stderr) == (0, "dlrover-master: the store is gone\n")
