"""The trainer in a world of one: what it trains, saves and refuses, and what callbacks and loggers are told."""

from __future__ import annotations

import io
import json
import signal
import sys
import types
from collections.abc import Callable, Iterator, Mapping
from contextlib import nullcontext
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.amp.grad_scaler import GradScaler
from torch.utils.data import ChainDataset, Dataset, IterableDataset

from dalsegno import elastic
from dalsegno.elastic import (
    BatchPlan,
    Callback,
    EarlyStopping,
    ElasticSampler,
    Evaluator,
    SaveError,
    Strategy,
    Tracked,
    Trainer,
)
from dalsegno.elastic.checkpoint import CheckpointName, CheckpointStore
from dalsegno.elastic.data.evaluator import Interrupted
from dalsegno.elastic.rank.collective import PeerLost
from dalsegno.elastic.saving.unfit import rejecting
from dalsegno.elastic.trainer.callbacks import Console, TensorBoard, WeightsAndBiases
from dalsegno.elastic.trainer.deepspeed_strategy import DeepSpeed
from dalsegno.elastic.trainer.fsdp import FSDP, TRAINER_FILE, load_trainer_state, trainer_state
from dalsegno.elastic.trainer.loss_scale import LossScale
from dalsegno.elastic.trainer.strategies import DDP, MakeOptimizer, step_and_clear
from dalsegno.elastic.training import entry, saves
from dalsegno.elastic.training.session import BareSession
from tests.unit.elastic.saving.test_resuming import point, write

STEPS, GLOBAL_BATCH, LENGTH = 7, 6, 20


class Points(Dataset[Tensor]):
    """20 rows of 4 numbers, and which of them were asked for."""

    def __init__(self, length: int = LENGTH) -> None:
        self.length, self.asked = length, list[int]()

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> Tensor:
        self.asked.append(index)
        return torch.randn(4, generator=torch.Generator().manual_seed(index), dtype=torch.float64)


class Asked(Points):
    """Notes in a file what was asked for, also by a DataLoader's workers."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.path = path
        path.touch()

    def __getitem__(self, index: int) -> Tensor:
        with self.path.open("ab") as file:
            file.write(b".")
        return super().__getitem__(index)

    def count(self) -> int:
        return self.path.stat().st_size


def make_model(dropout: float = 0.0, width: int = 5) -> nn.Module:
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(3, width), nn.Tanh(), nn.Dropout(dropout), nn.Linear(width, 1)).double()


def loss_of(model: Any, data: Tensor) -> Tensor:
    return (model(data[:, :3]) - data[:, 3:]).square().mean()


def make_optimizer(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=0.1)


def make_scheduler(optimizer: torch.optim.Optimizer) -> Any:
    return torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.8**step)


class Scripted(Evaluator):
    """An evaluation whose metric is told beforehand, step by step."""

    def __init__(self, values: list[float]) -> None:
        super().__init__(Points(1), lambda model, data: {"score": (values[self.runs - 1], 1)})
        self.runs = 0

    def run(self, *arguments: Any, **options: Any) -> dict[str, float]:
        self.runs += 1
        return super().run(*arguments, **options)


def make(data: Any = None, model: nn.Module | None = None, **options: Any) -> Trainer:
    wanted: dict[str, Any] = {
        "optimizer": make_optimizer,
        "loss": loss_of,
        "global_batch_size": GLOBAL_BATCH,
        "max_micro_batch_size": 4,
        "max_steps": STEPS,
        "scheduler": make_scheduler,
        "seed": 3,
        "progress": False,
        **options,
    }
    return Trainer(model or make_model(), Points() if data is None else data, **wanted)


@pytest.fixture(autouse=True)
def process() -> Iterator[Callable[[], None]]:
    """Called: as if a new process began. A session is one per process."""

    def begin() -> None:
        while entry._sessions:
            entry._sessions.pop().close()

    before = signal.getsignal(signal.SIGTERM)
    begin()
    yield begin
    begin()
    signal.signal(signal.SIGTERM, before)


def weights(trainer: Trainer) -> Tensor:
    return torch.cat([p.detach().flatten() for p in trainer.model.parameters()])


def plain(steps: int, clip: float | None = None, optimizer_of: MakeOptimizer = make_optimizer) -> Tensor:
    """What a loop without any of ours makes of the model."""
    model, sampler, data = make_model(), ElasticSampler(LENGTH, GLOBAL_BATCH, seed=3), Points()
    optimizer = optimizer_of(model)
    scheduler = make_scheduler(optimizer)
    for _, batch in zip(range(steps), sampler, strict=False):
        loss_of(model, torch.stack([data[i] for i in batch.sample_ids])).backward()  # type: ignore[no-untyped-call]
        if clip is not None:
            nn.utils.clip_grad_norm_([p for group in optimizer.param_groups for p in group["params"]], clip)
        optimizer.step()
        scheduler.step()
        model.zero_grad()
    return torch.cat([p.detach().flatten() for p in model.parameters()])


def saved_steps(directory: Path) -> list[int]:
    return [manifest.step for manifest in CheckpointStore(directory).sealed()]


@pytest.mark.parametrize("clip", [None, 0.05])
def test_it_trains_as_a_plain_loop_does(clip: float | None) -> None:
    """Two micro-batches per step, a short last batch, a scheduler, clipping of the whole gradient: the same weights."""
    trainer = make(max_grad_norm=clip)
    assert trainer.fit().step == STEPS
    torch.testing.assert_close(weights(trainer), plain(STEPS, clip), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("scale", [None, 2.0**16])
def test_an_optimizer_of_a_part_clips_and_clears_that_part(
    tmp_path: Path, process: Callable[[], None], scale: float | None
) -> None:
    """The others' gradients are neither unscaled nor used: no norm has them, they do not pile up, and no resume."""

    def head(model: nn.Module) -> torch.optim.Optimizer:
        return torch.optim.AdamW(model[-1].parameters(), lr=0.1)  # type: ignore[index]

    def run(name: str, steps: int) -> Trainer:
        process()
        scaler = None if scale is None else GradScaler("cpu", init_scale=scale)
        options = {"max_grad_norm": 0.05, "grad_scaler": scaler, "checkpoint_dir": tmp_path / name}
        made = make(optimizer=head, max_steps=steps, **options)
        made.fit()
        assert all(parameter.grad is None for parameter in made.model.parameters())
        return made

    whole = run("a", STEPS)
    torch.testing.assert_close(weights(whole), plain(STEPS, 0.05, head), rtol=1e-12, atol=1e-12)
    run("b", 3)
    assert torch.equal(weights(run("b", STEPS)), weights(whole))


