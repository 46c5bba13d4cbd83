"""One elastic training by a Trainer: its session, its data, and what happens at the boundaries of its steps."""

from __future__ import annotations

import atexit
import math
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from dalsegno.elastic import Batch, BatchPlan, MicroBatch, Session
from dalsegno.elastic.checkpoint import Reads, Ref
from dalsegno.elastic.rank.exchange import Boundary
from dalsegno.elastic.rank.remarks import remarked_after
from dalsegno.elastic.saving.background_save import Background
from dalsegno.elastic.saving.resuming import check_strategy
from dalsegno.elastic.training.findings import OURS, loads_anywhere
from dalsegno.elastic.training.memory import MemorySaves
from dalsegno.elastic.training.saves import save_at_last

from . import checkpoints, data, refusals
from .arguments import alike
from .checkpoints import Arriving, TrainerWrite, Unfinished
from .evaluating import Alive
from .forgetting import forgetful
from .held import TrainersState
from .known_writers import nobody_looks, writes_as_known
from .options import Options, global_batch_size
from .survivors import Survivors

STOPS, SAVES = "whether a callback ends the training (should_training_stop)", "whether one saves it (should_save)"
"""By these names ranks compare that: who does so alone does not come to the others' save, or waits there for them."""
# After so long a save that some ranks alone make says so, seconds.
LATE_SECONDS = 30.0
# Seconds between two questions of an evaluation whether some rank is to leave, and the most batches between them.
_ASK_SECONDS, _ASK_BATCHES = 0.2, 64


class Leaving(BaseException):
    """Some rank is to leave during an evaluation: all ranks leave it at the same batch.

    It is no failure, which somebody's ``evaluate`` may go on after.
    """


