"""Our rendezvous for torch: `dlrover-run` uses only its name, plain torchrun everything except draining."""

from __future__ import annotations

import functools
import logging
import os
import sys
import threading
import time
from dataclasses import asdict
from pathlib import Path
from typing import cast

from torch.distributed import Store, TCPStore  # type: ignore[attr-defined]
from torch.distributed.elastic.rendezvous import (
    RendezvousClosedError,
    RendezvousHandler,
    RendezvousHandlerCreator,
    RendezvousInfo,
    RendezvousParameters,
    RendezvousStoreInfo,
    RendezvousTimeoutError,
)

from dalsegno.protos import control_pb2
from dalsegno.protos.contract import COUNTED_BY_TORCHRUN, GROW_SOON_SECONDS, JobSettings, Variable
from dalsegno.protos.shortage import starting

from ..control.connection import Connector
from ..control.credentials import CredentialFiles
from ..control.handshake import mismatch
from ..decisions import events as ev
from ..decisions import handling
from ..processes.lifeline import Lifeline
from ..storage.complaint import not_made
from ..storage.job_directory import JobDirectory, StorageError
from ..storage.preparing import prepare
from ..workers.own_address import why_not_begun
from ..workers.worker_env import WorldPlace, place_of
from .config import AgentConfig
from .console import RunConsole, make_log_dir, set_up_logging
from .effects import Effects
from .mailbox import Mailbox
from .world_store import WorldStore, connect

__all__ = ["NamedRendezvous", "Rendezvous", "create", "factory"]

logger = logging.getLogger(__name__)

# Seconds that the other nodes have to finish, and seconds for the last calls, when torch's agent ends.
_LAST_WORD_SECONDS = 30.0
_LAST_CALLS_SECONDS = 3.0
# Seconds that torch's agents may take to meet at the store of a world, as long as it lasts.
_STORE_SECONDS = 300.0
_LEFT_BEHIND = (
    "the workers of this node have finished, and its world was ended: the others start again without it, as torchrun"
    " does not restart workers that have finished"
)


class _OfMaster(RendezvousHandler):
    """What all of ours say alike: the backend, and the job that the master has."""

    def __init__(self, job_id: str) -> None:
        self._job_id = job_id

    def get_backend(self) -> str:
        return "dalsegno"

    @property
    def use_agent_store(self) -> bool:
        return True

    def set_closed(self) -> None:
        """Does nothing: closing the job is the master's business."""

    def get_run_id(self) -> str:
        return self._job_id


class NamedRendezvous(_OfMaster):
    """For `dlrover-run`, whose own loop learns of worlds: names backend and job, and does nothing else."""

    def next_rendezvous(self) -> RendezvousInfo:
        raise RuntimeError("dlrover-run's worlds come with its master's directives")

    def is_closed(self) -> bool:
        return False

    def num_nodes_waiting(self) -> int:
        return 0

    def shutdown(self) -> bool:
        return True


