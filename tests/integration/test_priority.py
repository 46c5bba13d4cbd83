"""What runs beside a training yields to it, also from a session of its own."""

from __future__ import annotations

import os
import subprocess
import sys
import time

import pytest

pytestmark = pytest.mark.timeout(60)

BUSY = """
import os, sys, time
from dalsegno.protos.priority import yield_to_others
os.sched_setaffinity(0, {int(sys.argv[1])})
if niceness := int(sys.argv[2]):
    yield_to_others(niceness)
print(flush=True)
# Who yields may come to begin late, and would then have the core to itself at the end.
until, begun = float(sys.stdin.readline()), time.process_time()
while time.monotonic() < until:
    pass
print(time.process_time() - begun)
"""


def test_who_yields_gets_what_is_left() -> None:
    """Both want one core, each from its own session, as an upload and a trainer do."""
    core = str(min(os.sched_getaffinity(0)))
    both = [
        subprocess.Popen(
            [sys.executable, "-c", BUSY, core, niceness],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
        for niceness in ("0", "19")
    ]
    try:
        for process in both:
            assert process.stdout is not None
            assert process.stdout.readline() == "\n"
        until = time.monotonic() + 2.0
        for process in both:
            assert process.stdin is not None
            process.stdin.write(f"{until}\n")
            process.stdin.flush()
        trainer, upload = (float(process.communicate()[0]) for process in both)
    finally:
        for process in both:
            process.kill()
            process.wait()
    assert upload < trainer / 3, (upload, trainer)
