"""When a rank may save by itself: once it was shown that changes are seen, and never at the training's expense."""

from __future__ import annotations

import errno
import gc
import os
import threading
import time
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from torch import nn

from dalsegno.elastic.checkpoint import Position
from dalsegno.elastic.rank.collective import Solo
from dalsegno.elastic.trainer.strategies import StrategyWrite, TrainerState
from dalsegno.elastic.training import survival
from dalsegno.elastic.training.copies import Copies
from dalsegno.elastic.training.examination import Examination
from dalsegno.elastic.training.session import BareSession
from dalsegno.elastic.training.survival import JUDGED_STEPS, Survival
from dalsegno.elastic.training.training_state import TrainingState
from dalsegno.protos.contract import Variable

OPTIONS = {"strategy": "ddp", "any_world_size": None, "order": None, "cut": None}


class Part:
    """A part of the state, which may be slow, or fail."""

    def __init__(self) -> None:
        self.seconds, self.fails = 0.0, False
        self.stepped_alike = True

    def state_dict(self) -> dict[str, Any]:
        until = time.thread_time() + self.seconds
        while time.thread_time() < until:
            pass
        if self.fails:
            raise RuntimeError("it has no state just now")
        return {"value": 1}

    def load_state_dict(self, state: Any) -> None: ...


class Loop:
    """What ``steps`` does of it, on one rank of two."""

    def __init__(self, rank: int = 0, other: str = "", **options: Any) -> None:
        self.may: list[bool] = []
        self.saved: list[tuple[int, Position]] = []
        survivor = SimpleNamespace(
            may_keep=self.may.append,
            when_broken=lambda lost, told: setattr(self, "lost", lambda: lost(False)),
            save=lambda content, files, generators, stays, fetch: self.saved.append((content.step, content.position)),
            is_busy=False,
            anywhere=False,
            loop_stays=False,
            may_stay=False,
            name_of=lambda step: f"step-{step}",
        )
        self.session = SimpleNamespace(
            rank=rank,
            world_size=2,
            step=0,
            resume=None,
            can_save_in_memory=True,
            gather=lambda said: [other or said, said],
            survivor=survivor,
            saves=SimpleNamespace(of=lambda step: None, saver=None),
            examination=Examination(0, True, 1, 1, True),
            copies=Copies(Solo()),
        )
        self.part, self.model = Part(), nn.Linear(2, 2)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1, momentum=0.9)
        session = cast(BareSession, self.session)
        state = TrainingState(session, model=self.model, optimizer=self.optimizer, part=self.part)
        self.survival = Survival(session, state.write, {**OPTIONS, **options}, wanted=True)
        self.lost = getattr(self, "lost", lambda: None)

    def step(self, times: int = 1, *, optimizer: bool = True) -> None:
        for _ in range(times):
            self.begin()
            if optimizer:
                self.optimizer.step()
            self.end()

    def begin(self) -> None:
        self.model(torch.ones(1, 2)).sum().backward()

    def end(self) -> None:
        step = self.session.step + 1
        self.survival.mark(step, Position(0, step))
        self.session.step = step
        self.survival.look(Position(0, step))


