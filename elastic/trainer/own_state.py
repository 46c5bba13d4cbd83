"""What a `Trainer` saves of itself, beside model, optimizer and data."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ..training.session import BareSession
from .hooks import Hooks
from .made import MadeByScript, listed

STATE_VERSION = 1


class OwnState:
    """Of one `Trainer`.

    Args:
        made: What the script has made.
        hooks: The callbacks.
        drop_last: The Trainer's.
        other_schedule: Accept a schedule whose functions have changed.

    Attributes:
        evaluated: The last step that has an evaluation.
    """

    def __init__(self, made: MadeByScript, hooks: Hooks, *, drop_last: bool, other_schedule: bool) -> None:
        self._made, self._hooks = made, hooks
        self._drop_last, self._other_schedule = drop_last, other_schedule
        self.evaluated = 0

    def state_dict(self) -> dict[str, Any]:
        """For a checkpoint.

        Raises:
            TypeError, ValueError, RuntimeError: See ``Hooks.state_dict``.
        """
        return {
            "version": STATE_VERSION,
            "evaluated": self.evaluated,
            "made": dict(self._made.kinds),
            "drop_last": self._drop_last,
            "factors": self._made.factors,
            **self._hooks.state_dict(),
        }

    def load(self, state: Mapping[str, Any], session: BareSession) -> None:
        """The inverse. Collective.

        Raises:
            ValueError: It is another training's, or of another version.
        """
        if state["version"] != STATE_VERSION:
            raise ValueError(
                f"the checkpoint's trainer state is of version {state['version']}, this program reads {STATE_VERSION}"
            )
        had = state.get("made", self._made.kinds)
        if had != self._made.kinds:
            raise ValueError(
                f"the checkpoint's training has {listed(had)}, this one has {self._made}: it would go on "
                "in another way than it began; make the same ones, or start a new run"
            )
        if state.get("drop_last", self._drop_last) != self._drop_last:
            raise ValueError(f"the checkpoint's training has drop_last={not self._drop_last}, this one has the other")
        if not self._other_schedule:
            self._made.check_factors(state.get("factors", {}))
        self.evaluated = state["evaluated"]
        self._hooks.load_state_dict(state, session)
