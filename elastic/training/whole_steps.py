"""What is due at a boundary that gradients are carried over comes behind a later step."""

from __future__ import annotations

import time
from typing import Any

from torch.optim import Optimizer

from ..rank.remarks import remark
from .carried import LOOKS, CarriedGradients
from .session import BareSession

__all__ = ["WholeSteps", "optimizers_in"]

# In the first boundaries the ranks ask each other although none of them has seen anything: what one sees the others
# hear with the next exchange only.
_FIRST = 2 * LOOKS
# A drain waits so long for an optimizer's step at most, and within half of its notice; another save so long (seconds).
DRAIN_SECONDS, SAVE_SECONDS = 20.0, 300.0
# A save, where nobody knows yet whether there is one to come.
UNKNOWN_SECONDS = 60.0
# More than any rank's wish to wait.
_HURRIES = 2


class WholeSteps:
    """Puts off what is due at a boundary that gradients are carried over. Collective: all ranks make it alike.

    Args:
        session: The process's.
        save: What the loop saves with.
    """

    def __init__(self, session: BareSession, save: Any) -> None:
        self._session, self._boundaries = session, 0
        # A function that saves does not say of what.
        optimizers = {*optimizers_in(save), *session.unstepped.optimizers}
        self._seen = CarriedGradients(optimizers, remark if session.rank == 0 else _nothing)
        self._since: float | None = None
        # When the last step ended, and how long it took.
        self._at, self._seconds = time.monotonic(), 0.0
        self._said = False

    def boundary(self, step: int) -> bool:
        """Step ``step`` is done. Returns whether an optimizer goes on behind it with what it has by now."""
        self._boundaries += 1
        now = time.monotonic()
        self._seconds, self._at = now - self._at, now
        self._seen.boundary(step)
        self._session.saves.carries = self._seen.known or self._seen.here
        return self._seen.here

    def put_off(self, told: bool, *, drain: bool, later: bool = True) -> bool:
        """Whether what is due here comes behind a later step. Collective, and the same on all ranks.

        Args:
            told: Some rank has said that it carries gradients. On all ranks alike.
            drain: All ranks are to leave.
            later: There is somebody to save it then. On all ranks alike.
        """
        if not told and self._boundaries > _FIRST:
            return False
        now, here, saves = time.monotonic(), self._seen.here, self._session.saves
        since = now if self._since is None else self._since
        # Of a leaver there may be no time for another step; it knows its notice, and the others do not.
        hurries = drain and now + self._seconds > saves.drain_by(since, DRAIN_SECONDS)
        most = SAVE_SECONDS if self._seen.known else UNKNOWN_SECONDS
        waits = later and here and (drain or now - since < most)
        later = saves.largest(_HURRIES if hurries else int(waits)) == 1
        self._since = since if later else None
        if here and not later:
            self._saved_within()
        return later

    def _saved_within(self) -> None:
        if not self._said and self._session.rank == 0:
            self._said = True
            remark(
                "step %d is saved between two steps of an optimizer: the gradients that it has accumulated are in no"
                " checkpoint, and lost if the run goes on from there",
                self._session.step,
            )


def _nothing(*_: Any) -> None:
    """Rank 0 speaks for all."""


def optimizers_in(save: Any) -> list[Optimizer]:
    """Those in what a loop saves, as far as that shows."""
    called = getattr(save, "state", save)
    parts = getattr(getattr(called, "__self__", called), "parts", None)
    return [part for part in parts.values() if isinstance(part, Optimizer)] if isinstance(parts, dict) else []