class WithMasters(torch.optim.SGD):
    """Steps copies of some of a model's parameters, in higher precision say, with the gradients that these have."""

    def __init__(self, parameters: list[nn.Parameter], copied: int) -> None:
        self.pairs = [(one, nn.Parameter(one.detach().clone())) for one in parameters[:copied]]
        super().__init__([*(master for _, master in self.pairs), *parameters[copied:]], lr=0.5)

    def step(self, *arguments: Any) -> None:  # type: ignore[override]
        for one, master in self.pairs:
            master.grad, one.grad = one.grad, None
        super().step(*arguments)
        for one, master in self.pairs:
            one.data.copy_(master.data)


@pytest.mark.parametrize("copied", [0, 2, 4])
def test_clipping_with_an_optimizer_that_has_copies(copied: int) -> None:
    """The model's gradients are clipped whatever stands in the parameter groups."""
    trainer = make(
        optimizer=lambda model: WithMasters([*model.parameters()], copied), max_grad_norm=0.05, scheduler=None
    )
    trainer.fit()
    model, sampler, data = make_model(), ElasticSampler(LENGTH, GLOBAL_BATCH, seed=3), Points()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    for _, batch in zip(range(STEPS), sampler, strict=False):
        loss_of(model, torch.stack([data[i] for i in batch.sample_ids])).backward()  # type: ignore[no-untyped-call]
        nn.utils.clip_grad_norm_(model.parameters(), 0.05)
        optimizer.step()
        optimizer.zero_grad()
    wanted = torch.cat([p.detach().flatten() for p in model.parameters()])
    torch.testing.assert_close(weights(trainer), wanted, rtol=1e-12, atol=1e-12)


class Hashed(nn.Parameter):
    """Counts how often one of its kind is looked for in a set or a dictionary."""

    times = 0

    def __hash__(self) -> int:
        Hashed.times += 1
        return id(self)


def test_clipping_of_a_whole_model_looks_for_no_parameter() -> None:
    """That took a millisecond and more of each step with thousands of them."""
    model = nn.ParameterList([Hashed(torch.ones(1)), Hashed(torch.ones(2))])
    optimizer = torch.optim.SGD([{"params": [one]} for one in reversed(list(model))], lr=0.5)

    def hashed(max_grad_norm: float | None) -> int:
        before = Hashed.times
        step_and_clear(model, optimizer, None, max_grad_norm, LossScale(None))
        return Hashed.times - before

    hashed(None)  # a process's first step may look for more, as whatever wraps steps gets to know them
    alone, before = hashed(None), Hashed.times
    list(model.parameters())
    going_through = Hashed.times - before
    assert hashed(1.0) == alone + going_through


class SecondOptimizer(Callback):
    """Steps the model's first part with an optimizer of its own."""

    def on_fit_begin(self, trainer: Trainer) -> None:
        self.optimizer = torch.optim.SGD(trainer.model[0].parameters(), lr=0.5)  # type: ignore[index]

    def on_step(self, trainer: Trainer, batch: Any) -> None:
        self.optimizer.step()