def test_it_may_once_it_was_shown_that_changes_are_seen() -> None:
    loop = Loop()
    loop.step()
    assert not loop.may[-1]
    loop.step()
    assert loop.may[-1]
    loop.begin()
    loop.lost()
    assert loop.saved == [(2, Position(0, 2))]


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EDQUOT])
def test_a_line_says_that_it_had_no_room(
    number: int, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Steps are lost, and nothing else tells of it. It is tried again and again, and said once."""
    monkeypatch.setenv(Variable.SOCKET, "there")
    loop = Loop(rank=1)

    def full(*_: object, **__: object) -> None:
        raise OSError(number, "2.0 MB of the 2.0 MB of --memory-budget are in use", "/dev/shm/run-0001")

    loop.session.survivor.save = full
    loop.step(2)
    loop.begin()
    assert capsys.readouterr().out == ""
    for _ in range(3):
        loop.lost()
    (line,) = capsys.readouterr().out.splitlines()
    assert "rank 1 has no room to save step 2 by itself: 2.0 MB of the 2.0 MB of --memory-budget are in use" in line
    assert "one whole state more" in line


def test_what_else_fails_is_not_said_to_be_a_lack_of_room(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(Variable.SOCKET, "there")
    loop = Loop()

    def gone(*_: object, **__: object) -> None:
        raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), "/dev/shm/run-0001")

    loop.session.survivor.save = gone
    loop.step(2)
    loop.begin()
    loop.lost()
    assert capsys.readouterr().out == ""


def test_the_line_is_said_again_where_it_came_in_the_middle_of_another_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """The main thread is called between any two instructions, and a print is not begun within a print."""
    said: list[object] = []

    def say(*what: object) -> None:
        said.append(what)
        if len(said) == 1:
            raise RuntimeError("reentrant call inside <_io.BufferedWriter name='<stdout>'>")

    monkeypatch.setattr(survival, "remark", say)
    loop = Loop()

    def full(*_: object, **__: object) -> None:
        raise OSError(errno.ENOSPC, "no room")

    loop.session.survivor.save = full
    loop.step(2)
    loop.begin()
    for _ in range(3):
        loop.lost()
    assert len(said) == 2


def test_a_boundary_without_an_optimizers_step_is_not_trusted() -> None:
    """Nobody knows how such a training steps; the next boundary with one is."""
    loop = Loop()
    loop.step(2)
    loop.step(optimizer=False)
    loop.lost()
    assert not loop.saved
    loop.step()
    loop.lost()
    assert [step for step, _ in loop.saved] == [4]


def test_a_look_is_compared_with_the_step_behind_it_only() -> None:
    """A skipped step may have changed something that was seen; that says nothing of what is not seen."""
    loop = Loop()
    loop.step()
    loop.step(optimizer=False)
    with torch.no_grad():
        loop.model.weight.mul_(2)
    loop.end()
    loop.step()
    assert not loop.may[-1]
    loop.step(2)
    assert loop.may[-1]


def decay(loop: Loop) -> None:
    """As scripts do it that know no better: torch counts no change."""
    for parameter in loop.model.parameters():
        parameter.data.mul_(0.9)


def test_a_rare_change_that_torch_does_not_count_is_found_in_the_crash() -> None:
    """Behind a boundary whose values were not summed."""
    loop = Loop()
    loop.step(5)
    loop.begin()
    decay(loop)
    loop.lost()
    assert not loop.saved
    loop.optimizer.step()
    loop.end()
    # Whoever does it once does it again, and then perhaps in some places only.
    assert not loop.may[-1]
    loop.step(9)
    loop.lost()
    assert not loop.saved


def test_a_change_that_torch_counts_is_not_taken_for_one_that_it_does_not() -> None:
    loop = Loop()
    loop.step(5)
    with torch.no_grad():
        loop.model.weight.mul_(0.9)
    loop.step()
    assert loop.may[-1]
    loop.lost()
    assert [step for step, _ in loop.saved] == [6]


@pytest.mark.parametrize("when", ["at the boundary", "in the step"])
def test_a_part_that_fails_costs_the_training_nothing(when: str) -> None:
    loop = Loop()
    loop.step()
    loop.begin()
    loop.part.fails = when == "in the step"
    loop.optimizer.step()
    loop.part.fails = True
    loop.end()
    assert not loop.may[-1]
    loop.part.fails = False
    loop.step(8)
    assert not loop.may[-1]
    loop.lost()
    assert not loop.saved


def test_callbacks_that_keep_something_on_rank_0_alone_are_no_failure(caplog: pytest.LogCaptureFixture) -> None:
    """Every rank is asked; another one than rank 0 then saves nothing, and logs nothing."""

    def kept() -> dict[str, Any]:
        raise TypeError("the state of the callback Curve cannot be had")

    loop = Loop(rank=1)
    strategy: Any = SimpleNamespace(
        watched=lambda state: setattr(loop.part, "state_dict", state), reshards=False, by_place=False, reads=None
    )
    StrategyWrite(strategy, kept, 1).watched()
    loop.step(3)
    loop.lost()
    assert (any(loop.may), loop.saved, caplog.records) == (False, [], [])
    held = TrainerState()
    held.source = StrategyWrite(strategy, kept, 1)._own
    assert not held.stepped_alike


def test_a_part_that_fails_at_the_end_saves_nothing() -> None:
    loop = Loop()
    loop.step(3)
    loop.part.fails = True
    loop.lost()
    assert not loop.saved


@pytest.mark.slow
def test_watching_that_takes_too_long_is_given_up() -> None:
    loop = Loop()
    loop.part.seconds = 0.005
    loop.step(JUDGED_STEPS + 1)
    assert not loop.may[-1]


def test_a_rank_with_another_state_than_rank_0_may_not() -> None:
    loop = Loop(rank=1, other="another")
    loop.step(3)
    assert not any(loop.may)
    loop.lost()
    assert not loop.saved


def test_a_rank_whose_parts_are_rank_0s_may_not() -> None:
    loop = Loop(rank=1)
    loop.part.stepped_alike = False
    loop.step(3)
    assert not any(loop.may)
    loop.lost()
    assert not loop.saved


@pytest.mark.parametrize("options", [{"strategy": "own"}, {"any_world_size": False}])
def test_what_is_not_known_to_be_whole_on_each_rank_is_not_watched(options: dict[str, Any]) -> None:
    loop = Loop(**options)
    loop.step(3)
    loop.lost()
    assert not loop.may
    assert not loop.saved


def test_the_main_thread_waits_for_another_one_that_saves(monkeypatch: pytest.MonkeyPatch) -> None:
    """It has come back from where it did not hear that, and would change what is being saved."""
    loop, ends, begun, go_on = Loop(), list[int](), threading.Event(), threading.Event()
    monkeypatch.setattr(survival, "_end", lambda: ends.append(1))
    loop.step(3)

    def save(content: Any, files: Any, generators: bytes, **how: Any) -> None:
        begun.set()
        assert go_on.wait(30)
        loop.saved.append((content.step, content.position))

    monkeypatch.setattr(loop.session.survivor, "save", save)
    other = threading.Thread(target=loop.survival._unheard)
    other.start()
    assert begun.wait(30)
    main = threading.Thread(target=loop.survival._told)
    main.start()
    main.join(0.3)
    assert main.is_alive()
    assert not ends
    go_on.set()
    for thread in (other, main):
        thread.join(30)
    assert loop.saved[0] == (3, Position(0, 3))


def test_a_loop_that_is_over_watches_no_longer() -> None:
    """A process that stays, or has a loop for each data epoch, goes through many with the same optimizer."""
    loop = Loop()
    state = TrainingState(cast(BareSession, loop.session), model=loop.model, optimizer=loop.optimizer, part=loop.part)
    before = len(loop.optimizer._optimizer_step_pre_hooks)
    for _ in range(5):
        loop.survival = Survival(cast(BareSession, loop.session), state.write, OPTIONS, wanted=True)
        loop.step(3)
        assert loop.may[-1]
        gc.collect()
        # What the last one had put there is taken off as the next one comes.
        assert len(loop.optimizer._optimizer_step_pre_hooks) <= before + 1


def test_a_rank_holds_what_it_has_saved_until_that_changes(monkeypatch: pytest.MonkeyPatch) -> None:
    """A script that swallows the error, and goes on, must not be taken for one that stands where it was."""
    loop = Loop()
    loop.step(3)
    monkeypatch.setattr(loop.session.survivor, "save", lambda *_, **how: SimpleNamespace(name="step-3", digest="d"))
    held = loop.survival.peer_lost(True)
    assert held == {Variable.RESUME_NAME: "step-3", Variable.RESUME_DIGEST: "d"}
    monkeypatch.setattr(loop.session.survivor, "save", lambda *_, **how: None)
    assert loop.survival.peer_lost(True) == held
    with torch.no_grad():
        next(loop.model.parameters()).add_(1)
    assert loop.survival.peer_lost(True) is None


def test_a_rank_that_another_one_of_its_node_has_saved_for_holds_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    """It does not know the digest of what comes of that."""
    loop = Loop()
    loop.step(3)
    monkeypatch.setattr(loop.session.survivor, "save", lambda *_, **how: None)
    assert loop.survival.peer_lost(True) == {Variable.RESUME_NAME: "step-3", Variable.RESUME_DIGEST: ""}
