"""Whether a rank still holds its last boundary: the decision, and that every change of a real training is seen."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from torch import Tensor, nn

from dalsegno.elastic.rank.collective import Solo
from dalsegno.elastic.training.copies import Copies
from dalsegno.elastic.training.examination import Examination
from dalsegno.elastic.training.held_state import HeldState, held_by
from dalsegno.elastic.training.session import BareSession
from dalsegno.elastic.training.training_state import TrainingState
from dalsegno.elastic.training.unchanged import BoundaryNote, Now, SeenState, UnclearError, is_due, plain, why_not
from tests.unit.elastic.script.test_mistakes import Lookahead

SEEN = SeenState((("model.weight", 1), ("optimizer.exp_avg", 2), ("model.count", 3)), "rest")
BOUNDARY = BoundaryNote(7, (4, 5, 6), "plain", witnessed=True)
NOW = Now(SEEN, (4, 5, 6), "plain", stepping=False, lone={2: 6})


def test_what_has_not_changed_is_the_boundary() -> None:
    assert why_not(SEEN, BOUNDARY, NOW) == ""


@pytest.mark.parametrize(
    ("boundary", "now", "why"),
    [
        (BOUNDARY, replace(NOW, stepping=True), "begun its step"),
        (replace(BOUNDARY, witnessed=False), NOW, "no optimizer was seen"),
        (BOUNDARY, replace(NOW, versions=(4, 6, 6)), "optimizer.exp_avg has changed"),
        (BOUNDARY, replace(NOW, plain="other"), "small part"),
        (BOUNDARY, replace(NOW, seen=replace(SEEN, rest="other")), "something else"),
        (BOUNDARY, replace(NOW, seen=replace(SEEN, places=SEEN.places[:2])), "another tensor"),
        (BOUNDARY, replace(NOW, seen=replace(SEEN, places=(("model.weight", 9), *SEEN.places[1:]))), "model.weight is"),
        (replace(BOUNDARY, versions=(4, 5)), NOW, "not noted"),
        (BOUNDARY, replace(NOW, lone={2: 5}), "model.count is this rank's own"),
    ],
)
def test_any_doubt_means_no(boundary: BoundaryNote, now: Now, why: str) -> None:
    assert why in why_not(SEEN, boundary, now)


def test_only_what_can_be_compared_is_taken() -> None:
    value = {"a": [1, None, {"b": (2.0, "x")}], "t": torch.zeros(2)}
    assert plain(value) == plain(value)
    assert plain({"a": 1}) != plain({"a": 1.0})
    with pytest.raises(UnclearError, match="a object"):
        plain({"a": object()})


def test_a_state_is_looked_at_more_and_more_rarely() -> None:
    """In the end once in 128 boundaries, at other places each time: a habit of any rhythm is met soon."""
    looks = [n for n in range(1, 128 * 1000) if is_due(n)]
    assert looks[:8] == [1, 2, 4, 8, 16, 32, 64, 128]
    assert [n // 128 for n in looks[8:]] == [*range(2 if looks[8] >= 256 else 1, 1000)]
    for rhythm in (*range(2, 33), 50, 64, 100, 128):
        assert {n % rhythm for n in looks[8 : 8 + 7 * rhythm]} == {*range(rhythm)}


# ---- a real training -------------------------------------------------------------------------------------------------


class Average(nn.Module):
    """An average of weights, kept in a way that torch does not count where ``unseen``."""

    def __init__(self, model: nn.Module, unseen: bool) -> None:
        super().__init__()
        self.unseen = unseen
        self.register_buffer("kept", next(model.parameters()).detach().clone())

    def update(self, model: nn.Module) -> None:
        kept = cast(Tensor, self.kept)
        with torch.no_grad():
            (kept.data if self.unseen else kept).mul_(0.5).add_(next(model.parameters()), alpha=0.5)


class Watched:
    """A small training, noted at a boundary."""

    def __init__(self, *more: nn.Module, optimizer: str = "AdamW", **parts: Any) -> None:
        torch.manual_seed(0)
        self.model = nn.Sequential(nn.Linear(4, 4), *more)
        self.optimizer = getattr(torch.optim, optimizer)(self.model.parameters(), lr=0.1)
        self.scheduler = torch.optim.lr_scheduler.ExponentialLR(self.optimizer, 0.9)
        made = {name: part(self.model) if callable(part) else part for name, part in parts.items()}
        examination = Examination(0, True, 1, 1, True)
        session: Any = SimpleNamespace(rank=0, step=0, resume=None, examination=examination, copies=Copies(Solo()))
        self.state = TrainingState(
            cast(BareSession, session), model=self.model, optimizer=self.optimizer, scheduler=self.scheduler, **made
        )
        self.stepping = False
        self.held = HeldState(self.state, self._steps, self._stepped)
        self.step()
        self.known = self.held.look()
        self.note()

    def _steps(self) -> None:
        self.stepping = True

    def _stepped(self) -> None: ...

    def note(self) -> None:
        self.boundary = BoundaryNote(1, self.held.versions(), self.held.plain(), self.stepping)
        self.stepping = False

    def forward(self) -> Tensor:
        result: Tensor = self.model(torch.randn(3, 4)).sum()
        return result

    def step(self) -> None:
        self.forward().backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.scheduler.step()

    def why(self) -> str:
        held = self.held
        now = Now(held.seen(held.files()), held.versions(), held.plain(), self.stepping, {})
        return why_not(self.known, self.boundary, now)


def test_it_may_go_while_an_optimizer_steps() -> None:
    """The garbage collector picks its moment itself: torch may be going through the hooks just then."""
    watched = Watched()
    hooks = watched.optimizer._optimizer_step_pre_hooks
    first = watched.optimizer.register_step_pre_hook(lambda *_: vars(watched).pop("held") and None)
    hooks.move_to_end(first.id, last=False)
    watched.step()
    assert "held" not in vars(watched)


@pytest.mark.parametrize("optimizer", ["AdamW", "SGD", "Adagrad", "RMSprop", "NAdam", "ASGD"])
def test_a_forward_and_a_backward_pass_change_nothing(optimizer: str) -> None:
    watched = Watched(nn.Dropout(), nn.LayerNorm(4), optimizer=optimizer)
    watched.forward().backward()
    assert watched.why() == ""
    watched.step()
    assert watched.why()
    watched.note()
    assert watched.why() == ""


def change_weight(watched: Watched) -> None:
    with torch.no_grad():
        next(watched.model.parameters()).mul_(2)


def change_moment(watched: Watched) -> None:
    next(iter(watched.optimizer.state.values()))["exp_avg"].zero_()


def new_moment(watched: Watched) -> None:
    held = next(iter(watched.optimizer.state.values()))
    held["exp_avg"] = held["exp_avg"].clone()


def new_storage(watched: Watched) -> None:
    parameter = next(watched.model.parameters())
    parameter.data = parameter.data.clone()


@pytest.mark.parametrize(
    "change",
    [
        change_weight,
        change_moment,
        new_moment,
        new_storage,
        lambda watched: watched.optimizer.step(),
        lambda watched: watched.scheduler.step(),
        lambda watched: watched.optimizer.param_groups[0].update(lr=0.5),
        lambda watched: watched.model[0].requires_grad_(False),
        lambda watched: watched.model.add_module("new", nn.Linear(1, 1)),
        lambda watched: watched.optimizer.add_param_group({"params": [torch.zeros(1, requires_grad=True)]}),
    ],
    ids=lambda change: getattr(change, "__name__", "change"),
)
def test_a_change_is_seen(change: Any) -> None:
    watched = Watched()
    watched.forward().backward()
    assert watched.why() == ""
    change(watched)
    assert watched.why()


@pytest.mark.parametrize("fused", [True, False])
def test_a_step_is_seen_whose_kernel_counts_nothing(fused: bool) -> None:
    watched = Watched()
    for group in watched.optimizer.param_groups:
        group["fused"] = fused
    watched.note()
    watched.stepping = False
    watched.forward().backward()
    watched.optimizer.step()
    assert "begun its step" in watched.why()


def test_running_statistics_change_in_the_forward_pass() -> None:
    """A model with BatchNorm is not at the boundary any more once its step has begun."""
    watched = Watched(nn.BatchNorm1d(4))
    assert watched.why() == ""
    watched.forward()
    assert "running" in watched.why() or "num_batches" in watched.why()


def test_an_average_that_is_kept_beside_is_watched() -> None:
    watched = Watched(average=lambda model: Average(model, unseen=False))
    assert watched.why() == ""
    average = cast(Average, watched.state.parts["average"])
    average.update(watched.model)
    assert watched.why()


def test_what_torch_does_not_count_has_another_content() -> None:
    """So that it is seen is tried out in each training."""
    watched = Watched(average=lambda model: Average(model, unseen=True))
    before = watched.held.content()
    cast(Average, watched.state.parts["average"]).update(watched.model)
    assert watched.why() == ""
    assert watched.held.content() != before


class Fresh:
    """Gives a new tensor each time that it is asked."""

    def state_dict(self) -> dict[str, Any]:
        return {"x": torch.zeros(3)}

    def load_state_dict(self, state: Any) -> None: ...


class Keeper:
    """Gives what nobody can compare."""

    def state_dict(self) -> Any:
        return {"x": torch.device("cpu")}

    def load_state_dict(self, state: Any) -> None: ...


def test_a_part_that_cannot_be_watched_is_not() -> None:
    with pytest.raises(UnclearError):
        Watched(fresh=Fresh())


def test_two_ranks_with_one_state_say_the_same() -> None:
    one, other = Watched(), Watched()

    def say(watched: Watched) -> str:
        return watched.held.same_everywhere(watched.known, watched.held.content())

    assert say(one) == say(other)
    change_weight(other)
    assert say(one) != say(other)
    assert say(one) != say(Watched(optimizer="Adam"))


def test_only_parts_that_all_ranks_step_are_taken_from_another_rank() -> None:
    assert Watched().held.stepped_alike
    assert not Watched(average=lambda model: Average(model, unseen=False)).held.stepped_alike


def test_tensors_that_no_optimizer_steps_may_be_a_ranks_own() -> None:
    watched = Watched(nn.BatchNorm1d(4))
    names = [watched.known.places[n][0] for n in watched.held.lone()]
    assert [name.rpartition("1.")[2] for name in names] == ["running_mean", "running_var", "num_batches_tracked"]


def test_only_what_a_training_state_saves_is_known() -> None:
    state = Watched().state
    assert held_by(state.write) is state
    assert held_by(lambda path: state.write(path)) is None
    assert held_by(None) is None


def test_an_optimizer_that_takes_no_hooks_is_not_watched() -> None:
    """Its steps are not seen, as those of a class that is not torch's. (A Trainer of transformers may have one.)"""
    watched = Watched()
    watched.state._parts["second"] = Lookahead(watched.optimizer)
    with pytest.raises(UnclearError, match="steps unseen"):
        HeldState(watched.state, watched._steps, watched._stepped).look()