class ElasticRun:
    """What an elastic Trainer knows beyond its own state.

    Args:
        trainer: It is constructed and not trained yet.
        session: This process's session.
        options: What the user asked for.

    Raises:
        ValueError: The resume point does not fit.

    Attributes:
        plan: Which rank computes what in this world.
        alive: Its signs of life between steps.
        batch: The step that is being computed, with its ``sample_ids``.
        micro: The micro-batch that is being computed.
        unfinished: What the resume point left unfinished, until it is done.
        draining: All ranks save at this boundary and stop.
        epoch_ended: The Trainer is reporting the end of a data epoch.
        writing: The save under way.
        finished: The training has come to its end.
        by_samples: The loss of a slice is a mean over its samples.
        in_memory: The save under way goes to memory, between the Trainer's own, and nobody is told of it.
        any_optimizer: DeepSpeed's config admits any optimizer, even one that is not known to fit ZeRO.
        evaluates_late: The resume point's step is evaluated only now, and what it was saved as does not tell of it.
        stopped: When the resume point was saved, it was already decided that the training stops there.
        hyperparameters: What each checkpoint says of the Trainer's arguments, see `arguments.hyperparameters`.
    """

    def __init__(self, trainer: Any, session: Session, options: Options) -> None:
        args = trainer.args
        # Before any collective. Rank 0's global batch size counts for all, see below.
        session.compare(alike(trainer, options, strategy_of(trainer), begins=session.resume is None))
        size = global_batch_size(options, args.per_device_train_batch_size, args.gradient_accumulation_steps, session)
        # Rank 0's, because nodes may have different numbers of ranks, and so different ideas of the largest world.
        size = round(session.sum(size if session.rank == 0 else 0))
        self.session = session
        session.saves.by_script = False
        self.alive = Alive(session.busy)
        self.plan = BatchPlan(
            size, session.world_size, args.per_device_train_batch_size, fixed_micro_batch=options.fixed_micro_batch
        )
        self.strategy = strategy_of(trainer)
        self._how_loaded = partial(_how_loaded, trainer)
        check_strategy(session.resume, self.strategy)
        self.by_samples = options.mean_over_samples
        self.loader = data.make(trainer, self.plan, session, by_samples=self.by_samples)
        if self.loader.endless:
            _refuse_epochs(args)
        self.output_dir = Path(args.output_dir)
        self.batch: Batch[Any] | None = None
        self.micro: MicroBatch[Any] | None = None
        self._weighs = False
        self._micros: Iterator[MicroBatch[Any]] = iter(())
        self.unfinished: Unfinished | None = None
        self.draining = self.epoch_ended = self.finished = self.stopped = self.any_optimizer = False
        self.evaluates_late = False
        self.writing: TrainerWrite | None = None
        self.hyperparameters: dict[str, Any] = {}
        self.in_memory = self._failed = False
        self._arriving = Arriving(self._link, session)
        self._to_memory: Callable[[], None] = lambda: None
        self._memory = MemorySaves(session, options.memory_every, self._save_in_memory)
        self._memory_ref: Ref | None = None
        # The last step that was saved to memory for the disk; such a save is under way; none is to be begun.
        self._asked_for, self._to_disk, self._without_memory = -1, False, False
        self._survivors: Survivors | None = None
        # What a log says of the last step, by name; tensors are asked for their values when they are needed.
        self.of_step: dict[str, Any] = {}
        self._may_leave, self._ask_every, self._asked, self._asked_at = False, 1, 0, 0.0
        # The Trainer deletes nothing: this setting prunes the run's own checkpoints instead.
        limit, args.save_total_limit = args.save_total_limit, None
        self.keep = None if limit is None else max(0, limit)
        if args.metric_for_best_model is not None:
            session.track(args.metric_for_best_model, mode="max" if args.greater_is_better else "min")
        self._linked: Callable[[int], None] = trainer.linked
        if session.resume is not None and session.saves.of(session.resume.step) is None:
            self._arriving.add(session.step, session.resume.ref.name, self._linked)

    # Where the run stands.

    @property
    def resume_directory(self) -> str | None:
        """The ``checkpoint-<n>`` to resume from."""
        resume = self.session.resume
        return None if resume is None else str(checkpoints.trainers(resume.path, resume.step))

    @property
    def place(self) -> tuple[int, int]:
        """The number of complete data epochs, and of micro-batches in the present one."""
        position = self.loader.position
        steps = -(-position.samples // self.plan.global_batch_size)
        return position.data_epoch, steps * self.plan.accumulation

    def learn(self, trainer: Any, model: Any, optimizer: Any) -> None:
        """Collects what people should know of this training before its first step."""
        examination = self.session.examination
        examination.learn_parts(model, optimizer)
        examination.learn(
            strategy=self.strategy,
            saves=True,
            save_every=0 if trainer.args.save_strategy == "no" else 1,
            any_world_size=loads_anywhere(self.strategy),
            reshards=self._how_loaded()["reshards"],
            data=OURS,
            fixed_micro_batch=self.plan.fixed_micro_batch,
            seeded=self.loader.cut.seed is not None,
            stateless=forgetful(trainer),
            keeping="state() of ExportableState",
        )

    def watch(self, trainer: Any) -> None:
        """Has the ranks that are left after a crash save the last boundary, where that is possible. Collective."""
        if self._memory.on and self.strategy == "ddp" and self.session.world_size > 1:
            state = TrainersState(trainer)
            if all(self.session.gather(state.can_be_watched and writes_as_known(trainer))):
                self._survivors = Survivors(trainer, state, self.session, self.loader)

    # A step.

    def take(self, batch: Batch[Any]) -> None:
        """Makes ``batch`` the next step."""
        self.batch, self._micros = batch, batch.micro_batches

    def next_micro(self) -> MicroBatch[Any]:
        """The micro-batch to compute now. With fixed micro-batches the random generators are set for it."""
        self.micro = next(self._micros)
        return self.micro

    def computed(self) -> None:
        """Notes that the micro-batch was computed, with its backward pass.

        Raises:
            ValueError: In the first step nobody asked for the weight of any loss.
        """
        if self.micro is not None and self.micro.is_last:
            for _ in self._micros:
                raise RuntimeError("a step has more micro-batches than its last one")
            if not self._weighs:
                # Later ones may leave a batch out: who weighs at all has shown it by then.
                refusals.refuse_unweighed(self.micro)
                self._weighs = True
        self.micro = None

    def stepping(self) -> None:
        """The optimizer steps next. Collective."""
        self.session.survivor.anywhere = False
        if self._survivors is not None:
            self._survivors.stepping()

    def stepped(self) -> Boundary:
        """The step is over. Collective."""
        boundary = self.session.end_step()
        if self._survivors is not None:
            self._survivors.stepped()
        if not (boundary.end or boundary.drain) and self._memory.owes():
            # In place of what the agents were to bring to the disk when the master fell silent.
            return replace(boundary, save=True)
        return boundary

    def mark(self, trainer: Any, *, evaluation: bool = False, save: bool = False) -> None:
        """If the world breaks from here on, the next one begins here, and does what is due: these, and what follows."""
        if self._survivors is not None:
            due = Unfinished(evaluation=evaluation, tell_of_save=save, untold=save)
            self._survivors.mark(self._told(due, trainer))

    def look(self) -> None:
        """Behind a boundary at which the training goes on. Collective."""
        if self._survivors is not None:
            self._survivors.look()

    # Saving.

    def _told(self, due: Unfinished, trainer: Any) -> Unfinished:
        """All that a checkpoint of this boundary says is left to do, but for the loss."""
        # A training that stops has its last data epoch's end at once.
        ends = self.loader.epoch_is_over or trainer.control.should_training_stop
        epoch_end = ends and not self.epoch_ended
        may_end = due.evaluation and not self.epoch_ended and not epoch_end
        of_step = {name: float(value) for name, value in self.of_step.items()} if epoch_end or may_end else {}
        more = {"callbacks": trainer.remembered(), "counts": trainer.counts(), "hyperparameters": self.hyperparameters}
        logged = trainer._globalstep_last_logged
        return replace(due, epoch_end=epoch_end, may_end=may_end, of_step=of_step, logged=logged, **more)

    @property
    def is_on_disk(self) -> bool:
        """The present step is, as the run goes on from it or has saved it."""
        return self.session.saves.of(self.session.step) is not None

    @property
    def save_failed(self) -> bool:
        """Whether the newest of the Trainer's saves has."""
        return self._failed

    def save(self, trainer: Any, save: Callable[[], None]) -> None:
        """Has the Trainer save the present step as one checkpoint of the run, unless it is saved. Collective."""
        if self.in_memory or self.draining or not self._bring(trainer, save):
            self._save(trainer, save)

    def _save(self, trainer: Any, save: Callable[[], None]) -> None:
        state, step = trainer.state, trainer.state.global_step
        best = state.best_model_checkpoint
        # A save that is not a drain's is told of as soon as it is made, so never in what it saves.
        due = self.unfinished or Unfinished(tell_of_save=not self.in_memory or self._to_disk)
        # Between the Trainer's own saves nobody waits for one, where on all ranks its files are written as we know it.
        behind = self.in_memory and not self.draining
        said = [float(trainer._tr_loss), behind and writes_as_known(trainer)]
        with nullcontext() if self.in_memory or self.draining else self._waited_for(step):
            told = self.session.gather(said)
        behind = all(known for _, known in told)
        loss = math.fsum(loss for loss, _ in told) / self.session.world_size
        unfinished = replace(self._told(due, trainer), loss=loss)
        self.writing = write = TrainerWrite(save, unfinished, self.session.rank, **self._how_loaded())
        if self._survivors is not None and behind:
            write.copied = partial(self._survivors.saved, step)
        try:
            ref = self.session.save(
                Background(write.copies, write, copies=True) if behind else write,
                wait=not behind,
                position=self.loader.position,
                order=self.loader.order,
                cut=self.loader.cut,
                strategy=self.strategy,
                metric=state.best_metric if state.best_global_step == step else None,
                keep=self.keep,
                create_directory=True,
                drain=self.draining,
                in_memory=self.in_memory,
                make_durable=self._to_disk,
            )
            written = write.called
        finally:
            self.writing = None
        if self._survivors is not None and behind:
            self._survivors.compares = True
        if self.in_memory:
            self._memory_ref, state.best_model_checkpoint = ref, best
            return
        self._failed = ref is None
        if ref is None or self.session.saves.of(step) is None:  # in memory there is nothing for people
            state.best_model_checkpoint = best
            return
        assert self.session.run_dir is not None
        checkpoint = self.session.run_dir / ref.name
        if state.best_global_step == step:
            state.best_model_checkpoint = str(checkpoints.trainers(checkpoint, step))
        self._link(checkpoint, step, again=written)

    def _bring(self, trainer: Any, save: Callable[[], None]) -> bool:
        """Has the Trainer save to memory, and the agents bring that to the disk. Collective.

        Returns:
            Whether they do. They do not bring what somebody may look for at once, or wait for.
        """
        state = trainer.state
        ends = trainer.control.should_training_stop or state.global_step >= state.max_steps
        if self._without_memory or not self._memory.leads_to_disk:
            return False
        with self._waited_for(state.global_step):
            self.session.compare({STOPS: trainer.control.should_training_stop, SAVES: True})
        if ends or state.best_global_step == state.global_step:
            return False
        if not all(self.session.gather(writes_as_known(trainer) and nobody_looks(trainer))):
            return False
        self._to_memory, self._asked_for = lambda: self._save(trainer, save), state.global_step
        if self._memory.at(state.global_step, saved=False, to_disk=True):
            return False
        self._failed = False
        if self._memory_ref is not None:
            self._arriving.add(state.global_step, self._memory_ref.name, trainer.linked)
        return True

    @contextmanager
    def _waited_for(self, step: int) -> Iterator[None]:
        """Inside, ranks meet for a save: where others do not come, a line says what may be the cause."""
        line = (
            f"rank {self.session.rank} has waited {LATE_SECONDS:g} s for the others to save step {step}: a callback "
            "may still be at work there, or have set should_save here alone, which it has to do on all ranks"
        )
        with remarked_after(LATE_SECONDS, line) if self.session.world_size > 1 else nullcontext():
            yield

    def remember(self, step: int, save: Callable[[], None], *, saved: bool, stops: bool) -> None:
        """Has ``save`` save the present step to memory, where that is due and it is not ``saved``. Collective.

        Args:
            stops: A callback ends the training behind it.

        Raises:
            Unlike: On some ranks only, or these alone save the step. On all ranks.
        """
        self._arriving.look()
        if self._asked_for == step:
            return
        if self._memory.acts(step):
            self.session.compare({STOPS: stops, SAVES: False})
        self._to_memory = save
        if self._memory.at(step, saved=saved):
            # There was no room for what was to come to the disk from there: this step comes there instead.
            self.save_to_disk(save)

    def save_to_disk(self, save: Callable[[], object]) -> None:
        """Has ``save`` save the present step, and wait until it is on the disk. Collective."""
        self._without_memory = True
        try:
            save()
        finally:
            self._without_memory = False

    def _save_in_memory(self, to_disk: bool) -> Ref | None:
        self.in_memory, self._to_disk, self._memory_ref = True, to_disk, None
        try:
            self._to_memory()
        finally:
            self.in_memory = self._to_disk = False
        return self._memory_ref

    def _link(self, checkpoint: Path, step: int, *, again: bool = False) -> None:
        place = checkpoints.trainers(self.output_dir, step)
        if self.session.rank == 0 and (again or not checkpoints.is_linked(place)):
            checkpoints.link(self.output_dir, checkpoint, step)

    def link_earlier(self) -> None:
        """Links what worlds before have saved: the process may have died before it did, or before that was there."""
        run_dir, resume = self.session.run_dir, self.session.resume
        if self.session.rank or run_dir is None or resume is None:
            return
        for checkpoint, step in checkpoints.unlinked(self.output_dir, run_dir, resume.manifest):
            self._link(checkpoint, step)
            if step == checkpoints.newest_linked(self.output_dir, run_dir):
                self._linked(step)

    # Between two steps.

    @contextmanager
    def interruptible(self) -> Iterator[None]:
        """Inside, an evaluation ends with `Leaving` when some rank is to leave."""
        self._may_leave, self._ask_every, self._asked, self._asked_at = True, 1, 0, time.monotonic()
        try:
            yield
        finally:
            self._may_leave = False

    def predicted(self) -> None:
        """Called after each batch of an evaluation, on all ranks alike. Collective from time to time.

        Raises:
            Leaving: See `interruptible`.
        """
        self.alive.sign()
        self._asked += 1
        if not self._may_leave or self._asked < self._ask_every:
            return
        now = time.monotonic()
        soon, self._asked, self._asked_at = now - self._asked_at < _ASK_SECONDS, 0, now
        if self.session.leaving():
            raise Leaving
        if self.session.sum(float(soon)) == self.session.world_size:
            self._ask_every = min(2 * self._ask_every, _ASK_BATCHES)
        else:
            self._ask_every = max(1, self._ask_every // 2)

    def leave(self) -> None:
        """Called after the drain's save: ends this process, or lets the run go on if the save failed on all ranks."""
        self.draining = False
        failed, self._failed = self._failed, False
        if failed:
            self.session.drain_failed()
        else:
            self.session.leave_drained(self.loader.close, stays=self.session.may_stay)

    def let_go(self) -> None:
        """The world is over, and this process stays: drops what belongs to that, and ends what fetches data."""
        self.loader.close()
        self._to_memory = lambda: None

    def save_at_last(self, save: Callable[[], None], *, saves: bool) -> None:
        """Saves the last step if the newest save has failed; or the run has resumed there, and it is in memory alone.

        Args:
            saves: The Trainer saves at its end.

        Raises:
            SaveError: It failed again and again.
        """

        def try_again() -> bool:
            save()
            return not self._failed

        resume = self.session.resume
        ended_before = resume is not None and resume.step == self.session.step
        if self._failed or (saves and ended_before and not self.is_on_disk):
            save_at_last(self.session, try_again)
        elif saves and ended_before and self.evaluates_late:
            self._save_anew(save)

    def _save_anew(self, save: Callable[[], None]) -> None:
        """Saves the last step once more, with what was due there. What the run has resumed from stays if that fails."""
        saver, step = self.session.saves.saver, self.session.step
        before = None if saver is None else saver.saved.forget(step)
        if saver is not None and before is not None:
            save()
            if self._failed:
                saver.saved.note(step, before, in_memory=False)
                self._failed = False

    def finish(self) -> None:
        """Called when the Trainer has come to its end; tells the session."""
        self.loader.close()
        self.session.finish()
        self._arriving.look_at_last()
        self.finished = True
        if self.session.rank == 0:
            with suppress(OSError):
                checkpoints.tidy(self.output_dir)
            atexit.register(checkpoints.tidy_at_last, self.output_dir, self.keep)


def _refuse_epochs(args: Any) -> None:
    """Refuses options for the end of a data epoch if the data have no end that anybody sees."""
    for name in ("save_strategy", "eval_strategy", "logging_strategy"):
        if getattr(args, name) == "epoch":
            raise ValueError(f"{name}=epoch with a data set without a length, which has no epochs: set it to steps")
    if getattr(args, "max_epochs", None) is not None:
        raise ValueError("max_epochs with a data set without a length, which has no epochs: set max_steps alone")


def strategy_of(trainer: Any) -> str:
    """The name that checkpoints give to how it is trained."""
    if not trainer.is_deepspeed_enabled:
        return "ddp"
    return f"deepspeed-zero-{int(trainer.accelerator.state.deepspeed_plugin.zero_stage)}"


def _how_loaded(trainer: Any) -> dict[str, Any]:
    """How ranks load what it saves, see ``Session.save``."""
    if not trainer.is_deepspeed_enabled:
        return {"reshards": False, "by_place": True, "reads": Reads()}
    from dalsegno.elastic.deepspeed.checks import can_reshard, loads_by_place, what_ranks_read

    engine = trainer.model_wrapped
    return {"reshards": can_reshard(engine), "by_place": loads_by_place(engine), "reads": what_ranks_read(engine)}
