"""A line for people, from the commands that are no pod's."""

from __future__ import annotations

import sys

from dalsegno.protos.text import one_line

__all__ = ("say",)


def say(text: str) -> None:
    """Prints a line on standard error."""
    print(f"dalsegno relay: {one_line(text)}", file=sys.stderr, flush=True)
