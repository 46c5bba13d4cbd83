"""Loops that are left, by a `break` or by `finish()`: what they owe is made up, and nothing trained is lost."""

from __future__ import annotations

import errno
import gc
import json
import logging
import random
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

from dalsegno.elastic import Accumulation, Batches, BatchPlan, CheckpointStore, ElasticSampler, SaveError, TrainingState
from dalsegno.elastic.rank import rng
from dalsegno.elastic.saving import tiers, writing
from dalsegno.elastic.training import loop as loop_module
from dalsegno.elastic.training import saves
from dalsegno.elastic.training.session import BareSession
from dalsegno.elastic.training.sources import BatchSource

from .test_sources import Numbers
from .test_unsaved import opened

ROWS = torch.arange(40, dtype=torch.float32).reshape(40, 1) / 40


class Training:
    """A model with dropout, trained in loops over `Batches`: four samples in a step, ten steps in a data epoch."""

    def __init__(self, session: BareSession, data: Any = ROWS) -> None:
        self.session, self.losses = session, list[float]()
        torch.manual_seed(1)
        self.model = nn.Sequential(nn.Linear(1, 8), nn.Dropout(0.5), nn.Linear(8, 1))
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.01)
        self.state = TrainingState(session, model=self.model, optimizer=self.optimizer)
        self.state.load()
        plan = BatchPlan(4, 1, 4)
        self.batches = Batches(data, ElasticSampler(len(data), 4, seed=2), plan, 0, resume=session.resume)
        self.accumulate = Accumulation(self.model, self.optimizer)

    def loop(self, data: Any = None, **options: Any) -> Iterator[Any]:
        return self.session.steps(self.batches if data is None else data, **{"save": self.state.write, **options})

    def train(self, batch: Any) -> None:
        for micro in self.accumulate(batch):
            loss = self.model(micro.data).square().mean()
            micro.scale(loss).backward()
            self.losses.append(loss.item())
        self.step()

    def step(self) -> None:
        self.optimizer.step()
        self.optimizer.zero_grad()

    @property
    def weights(self) -> list[Tensor]:
        return [one.detach().clone() for one in self.model.state_dict().values()]


def sealed(directory: Path) -> list[int]:
    return [one.step for one in CheckpointStore(directory).sealed()]


def finished_at(directory: Path) -> int:
    return int(json.loads((directory / "FINISHED.json").read_text())["step"])


def holds(directory: Path, weights: list[Tensor]) -> bool:
    """Whether the newest checkpoint has these weights."""
    newest = CheckpointStore(directory).newest()
    assert newest is not None
    saved = torch.load(directory / newest.name / "model.pt", weights_only=True)
    return all(torch.equal(one, other) for one, other in zip(saved.values(), weights, strict=True))


ENDS: dict[str, Callable[[BareSession], bool]] = {
    "in the body": lambda s: s.finish() or True,  # type: ignore[func-returns-value]
    "in the body, without a break": lambda s: s.finish() or False,  # type: ignore[func-returns-value]
    "behind a break": lambda s: True,
}


@pytest.mark.parametrize("save_every", [0, 2])
@pytest.mark.parametrize("ends", list(ENDS))
def test_the_step_that_ends_the_training_counts_and_is_saved(tmp_path: Path, ends: str, save_every: int) -> None:
    """Whatever the cadence is; the loop is over, and so is the session."""
    with opened(tmp_path) as session:
        one = Training(session)
        for batch in one.loop(max_steps=9, save_every=save_every):
            one.train(batch)
            if batch.step == 3 and ENDS[ends](session):
                break
        session.finish()
        assert (session.step, len(one.losses)) == (3, 3)
        assert sealed(tmp_path)[-1] == finished_at(tmp_path) == 3
        assert holds(tmp_path, one.weights)
        with pytest.raises(RuntimeError, match="this session is over"):
            list(one.loop(max_steps=9))
    newest = CheckpointStore(tmp_path).newest()
    assert newest is not None
    assert newest.position.samples == 12


def test_a_step_that_was_not_trained_ends_the_training_without_itself(tmp_path: Path) -> None:
    """The decision falls before the work."""
    with opened(tmp_path) as session:
        one = Training(session)
        for batch in one.loop(max_steps=9, save_every=2):
            if batch.step == 4:
                session.finish()
                break
            one.train(batch)
        assert (session.step, len(one.losses)) == (3, 3)
        assert sealed(tmp_path) == [2, 3]
        assert holds(tmp_path, one.weights)


