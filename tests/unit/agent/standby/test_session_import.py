"""Which imports of a script say that it may call session()."""

from __future__ import annotations

import subprocess
import sys

import pytest

# As a standby worker's hook sees them.
SEEN = """
import sys
from dalsegno.agent.standby.worker_main import is_of_session
class Hook:
    def find_spec(self, name, path=None, target=None):
        if is_of_session(name):
            print(name)
sys.meta_path.insert(0, Hook())
{imports}
"""


def seen(imports: str) -> list[str]:
    """What the hook sees of these imports."""
    done = subprocess.run(
        [sys.executable, "-c", SEEN.format(imports=imports)], capture_output=True, text=True, timeout=120, check=True
    )
    return done.stdout.split()


@pytest.mark.full
def test_torchs_own_imports_say_nothing() -> None:
    """`torch.distributed.checkpoint` imports all rendezvous handlers, and with ours a part of the library."""
    assert seen("import torch.distributed.checkpoint") == []


@pytest.mark.slow
def test_session_is_seen() -> None:
    """However it is imported."""
    assert seen("from dalsegno.elastic import session")[0] == "dalsegno.elastic.script"
