"""A loop of one's own gives what the same loop of the lower layer gives, and leaves out what the session knows."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import IterableDataset

from dalsegno.elastic import Accumulation, Batches, BatchPlan, CheckpointStore, ElasticSampler, TrainingState, session
from dalsegno.elastic.rank.process_group import init_alone
from dalsegno.elastic.script.state import _sending_nothing
from dalsegno.elastic.training import entry

ROWS = torch.randn(40, 5, generator=torch.Generator().manual_seed(5))


class Stream(IterableDataset[Tensor]):
    def __iter__(self) -> Iterator[Tensor]:
        return iter(ROWS)


def test_a_rank_alone_waits_for_gloos_threads_at_its_end_too(monkeypatch: pytest.MonkeyPatch) -> None:
    """It has them as soon as its model is wrapped. Without an agent nothing else ends it without meeting them."""
    waits: list[bool] = []
    monkeypatch.setattr(entry, "settle_at_exit", lambda: waits.append(True))
    assert session().world_size == 1
    assert waits


def made() -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.2), nn.Linear(8, 1))
    return model, torch.optim.AdamW(model.parameters(), lr=0.01)


def loss_of(model: Any, rows: Tensor) -> Tensor:
    loss: Tensor = (model(rows[:, :4]) - rows[:, 4:]).square().mean()
    return loss


def lower(directory: Path, steps: int) -> list[float]:
    """The losses of a loop of the lower layer."""
    s = session(directory)
    model, optimizer = made()
    state = TrainingState(s, model=model, optimizer=optimizer)
    state.load()
    plan = BatchPlan(16, s.world_size, 4)
    batches: Any = Batches(ROWS, ElasticSampler(len(ROWS), 16, seed=3), plan, s.rank, resume=s.resume)
    accumulate, losses = Accumulation(model, optimizer), []
    for batch in s.steps(batches, max_steps=steps, save=state.write, save_every=2, seed=3):
        losses.append(step_of(accumulate(batch), model, optimizer))
    s.close()
    return losses


def upper(directory: Path, steps: int, **options: Any) -> list[float]:
    """Those of the same loop with what the session knows left out."""
    with session(directory) as s:
        model, optimizer = made()
        state = s.state(model, optimizer)
        data = s.data(ROWS, global_batch=16, micro_batch=4, seed=3)
        loop = s.steps(data, state, max_steps=steps, save_every=2, **options)
        return [step_of(batch, model, optimizer) for batch in loop]


def step_of(micros: Any, model: nn.Module, optimizer: torch.optim.Optimizer) -> float:
    total = 0.0
    for micro in micros:
        loss = loss_of(model, micro.data)
        micro.scale(loss).backward()
        total += float(loss.detach()) * micro.n
    optimizer.step()
    optimizer.zero_grad()
    return total


@pytest.mark.slow
@pytest.mark.parametrize("options", [{}, {"background": True}])
def test_it_is_exact_as_the_lower_layer(tmp_path: Path, options: dict[str, Any]) -> None:
    """Bit for bit, also through a restart; each may go on with what the other has saved."""
    losses = lower(tmp_path / "lower", 9)
    assert upper(tmp_path / "upper", 4, **options) == losses[:4]
    assert upper(tmp_path / "upper", 6, **options) == losses[4:6]
    assert lower(tmp_path / "upper", 8) == losses[6:8]
    assert upper(tmp_path / "upper", 9) == losses[8:]
    assert [one.step for one in CheckpointStore(tmp_path / "upper").sealed()] == [2, 4, 6, 8, 9]


def test_data_epochs_end_the_training() -> None:
    """Each sample once in each, the last batch of each is short, and the loop knows where they end."""
    with session() as s:
        model, optimizer = made()
        state = s.state(model, optimizer)
        data = s.data(ROWS, global_batch=16, micro_batch=4, data_epochs=2)
        seen = [
            (batch.n, batch.ends_data_epoch, sorted(step_ids(batch, model, optimizer)))
            for batch in s.steps(data, state)
        ]
    assert [(n, ends) for n, ends, _ in seen] == [(16, False), (16, False), (8, True)] * 2
    assert sorted(i for _, _, ids in seen[:3] for i in ids) == list(range(40))


def step_ids(batch: Any, model: nn.Module, optimizer: torch.optim.Optimizer) -> tuple[int, ...]:
    step_of(batch, model, optimizer)
    return tuple(batch.sample_ids)


def test_a_stream_keeps_its_order_and_a_loader_has_workers() -> None:
    """What a DataLoader takes, `s.data` takes."""
    # A group of gloo's that another test has left in a cycle must not be collected in the loader's forked process: it
    # would join threads that are not there, and that aborts.
    gc.collect()
    with session() as s:
        model, optimizer = made()
        state = s.state(model, optimizer)
        data = s.data(Stream(), global_batch=16, micro_batch=16, data_epochs=1, num_workers=1, collate_fn=torch.stack)
        rows = []
        for batch in s.steps(data, state):
            for micro in batch:
                rows.append(micro.data)
                micro.scale(loss_of(model, micro.data)).backward()
            optimizer.step()
    assert torch.equal(torch.cat(rows), ROWS)


@pytest.mark.slow
@pytest.mark.parametrize("first", ["state", "wrapper"])
def test_synchronisation_waits_for_the_last_micro_batch(first: str) -> None:
    """Whether the model is wrapped before or after the state is made, and compiled around that."""
    init_alone("gloo")
    try:
        with session() as s:
            model, optimizer = made()
            if first == "state":
                state = s.state(model, optimizer)
                wrapped = torch.compile(DistributedDataParallel(model), backend="eager", disable=True)
            else:
                wrapped = DistributedDataParallel(model)
                state = s.state(wrapped, optimizer)
            data = s.data(ROWS, global_batch=16, micro_batch=4)
            for batch in s.steps(data, state, max_steps=2):
                step_of(batch, wrapped, optimizer)
            assert state.begin(data).deferrals == 2 * 3
    finally:
        dist.destroy_process_group()


@pytest.mark.slow
@pytest.mark.parametrize("keeps", ["nothing", "the wrapper", "a group of its own"])
def test_what_can_stay_for_the_next_world(keeps: str, caplog: pytest.LogCaptureFixture) -> None:
    """The loop makes and wraps nothing itself; who keeps something of this world cannot stay."""
    try:
        with session() as s:
            model, optimizer = made()
            state = s.state(model, optimizer, wrap=DistributedDataParallel)
            assert isinstance(state.model, DistributedDataParallel)
            data = s.data(ROWS, global_batch=16, micro_batch=4)
            kept: Any = state.model if keeps == "the wrapper" else None
            group = dist.new_group([0]) if keeps == "a group of its own" else None
            for batch in s.steps(data, state, max_steps=2, stay=True):
                step_of(batch, state.model, optimizer)
                assert s.may_stay() == (keeps == "nothing")
                state.wrapped()
        assert ("call state.model each time" in caplog.text.lower()) == (kept is not None)
        del group
    finally:
        dist.destroy_process_group()


def test_a_process_that_stays_reads_only_what_may_be_its_own() -> None:
    """Without buffers and further parts it has all that is in the files."""
    model, optimizer = made()
    with session() as s:
        assert s.state(model, optimizer).unread() == ["model.pt", "training.pt"]
        schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1)
        assert TrainingState(s, model=model, optimizer=optimizer, scheduler=schedule).unread() == ["model.pt"]
        assert TrainingState(s, model=nn.BatchNorm1d(2)).unread() == ["training.pt"]


@pytest.mark.parametrize("stays", [True, False])
def test_what_this_process_has_just_saved_is_not_rehearsed(stays: bool, tmp_path: Path) -> None:
    """Before the first step of the next world; a new process puts it all together once more."""
    looked = []
    with session(tmp_path) as s:
        model, optimizer = made()
        state = TrainingState(s, model=model, optimizer=optimizer)
        state.load()
        state.files()
        if stays:
            state.go_on()
        state.copy = lambda: looked.append(1) or {}  # type: ignore[assignment, func-returns-value]
        state.rehearse()
    assert bool(looked) != stays


class Masked(nn.Linear):
    """Has a buffer that is in no checkpoint."""

    def __init__(self) -> None:
        super().__init__(2, 2)
        self.register_buffer("mask", torch.ones(2), persistent=False)


@pytest.mark.parametrize(
    ("wrap", "model", "sends"),
    [
        (DistributedDataParallel, nn.Linear(2, 2), False),
        (partial(DistributedDataParallel, static_graph=True), nn.Linear(2, 2), False),
        (partial(DistributedDataParallel, broadcast_buffers=False), nn.Linear(2, 2), False),
        (DistributedDataParallel, Masked(), False),
        (partial(DistributedDataParallel, broadcast_buffers=False), Masked(), True),
        (partial(DistributedDataParallel, init_sync=True), nn.Linear(2, 2), True),
        (partial(DistributedDataParallel, nn.Linear(2, 2)), nn.Linear(2, 2), True),
        (lambda model: DistributedDataParallel(model), nn.Linear(2, 2), True),
        (type("OwnWrapper", (DistributedDataParallel,), {}), nn.Linear(2, 2), True),
    ],
)
def test_a_wrapper_that_is_known_sends_nothing_that_all_have_loaded(wrap: Any, model: nn.Module, sends: bool) -> None:
    """Whatever else somebody wraps with is left as it is."""
    found = _sending_nothing(wrap, model)
    assert (found is wrap) == sends
    assert sends or (isinstance(found, partial) and found.keywords["init_sync"] is False)


def test_rank_0s_weights_are_sent_only_where_nothing_was_loaded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first session starts from what each rank has made, the second one from what all have loaded."""
    sent = []
    known = torch.nn.parallel.distributed._sync_module_states
    monkeypatch.setattr(torch.nn.parallel.distributed, "_sync_module_states", lambda **o: sent.append(1) or known(**o))
    try:
        for count in (1, 2):
            with session(tmp_path) as s:
                model, optimizer = made()
                state = s.state(model, optimizer, wrap=DistributedDataParallel)
                assert len(sent) == 1
                data = s.data(ROWS, global_batch=16, micro_batch=4)
                for batch in s.steps(data, state, max_steps=2 * count):
                    step_of(batch, state.model, optimizer)
    finally:
        dist.destroy_process_group()


