"""A drain that all ranks agree on beside the steps: one boundary, at most two steps away, whatever the pace was."""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from datetime import timedelta

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dalsegno.elastic.rank import hurry
from dalsegno.elastic.rank.agreement import Refusal
from dalsegno.elastic.rank.hurry import Ballot, Hurry
from tests.support.held import Held


@pytest.mark.slow
@settings(max_examples=300)
@given(data=st.data(), ranks=st.integers(1, 5), synchronous=st.booleans())
def test_all_ranks_drain_at_one_boundary(data: st.DataObject, ranks: int, synchronous: bool) -> None:
    """Ranks of any pace, which wait for one another in each step or do not; any of them calls, any number of times.

    A rank that waits for the answers of others moves on only when all threads have answered, whatever their ranks do.
    """
    ballots = [Ballot() for _ in range(ranks)]
    begun = [0] * ranks
    ended = [0] * ranks
    drained: list[list[int]] = [[] for _ in range(ranks)]
    called: int | None = None
    for ballot in ballots:
        ballot.begin(1)
    begun = [1] * ranks
    for _ in range(data.draw(st.integers(5, 60))):
        rank = data.draw(st.integers(0, ranks - 1))
        ballot = ballots[rank]
        act = data.draw(st.sampled_from(["go", "go", "call", "answer"]))
        if act == "call" and called is None and not any(b.answered for b in ballots):
            called = max(begun)
        elif act == "answer" and called is not None and not ballot.answered and not drained[rank]:
            ballot.answer()
            if all(b.answered for b in ballots):
                boundary = max(b.step for b in ballots)
                for each in ballots:
                    each.decide(boundary)
        elif act == "go" and begun[rank] > ended[rank]:
            # Ends its step, where it may: a gradient needs that all have begun it.
            if ballot.waits or (synchronous and min(begun) < begun[rank]):
                continue
            ended[rank] += 1
            if ballot.end():
                drained[rank].append(ended[rank])
        elif act == "go" and not drained[rank]:
            begun[rank] += 1
            ballot.begin(begun[rank])
    at = {step for each in drained for step in each}
    assert len(at) <= 1
    assert all(len(each) <= 1 for each in drained)
    if at:
        (boundary,) = at
        assert called is not None
        for rank in range(ranks):
            assert drained[rank] or ended[rank] < boundary, "nobody passes it"
        if synchronous:
            # All are in one step, or between it and the next one.
            latest = max(b for b in begun)
            assert boundary <= latest


@pytest.mark.slow
@settings(max_examples=300)
@given(data=st.data(), ranks=st.integers(1, 4), left=st.dictionaries(st.integers(1, 8), st.booleans(), min_size=1))
def test_all_ranks_drain_at_one_boundary_behind_loops_that_were_left(
    data: st.DataObject, ranks: int, left: dict[int, bool]
) -> None:
    """In any of these steps all leave their loop; the step is made again, or counts. They meet before the next loop."""
    ballots = [Ballot() for _ in range(ranks)]
    # Loops that each rank is in or beyond; the number of the step that it is in; whether it waits for the others.
    loops, at, meeting = [0] * ranks, [1] * ranks, [False] * ranks
    drained: dict[int, int] = {}
    called = False
    for ballot in ballots:
        ballot.begin(1)
    for _ in range(data.draw(st.integers(10, 80))):
        rank = data.draw(st.integers(0, ranks - 1))
        ballot, act = ballots[rank], data.draw(st.sampled_from(["go", "go", "call", "answer"]))
        leaves = sorted(left)[loops[rank]] if loops[rank] < len(left) else None
        if rank in drained:
            continue
        if act == "call":
            called = True
        elif act == "answer" and called and not ballot.answered:
            ballot.answer()
            if all(b.answered for b in ballots):
                boundary = max(b.step for b in ballots)
                for each in ballots:
                    each.decide(boundary)
        elif act == "go" and meeting[rank]:
            if all(meeting[other] or loops[other] > loops[rank] for other in range(ranks)):
                meeting[rank], loops[rank] = False, loops[rank] + 1
                at[rank] += int(left[at[rank]])
                ballot.begin(at[rank])
        elif act == "go" and at[rank] == leaves:
            meeting[rank] = True
        elif act == "go" and not ballot.waits:
            if ballot.end():
                drained[rank] = at[rank]
            else:
                at[rank] += 1
                ballot.begin(at[rank])
    assert len(set(drained.values())) <= 1
    if drained:
        boundary = min(drained.values())
        assert all(rank in drained or at[rank] <= boundary for rank in range(ranks)), "nobody passes it"


