"""Two users on one machine: what one has saved, and the other may not read, is not gone."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from dalsegno.agent.control.claim import ClaimFile
from dalsegno.agent.control.machine import Machine
from tests.unit.agent.storage.test_survey import put

pytestmark = pytest.mark.timeout(120)

# Root that may read no more than others: so the interpreter, which may be root's alone, can be run.
PLAIN = ["setpriv", "--bounding-set", "-dac_override,-dac_read_search"]
STRANGER = 54321


@pytest.mark.skipif(os.geteuid() != 0 or shutil.which("setpriv") is None, reason="needs root and setpriv")
@pytest.mark.parametrize("closed", [("step-3.e2.1",), ("step-2.e1.1", "step-3.e2.1")], ids=["newest", "all"])
def test_a_run_neither_begins_anew_nor_goes_back(tmp_path: Path, closed: tuple[str, ...]) -> None:
    """The master's record is lost, so agents alone know of the run: none comes that may not read its newest part."""
    if subprocess.run([*PLAIN, "true"], check=False, capture_output=True).returncode != 0:
        pytest.skip("no capability may be dropped here")
    run, script = tmp_path / "checkpoints" / "job" / "run-0001", tmp_path / "train.py"
    for name in ("step-2.e1.1", "step-3.e2.1"):
        put(run, name)
    for name in closed:
        (run / name).chmod(0o700)
        os.chown(run / name, STRANGER, STRANGER)
    script.write_text("print('it trains', flush=True)\n")
    words = [*PLAIN, sys.executable, "-m", "dalsegno.agent.commands.dlrover_run", "--nnodes=1", "--job-id=job"]
    words += [f"--checkpoint-dir={tmp_path / 'checkpoints'}", f"--log-dir={tmp_path / 'logs'}", str(script)]
    try:
        done = subprocess.run(words, capture_output=True, text=True, check=False, timeout=60)
    finally:
        # It would wait for other agents.
        claim = ClaimFile(tmp_path / "checkpoints" / ".dalsegno" / "job").read()
        if claim is not None:
            Machine().kill(claim.pid, claim.start_time)
    assert done.returncode == 2
    assert "it trains" not in done.stdout
    said = "step-3.e2.1 is there, and may be the newest checkpoint, but this agent cannot read it (Permission denied)"
    assert f"{said}: {run}/step-3.e2.1" in done.stderr
    assert f"belongs to user {STRANGER} (mode 700), this agent is of user root." in done.stderr