class Rendezvous(_OfMaster):
    """For plain torchrun: a node of a job with a master, without draining (its workers have no socket to us).

    The same decisions as in `dlrover-run` run on a thread of their own. Torch's agent takes the place of the workers: a
    call of `next_rendezvous` means that the workers have stopped, and it returns when the decisions want them started.

    Args:
        config: this node's configuration.
        addresses: the master's.
        files: token and certificates.
        timeout_seconds: for one `next_rendezvous`.

    Raises:
        ValueError: The master has no address, also after a wait, or this machine is short of something.
    """

    def __init__(
        self, config: AgentConfig, addresses: list[str], files: CredentialFiles, timeout_seconds: float
    ) -> None:
        super().__init__(config.job_id)
        self._config = config
        self._timeout_seconds = timeout_seconds
        self._changed = threading.Condition()
        self._world: tuple[control_pb2.World, TCPStore | None] | None = None
        self._running: control_pb2.World | None = None
        self._stop_wanted = False
        self._ending: ev.Exit | None = None
        # Torch has called `shutdown`; and nobody waits for an answer any more.
        self._closed = self._over = False
        self._mailbox: Mailbox[ev.Event] = Mailbox()
        settings = handling.AgentSettings(
            nproc=config.nproc,
            node_name=config.node_name,
            drain_timeout=config.settings.drain_timeout,
            # Its workers cannot drain, so an outage of the master must not make them.
            master_outage_timeout=float("inf"),
            addresses=config.addresses,
            connect_timeout=config.connect_timeout,
        )
        self._state = handling.fresh(settings)
        self._lifeline = Lifeline()
        # Torch starts the workers with this process's environment, so they end with it, even if it is killed.
        os.environ.update(self._lifeline.environment())
        directory = JobDirectory(config.checkpoint_dir, config.job_id)
        self._console = console = RunConsole(name="torchrun")
        prepare(directory, console.say)
        # torchrun handles torch's own log.
        set_up_logging(config.log_dir / "agent.log", self._where, names=("dalsegno",))
        connector = Connector(lambda: addresses, files.read, explain=mismatch)
        try:
            with starting("the agent"):
                self._effects = Effects(
                    config, directory, connector, addresses, self._lifeline, self._mailbox, console.say
                )
        except OSError as error:
            self._lifeline.close()
            raise ValueError(why_not_begun(error, config.addresses, "--rdzv-endpoint")) from error
        # Its workers have this process's environment.
        os.environ.update(self._effects.node_variables(os.environ))
        self._thread = threading.Thread(target=self._decide, name="dalsegno-rendezvous", daemon=True)
        self._thread.start()

    def next_rendezvous(self) -> RendezvousInfo:
        """Leaves the world that this node was in, if any, and waits for the next.

        Raises:
            SystemExit: The run has finished (exit code 0).
            RendezvousTimeoutError: There was no place in a world in time.
            RendezvousClosedError: The job has failed, or does not want this node.
        """
        deadline = time.monotonic() + self._timeout_seconds
        self._leave_world()
        while True:
            world, store, place = self._take_world(deadline)
            over = functools.partial(self._is_over, world.epoch)
            store = store or connect(world.store_host, world.store_port, deadline - time.monotonic(), over)
            if store is not None:
                break
            # Nobody has started workers of it here, and the next one may come.
            self._leave_world()
        shown = WorldStore(store, place, _STORE_SECONDS, over)
        info = RendezvousStoreInfo(world.store_host, world.store_port)
        return RendezvousInfo(cast("Store", shown), place.group_rank, place.nodes, info)

    def _leave_world(self) -> None:
        """The workers of the world that this node was in have ended, if there was one."""
        with self._changed:
            running, self._running = self._running, None
            stop_wanted, self._stop_wanted = self._stop_wanted, False
        if running is not None:
            if not stop_wanted:
                # By itself torch's agent restarts only after a worker's failure.
                self._mailbox.put(ev.WorkerExited(running.epoch, 0, 1, "a worker failed (see torchrun's output)"))
            self._mailbox.put(ev.WorkersStopped(running.epoch))

    def _take_world(self, deadline: float) -> tuple[control_pb2.World, TCPStore | None, WorldPlace]:
        """Waits for a world; its store, if this node serves it, and this node's place in it."""
        with self._changed:
            left = max(0.0, deadline - time.monotonic())
            if not self._changed.wait_for(lambda: self._world or self._ending, left):
                raise RendezvousTimeoutError(f"no place in a world within {self._timeout_seconds:.0f} s")
            if self._world is None:
                assert self._ending is not None
                if self._ending.code == ev.EXIT_FINISHED:
                    # Torch has an exception for this, but its launcher then fails because there is no result.
                    raise SystemExit(0)
                raise RendezvousClosedError(self._ending.message)
            (world, store), self._world = self._world, None
            self._running = world
            return world, store, place_of(world, self._state.incarnation)

    def _is_over(self, epoch: int) -> bool:
        """Whether the world that torch's agent was given is no more."""
        with self._changed:
            here = self._running is not None and self._running.epoch == epoch
            return not here or self._stop_wanted or self._ending is not None

    def is_closed(self) -> bool:
        with self._changed:
            return self._ending is not None

    def num_nodes_waiting(self) -> int:
        with self._changed:
            # Torch's agent restarts its workers if somebody waits; this is how it is asked to stop them.
            return int(self._stop_wanted)

    def shutdown(self) -> bool:
        """Reports how the workers of this node ended, and leaves. Torch calls it at the end, in a `finally`."""
        with self._changed:
            if self._closed:
                return True
            self._closed = True
            running = self._running
        if running is not None:
            # Torch does not pass the outcome, but an exception on its way out tells it.
            code = 0 if sys.exc_info()[0] is None else 1
            for rank in range(self._config.nproc):
                self._mailbox.put(ev.WorkerExited(running.epoch, rank, code, ""))
            with self._changed:
                last_word = lambda: self._ending or self._stop_wanted  # noqa: E731
                self._changed.wait_for(last_word, _LAST_WORD_SECONDS if code == 0 else 0)
                left_behind = code == 0 and self._stop_wanted and not self._ending
            if left_behind:
                # Nobody will tell this node that the run has finished.
                self._console.say(_LEFT_BEHIND, True)
        with self._changed:
            self._over = True
        self._mailbox.put(ev.Tick())
        self._thread.join(_LAST_WORD_SECONDS)
        self._effects.close(_LAST_CALLS_SECONDS)
        self._lifeline.close()
        self._console.flush(_LAST_WORD_SECONDS)
        return True

    def _where(self) -> str:
        return self._state.where(self._job_id)

    # ---- the thread that decides ------------------------------------------------------------------------------------

    def _decide(self) -> None:
        try:
            self._loop()
        except Exception as error:  # whatever it is, torch's agent would go on deaf
            logger.exception("the agent cannot go on")
            what = f"the agent cannot go on ({error!r}): its log has more; the same command joins again"
            self._console.say(what, True)
            with self._changed:
                self._ending = self._ending or ev.Exit(ev.EXIT_FAILED, what)
                self._stop_wanted = True
                self._changed.notify_all()

    def _loop(self) -> None:
        self._handle(ev.StandbyWarm())
        self._handle(ev.Started())
        while True:
            wake = self._state.wake
            event = self._mailbox.get(None if wake is None else max(0.0, wake - time.monotonic()))
            self._handle(ev.Tick() if event is None else event)
            with self._changed:
                if self._over and (self._ending is not None or not len(self._mailbox)):
                    return

    def _handle(self, event: ev.Event) -> None:
        with self._changed:
            self._state, actions = handling.handle(self._state, event, time.monotonic())
        for action in actions:
            if self._effects.perform(action):
                continue
            with self._changed:
                match action:
                    case ev.StartWorkers():
                        mine = place_of(action.world, self._state.incarnation).group_rank == 0
                        self._world = (action.world, self._effects.stores.use(action.world, mine))
                    case ev.StopWorkers():
                        self._withdraw(action.epoch)
                    case ev.Exit():
                        self._ending = action
                self._changed.notify_all()

    def _withdraw(self, epoch: int) -> None:
        """The workers of an epoch must stop: tells torch's agent, unless it never started them."""
        if self._world is not None and self._world[0].epoch == epoch:
            self._world = None
            self._mailbox.put(ev.WorkersStopped(epoch))
        else:
            self._stop_wanted = self._running is not None and self._running.epoch == epoch


