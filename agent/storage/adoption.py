"""Takes over checkpoints that DeepSpeed or Hugging Face's Trainer saved in scripts without a session.

A script that gets `${save_dir}` saves below a directory of its epoch's own, in its usual way. The agent of group rank 0
looks there, and puts a copy of each complete checkpoint among the run's, sealed like any other. A link would not do:
the script may delete its own checkpoint, or save again under the same name, which overwrites its files in place. The
script never writes into ours, because the next epoch has another directory, whose `latest` leads DeepSpeed from there
to the resume point.
"""

from __future__ import annotations

import logging
import os
import shutil
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from dalsegno.elastic.checkpoint import (
    SHARDED,
    CheckpointDamaged,
    CheckpointStore,
    Manifest,
    Position,
    Ref,
    Shape,
    describe,
    seal,
)
from dalsegno.elastic.checkpoint.files import copy_file, place_file, replace_file
from dalsegno.elastic.checkpoint.layout import MANIFEST
from dalsegno.protos import control_pb2, worker_pb2

from ..decisions import events as ev
from ..script import FLAG
from .foreign import Foreign, candidates, complete, state_of

__all__ = ["MACRO", "Adopter", "Adoption", "Origin", "prepare", "save_directory"]

MACRO = "${save_dir}"
# Seconds between two looks; what has not changed between them is no longer being written.
LOOK_EVERY_SECONDS = 1.0
# The longest pause, in seconds, after a copy that could not be written.
LONGEST_PAUSE_SECONDS = 60.0
# Seconds that the end of a worker waits for its last save to be adopted.
SETTLE_WITHIN_SECONDS = 600.0
_BEGAN_ANEW = "it is older than the resume point: the script did not load what DALSEGNO_RESUME_DIR names"

logger = logging.getLogger(__name__)


def save_directory(run_dir: Path, epoch: int) -> Path:
    """The directory in which the script saves in this epoch, and in no other."""
    return run_dir / f"e{epoch}"


def prepare(run_dir: Path, world: control_pb2.World) -> Path:
    """Makes the epoch's directory, as DeepSpeed expects it. Every agent does that before its workers start.

    Raises:
        OSError: the file system says no.
    """
    directory = save_directory(run_dir, world.epoch)
    directory.mkdir(parents=True, exist_ok=True)
    if world.HasField("resume"):
        # `latest` holds a tag, which DeepSpeed appends to the directory as a path: a way out of the directory. It is of
        # this epoch only, and the next epoch's agents make their own, so nothing has to survive a power cut.
        replace_file(directory / "latest", f"../{world.resume.source.ref.name}".encode(), lasting=False)
        if world.resume.form == control_pb2.FORM_UNIVERSAL:
            universal = f"../{world.resume.universal.name}".encode()
            replace_file(directory / "latest_universal", universal, lasting=False)
    return directory


@dataclass(frozen=True)
class Origin:
    """What a manifest says about the writing epoch and the world does not contain."""

    job_id: str
    generation: int
    world_size: int
    min_nodes: int
    max_nodes: int


class Changed(Exception):
    """The script writes a checkpoint again."""


def adopt(foreign: Foreign, run_dir: Path, world: control_pb2.World, origin: Origin) -> Manifest:
    """Seals a copy of it among the run's checkpoints. A copy that cannot be finished is removed again.

    Raises:
        Changed: it is being written again.
        CheckpointDamaged: another process has changed the copy.
        OSError: the file system says no.
    """
    name = str(CheckpointStore(run_dir).next_name(foreign.step, world.epoch))
    target = run_dir / name
    target.mkdir()
    try:
        _take(foreign, target)
        resumed = world.resume.source.ref if world.HasField("resume") else None
        manifest = Manifest(
            name=name,
            job_id=origin.job_id,
            run_id=world.run_id,
            step=foreign.step,
            epoch=world.epoch,
            generation=origin.generation,
            form=SHARDED,
            shape=Shape(origin.world_size, foreign.strategy, foreign.any_world_size),
            position=Position(),
            order=None,
            source=None,
            resumed_from=None if resumed is None else Ref(resumed.name, resumed.digest),
            min_nodes=origin.min_nodes,
            max_nodes=origin.max_nodes,
            metric=None,
            files=describe(target),
        )
        seal(target, manifest)
    except BaseException:
        # Removed, because it would take room until the epoch is over, and the next try makes another one.
        if not os.path.lexists(target / MANIFEST):
            shutil.rmtree(target, ignore_errors=True)
        raise
    return manifest


def _take(foreign: Foreign, target: Path) -> None:
    """Copies its files. All are first linked, in a moment, so that the script may delete them meanwhile."""
    for name, _, _ in foreign.state:
        place_file(foreign.path / name, target / name)
    if state_of(foreign.path, [name for name, _, _ in foreign.state]) != foreign.state:
        raise Changed
    for number, (name, size, written) in enumerate(foreign.state):
        link = target / name
        if os.stat(link).st_nlink == 1:
            continue  # it is a copy already, or the script has deleted its own
        copy = target / f".copy-{number}"
        copy_file(link, copy)
        now = os.stat(link)
        if (now.st_size, now.st_mtime_ns, os.stat(copy).st_size) != (size, written, size):
            raise Changed
        os.replace(copy, link)