def test_an_answer_that_came_too_late_decides_nothing_alone() -> None:
    """The call has come to nothing for all; the next one is of the next round."""
    ballot = Ballot()
    ballot.begin(7)
    assert ballot.answer() == 7
    assert ballot.waits
    ballot.decide(-1)
    assert not ballot.waits
    assert not ballot.end()
    assert (ballot.round, ballot.step) == (1, 8)


def together(held: Held, ranks: int) -> list[Hurry]:
    return [Hurry(rank, ranks, held, held) for rank in range(ranks)]


def train(one: Hurry, rank: int, paces: Sequence[float], call_at: int, found: dict[int, int]) -> None:
    for step, pace in enumerate(paces, 1):
        one.begin(step, call=step >= call_at)
        time.sleep(pace)  # a step is its time
        if one.end():
            found[rank] = step
            return


@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_threads_find_one_boundary(ranks: int) -> None:
    """Ranks that never wait for one another, at other paces: all end at the latest one's step, and not before it."""
    held = Held()
    hurries = together(held, ranks)
    found: dict[int, int] = {}
    threads = [
        threading.Thread(target=train, args=(one, rank, [0.002 * (1 + rank)] * 5000, 20 if rank == 0 else 5001, found))
        for rank, one in enumerate(hurries)
    ]
    try:
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
        assert sorted(found) == list(range(ranks))
        assert len(set(found.values())) == 1
        assert found[0] >= 20
    finally:
        for one in hurries:
            one.close()


@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_the_boundary_is_the_step_that_all_are_in(ranks: int) -> None:
    """Once all threads have answered, no rank makes a step more, and none ends one before that."""
    held = Held()
    hurries = together(held, ranks)
    try:
        for step in range(1, 20):
            for one in hurries:
                one.begin(step, call=False)
                assert not one.end()
        for rank, one in enumerate(hurries):
            one.begin(20, call=rank == 0)
        held.wait(["0/boundary"], timedelta(seconds=30))
        assert [one.end() for one in hurries] == [True] * ranks
    finally:
        for one in hurries:
            one.close()


def test_a_rank_that_never_answers_holds_nobody_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """The exchange carries the flag then, as it would have. A second call may succeed."""
    monkeypatch.setattr(hurry, "PATIENCE_SECONDS", 0.1)
    held = Held()
    one = Hurry(0, 2, held, held)
    try:
        one.begin(1, call=True)
        held.wait(["0/boundary"], timedelta(seconds=30))
        assert not one.end()
        assert held.get("0/boundary") == b"-1"
        # It comes late, and learns that it was too late.
        other = Hurry(1, 2, held, held)
        other.begin(1, call=False)
        assert not other.end()
        monkeypatch.setattr(hurry, "PATIENCE_SECONDS", 30.0)
        other.begin(2, call=False)
        one.begin(2, call=True)
        held.wait(["1/boundary"], timedelta(seconds=30))
        assert [one.end(), other.end()] == [True, True]
        other.close()
    finally:
        one.close()


def test_a_store_that_is_gone_is_no_reason_to_drain_alone() -> None:
    """What the others have agreed on is not known: this rank fails rather than to go on past it."""
    held = Held()
    one = Hurry(0, 2, held, held)
    one.begin(1, call=True)
    held.wait(["0/answers"], timedelta(seconds=30))
    held.end()
    with pytest.raises(RuntimeError, match="the store is gone"):
        one.end()
    one.close()