@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
def test_a_second_optimizer_may_step_in_a_callback(strategy: str) -> None:
    """What the Trainer's optimizer does not have is cleared behind the callbacks, and before an evaluation."""
    seen: list[bool] = []

    def measure(model: Any, data: Tensor) -> Any:
        seen.append(any(parameter.grad is not None for parameter in model.parameters()))
        return {"loss": (loss_of(model, data), len(data))}

    def head(model: nn.Module) -> torch.optim.Optimizer:
        return torch.optim.SGD(model[-1].parameters(), lr=0.5)  # type: ignore[index]

    model, sampler, data = make_model(), ElasticSampler(LENGTH, GLOBAL_BATCH, seed=3), Points()
    optimizers = [head(model), torch.optim.SGD(model[0].parameters(), lr=0.5)]  # type: ignore[index]
    for _, batch in zip(range(STEPS), sampler, strict=False):
        loss_of(model, torch.stack([data[i] for i in batch.sample_ids])).backward()  # type: ignore[no-untyped-call]
        for one in optimizers:
            one.step()
        model.zero_grad()
    options: dict[str, Any] = {"optimizer": head, "scheduler": None, "strategy": strategy}
    trainer = make(**options, callbacks=[SecondOptimizer()], evaluator=Evaluator(Points(3), measure), evaluate_every=1)
    try:
        trainer.fit()
        whole = [getattr(p, "full_tensor", p.detach)() for p in trainer.model.parameters()]
    finally:
        if torch.distributed.is_initialized():  # FSDP's
            torch.distributed.destroy_process_group()
    for found, wanted in zip(whole, model.parameters(), strict=True):
        torch.testing.assert_close(found, wanted, rtol=1e-12, atol=1e-12)
    assert seen
    assert not any(seen)


@pytest.mark.slow
@pytest.mark.parametrize("in_background", [False, True])
def test_a_resumed_run_is_the_undisturbed_one_bit_for_bit(
    tmp_path: Path, process: Callable[[], None], in_background: bool
) -> None:
    """With dropout, momentum, a scheduler and clipping; evaluations in one of them change nothing."""
    options: dict[str, Any] = {"max_grad_norm": 0.3, "save_in_background": in_background, "save_every": 2}
    whole = make(model=make_model(0.4), checkpoint_dir=tmp_path / "a", **options)
    whole.fit()
    evaluator = Evaluator(Points(5), lambda model, data: {"draws": (torch.rand(len(data)), len(data))}, batch_size=2)
    for steps in (3, 5, STEPS):
        process()
        torch.manual_seed(steps)
        evaluated = {"evaluator": evaluator, "evaluate_every": 2}
        cut = make(model=make_model(0.4), checkpoint_dir=tmp_path / "b", max_steps=steps, **evaluated, **options)
        assert cut.fit().step == steps
    assert torch.equal(weights(cut), weights(whole))
    assert cut._strategy.optimizer.param_groups[0]["lr"] == whole._strategy.optimizer.param_groups[0]["lr"]
    assert saved_steps(tmp_path / "b") == [2, 3, 4, 5, 6, 7]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("end", "steps"),
    [({}, STEPS), ({"max_steps": None, "data_epochs": 2}, 8), ({"data_epochs": 1}, 4)],
    ids=["max_steps", "data_epochs", "whichever comes first"],
)
@pytest.mark.parametrize("workers", [0, 2])
def test_fit_at_the_end_consumes_nothing(
    tmp_path: Path, process: Callable[[], None], end: dict[str, Any], steps: int, workers: int
) -> None:
    """Called again, here or in a new process: no sample is read, no weight moves, nothing is saved twice."""
    options = {"checkpoint_dir": tmp_path, "loader_options": {"num_workers": workers}, **end}
    first = make(Asked(tmp_path / "asked"), **options)
    first.fit()
    wanted = weights(first).clone()
    # Workers fetch ahead, but only what is there.
    sizes = [GLOBAL_BATCH, GLOBAL_BATCH, GLOBAL_BATCH, LENGTH - 3 * GLOBAL_BATCH] * 2
    read, looked_at = first.dataset.count(), 3 * 2
    wanted_reads = looked_at + sum(sizes[:steps])
    assert read == wanted_reads if not workers or steps != STEPS else read >= wanted_reads
    assert first.fit().step == steps
    process()
    again = make(first.dataset, **options)
    assert again.fit().step == steps
    assert first.dataset.count() == read
    assert torch.equal(weights(first), wanted)
    assert torch.equal(weights(again), wanted)
    assert saved_steps(tmp_path) == [steps]
    first.max_steps = steps + 1
    with pytest.raises(RuntimeError, match="start the script again"):
        first.fit()


def test_more_steps_never_repeat_a_prefix(tmp_path: Path, process: Callable[[], None]) -> None:
    """Entered four times, each time for more steps: every sample in the order of one run, none twice."""
    asked = []
    for steps in (2, 3, 3, STEPS):
        process()
        made = make(checkpoint_dir=tmp_path, max_steps=steps, check_data=False)
        made.fit()
        asked += made.dataset.asked
    sampler = ElasticSampler(LENGTH, GLOBAL_BATCH, seed=3)
    assert asked == [i for _, batch in zip(range(STEPS), sampler, strict=False) for i in batch.sample_ids]
    torch.testing.assert_close(weights(made), plain(STEPS), rtol=1e-12, atol=1e-12)


