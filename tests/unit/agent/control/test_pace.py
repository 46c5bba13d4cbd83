"""When an agent speaks: as often as the master asks, and not in step with the others."""

from __future__ import annotations

import itertools
import random

import pytest

from dalsegno.agent.control.pace import ReportPace
from dalsegno.protos import control_pb2 as pb


def beats(pace: ReportPace, until: float, draw: random.Random) -> list[float]:
    """When heartbeats go out, of an agent that is always there in time."""
    times = []
    while (now := pace.due(None)) < until:
        times.append(now)
        pace.spoke(now, None, draw.random())
    return times


def busiest(times: list[float], window: float) -> int:
    """The most words within a window (seconds)."""
    times = sorted(times)
    return max(sum(start <= other < start + window for other in times) for start in times[:: len(times) // 100])


@pytest.mark.parametrize("slower", [False, True])
def test_agents_that_begin_at_once_get_out_of_step(slower: bool) -> None:
    """A thousand that lost their master at one moment; or that were told another pace within a second."""
    draw = random.Random(1)
    words: list[float] = []
    for _ in range(1000):
        pace = ReportPace(0.0, 0.0)
        pace.begin(0.0)
        if not slower:
            pace.told(pb.Pace(heartbeat_seconds=5), 0.0)
        first = beats(pace, 2.0, draw)
        assert first[0] == 0.0
        pace.told(pb.Pace(heartbeat_seconds=5), 0.0)
        words += [time for time in beats(pace, 60.0, draw) if time > 20.0]
    assert 8000 <= len(words) <= 8600, "about one in five seconds"
    assert busiest(words, 1.0) < 300, "200 in a second on average"


def test_the_pace_is_kept() -> None:
    """Never slower than asked; hardly faster, so that the master's load is what it reckoned with."""
    pace = ReportPace(0.0, 0.0)
    pace.begin(0.0)
    pace.told(pb.Pace(heartbeat_seconds=2), 0.0)
    times = beats(pace, 1000.0, random.Random(2))[1:]
    gaps = [after - before for before, after in itertools.pairwise(times)]
    assert max(gaps) <= 2.0
    assert min(gaps) >= 1.9
    for told in (pb.Pace(heartbeat_seconds=2), pb.Pace(), pb.Pace(heartbeat_seconds=1)):
        pace.told(told, 1000.0)
        assert not pace.spread, "nobody is in step for being asked for the same, or more"


def test_a_word_that_is_not_heard_is_soon_repeated() -> None:
    """So that several reach the master within a node-timeout, also where one is lost; but not one upon the other."""
    pace = ReportPace(0.0, 0.0)
    pace.told(pb.Pace(heartbeat_seconds=6), 0.0)
    pace.spoke(10.0, None)
    pace.spoke(20.0, None)
    pace.unanswered(23.0)
    assert pace.due(None) == 25.0
    pace.told(pb.Pace(heartbeat_seconds=1), 25.0)
    pace.spoke(25.0, None)
    pace.spoke(26.0, None)
    pace.unanswered(26.0)
    assert pace.due(None) == 27.0


def slotted(pace: ReportPace, now: float, clock: float, slot: float) -> pb.Pace:
    """What a master says at `now`, whose own clock shows that much more."""
    return pb.Pace(heartbeat_seconds=pace.heartbeat, slot_seconds=slot, slot_in_seconds=slot - (now + clock) % slot)


def test_heartbeats_of_a_slot_come_together() -> None:
    """At the master, whose clock is not the agents'; early by less than a slot, and still spread over all slots."""
    draw = random.Random(3)
    slot, clock = 0.2, 12.34
    arrivals: list[float] = []
    for _ in range(500):
        pace = ReportPace(0.0, 0.0)
        pace.begin(0.0)
        pace.told(pb.Pace(heartbeat_seconds=5), 0.0)
        transit, last = draw.uniform(0.0, 0.002), 0.0
        while (now := pace.due(None)) < 60.0:
            assert now - last <= 5.0 or not last
            assert now - last >= 5.0 * 0.95 - slot or last < 20.0, "early by the jitter and a slot at most"
            last = now + draw.uniform(0.0, 0.003)
            pace.spoke(last, None, draw.random())
            arrivals.append(last + transit + clock)
            pace.told(slotted(pace, last + transit, clock, slot), last + 2 * transit)
    late = [time % slot for time in arrivals if time > 20.0 + clock]
    assert max(min(time, slot - time) for time in late) < 0.01, "all of them at the beginning of a slot"
    assert busiest([time for time in arrivals if time > 20.0 + clock], 1.0) < 200, "100 in a second on average"


@pytest.mark.parametrize("slot", [-1.0, 1e-300, 1.0, 1e300, float("inf"), float("nan")])
@pytest.mark.parametrize("begins", [-1e300, 0.0, 1e300, float("inf"), float("nan")])
def test_no_slot_makes_an_agent_silent_or_a_flood(slot: float, begins: float) -> None:
    pace = ReportPace(0.0, 0.0)
    pace.told(pb.Pace(heartbeat_seconds=5), 0.0)
    pace.spoke(0.0, None)
    pace.spoke(10.0, None)
    pace.told(pb.Pace(slot_seconds=slot, slot_in_seconds=begins), 10.001)
    assert 14.4 <= pace.due(None) <= 15.0


def test_nonsense_is_bounded() -> None:
    """Whatever a master asks for, an agent speaks at least once a minute and at most once a second."""
    pace = ReportPace(0.0, 0.0)
    for told, kept in ((1e300, 60.0), (1e-9, 1.0), (-5.0, 1.0), (float("inf"), 60.0), (float("nan"), 60.0)):
        pace.told(pb.Pace(heartbeat_seconds=told, progress_seconds=told), 0.0)
        assert pace.heartbeat == kept
        assert 0.1 <= pace.progress <= 60.0
