"""The elastic agent: torch's LocalElasticAgent with another loop.

Torch's agent polls its workers and its rendezvous. This one sleeps until something happens (a directive, an exit, a
message, a signal, a deadline), passes it to `decisions.handle`, and carries out the actions. Processes, log files,
error files and the health check stay torch's.
"""

from __future__ import annotations

import logging
import os
import signal
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from torch.distributed.elastic.agent.server.api import RunResult, Worker, WorkerGroup, WorkerSpec, WorkerState
from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent
from torch.distributed.elastic.multiprocessing import LogsSpecs
from torch.distributed.elastic.utils.api import macros

from dalsegno.protos import control_pb2, worker_pb2
from dalsegno.protos.contract import Variable
from dalsegno.protos.shortage import why_not_started
from dalsegno.protos.trace import mark

from ..decisions import events as ev
from ..decisions import handling
from ..decisions.told import told
from ..dlrover.beside import DlroverSupport
from ..own_modules import first_path
from ..processes.lifeline import Lifeline
from ..processes.signals import SignalWatch
from ..script import FLAG, Script, modules_of, reads, refuses_flag
from ..standby.nursery_start import StartedNursery
from ..standby.standby_pool import StandbyPool
from ..standby.worker_main import Assignment
from ..storage.adoption import Origin
from ..storage.save_dir import Adoption
from ..workers.advice import advice, tells_of_a_peer
from ..workers.hub import HubKnowledge
from ..workers.torch_versions import set_local_rank
from ..workers.watchdogs import TorchWatchdogs
from ..workers.worker_env import WorldPlace, place_of, prefixes, worker_environment
from ..workers.worker_link import WorkerLink, to_worker
from ..workers.workers import WorkersContext
from ..workers.working_directory import WorkingDirectory, WorkingDirectoryGoneError
from .ahead import assignments_ahead
from .config import AgentConfig
from .effects import Effects
from .mailbox import Mailbox
from .own_events import Exited, Placed
from .slow import said_while_slow
from .stopping import Stopping
from .telling import Teller
from .torch_record import TorchRecord

__all__ = ["ElasticAgent"]

# Seconds that calls to the master may still take when the agent ends.
_LAST_CALLS_SECONDS = 3.0

logger = logging.getLogger(__name__)


