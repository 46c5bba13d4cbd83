"""Attributes of other people's modules and classes that are replaced for a while, by an agent or by a session."""

from __future__ import annotations

from typing import Any

__all__ = ["Replacements"]


class Replacements:
    """What was replaced, and by what."""

    def __init__(self) -> None:
        # The owner, the name, ours, and what was there; None: the owner inherits it, or has none.
        self._all: list[tuple[Any, str, Any, Any]] = []

    def put(self, owner: Any, name: str, ours: Any) -> None:
        """Replaces an attribute of a module or a class."""
        self._all.append((owner, name, ours, owner.__dict__.get(name)))
        setattr(owner, name, ours)

    def put_back(self) -> None:
        """Restores all of them. What somebody else has replaced meanwhile stays."""
        for owner, name, ours, before in reversed(self._all):
            if owner.__dict__.get(name) is not ours:
                continue
            if before is None:
                delattr(owner, name)
            else:
                setattr(owner, name, before)
