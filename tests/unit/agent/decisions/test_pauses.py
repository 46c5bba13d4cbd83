"""The parts of a change are what its marks say, and sum to the pause."""

from __future__ import annotations

import random
import time
from dataclasses import replace

import pytest

from dalsegno.agent.commands.pauses import lines
from dalsegno.agent.decisions.pauses import PARTS, WorldChange, pauses
from dalsegno.protos.trace import Mark


def at(when: float, name: str, process: str = "w0", *, rank: int = 0, epoch: int = 1, step: int = -1) -> Mark:
    return Mark(when, name, process, "clock", "n0", rank, epoch, step)


def agent(when: float, name: str, *, epoch: int = 1) -> Mark:
    return at(when, name, "agent", rank=-1, epoch=epoch)


# Two ranks, of which the second is a newcomer.
JOIN = [
    *(at(9.0, "step", step=8), at(10.0, "step", step=9), at(10.2, "told"), at(11.0, "step", step=10)),
    *(at(11.5, "written"), at(12.0, "synced"), at(12.25, "sealed")),
    *(agent(12.5, "committed"), agent(13.0, "stopped"), at(14.0, "sealed", "converter", rank=-1, epoch=0)),
    *(agent(14.5, "converted"), agent(14.75, "formed", epoch=2)),
    *(at(15.0, "session", "w1", epoch=2), at(15.25, "session", "w2", rank=1, epoch=2)),
    *(at(15.5, "met", "w1", epoch=2), at(15.5, "met", "w2", rank=1, epoch=2)),
    # Beside the building, which has ended before.
    *(at(18.5, "verified", "w1", epoch=2), at(15.75, "verified", "w2", rank=1, epoch=2)),
    *(at(17.0, "model built", "w1", epoch=2), at(18.0, "built", "w1", epoch=2), at(19.0, "loaded", "w1", epoch=2)),
    *(at(19.5, "ready", "w1", epoch=2), at(20.0, "step", "w1", epoch=2, step=11)),
    *(at(20.5, "step", "w2", rank=1, epoch=2, step=11), at(30.0, "step", "w1", epoch=2, step=20)),
]


def only(marks: list[Mark]) -> WorldChange:
    (found,) = pauses(marks)
    assert sum(found.parts.values()) == pytest.approx(found.seconds)
    assert min(found.parts.values()) >= 0
    return found


def test_a_node_joins() -> None:
    """Each part ends with the last process's mark; the converter's own seal is no seal of the run's."""
    found = only(JOIN)
    assert (found.epoch, found.planned, found.ranks, found.lost, found.seconds) == (2, True, 2, 0, 10.5)
    assert {name: round(seconds, 3) for name, seconds in found.parts.items()} == {
        **{"noticed": 0.2, "step finished": 0.8, "written": 0.5, "synced": 0.5, "sealed": 0.25, "committed": 0.25},
        **{"stopped": 0.5, "converted": 1.5, "formed": 0.25, "started": 0.5, "met": 0.25, "model built": 1.5},
        **{"built": 1.0, "verified": 0.5, "loaded": 0.5, "ready": 0.5, "first step": 1.0},
    }
    assert [name for name in found.parts if name != "model built"] == list(PARTS)


def test_a_node_is_killed() -> None:
    """The pause begins with the last step, and steps behind the last save are made again."""
    marks = [
        *(at(10.0, "step", step=19), at(10.5, "step", "w9", rank=1, step=19), agent(11.0, "stopping")),
        *(agent(11.25, "stopped"), agent(12.0, "formed", epoch=3), at(12.5, "session", "w1", epoch=3)),
        *(at(14.0, "step", "w1", epoch=3, step=11),),
    ]
    found = only(marks)
    assert (found.epoch, found.planned, found.lost, found.seconds) == (3, False, 9, 3.5)
    assert found.parts == {"noticed": 0.5, "stopped": 0.25, "formed": 0.75, "started": 0.5, "first step": 1.5}


def test_what_was_done_ahead_costs_nothing() -> None:
    """A process that was there before the world was formed: what it has done by then is no part of the pause."""
    ahead = [one for one in JOIN if one.name not in ("session", "model built", "built")]
    ahead += [at(9.5, "session", "w1", epoch=2), at(12.1, "model built", "w1", epoch=2)]
    found = only(sorted(ahead, key=lambda one: one.at))
    assert "started" not in found.parts
    assert found.parts["model built"] == 0
    assert found.seconds == 10.5


