"""The directory of an epoch in which a script without a session saves, and what it finds there of the resume point.

Its arguments name the directory by `${save_dir}`. The resume point they name by `${resume_dir}` or `${resume_path}`;
a script that gets neither finds a copy of it in the new directory, under the name that it had given it itself. A link
would not do: a script that opens its checkpoint for writing cuts it off where it lies, and the run's would be gone.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path

from dalsegno.elastic.checkpoint import CheckpointDamaged, Damage, Manifest, read_sealed, verify
from dalsegno.elastic.checkpoint.errors import printable
from dalsegno.elastic.checkpoint.files import replace_file
from dalsegno.protos import control_pb2, worker_pb2
from dalsegno.protos.shortage import starting
from dalsegno.protos.text import few

from ..decisions import events as ev
from ..script import FLAG
from .adoption import Adopter
from .best_save import BestRule
from .foreign import DEEPSPEED
from .late import take_late
from .layouts import state_of
from .macros import RESUME_DIR, RESUME_PATH, RESUME_STEP, SAVE_DIR, expand, macros_of
from .placing import is_placed, place
from .settling import settled
from .slices import number_given
from .strays import ASIDE, set_aside, strays
from .taking import Before, Origin, save_directory
from .volume_clock import now_at
from .writing import FileWrites

__all__ = ["Adoption", "Then", "prepare"]

Then = Callable[[str, worker_pb2.BadCheckpoint | None], None]
Slow = Callable[[str], AbstractContextManager[None]]
logger = logging.getLogger(__name__)

# Seconds between two looks whether the resume point is there, on another node than the one that puts it there.
_LOOK_SECONDS = 0.1
# The longest that a node waits for it.
_PATIENCE_SECONDS = 600.0
# Seconds that the end of a worker waits for its last save to be adopted.
SETTLE_WITHIN_SECONDS = 600.0
# The same after workers were stopped: a part of --join-timeout, as this node joins behind it, and at most so many
# seconds. (The decisions give up what takes 45 s more than the workers' own notice.)
_PART_OF_JOINING, _MOST_SECONDS = 0.5, 30.0
# Seconds that the end of workers that were stopped waits for what they saved last, where nobody has given them longer.
LAST_LOOK_SECONDS = 10.0


def prepare(run_dir: Path, world: control_pb2.World, saved: Manifest | None = None) -> Path:
    """Makes the epoch's directory, as DeepSpeed expects it. Every agent does that before its workers start.

    For others it stays empty: examples of transformers 4 begin in no directory with anything but checkpoints in it.

    Args:
        run_dir: the run's directory.
        world: the epoch's world.
        saved: the resume point's manifest; None: nobody knows whose it is.

    Raises:
        OSError: the file system says no.
    """
    directory = save_directory(run_dir, world.epoch)
    directory.mkdir(parents=True, exist_ok=True)
    saved_as = None if saved is None else saved.saved_as
    leads = saved is None or saved_as is None or (saved_as.below and saved.shape.strategy == DEEPSPEED)
    if world.HasField("resume") and leads:
        # `latest` holds a tag, which DeepSpeed appends to the directory as a path: a way out of the directory. It is of
        # this epoch only, and the next epoch's agents make their own, so nothing has to survive a power cut.
        place = directory / (Path(saved_as.below).parent if saved_as is not None else "")
        place.mkdir(parents=True, exist_ok=True)
        out = os.path.relpath(run_dir, place)
        replace_file(place / "latest", f"{out}/{world.resume.source.ref.name}".encode(), lasting=False)
        if world.resume.form == control_pb2.FORM_UNIVERSAL:
            universal = f"{out}/{world.resume.universal.name}".encode()
            replace_file(place / "latest_universal", universal, lasting=False)
    return directory


class Adoption:
    """Adopts checkpoints for one agent, through all epochs. Does nothing for a script that gets no `${save_dir}`.

    Args:
        arguments: the script's arguments.
        deliver: see `Adopter`.
        pattern: `--checkpoint-glob`; empty: none.
        keep: `--keep-saves`; 0: all.
        looks: the script reads `DALSEGNO_RESUME_DIR` itself, and needs no copy of the resume point.
        is_told: the script, or what loads for it, knows when it resumes from universal files.
        initial: what it starts from while the run has no checkpoint; None: nothing.
        best: see `Adopter`.
        slow: tells people what is waited for within a context, where that takes long.
        full: see `Adopter`.
    """

    def __init__(
        self,
        arguments: Sequence[str],
        deliver: Callable[[ev.Event], None],
        pattern: str = "",
        keep: int = 0,
        *,
        looks: bool = False,
        is_told: bool = False,
        initial: Path | None = None,
        best: BestRule | None = None,
        slow: Slow = lambda what: nullcontext(),
        full: Callable[[str], None] = lambda reason: None,
    ) -> None:
        self._initial, self._best, self._slow, self._full = initial, best, slow, full
        self._macros = macros_of(arguments)
        self.wanted = SAVE_DIR in self._macros
        self._is_told = is_told
        self._places = self.wanted and not looks and not {RESUME_DIR, RESUME_PATH} & self._macros
        self._deliver, self._pattern, self._keep = deliver, pattern, keep
        self._adopter: Adopter | None = None
        # The run's directory, the world and the origin of the present epoch; and where the script saves in it.
        self._of_run: tuple[Path, control_pb2.World, Origin] | None = None
        self._directory: Path | None = None
        # When its workers got their notice, by the clock of the volume, in ns; 0: they did not.
        self._noticed = 0
        self._placing: _Placing | None = None
        # The last epoch in which a copy was put there, and its files.
        self._placed: tuple[int, tuple[str, ...]] = (0, ())
        # What the script had written into resume points, as far as people know.
        self._aside: set[str] = set()
        self._late = threading.Lock()

    @property
    def last_look(self) -> float:
        """Seconds that `settle` may take when workers were stopped."""
        return LAST_LOOK_SECONDS if self.wanted else 0.0

    def place(self, run_dir: Path, world: control_pb2.World, then: Then, *, first: bool) -> bool:
        """Called when an epoch is about to begin: lets the script find its last checkpoint where it had saved it.

        No script is started from a checkpoint that is not, byte by byte, what was sealed.

        Args:
            run_dir, world: see `Adopter`.
            then: called on another thread when it is there, with "" or the reason why it is not; and with the damage
                if it is damaged.
            first: whether this agent is the world's first, which is the one that verifies and copies.

        Returns:
            Whether that takes time; False: `begin` may be called now.

        Raises:
            OSError: the file system says no.
        """
        self.close()
        if not self.wanted or not world.HasField("resume") or world.resume.source.in_memory:
            return False
        source = run_dir / world.resume.source.ref.name
        manifest = _manifest(source)
        target = None
        # DeepSpeed's `latest` leads there.
        if self._places and manifest.saved_as is not None and manifest.shape.strategy != DEEPSPEED:
            target = prepare(run_dir, world, manifest)
        if target is None and not first:
            return False
        own = save_directory(run_dir, world.epoch)
        self._placing = _Placing(source, manifest, world.resume, target, own, then, self._slow, self._tell_aside, first)
        return True

    def begin(
        self, run_dir: Path, world: control_pb2.World, origin: Origin, arguments: Sequence[str], *, first: bool
    ) -> tuple[str, ...]:
        """Called when an epoch's workers are about to start.

        Args:
            run_dir, world, origin: see `Adopter`.
            arguments: the script's arguments.
            first: whether this agent is the world's first, which is the one that looks.

        Returns:
            The arguments with the macros' values in them.

        Raises:
            OSError: the file system says no.
        """
        if self._placing is not None:
            self._placed = world.epoch, self._placing.files
        self.close()
        if not self.wanted:
            return tuple(arguments)
        resume = run_dir / world.resume.source.ref.name if world.HasField("resume") else None
        saved = None if resume is None or world.resume.source.in_memory else _manifest(resume)
        saved_as = None if saved is None else saved.saved_as
        self._directory = directory = prepare(run_dir, world, saved)
        self._of_run = run_dir, world, origin
        newest, number = resume or self._initial, None
        if resume is not None and saved_as is not None:
            newest = resume / os.path.relpath(saved_as.newest, saved_as.below or ".")
            number = number_given(saved_as)
        if first:
            before = None
            if resume is not None and saved_as is not None:
                placed = self._placed[1] if self._placed[0] == world.epoch else ()
                before = Before(resume, {file.name: file for file in state_of(directory, placed)}, saved_as)
            more = (self._pattern, before, self._keep, self._best)
            self._adopter = Adopter(run_dir, world, origin, self._deliver, *more, full=self._full)
        values = {
            SAVE_DIR: str(directory),
            RESUME_DIR: None if newest is None else str(newest if newest.is_dir() else newest.parent),
            RESUME_PATH: None if newest is None else str(newest),
            RESUME_STEP: None if number is None else str(number),
        }
        return expand(arguments, values)

    def hint(self, world: control_pb2.World, arguments: Sequence[str]) -> str:
        """What people must change for the script to find its resume point; empty if nothing."""
        if not self.wanted or self._is_told or world.resume.form != control_pb2.FORM_UNIVERSAL or FLAG in arguments:
            return ""
        return (
            f"the script resumes at another number of ranks, from universal files, and is not told so: start with "
            f"{FLAG}, which it is handed then, and set checkpoint.load_universal in DeepSpeed's config where it has "
            "it; or start with --deepspeed-load-universal, which sets that for it"
        )

    @property
    def signs(self) -> list[FileWrites]:
        """What shows that the script still saves, in `processes.signs`' way."""
        return [] if self._directory is None else [FileWrites(self._directory)]

    def request(self) -> bool:
        """The script is about to be asked to save. From any thread. False: nobody here takes what it saves."""
        if (adopter := self._adopter) is None:
            return False
        try:
            adopter.request()
        except OSError as error:
            logger.warning("nobody can tell which save answers: %s", error)
        return True

    def wait_met(self, timeout_seconds: float, over: Callable[[], bool]) -> bool:
        """See `Adopter.wait_met`."""
        return (adopter := self._adopter) is not None and adopter.wait_met(timeout_seconds, over)

    @property
    def met(self) -> bool:
        """Whether the script was asked to save, and what it saved then is taken."""
        return (adopter := self._adopter) is not None and adopter.met

    def settle(self, timeout_seconds: float = SETTLE_WITHIN_SECONDS) -> None:
        """Called when workers have ended: adopts what they saved last before that is reported. From any thread."""
        adopter = self._adopter
        if adopter is not None:
            settled(adopter, timeout_seconds)

    def interrupt(self) -> None:
        """Called when workers are about to be stopped. From any thread."""
        if (adopter := self._adopter) is not None:
            adopter.interrupt()

    def notice(self) -> None:
        """Called when workers are about to get a notice. From any thread."""
        self._noticed = 0
        if self._directory is not None:
            try:
                self._noticed = now_at(self._directory)
            except OSError as error:
                logger.warning("nobody can tell what the script saves at its notice: %s", error)

    def stopped(self, join_timeout: float, given: float, *, noticed: bool = False) -> None:
        """Called when workers were stopped, or failed: adopts what they had saved by then. From any thread.

        Args:
            join_timeout: the job's.
            given: seconds that this may take at least: what is left of a leaver's notice.
            noticed: they may have saved because they got a notice. The first node may have looked before that.
        """
        if (adopter := self._adopter) is not None:
            settled(adopter, max(min(_PART_OF_JOINING * join_timeout, _MOST_SECONDS), given), ended_well=False)
        elif noticed and self._of_run is not None and self._noticed:
            self.take_late(*self._of_run, join_timeout, self._deliver, self._noticed)

    def take_late(
        self,
        run_dir: Path,
        world: control_pb2.World,
        origin: Origin,
        join_timeout: float,
        deliver: Callable[[ev.Event], None] | None = None,
        since: int = 0,
    ) -> None:
        """Called before this node joins: takes what its lost first node had not taken. From any thread; blocks.

        Args:
            run_dir, world, origin: see `Adopter`; of the last world.
            join_timeout: the job's.
            deliver: see `Adopter`; None: this node's Join names what was sealed.
            since: see `Late`.
        """
        if self.wanted:
            with self._slow(f"taking what the script saved last in epoch {world.epoch}"):
                seconds = min(_PART_OF_JOINING * join_timeout, _MOST_SECONDS)
                with self._late:  # asked again meanwhile: what the first look takes is not taken twice
                    of_script = deliver or self._deliver_late, self._pattern, self._best
                    take_late(run_dir, world, origin, *of_script, seconds, since)

    def _tell_aside(self, checkpoint: str, own: Path, moved: list[str]) -> None:
        if new := [name for name in moved if name not in self._aside]:
            self._aside.update(new)
            what = printable(few(new))
            self._deliver(
                ev.Remark(
                    f"the script wrote {what} into {checkpoint}, from which it resumed: set aside in "
                    f"{own.name}/{ASIDE}. It may read what ${{resume_dir}} names, and saves below ${{save_dir}}"
                )
            )

    def _deliver_late(self, event: ev.Event) -> None:
        # What was sealed is in the inventory of this node's Join.
        if not isinstance(event, ev.WorkerSaid):
            self._deliver(event)

    def close(self) -> None:
        """Called when the epoch is over."""
        if self._placing is not None:
            self._placing.close()
            self._placing = None
        if self._adopter is not None:
            self._adopter.close()
            self._adopter = None


