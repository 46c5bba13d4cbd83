"""The recipes of docs/supervisors.md, as they are printed, with programs in the place of Slurm's and ours."""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import signal
import subprocess
import time
from pathlib import Path

import pytest

from dalsegno.agent.commands.arguments import parse
from dalsegno.protos.contract import JobSettings
from tests.support.pages.sources import ROOT

PAGE = (ROOT / "docs" / "supervisors.md").read_text(encoding="utf-8")
# It leaves on notice a moment later, as an agent that drains does.
AGENT = """#!/bin/bash
trap 'sleep 0.3; echo left >> "$LOG"; exit "$CODE"' HUP
echo "started $*" >> "$LOG"
[ "$WAITS" ] && while :; do sleep 0.05; done
exit "$CODE"
"""


def program(directory: Path, name: str, text: str) -> None:
    path = directory / name
    path.write_text(text)
    path.chmod(0o755)


def handles_term(pid: int) -> bool:
    caught = re.search(r"^SigCgt:\s*(\w+)$", Path(f"/proc/{pid}/status").read_text(), re.MULTILINE)
    return caught is not None and bool(int(caught[1], 16) >> (signal.SIGTERM - 1) & 1)


def test_every_recipe_waits_long_for_its_master() -> None:
    """A start that gives up on it ends with 2, after which no supervisor starts that node again."""
    lines = [line for line in PAGE.replace("\\\n", " ").splitlines() if "--master=HOST" in line]
    words = [line[line.index("--nnodes=1:4") :].removesuffix("&").split() for line in lines]
    assert [parse(line, {}).connect_timeout >= 3600 for line in words] == [True] * 3  # Slurm, systemd, Ray


@pytest.mark.parametrize("code", [0, 1, 2, 75, 76, 137])
@pytest.mark.parametrize("starts", [0, 100])
@pytest.mark.parametrize("notice", [False, True])
def test_slurms_script_asks_for_another_start_of_who_left(tmp_path: Path, code: int, starts: int, notice: bool) -> None:
    """It passes the notice on, waits for the end, and requeues its own task after 75 and 76, and where it was killed.

    The latter, as what `render` prints, not for ever.
    """
    (script,) = re.findall(r"```text\n(#!/bin/bash\n#SBATCH.*?)```", PAGE, re.DOTALL)
    program(tmp_path, "train.sbatch", script)
    program(tmp_path, "dlrover-run", AGENT)
    program(tmp_path, "scontrol", '#!/bin/sh\necho "scontrol $*" >> "$LOG"\n')
    log = tmp_path / "log"
    environment = {
        **os.environ,
        "PATH": f"{tmp_path}:{os.environ['PATH']}",
        "LOG": str(log),
        "CODE": str(code),
        "WAITS": "yes" if notice else "",
        "SLURM_ARRAY_JOB_ID": "7",
        "SLURM_ARRAY_TASK_ID": "2",
        "SLURM_RESTART_COUNT": str(starts),
    }
    job = subprocess.Popen([tmp_path / "train.sbatch"], env=environment, cwd=tmp_path, start_new_session=True)
    try:
        deadline = time.monotonic() + 60
        while not log.exists() or (notice and not handles_term(job.pid)):
            assert time.monotonic() < deadline
            time.sleep(0.01)
        if notice:
            job.send_signal(signal.SIGTERM)
        assert job.wait(60) == code
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(job.pid, signal.SIGKILL)
    started, *rest = log.read_text().splitlines()
    assert "--job-id=gpt" in started
    again = code in (75, 76) or (code == 137 and starts < 100)
    assert rest == ["left"] * notice + ["scontrol requeue Incomplete 7_2"] * again


@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="no systemd-analyze here")
def test_systemds_unit_is_one(tmp_path: Path) -> None:
    """Every line of it is known to systemd; the program, the user and the directory are other people's."""
    (unit,) = re.findall(r"```text\n(\[Unit\].*?)```", PAGE, re.DOTALL)
    (tmp_path / "train.service").write_text(unit.replace("/opt/train/bin/dlrover-run", "/bin/true"))
    checked = subprocess.run(
        ["systemd-analyze", "verify", "--man=no", str(tmp_path / "train.service")],
        check=False,
        capture_output=True,
        text=True,
        timeout=60,
    )
    said = [line for line in checked.stderr.splitlines() if "train.service" in line]
    assert not said
    stop = int(re.search(r"TimeoutStopSec=(\d+)", unit)[1])  # type: ignore[index]
    assert stop >= JobSettings().drain_timeout + 15
    assert "\nWants=network-online.target\nAfter=network-online.target\n" in unit, "without a wish nothing starts it"


def test_rays_script_is_the_one_that_lies_here() -> None:
    """The page prints it whole; `test_ray.py` plays it."""
    (printed,) = re.findall(r"```text\n(\"\"\"One dlrover-run.*?)```", PAGE, re.DOTALL)
    assert printed == (ROOT / "deploy" / "ray" / "train_on_ray.py").read_text(encoding="utf-8")
