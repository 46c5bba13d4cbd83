"""The brain bound to one job, in the form that the driver needs: with its start, and its durable half as bytes."""

from __future__ import annotations

import logging
import traceback
from collections.abc import Callable
from dataclasses import replace

from dalsegno.protos import control_pb2
from dalsegno.protos.processes import Process

from ..brain import brain
from ..brain.calls import Noted
from ..brain.chronicle import JobEvent, in_order
from ..brain.events import Event, Reply
from ..brain.live import State
from ..brain.registration import proves
from ..brain.state import Job, Settings
from ..brain.views import Common, directive_of
from ..record.codec import JobCodec
from ..record.store import Rows, StoreError

__all__ = ("JobBrain",)

log = logging.getLogger(__name__)


class JobBrain:
    """See `driver.Brain`. Holds what the command line says about the job and what was stored of it, but no state."""

    def __init__(
        self,
        job_id: str,
        nnodes: tuple[int, int] | None,
        *,
        embedded: bool = False,
        is_gone: Callable[[Process], bool] = lambda process: False,
        unix: Callable[[], float] | None = None,
        settings: Settings | None = None,
    ) -> None:
        """`nnodes` are min and max nodes if the master was told them; otherwise the first agent sets them.

        `unix` gives Unix seconds, for the times of events; None: those are monotonic.

        `is_gone`: whether an agent's process is provably gone, as seen by this master.

        `settings`: all of them, with `nnodes`, for whatever agents come; None: the first agent sets the rest.
        """
        self._job_id = job_id
        self._nnodes = nnodes
        self._embedded = embedded
        self._is_gone = is_gone
        self._unix = unix
        self._settings = settings
        self._codec = JobCodec()
        # Whether a look at the store found nothing against this master: then it takes the job over as it is.
        self._stood_by = False
        # Rows that are encoded and not asked for yet.
        self._rows: Rows = {}
        self._common: Common | None = None
        # The events and remarks that were shown last, and both in order.
        self._shown: tuple[tuple[JobEvent, ...], tuple[JobEvent, ...]] = ((), ())
        self._events: tuple[JobEvent, ...] = ()

    def begin(self, rows: dict[str, bytes], generation: int, now: float) -> State:
        """A new job's state, or the stored one's. Raises StoreError if the store's job differs from the given one."""
        # A master may take the record over several times.
        self._codec, self._rows, self._common = JobCodec(), {}, None
        if not rows:
            settings = None if self._nnodes is None else Settings(*self._nnodes)
            state = brain.fresh(self._job_id, generation, settings, self._embedded)
            self._settle(state.job)
            return self._begun(state, now)
        job = self._codec.decode(rows)
        job.embedded = self._embedded
        self._check_nnodes(job)
        self._settle(job)
        return self._begun(brain.recover(job, generation, now, self._is_gone, self._offset(now)), now)

    def _begun(self, state: State, now: float) -> State:
        """The state of a process that begins, with what that knows besides."""
        state.live.settings_given = self._settings is not None
        return self._dated(state, now)

    def _dated(self, state: State, now: float) -> State:
        """The state with the offset by which it tells Unix seconds."""
        state.live.unix_offset = self._offset(now)
        return state

    def _offset(self, now: float) -> float:
        return 0.0 if self._unix is None else self._unix() - now

    def check(self, rows: dict[str, bytes]) -> None:
        """Raises StoreError if the stored job differs from the given one. Otherwise `begin` does not, later on."""
        if rows:
            self._check_nnodes(JobCodec().decode(rows))
        self._stood_by = True

    def changes(self, state: State) -> Rows:
        """What was decided is encoded already; what cannot be encoded is a fault, and comes with a later turn."""
        try:
            self._keep(state.job)
        except Exception as error:
            state.faults.append("".join(traceback.format_exception(error)))
        rows, self._rows = self._rows, {}
        return rows

    def _keep(self, job: Job) -> None:
        self._rows.update(self._codec.changes(job))

    def generation(self, state: State) -> int:
        return state.job.generation

    def handle_all(self, state: State, events: list[Event], now: float) -> tuple[State, list[Reply | None]]:
        return brain.handle_all(self._dated(state, now), events, now, self._keep)

    def note(self, state: State, message: Noted, now: float) -> tuple[Reply, bool]:
        # With the offset of the last turn: this is what every node sends all the time.
        return brain.note(state, message, now)

    def admits(self, state: State, incarnation: str, secret: bytes) -> bool:
        node = state.job.node_by(incarnation)
        return node is None or proves(node, secret)

    def held_up(self, state: State, seconds: float, now: float) -> None:
        brain.held_up(state, seconds, now)

    def look(self, state: State) -> Common:
        """What all directives of this moment have in common."""
        self._common = Common(state).after(self._common)
        return self._common

    def key(self, common: Common, node: str, incarnation: str) -> object:
        """Tells without building a directive whether it would change; None if the incarnation is unknown."""
        known = common.job.nodes.get(node)
        return common.key(known) if known is not None and known.incarnation == incarnation else None

    def directive(self, common: Common, node: str) -> control_pb2.Directive:
        return directive_of(common, common.job.nodes[node])

    def events(self, state: State) -> tuple[JobEvent, ...]:
        parts = (state.job.events, state.job.remarks)
        if any(new is not old for new, old in zip(parts, self._shown, strict=True)):
            self._shown, self._events = parts, in_order(*parts)
        return self._events

    def earlier(self, state: State) -> int:
        return state.live.earlier

    def status(self, state: State, now: float) -> control_pb2.StatusReply:
        return brain.status(state, now)

    def _settle(self, job: Job) -> None:
        """Makes the settings of this process's own the job's, which then no agent changes."""
        if self._settings is not None:
            job.settings, job.settled, job.fixed_nnodes = self._settings, True, True

    def _check_nnodes(self, job: Job) -> None:
        """Checks min and max, which belong to the job until it ends: until then a new master may get no others."""
        # As this master's command line says, whatever that of the last one was.
        job.fixed_nnodes = self._nnodes is not None
        settings = job.settings
        if self._nnodes is None or self._nnodes == (settings.min_nodes, settings.max_nodes):
            return
        if job.settled and not job.phase.is_terminal and self._stood_by:
            log.warning(
                "the running job keeps its --nnodes %d:%d, not this master's %d:%d: give all masters the same",
                *(settings.min_nodes, settings.max_nodes, *self._nnodes),
            )
            return
        if job.settled and not job.phase.is_terminal:
            raise StoreError(
                f"job {job.job_id!r} has --nnodes {settings.min_nodes}:{settings.max_nodes} in this store,"
                f" not {self._nnodes[0]}:{self._nnodes[1]}: leave --nnodes out until the job has ended or is stopped,"
                " or start a new job"
            )
        job.settings = replace(settings, min_nodes=self._nnodes[0], max_nodes=self._nnodes[1])
        job.limit = 0  # it was within other bounds