def create(params: RendezvousParameters) -> RendezvousHandler:
    """Makes the handler for `torchrun --rdzv-backend=dalsegno --rdzv-endpoint=HOST:PORT --rdzv-id=JOB`.

    `--rdzv-conf` takes `nproc` (as `--nproc-per-node`), `checkpoint_dir`, `log_dir`, `node_name`, `timeout`, and
    `token_file`, `tls_ca`, `tls_cert`, `tls_key` as dlrover-run's flags.

    Raises:
        SystemExit: with one line; the endpoint is missing or has no address, or token, certificates or checkpoint
            directory are unusable.
    """
    try:
        return _create(params)
    except (ValueError, StorageError) as error:
        # Torch would show an error with its own stack, which nobody can do anything about.
        raise SystemExit(f"torchrun: error: {error}") from error


def _create(params: RendezvousParameters) -> Rendezvous:
    if not params.endpoint:
        raise ValueError(
            "--rdzv-backend=dalsegno needs --rdzv-endpoint=HOST:PORT of a dlrover-master; without one use dlrover-run"
        )
    root = Path(params.get("checkpoint_dir", "checkpoints")).absolute()
    named = {name: params.get(name) for name in ("token_file", "tls_ca", "tls_cert", "tls_key")}
    files = CredentialFiles.given(named, os.environ.get(Variable.TOKEN))
    files.check()
    # Nothing is adopted of what torchrun's workers save. It tells its handler nothing of its --max-restarts.
    chosen = JobSettings(
        min_nodes=params.min_nodes,
        max_nodes=params.max_nodes,
        grow_wait=GROW_SOON_SECONDS,
        max_restarts=COUNTED_BY_TORCHRUN,
    )
    try:
        log_dir = make_log_dir(params.get("log_dir"), params.run_id)
    except OSError as error:
        raise ValueError(not_made("log_dir in --rdzv-conf", params.get("log_dir") or "TMPDIR", error)) from error
    config = AgentConfig(
        job_id=params.run_id,
        nproc=params.get_as_int("nproc", 1) or 1,
        settings=control_pb2.Settings(**asdict(chosen)),
        checkpoint_dir=root,
        log_dir=log_dir,
        node_name=params.get("node_name", "") or "",
        local_addr=params.local_addr,
        addresses=params.endpoint,
        tls=files.tls,
        keeps_memory=False,
    )
    timeout_seconds = float(params.get_as_int("timeout", 900) or 900)
    return Rendezvous(config, params.endpoint.split(","), files, timeout_seconds)


def factory() -> RendezvousHandlerCreator:
    """The entry point `torchrun.handlers`: torch calls it once and registers what it returns."""
    return create
