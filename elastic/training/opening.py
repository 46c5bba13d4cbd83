"""What happens when a session is opened: the greeting to the agent, a directory's lock, a bad resume point."""

from __future__ import annotations

import contextlib
import logging
import os
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import NoReturn

from dalsegno.protos import control_pb2, worker_pb2
from dalsegno.protos.contract import WORKER_PROTOCOL

from ..checkpoint import SHARDED, UNIVERSAL, LocalLock
from ..rank.agreement import Refusal
from ..rank.board import open_board
from ..rank.collective import Collective
from ..rank.exits import EXIT_BAD_CHECKPOINT, BadResumePoint, insist
from ..rank.identity import Identity
from ..rank.link import Link
from ..saving.resuming import Damaged, Judge, ResumePoint, Work, check_loaders
from ..saving.verification import JointVerification, Note

log = logging.getLogger(__name__)

_FORMS = {SHARDED: control_pb2.FORM_SHARDED, UNIVERSAL: control_pb2.FORM_UNIVERSAL}


def hello(identity: Identity) -> worker_pb2.Hello:
    """The first message to the agent."""
    return worker_pb2.Hello(
        protocol=WORKER_PROTOCOL,
        epoch=identity.epoch,
        rank=identity.rank,
        local_rank=identity.local_rank,
        pid=os.getpid(),
    )


def refuse(link: Link | None, damaged: Damaged) -> NoReturn:
    """Reports to the agent a resume point that cannot be loaded, and ends this process with exit code 84.

    Raises:
        BadResumePoint: Always.
    """
    insist(EXIT_BAD_CHECKPOINT)
    log.error("the resume point %s cannot be loaded: %s", damaged.ref.name, damaged.message)
    report(link, damaged)
    raise BadResumePoint


def report(link: Link | None, damaged: Damaged) -> None:
    """Tells the agent of the damage, if this rank has found it. Any thread."""
    if link is not None and damaged.found_here:
        bad = worker_pb2.BadCheckpoint(
            name=damaged.ref.name,
            digest=damaged.ref.digest,
            form=_FORMS[damaged.form],
            file=damaged.file,
            message=damaged.message,
        )
        link.send(worker_pb2.ToAgent(bad_checkpoint=bad))


def beside(collective: Collective, link: Link, work: Work, judge: Judge) -> JointVerification:
    """Has the ranks verify what they start from while their scripts build what will load it. Collective.

    The agent hears of damage as soon as the ranks do; each ends where its script asks for the files, or before its
    first step.
    """

    def found(notes: Sequence[Note]) -> None:
        with contextlib.suppress(OSError):  # it could not be read: the ranks learn that where they ask
            if (damaged := judge(notes)) is not None:
                report(link, damaged)

    def judged(notes: Sequence[Note]) -> None:
        if (damaged := judge(notes)) is not None:
            refuse(None, damaged)

    return JointVerification(
        open_board(collective, "verification"), collective.rank, collective.world_size, work, found, judged
    )


def check_world(resume: ResumePoint, world_size: int) -> None:
    """Checks that this many ranks can load the resume point.

    Raises:
        RuntimeError: They cannot: each would load another rank's part, or none.
    """
    shape = resume.manifest.shape
    check_loaders(resume.manifest, world_size)
    if resume.form == SHARDED and not shape.loads_at(world_size):
        raise RuntimeError(
            f"{resume.ref.name} was written by {shape.world_size} ranks with strategy {shape.strategy}, which loads at "
            f"no other number (there are {world_size}): start as many. If it does load at any, say so when saving, "
            "with any_world_size=True"
        )


def check_directory(directory: Path, collective: Collective) -> None:
    """Checks that all ranks were given the same directory, whose path may differ between mounts. Collective.

    Raises:
        Refusal: They were not. Raised on all ranks.
    """
    paths = collective.gather(os.path.realpath(directory))
    if len(set(paths)) == 1:
        return
    made: str | None = None
    if collective.rank == 0:
        with contextlib.suppress(OSError):
            directory.mkdir(parents=True, exist_ok=True)
            number, path = tempfile.mkstemp(prefix=".dalsegno-probe-", dir=directory)
            os.close(number)
            made = os.path.basename(path)
    name = collective.broadcast(made)
    seen = collective.gather(name is not None and (directory / name).exists())
    if made is not None:
        (directory / made).unlink(missing_ok=True)
    if not all(seen):
        other = seen.index(False)
        raise Refusal(
            f"checkpoint_dir is {paths[0]} on rank 0 and {paths[other]} on rank {other}, which are not the same"
            " directory: give all ranks one that all of them see"
        )


def take_lock(directory: Path, collective: Collective) -> LocalLock | None:
    """The lock of a directory that no master watches over, on rank 0. Collective.

    Raises:
        RuntimeError: It is in use, or cannot be made. Raised on all ranks.
    """
    lock = None
    problem = None
    if collective.rank == 0:
        lock = LocalLock(directory)
        try:
            lock.acquire()
        except (OSError, RuntimeError) as error:
            problem = str(error)
    problem = collective.broadcast(problem)
    if problem is not None:
        raise RuntimeError(problem)
    return lock
