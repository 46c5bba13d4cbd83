"""In a worker: waits for its place in the next world, with all that its script has built.

Its session has saved, left the old world and told the agent. For the agent it has ended, with the exit code of a
drain, or with that of a failure if its world had broken. What it still is in the nursery is a process that waits for a
place, as one that has run ahead does.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from typing import Any

from .word import Word

__all__ = ["Staying", "redirect"]


def redirect(path: str, target: int) -> None:
    """Lets a standard stream write to a file from now on."""
    source = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o666)
    os.dup2(source, target)
    os.close(source)


class Staying:
    """See ``protos.staying.Wait``.

    Args:
        word: The way to the nursery. Sends `{"stays": HOLDS, "broken": BOOL}`, and `{"taken": true}` once it has its
            place; receives a place, as in `run_ahead`, or `{"leave": true}`.
    """

    def __init__(self, word: Word) -> None:
        self._word = word

    def __call__(self, holds: Mapping[str, str], *, broken: bool = False) -> bool:
        for stream in (sys.stdout, sys.stderr):
            if stream is not None:
                stream.flush()
        if not self._word.say({"stays": dict(holds), "broken": broken}):
            return False  # the script has closed descriptors that it does not know, so no place would reach it
        place = self._word.hear()
        if place is None:
            os._exit(1)  # the nursery is gone, and this process with it
        if "leave" in place:
            return False
        self._take(place)
        if not self._word.say({"taken": True}):
            os._exit(1)
        return True

    @staticmethod
    def _take(place: Mapping[str, Any]) -> None:
        for target, path in ((1, place["stdout"]), (2, place["stderr"])):
            if path is not None:  # otherwise it goes on writing to the agent's own
                redirect(path, target)
        for name in place["drop"]:
            os.environ.pop(name, None)
        os.environ.update(place["environment"])
