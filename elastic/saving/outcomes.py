"""What became of a save: noted by this rank, told to its agent, and what a failed one has left is removed."""

from __future__ import annotations

import gc
import logging
import time
from functools import partial

from dalsegno.protos import worker_pb2

from ..checkpoint import Best, CheckpointStore, Manifest, Ref
from ..checkpoint.deletion import is_held_open
from ..rank.collective import Collective
from ..rank.identity import Identity
from ..rank.link import Link
from ..rank.meetings import Meetings
from ..rank.remarks import remark
from .bests import Bests, Sight, writes_when_new
from .content import Own
from .notes import Notes
from .save_errors import Failed
from .tiers import LastSaves

log = logging.getLogger(__name__)


class SaveError(RuntimeError):
    """A save failed because of something that another try will not cure, or it failed too often."""


class Outcomes:
    """Of one session's saves. Main thread, unless a method says otherwise.

    Args:
        identity, collective, link: The session's.
        store: The run's directory.
        best, candidate, in_memory: See `Bests`.

    Attributes:
        bests: The best checkpoint as of the last save, the same on all ranks.
        saved: The last checkpoints.
    """

    def __init__(
        self,
        identity: Identity,
        collective: Collective,
        link: Link | None,
        store: CheckpointStore,
        best: Best | None,
        candidate: Best | None,
        in_memory: str,
    ) -> None:
        self._identity, self._collective, self._link = identity, collective, link
        self.bests = Bests(Sight(store), best, candidate, in_memory)
        self.saved = LastSaves()
        self._notes = Notes(store, apart=link is not None)
        self._note_best = writes_when_new(partial(self._notes.write, None))

    def announce(self, own: Own, manifest: Manifest, began: float) -> None:
        """It is sealed, as all ranks know."""
        self.note(own, manifest.ref)
        if own.tier.leads:
            self.tell(own, manifest, began)

    def note(self, own: Own, ref: Ref) -> None:
        """It is sealed: what the next saves are compared with."""
        in_memory, content = own.tier.in_memory, own.content
        self.bests.note(ref.name, content.best, awaits_disk=in_memory and content.make_durable)
        self.saved.note(content.step, ref, in_memory=in_memory, for_disk=own.for_disk)
        if in_memory and self._identity.rank == 0:
            self._note_best(self.bests.best)

    def tell(self, own: Own, manifest: Manifest, began: float) -> None:
        """Tells the agent, and whoever reads the run's notes. On those that lead; any thread."""
        in_memory = own.tier.in_memory
        if self._link is not None:
            took = time.monotonic() - began
            sealed = worker_pb2.Sealed(name=manifest.name, digest=manifest.digest, step=manifest.step, seconds=took)
            sealed.in_memory, sealed.make_durable = in_memory, own.content.make_durable
            self._link.send(worker_pb2.ToAgent(sealed=sealed))
        if not in_memory:
            self._notes.write(manifest, manifest.best)

    def failed(self, own: Own, failure: Failed, drain: bool) -> None:
        """All ranks know that it has failed, and why: what it has left is removed. Collective.

        Raises:
            SaveError: Another try would fail, too.
        """
        self._give_up(own, str(failure), drain, failure.fatal)
        if failure.fatal:
            line = f"saving step {own.content.step} failed: {failure}"
            if failure.final:
                Meetings(self._collective, self._link).refused(line)
            raise SaveError(line) from failure

    def _give_up(self, own: Own, reason: str, drain: bool, fatal: bool) -> None:
        name, in_memory = own.name, own.tier.in_memory
        news = self._identity.rank == 0 and not fatal
        if news and self.saved.is_news(in_memory=in_memory, make_durable=own.content.make_durable):
            where = " in memory" if in_memory else ""
            then = "the ranks save to the disk" if own.content.make_durable else "commits stand"
            say = remark if in_memory else log.warning  # the other one the agent says
            say("saving %s%s failed, %s: %s", name or f"step {own.content.step}", where, then, reason)
        if own.tier.leads and name:
            for error in own.tier.remove(name):
                log.warning("what the failed save left in %s could not be removed: %s", name, error)
        if own.tier.leads and not in_memory:
            # Whatever the reason: what a script or a library writes by itself takes none of these files, and hides that
            # the disk was full.
            own.tier.store.clear_spares()
        # A framework's error may be part of a cycle, and hold open what was deleted just now. To look for cycles takes
        # a large program a second.
        if in_memory and name and is_held_open(own.path):
            gc.collect()
        # No rank may begin the next attempt while the leftovers of this one are being removed.
        self._collective.barrier()
        # A mistake ends the training; what is said of that comes with its error. What memory has no room for is on the
        # disk sooner or later.
        if self._link is not None and not fatal and not in_memory:
            failed = worker_pb2.SaveFailed(name=name, reason=reason[:4096], drain=drain, step=own.content.step)
            self._link.send(worker_pb2.ToAgent(save_failed=failed))

    def credit(self, name: str, value: float) -> None:
        """Makes a checkpoint that exists the best so far, as all ranks have agreed."""
        best = self.bests.credit(name, value)
        if self._identity.rank == 0:
            self._notes.write(None, best)

    def close(self, seconds: float) -> None:
        """What is being written has so long to be there."""
        self._notes.close(seconds)
