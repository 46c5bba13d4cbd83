"""Looks that decide nothing, and somebody who waits."""

from __future__ import annotations

import math

from dalsegno.agent.storage.patience import LookPatience


def test_it_ends_behind_so_many_looks_and_so_much_time() -> None:
    """Not with either alone: looks may come fast, and one may take long."""
    patience = LookPatience(1, -1.0)
    assert [patience.lasts(True) for _ in range(3)] == [True, False, False]
    fast, slow = LookPatience(1, math.inf), LookPatience(1000, -1.0)
    assert all(patience.lasts(True) for patience in (fast, slow) for _ in range(100))
    assert not fast.lasts(False)


def test_it_begins_anew_with_a_look_that_decides_and_with_who_waits() -> None:
    """What a script saves all the time has used up nothing of who waits for its last save."""
    patience = LookPatience(1, -1.0)
    assert [patience.lasts(undecided) for undecided in (True, True, False, True, True)] == [
        *(True, False),
        *(False, True, False),
    ]
    patience.renew()
    assert patience.lasts(True)
