"""Who leads, decided from what was learnt; `tests/simulation/leaders.py` plays it with all that happens to masters."""

from __future__ import annotations

from random import Random

import pytest

from dalsegno.master.leadership.standing import (
    CLASH_LOOKS,
    KEEP_SECONDS,
    LEASE_SECONDS,
    LOOK_SECONDS,
    Event,
    KeyOrder,
    Leader,
    LeadershipState,
    Replaced,
    Saw,
    Standing,
    Stop,
    TookOver,
    Unanswered,
    after,
    leads,
    order_at,
)

ME, OTHER = Leader("me", "a:1"), Leader("other", "b:1", 4)


def played(*events: Event, now: float = 10.0) -> LeadershipState:
    state = LeadershipState("me", "a:1")
    for event in events:
        state = after(state, event, now)
    return state


LEADING = (Saw(None), Saw(ME), TookOver(5))


def test_who_sees_nobody_campaigns_and_leads_with_the_key() -> None:
    """Look, write, lead; the generation follows into the key."""
    assert order_at(LeadershipState("me", "a:1"))[0] is KeyOrder.LOOK
    state = played(Saw(None))
    assert order_at(state) == (KeyOrder.CAMPAIGN, 10.0)
    state = after(state, Saw(ME), 10.0)
    assert leads(state)
    assert order_at(state) == (KeyOrder.KEEP, 10.0 + KEEP_SECONDS)
    state = after(state, TookOver(5), 11.0)
    assert order_at(state) == (KeyOrder.ANNOUNCE, 11.0)
    state = after(state, Saw(Leader("me", "a:1", 5)), 11.0)
    assert order_at(state) == (KeyOrder.KEEP, 11.0 + KEEP_SECONDS)


def test_a_follower_names_only_who_has_the_record() -> None:
    """A master that has just won the key would send agents away again."""
    assert played(Saw(OTHER)).named == "b:1"
    assert played(Saw(Leader("other", "b:1"))).named == ""
    assert order_at(played(Saw(OTHER))) == (KeyOrder.LOOK, 10.0 + LOOK_SECONDS)


def test_a_lost_answer_is_found_out_by_looking() -> None:
    """A campaign without an answer may have won."""
    state = played(Saw(None), Unanswered("away"))
    assert order_at(state)[0] is KeyOrder.LOOK
    assert not leads(state)
    assert leads(after(state, Saw(ME), 11.0))


def test_an_ended_lease_ends_nothing() -> None:
    """The leader goes on, and writes the key anew; it goes only if another one has it."""
    state = after(played(*LEADING), Saw(None), 20.0)
    assert leads(state)
    assert state.generation == 5
    assert order_at(state) == (KeyOrder.CAMPAIGN, 20.0)
    assert leads(after(state, Unanswered(), 20.0 + LEASE_SECONDS))
    state = after(state, Saw(OTHER), 20.0)
    assert (leads(state), state.generation, state.named) == (False, 0, "b:1")


def test_who_was_replaced_rests() -> None:
    """The next leader has the time to write its key, and this one lets its own end."""
    state = after(played(*LEADING), Replaced(), 20.0)
    assert not leads(state)
    for said in (Saw(ME), Saw(None)):
        assert not leads(after(state, said, 20.0 + LEASE_SECONDS / 2))
    assert after(state, Saw(None), 20.1 + LEASE_SECONDS).standing is Standing.CAMPAIGNING


def test_a_record_taken_over_too_late_is_not_ours() -> None:
    """Another one has come meanwhile."""
    state = after(played(Saw(None), Saw(ME), Saw(OTHER)), TookOver(3), 12.0)
    assert (leads(state), state.generation) == (False, 0)


def test_one_address_for_two_is_an_error_only_if_it_stays() -> None:
    """Whoever was killed and started again finds its former self for a while."""
    former = Saw(Leader("me before", "a:1", 3))
    state = played(*[former] * (CLASH_LOOKS - 1), now=1e6)
    assert not state.clashing
    assert after(state, former, 1e6).clashing
    for other in (Saw(None), Saw(OTHER)):
        assert not after(after(state, other, 1e6), former, 1e6).clashing
    # The time that passes between two looks proves nothing.
    assert not after(played(former), former, 1e9).clashing


@pytest.mark.parametrize("seed", range(50))
def test_whoever_was_told_to_stop_never_leads_again(seed: int) -> None:
    """Nor breaks, whatever comes in whichever order."""
    random, state, now = Random(seed), LeadershipState("me", "a:1"), 0.0
    said = [Saw(None), Saw(ME), Saw(OTHER), Unanswered(), TookOver(7), Replaced()]
    for _ in range(200):
        now += random.uniform(0.0, 2.0)
        state = after(state, random.choice(said), now)
        assert (state.generation > 0) <= leads(state)
    state = after(state, Stop(), now)
    for event in said:
        state = after(state, event, now)
        assert state.standing is Standing.RESIGNING
        assert order_at(state)[0] is KeyOrder.RESIGN


def test_a_leader_that_cannot_see_the_key_lets_its_agents_go() -> None:
    """Not at once: an election in etcd takes a moment. It leads again once it sees that it may."""
    state = after(played(*LEADING), Unanswered(), 10.0 + LEASE_SECONDS)
    assert leads(state)
    state = after(state, Unanswered(), 10.1 + LEASE_SECONDS)
    assert (leads(state), state.generation, order_at(state)[0]) == (False, 0, KeyOrder.LOOK)
    assert leads(after(state, Saw(Leader("me", "a:1", 5)), 20.0))
    assert after(state, Saw(None), 20.0).standing is Standing.CAMPAIGNING
