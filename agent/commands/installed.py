"""What is installed beside us, and what of it does not fit a script."""

from __future__ import annotations

import importlib.metadata
import os

from ..dlrover import scripts

__all__ = ["outdated_dlrover", "version_of"]

# torch's words for "yes".
_YES = ("1", "y", "yes", "true")


def version_of(package: str) -> str:
    """The installed version; empty: it is not installed."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return ""


def outdated_dlrover(found: scripts.Uses) -> list[str]:
    """What of DLRover's library, as far as a script uses it, does not work with what is installed, one line each."""
    loads_all = os.environ.get("TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD", "").lower() in _YES
    return scripts.outdated(found, version_of("deepspeed"), version_of("torch"), loads_all)
