"""Where a part is looked for, and who may fetch a large one at a time."""

from __future__ import annotations

import contextlib
import queue
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import grpc
import pytest

from dalsegno.agent.memory import search, turnstile
from dalsegno.agent.memory.calls import PeerError
from dalsegno.agent.memory.holdings import StepPart, StepPlace
from dalsegno.agent.memory.incoming import PartRefusedError
from dalsegno.agent.memory.search import MOST_EARLY, Search
from dalsegno.agent.memory.turnstile import AT_ONCE, LARGE_BYTES, MOST_NAMED, SLOW_SECONDS, TURN_SECONDS, Turnstile
from tests.support.checkpoints.memory import manifest_of

OWN, FIRST, SECOND, THIRD = (f"10.0.0.{number}:7" for number in range(4))
CROWDED, ABSENT = grpc.StatusCode.RESOURCE_EXHAUSTED, grpc.StatusCode.NOT_FOUND


@pytest.fixture(autouse=True)
def in_order(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(search, "shuffled", list)


def asked(search: Search, *answers: PeerError) -> list[str]:
    """Whom one round asks, if they answer like this, and then not any more."""
    assert search.begins_anew()
    found = []
    for address, answer in zip(search, answers, strict=False):
        found.append(address)
        search.failed(address, answer)
    return found


def error(code: grpc.StatusCode, *others: str, ours: bool = False) -> PeerError:
    return PeerError(code, "so it is", ours=ours, others=others)


def test_each_is_asked_once_where_nobody_has_it() -> None:
    looked = Search([FIRST, OWN, SECOND], OWN)
    assert asked(looked, error(ABSENT), error(grpc.StatusCode.UNAVAILABLE)) == [FIRST, SECOND]
    assert not looked.begins_anew()
    assert looked.reasons == [f"{FIRST}: so it is", f"{SECOND}: so it is"]
    assert looked.unreachable


def test_who_stood_still_is_asked_once_more_behind_the_others() -> None:
    """Where there are others. Alone it was waited for as long as anybody is."""
    stalled = error(grpc.StatusCode.DEADLINE_EXCEEDED)
    looked = Search([FIRST, SECOND], OWN)
    assert asked(looked, stalled, error(ABSENT)) == [FIRST, SECOND]
    assert asked(looked, stalled) == [FIRST]
    assert not looked.begins_anew()
    assert looked.reasons == [f"{SECOND}: so it is", f"{FIRST}: so it is"]
    alone = Search([FIRST], OWN)
    assert asked(alone, stalled) == [FIRST]
    assert not alone.begins_anew()


def test_who_is_named_is_asked_next() -> None:
    looked = Search([FIRST], OWN)
    assert asked(looked, error(CROWDED, SECOND, OWN, FIRST), error(CROWDED, THIRD), error(CROWDED)) == [
        FIRST,
        SECOND,
        THIRD,
    ]
    assert looked.waits
    assert asked(looked, *[error(CROWDED)] * 3) == [SECOND, THIRD, FIRST]


def test_who_is_named_last_is_asked_first_and_once() -> None:
    looked = Search([FIRST], OWN)
    assert asked(looked, error(CROWDED, SECOND, SECOND, THIRD), error(ABSENT), error(ABSENT)) == [FIRST, THIRD, SECOND]


def test_who_serves_too_many_is_asked_again_behind_the_others() -> None:
    looked = Search([FIRST, SECOND], OWN)
    assert asked(looked, error(CROWDED), error(ABSENT)) == [FIRST, SECOND]
    assert asked(looked, error(CROWDED)) == [FIRST]


def test_who_is_named_may_not_have_it_yet() -> None:
    looked = Search([FIRST], OWN)
    asked(looked, error(ABSENT, SECOND), error(ABSENT))
    for _ in range(MOST_EARLY):
        assert asked(looked, error(ABSENT)) == [SECOND]
    assert not looked.begins_anew()


def test_who_is_named_is_asked_before_those_who_are_busy(monkeypatch: pytest.MonkeyPatch) -> None:
    """It comes there at any moment, and so nobody waits at the door of the busy one. Nothing is wrong there."""
    looked = Search([FIRST], OWN)
    assert looked.begins_anew()
    assert looked.failed(next(iter(looked)), error(CROWDED, SECOND))
    assert not looked.comes_soon
    assert looked.failed(next(iter(looked)), error(ABSENT))
    assert looked.comes_soon
    assert asked(looked, error(ABSENT), error(CROWDED)) == [SECOND, FIRST]
    monkeypatch.setattr(search, "MOST_EARLY", 0)
    assert looked.begins_anew()
    assert [looked.failed(address, error(ABSENT)) for address in looked] == [True, False]
    assert not looked.comes_soon


def test_trouble_of_its_own_ends_it() -> None:
    looked = Search([FIRST, SECOND], OWN)
    assert asked(looked, error(CROWDED, ours=True)) == [FIRST]
    assert not looked.begins_anew()
    assert not looked.waits
    assert looked.reasons == ["here: so it is"]


@pytest.fixture
def large(tmp_path: Path) -> StepPart:
    return part(tmp_path, LARGE_BYTES)


def part(root: Path, size: int) -> StepPart:
    manifest = manifest_of("step-1.e1.1", {0: {"file": b"0" * size}})
    return StepPart("run-0001", manifest, 0, manifest.files, StepPlace(root, manifest.name))


def test_those_who_wait_are_told_who_has_it(large: StepPart) -> None:
    gate = Turnstile()
    with gate.passing(large, FIRST):
        gate.fetched(large, FIRST)
    with gate.passing(large, SECOND), pytest.raises(PartRefusedError) as refused, gate.passing(large, OWN):
        pass
    # Who is at it has some of it.
    assert (refused.value.code, refused.value.others) == (CROWDED, (SECOND, FIRST))
    with gate.passing(large, OWN):  # their fetches are over, whatever became of them
        pass


def test_those_who_wait_are_told_to_whom_it_may_have_come_meanwhile(large: StepPart) -> None:
    """Behind those that were sent away others can go on. Who has it all comes first, then who is at it."""
    gate = Turnstile()
    gate.fetched(large, "whole:1")
    with gate.passing(large, FIRST):
        for number in range(5):
            with pytest.raises(PartRefusedError), gate.passing(large, f"away:{number}"):
                pass
        with pytest.raises(PartRefusedError) as refused, gate.passing(large, "away:3"):
            pass
    assert refused.value.others == ("away:2", "away:4", FIRST, "whole:1")


def test_a_slow_caller_does_not_hold_up_all_others_for_long(large: StepPart) -> None:
    now = [0.0]
    gate = Turnstile(lambda: now[0])
    with contextlib.ExitStack() as slow:
        for number in range(AT_ONCE):
            slow.enter_context(gate.passing(large, f"slow:{number}"))
            with pytest.raises(PartRefusedError), gate.passing(large, FIRST):
                pass
            now[0] += TURN_SECONDS
        with pytest.raises(PartRefusedError), gate.passing(large, FIRST):
            pass
        now[0] = SLOW_SECONDS
        with gate.passing(large, FIRST):
            pass
    with gate.passing(large, FIRST):
        pass


def test_small_parts_pass_at_once(tmp_path: Path) -> None:
    small, gate = part(tmp_path, 100), Turnstile()
    with gate.passing(small, FIRST), gate.passing(small, SECOND), gate.passing(small, THIRD):
        pass


def test_who_waits_goes_next_and_the_others_are_told_who_has_it(large: StepPart) -> None:
    """Four wait, a fifth is told at once to ask again. When the first has it, one of the four goes on."""
    gate, told, gone = Turnstile(), queue.SimpleQueue[tuple[str, ...]](), threading.Event()

    def wait() -> None:
        try:
            with gate.passing(large, "", patient=True):
                told.put(("its turn",))
                gone.wait(30)
        except PartRefusedError as refused:
            told.put(refused.others)

    with ThreadPoolExecutor(5) as pool:
        with gate.passing(large, FIRST):
            for _ in range(5):
                pool.submit(wait)
            assert told.get(timeout=turnstile.WAIT_SECONDS) == (FIRST,)
            gate.fetched(large, FIRST)
        assert sorted(told.get(timeout=30) for _ in range(4)) == [(FIRST,), (FIRST,), (FIRST,), ("its turn",)]
        gone.set()


def test_nobody_waits_for_long(large: StepPart, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(turnstile, "WAIT_SECONDS", 0.05)
    gate = Turnstile()
    with gate.passing(large, FIRST), pytest.raises(PartRefusedError), gate.passing(large, SECOND, patient=True):
        pass


def test_no_more_are_remembered_than_can_be_told(large: StepPart) -> None:
    gate = Turnstile()
    for number in range(2 * MOST_NAMED):
        gate.fetched(large, f"host:{number}")
    with gate.passing(large, FIRST), pytest.raises(PartRefusedError), gate.passing(large, SECOND):
        pass
    with gate.passing(large, FIRST), pytest.raises(PartRefusedError) as refused, gate.passing(large, ""):
        pass
    assert refused.value.others == tuple(f"host:{number}" for number in range(MOST_NAMED, 2 * MOST_NAMED))
