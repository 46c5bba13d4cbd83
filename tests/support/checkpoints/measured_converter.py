"""A converter that says at its end how much memory it took at most, beyond what it had when it began (bytes)."""

from __future__ import annotations

import re
import sys
from pathlib import Path

from dalsegno.elastic.universal import __main__ as program
from dalsegno.elastic.universal import check, forms, source, streaming, upstream  # noqa: F401 (not counted)


def _status(name: str) -> int:
    found = re.search(rf"^{name}:\s+(\d+) kB", Path("/proc/self/status").read_text(), re.MULTILINE)
    assert found is not None
    return int(found[1]) * 1024


before = _status("VmRSS")
Path("/proc/self/clear_refs").write_text("5")  # the high-water mark begins anew
code = program.main()
print(f"grew by {_status('VmHWM') - before}", file=sys.stderr)
sys.exit(code)
