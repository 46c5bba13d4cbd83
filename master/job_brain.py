"""The brain bound to one job, as the driver wants it: with its beginnings, and its durable half as bytes."""

from __future__ import annotations

from dalsegno.protos import control_pb2

from . import brain
from .codec import Codec
from .events import Event, Reply
from .state import Job, Settings, State
from .store import StoreError

__all__ = ("JobBrain",)


class JobBrain:
    """See `driver.Brain`. Holds what the command line says about the job, and no state."""

    def __init__(self, job_id: str, nnodes: tuple[int, int] | None, *, embedded: bool = False) -> None:
        """`nnodes` are min and max nodes where the master was told them; otherwise the first agent says them."""
        self._job_id = job_id
        self._nnodes = nnodes
        self._embedded = embedded
        self._codec = Codec(Job)

    def begin(self, saved: bytes | None, generation: int, now: float) -> State:
        """A new job's state, or the stored one's. Raises StoreError where the store's job is another than told."""
        if saved is None:
            settings = None if self._nnodes is None else Settings(*self._nnodes)
            return brain.fresh(self._job_id, generation, settings, self._embedded)
        job = self._codec.decode(saved)
        job.embedded = self._embedded
        self._check_nnodes(job)
        return brain.recover(job, generation, now)

    def encode(self, state: State) -> bytes:
        return self._codec.encode(state.job)

    def generation(self, state: State) -> int:
        return state.job.generation

    def handle(self, state: State, event: Event, now: float) -> tuple[State, list[Reply]]:
        return brain.handle(state, event, now)

    def view(self, state: State, node: str, incarnation: str) -> control_pb2.Directive | None:
        known = state.job.nodes.get(node)
        if known is None or known.incarnation != incarnation:
            return None
        return brain.view(state, node)

    def status(self, state: State, now: float) -> control_pb2.StatusReply:
        return brain.status(state, now)

    def _check_nnodes(self, job: Job) -> None:
        """Min and max belong to the job: a restarted master may be given them again, not others."""
        if self._nnodes is None:
            return
        settings = job.settings
        if job.settled and self._nnodes != (settings.min_nodes, settings.max_nodes):
            raise StoreError(
                f"job {job.job_id!r} has --nnodes {settings.min_nodes}:{settings.max_nodes} in this store,"
                f" not {self._nnodes[0]}:{self._nnodes[1]}: leave --nnodes out, or start a new job"
            )
        settings.min_nodes, settings.max_nodes = self._nnodes
        job.fixed_nnodes = True
