"""Who may be dead is found without looking at everybody."""

from __future__ import annotations

import random

import pytest

from dalsegno.master.brain.presences import Presence, Presences

TIMEOUT = 15.0


@pytest.mark.parametrize("seed", range(20))
def test_nobody_is_overlooked(seed: int) -> None:
    """Whoever is silent for the node-timeout, or has a closed stream, is among the suspects, and the next look is
    announced in time."""
    draw = random.Random(seed)
    presences, now, look = Presences(), 0.0, 0.0
    for _ in range(3000):
        now += draw.expovariate(2.0)
        name = f"node-{draw.randrange(30)}"
        act = draw.choice(["add", "hear", "hear", "hear", "drop", "close", "open"])
        if act == "add":
            presences.add(name, Presence(now))
        elif name in presences and act == "hear":
            presences[name].heard = now
        elif name in presences and act == "close":
            presences.close(name, now)
        elif name in presences and act == "open":
            presences.open(name)
        elif act == "drop":
            presences.drop(name)
        suspects = presences.suspects(now, TIMEOUT)
        assert len(set(suspects)) == len(suspects)
        assert set(suspects) <= set(presences)
        silent = {name for name in presences if presences[name].heard + TIMEOUT <= now}
        closed = {name for name in presences if presences[name].closed is not None}
        assert silent | closed <= set(suspects)
        assert closed == set(presences.broken)
        look = presences.next_look(TIMEOUT) or now
        others = [presences[name].heard + TIMEOUT for name in presences if name not in suspects]
        assert look > now - 1e-9 or not others
        assert not others or look <= min(others), "the next look comes before anybody is dead"


def test_looks_at_few_where_all_speak() -> None:
    """A thousand nodes that speak every 6 s: nobody is suspect, and looks are seconds apart."""
    presences, draw = Presences(), random.Random(1)
    due = {f"node-{number}": draw.uniform(0.0, 6.0) for number in range(1000)}
    for name in due:
        presences.add(name, Presence(0.0))
    looks, look, now = 0, 0.0, 0.0
    while now < 120.0:
        now += 0.05
        for name, at in due.items():
            if at <= now:
                presences[name].heard, due[name] = now, now + 6.0
        if now >= look:
            looks += 1
            assert presences.suspects(now, TIMEOUT) == []
            look = presences.next_look(TIMEOUT) or now
    assert looks < 60
    assert len(presences._heap) < 2000
