"""What the agent has to do with memory checkpoints, behind one object. See docs/architecture.md."""

from __future__ import annotations

import contextlib
import logging
import threading
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path

from dalsegno.elastic.checkpoint import CheckpointDamaged, Damage, Manifest
from dalsegno.elastic.checkpoint.mounts import is_away, mount_point
from dalsegno.protos import control_pb2
from dalsegno.protos.shortage import shortage

from .buddies import Buddies, Buddy
from .calls import Peers, SendPace
from .durable import PartlyWritten, look_for, make_durable, seal_written
from .fence import Fence, OpenEpoch
from .gathering import Gatherer
from .holdings import HeldParts, Holdings, StepPart
from .identity import MemoryIdentity
from .line import Line
from .pieces import read_manifest, read_part
from .place import MemoryPlace, NoMemoryError, default_root
from .service import PeerServer, PeerService
from .space import Space
from .watch import STALL_SECONDS, StallWatch
from .wire import Wire
from .writing import DISK_STALL_SECONDS, Writer

__all__ = ["HeldParts", "MemoryTier"]

# That what is under way has when the agent ends, seconds.
_CLOSE_WITHIN_SECONDS = 5.0
# Ranks may have read what is so in a file, if that came about before.
_ALTERED = frozenset({Damage.WRONG_CHECKSUM, Damage.WRONG_SIZE})

logger = logging.getLogger(__name__)


@dataclass
class _Sent:
    """How far a part of this node's own ranks has come, by the addresses of its buddies."""

    # Those that hold it, in the order in which they have it.
    copies: dict[str, None] = field(default_factory=dict)
    # Those that it could not be brought; "": none was, as a newer one had been sent.
    unsent: set[str] = field(default_factory=set)


