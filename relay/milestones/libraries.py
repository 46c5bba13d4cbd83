"""Whether the libraries that speak to the hub are installed, without importing them: that takes a second."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import re

__all__ = ("INSTALL_RELAY", "lacking")

INSTALL_RELAY = "pip install 'dalsegno[relay]'"
# As in setup.cfg: a release, and its part.
_LEAST = {"httpx": (0, 27), "huggingface_hub": (1, 0)}


def lacking() -> str:
    """What of them is missing or too old, for a person; empty if nothing is."""
    return ", ".join(filter(None, (_problem(name, least) for name, least in _LEAST.items())))


def _problem(name: str, least: tuple[int, int]) -> str:
    try:
        version = importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        # A copy on the path has no version: what it lacks shows once it is imported.
        return "" if importlib.util.find_spec(name) else f"no {name}"
    known = re.match(r"(\d+)\.(\d+)", version or "")
    if known is None or (int(known[1]), int(known[2])) >= least:
        return ""
    return f"{name} {version} is older than {least[0]}.{least[1]}"