def test_a_rank_that_stood_still_itself_hears_what_was_decided(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its time is over as it goes on, and its other thread has not asked yet. The store is well."""
    monkeypatch.setattr(hurry, "PATIENCE_SECONDS", 0.02)

    class Later(Held):
        def compare_set(self, key: str, expected: str, desired: str) -> bytes:
            time.sleep(0.5)  # the thread gets no turn
            return super().compare_set(key, expected, desired)

    held = Later()
    one = Hurry(0, 2, held, held)
    try:
        one.begin(1, call=True)
        held.wait(["0/answers"], timedelta(seconds=30))
        assert not one.end()
    finally:
        one.close()


def test_it_ends_at_once() -> None:
    """Its thread waits for a call that never comes."""
    held = Held()
    one = Hurry(0, 1, held, held)
    one.close()
    assert not one._thread.is_alive()


@pytest.mark.parametrize("begins", ["before", "later"])
def test_a_rank_that_trains_on_without_another_is_told_apart(begins: str) -> None:
    """One rank finishes behind step 40; the other is in step 41, or begins it. Both learn of it, wherever they are."""
    held = Held()
    first, second = ranks = together(held, 2)
    line = "rank 0 has finished the training behind step 40, and rank 1 goes on with step 41: all ranks have to"
    try:
        for one in ranks:
            one.begin(40, call=False)
            assert not one.end()
        assert first.apart() == second.apart() == ""
        if begins == "before":
            second.begin(41, call=False)
            with pytest.raises(Refusal, match=line):
                first.finish()
        else:
            first.finish()
            with pytest.raises(Refusal, match=line):
                second.begin(41, call=False)
        assert first.apart().startswith(line)
        assert second.apart().startswith(line)
    finally:
        for one in ranks:
            one.close()


@pytest.mark.parametrize("ended", ["before", "later"])
def test_a_rank_that_ends_the_step_in_which_another_finishes(ended: str) -> None:
    """It would save at its boundary, where the other does not come; nor does it drain there alone."""
    held = Held()
    first, second = ranks = together(held, 2)
    line = "rank 0 has finished the training in the middle of step 40, and rank 1 is behind step 40: all ranks"
    try:
        for one in ranks:
            one.begin(40, call=False)
        if ended == "before":
            second.end()
            with pytest.raises(Refusal, match=line):
                first.finish()
        else:
            first.finish()
            with pytest.raises(Refusal, match=line):
                second.end()
        assert first.apart().startswith(line)
    finally:
        for one in ranks:
            one.close()


@pytest.mark.parametrize("breaks", [True, False])
@pytest.mark.parametrize("drains", [True, False])
def test_ranks_that_finish_in_one_step_may(breaks: bool, drains: bool) -> None:
    """Behind it or in its middle, whoever comes first; also where one was told to drain in that step."""
    held = Held()
    first, second = ranks = together(held, 2)
    try:
        for one in ranks:
            one.begin(40, call=drains and one is second)
        for one in (first, second):
            if not breaks:
                one.end()
            one.finish()
        first.finish()
        assert first.apart() == second.apart() == ""
    finally:
        for one in ranks:
            one.close()


def test_a_rank_without_a_store_finishes(monkeypatch: pytest.MonkeyPatch) -> None:
    """What the others do is not known then; nor where one of them does not answer."""
    monkeypatch.setattr(hurry, "PATIENCE_SECONDS", 0.1)
    held = Held()
    first = Hurry(0, 2, held, held)
    first.begin(1, call=False)
    first.end()
    first.finish()
    held.end()
    first.finish()
    assert first.apart() == ""
    first.close()


def test_a_rank_that_nobody_has_called_for_a_day_still_hears(monkeypatch: pytest.MonkeyPatch) -> None:
    """The channel lasts as long as the session."""
    monkeypatch.setattr(hurry, "_LONG_SECONDS", 0.05)
    held = Held()
    ranks = together(held, 2)
    try:
        for one in ranks:
            one.begin(1, call=False)
            assert not one.end()
        time.sleep(0.3)  # some days
        found: dict[int, int] = {}
        at_work = [
            threading.Thread(target=train, args=(one, rank, [0.02] * 100, 2, found)) for rank, one in enumerate(ranks)
        ]
        for thread in at_work:
            thread.start()
        for thread in at_work:
            thread.join(30)
        assert sorted(found) == [0, 1]
        assert found[0] == found[1]
    finally:
        for one in ranks:
            one.close()