class MemoryTier:
    """This node's memory. For the main thread: every method returns at once, callbacks come on other threads.

    Args:
        job_id: parts of no other job are taken.
        host: where to listen, and the address under which other agents reach this one; never all interfaces.
        token: the job's, asked for with every call; None: it has none, and everybody is let in. May raise OSError or
            ValueError while it cannot be read: the last one counts then.
        budget_bytes: what all parts may take together; None: as much as there is room for.
        on_change: told what this node holds of one step, whenever that has changed; with no parts: nothing any more.
        say: one line for a person, and whether it is a warning.
        root: where directories of all agents are; None: /dev/shm/dalsegno-<uid>.
        tls: other agents speak TLS, and none is spoken to without.
        bytes_per_second: at most so much is sent to all buddies together; None: no limit.
        stall_seconds: a transfer is given up after so long without a byte.
        disk_stall_seconds: so is what is written to the disk.
        disk: the job's directory there, which has the runs' and is made again where it was deleted; None: it is not.

    Attributes:
        problem: Why there is no memory tier, in one line; empty where there is one. With a problem nothing else here
            does anything, and what is asked for fails with it.
        address: for other agents (`PeerAddress`).
        path: The directory of this process, for the keeper to remove; None where there is none.
    """

    def __init__(
        self,
        job_id: str,
        host: str,
        token: Callable[[], str | None],
        budget_bytes: int | None,
        on_change: Callable[[HeldParts], None],
        say: Callable[[str, bool], None],
        root: Path | None = None,
        *,
        tls: bool = False,
        bytes_per_second: float | None = None,
        stall_seconds: float = STALL_SECONDS,
        disk_stall_seconds: float = DISK_STALL_SECONDS,
        disk: Path | None = None,
    ) -> None:
        self.problem, self.address = "", ""
        self.path: Path | None = None
        self._tell, self._say, self._pace = on_change, say, SendPace(bytes_per_second)
        self._sent: dict[tuple[str, str, int], _Sent] = {}
        # What is held is looked at and told in one: the last word is the present state, whichever thread says it.
        self._telling = threading.RLock()
        self._sent_lock = threading.Lock()
        self._ending = threading.Event()
        self._disk_stall_seconds = disk_stall_seconds
        self._disk, self._mount = disk, mount_point(disk) if disk is not None else None
        with contextlib.ExitStack() as undo:
            try:
                self._place = MemoryPlace(default_root() if root is None else root, job_id)
                undo.callback(self._place.close)
                wire = Wire(token, MemoryIdentity.make() if tls else None)
                self._start(job_id, host, wire, budget_bytes, stall_seconds)
                undo.callback(self._server.close)
                self._lines()
            except NoMemoryError as error:
                self.problem = str(error)
                return
            except ImportError as error:
                self.problem = f"TLS between agents needs the package cryptography ({error})"
                return
            except (OSError, RuntimeError) as error:
                self.problem = shortage(error) or str(error)
                return
            undo.pop_all()
        self.path, self.address = self._place.path, self._server.address

    def _start(self, job_id: str, host: str, wire: Wire, budget: int | None, stall_seconds: float) -> None:
        self._holdings = Holdings(self._place.path)
        self._fence = Fence(job_id)
        holdings = self._holdings
        self._space = Space(budget, holdings.bytes, self._place.free_bytes, make_room=holdings.clear_spares)
        self._watch = StallWatch(stall_seconds)
        service = PeerService(
            job_id, self._holdings, self._fence, self._space, self._watch, self._changed, self._found_bad
        )
        self._serve = partial(PeerServer, wire=wire, service=service)
        self._server = self._serve(host)
        self._peers = Peers(job_id, wire, self._watch, self._holdings, self._space)
        self._buddies = Buddies(
            lambda address: Buddy(
                address, self._peers, self._pace, self._copied, self._not_sent, self._found_bad, self._say
            )
        )

    def _lines(self) -> None:
        """Starts what works off the main thread."""
        self._gatherer = Gatherer(self._server.address, self._peers, self._holdings, self._fence, self._changed)
        self._quick = Line("memory")
        self._slow = Line("memory-sum")
        self._writer, self._looker = Writer(self._disk_stall_seconds), Writer(self._disk_stall_seconds)

    def listen(self, host: str) -> None:
        """Other agents reach this one at another address from now on, and no longer at the present one."""
        if self.problem:
            return
        try:
            server = self._serve(host)
        except RuntimeError as error:
            self._say(f"other nodes cannot hold this node's memory checkpoints: {error}", True)
            return
        old, self._server, self.address = self._server, server, server.address
        self._gatherer.own_address = server.address
        old.close()

    def directory(self, run_id: str) -> Path | None:
        """Where workers find and write memory checkpoints of a run; made. None: there is no memory."""
        if self.problem:
            return None
        try:
            path = self._place.run(run_id)
            self._stand()
            path.mkdir(mode=0o700, exist_ok=True)
        except (OSError, ValueError, NoMemoryError) as error:
            self._say(f"no memory checkpoints on this node in this world: {error}", True)
            return None
        return path

    def _stand(self) -> None:
        if self._place.stand():
            self._say(f"{self._place.path} was deleted by somebody: it is made again, without what was in it", True)

    def open_epoch(self, run_id: str, epoch: int, group_rank: int, buddies: Sequence[str]) -> None:
        """A world has opened: parts of lower epochs are refused from now on, own ones go to these agents.

        Repeated with other buddies, those that are new are sent what was sent last, as far as it is of this epoch.
        """
        if not self.problem and self._fence.open(run_id, epoch, group_rank):
            self._buddies.set([address for address in buddies if address != self.address], epoch)

    def sealed(self, run_id: str, name: str, digest: str, urgent: bool = False) -> None:
        """This node's own part of a step is complete: it counts as held.

        It goes to the buddies with `send`. `urgent`: people wait for it, so it goes at once, and neither it nor what is
        sent before it is held back.
        """
        if self.problem:
            return
        self._pace.hurry(urgent)
        # The next world may open, with another rank for this node, before this is looked at.
        opened = self._fence.opened(run_id)
        if opened is None:
            logger.warning("%s was sealed in memory in no world that is known here", name)
        else:
            self._quick.put(lambda: self._add_own(run_id, name, digest, opened, urgent))

    def send(self, run_id: str, name: str, digest: str) -> None:
        """This node's own part of a step goes to the buddies, unless it does already or is not here any more."""
        opened = None if self.problem else self._fence.opened(run_id)
        if opened is not None:
            part = self._holdings.part(run_id, name, digest, opened.group_rank)
            if part is not None and part.manifest.epoch == opened.epoch and not self._buddies.offer(part):
                self._not_sent(part)

    def _add_own(self, run_id: str, name: str, digest: str, opened: OpenEpoch, urgent: bool) -> None:
        try:
            part = self._holdings.add_own(run_id, name, digest, opened.group_rank)
        except Exception as error:  # whatever it is, people hear that this step is not held
            logger.warning("%s in memory is not what its ranks say", name, exc_info=error)
            self._say(f"the memory checkpoint {name} does not count: {str(error) or repr(error)}", True)
            return
        if urgent and self._fence.opened(run_id) == opened:
            self._buddies.offer(part, urgent=True)
        self._changed(self._holdings.held(run_id, name))

    def held(self) -> list[HeldParts]:
        """All that is here, from old to new, for a master that knows nothing of it."""
        return [] if self.problem else [self._with_copies(held) for held in self._holdings.all()]

    def gather(
        self,
        run_id: str,
        ref: control_pb2.CheckpointRef,
        parts: Sequence[control_pb2.HeldPart],
        then: Callable[[control_pb2.Checkpoint | str], None],
        *,
        partly: bool = False,
    ) -> None:
        """Brings what is missing of a checkpoint here, each part from the first agent that gives it whole.

        Args:
            run_id, ref: which one; a gathering of another one that is under way ends.
            parts: all parts of it, and who has them.
            then: called once, with its description once these parts are here, or with the reason why they are not.
            partly: there are more parts, which are not needed here.
        """
        if self.problem:
            then(self.problem)
            return
        with contextlib.suppress(OSError, NoMemoryError):  # what cannot be written then says why
            self._stand()
        self._gatherer.gather(run_id, ref, parts, then, partly=partly)

    def make_durable(
        self, run_id: str, ref: control_pb2.CheckpointRef, run_dir: Path, then: Callable[[str], None]
    ) -> None:
        """Copies the parts of a checkpoint that are here to the run's directory on the disk, at low priority.

        What other nodes have written is taken over; who finds all of it there seals it. `then` is called once: with "",
        where it is sealed, or with the reason why not; with a `PartlyWritten` where only parts of other nodes lack.
        """
        if self.problem:
            then(self.problem)
        else:
            self._put_writing(run_id, ref, run_dir, None, then)

    def write_parts(
        self,
        run_id: str,
        ref: control_pb2.CheckpointRef,
        run_dir: Path,
        parts: Collection[int],
        then: Callable[[str], None],
    ) -> None:
        """Copies these parts of a checkpoint, which are here, to the run's directory on the disk, at low priority.

        Without parts: seals it there, as others say that they have written all of it. `then` is called once: with "",
        or with the reason why not; with `NothingThere` where files lack for the seal.
        """
        if self.problem:
            then(self.problem)
        else:
            self._put_writing(run_id, ref, run_dir, parts, then)

    def look_for(self, run_id: str, ref: control_pb2.CheckpointRef, run_dir: Path, then: Callable[[str], None]) -> None:
        """Looks whether anything of a checkpoint that is not here is on the disk, also while others are written there.

        `then` is called once: with "", or with the reason why not; with `NothingThere` where nothing is.
        """
        if self.problem:
            then(self.problem)
        else:
            self._looker.put(ref.digest, lambda stopped: self._look(run_id, ref, run_dir, stopped), then)

    def stop_writing(self, ref: control_pb2.CheckpointRef) -> None:
        """Nobody wants it on the disk any more: what was ordered ends, with a reason why not."""
        if not self.problem:
            self._writer.stop(ref.digest)

    def _put_writing(
        self,
        run_id: str,
        ref: control_pb2.CheckpointRef,
        run_dir: Path,
        parts: Collection[int] | None,
        then: Callable[[str], None],
    ) -> None:
        self._writer.put(ref.digest, lambda stopped: self._write_durable(run_id, ref, run_dir, parts, stopped), then)

    def _write_durable(
        self,
        run_id: str,
        ref: control_pb2.CheckpointRef,
        run_dir: Path,
        parts: Collection[int] | None,
        stopped: Callable[[], str],
    ) -> str:
        with self._holdings.at_work(run_id, ref.name):
            manifest = self._holdings.manifest(run_id, ref.name)
            if manifest is None or manifest.digest != ref.digest:
                return _nothing_of(ref)
            source = self._place.run(run_id) / ref.name
            try:
                self._stand_on_disk()
                if parts is None:
                    held_parts = self._holdings.held(run_id, ref.name)
                    failure = make_durable(source, manifest, self._files_here(run_id, manifest), run_dir, stopped)
                    if isinstance(failure, PartlyWritten) and held_parts is not None:
                        failure.parts = held_parts.parts
                    return failure
                if not parts:
                    return seal_written(manifest, run_dir, stopped)
                held = [self._holdings.part(run_id, ref.name, ref.digest, part) for part in parts]
                files = [entry.path for part in held if part is not None for entry in part.entries]
                if None in held:
                    return f"not all of what {ref.name} has on this node is in its memory any more"
                return make_durable(source, manifest, files, run_dir, stopped, seals=False)
            except CheckpointDamaged as damaged:
                for group_rank in self._holdings.parts_with(run_id, ref.name, damaged.file):
                    part = self._holdings.part(run_id, ref.name, ref.digest, group_rank)
                    if part is not None:
                        self._found_bad(part, damaged)
                return f"{ref.name} is damaged in memory: {damaged}"
            except Exception as error:
                logger.exception("%s was not made durable", ref.name)
                return str(error) or type(error).__name__

    def _look(self, run_id: str, ref: control_pb2.CheckpointRef, run_dir: Path, stopped: Callable[[], str]) -> str:
        manifest = self._holdings.manifest(run_id, ref.name)
        if manifest is None or manifest.digest != ref.digest:
            return _nothing_of(ref)
        self._stand_on_disk()
        return look_for(manifest, self._files_here(run_id, manifest), run_dir, stopped)

    def _stand_on_disk(self) -> None:
        """Not where a mount point has lost its volume: there what is written then says why it cannot be."""
        if self._disk is None or self._disk.exists() or is_away(self._mount, self._disk):
            return
        try:
            self._disk.mkdir(parents=True)
        except OSError as error:
            logger.info("%s is not made again: %s", self._disk, error)  # another node may just have done so
        else:
            self._say(f"{self._disk} was deleted: it is made again, without what was in it", True)

    def _files_here(self, run_id: str, manifest: Manifest) -> set[str]:
        """Paths of the files of a step that are on this node."""
        return {entry.path for entry in manifest.files} - set(self._holdings.missing(run_id, manifest.name))

    def doubt(self, run_id: str, ref: control_pb2.CheckpointRef, then: Callable[[str], None]) -> None:
        """Sums all parts of a checkpoint that are here, and drops those that are not what was sealed.

        A gathering brings them anew, from other agents. `then` is called with the first thing that was found, or "".
        """
        if self.problem:
            then(self.problem)
        elif not self._slow.put(lambda: then(self._sum(run_id, ref))):
            then("too much is waiting")

    def _sum(self, run_id: str, ref: control_pb2.CheckpointRef) -> str:
        found = ""
        held = self._holdings.held(run_id, ref.name)
        with self._holdings.at_work(run_id, ref.name):
            for group_rank in () if held is None else held.parts:
                part = self._holdings.part(run_id, ref.name, ref.digest, group_rank)
                if part is None:
                    continue
                try:
                    for _ in read_part(part, read_manifest(part)):
                        if self._ending.is_set():
                            return "the agent ends"
                    self._holdings.mend_note(part)
                except CheckpointDamaged as damaged:
                    self._found_bad(part, damaged)
                    found = found or str(damaged)
                except Exception as error:  # whatever it is: the answer is waited for
                    found = found or f"{ref.name} cannot be read: {str(error) or repr(error)}"
        return found

    def keep(self, run_id: str, epoch: int, digests: Collection[str], newest: int = 2) -> None:
        """Deletes what is neither in `digests` nor among the `newest` steps of `epoch` of which a part is here.

        Steps of later epochs stay, and so does what is being written, sent or gathered.
        """
        if not self.problem:
            wanted = frozenset(digests)
            self._quick.put(lambda: self._keep(run_id, epoch, wanted, newest))

    def _keep(self, run_id: str, epoch: int, digests: frozenset[str], newest: int) -> None:
        for gone in self._holdings.keep(run_id, epoch, digests, newest):
            with self._sent_lock:
                for key in [key for key in self._sent if key[:2] == (run_id, gone.checkpoint.ref.name)]:
                    del self._sent[key]
            self._changed(gone)

    def close(self) -> None:
        """Ends server and transfers, and deletes the directory. Blocks for some seconds at most."""
        if self.problem:
            return
        self.problem = "the agent ends"
        self._ending.set()
        for writer in (self._writer, self._looker):
            writer.end()
        self._buddies.close()
        self._watch.close()
        self._gatherer.close(_CLOSE_WITHIN_SECONDS)
        self._server.close()
        for line in (self._writer, self._looker, self._quick, self._slow):
            line.close(_CLOSE_WITHIN_SECONDS)
        self._place.close()

    # ---- what the threads tell ----

    def _changed(self, held: HeldParts | None) -> None:
        if held is None:
            return
        name = held.checkpoint.ref.name
        try:
            with self._telling:
                now = self._holdings.held(held.run_id, name)
                if now is None or now.checkpoint.ref.digest != held.checkpoint.ref.digest:
                    now = replace(held, parts=())
                self._tell(replace(self._with_copies(now), damaged=held.damaged))
        except Exception:
            logger.exception("nobody was told what is held of %s", name)

    def _with_copies(self, held: HeldParts) -> HeldParts:
        opened = self._fence.opened(held.run_id)
        if opened is None or opened.epoch != held.checkpoint.epoch:
            return held
        key = held.run_id, held.checkpoint.ref.name, opened.group_rank
        with self._sent_lock:
            sent = self._sent.get(key, _Sent())
            return replace(held, copies=tuple(sent.copies), unsent=bool(sent.unsent))

    def _copied(self, part: StepPart, address: str) -> None:
        """A buddy holds a part of ours."""
        with self._sent_lock:
            sent = self._sent.setdefault(part.key, _Sent())
            sent.copies[address] = None
            sent.unsent.discard(address)
        self._changed(self._holdings.held(part.run_id, part.manifest.name))

    def _not_sent(self, part: StepPart, address: str = "") -> None:
        """A buddy cannot be brought a part of ours, or has not taken the one before: nobody waits for it."""
        ref = part.manifest.ref
        if not self._holdings.has(part.run_id, ref.name, ref.digest, part.group_rank):
            return  # Nobody wants it any more.
        with self._sent_lock:
            self._sent.setdefault(part.key, _Sent()).unsent.add(address)
        self._changed(self._holdings.held(part.run_id, part.manifest.name))

    def _found_bad(self, part: StepPart, damaged: CheckpointDamaged) -> None:
        """A part that is here is not what was sealed: nobody gets it any more."""
        ref = part.manifest.ref
        if not self._holdings.has(part.run_id, ref.name, ref.digest, part.group_rank):
            return  # It was deleted meanwhile, as nobody needed it: that is no damage.
        self._say(f"{part} was damaged in this node's memory, and is used no more: {damaged}", True)
        # What is gone cannot have been read otherwise than it was sealed.
        altered = str(damaged) if damaged.reason in _ALTERED else ""
        self._changed(replace(self._holdings.drop_part(part), damaged=altered))


def _nothing_of(ref: control_pb2.CheckpointRef) -> str:
    return f"nothing of {ref.name} is in this node's memory"
