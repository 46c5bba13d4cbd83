"""What commands say of a script that uses DLRover's library, without running it."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from dalsegno.agent.script import Script, uses_dlrover

IMPORT = "from dlrover.trainer.torch.flash_checkpoint.ddp import DdpCheckpointer\n"
SHARDS = "from dlrover.python.elastic_agent.sharding.client import ShardingClient\n"


def said(directory: Path, module: str, *arguments: str) -> tuple[int, str]:
    """Exit code and output of a command of ours."""
    line = [sys.executable, "-m", f"dalsegno.agent.commands.{module}", *arguments]
    done = subprocess.run(line, cwd=directory, capture_output=True, text=True, timeout=120, check=False)
    return done.returncode, done.stdout + done.stderr


@pytest.mark.slow
def test_the_doctor_reads_a_script(tmp_path: Path) -> None:
    """It neither runs nor imports it: this one would fail."""
    (tmp_path / "train.py").write_text(f"{IMPORT}raise SystemExit('it was run')\n", encoding="utf-8")
    code, text = said(tmp_path, "dalsegno", "doctor", "--dlrover", "train.py")
    assert code == 0
    assert "DdpCheckpointer" in text
    assert "it was run" not in text


@pytest.mark.slow
def test_the_doctor_says_that_a_script_will_be_refused(tmp_path: Path) -> None:
    """With the line that the run would end with."""
    (tmp_path / "train.py").write_text(SHARDS, encoding="utf-8")
    code, text = said(tmp_path, "dalsegno", "doctor", "--dlrover", "train.py")
    assert code == 1
    assert "refused: train.py uses ShardingClient" in text


def test_a_run_that_needs_dlrovers_master_ends_with_one_line(tmp_path: Path) -> None:
    """Before anything is started."""
    (tmp_path / "train.py").write_text(SHARDS, encoding="utf-8")
    code, text = said(tmp_path, "dlrover_run", "train.py")
    assert code == 2
    assert "ShardingClient" in text
    assert text.count("\n") == 1
    assert [path.name for path in tmp_path.iterdir()] == ["train.py"]


@pytest.mark.parametrize(
    ("text", "wanted"), [(IMPORT, True), ("import dlrover\n", True), ("import dlrover_x\n", False), ("", False)]
)
def test_a_scripts_own_text_tells(tmp_path: Path, text: str, wanted: bool) -> None:
    """Not the name of a module that only begins alike."""
    path = tmp_path / "train.py"
    path.write_text(text, encoding="utf-8")
    assert uses_dlrover(Script(sys.executable, ("-u", str(path)))) is wanted
