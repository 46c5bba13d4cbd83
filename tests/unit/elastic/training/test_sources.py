"""What a loader's state and cut must have in common with what was saved, and what does not matter."""

from __future__ import annotations

import io
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from dalsegno.elastic import BatchPlan
from dalsegno.elastic.checkpoint import SHARDED, Cut, Order, Position
from dalsegno.elastic.data.sampler import check_cut
from dalsegno.elastic.rank.agreement import Refusal, Trouble
from dalsegno.elastic.saving.resuming import ResumePoint
from dalsegno.elastic.training.opening import check_world
from dalsegno.elastic.training.sources import StatefulLoader, file_name, fingerprint
from tests.support.workers.fake_link import FakeLink
from tests.unit.elastic.checkpoint.test_best import start
from tests.unit.elastic.checkpoint.test_checkpoint import manifest_for


def cut(plan: BatchPlan, length: int, *, drop_last: bool = False) -> Cut:
    return plan.cut(Order(0, length, plan.global_batch_size, True), drop_last=drop_last, tokens=False, seed=5)


def test_only_what_moves_the_curve_is_in_the_cut() -> None:
    """Neither the world nor a limit that comes to the same slices; `pad` and `drop_last` where they do anything."""
    fixed = {1: cut(BatchPlan(12, 1, 4, True), 40), 3: cut(BatchPlan(12, 3, 4, True), 40)}
    assert fixed[1] == fixed[3] == cut(BatchPlan(12, 2, 5, True), 40)
    assert fixed[1].micro_batch_size == 4
    assert cut(BatchPlan(12, 2, 4), 40) == cut(BatchPlan(12, 1, 7), 40) == Cut(False, False)
    assert not cut(BatchPlan(12, 1, 4, True, pad=True), 48).pad
    assert cut(BatchPlan(12, 1, 4, True, pad=True), 40).pad
    assert cut(BatchPlan(12, 1, 5, True, pad=True), 48) == cut(BatchPlan(12, 1, 5, True), 48)
    assert cut(BatchPlan(10, 1, 4, True, pad=True), 40).pad
    assert not cut(BatchPlan(12, 1, 4), 48, drop_last=True).drop_last
    assert cut(BatchPlan(12, 1, 4), 40, drop_last=True).drop_last
    assert cut(BatchPlan(12, 1, 4), 0, drop_last=True).drop_last


def test_a_cut_of_before_says_nothing() -> None:
    """Manifests of earlier versions have none, and what was not fixed or not seeded promised nothing."""
    ours = Cut(True, True, 3, True, 5)
    check_cut(None, ours)
    check_cut(Cut(True, True), ours)
    check_cut(Cut(True, True, 3, True, None), ours)
    with pytest.raises(ValueError, match=r"tokens: was False and is True; drop_last: was False and is True\)"):
        check_cut(Cut(False, False), ours)


def test_a_fingerprint_is_of_values() -> None:
    """Equal batches have one, whatever else they are made of; other values, shapes and kinds have another."""
    made = [{"x": torch.arange(4.0), "ids": (1, "a")}, [torch.tensor(2, dtype=torch.bfloat16), b"", object()]]
    again = [{"x": torch.arange(4.0), "ids": (1, "a")}, [torch.tensor(2, dtype=torch.bfloat16), b"", object()]]
    assert fingerprint(made) == fingerprint(again)
    others = [torch.arange(4.0), torch.arange(4), torch.arange(4.0).reshape(2, 2), [0.0, 1.0], {"a": 1}, {"b": 1}, []]
    assert len({fingerprint(one) for one in others}) == len(others)


class Numbers:
    """A loader whose state is what it goes on working with."""

    def __init__(self, *, keeps: bool = True) -> None:
        self.state, self.keeps = {"next": 0}, keeps

    def state_dict(self) -> dict[str, int]:
        return self.state

    def load_state_dict(self, state: dict[str, int]) -> None:
        if self.keeps:
            self.state = state

    def __iter__(self) -> Numbers:
        return self

    def __next__(self) -> int:
        if self.state["next"] == 5:
            raise StopIteration
        self.state["next"] += 1
        return self.state["next"]


def saved(taken: int, *, ahead: int) -> dict[str, Any]:
    """What a run holds of its loader after so many steps."""
    source: StatefulLoader[int] = StatefulLoader(Numbers(), None)
    for _ in range(taken):
        source.take()
        source.ahead(ahead)
    (content,) = source.files(1).values()
    return dict(torch.load(io.BytesIO(content), weights_only=True))