@pytest.mark.parametrize("trains", [True, False])
@pytest.mark.parametrize("ends", list(ENDS))
def test_of_other_data_the_optimizer_tells_what_was_trained(tmp_path: Path, ends: str, trains: bool) -> None:
    """A batch of a list does not know it."""
    with opened(tmp_path) as session:
        one = Training(session)
        for number in one.loop(list(range(9)), save_every=2):
            if trains or number < 2:
                one.model(ROWS[:4]).sum().backward()
                one.step()
            if number == 2 and ENDS[ends](session):
                break
        session.finish()
        assert session.step == sealed(tmp_path)[-1] == finished_at(tmp_path) == 2 + trains
        assert holds(tmp_path, one.weights)


@pytest.mark.parametrize("trains", [True, False])
@pytest.mark.parametrize("ends", list(ENDS))
@pytest.mark.parametrize("lacks", ["save", "directory"])
def test_it_tells_that_where_nothing_is_saved_too(tmp_path: Path, lacks: str, ends: str, trains: bool) -> None:
    """What the run counts, notes and tells the agent depends on no save."""
    with opened(tmp_path if lacks == "save" else None) as session:
        one = Training(session)
        for number in one.loop(list(range(9)), **({"save": None} if lacks == "save" else {})):
            if trains or number < 2:
                one.model(ROWS[:4]).sum().backward()
                one.step()
            if number == 2 and ENDS[ends](session):
                break
        session.finish()
        assert session.step == 2 + trains
    assert lacks == "directory" or finished_at(tmp_path) == 2 + trains


