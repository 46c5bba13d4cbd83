"""`dalsegno` where its standard output is closed, or takes nothing."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.unit.agent.storage.test_storage import make_checkpoint

# As the console script does it.
RUN = "import sys; from dalsegno.agent.commands.dalsegno import main; sys.argv[0] = 'dalsegno'; main()"


@pytest.mark.parametrize(
    ("where", "code", "said"),
    [
        (">&-", 0, ""),
        ("> /dev/full", 1, "dalsegno: error: standard output cannot be written: No space left on device\n"),
        ("> /dev/null", 0, ""),
    ],
)
def test_a_command_without_an_output(tmp_path: Path, where: str, code: int, said: str) -> None:
    """Closed: nobody wants to see it, and it has done what it should. Full: one line, and no success."""
    make_checkpoint(tmp_path / "run-0001", "step-5.e2.1")
    shell = f"""exec "$0" -c "$1" checkpoints ls "$2" {where}"""
    done = subprocess.run(
        ["/bin/sh", "-c", shell, sys.executable, RUN, str(tmp_path / "run-0001")],
        stderr=subprocess.PIPE,
        text=True,
        timeout=60,
        check=False,
    )
    assert (done.returncode, done.stderr) == (code, said)
