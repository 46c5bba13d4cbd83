"""What every kind of master says around its server."""

from __future__ import annotations

import subprocess
import sys

PRINTS = """
from dalsegno.master import cli, serving
cli._set_up_logging(None, "job")
serving.print_line({"address": "127.0.0.1:1", "generation": 2})
serving.print_line({"address": "127.0.0.1:1", "generation": 3})
"""


def test_a_full_disk_under_its_output_ends_no_master() -> None:
    """A standby that takes over writes a line, too, and would have left the job without any."""
    with open("/dev/full", "w", encoding="utf-8") as full:
        line = [sys.executable, "-c", PRINTS]
        said = subprocess.run(line, stdout=full, stderr=subprocess.PIPE, text=True, timeout=60, check=False)
    assert said.returncode == 0, said.stderr
    assert said.stderr.count("standard output cannot be written") == 1
    assert "No space left on device" in said.stderr