def test_fit_after_an_error_never_repeats_what_was_trained(tmp_path: Path, process: Callable[[], None]) -> None:
    """In the same process it refuses; started again it goes on from the last save, with the next samples."""

    class Fails(Callback):
        def on_step(self, trainer: Trainer, batch: Any) -> None:
            if trainer.step == 5:
                raise KeyError("a mistake in a callback")

    trainer = make(checkpoint_dir=tmp_path, save_every=2, callbacks=[Fails()])
    with pytest.raises(KeyError):
        trainer.fit()
    with pytest.raises(RuntimeError, match="left by an error after step 5"):
        trainer.fit()
    process()
    again = make(checkpoint_dir=tmp_path, check_data=False)
    again.fit()
    torch.testing.assert_close(weights(again), plain(STEPS), rtol=1e-12, atol=1e-12)
    sampler = ElasticSampler(LENGTH, GLOBAL_BATCH, seed=3)
    ids = [i for _, batch in zip(range(STEPS), sampler, strict=False) for i in batch.sample_ids]
    assert again.dataset.asked == ids[-len(again.dataset.asked) :]
    assert len(again.dataset.asked) == len(ids) - (3 * GLOBAL_BATCH + 2)


def test_data_epochs_end_a_run() -> None:
    """Two passes over 20 samples in batches of 6: 8 steps, the last evaluation after the last one."""
    steps: list[int] = []

    class Notes(Callback):
        def on_evaluation(self, trainer: Trainer, metrics: Mapping[str, float]) -> None:
            steps.append(trainer.step)

    made = make(max_steps=None, data_epochs=2, evaluator=Scripted([1.0, 2.0]), evaluate_every=5, callbacks=[Notes()])
    assert made.fit().step == 8
    assert steps == [5, 8]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"model": make_model(width=6)}, "another model"),
        ({"model": nn.Sequential(nn.Sequential(make_model())).double()}, "none of its 4 names"),
        ({"model": nn.Sequential(*make_model(), nn.Linear(1, 1).double())}, "4.bias, 4.weight only in the model"),
        (
            {"scheduler": None},
            "scheduler LambdaLR.*this training has optimizer AdamW, trainer",
        ),
        ({"grad_scaler": GradScaler("cpu")}, "this training has optimizer AdamW, scheduler LambdaLR, scaler LossScale"),
        ({"data": Points(21)}, "length was 20 and is 21"),
        ({"seed": 4}, "seed was 3 and is 4"),
        ({"shuffle": False}, "shuffle was True and is False"),
        ({"drop_last": True}, "drop_last: was False and is True"),
        ({"global_batch_size": 5}, "global_batch_size was 6 and is 5"),
        ({"strategy": "fsdp"}, "written with strategy ddp, and this run has fsdp: go on with ddp"),
        ({"strategy": "deepspeed"}, "written with strategy ddp, and this run has deepspeed-zero-1"),
        (
            {"optimizer": lambda model: torch.optim.AdamW(list(model.parameters())[:2])},
            r"step-2.*: the optimizer trains other parameters than it did when it was saved: now without 3\.bias",
        ),
    ],
)
def test_a_resume_that_cannot_be_right_is_refused(
    tmp_path: Path, process: Callable[[], None], options: dict[str, Any], message: str
) -> None:
    """Before a step is made, with the reason; and what was saved is still there for the right one."""
    make(checkpoint_dir=tmp_path, max_steps=2).fit()
    process()
    with pytest.raises(ValueError, match=message):
        make(checkpoint_dir=tmp_path, **options).fit()
    process()
    assert make(checkpoint_dir=tmp_path).fit().step == STEPS


class Broken(DDP):
    """Its set-up ends as it waits for another rank, or as it loads."""

    error: Exception = PeerLost("another rank ended before it came to compare")
    loads = False

    def setup(self, *arguments: Any) -> dict[str, Any]:
        with rejecting() if self.loads else nullcontext():
            raise self.error


