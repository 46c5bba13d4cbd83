"""Ranks whose machines have disks of their own, and call a directory there the same: with real mounts."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.jobs.ports import free_port
from tests.support.workers.zero_runs import worker_environment

pytestmark = pytest.mark.timeout(120)

# A machine of its own, as far as mounts go: what lies in the directory is seen nowhere else.
_APART = 'mount -t tmpfs tmpfs "$1" && shift && exec "$@"'
_SHARED = 'shift && exec "$@"'
_UNSHARE = ("unshare", "--mount", "--propagation=private", "sh", "-c")
_OPENS = """
import sys
from dalsegno.elastic import session
from dalsegno.elastic.training import opening
opening.OUT_OF_SIGHT_SECONDS = 1.0
try:
    with session(sys.argv[1]) as s:
        print("begins")
except (ValueError, RuntimeError) as error:
    print(type(error).__name__, error)
"""


def said(directory: Path, mounts: str) -> list[str]:
    """What each of two ranks says as it opens a session in a directory below this one."""
    port = str(free_port())
    ranks = [
        subprocess.Popen(
            [*_UNSHARE, mounts, "sh", str(directory), sys.executable, "-c", _OPENS, str(directory / "checkpoints")],
            env=worker_environment(
                RANK=str(rank), LOCAL_RANK="0", WORLD_SIZE="2", MASTER_ADDR="127.0.0.1", MASTER_PORT=port
            ),
            stdout=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    try:
        return [rank.communicate(timeout=90)[0].strip() for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
            rank.wait(10)


@pytest.mark.skipif(os.geteuid() != 0 or not shutil.which("unshare"), reason="mounts want root and unshare")
def test_one_path_on_two_disks_is_refused_and_on_one_it_is_not(tmp_path: Path) -> None:
    """It trained on, sealed nothing, and waited for ever at the second save."""
    if subprocess.run([*_UNSHARE, _APART, "sh", str(tmp_path), "true"], check=False).returncode:
        pytest.skip("nothing may be mounted here")
    path = tmp_path / "checkpoints"
    line = (
        f"Refusal checkpoint_dir is {path} on rank 0 and {path} on rank 1: what rank 0 writes has not come into sight"
        " on rank 1 within 1 s: it is not the same directory, or a mount that caches names. Give all ranks one that all"
        " of them see"
    )
    assert said(tmp_path, _APART) == [line] * 2
    assert said(tmp_path, _SHARED) == ["begins"] * 2
    assert not [name for name in os.listdir(path) if "probe" in name]
