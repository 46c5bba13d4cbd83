"""When an agent speaks: as often as the master asks, and not in step with the others."""

from __future__ import annotations

import itertools
import random

import pytest

from dalsegno.agent.pace import Pace
from dalsegno.protos import control_pb2 as pb


def beats(pace: Pace, until: float, draw: random.Random) -> list[float]:
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
        pace = Pace(0.0, 0.0)
        pace.begin(0.0)
        if not slower:
            pace.told(pb.Pace(heartbeat_seconds=5))
        first = beats(pace, 2.0, draw)
        assert first[0] == 0.0
        pace.told(pb.Pace(heartbeat_seconds=5))
        words += [time for time in beats(pace, 60.0, draw) if time > 20.0]
    assert 8000 <= len(words) <= 8600, "about one in five seconds"
    assert busiest(words, 1.0) < 300, "200 in a second on average"


def test_the_pace_is_kept() -> None:
    """Never slower than asked; hardly faster, so that the master's load is what it reckoned with."""
    pace = Pace(0.0, 0.0)
    pace.begin(0.0)
    pace.told(pb.Pace(heartbeat_seconds=2))
    times = beats(pace, 1000.0, random.Random(2))[1:]
    gaps = [after - before for before, after in itertools.pairwise(times)]
    assert max(gaps) <= 2.0
    assert min(gaps) >= 1.9
    for told in (pb.Pace(heartbeat_seconds=2), pb.Pace(), pb.Pace(heartbeat_seconds=1)):
        pace.told(told)
        assert not pace.spread, "nobody is in step for being asked for the same, or more"


def test_a_word_that_is_not_heard_is_soon_repeated() -> None:
    """So that several reach the master within a node-timeout, also where one is lost; but not one upon the other."""
    pace = Pace(0.0, 0.0)
    pace.told(pb.Pace(heartbeat_seconds=6))
    pace.spoke(10.0, None)
    pace.spoke(20.0, None)
    pace.unanswered(23.0)
    assert pace.due(None) == 25.0
    pace.told(pb.Pace(heartbeat_seconds=1))
    pace.spoke(25.0, None)
    pace.spoke(26.0, None)
    pace.unanswered(26.0)
    assert pace.due(None) == 27.0


def test_nonsense_is_bounded() -> None:
    """Whatever a master asks for, an agent speaks at least once a minute and at most once a second."""
    pace = Pace(0.0, 0.0)
    for told, kept in ((1e300, 60.0), (1e-9, 1.0), (-5.0, 1.0), (float("inf"), 60.0), (float("nan"), 60.0)):
        pace.told(pb.Pace(heartbeat_seconds=told, progress_seconds=told))
        assert pace.heartbeat == kept
        assert 0.1 <= pace.progress <= 60.0