@pytest.mark.parametrize("error", [PeerLost("closed"), RuntimeError("[pair.cc:534] Connection closed by peer")])
def test_a_peer_that_goes_in_set_up_is_no_word_about_the_checkpoint(
    tmp_path: Path, process: Callable[[], None], monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    """The error comes out as it is; what a framework says as it loads becomes a refusal with the checkpoint's name."""
    make(checkpoint_dir=tmp_path, max_steps=2).fit()
    process()
    monkeypatch.setattr(Broken, "error", error)
    with pytest.raises(RuntimeError) as caught:
        make(checkpoint_dir=tmp_path, strategy=Broken()).fit()
    assert caught.value is error
    process()
    monkeypatch.setattr(Broken, "error", RuntimeError("Missing\nkey"))
    monkeypatch.setattr(Broken, "loads", True)
    with pytest.raises(ValueError, match=r"step-2.* does not fit this training \(.*\): Missing key") as refused:
        make(checkpoint_dir=tmp_path, strategy=Broken()).fit()
    assert refused.value.__cause__ is Broken.error


class OneWorldOnly(DDP):
    """A strategy of a script's own, whose files belong to ranks."""

    name, any_world_size = "own", None


def test_a_strategy_whose_files_belong_to_ranks_is_refused_in_another_world(
    tmp_path: Path, process: Callable[[], None]
) -> None:
    """Nothing is known of it: it goes on with as many ranks, and with no other number."""
    assert make(checkpoint_dir=tmp_path / "one", strategy=OneWorldOnly(), max_steps=2).fit().step == 2
    process()
    assert make(checkpoint_dir=tmp_path / "one", strategy=OneWorldOnly(), max_steps=3).fit().step == 3
    process()
    shape = CheckpointStore(tmp_path / "one").sealed()[-1].shape
    write(tmp_path / "two", CheckpointName(2, 0, 1), shape=replace(shape, world_size=2))
    with pytest.raises(RuntimeError, match="written by 2 ranks and loads at no other number"):
        make(checkpoint_dir=tmp_path / "two", strategy=OneWorldOnly()).fit()


def test_a_checkpoint_of_something_else_is_refused(tmp_path: Path, process: Callable[[], None]) -> None:
    """A script's own checkpoint in the same directory: one line that says what is missing."""
    s = elastic.session(tmp_path)
    list(s.steps(iter([1]), save=lambda path: (path / "own.txt").touch() or None))
    process()
    with pytest.raises(ValueError, match="of step 1 has no place in the data"):
        make(checkpoint_dir=tmp_path).fit()


@pytest.mark.slow
def test_the_best_is_saved_off_the_cadence_and_survives_restarts(tmp_path: Path, process: Callable[[], None]) -> None:
    """Larger is better, by 0.1 at least: steps 2 and 5 are saved beside 4 and the last; the restart knows 5."""
    track = Tracked("score", "max", 0.1)
    scores = Scripted([0.1, 0.5, 0.55, 0.2, 0.7, 0.71])
    fitted = make(
        checkpoint_dir=tmp_path, max_steps=6, save_every=4, evaluator=scores, evaluate_every=1, track=track
    ).fit()
    assert saved_steps(tmp_path) == [1, 2, 4, 5, 6]
    assert fitted.best is not None
    assert fitted.best.value == 0.7
    process()
    scores = Scripted([0.75, 0.9])
    made = make(checkpoint_dir=tmp_path, max_steps=8, evaluator=scores, evaluate_every=1, track=track)
    assert made.fit().best == CheckpointStore(tmp_path).sealed()[-1].best
    assert saved_steps(tmp_path) == [1, 2, 4, 5, 6, 8]
    assert json.loads((tmp_path / "best.json").read_text())["value"] == 0.9


def test_what_is_tracked_must_be_measured() -> None:
    """A wrong name is said with the names that there are."""
    made = make(evaluator=Scripted([1.0]), track=Tracked("accuracy"))
    with pytest.raises(ValueError, match="no 'accuracy', only score"):
        made.fit()


def test_early_stopping_ends_the_run_once_and_for_all(tmp_path: Path, process: Callable[[], None]) -> None:
    """Two evaluations without progress: the run ends there, saved; a restart does not train on."""
    for evaluations in ([3.0, 2.0, 2.5, 2.2, 1.0], [9.0]):
        stopping = EarlyStopping("score", patience=2)
        made = make(checkpoint_dir=tmp_path, evaluator=Scripted(evaluations), evaluate_every=1, callbacks=[stopping])
        assert made.fit().step == 4
        process()
    assert saved_steps(tmp_path) == [4]
    assert (tmp_path / "FINISHED.json").exists()


def test_the_last_save_of_a_run_that_is_stopped_is_tried_again(
    tmp_path: Path, process: Callable[[], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    """As that of one that ends by its steps."""
    tries: list[int] = []
    real = BareSession.save

    def save(session: BareSession, *arguments: Any, **options: Any) -> Any:
        tries.append(session.step)
        return None if len(tries) < 3 else real(session, *arguments, **options)

    monkeypatch.setattr(BareSession, "save", save)
    monkeypatch.setattr(saves, "LAST_SAVE_PAUSE_SECONDS", 0.01)
    stopping = EarlyStopping("score", patience=1)
    options: dict[str, Any] = {"evaluator": Scripted([1.0, 2.0]), "evaluate_every": 1, "callbacks": [stopping]}
    assert make(checkpoint_dir=tmp_path, **options).fit().step == 2
    assert tries == [2, 2, 2]
    assert saved_steps(tmp_path) == [2]


class Streamed(IterableDataset[Tensor]):
    """Points of which nobody knows the number."""

    def __iter__(self) -> Iterator[Tensor]:
        return (Points()[index] for index in range(LENGTH))


def test_a_stream_whose_length_cannot_be_asked_for_has_none() -> None:
    """Torch's `ChainDataset` of streams has a `__len__`, which fails."""
    assert make(ChainDataset([Streamed()]), shuffle=False).fit().step == STEPS


@pytest.mark.parametrize("streamed", [False, True])
def test_a_run_that_is_stopped_compares_how_far_a_stream_was_read(
    streamed: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As one that ends by its steps does: nothing is saved here that would show it."""
    compared, real = list[dict[str, Any]](), BareSession.compare

    def compare(session: BareSession, alike: Any, **options: Any) -> None:
        compared.append(dict(alike))
        real(session, alike, **options)

    monkeypatch.setattr(BareSession, "compare", compare)
    stopping = EarlyStopping("score", patience=1)
    options: dict[str, Any] = {"evaluator": Scripted([1.0, 2.0]), "evaluate_every": 1, "callbacks": [stopping]}
    data = Streamed() if streamed else Points()
    assert make(data, shuffle=not streamed, **options).fit().step == 2
    place = {"data_epoch": 0, "samples": 2 * GLOBAL_BATCH}
    found = [one for told in compared for name, one in told.items() if "behind the last step" in name]
    assert found == [place] * streamed


def test_a_value_that_is_no_number_is_never_the_best(process: Callable[[], None]) -> None:
    """The first evaluation may overflow: what comes then is better, and does not end the run."""
    nan, inf = float("nan"), float("inf")
    stopping = EarlyStopping("score", patience=2, mode="max")
    scores = Scripted([nan, 1.0, inf, 2.0, nan, 3.0, 4.0])
    assert make(evaluator=scores, evaluate_every=1, callbacks=[stopping]).fit().step == STEPS
    stopping.load_state_dict({"best": nan, "worse": 0})
    assert stopping.state_dict() == {"best": None, "worse": 0}
    process()
    scores = Scripted([nan] * STEPS)
    assert make(evaluator=scores, evaluate_every=1, callbacks=[EarlyStopping("score", patience=2)]).fit().step == 2


def test_an_evaluation_that_a_leave_cuts_short_stays_one_that_it_can(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also once its save has failed: the leaver's notice is shorter than an evaluation may be."""
    told, left = [True, True, True], list[Any]()

    class Long(Scripted):
        def run(self, *arguments: Any, **options: Any) -> dict[str, float]:
            found = super().run(*arguments, **{**options, "interrupt": None})
            if options["interrupt"]():
                raise Interrupted
            return found

    monkeypatch.setattr(BareSession, "leaving", lambda _: bool(told) and told.pop())
    monkeypatch.setattr(Trainer, "_leave", lambda _, position: left.append(position))
    scores = Long([1.0] * 10)
    assert make(evaluator=scores, evaluate_every=3, max_steps=4).fit().step == 4
    assert (scores.runs, len(left)) == (5, 2)


def test_callbacks_keep_their_state(tmp_path: Path, process: Callable[[], None]) -> None:
    """Two of one class are told apart; the order of calls; the end is told however fit is left."""

    class Counting(Callback):
        def __init__(self) -> None:
            self.told: list[str] = []
            self.count = 0

        def on_fit_begin(self, trainer: Trainer) -> None:
            self.told.append(f"begin {trainer.step}")

        def on_step(self, trainer: Trainer, batch: Any) -> None:
            self.count += 1

        def on_fit_end(self, trainer: Trainer) -> None:
            self.told.append(f"end {trainer.step}")

        def state_dict(self) -> dict[str, Any]:
            return {"count": self.count}

        def load_state_dict(self, state: Mapping[str, Any]) -> None:
            self.count = state["count"]

    first, second = Counting(), Counting()
    second.count = 100
    make(checkpoint_dir=tmp_path, max_steps=3, callbacks=[first, second]).fit()
    process()
    first, second = Counting(), Counting()
    make(checkpoint_dir=tmp_path, max_steps=5, callbacks=[first, second]).fit()
    assert (first.count, second.count) == (5, 105)
    assert first.told == ["begin 3", "end 5"]


def test_state_that_could_not_be_loaded_is_refused_when_it_is_saved(tmp_path: Path) -> None:
    """An object in a callback's state: the first save says so, not the restart after a crash."""

    class Own(Callback):
        def state_dict(self) -> dict[str, Any]:
            return {"object": Points()}

    with pytest.raises(SaveError, match="plain values and tensors"):
        make(checkpoint_dir=tmp_path, save_every=1, callbacks=[Own()]).fit()


def test_loggers_are_told_numbers_with_their_step() -> None:
    """Every third step and the last one; evaluations under eval/; closed at the end."""
    told: list[tuple[int, dict[str, float]]] = []

    class Log:
        closed = False

        def __call__(self, step: int, values: Mapping[str, float]) -> None:
            told.append((step, dict(values)))

        def close(self) -> None:
            self.closed = True

    log = Log()
    make(loggers=[log], log_every=3, evaluator=Scripted([0.25]), max_grad_norm=1.0).fit()
    assert [step for step, _ in told] == [3, 6, 7, 7]
    assert set(told[0][1]) == {"loss", "lr", "grad_norm", "seconds_per_step"}
    assert told[-1][1] == {"eval/score": 0.25}
    assert log.closed


def test_losses_are_means_over_the_global_batch() -> None:
    """Also where micro-batches are of different sizes: the logged loss is that of all samples at once."""
    logged: list[float] = []
    make(max_steps=1, global_batch_size=5, loggers=[lambda step, values: logged.append(values["loss"])]).fit()
    ids = ElasticSampler(LENGTH, 5, seed=3).batch_at(ElasticSampler(LENGTH, 5, seed=3).position).sample_ids
    wanted = loss_of(make_model(), torch.stack([Points()[i] for i in ids]))
    assert logged == [pytest.approx(float(wanted.detach()), rel=1e-12)]
    assert len({piece.n for piece in BatchPlan(5, 1, 4).slices(0)}) == 2


@pytest.mark.parametrize("terminal", [False, True])
def test_the_console_has_a_bar_on_a_terminal_only(terminal: bool) -> None:
    """Elsewhere a line per log, without control characters."""
    stream = io.StringIO()
    stream.isatty = lambda: terminal  # type: ignore[method-assign]
    made = make(callbacks=[Console(stream)], log_every=3, evaluator=Scripted([0.5]))
    made.fit()
    text = stream.getvalue()
    if terminal:
        assert "7/7" in text
        assert "step 7: score 0.5" in text
    else:
        lines = text.splitlines()
        assert [line.split(":")[0] for line in lines] == ["step 3/7", "step 6/7", "step 7/7", "step 7/7"]
        assert lines[-1] == "step 7/7: score 0.5"
        assert "\x1b" not in text


def test_the_logger_for_tensorboard_forgets_what_a_crash_undid(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """It begins at its first step, and purges what was logged from there on."""
    calls: list[Any] = []

    class SummaryWriter:
        def __init__(self, directory: str, purge_step: int) -> None:
            calls.append((directory, purge_step))

        def add_scalar(self, name: str, value: float, step: int) -> None:
            calls.append((name, value, step))

        def close(self) -> None:
            calls.append("closed")

    module = types.ModuleType("torch.utils.tensorboard")
    module.SummaryWriter = SummaryWriter  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", module)
    logger = TensorBoard(tmp_path)
    logger(5, {"loss": 1.0})
    logger(6, {"loss": 0.5})
    logger.close()
    assert calls == [(str(tmp_path), 5), ("loss", 1.0, 5), ("loss", 0.5, 6), "closed"]


def test_the_logger_for_weights_and_biases_goes_on_in_its_run(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is begun at the first log, so on rank 0 only, and allows a resume."""
    calls: list[Any] = []

    class Run:
        def log(self, values: dict[str, float], step: int) -> None:
            calls.append((values, step))

        def finish(self) -> None:
            calls.append("finished")

    def init(**options: Any) -> Run:
        calls.append(options)
        return Run()

    module = types.ModuleType("wandb")
    module.init = init  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "wandb", module)
    logger = WeightsAndBiases(id="run")
    assert calls == []
    logger(5, {"loss": 1.0})
    logger.close()
    assert calls == [{"resume": "allow", "id": "run"}, ({"loss": 1.0}, 5), "finished"]


@pytest.mark.parametrize(("logger", "module"), [(lambda: TensorBoard("x"), "torch.utils.tensorboard"),
                                                (WeightsAndBiases, "wandb")])  # fmt: skip
def test_a_missing_logger_is_said_at_once(
    monkeypatch: pytest.MonkeyPatch, logger: Callable[[], Any], module: str
) -> None:
    """With what to install, when the script is started."""
    monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(ImportError, match=r"pip install 'dalsegno\[log\]'"):
        logger()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"max_steps": None}, "max_steps or data_epochs"),
        ({"evaluate_every": 3}, "need an evaluator"),
        ({"track": Tracked("loss")}, "need an evaluator"),
        ({"log_every": 0}, "log_every must be at least 1"),
        ({"save_every": -1}, "cannot be negative"),
        ({"strategy": "horovod"}, "strategy is 'ddp', 'fsdp', 'deepspeed' or a Strategy"),
        ({"strategy": DeepSpeed(), "grad_scaler": GradScaler("cpu")}, "deepspeed-zero-1 takes none"),
        ({"strategy": "fsdp", "stay": True}, "strategy fsdp builds fits one number of ranks"),
        ({"strategy": DeepSpeed(), "stay": True}, "strategy deepspeed-zero-1 builds fits one number of ranks"),
    ],
)
def test_options_that_cannot_go_together_are_refused(options: dict[str, Any], message: str) -> None:
    """When it is made, before anything is loaded."""
    with pytest.raises(ValueError, match=message):
        make(**options)


def test_early_stopping_and_strategies_check_their_options() -> None:
    """One line each."""
    with pytest.raises(ValueError, match="patience at least 1"):
        EarlyStopping("loss", patience=0)
    with pytest.raises(ValueError, match="leave out mesh"):
        FSDP(mesh=None)


def test_deepspeed_has_one_clipping() -> None:
    """Two values that disagree are refused before an engine is made."""
    strategy: Strategy = DeepSpeed({"gradient_clipping": 1.0, "zero_optimization": {"stage": 2}})
    assert strategy.name == "deepspeed-zero-2"
    from dalsegno.elastic.trainer.strategies import Setting

    setting = Setting(elastic.session(), torch.device("cpu"), BatchPlan(4, 1, 4), 0.5)
    with pytest.raises(ValueError, match=r"gradient_clipping is 1\.0 and max_grad_norm 0\.5"):
        strategy.setup(make_model(), make_optimizer, None, setting)


@pytest.mark.parametrize("tokens", [False, True])
def test_padded_rows_and_token_means_count_right(tokens: bool) -> None:
    """Rows beyond a micro-batch's own, or rows without a token, move neither the weights nor the logged loss."""

    def rows(model: Any, data: Tensor) -> Tensor:
        return (model(data[:, :3]) - data[:, 3:]).square().flatten(1).mean(1)

    def token_mean(model: Any, data: Tensor) -> Tensor:
        real = data[:, 0] > 0
        return (rows(model, data) * real).sum() / real.sum()

    logged: list[float] = []
    options: dict[str, Any] = {"pad": True, "loss": rows}
    if tokens:
        options = {"loss": token_mean, "count_tokens": lambda data: int((data[:, 0] > 0).sum())}
    made = make(
        max_steps=1,
        optimizer=lambda model: torch.optim.SGD(model.parameters(), lr=0.5),
        global_batch_size=5,
        max_micro_batch_size=2,
        scheduler=None,
        log_every=1,
        loggers=[lambda step, values: logged.append(values["loss"])],
        **options,
    )
    made.fit()
    sampler, model = ElasticSampler(LENGTH, 5, seed=3), make_model()
    data = torch.stack([Points()[i] for i in sampler.batch_at(sampler.position).sample_ids])
    wanted = token_mean(model, data) if tokens else rows(model, data).mean()
    wanted.backward()  # type: ignore[no-untyped-call]
    torch.optim.SGD(model.parameters(), lr=0.5).step()
    assert logged == [pytest.approx(float(wanted.detach()), rel=1e-12)]
    torch.testing.assert_close(
        weights(made), torch.cat([p.detach().flatten() for p in model.parameters()]), rtol=1e-12, atol=1e-12
    )


@pytest.mark.parametrize("fused", [False, True])
def test_a_step_whose_gradients_are_not_finite_is_left_out(fused: bool) -> None:
    """Its batch is consumed, it counts as a step; no weight moves, no moment, no rate; the scale is halved."""
    seen: list[tuple[Tensor, float]] = []
    logged: list[Mapping[str, float]] = []

    class Notes(Callback):
        def on_step(self, trainer: Trainer, batch: Any) -> None:
            seen.append((weights(trainer).clone(), trainer._strategy.optimizer.param_groups[0]["lr"]))

    def loss(model: Any, data: Tensor) -> Tensor:
        return loss_of(model, data) * (float("inf") if made.step + 1 in (3, 4) else 1.0)

    made = make(
        check_data=False,
        loss=loss,
        optimizer=lambda model: torch.optim.AdamW(model.parameters(), lr=0.1, fused=fused),
        grad_scaler=GradScaler("cpu", init_scale=16.0, growth_interval=2),
        callbacks=[Notes()],
        log_every=1,
        loggers=[lambda step, values: logged.append(values)],
    )
    assert made.fit().step == STEPS
    assert [values["loss_scale"] for values in logged] == [16, 32, 16, 8, 8, 16, 16]
    assert [values["skipped_steps"] for values in logged] == [0, 0, 1, 2, 2, 2, 2]
    assert [torch.equal(before, after) for (before, _), (after, _) in pairwise(seen)] == [
        *(False, True, True),
        *(False, False, False),
    ]
    assert [rate for _, rate in seen] == [pytest.approx(0.1 * 0.8**n) for n in (1, 2, 2, 2, 3, 4, 5)]
    assert len(made.dataset.asked) == sum([6, 6, 6, 2, 6, 6, 6])


def test_gradients_that_are_never_finite_end_the_run() -> None:
    """Halving the scale for ever would look like a training that goes on."""
    made = make(
        loss=lambda model, data: loss_of(model, data) * float("nan"),
        grad_scaler=GradScaler("cpu"),
        max_steps=100,
        log_every=100,
    )
    with pytest.raises(FloatingPointError, match=r"not finite at a loss scale of 6\.10352e-05 either"):
        made.fit()
    assert made.step == 30


def test_a_loss_scale_that_is_gone_or_new_is_refused(tmp_path: Path) -> None:
    """Also one that is switched off; and a checkpoint of before there was one loads."""
    (directory := tmp_path / "step-4.e2.1").mkdir()

    def load(scaler: GradScaler | None) -> dict[str, Any]:
        return load_trainer_state(point(directory), None, LossScale(scaler))

    def written(scaler: GradScaler | None) -> None:
        torch.save(trainer_state({"at": 1}, None, LossScale(scaler)), directory / TRAINER_FILE)

    on, off = GradScaler("cpu", init_scale=4.0), GradScaler("cpu", enabled=False)
    written(on)
    for scaler in (None, off):
        with pytest.raises(ValueError, match="the checkpoint has a loss scale, the Trainer none"):
            load(scaler)
    other = GradScaler("cpu")
    assert load(other) == {"at": 1}
    assert other.get_scale() == 4.0
    written(off)
    with pytest.raises(ValueError, match="the checkpoint has no loss scale, the Trainer one"):
        load(on)
    torch.save({"trainer": {"at": 2}, "scheduler": None}, directory / TRAINER_FILE)
    assert load(None) == {"at": 2}


def test_a_trainers_state_that_a_node_does_not_see_is_no_fault_of_the_checkpoint(tmp_path: Path) -> None:
    """The manifest lists it. Where it does not, the line names what does not save so."""
    (directory := tmp_path / "step-4.e2.1").mkdir()
    with pytest.raises(ValueError, match=r"step-4\.e2\.1 has no trainer\.pt: it was not saved by a Trainer with FSDP"):
        load_trainer_state(point(directory), None, LossScale(None))
    torch.save(trainer_state({"at": 1}, None, LossScale(None)), directory / TRAINER_FILE)
    resume = point(directory)
    (directory / TRAINER_FILE).unlink()
    with pytest.raises(OSError, match=r"trainer\.pt is not here, although the checkpoint's manifest lists it"):
        load_trainer_state(resume, None, LossScale(None))
