"""Waits that people are told of while they last."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterator

__all__ = ["SILENCE_SECONDS", "said_while_slow"]

SILENCE_SECONDS = 5.0


@contextlib.contextmanager
def said_while_slow(say: Callable[[str, bool], None], what: str) -> Iterator[None]:
    """Says what is waited for after `SILENCE_SECONDS` within this, and again whenever it has taken twice as long.

    Args:
        say: gets a line, and whether it is a warning. Called on a thread of this.
        what: begins the line.
    """
    over, began = threading.Event(), time.monotonic()

    def tell() -> None:
        pause = SILENCE_SECONDS
        while not over.wait(pause):
            pause = time.monotonic() - began
            say(f"{what} ({pause:.0f} s so far)", False)

    with contextlib.suppress(RuntimeError):  # without room for a thread nothing is said
        threading.Thread(target=tell, name="slow", daemon=True).start()
    try:
        yield
    finally:
        over.set()