@pytest.mark.parametrize("saves", [True, False])
def test_an_optimizer_that_was_made_before_the_session_is_known(tmp_path: Path, saves: bool) -> None:
    """As soon as it is in what is saved, or makes a step."""
    model = nn.Linear(1, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    with opened(tmp_path) as session:
        save = TrainingState(session, model=model, optimizer=optimizer).write if saves else None
        for number in session.steps(range(9), save=save):
            if number == 2 - 2 * saves:
                session.finish()
            else:
                model(ROWS[:4]).sum().backward()
                optimizer.step()
        assert session.step == finished_at(tmp_path) == 2 - 2 * saves


def test_a_training_without_an_optimizer_counts_what_it_was_given() -> None:
    """Nobody sees its steps."""
    with opened() as session:
        for number in session.steps(range(9)):
            if number == 2:
                session.finish()
        assert session.step == 3


@pytest.mark.parametrize("trains", [True, False])
@pytest.mark.parametrize("ends", list(ENDS))
def test_the_state_of_a_loader_is_that_behind_what_was_trained(
    tmp_path: Path, ends: str, trains: bool, caplog: pytest.LogCaptureFixture
) -> None:
    """Who resumes goes on with the batch that was handed out last, if it was not trained: each comes once."""
    with opened(tmp_path) as session:
        one = Training(session)
        for number in one.loop(Numbers()):
            if trains or number < 3:
                one.model(ROWS[:4]).sum().backward()
                one.step()
            if number == 3 and ENDS[ends](session):
                break
        session.finish()
    assert sealed(tmp_path) == [2 + trains]
    with opened(tmp_path) as session, caplog.at_level(logging.WARNING):
        assert list(session.steps(Numbers(), save=lambda path: None)) == [3, 4, 5][trains:]
    assert "goes on with another batch" not in caplog.text


def test_so_it_is_where_the_next_loop_makes_the_save(tmp_path: Path) -> None:
    """It was put off over carried gradients, and the loop was left in the step behind."""
    with opened(tmp_path) as session:
        one = Training(session)
        for number in one.loop(Numbers(), save_every=2):
            if number == 3:
                break
            one.model(ROWS[:4]).sum().backward()
            if number == 1:
                one.step()
        assert sealed(tmp_path) == []
        next(one.loop(save=None))
        assert sealed(tmp_path) == [2]
    with opened(tmp_path) as session:
        assert next(session.steps(Numbers(), save=lambda path: None)) == 3


def test_a_loader_of_which_nothing_was_trained_begins_anew(tmp_path: Path) -> None:
    """A second loop that ends with its first batch, before the work."""
    with opened(tmp_path) as session:
        one = Training(session)
        for batch in one.loop():
            one.train(batch)
            if batch.step == 2:
                break
        for _ in one.loop(Numbers()):
            session.finish()
    assert sealed(tmp_path) == [2]
    with opened(tmp_path) as session:
        assert next(session.steps(Numbers(), save=lambda path: None)) == 1


def test_a_last_save_that_fails_is_no_success(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The error comes out of `finish`; called again it tries again."""
    monkeypatch.setattr(saves, "LAST_SAVE_TRIES", 1)

    def write(path: Path) -> None:
        if not repaired:
            raise OSError("no room")
        one.state.write(path)

    repaired = False
    with opened(tmp_path) as session:
        one = Training(session)
        for batch in one.loop(max_steps=9, save=write):
            one.train(batch)
            with pytest.raises(SaveError, match="the last step, 1, could not be saved"):
                session.finish()
        assert not (tmp_path / "FINISHED.json").exists()
        repaired = True
        session.finish()
        assert session.step == sealed(tmp_path)[-1] == finished_at(tmp_path) == 1


@pytest.mark.parametrize("saves_last", [True, False])
def test_a_loop_of_ones_own_that_ends_unsaved(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, saves_last: bool
) -> None:
    """Nobody knows how to save it, so one line says so."""
    with opened(tmp_path) as session, caplog.at_level(logging.WARNING):
        session.meet(1)
        for step in (1, 2, 3):
            session.begin_step()
            session.end_step()
            if step == 2 or (step == 3 and saves_last):
                session.save(lambda path: (path / "x").write_text("x") and None)
        session.finish()
    said = [one.getMessage() for one in caplog.records if "is finished at step" in one.getMessage()]
    if saves_last:
        assert said == []
    else:
        assert said[0].startswith("the training is finished at step 3, and its last checkpoint is of step 2")


@pytest.mark.parametrize("knows", [True, False], ids=["batches", "other data"])
def test_what_a_left_loop_holds_goes_at_once_and_the_loop_as_the_next_one_begins(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, knows: bool
) -> None:
    """Its loader has workers, beside which a validation may have its own, and its batch may lie on a card."""
    sources = list[weakref.ref[BatchSource[Any]]]()
    make = loop_module.source_of

    def noted(*given: Any, **named: Any) -> BatchSource[Any]:
        sources.append(weakref.ref(source := make(*given, **named)))
        return source

    monkeypatch.setattr(loop_module, "source_of", noted)
    with opened(tmp_path) as session:
        one = Training(session)
        for batch in one.loop(None if knows else (ROWS[n : n + 4].clone() for n in (0, 4))):
            if knows:
                one.train(batch)
            break
        last, loop = weakref.ref(batch), weakref.ref(session.loop)
        del batch
        gc.collect()
        assert knows or last() is None  # the Accumulation has the one that it has computed
        assert [one() for one in sources] == [None]
        goes_on = one.loop()
        next(goes_on)
        gc.collect()
        assert loop() is None


@pytest.mark.parametrize("best", [True, False])
def test_what_was_due_at_a_break_is_saved_as_the_next_loop_begins(tmp_path: Path, best: bool) -> None:
    """The cadence's, and what `improved` has promised."""
    with opened(tmp_path) as session:
        session.track("loss")
        one = Training(session)
        for batch in one.loop(max_steps=6, save_every=0 if best else 3):
            one.train(batch)
            if batch.step == 3:
                assert not best or session.improved(1.0)
                break
        assert sealed(tmp_path) == []
        weights = one.weights
        loop = one.loop(max_steps=6)
        next(loop)
        assert sealed(tmp_path) == [3]
        assert holds(tmp_path, weights)
        manifest = CheckpointStore(tmp_path).sealed()[0]
        assert manifest.position.samples == 12
        assert (manifest.best is not None and manifest.best.value == 1.0) == best
        assert loop is not None


@pytest.mark.parametrize("trains", [True, False])
def test_what_was_not_due_at_a_break_is_not_saved(tmp_path: Path, trains: bool) -> None:
    """Also where the loop was left in a step that was not trained."""
    with opened(tmp_path) as session:
        one = Training(session)
        for batch in one.loop(max_steps=6, save_every=2):
            if batch.step == (3 if trains else 4):
                if trains:
                    one.train(batch)
                break
            one.train(batch)
        next(one.loop(max_steps=6, save_every=2))
        assert sealed(tmp_path) == [2]


def test_what_was_put_off_at_a_break_is_saved_behind_a_later_step(tmp_path: Path) -> None:
    """Its gradients are carried over the `break`: no checkpoint has them."""
    with opened(tmp_path) as session:
        one = Training(session)

        def loop(ends: int) -> None:
            for batch in one.loop(max_steps=9, save_every=3):
                for micro in batch.micro_batches:
                    micro.scale(one.model(micro.data).square().mean()).backward()
                if batch.step % 2 == 0:
                    one.step()
                if batch.step == ends:
                    break

        loop(3)
        loop(5)
        assert sealed(tmp_path) == [4]


def test_what_was_put_off_is_saved_at_once_where_the_next_loop_saves_nothing(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Nothing comes behind a later step then; a line says what the checkpoint lacks."""
    with opened(tmp_path) as session, caplog.at_level(logging.WARNING):
        one = Training(session)

        def loop(ends: int, **options: Any) -> None:
            for batch in one.loop(max_steps=9, **options):
                for micro in batch.micro_batches:
                    micro.scale(one.model(micro.data).square().mean()).backward()
                if batch.step % 2 == 0:
                    one.step()
                if batch.step == ends:
                    break

        loop(3, save_every=3)
        weights = one.weights
        loop(6, save=None)
        assert sealed(tmp_path) == [3]
        assert holds(tmp_path, weights)
    assert [one for one in caplog.messages if one.startswith("step 3 is saved between two steps of an optimizer")]


def test_a_save_in_memory_that_fails_behind_a_break_is_made_up_with_what_was_put_off(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The agents were to bring it to the disk, and the next loop does not know of it."""
    memory = tmp_path / "memory"
    memory.mkdir()

    def full(self: tiers.Memory) -> None:
        raise OSError(errno.ENOSPC, "no room")

    monkeypatch.setattr(tiers.Memory, "check_room", full)
    monkeypatch.setattr(writing, "AHEAD_BYTES", 1)
    with opened(tmp_path / "run", memory_dir=memory) as session:
        monkeypatch.setattr(session.saves, "_memory", True)
        one = Training(session)

        def loop(ends: int, **options: Any) -> None:
            for batch in one.loop(max_steps=9, **options):
                for micro in batch.micro_batches:
                    micro.scale(one.model(micro.data).square().mean()).backward()
                if batch.step % 2 == 1:
                    one.step()
                if batch.step == ends:
                    break

        loop(4, save_every=3, memory_every=2)
        assert session.saves.under_way(in_memory=True)
        loop(6)
        assert sealed(tmp_path / "run") == [5]


@pytest.mark.parametrize("seed", [None, 5])
@pytest.mark.parametrize("ended", [2, 3, 4, 5])
def test_a_resumed_run_draws_in_its_further_loops_as_an_undisturbed_one(
    tmp_path: Path, ended: int, seed: int | None
) -> None:
    """Two steps in each loop, with dropout; the resume point is behind a loop, or within one."""

    def trained(directory: Path, until: int) -> list[float]:
        with opened(directory) as session:
            one = Training(session)
            for ends in (2, 4, 6, 8):
                if session.step >= ends:
                    continue
                for batch in one.loop(max_steps=8, save_every=1, seed=seed):
                    if batch.step > until:
                        return one.losses
                    one.train(batch)
                    if batch.step == ends < 8:
                        break
        return one.losses

    whole = trained(tmp_path / "whole", 8)
    assert len(set(whole)) == 8
    first = trained(tmp_path / "resumed", ended)
    assert sealed(tmp_path / "resumed")[-1] == ended
    assert first + trained(tmp_path / "resumed", 8) == whole


@pytest.mark.parametrize("saves", [1, 0], ids=["saved", "drained"])
@pytest.mark.parametrize("ended", [2, 3, 4])
def test_so_does_one_whose_loops_are_left_at_the_top_of_a_step(tmp_path: Path, ended: int, saves: int) -> None:
    """Its boundary belongs to the loop before, and so does what is saved there; a script evaluates in between."""

    def trained(directory: Path, until: int, every: int) -> list[float]:
        with opened(directory) as session:
            one = Training(session)
            for ends in (2, 4, 6):
                if session.step >= ends:
                    continue
                for batch in one.loop(max_steps=6, save_every=every, seed=5):
                    if batch.step > until:
                        return one.losses
                    if batch.step > ends:
                        break
                    one.train(batch)
                torch.rand(3)
        return one.losses

    whole = trained(tmp_path / "whole", 6, saves)
    assert len(set(whole)) == 6
    first = trained(tmp_path / "resumed", ended, ended)
    assert sealed(tmp_path / "resumed")[-1] == ended
    assert first + trained(tmp_path / "resumed", 6, saves) == whole


def test_a_metric_leaves_the_generators_as_they_were(tmp_path: Path) -> None:
    """Python's, NumPy's and torch's, which an evaluation's loader draws its base seed from."""

    def metric() -> float:
        for _ in DataLoader(range(3)):  # type: ignore[arg-type]
            random.random(), np.random.rand()
        return float(torch.rand(1))

    def drawn(directory: Path, **options: Any) -> list[bytes]:
        found = []
        with opened(directory) as session:
            session.track("loss")
            one = Training(session)
            for batch in one.loop(max_steps=3, seed=4, **options):
                found.append(rng.capture())
                one.train(batch)
        return found

    assert drawn(tmp_path / "measured", save_every=1, metric=metric) == drawn(tmp_path / "not")
    assert (tmp_path / "measured" / "best.json").exists()
