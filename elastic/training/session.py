"""A worker's part in an elastic run: who am I, where do I resume, when must I save and leave.

    s = session(checkpoint_dir="checkpoints")       # the directory is for runs without dlrover-run
    if s.resume is not None:
        load(s.resume.path)                         # what save(path) has written
    for batch in s.steps(batches, max_steps=1000, save=save, save_every=100):
        loss = train(batch)                         # one optimizer step
        s.report(loss)

``loop.steps`` is that loop. A loop without it calls the same methods: ``meet``, ``begin_step``, ``end_step``, ``save``.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn, TypeVar

from dalsegno.protos import worker_pb2

from ..checkpoint import Cut, LocalLock, Order, Position, Ref
from ..rank.clearing import Unstepped
from ..rank.collective import Collective, Pending
from ..rank.exchange import Boundary, Exchange, Flags
from ..rank.exits import Drained, Stays, is_decided
from ..rank.identity import Identity
from ..rank.link import Link
from ..rank.meetings import Meetings
from ..rank.notices import Notice
from ..rank.process_group import settle_device
from ..rank.reports import Reports
from ..rank.step_count import count_steps
from ..saving.apart import agree_to_go
from ..saving.background_save import Background
from ..saving.content import Content
from ..saving.declared import how_loaded, strategy_of
from ..saving.resuming import Damaged, ResumePoint
from ..saving.survivor import Survivor
from ..saving.tracking import Tracking
from .copies import Copies
from .examination import Examination, refuse_to_go_on
from .findings import loads_anywhere
from .measures import Measures
from .opening import refuse, restore_rng
from .saves import Saves
from .staying import way_out

if TYPE_CHECKING:
    from .left_loops import LeftLoop

log = logging.getLogger(__name__)

T = TypeVar("T")

# After a drain's save failed: seconds until the next try, and the most that they are doubled to.
DRAIN_PAUSE_SECONDS, MAX_DRAIN_PAUSE_SECONDS = 2.0, 60.0


class BareSession(Measures):
    """Made by ``session()``, once per process. Main thread only.

    Attributes:
        rank, world_size, local_rank: As torchrun has them.
        epoch: The membership's epoch; 0 outside ``dlrover-run``. (The data's own is ``position.data_epoch``.)
        run_dir: Where checkpoints are saved; None if they cannot be.
        resume: What to load before the first step; None: start from step 0.
        left_in_a_step: A loop was left during a step, which does not count.
        closed: `close` was called: this process may open another session.
        examination: What is known of this training, for people; ends with the first ``meet``.
        meetings: How all ranks end where one of them refuses.
        loop: The loop of `steps` that goes on, or was left last.
        copies: What all ranks have a copy of: compared before the first step, and right behind it.
        saves: What is saved where.
        survivor: What this rank saves by itself when it has lost its peers.
        tracking: The metric by which the best checkpoint is chosen.
        may_stay: Whether what this process has built outlives this world; for its loop, see ``staying``.
    """

    def __init__(
        self,
        identity: Identity,
        collective: Collective,
        *,
        link: Link | None,
        lock: LocalLock | None,
        resume: ResumePoint | None,
        keep: int,
        notice: Notice,
    ) -> None:
        self.rank, self.world_size, self.local_rank = identity.rank, identity.world_size, identity.local_rank
        self.epoch, self.run_dir, self.resume = 0 if identity.alone else identity.epoch, identity.run_dir, resume
        self._step = 0 if resume is None else resume.step
        self._identity, self._collective, self._link, self._lock = identity, collective, link, lock
        self.saves = Saves(identity, collective, link, resume, keep, lock)
        self._exchange = Exchange(collective, before=self.saves.verified)
        self.meetings = Meetings(collective, link, self._exchange.apart)
        self.tracking = Tracking(collective, self.saves.saver)
        begins = resume is None and (self.can_save or not self.alone)
        self.examination = Examination(self.rank, begins, self.world_size, self.max_world_size, self.can_save)
        self.copies = Copies(collective)
        self.unstepped = Unstepped()
        self._notice = notice
        self.left_in_a_step = self.closed = self._begun = False
        self.loop: LeftLoop | None = None
        self.may_stay: Callable[[], bool] = bool
        self.reports = Reports(link, count_steps(identity, self.step))
        self.survivor = Survivor(identity, link, None if resume is None else resume.ref, self.reports)
        self._drain_not_before, self._drain_pause = 0.0, DRAIN_PAUSE_SECONDS

    @property
    def step(self) -> int:
        """Optimizer steps done, including those before the resume point."""
        return self._step

    @step.setter
    def step(self, value: int) -> None:
        raise AttributeError(
            f"session.step counts the steps that were made, and cannot be set (to {value}): a run goes on where its "
            "checkpoint ends; dlrover-run --resume-step names an earlier one"
        )

    @property
    def should_drain(self) -> bool:
        """Whether this rank was told to save and stop. Act on ``Boundary.drain`` instead, which all ranks see alike."""
        return self._notice.given or (self._link is not None and self._link.drain)

    @property
    def alone(self) -> bool:
        """Whether this process is outside ``dlrover-run``."""
        return self._identity.alone

    @property
    def max_world_size(self) -> int:
        """Number of ranks in the largest world that this run may have, if each node has as many as this one."""
        return self.world_size if self.alone else self._identity.max_nodes * self._identity.local_world_size

    @property
    def can_save(self) -> bool:
        """There is a directory for checkpoints."""
        return self.saves.saver is not None

    @property
    def can_save_in_memory(self) -> bool:
        """All nodes keep memory checkpoints (``--memory-replicas``). Collective the first time."""
        return self.can_save and self.saves.has_memory()

    def sum(self, value: float) -> float:
        """The sum of ``value`` over all ranks, the same bits on every rank. Collective."""
        return self._collective.sum(value)

    def start_sum(self, *values: int) -> Pending:
        """Begins exact sums of whole numbers over all ranks; ``wait()`` returns them as a list. Collective."""
        return self._collective.start_sum(values)

    def gather(self, message: Any) -> list[Any]:
        """Every rank's ``message`` (plain JSON values), in rank order, on every rank. Collective."""
        return self._collective.gather(message)

    def report(self, loss: float) -> None:
        """Reports the loss of the present step, for people who watch the run."""
        self.reports.loss = float(loss)

    def busy(self) -> None:
        """Says that this rank is busy with something long between steps, such as an evaluation. Not collective.

        It is cheap. Call it as often as the work gets on, for instance with each batch: that tells it from a stall.
        """
        self.reports.busy(self.step)

    def leaving(self) -> bool:
        """Whether some rank was told to save and stop, and may try that now: the same on all ranks. Collective.

        For work between two steps that takes longer than a leaver has: cut it short, save with ``drain=True``, then
        call ``leave_drained``, or ``drain_failed`` if the save failed.
        """
        return self._collective.max([int(self._wants_drain)])[0] > 0

    def steps(self, data: Iterable[T], **options: Any) -> Iterator[T]:
        """The training loop: hands out one batch per optimizer step. See ``loop.steps`` for the options."""
        from .loop import steps

        return steps(self, data, **options)

    # What your own loop calls, in this order for every step.

    def compare(self, alike: Mapping[str, Any], *, problem: str = "", final: bool = True) -> None:
        """Checks that all ranks were given the same; otherwise none begins, or goes on. Collective.

        Args:
            alike: By name, what must be the same on every rank, as plain JSON values: seeds, sizes, cadences.
                (``Batches.alike`` has its own.) What only some ranks name is not compared.
            problem: A reason that this rank has found why none may go on; "": none.
            final: Another start would find it as well.

        Raises:
            Unlike: A ValueError, on all ranks: something differs. The message has the values and the ranks.
            Refusal: A ValueError, on all ranks: some rank has a problem. The message says which.
            Trouble: A RuntimeError, on all ranks: likewise, and another start may succeed.
            RuntimeError: Another rank has ended, or the session is over.
        """
        self.meetings.check_open(self.step)
        own: dict[str, Any] = {"step": self.step, "resume point": None if self.resume is None else self.resume.ref.name}
        if self.tracking.name is not None:
            own["tracked metric"] = self.tracking.name
        self.meetings.compare({**own, **alike}, problem, final=final)

    def meet(self, ahead: int, alike: Mapping[str, Any] | None = None) -> int:
        """Learns before the first step how many batches every rank has. Collective.

        Args:
            ahead: Batches that this rank has.
            alike: See ``compare``, which this calls.

        Raises:
            Unlike: See ``compare``; or the ranks have unlike copies of the model, or unlike hyperparameters.
            Examined: This is ``dalsegno doctor``. Exit code 0.
        """
        self.compare(alike or {})
        self.copies.before()
        self.examination.end(lambda: self.step)
        self.reports.begin()
        return self._exchange.meet(ahead)

    def begin_step(self, ahead: int = 1) -> None:
        """Begins an optimizer step.

        Args:
            ahead: Batches that this rank has after this step's. 1 (not known) makes the ranks agree in every step.

        Raises:
            RuntimeError: The previous step has not ended, or the session is over.
        """
        self.meetings.check_open(self.step)
        refuse_to_go_on()
        drain = self._wants_drain
        master_seen = self._link is not None and self._link.master_seen
        order = 0 if self._link is None else self._link.save_order
        flags = Flags(drain, *self.saves.tells(), master_seen, order)
        self._begun = True
        self._exchange.begin(self.step + 1, flags, ahead)

    def end_step(self, loss: float | None = None) -> Boundary:
        """Ends the step: it counts as done, and every rank gets the same answer.

        Args:
            loss: As with ``report``.

        Raises:
            Unlike: After the first step: nothing keeps the ranks' copies of the model alike. Raised on all ranks.
        """
        if loss is not None:
            self.report(loss)
        seconds = self.reports.lap()
        boundary = self._exchange.end(seconds)
        self._step = boundary.step
        self.reports.step(boundary, seconds)
        self.saves.hear(boundary)
        self.copies.behind(self.step)
        if boundary.save_failed or (boundary.exchanged and not boundary.saving):
            self._completed(self.saves.settle(over=not boundary.save_failed))
        return boundary

    def abandon_step(self, *, trained: bool = False) -> None:
        """Gives up a step in which the loop was left. It does not count; ``trained``: it was complete, and counts."""
        self._step += int(trained and self._exchange.under_way)
        self.left_in_a_step = not trained
        self._exchange.abandon()

    def count_left_step(self) -> None:
        """The step that was given up last was complete, as is known now: it counts."""
        self._step += int(self.left_in_a_step)
        self.left_in_a_step = False

    def save(
        self,
        write: Callable[[Path], None] | Background,
        *,
        wait: bool = True,
        position: Position | None = None,
        order: Order | None = None,
        cut: Cut | None = None,
        strategy: str = "ddp",
        any_world_size: bool | None = None,
        metric: float | None = None,
        create_directory: bool | None = None,
        keep: int | None = None,
        drain: bool = False,
        in_memory: bool = False,
        make_durable: bool = False,
    ) -> Ref | None:
        """Saves the present step on all ranks. Collective.

        Args:
            write: ``write(path)`` writes this rank's files below ``path``; or a state, see ``background``. If it has a
                true attribute ``reshards``, what it writes loads at any world size without a conversion; for
                ``by_place`` and ``reads`` see ``Shape``.
            wait: False: a state is written while the training goes on. The previous save is waited for first, so
                checkpoints are sealed in order of step.
            position: Where the data continue.
            order: The sampler's order; a run that resumes must agree with it.
            cut: The cut of ``Batches``; a run that resumes must agree with it.
            strategy: ``"ddp"``, ``"deepspeed-zero-<stage>"``, or a name of the script's own.
            any_world_size: The files load at any world size as they are; default: what is known of ``strategy``.
            metric: The run's tracked metric; rank 0's counts. Default: what ``improved`` was told of this step.
            create_directory: ``path`` exists when ``write`` is called; default: not for DeepSpeed, which makes it.
            keep: From this one on, how many of the run's checkpoints stay beside the best, 0: all; default: as many as
                the job's settings or the session's own ``keep`` say.
            drain: It is the save of a drain. It goes to memory where the agents say so.
            in_memory: To the nodes' memory (`can_save_in_memory`), where it lasts until there is a newer one.
            make_durable: With ``in_memory``: agents write it to the disk from there, or ranks while no master is heard.

        Returns:
            The sealed checkpoint; if this step is saved already, the one that it is saved as. None if the save failed:
            on all ranks, with the reason logged and nothing of it left. The run goes on. Without ``wait`` it is the
            name with an empty digest; if the save fails, every rank learns that at the same later step.

        Raises:
            RuntimeError: There is no directory to save to, or the step has not ended.
            SaveError: See ``Saver.save``.
        """
        self.meetings.check_open(self.step)
        refuse_to_go_on()
        self.saves.check(in_step=self._exchange.under_way and position is None, in_memory=in_memory and not drain)
        strategy = strategy_of(write, strategy)
        if drain:
            self.reports.draining(self.step)
        if keep is not None:
            self.saves.keep = keep
        try:
            self.settle()
            data = {"position": position or Position(), "order": order, "cut": cut}
            loads = how_loaded(write)
            options = {"keep": keep, "make_durable": make_durable and in_memory}
            content = self._content(strategy, any_world_size, metric, **loads, **options, **data)
            if create_directory is None:
                create_directory = not strategy.startswith("deepspeed")
            where = {"create_directory": create_directory, "wait": wait, "drain": drain, "in_memory": in_memory}
            return self._completed(self.saves.save(content, write, **where))
        finally:
            self.reports.lap()

    def settle(self) -> Ref | None:
        """Waits for a save in the background. Collective.

        Returns:
            The sealed checkpoint; None if there was none, or if it failed: see ``save``.
        """
        return self._completed(self.saves.settle())

    def _completed(self, saved: Ref | None) -> Ref | None:
        """After a save that ended without a leaver the ranks have nothing more to do together: they go."""
        if self.saves.apart:
            self.leave_drained()
        return saved

    def _content(self, strategy: str, any_world_size: bool | None, metric: float | None, **rest: Any) -> Content:
        anywhere = loads_anywhere(strategy) if any_world_size is None else any_world_size
        metric = self.tracking.metric_of(self.step) if metric is None else metric
        return Content(self.step, strategy=strategy, any_world_size=anywhere, metric=metric, **rest)

    def drain_failed(self) -> None:
        """Tells that the drain's save failed: train on. It is tried again after a pause if it is still wanted."""
        self._drain_not_before = time.monotonic() + self._drain_pause
        self._drain_pause = min(2 * self._drain_pause, MAX_DRAIN_PAUSE_SECONDS)

    def leave_drained(self, closing: Callable[[], None] = lambda: None, *, stays: Callable[[], bool] = bool) -> None:
        """Tells the agent that everything is saved, and ends this process with exit code 83. Collective.

        Returns only if the change was withdrawn: then train on. ``closing`` is called before the process ends.

        Raises:
            Drained: The process ends. The exit code is 83 whatever the script does with this exception.
            Stays: As ``stays`` wished: it may wait for a place in the next world.
        """
        saved, in_memory = self.saves.left_as(self.step)
        apart = self.saves.apart
        if not apart:
            going, apart = agree_to_go(self._collective, self.should_drain, saved=bool(saved.name))
            if not going:
                return
        closing()
        holds = way_out(self._link, saved, lambda: not apart and stays())
        drained = worker_pb2.Drained(name=saved.name, digest=saved.digest, step=self.step, in_memory=in_memory)
        self.reports.send(worker_pb2.ToAgent(drained=drained))
        self._part(apart)
        raise Drained if holds is None else Stays(holds)

    def finish(self) -> None:
        """Ends the training on all ranks, and tells the agent. Collective; repeating it does no harm.

        In the body of a loop of `steps` it ends the step, whose work is done, and the loop. There, and behind such a
        loop that was left, the last step is saved if it is not. A loop of one's own saves before.

        Raises:
            SaveError, Unlike: As at the end of `steps`.
            Refusal: Another rank trains on.
        """
        if self.meetings.over:
            return
        refuse_to_go_on()
        if self.loop is not None:
            self.loop.close_step()
        self._exchange.finish()
        if self.loop is not None:
            self.loop.finish()
            return
        self.settle()
        self.saves.say_unsaved(self.step)
        self.reports.send(worker_pb2.ToAgent(finished=worker_pb2.Finished(step=self.step)))
        if self.alone:
            self._notice.release()  # nothing is left to save: the script may be stopped like any program
        if self.alone and self.rank == 0:
            self.saves.note_the_end(self.step)
        self._part()

    def close(self) -> None:
        """Leaves the session's group and the agent's socket, for scripts that go on doing other things."""
        self.meetings.over = self.closed = True
        self.loop = None
        self._notice.release()
        self.saves.close()
        self._exchange.close()
        # Where this process has to end its own collective may be under way, and closing would wait for that.
        if not is_decided():
            self._collective.close()
        if self._link is not None:
            self._link.close()
        if self._lock is not None:
            self._lock.release()

    def restore_rng(self, seed: int | None = None) -> None:
        """Restores the random generators as the run left them; ``steps`` does it before its first step.

        Before this world's first step they continue bit-exactly from the resume point, if as many ranks have saved it.
        Else, and before each further loop, (seed, step, rank) seeds them. (Behind a loop that was left in a step that
        does not count, ``steps`` goes on where that stood.)

        Args:
            seed: None: at step 0, and before each further loop, the generators are left alone.
        """
        restore_rng(None if self._begun else self.resume, seed, self.step, self.rank, self.world_size)

    def bad_checkpoint(self, file: str, message: str) -> NoReturn:
        """Reports to the agent a resume point that cannot be loaded, and ends this process with exit code 84.

        Raises:
            BadResumePoint: Always.
        """
        if self.resume is None:
            raise RuntimeError("there is no resume point that could be bad")
        order = self._identity.resume
        bad = self.resume.ref if order is None else order.universal or self.resume.ref
        refuse(self._link, Damaged(bad, self.resume.form, file, message, True))

    # Internals.

    @property
    def _wants_drain(self) -> bool:
        return self.should_drain and time.monotonic() >= self._drain_not_before

    def _part(self, apart: bool = False) -> None:
        """The last meeting: no rank closes its connections or its card while another is still in a collective."""
        self.meetings.finished()
        if apart:
            return  # Nobody is in a collective with it any more, and closing would wait for a peer that stands still.
        try:
            settle_device()
            self._collective.barrier()
        except RuntimeError as error:
            # Everything is saved and said; a peer that died by now is the agent's business.
            log.warning("a rank was gone before the last barrier: %s", error)
        self._exchange.close()
        self._collective.close()