@pytest.mark.parametrize("ahead", [0, 1])
def test_a_state_is_that_of_the_last_batch_taken(ahead: int, caplog: pytest.LogCaptureFixture) -> None:
    """Also where the loader goes on working with what it gave as its state, and has moved on."""
    again: StatefulLoader[int] = StatefulLoader(Numbers(), saved(3, ahead=ahead))
    assert again.go_on() == ""
    assert [again.take(), again.take()] == [4, 5]
    assert again.ahead(1) == 0
    assert not caplog.records
    broken = Numbers()
    broken.load_state_dict = None  # type: ignore[assignment,method-assign]
    # Accelerate's begins anew when it is told of its end.
    over: StatefulLoader[int] = StatefulLoader(broken, saved(5, ahead=1))
    assert over.go_on() == ""
    assert over.ahead(1) == 0


def test_loaders_states_of_another_world_are_refused_under_an_agent(tmp_path: Path) -> None:
    """Whatever the shape claims, and with the reason that a person can act on."""
    directory = tmp_path / "step-4.e2.1"
    (directory / file_name(0)).parent.mkdir(parents=True)
    (directory / file_name(0)).write_bytes(b"state")
    manifest = manifest_for(directory)
    assert manifest.shape.any_world_size
    resume = ResumePoint(4, Position(), SHARDED, directory, None, manifest)
    check_world(resume, 2)
    with pytest.raises(RuntimeError, match="data loader of each of 2 ranks, and there are 3: start 2"):
        check_world(resume, 3)


def test_a_loader_that_goes_on_with_another_batch_is_said(caplog: pytest.LogCaptureFixture) -> None:
    """Nobody else would notice that it has ignored its state; of a wrapper of Accelerate's it is a refusal."""
    forgetful: StatefulLoader[int] = StatefulLoader(Numbers(keeps=False), saved(3, ahead=1))
    assert forgetful.go_on() == ""
    assert "Numbers goes on with another batch than was next" in caplog.text
    wrapper = Numbers(keeps=False)
    wrapper.base_dataloader = Numbers()  # type: ignore[attr-defined]
    assert "its state lacks the order" in StatefulLoader(wrapper, saved(3, ahead=1)).go_on()


@pytest.mark.parametrize("wrapped", [False, True])
@pytest.mark.parametrize("changes", [lambda batch: batch.pop("labels"), lambda batch: batch["x"].zero_()])
def test_what_an_untrained_step_did_to_its_batch_says_nothing_of_the_loader(
    wrapped: bool, changes: Callable[[Any], Any], caplog: pytest.LogCaptureFixture
) -> None:
    """A wrapper of Accelerate's was refused for ever."""

    class Dictionaries(Numbers):
        def __next__(self) -> Any:
            return {"x": torch.ones(2), "labels": super().__next__()}

    def made() -> Any:
        data = Dictionaries()
        if wrapped:
            data.base_dataloader = Numbers()  # type: ignore[attr-defined]
        return data

    source: StatefulLoader[Any] = StatefulLoader(made(), None)
    source.take()
    changes(source.take())
    source.last(trained=False)
    (content,) = source.files(0).values()
    again: StatefulLoader[Any] = StatefulLoader(made(), torch.load(io.BytesIO(content), weights_only=True))
    assert again.go_on() == ""
    assert again.take()["labels"] == 2
    assert not caplog.records


@pytest.mark.parametrize("found", [TimeoutError, MemoryError, RuntimeError, TypeError])
@pytest.mark.parametrize("resumes", [False, True])
def test_a_first_batch_that_may_come_at_another_start_is_no_refusal(
    tmp_path: Path, resumes: bool, found: type[Exception]
) -> None:
    """A storage that did not answer is no mistake of the script's, and the agent is told of no refusal."""
    final = found is TypeError

    class Failing(Numbers):
        def __next__(self) -> int:
            raise found("no batch")

    if resumes:
        with start(tmp_path) as session:
            list(session.steps(Numbers(), max_steps=2, save=lambda path: None))
    with start(tmp_path) as session:
        link: Any = FakeLink()
        session.meetings._link = link
        data = Failing() if resumes else (batch for batch in Failing())
        wanted = (Refusal if final else Trouble) if resumes else found
        with pytest.raises(wanted):
            session.steps(data, max_steps=3, save=lambda path: None)
        assert [message.WhichOneof("body") for message in link.said] == ["refused"] * final


def test_a_state_that_is_not_taken_is_a_problem_for_all() -> None:
    """Whatever the loader raises."""
    broken = Numbers()
    broken.load_state_dict = None  # type: ignore[assignment,method-assign]
    assert (
        "does not go on from the state that was saved of it: TypeError"
        in StatefulLoader(broken, saved(1, ahead=1)).go_on()
    )