class Adopter:
    """Looks at one epoch's directory until it is closed, on a thread of its own.

    Args:
        run_dir: the run's directory.
        world: the epoch's world.
        origin: for the manifests.
        deliver: gets the same events as for a worker that sealed something or found a bad checkpoint.
    """

    def __init__(
        self, run_dir: Path, world: control_pb2.World, origin: Origin, deliver: Callable[[ev.Event], None]
    ) -> None:
        self._run_dir, self._world, self._origin, self._deliver = run_dir, world, origin, deliver
        self._step = world.resume.source.step if world.HasField("resume") else 0
        self._seen: dict[Path, tuple[Foreign, float]] = {}
        self._said: set[str] = set()
        # Something is new, or has changed: the next look decides.
        self._undecided = False
        self._closing = False
        self._asked = self._answered = 0
        self._news = threading.Condition()
        threading.Thread(target=self._run, name="adoption", daemon=True).start()

    def close(self) -> None:
        """Stops looking. A copy under way is finished, and refused if it comes too late."""
        with self._news:
            self._closing = True
            self._news.notify_all()

    def settle(self, timeout: float) -> None:
        """Waits until everything complete has been adopted, or cannot be; at most `timeout` seconds."""
        with self._news:
            self._asked += 1
            mine = self._asked
            self._news.notify_all()
            self._news.wait_for(lambda: self._closing or self._answered >= mine, timeout)

    def _run(self) -> None:
        directory = save_directory(self._run_dir, self._world.epoch)
        pause, asked = LOOK_EVERY_SECONDS, 0
        while True:
            asked = self._wait(pause, asked)
            if self._closing:
                return
            calm = self._look(directory)
            if not (calm and self._undecided):
                with self._news:
                    self._answered = asked
                    self._news.notify_all()
            # Not every second, because each try may first fill the disk.
            pause = LOOK_EVERY_SECONDS if calm else min(2 * pause, LONGEST_PAUSE_SECONDS)

    def _wait(self, pause: float, asked: int) -> int:
        """Waits for the next look; not if somebody waits for it. Returns how many ever waited, `asked` before."""
        with self._news:
            self._news.wait_for(lambda: self._closing or self._asked > asked, pause)
            return self._asked

    def _look(self, directory: Path) -> bool:
        """Looks at everything newer than what the run has; newest first, because there may be time for no more.

        Returns:
            Whether the file system allowed it.
        """
        try:
            found = candidates(directory)
        except OSError as error:
            self._complain(directory, str(error))
            return False
        calm, self._undecided = True, False
        for step, path in found:
            if self._closing:
                break
            if step < self._world.resume.source.step:
                self._complain(path, _BEGAN_ANEW)
            if step <= self._step:
                continue
            try:
                self._consider(path, step)
            except (FileNotFoundError, Changed):
                # The script deletes old ones during the look, or writes this one again.
                self._undecided = True
            except OSError as error:
                self._complain(path, str(error))
                calm = False
            except (ValueError, CheckpointDamaged) as error:
                self._complain(path, str(error))
        return calm

    def _consider(self, path: Path, step: int) -> None:
        foreign = complete(path, step, self._origin.world_size)
        if foreign is None:
            return
        before, since = self._seen.get(path, (None, 0.0))
        if before != foreign:
            since = time.monotonic()
            self._seen[path] = foreign, since
        # A caller of `settle` makes the look come early.
        if before != foreign or time.monotonic() - since < LOOK_EVERY_SECONDS:
            self._undecided = True
            return
        manifest = adopt(foreign, self._run_dir, self._world, self._origin)
        logger.info("%s was saved by the script as %s", manifest.name, path.name)
        self._step = step
        self._said &= {_BEGAN_ANEW}
        sealed = worker_pb2.Sealed(name=manifest.name, digest=manifest.digest, step=manifest.step)
        self._deliver(ev.WorkerSaid(self._world.epoch, 0, worker_pb2.ToAgent(sealed=sealed)))

    def _complain(self, path: Path, problem: str) -> None:
        """Warns once of a problem, even if the next checkpoint has the same."""
        if problem not in self._said:
            self._said.add(problem)
            self._deliver(ev.ManifestRead(path.name, None, problem))


class Adoption:
    """Adopts checkpoints for one agent, through all epochs. Does nothing for a script that gets no `${save_dir}`.

    Args:
        arguments: the script's arguments.
        deliver: see `Adopter`.
    """

    def __init__(self, arguments: Sequence[str], deliver: Callable[[ev.Event], None]) -> None:
        self._wanted = any(MACRO in argument for argument in arguments)
        self._deliver = deliver
        self._adopter: Adopter | None = None

    def begin(
        self, run_dir: Path, world: control_pb2.World, origin: Origin, arguments: Sequence[str], *, first: bool
    ) -> tuple[str, ...]:
        """Called when an epoch's workers are about to start.

        Args:
            run_dir, world, origin: see `Adopter`.
            arguments: the script's arguments.
            first: whether this agent is the world's first, which is the one that looks.

        Returns:
            The arguments with the epoch's directory in them.

        Raises:
            OSError: the file system says no.
        """
        self.close()
        if not self._wanted:
            return tuple(arguments)
        directory = prepare(run_dir, world)
        if first:
            self._adopter = Adopter(run_dir, world, origin, self._deliver)
        return tuple(argument.replace(MACRO, str(directory)) for argument in arguments)

    def hint(self, world: control_pb2.World, arguments: Sequence[str]) -> str:
        """What people must change for the script to find its resume point; empty if nothing."""
        if not self._wanted or world.resume.form != control_pb2.FORM_UNIVERSAL or FLAG in arguments:
            return ""
        return (
            f"the script resumes at another number of ranks, from universal files, and is not told so: start with "
            f"{FLAG}, which it is handed then, and set checkpoint.load_universal in DeepSpeed's config where it has it"
        )

    def settle(self, timeout: float = SETTLE_WITHIN_SECONDS) -> None:
        """Called when a worker has ended well: adopts its last save before its end is reported. From any thread."""
        adopter = self._adopter
        if adopter is not None:
            adopter.settle(timeout)

    def close(self) -> None:
        """Called when the epoch is over."""
        if self._adopter is not None:
            self._adopter.close()
            self._adopter = None