def _manifest(directory: Path) -> Manifest:
    try:
        return Manifest.read(directory)
    except CheckpointDamaged as error:
        raise OSError(f"the resume point cannot be read: {error}") from error


class _Placing:
    """Verifies the resume point, and copies it into an epoch's directory, or waits until another node has.

    On a thread of its own. Nothing is copied if `target` is None.
    """

    def __init__(
        self,
        source: Path,
        manifest: Manifest,
        resume: control_pb2.ResumePoint,
        target: Path | None,
        own: Path,
        then: Then,
        slow: Slow,
        tell_aside: Callable[[str, Path, list[str]], None],
        first: bool,
    ) -> None:
        self._slow, self._own, self._tell_aside = slow, own, tell_aside
        self._source, self._manifest, self._target, self._then, self._first = source, manifest, target, then, first
        self._resume = resume
        self._is_scripts = manifest.saved_as is not None
        self._over = threading.Event()
        self.files: tuple[str, ...] = ()
        with starting("the thread that copies the resume point"):
            threading.Thread(target=self._run, name="placing", daemon=True).start()

    def close(self) -> None:
        """Nobody waits for it any more."""
        self._over.set()

    def _run(self) -> None:
        problem, damage = "", None
        try:
            if not self._first:
                with self._slow("waiting for the first node, which verifies and copies the last checkpoint"):
                    problem = self._wait()
            else:
                with self._slow(f"verifying and copying the last checkpoint, {self._source.name}"):
                    damage = self._put()
        except OSError as error:
            problem = (
                f"the last checkpoint cannot be put into the script's new directory: {error.strerror or error}; "
                "make room, or hand the script '${resume_dir}', which needs no copy"
            )
        except Exception as error:  # whatever it is: the workers start when they hear of the end of this
            logger.exception("the last checkpoint cannot be put into the script's new directory")
            problem = f"the last checkpoint cannot be put into the script's new directory: {error!r}"
        if not self._over.is_set():
            self._then(problem, damage)

    def _put(self) -> worker_pb2.BadCheckpoint | None:
        """Verifies, and copies what is sound."""
        damage = self._damage()
        if damage is None and self._target is not None:
            self.files = place(self._source, self._manifest, self._target, self._over.is_set)
        return damage

    def _damage(self) -> worker_pb2.BadCheckpoint | None:
        """What is wrong with the form of it that the script is going to load."""
        universal = self._resume.form == control_pb2.FORM_UNIVERSAL
        ref = self._resume.universal if universal else self._resume.source.ref
        directory = self._source.parent / ref.name
        try:
            sealed = read_sealed(directory, ref.digest)
            if self._is_scripts:
                self._set_aside(directory, sealed)
            verify(directory, sealed)
            if self._is_scripts and (left := strays(directory, [entry.path for entry in sealed.files])):
                raise CheckpointDamaged(directory, left[0], Damage.EXTRA_FILE)
        except CheckpointDamaged as error:
            return worker_pb2.BadCheckpoint(
                name=ref.name, digest=ref.digest, form=self._resume.form, file=error.file, message=str(error)
            )
        return None

    def _set_aside(self, directory: Path, sealed: Manifest) -> None:
        try:
            moved = set_aside(directory, (entry.path for entry in sealed.files), self._own)
        except OSError as error:
            # What is left there is found when it is verified.
            logger.warning("what the script has written into %s stays there: %s", directory.name, error)
        else:
            if moved:
                self._tell_aside(directory.name, self._own, moved)

    def _wait(self) -> str:
        """Until it is there, or nobody needs it; says why it is not there."""
        assert self._target is not None
        deadline = time.monotonic() + _PATIENCE_SECONDS
        while not self._over.wait(_LOOK_SECONDS) and not is_placed(self._target):
            if time.monotonic() > deadline:
                return (
                    f"the last checkpoint did not come into {self._target} within {_PATIENCE_SECONDS:.0f} s: all nodes "
                    "must run the same command, and see the same file system"
                )
        return ""