def test_what_each_rank_has_of_its_own_is_loaded_where_it_stays(tmp_path: Path) -> None:
    """Rank 0 saves its buffers and schedules for all; weights and optimizer are alike, and stay as they are."""

    def trained(directory: Path, steps: int) -> tuple[Any, nn.Module, Any, Any]:
        torch.manual_seed(1)
        model = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Linear(8, 1))
        model.register_buffer("own", torch.zeros(1), persistent=False)
        optimizer = torch.optim.AdamW(model.parameters())
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1)
        s = session(directory)
        state = s.state(model, optimizer, scheduler)
        data = s.data(ROWS, global_batch=16, micro_batch=16)
        for batch in s.steps(data, state, max_steps=steps):
            step_of(batch, model, optimizer)
            scheduler.step()
            model.own += 1
        return state, model, optimizer, scheduler

    trained(tmp_path, 3)
    entry._sessions.pop().close()
    state, model, optimizer, scheduler = trained(tmp_path, 3)
    saved = {name: value.clone() for name, value in [*model.state_dict().items(), ("own", model.own)]}
    moments = [value["exp_avg"].clone() for value in optimizer.state.values()]
    for buffer in model.buffers():
        buffer.add_(5)
    scheduler.last_epoch = 99
    entry._sessions[0].meetings.over = False
    state.go_on()
    assert state.unread() == []
    assert all(torch.equal(saved[name], value) for name, value in [*model.state_dict().items(), ("own", model.own)])
    assert scheduler.last_epoch == 3
    assert all(torch.equal(was, value["exp_avg"]) for was, value in zip(moments, optimizer.state.values(), strict=True))
    assert all(parameter.grad is None for parameter in model.parameters())


