"""When memory checkpoints are due."""

from __future__ import annotations

import itertools
from types import SimpleNamespace
from typing import Any

import pytest

from dalsegno.elastic.checkpoint import Ref
from dalsegno.elastic.saving.cadence import AUTO, FIRST_STEPS, MOST_PATIENCE, MOST_STEPS, SHARE, Cadence, checked
from dalsegno.elastic.training import memory


def run(cadence: Cadence, steps: int, *, step: float, wait: float, slower: float = 1.0, beside: int = 0) -> list[int]:
    """The steps that were saved: each waits, and makes so many steps beside it slower."""
    saved: list[int] = []
    under_way = 0
    for number in range(1, steps + 1):
        if under_way:
            under_way -= 1
            cadence.measure(step * slower, saving=True)
            if not under_way:
                cadence.ended(saved[-1], number, cadence.proposal(failed=False), failed=False)
        else:
            cadence.measure(step, saving=False)
        if not under_way and cadence.due(number):
            saved.append(number)
            cadence.began(wait)
            under_way = beside
            if not beside:
                cadence.ended(number, number, cadence.proposal(failed=False), failed=False)
    return saved


def test_a_number_is_that_many_steps() -> None:
    """Whatever it costs: the person said it."""
    assert run(Cadence(3), 10, step=0.1, wait=5.0) == [3, 6, 9]
    assert run(Cadence(1), 3, step=0.1, wait=0.0) == [1, 2, 3]
    assert run(Cadence(0), 10, step=0.1, wait=0.0) == []


@pytest.mark.parametrize(("step", "wait"), [(0.1, 0.004), (0.5, 0.1), (0.02, 0.3), (1.0, 0.0001)])
def test_auto_slows_the_loop_by_its_share_at_most(step: float, wait: float) -> None:
    """Over a long run; and not by much less, unless every step may be saved."""
    saved = run(Cadence(AUTO), 5000, step=step, wait=wait)
    assert saved[0] == FIRST_STEPS
    slowed = wait * (len(saved) - 1) / (5000 * step)
    assert slowed <= SHARE * 1.02
    apart = saved[-1] - saved[-2]
    assert apart == 1 or slowed >= 0.5 * SHARE
    assert apart <= MOST_STEPS


def test_auto_counts_what_the_steps_beside_take_longer() -> None:
    """The loop waits for nothing, and shares the machine with what writes: five steps that take a fifth longer."""
    saved = run(Cadence(AUTO), 5000, step=0.1, wait=0.0, slower=1.2, beside=5)
    slowed = 5 * 0.02 * len(saved) / (5000 * 0.1)
    assert 0.5 * SHARE <= slowed <= SHARE * 1.02


@pytest.mark.parametrize("before", [1, 2, 20])
def test_auto_takes_an_evaluation_for_none_of_its_costs(before: int) -> None:
    """A minute in a step beside one save: the next one came a thousand steps later, and others by halves of that."""
    cadence, saved, number = Cadence(AUTO), list[int](), 0
    while len(saved) < before + 5:
        number += 1
        evaluates = bool(saved) and saved[-1] == number - 1 and len(saved) == before + 1
        cadence.measure(60.0 if evaluates else 0.1, saving=bool(saved) and saved[-1] == number - 1)
        if saved and saved[-1] == number - 1:
            cadence.ended(saved[-1], number, cadence.proposal(failed=False), failed=False)
        if cadence.due(number):
            saved.append(number)
            cadence.began(0.004)
    apart = [later - sooner for sooner, later in itertools.pairwise(saved)]
    assert apart == [2] * (before + 4)


def test_auto_has_an_end() -> None:
    """However much it costs there is one now and then."""
    saved = run(Cadence(AUTO), 3000, step=0.001, wait=60.0)
    assert saved == [FIRST_STEPS, FIRST_STEPS + MOST_STEPS, FIRST_STEPS + 2 * MOST_STEPS]


@pytest.mark.parametrize("every", [2, AUTO])
def test_what_fails_is_tried_less_and_less_often(every: int | str) -> None:
    """Memory that has no room now will hardly have it in the next step; once it has, all is as before."""
    cadence, tried = Cadence(every), list[int]()
    for number in range(1, 1001):
        cadence.measure(0.1, saving=False)
        if cadence.due(number):
            tried.append(number)
            cadence.began(0.004)
            cadence.ended(number, number, cadence.proposal(failed=number < 600), failed=number < 600)
    apart = [later - sooner for sooner, later in itertools.pairwise(tried)]
    failed = [gap for gap, begin in zip(apart, tried, strict=False) if begin < 600]
    assert failed[0] >= 4
    assert failed == sorted(failed)
    assert max(failed) <= 2 * MOST_PATIENCE
    assert apart[-1] == 2


def proposals(saves: list[tuple[float, bool]]) -> list[int]:
    """Behind each save, of so many seconds and whether it failed, beside steps of 0.1 s."""
    cadence = Cadence(AUTO)
    for _ in range(FIRST_STEPS):
        cadence.measure(0.1, saving=False)
    proposed = list[int]()
    for seconds, failed in saves:
        cadence.began(seconds)
        proposed.append(cadence.proposal(failed=failed))
    return proposed


def test_what_fails_at_once_is_no_cheap_save() -> None:
    """Behind a few of them saves came at every step."""
    good, failed = (0.5, False), (0.001, True)
    assert proposals([*[good] * 5, *[failed] * 6, *[good] * 3]) == [250] * 14
    assert proposals([*[failed] * 6, *[good] * 3]) == [*[1] * 6, *[250] * 3]


def test_what_fails_late_costs_what_it_costs() -> None:
    """Also where saves that succeed are cheaper; one alone is rare."""
    assert proposals([(0.1, False), *[(1.0, True)] * 3])[-1] == 500
    assert proposals([*[(0.1, False)] * 2, (60.0, True), (0.1, False)]) == [50] * 4
    assert proposals([(1.0, True)] * 2) == [500] * 2


def test_a_loop_tells_its_cadence_what_has_failed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Memory is full at its second save, which ends at once."""
    now, proposed, saved = [0.0], list[int](), list[int]()
    monkeypatch.setattr(memory, "time", SimpleNamespace(monotonic=lambda: now[0]))

    def save(to_disk: bool) -> Ref | None:
        saved.append(number)
        if len(saved) == 2:
            return None
        now[0] += 79 / 128
        return Ref("a", "b")

    def of(step: int, **_: Any) -> Ref | None:
        return None if len(saved) == 2 else Ref("a", "b")

    saves = SimpleNamespace(under_way=lambda **_: False, of=of, largest=lambda one: proposed.append(one) or one)
    learns = SimpleNamespace(learn=lambda **_: None)
    session: Any = SimpleNamespace(can_save_in_memory=True, saves=saves, examination=learns)
    loop = memory.MemorySaves(session, AUTO, save)
    for number in range(1, 1001):
        now[0] += 1 / 8
        loop.at(number, saved=False)
    assert saved == [3, 250, 744, 991]
    assert proposed == [247] * 4


@pytest.mark.parametrize("every", [-1, "often", 2.5, True, None])
def test_what_is_no_cadence_is_refused(every: object) -> None:
    """With what there is."""
    with pytest.raises(ValueError, match="memory_every is a number of steps, 0 \\(off\\) or 'auto', not"):
        checked(every)  # type: ignore[arg-type]
