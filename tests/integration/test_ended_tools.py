"""A benchmark or a demo that is ended by a signal, as by `timeout` or a supervisor, leaves no process behind."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.jobs import local_processes as processes
from tests.support.pages.sources import ROOT

MARK = "DALSEGNO_TEST_ENDED"
# What is started, and the file that something below it writes to: it trains, or serves.
TOOLS = {
    "benchmark": (["benchmarks", "upload", "--ranks=1"], "*/rank0"),
    "demo": (["examples.demo_relay", "--output=out"], "out/*/commander.log"),
}


@pytest.mark.timeout(240)
@pytest.mark.parametrize("tool", TOOLS)
def test_nothing_of_it_is_left(tool: str, tmp_path: Path) -> None:
    """Its processes are in sessions of their own, which a terminal's or a supervisor's signal does not reach."""
    words, written = TOOLS[tool]
    mark = f"{MARK}={tmp_path}"
    paths = f"{ROOT}{os.pathsep}{os.environ.get('PYTHONPATH', '')}"
    environment = {**os.environ, MARK: str(tmp_path), "TMPDIR": str(tmp_path), "PYTHONPATH": paths}
    with open(tmp_path / "said", "wb") as said:
        process = subprocess.Popen(
            [sys.executable, "-m", *words], cwd=tmp_path, env=environment, stdout=said, stderr=said
        )
    try:
        began = processes.seconds_until(lambda: any(one.stat().st_size for one in tmp_path.glob(written)), 90.0)
        assert began < 90.0, (tmp_path / "said").read_text()
        assert len(processes.carriers(mark)) > 2
        process.terminate()
        assert process.wait(20) == 128 + signal.SIGTERM, (tmp_path / "said").read_text()
        assert processes.seconds_until(lambda: not processes.carriers(mark), 5.0) < 5.0, processes.carriers(mark)
    finally:
        process.kill()
        process.wait()
        processes.send(processes.carriers(mark))
