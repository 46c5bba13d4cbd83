"""Other people's libraries, each installed into a directory of its own for the tests that use it."""

from __future__ import annotations

import fcntl
import hashlib
import subprocess
import sys
from pathlib import Path

import pytest

from .cluster import ROOT

# With what they import, as far as it is not there anyway; never torch.
DLROVER = ("dlrover==0.6.1", "deprecated", "wrapt", "nvidia-ml-py")
# The last one from whose states in memory DLRover's own class can load.
OLD_DEEPSPEED = ("deepspeed==0.15.4",)
RAY = ("ray==2.60.0",)
IPYTHON = (
    *("ipython==9.18.1", "ipython-pygments-lexers", "jedi", "parso", "matplotlib-inline", "pexpect", "ptyprocess"),
    *("prompt-toolkit", "wcwidth", "stack-data", "executing", "asttokens", "pure-eval", "traitlets"),
)
LIGHTNING = ("lightning==2.6.6", "lightning-utilities==0.15.3", "torchmetrics==1.9.0")


class NotInstalled(Exception):
    """No package index answers; one line."""


def installed(*packages: str) -> Path:
    """The directory for PYTHONPATH, see `directory_of`. Skips the test where it cannot be made."""
    try:
        return directory_of(*packages)
    except NotInstalled as error:
        pytest.skip(str(error))


def directory_of(*packages: str) -> Path:
    """The directory for PYTHONPATH. Made once for each interpreter.

    Args:
        packages: The first gives the directory its name. What they depend on is not installed.

    Raises:
        NotInstalled: It cannot be made.
    """
    name = packages[0].partition("==")[0]
    which = hashlib.sha256("\n".join([sys.prefix, *packages]).encode()).hexdigest()[:8]
    place = ROOT / "build" / f"{name}-{which}"
    place.parent.mkdir(exist_ok=True)
    with open(f"{place}.lock", "w", encoding="ascii") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not (place / "made").exists():
            line = [sys.executable, "-m", "pip", "install", "-q", "--disable-pip-version-check", "--no-deps"]
            line += ["--retries=0", "--timeout=20", "--upgrade", f"--target={place}", *packages]
            done = subprocess.run(line, capture_output=True, text=True, check=False, timeout=240)
            if done.returncode:
                raise NotInstalled(f"{name} cannot be installed: {' '.join(done.stderr.strip().splitlines()[-1:])}")
            (place / "made").touch()
    return place
