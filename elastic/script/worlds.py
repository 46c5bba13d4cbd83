"""The loop of a process that stays: it goes on in the next world where it stood in the last one."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

from ..data.batches import Batches
from ..rank.exits import Stays
from ..rank.way_in import STATE, TRAINS, way_in
from ..training.entry import move
from ..training.session import BareSession
from .data import DataWish, plan_of
from .state import ScriptState


def through_worlds(
    session: BareSession,
    data: Batches[Any],
    wish: DataWish,
    state: ScriptState,
    loop: Callable[[], Iterator[Any]],
) -> Iterator[Any]:
    """The batches of ``loop()``, begun anew in each world.

    Args:
        wish: What the script has said of ``data``.
        loop: Makes the loop of the present world. Collective; the first is made at once.
    """
    first = _begun(session, data, state, loop)

    def batches() -> Iterator[Any]:
        present = first
        while True:
            try:
                yield from present
                return
            except Stays as out:
                held = out.holds
            # Nothing of the old world may be left, such as the processes of its loader.
            present = iter(())
            _move(session, data, wish, state, held)
            present = _begun(session, data, state, loop)

    return batches()


def _begun(
    session: BareSession, data: Batches[Any], state: ScriptState, loop: Callable[[], Iterator[Any]]
) -> Iterator[Any]:
    data.given_to(state.begin(data), state.scale)
    session.may_stay = state.may_stay
    return loop()


def _move(
    session: BareSession, data: Batches[Any], wish: DataWish, state: ScriptState, held: Mapping[str, str]
) -> None:
    move(session, held, state.unread())
    way_in.again(STATE)
    data.go_on(plan_of(session, wish), session.rank, session.resume)
    state.go_on()
    state.wrapped(alike=session.resume is not None)
    way_in.again(TRAINS)
