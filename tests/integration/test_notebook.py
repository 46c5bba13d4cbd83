"""docs/supervisors.md on notebooks: the printed cell, in a real IPython as a notebook's kernel runs it."""

from __future__ import annotations

import json
import os
import re
import secrets
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.support.jobs.foreign import IPYTHON, installed
from tests.support.jobs.local_processes import carriers, send
from tests.support.pages.sources import ROOT

pytestmark = [pytest.mark.timeout(400), pytest.mark.full]
MARK = "DALSEGNO_TEST_NOTEBOOK"
# What a kernel does with a cell: programs run in a pipe, not on the kernel's own terminal.
KERNEL = (
    "import sys; from IPython.core.interactiveshell import InteractiveShell as S; S.instance().run_cell(sys.argv[1])"
)


@pytest.fixture
def kernel(tmp_path: Path) -> Iterator[Callable[[str], subprocess.Popen[bytes]]]:
    """Runs a cell in a kernel of its own. Nothing that it started outlives the test."""
    mark = secrets.token_hex(8)
    environment = {
        **os.environ,
        "PYTHONPATH": f"{installed(*IPYTHON)}",
        "IPYTHONDIR": str(tmp_path / "ipython"),
        "PATH": f"{os.path.dirname(sys.executable)}:{os.environ['PATH']}",
        MARK: mark,
    }

    def start(cell: str) -> subprocess.Popen[bytes]:
        with open(tmp_path / "cell.log", "ab") as log:
            return subprocess.Popen(
                [sys.executable, "-c", KERNEL, cell],
                env=environment,
                cwd=tmp_path,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )

    start.carriers = lambda: carriers(f"{MARK}={mark}")  # type: ignore[attr-defined]
    yield start
    send(carriers(f"{MARK}={mark}"))


def steps_of(place: Path) -> list[int]:
    """The steps that rank 0 has made, in order."""
    found = [json.loads(line) for path in place.glob("steps/*") for line in path.read_text().splitlines() if line]
    return sorted(one["step"] for one in found if one["rank"] == 0)


def wait(look: Callable[[], Any], what: str, log: Path) -> None:
    deadline = time.monotonic() + 120
    while not look():
        assert time.monotonic() < deadline, f"{what}\n{log.read_text(errors='replace')[-4000:]}"
        time.sleep(0.1)  # why: processes that are not our children


def test_the_stop_button_loses_nothing(kernel: Any, tmp_path: Path) -> None:
    """The interrupt is a leave notice: the run is saved although IPython kills its own child. The cell resumes it."""
    page = (ROOT / "docs" / "supervisors.md").read_text(encoding="utf-8")
    (cell,) = re.findall(r"`(!dlrover-run [^`]*)`", page)
    script = f"{ROOT / 'examples' / 'ddp.py'} --steps=20 --step-time=1.5 --save-every=1000 --step-log=steps"
    cell, log = cell.replace("train.py", script), tmp_path / "cell.log"
    first = kernel(cell)
    wait(lambda: len(steps_of(tmp_path)) >= 4, "no steps", log)
    first.send_signal(signal.SIGINT)
    first.wait(30)
    wait(lambda: not kernel.carriers(), "the run goes on", log)
    made = steps_of(tmp_path)
    assert len(made) < 20
    assert kernel(cell).wait(200) == 0
    assert "resumed at step" in log.read_text(errors="replace")
    assert steps_of(tmp_path) == list(range(1, 21)), "a step was lost, or made twice"