def test_a_drain_that_somebody_died_in_is_none() -> None:
    """What was told before does not make it planned."""
    marks = [one for one in JOIN if one.name not in ("written", "synced", "sealed", "committed")]
    marks.append(agent(11.75, "stopping"))
    found = only(sorted(marks, key=lambda one: one.at))
    assert (found.planned, found.began) == (False, 11.0)
    assert found.parts["noticed"] == 0.75


def test_a_notice_by_signal() -> None:
    """The agent's word comes while the ranks save already, or never: planned all the same, from the boundary on."""
    for word in ([at(11.25, "told")], []):
        marks = [one for one in JOIN if one.name != "told"] + word
        found = only(sorted(marks, key=lambda one: one.at))
        assert (found.planned, found.began) == (True, 11.0)
        assert "noticed" not in found.parts


def test_each_change_by_itself_and_each_clock() -> None:
    """Three worlds are two changes; what another machine's clock says is no time of this one."""
    third = [at(40.0, "step", "w1", epoch=4, step=21)]
    other = [Mark(one.at + 1000, one.name, one.process, "other", "n9", one.rank, one.epoch, one.step) for one in JOIN]
    found = pauses(sorted([*JOIN, *third, *other], key=lambda one: one.at))
    assert [(one.epoch, one.seconds) for one in found] == [(2, 10.5), (4, 10.0), (2, 10.5)]
    assert pauses([]) == pauses([at(1.0, "step", step=1)]) == []


def of_run(marks: list[Mark], run: str, later: float = 0.0) -> list[Mark]:
    return [replace(one, run=run, at=one.at + later) for one in marks]


def test_a_second_run_with_the_same_directory_is_another() -> None:
    """Its worlds begin with epoch 1 again. A mark of no run may be anybody's, and so may a converter's."""
    other = of_run([at(9.0, "step", step=3), at(9.5, "step", epoch=2, step=4)], "run-0002", 9000.0)
    found = pauses([*of_run(JOIN, "run-0001"), agent(12.7, "committed"), *other])
    assert [(one.run, one.epoch, one.seconds) for one in found] == [("run-0001", 2, 10.5), ("run-0002", 2, 0.5)]
    assert found[0].parts["committed"] == pytest.approx(0.45)
    assert [line for one in found for line in lines(one, True) if "epoch" in line] == [
        "run-0001, epoch 2, 2 ranks: 10.500 s (planned)",
        "run-0002, epoch 2, 1 rank: 0.500 s (unplanned, 0 steps made again)",
    ]


def test_runs_that_cannot_be_told_apart_are_named() -> None:
    """A checkpoint directory that was emptied gives its next run the first one's id: no pause has less than no time."""
    (mixed,) = pauses([*of_run(JOIN, "run-0001"), *of_run(JOIN[:4], "run-0001", 9000.0)])
    assert lines(mixed) == [
        "epoch 2: marks of several runs under one name are mixed: give each run a --trace-dir of its own"
    ]


def test_whatever_the_marks_the_parts_sum() -> None:
    """Marks in any order, missing or twice: no part is negative, and nothing of the pause is lost."""
    names = ["told", "written", "sealed", "committed", "stopped", "stopping", "formed", "session", "loaded", "own"]
    for seed in range(300):
        draw = random.Random(seed)
        marks = [at(0.0, "step", step=1), at(100.0, "step", "w1", epoch=2, step=2)]
        for _ in range(draw.randrange(40)):
            process, epoch = draw.choice([("w0", 1), ("w1", 2), ("agent", 1), ("agent", 2)])
            rank = -1 if process == "agent" else 0
            marks.append(at(draw.uniform(-10, 120), draw.choice(names), process, rank=rank, epoch=epoch))
        found = only(sorted(marks, key=lambda one: one.at))
        assert (found.ended, found.began <= 0.0) == (100.0, True), seed


def test_a_run_of_thousands_of_epochs() -> None:
    """The time grows with the marks, not with their square: each change looks at its own epochs."""
    marks = [
        at(10.0 * epoch + number, "step", f"w{epoch}", epoch=epoch, step=10 * epoch + number)
        for epoch in range(1, 8_001)
        for number in range(6)
    ]
    began = time.monotonic()
    assert len(pauses(marks)) == 7_999
    # Some tenths of a second; it was minutes.
    assert time.monotonic() - began < 30