class ElasticAgent(LocalElasticAgent):
    """The agent of one node.

    Args:
        spec: torch's description of the workers; its rendezvous handler only names the job.
        logs_specs: torch's choice of files.
        config: this agent's configuration.
        script: what the workers run.
        mailbox: where all events arrive.
        effects: made for the same mailbox.
        lifeline: the node's lifeline.
        watch: the source of signals.
        prefix: torch's template for the prefix of lines that are shown from a worker's file.
        early: a nursery that imports already; this agent ends it, in any case.
    """

    def __init__(
        self,
        spec: WorkerSpec,
        logs_specs: LogsSpecs,
        config: AgentConfig,
        script: Script,
        mailbox: Mailbox[ev.Event],
        effects: Effects,
        lifeline: Lifeline,
        watch: SignalWatch,
        prefix: str | None = None,
        early: StartedNursery | None = None,
    ) -> None:
        super().__init__(spec, logs_specs, log_line_prefix_template=prefix)
        self._config, self._script, self._home = config, script, WorkingDirectory()
        self._mailbox, self._effects = mailbox, effects
        self._lifeline, self._watch, self._teller = lifeline, watch, Teller(config.tell_fd)
        self._ending: ev.Exit | None = None
        self._context: WorkersContext | None = None
        self._place: WorldPlace | None = None
        self._use_flag, self._record = config.script_flag, TorchRecord()
        self._starts, self._hub = 0, HubKnowledge(script, effects.say, directory=effects.storage.directory.private)
        self._advised, self._prepared_for = set[str](), 0  # the epoch whose successors the standby workers are
        self._link, self._watchdogs = WorkerLink(self._worker_said), TorchWatchdogs()
        self._link.leave_to(lifeline)
        self._adoption = Adoption(
            script.arguments,
            mailbox.put,
            config.checkpoint_glob,
            config.keep_saves,
            looks=reads(script, Variable.RESUME_DIR),
            is_told=config.deepspeed_load_universal or reads(script, Variable.RESUME_FORM),
            initial=config.initial,
            best=config.best,
            slow=partial(said_while_slow, effects.say),
            full=effects.room.refused,
        )
        self._beside = DlroverSupport(
            config.dlrover,
            config.dlrover_fixes,
            config.job_id,
            config.settings.join_timeout,
            script,
            self._link.directory,
            config.log_dir / "flash-checkpoint.log",
            lifeline,
            mailbox.put,
            effects.say,
        )
        self._pool = self._make_pool(early)
        if self._pool is not None:
            effects.conversion.nursery = self._pool.start_helper
        self._state = handling.fresh(
            handling.AgentSettings(
                nproc=config.nproc,
                node_name=config.node_name,
                drain_timeout=config.settings.drain_timeout,
                adopts=config.adopts,
                save_signal=config.save_signal,
                self_fence=config.self_fence,
                master_outage_timeout=config.master_outage_timeout,
                addresses=config.addresses,
                hint=config.hint,
                advice=config.advice,
                token_file=config.token_file,
                connect_timeout=config.connect_timeout,
                save_timeout=max(self._beside.save_timeout, self._adoption.last_look),
            )
        )

    @property
    def ending(self) -> ev.Exit:
        """How the run ended; only valid after `run`."""
        assert self._ending is not None, "run() comes first"
        return self._ending

    def where(self) -> str:
        """The present `job/node/epoch/step`, for the log."""
        return self._state.where(self._config.job_id)

    # ---- the loop ---------------------------------------------------------------------------------------------------

    def _invoke_run(self, role: str = "default") -> RunResult:
        """Runs until the decisions say Exit. Torch's `run` calls this and records the result."""
        self._effects.take = self._take_late
        self._hub.begin()
        with self._watch.to(self._signalled, lambda: self._state.workers is not handling.Workers.NONE):
            # Before the registration, so that the imports run while the master answers.
            self._prepare(low_priority=False)
            self._handle(ev.Started())
            while self._ending is None:
                wake = self._state.wake
                timeout_seconds = None if wake is None else max(0.0, wake - time.monotonic())
                event = self._mailbox.get(timeout_seconds)
                self._handle(ev.Tick() if event is None else event)
        return self._record.result(self._ending.code, self._worker_group)

    def _handle(self, event: ev.Event) -> None:
        if isinstance(event, Placed) and event.damage is not None:
            self._found_damaged(event.epoch, event.damage)
            return
        if isinstance(event, Placed) and not event.message:
            self._start_placed(event.epoch)
            return
        if isinstance(event, Exited) and (event.start != self._starts or self._refused_the_flag(event)):
            return
        if isinstance(event, Exited) and (help := advice(event.message)) and help not in self._advised:
            self._advised.add(help)
            self._handle(ev.Remark(help))
        before = self._state
        if isinstance(event, Exited) and before.workers is handling.Workers.RUNNING:
            self._record.exited(event, self._context)
        self._state, actions = handling.handle(before, event, time.monotonic())
        for what in told(before, event, self._state, actions):
            self._teller.tell(what)
        if before.workers is not handling.Workers.NONE and self._state.workers is handling.Workers.NONE:
            self._mark("stopped")
        for action in actions:
            logger.debug("%s -> %s", type(event).__name__, type(action).__name__)
            if not self._effects.perform(action):
                self._perform(action)
        if isinstance(event, ev.WorkerSaid) and event.message.WhichOneof("body") == "progress":
            self._first_step()
        if self._pool is not None and isinstance(self._state.place.order, control_pb2.Wait):
            self._pool.dismiss()

    def _perform(self, action: ev.Action) -> None:
        match action:
            case ev.StartWorkers():
                self._mark("formed")
                self._start_world(action.world)
            case ev.StopWorkers():
                self._mark("stopping")
                self._stop_world(action)
            case ev.SaveFlash():
                self._beside.save_part(action.epoch, action.step, self._adoption.settle)
            case ev.TellWorkers():
                # A leaver's processes have nothing to wait for.
                self._link.tell(to_worker(action, may_stay=self._pool is not None and not self._state.leaving))
            case ev.Exit():
                self._ending = action
            case _:
                raise AssertionError(f"nobody carries out {type(action).__name__}")

    def _mark(self, name: str) -> None:
        mark(name, run=self._effects.run_id, node=self._state.node, epoch=self._state.started)

    def _signalled(self, number: int) -> None:
        self._mailbox.put(ev.Signalled(number, time.monotonic()))

    def _worker_said(self, epoch: int, rank: int, message: worker_pb2.ToAgent) -> None:
        body = message.WhichOneof("body")
        if body == "save_failed":
            self._effects.room.refused(message.save_failed.reason)
        # Each seal and each failed save counts; of other messages only a rank's last one does.
        newest = (epoch, rank, body) if body not in ("sealed", "save_failed") else None
        self._mailbox.put(ev.WorkerSaid(epoch, rank, message), replaces=newest)

    # ---- workers ----------------------------------------------------------------------------------------------------

    def _make_pool(self, early: StartedNursery | None) -> StandbyPool | None:
        spec = self._worker_group.spec
        virtual = getattr(spec, "virtual_local_rank", False)
        # Both take effect in a process's first moment: its own CUDA_VISIBLE_DEVICES, its binding to a NUMA node.
        if not self._script.adoptable or virtual or getattr(spec, "numa_options", None) is not None:
            if early is not None:
                early.end(self._lifeline)
            return None
        return StandbyPool(
            self._lifeline,
            self._config.nproc,
            modules_of(self._script.source),
            self._config.log_dir / "standby.log",
            lambda: self._mailbox.put(ev.StandbyWarm(self._prepared_for)),
            notices=self._watch.signals,
            early=early,
            first=first_path(self._script.source),
            say=self._effects.say,
        )

    def _start_world(self, world: control_pb2.World) -> None:
        self._end_context()
        # The old world's flags do not apply to the new one; the decisions tell again what differs.
        self._link.tell(worker_pb2.ToWorker())
        try:
            self._place = place_of(world, self._state.incarnation)
            store = self._effects.stores.use(world, mine=self._place.group_rank == 0)
            if self._place.group_rank == 0 and store is None:
                raise OSError(f"the store of epoch {world.epoch} is not open any more")
            self._enter(world, self._place)
            self._effects.open_memory(world)
            self._beside.enter(world.epoch, self._place.group_rank, self._place.nodes, world.arrived)
            # On a thread, because it may be a large file: the agent must hear its master meanwhile.
            first, then = self._place.group_rank == 0, partial(self._placed, world.epoch)
            if not self._adoption.place(self._effects.run_dir(), world, then, first=first):
                self._start_workers(self._worker_group)
        except (OSError, ValueError, RuntimeError) as error:
            self._start_failed(world.epoch, error)
            return
        self._worker_group.state = WorkerState.HEALTHY

    def _start_failed(self, epoch: int, error: Exception) -> None:
        logger.exception("the workers of epoch %d could not be started", epoch)
        text = why_not_started("the workers", error)
        self._mailbox.put(ev.StartFailed(epoch, text, unfit=isinstance(error, WorkingDirectoryGoneError)))

    def _placed(self, epoch: int, problem: str, damage: worker_pb2.BadCheckpoint | None) -> None:
        self._mailbox.put(Placed(epoch, f"the workers cannot be started: {problem}" if problem else "", damage=damage))

    def _found_damaged(self, epoch: int, damage: worker_pb2.BadCheckpoint) -> None:
        """As if the workers had found it: the master has it looked at, and goes back by one."""
        rank = self._place.first_rank if self._place is not None else 0
        self._handle(ev.WorkerSaid(epoch, rank, worker_pb2.ToAgent(bad_checkpoint=damage)))
        self._handle(ev.WorkerExited(epoch, 0, ev.WORKER_BAD_CHECKPOINT))

    def _start_placed(self, epoch: int) -> None:
        """Starts the workers of a world whose resume point is where the script looks, if they are still wanted."""
        state = self._state
        if epoch != state.started or state.workers is not handling.Workers.RUNNING or self._context is not None:
            return
        self._start_or_say(epoch)

    def _start_or_say(self, epoch: int) -> None:
        try:
            self._start_workers(self._worker_group)
        except (OSError, ValueError, RuntimeError) as error:
            self._start_failed(epoch, error)

    def _enter(self, world: control_pb2.World, place: WorldPlace) -> None:
        """Fills in torch's worker group as its rendezvous would; the master's message already has every rank."""
        self._record.begin()
        group: Any = self._worker_group
        group.group_rank, group.group_world_size = place.group_rank, place.nodes
        group.master_addr, group.master_port = world.store_host, world.store_port
        group.workers = [
            Worker(
                local_rank=local,
                global_rank=place.first_rank + local,
                role_rank=place.first_rank + local,
                world_size=place.world_size,
                role_world_size=place.world_size,
            )
            for local in range(place.nproc)
        ]

    def _start_workers(self, worker_group: WorkerGroup) -> dict[int, Any]:
        world, place, spec = self._state.world, self._place, worker_group.spec
        assert world is not None
        assert place is not None
        added = worker_environment(
            world,
            place,
            self._effects.settings,
            self._state.generation,
            self._config.job_id,
            self._effects.run_dir(),
            spec.role,
            os.environ,
            self._memory_directory(world.run_id),
            self._config.memory_budget_bytes,
        )
        envs: dict[int, Any] = {}
        environment: Any
        most = int(self._effects.settings.max_nodes)
        of_dlrover = self._beside.world_variables(place.group_rank, place.nodes, most)
        for local, environment in enumerate(added):
            environment |= self._node_environment(world.epoch) | of_dlrover
            if self._config.deepspeed_load_universal and world.resume.form == control_pb2.FORM_UNIVERSAL:
                environment[Variable.LOAD_UNIVERSAL] = "1"
            set_local_rank(self, environment, local, spec)
            envs[local] = environment
        of_run = self._effects.run_dir(), world, self._origin(place.world_size)
        arguments = self._adoption.begin(*of_run, self._arguments(world), first=place.group_rank == 0)
        if hint := self._adoption.hint(world, arguments):
            self._mailbox.put(ev.Remark(hint))
        self._starts += 1
        self._link.stand(self._effects.say)
        self._link.expect(world.epoch, place.first_rank, place.nproc)
        self._watchdogs.stand(self, envs)
        self._context = WorkersContext(
            spec.role,
            self._script,
            {local: macros.substitute(list(arguments), str(local)) for local in envs},
            envs,
            self._logs_specs,
            prefixes(self._log_line_prefix_template, place, spec.role),
            self._home,
            self._pool,
            self._lifeline,
            self._link,
            self._exited(world.epoch, self._starts, place.first_rank),
            partial(self._mailbox.put, ev.SessionImported(world.epoch)),
            getattr(spec, "numa_options", None),
            getattr(spec, "duplicate_stdout_filters", None),
            getattr(spec, "duplicate_stderr_filters", None),
        )
        self._pcontext = self._context
        self._context.start()
        adopted = self._context.adopted
        logger.info("epoch %d: %d workers started, %d of them adopted", world.epoch, place.nproc, adopted)
        pids = self._context.pids()
        self._teller.tell({"event": "started", "epoch": world.epoch, "pids": list(pids.values())})
        for worker in worker_group.workers:
            worker.id = pids[worker.local_rank]
        self._record.started(self)
        return dict(pids)

    def _memory_directory(self, run_id: str) -> Path | None:
        """Where the ranks keep memory checkpoints; None: nowhere, as the job's first agent was not to keep any."""
        memory, wanted = self._effects.memory, self._effects.settings.memory_replicas > 0
        return memory.directory(run_id) if memory is not None and wanted else None

    def _take_late(self, world: control_pb2.World) -> None:
        of_run = self._effects.run_dir(), world, self._origin(world.world_size)
        self._adoption.take_late(*of_run, self._effects.settings.join_timeout)

    def _origin(self, world_size: int) -> Origin:
        low, high = self._effects.settings.min_nodes, self._effects.settings.max_nodes
        return Origin(self._config.job_id, self._state.generation, world_size, low, high)

    def _arguments(self, world: control_pb2.World) -> tuple[str, ...]:
        universal = world.HasField("resume") and world.resume.form == control_pb2.FORM_UNIVERSAL
        wanted = self._use_flag and self._effects.settings.universal_checkpoint
        if wanted and universal and FLAG not in self._script.own:
            return (*self._script.arguments, FLAG)
        return self._script.arguments

    def _exited(self, epoch: int, start: int, first_rank: int) -> Callable[..., None]:
        def exited(rank: int, code: int, message: str, had_stayed: bool = False) -> None:
            try:
                if code == 0:
                    self._mailbox.put(ev.EndedWell(epoch, first_rank + rank))
                    with said_while_slow(self._effects.say, "waiting until what the script saved last is the run's"):
                        self._beside.settle()
                        self._adoption.settle()
            finally:
                if (step := self._link.last_step(epoch, first_rank + rank)) is not None:
                    self._mailbox.put(ev.StepsCounted(epoch, step))
                peer = bool(tells_of_a_peer(message))
                self._mailbox.put(Exited(epoch, rank, code, message, peer, had_stayed, start))

        return exited

    def _refused_the_flag(self, event: ev.WorkerExited) -> bool:
        """Whether a script did not know the flag that we added; then it is started once more, without the flag.

        It reads its arguments before it meets any other rank, so the world stands: the same happens on every node.
        """
        world = self._state.world
        if not refuses_flag(event.code) or self._state.epoch.has_session or self._context is None or world is None:
            return False
        if event.epoch != world.epoch or self._arguments(world) == self._script.arguments:
            return False
        self._use_flag = False
        text = f"the script does not know {FLAG}; it is started again and finds the files in its environment"
        self._mailbox.put(ev.Remark(text, warning=False))
        self._end_context()
        self._starts += 1  # the ends of those ranks are no news, also where none are started
        self._start_or_say(world.epoch)
        return True

    def _first_step(self) -> None:
        """After the first step of a world, starts the standby workers for the next one, with low priority."""
        if self._prepared_for < self._state.started:
            self._prepared_for = self._state.started
            self._prepare(low_priority=True)

    def _prepare(self, *, low_priority: bool) -> None:
        if self._pool is None:
            self._mailbox.put(ev.StandbyWarm(self._prepared_for))
        else:
            self._pool.fill(low_priority=low_priority, ahead=self._assignments_ahead())

    def _assignments_ahead(self) -> list[Assignment]:
        """What standby workers run before they have a place; empty if that is not wanted, or memory is short."""
        # A script's arguments, or what it imports, are other ones in each epoch.
        unknown = self._adoption.wanted or self._config.deepspeed_load_universal
        if not self._config.run_ahead or unknown:
            return []
        running = () if self._context is None else self._context.pids().values()
        of_node = partial(self._node_environment, self._prepared_for + 1)
        return assignments_ahead(self, self._worker_group.spec, self._config, self._script, running, of_node)

    def _node_environment(self, epoch: int) -> dict[str, str]:
        return {
            Variable.SOCKET: str(self._link.path),
            Variable.NOTICES: ",".join(number.name for number in self._watch.signals),
            Variable.DRAIN_TIMEOUT: f"{min(one.settings.drain_timeout for one in (self._config, self._effects)):g}",
            **self._lifeline.environment(),
            **self._beside.variables,
            **(self._effects.node_variables(os.environ) | self._hub.variables(epoch)),
        }

    def _stop_world(self, order: ev.StopWorkers) -> None:
        timeout, save_timeout = self._effects.settings.join_timeout, self._state.settings.save_timeout
        stopping = Stopping(
            order, self._context, self._adoption, self._beside, timeout, save_timeout, self._effects.say
        )
        stopping.start(self._mailbox.put)

    def _end_context(self) -> None:
        self._adoption.close()
        if self._context is not None:
            self._context.stop(0)
            self._context = None

    def _shutdown(self, *_: Any, **__: Any) -> None:
        """Ends everything, also the workers. torch's `run` calls it in any case; its versions differ in arguments."""
        pool = () if self._pool is None else (self._pool.close,)
        workers, calls = partial(super()._shutdown, signal.SIGKILL), partial(self._effects.close, _LAST_CALLS_SECONDS)
        steps: list[Callable[[], object]] = [self._end_context, *pool, workers, self._beside.close, calls]
        for step in (*steps, self._link.close, self._lifeline.close):
            try:
                step()
            except Exception:  # whatever it is, it costs the node neither the next steps nor its exit code
                logger.exception("something went wrong at the agent's end")
