"""The agent's standard output and error, in a process of its own: it moves descriptors 1 and 2."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

SAYS = """
import sys
from pathlib import Path
from dalsegno.agent.shell.output import Output
def say():
    with Output() as output:
        output.divert(Path(sys.argv[1]))
        print("a line", flush=True)
say()
"""


def test_the_log_is_closed(tmp_path: Path) -> None:
    """A file that is left open is a ResourceWarning, an error for those who ask for that."""
    log = tmp_path / "output.log"
    done = subprocess.run(
        [sys.executable, "-W", "default", "-c", SAYS, str(log)], capture_output=True, text=True, timeout=60, check=True
    )
    assert done.stdout == log.read_text() == "a line\n"
    assert done.stderr == ""
