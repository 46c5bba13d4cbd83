"""A training loop for people who have no framework: model, data, `Trainer(...).fit()`.

A thin layer over ``session().steps``, `ElasticSampler`, `BatchPlan`, `Batches` and `Accumulation`. The same script runs
with plain python, torchrun and dlrover-run, at any world size and through changes of it.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext, suppress
from dataclasses import KW_ONLY, dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.amp.grad_scaler import GradScaler

from ..checkpoint import Best, Position, Tracked
from ..data.batch import Batch
from ..data.counts import sum_over_ranks
from ..data.evaluator import Evaluator, Interrupted, to_device
from ..data.plan import BatchPlan
from ..rank.envelopes import Unlike
from ..rank.exits import Stays
from ..rank.way_in import TRAINS, way_in
from ..saving.background_save import background
from ..saving.replicas import unwrapped
from ..saving.resuming import check_strategy
from ..saving.unfit import Unfit
from ..script.session import Session, session
from ..training.accumulation import Accumulation
from ..training.bounds import check_data_epochs, check_steps, ends_behind
from ..training.draws import drawn_in
from ..training.entry import move
from ..training.saves import end_training
from ..training.staying import none_stays, until_lost
from .alike import alike_of
from .callbacks import Callback, Console, Logger, forgetful
from .hooks import Hooks
from .made import MadeByScript
from .moving import end_broken, end_drained
from .options import batches_of, check, plan_of, strategy_of
from .own_state import OwnState
from .strategies import MakeOptimizer, MakeScheduler, Setting, Strategy, StrategyWrite


@dataclass(frozen=True)
class Fitted:
    """The result of `Trainer.fit`.

    Attributes:
        step: Optimizer steps of the whole run.
        metrics: Metrics of the last evaluation; empty if there was none in this process.
        best: The best checkpoint by the tracked metric.
    """

    step: int
    metrics: Mapping[str, float]
    best: Best | None


@dataclass
class Trainer:
    """Trains ``model`` on ``dataset`` for a number of optimizer steps, whatever the world.

    Attributes:
        model: The plain model; the strategy wraps it.
        dataset: See `Batches`.
        optimizer: ``optimizer(model)`` makes it, once the model is where and as it will be trained.
        global_batch_size, max_micro_batch_size, fixed_micro_batch, pad: See `BatchPlan`.
        loss: ``loss(model, data)`` returns the mean over the samples (with ``count_tokens``: over the tokens) of one
            micro-batch, or with ``pad`` the loss of each row. Default: what the model gives for ``data``.
        max_steps: Steps of the whole run, including those before a resume.
        data_epochs: The run ends after so many passes over the data. Give this or ``max_steps``.
        scheduler: ``scheduler(optimizer)`` makes it; it steps after each optimizer step. One that takes a metric
            (``ReduceLROnPlateau``) steps with the tracked metric after each evaluation of ``evaluate_every``.
        other_schedule: Accept a schedule (``LambdaLR``) whose functions have changed since the checkpoint.
        strategy: ``"ddp"``, ``"fsdp"``, ``"deepspeed"``, or a `Strategy` with options.
        max_grad_norm: Clips the norm of the whole global batch's gradient.
        grad_scaler: For fp16: a ``torch.amp.GradScaler``, saved and loaded with the rest. If gradients are not finite,
            optimizer and scheduler do not step, on any rank; the step counts, and its batch is consumed. Not for
            DeepSpeed, which scales by itself.
        seed: The seed of the order of samples and of the random generators. (The model is made by the script.)
        shuffle, drop_last: See `ElasticSampler`.
        collate, count_tokens, loader_options: See `Batches`.
        check_data: See `Batches`; and `Evaluator`, where that was not told.
        checkpoint_dir, keep: For runs outside ``dlrover-run``, see `session`.
        save_every, memory_every: Steps between saves, and between those to the nodes' memory, see ``Session.steps``.
        save_in_background: The training waits only while the state is copied to host memory.
        stay: At a planned change of the world, and where it can behind a crash, this process stays, with all that it
            has built. The script then talks to other ranks in callbacks alone. DDP only. See `docs/trainer.md`.
        evaluator: Runs every ``evaluate_every`` steps (0: not in between), and after the last step. What it measures
            the ranks compare before the first one.
        track: The metric that makes a checkpoint the best one. A better step is saved, even between saves. (If a leave
            cut an evaluation short, the resumed run makes up for it, but that step is saved already.)
        callbacks: They are called on all ranks.
        loggers: Rank 0's; called with ``loss``, ``lr``, … and with ``eval/<metric>``.
        log_every: Steps between logs. Each log waits for the device once.
        progress: A progress bar on a terminal, or a line per log.
        device: Default: this rank's GPU if there is one.

    Raises:
        ValueError: Some options do not go together.
    """

    model: nn.Module
    dataset: Any
    _: KW_ONLY
    optimizer: MakeOptimizer
    global_batch_size: int
    max_micro_batch_size: int
    loss: Callable[[Any, Any], Tensor] | None = None
    max_steps: int | None = None
    data_epochs: int | None = None
    scheduler: MakeScheduler | None = None
    other_schedule: bool = False
    strategy: Strategy | str = "ddp"
    max_grad_norm: float | None = None
    grad_scaler: GradScaler | None = None
    seed: int = 0
    shuffle: bool = True
    drop_last: bool = False
    fixed_micro_batch: bool = False
    pad: bool = False
    collate: Callable[[list[Any]], Any] | None = None
    count_tokens: Callable[..., int] | None = None
    loader_options: dict[str, Any] | None = None
    check_data: bool = True
    checkpoint_dir: str | Path | None = None
    keep: int = 0
    save_every: int = 0
    memory_every: int | str = 0
    save_in_background: bool = False
    stay: bool = False
    evaluator: Evaluator | None = None
    evaluate_every: int = 0
    track: Tracked | None = None
    callbacks: Sequence[Callback] = ()
    loggers: Sequence[Logger] = ()
    log_every: int = 10
    progress: bool = True
    device: torch.device | str | None = None
    step: int = field(default=0, init=False)
    metrics: Mapping[str, float] = field(default_factory=dict, init=False)

    def __post_init__(self) -> None:
        self._strategy = strategy_of(self.strategy)
        check(self, self._strategy)
        self._hooks = Hooks([*self.callbacks, *([Console()] if self.progress else [])])
        self._session: Session | None = None
        self._state, self._ends = "new", (self.max_steps, self.data_epochs)
        self._stop_wanted = self._stopping = self._stays = False
        in_between = self.track if self.evaluate_every else None
        engine = self._strategy.scale == "deepspeed"
        self._made = MadeByScript(self.optimizer, self.scheduler, in_between, steps_itself=engine)
        self._own = OwnState(self._made, self._hooks, drop_last=self.drop_last, other_schedule=self.other_schedule)
        # Whether an evaluation of the present step is still to be made.
        self._owed = False

    @property
    def rank(self) -> int:
        """This rank's number; 0 before `fit`."""
        return 0 if self._session is None else self._session.rank

    @property
    def world_size(self) -> int:
        """Ranks of this world; 1 before `fit`."""
        return 1 if self._session is None else self._session.world_size

    def stop(self) -> None:
        """Ends the training on all ranks at the next log or evaluation; any rank may call it."""
        self._stop_wanted = True

    def fit(self) -> Fitted:
        """Trains to the end, from where the run stands. If that is the end already, it consumes nothing.

        Raises:
            ValueError: The resume point is of another model, optimizer, order of samples, or strategy.
            RuntimeError: An earlier call ended with an error, or the run is over and more steps are wanted.
            Drained: The world changes; everything is saved. Exit code 83.
        """
        if self._state == "failed":
            raise RuntimeError(
                f"fit() was left by an error after step {self.step}, in the middle of a step: start the script again, "
                "it goes on from the last checkpoint"
            )
        if self._state == "finished":
            if self._ends != (self.max_steps, self.data_epochs):
                raise RuntimeError(
                    f"this process has finished the run, with {self.step} steps: to go on from there, start the script "
                    "again"
                )
            return self._fitted()
        self._state = "failed"  # until proven otherwise
        with self._hooks.ending(self, self._close_loggers):
            self._session = session(self.checkpoint_dir, keep=self.keep)
            way_in.at(TRAINS)
            self._stays = self.stay and not none_stays("fit()")
            self._begin(stayed=False)
            self._run()
        self._state, self._ends = "finished", (self.max_steps, self.data_epochs)
        return self._fitted()

    # Opening.

    def _begin(self, *, stayed: bool) -> None:
        """Begins in the session's world, where all ranks do the same. Collective.

        Args:
            stayed: This process has trained in the world before, and holds what this one resumes from.
        """
        s = self._opened
        plan = plan_of(self, s.world_size)
        s.compare(alike_of(self, plan, self._strategy.name))
        check_steps(s, self.max_steps)
        with s.meetings.telling():
            self._load(s, plan, stayed=stayed)
        held = self._strategy
        if (one := self.evaluator) is not None:
            # Before the first step: at the first evaluation the steps before it would be for nothing.
            one.check(held.model, device=self._where, interruptible=True, busy=s.busy, check_data=self.check_data)
        if self._stays:
            s.may_stay, s.survivor.loop_stays = self._may_stay, True
        s.examination.learn_parts(held.model, held.optimizer)
        s.copies.know(held.model, held.optimizer, scheduler=held.scheduler, saved=True)
        s.examination.learn(stateless=forgetful(self.callbacks), twins=tuple(self._hooks.alike))
        s.examination.learn(loss_draws=drawn_in(self.loss))
        self._owed = self.step > 0 and self._due(self.step, last=False) and self._own.evaluated != self.step
        self._hooks.begin(self)
        self._agree_to_stop()

    def _load(self, s: Session, plan: BatchPlan, *, stayed: bool) -> None:
        check_strategy(s.resume, self._strategy.name)
        wanted = None if self.device is None else torch.device(self.device)
        self._where = self._strategy.start(s.world_size, s.local_rank, wanted)
        # Checked before anything large is loaded: another order of samples is refused here.
        if not stayed:
            self._batches = batches_of(self, s, plan, self._strategy.scale)
        else:
            self._batches.go_on(plan, s.rank, s.resume)
        check_data_epochs(s, self._batches)
        self._batches.check_samples(s, self.max_steps)
        setting = Setting(s, self._where, plan, self.max_grad_norm, self.grad_scaler)
        state = self._set_up(setting, stayed=stayed)
        own = [] if self._strategy.scale == "deepspeed" else [self._strategy.optimizer]
        self._accumulate = Accumulation(self._strategy.model, *own)
        self.step = s.step
        self._clock = (time.monotonic(), s.step)
        if self.track is not None:
            s.track(self.track.metric, mode=self.track.mode, min_delta=self.track.min_delta)
        if s.resume is not None:
            self._own.load(state, s)

    def _set_up(self, setting: Setting, *, stayed: bool) -> dict[str, Any]:
        resume, made = setting.session.resume, self._made
        if stayed:
            return self._strategy.enter(setting)
        try:
            model = unwrapped(self.model, compiled=True)
            return self._strategy.setup(model, made.optimizer, made.scheduler, setting)
        except Unfit as error:
            assert resume is not None
            raise ValueError(f"{resume.ref.name} does not fit this training ({made}): {error}") from error.__cause__

    # The loop.

    def _run(self) -> None:
        s = self._opened
        while True:
            try:
                self._train_until_lost()
                break
            except Stays as out:
                held, broken = out.holds, out.broken
            # Outside of the handler: nothing may hold what belongs to the old world.
            self._move(held, broken=broken)
        self.step = s.step
        if self._owed:  # a leave cut it short; now all is saved
            self._evaluate(interrupt=None)
            value = self._tracked()
            if value is not None:
                s.measured(value)

    def _may_stay(self) -> bool:
        self._accumulate.close()
        self._opened.copies.forget()
        self._opened.examination.forget()
        return self._strategy.leave()

    def _move(self, held: Mapping[str, str], *, broken: bool) -> None:
        """Leaves the old world, waits for a place, and begins in the next one."""
        survivor, first = self._opened.survivor, self.rank == 0
        survivor.anywhere = False
        if broken:
            end_broken(self, self._hooks, self._strategy, held, self._may_stay, survivor)
        else:
            end_drained(self, self._hooks, self._strategy)
        move(self._opened, held, self._strategy.unread(), broken=broken)
        way_in.again(TRAINS)
        if first and self.rank:
            self._close_loggers()  # They are the new rank 0's.
        self._begin(stayed=True)

    def _train_until_lost(self) -> None:
        """Trains in this world. Raises Stays if that changes, or has broken, and this process may wait for the next."""
        with until_lost(self._opened.meetings, self._opened.survivor) if self._stays else nullcontext():
            self._train_in_this_world()

    def _train_in_this_world(self) -> None:
        steps = self._opened.steps(
            self._batches,
            max_steps=self.max_steps,
            save=self._saving(),
            save_every=self.save_every,
            memory_every=self.memory_every,
            seed=self.seed,
            **self._save_options(),
        )
        for batch in steps:
            # The model stands at the boundary before this batch, which all ranks have passed without a drain.
            if self._owed:
                self._catch_up(batch.position)
            if self._stopping:
                steps.close()  # type: ignore[attr-defined]  # a generator: the step that it began does not count
                self._finish_early(batch.position)
                break
            self._train(batch)

    def _catch_up(self, position: Position) -> None:
        """Makes the evaluation that is owed."""
        s = self._opened
        try:
            while not self._evaluate(interrupt=s.leaving):
                # The ranks have agreed on it here; with this batch the model would move on. If the save fails, it is
                # tried again after a pause, as long as the leave is wanted.
                self._leave(position)
        except Unlike:
            if s.can_save:
                s.save(self._saving(), position=position, **self._save_options())
            raise
        self._compete_late(position)

    def _agree_to_stop(self) -> None:
        # What this process has agreed on in an earlier world the new ranks of this one do not know.
        self._stopping = sum_over_ranks([float(self._stop_wanted or self._stopping)], self._where)[0] > 0

    def _leave(self, position: Position) -> None:
        """Saves the boundary at which the model stands and ends the process; returns if the save failed."""
        s = self._opened
        if s.can_save and s.save(self._saving(), position=position, drain=True, **self._save_options()) is None:
            s.drain_failed()
            return
        s.leave_drained(stays=s.may_stay)

    def _finish_early(self, position: Position) -> None:
        s = self._opened

        def save() -> bool:
            return s.save(self._saving(), position=position, **self._save_options()) is not None

        end_training(s, save if s.can_save else None, self._batches.order, lambda: position)

    def _train(self, batch: Batch[Any]) -> None:
        strategy, loss_of, survivor = self._strategy, self.loss or _own_loss, self._opened.survivor
        total = torch.zeros((), dtype=torch.float64, device=self._where)
        survivor.anywhere = self._stays
        for micro in self._accumulate(batch):
            loss = loss_of(strategy.model, to_device(micro.data, self._where))
            strategy.backward(micro.scale(loss))
            weight = micro.n if micro.tokens is None else micro.tokens
            if weight:  # a filler's loss may be NaN
                mean = micro.mean(loss.detach()) if loss.dim() else loss.detach()
                total += mean.to(torch.float64) * weight
        survivor.anywhere = False
        norm = strategy.step()
        self.step = batch.step
        last = ends_behind(self._opened, self._batches, batch.step, self.max_steps)
        if batch.step % self.log_every == 0 or last:
            self._log(batch, total, norm)
        self._hooks.each(lambda hook: hook.on_step(self, batch))
        strategy.clear()
        evaluated = False
        if self._due(batch.step, last=last):
            # What the ranks learn only here (a stream has no length) ends the run where this step can be saved.
            with suppress(Unlike):
                evaluated = self._evaluate(interrupt=self._opened.leaving)
        if evaluated:
            value = self._tracked()
            if value is not None:
                self._opened.improved(value)  # it is saved at the step's end, if it is the best

    def _log(self, batch: Batch[Any], total: Tensor, norm: Tensor | float | None) -> None:
        summed, stops = sum_over_ranks([total, float(self._stop_wanted)], self._where)
        self._stopping = self._stopping or stops > 0
        mean = summed / ((batch.tokens if self.count_tokens else batch.n) or 1)
        self._opened.report(mean)
        now, (began, step) = time.monotonic(), self._clock
        self._clock = now, self.step
        values = {"loss": mean, "lr": float(self._strategy.optimizer.param_groups[0]["lr"])}
        if norm is not None:
            values["grad_norm"] = float(norm)
        if self.grad_scaler is not None:
            values.update(self._scale())
        values["seconds_per_step"] = (now - began) / max(1, self.step - step)
        self._send(values)
        self._hooks.each(lambda hook: hook.on_log(self, values))

    def _scale(self) -> dict[str, float]:
        held = self._strategy.loss_scale
        if held is None or held.value is None:
            return {}
        return {"loss_scale": held.value, "skipped_steps": float(held.skipped)}

    # Evaluation.

    def _due(self, step: int, *, last: bool) -> bool:
        return self.evaluator is not None and (last or bool(self.evaluate_every and step % self.evaluate_every == 0))

    def _evaluate(self, interrupt: Callable[[], bool] | None) -> bool:
        """Evaluates the present step. If a leave cuts it short, it is owed, also by the run that resumes here."""
        assert self.evaluator is not None
        self._owed = True
        try:
            with self._strategy.evaluated() as model:
                metrics = self.evaluator.run(model, device=self._where, interrupt=interrupt, busy=self._opened.busy)
        except Interrupted:
            return False
        self._owed, self._own.evaluated, self.metrics = False, self.step, metrics
        self._send({f"eval/{name}": value for name, value in metrics.items()})
        value = self._tracked()
        # Not after a last step off the cadence, because a run that is made longer has no evaluation there.
        if self._made.by_metric is not None and value is not None and self._due(self.step, last=False):
            self._made.by_metric.step(value)
        self._hooks.each(lambda hook: hook.on_evaluation(self, metrics))
        self._agree_to_stop()
        return True

    def _tracked(self) -> float | None:
        """The last evaluation's value of the tracked metric."""
        if self.track is None or not self.metrics:
            return None
        if self.track.metric not in self.metrics:
            had = ", ".join(sorted(self.metrics))
            raise ValueError(f"track: the evaluation has no {self.track.metric!r}, only {had}")
        return self.metrics[self.track.metric]

    def _compete_late(self, position: Position) -> None:
        """After an evaluation that a leave had cut short: its step may still be the best one. Collective."""
        s, value = self._opened, self._tracked()
        if value is not None and s.measured(value) and s.can_save:
            # Does nothing if the step is saved already.
            s.save(self._saving(), position=position, metric=value, **self._save_options())

    # Saving.

    def _save_options(self) -> dict[str, Any]:
        return {
            "order": self._batches.order,
            "cut": self._batches.cut,
            "strategy": self._strategy.name,
            "any_world_size": self._strategy.any_world_size,
        }

    def _saving(self) -> Any:
        """What the session saves with."""
        write = StrategyWrite(self._strategy, self._own.state_dict, self.rank)
        return background(write) if self.save_in_background else write

    # Helpers.

    def _close_loggers(self) -> None:
        for logger in self.loggers:
            getattr(logger, "close", lambda: None)()

    @property
    def _opened(self) -> Session:
        assert self._session is not None
        return self._session

    def _send(self, values: Mapping[str, float]) -> None:
        if self.rank == 0 and values:
            for logger in self.loggers:
                logger(self.step, values)

    def _fitted(self) -> Fitted:
        return Fitted(self.step, self.metrics, self._opened.best)


def _own_loss(model: Any, data: Any) -> Tensor:
    loss: Tensor = model(data)
    return loss