@pytest.mark.slow
def test_several_runs_in_one_process(tmp_path: Path) -> None:
    """One after the other; each goes on by itself, and leaves its directory to others."""
    once = upper(tmp_path / "a", 4)
    assert upper(tmp_path / "b", 4) == once
    assert upper(tmp_path / "a", 5) == upper(tmp_path / "b", 5)
    with session(tmp_path / "a") as s:
        assert s.step == 5
        with pytest.raises(RuntimeError, match="leave the first one before"):
            session(tmp_path / "b")


@pytest.mark.slow
def test_weights_only(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Another optimizer begins with the weights; once, so that a restart loses nothing of it."""
    upper(tmp_path, 4)

    def begin(**options: Any) -> tuple[Any, Any, Any, Any]:
        s = session(tmp_path)
        model, _ = made()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
        return s, model, optimizer, s.state(model, optimizer, **options)

    with pytest.raises(ValueError, match=r"was saved with optimizer AdamW, this training has optimizer SGD"):
        begin()
    entry._sessions.pop().close()
    s, model, optimizer, state = begin(weights_only=True)
    assert "only the weights are loaded: optimizer begin anew" in caplog.text
    assert s.step == 4
    assert not optimizer.state
    for batch in s.steps(s.data(ROWS, global_batch=16, micro_batch=4, seed=3), state, max_steps=6):
        step_of(batch, model, optimizer)
    s.close()
    momentum = [one["momentum_buffer"].clone() for one in optimizer.state.values()]
    _, _, optimizer, _ = begin(weights_only=True)
    assert all(torch.equal(a, b["momentum_buffer"]) for a, b in zip(momentum, optimizer.state.values(), strict=True))
