"""What happens when a session is opened: the greeting to the agent, a directory's lock, a resume point."""

from __future__ import annotations

import contextlib
import logging
import os
import socket
import tempfile
import time
from collections.abc import Iterable, Iterator, Sequence
from itertools import chain, repeat
from pathlib import Path
from typing import Any, NoReturn

from dalsegno.protos import control_pb2, worker_pb2
from dalsegno.protos.contract import WORKER_PROTOCOL
from dalsegno.protos.processes import boot_id, namespace

from ..checkpoint import SHARDED, UNIVERSAL, CheckpointStore, LocalLock
from ..rank import rng
from ..rank.agreement import Refusal, Trouble
from ..rank.board import open_board
from ..rank.collective import Collective
from ..rank.exits import EXIT_BAD_CHECKPOINT, BadResumePoint, insist
from ..rank.identity import Identity
from ..rank.link import Link
from ..saving.background_save import OUT_OF_SIGHT_SECONDS
from ..saving.resuming import Damaged, Judge, ResumePoint, Work, check_loaders
from ..saving.save_errors import describe
from ..saving.sight import SIGHT_PAUSES_SECONDS
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

    Where the ranks are on several machines, or have several paths, rank 0 makes a file there for a moment, and the
    others look for it.

    Raises:
        Refusal: They were not. Raised on all ranks.
        Trouble: Some rank cannot use its directory, and another start may succeed. Raised on all ranks.
    """
    told = collective.gather({"path": _real(directory), "host": _host()})
    paths, hosts = [one["path"] for one in told], [one["host"] for one in told]
    if len(set(paths)) == 1 and all(_is_same(host, hosts[0]) for host in hosts[1:]):
        return
    with _probe(directory, collective) as (name, why):
        if why:
            raise Trouble(_unusable(paths, 0, "written", why))
        here = _is_same(hosts[collective.rank], hosts[0])
        answers = collective.gather(_seen(directory, name, () if here else _pauses()))
    for rank, answer in enumerate(answers):
        if not (answer["seen"] or answer["why"]):
            one, other = (f"{paths[of]} on rank {of}{_named(hosts, of)}" for of in (0, rank))
            wrong = f", which are not the same directory: what rank 0 writes is not there on rank {rank}"
            if not _is_same(hosts[rank], hosts[0]):
                wrong = (
                    f": what rank 0 writes has not come into sight on rank {rank} within {OUT_OF_SIGHT_SECONDS:g} s: "
                    "it is not the same directory, or a mount that caches names"
                )
            raise Refusal(f"checkpoint_dir is {one} and {other}{wrong}. Give all ranks one that all of them see")
    for rank, answer in enumerate(answers):
        if answer["why"]:
            raise Trouble(_unusable(paths, rank, "read", answer["why"]))


@contextlib.contextmanager
def _probe(directory: Path, collective: Collective) -> Iterator[tuple[str, str]]:
    """The name of a file that rank 0 has made in the directory, and why it could not, on all ranks. Collective."""
    made, why = "", ""
    try:
        if collective.rank == 0:
            try:
                directory.mkdir(parents=True, exist_ok=True)
                number, made = tempfile.mkstemp(prefix=".dalsegno-probe-", dir=directory)
                os.close(number)
            except FileExistsError:
                why = "it is no directory"
            except (OSError, MemoryError) as error:
                why = _why(error)
        name, why = collective.broadcast([os.path.basename(made), why])
        yield name, why
    finally:
        if made:
            # Whoever had to see it has, and says what is wrong with the directory where something is.
            with contextlib.suppress(OSError):
                os.unlink(made)


def _seen(directory: Path, name: str, pauses: Iterable[float]) -> dict[str, Any]:
    """Whether the directory has the file, as seen from here, and why it could not be looked at.

    Args:
        directory, name: Where the file was made, and its name.
        pauses: Seconds before each further look.
    """
    answer: dict[str, Any] = {}
    for pause in chain((0.0,), pauses):
        time.sleep(pause)  # why: no event tells when a file of another machine comes into sight over NFS
        try:
            answer = {"seen": _lists(directory, name), "why": ""}
        except (OSError, MemoryError) as error:
            answer = {"seen": False, "why": _why(error)}
        if answer["seen"]:
            break
    return answer


def _pauses() -> Iterator[float]:
    """Seconds between looks for another machine's file, until one gives up, as a save does."""
    left, last = OUT_OF_SIGHT_SECONDS, SIGHT_PAUSES_SECONDS[-1]
    for pause in chain(SIGHT_PAUSES_SECONDS, repeat(last)):
        if left <= 0:
            return
        yield min(pause, left)
        left -= pause


def _why(error: OSError | MemoryError) -> str:
    """Why a directory cannot be used; never empty."""
    return getattr(error, "strerror", None) or describe(error)


def _lists(directory: Path, name: str) -> bool:
    # NFS remembers for up to a minute which names it has not found. It asks anew where the directory above is opened.
    for above in reversed(Path(os.path.realpath(directory)).parents):
        with contextlib.suppress(OSError):
            os.close(os.open(above, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC))
    try:
        return name in os.listdir(directory)
    except FileNotFoundError:
        return False


def _real(directory: Path) -> str:
    return os.path.realpath(directory)


def _host() -> list[str]:
    """This machine, and the mounts that this process sees: containers of one machine have several. "": unknown."""
    try:
        boot = boot_id()
    except (OSError, ValueError):
        boot = ""
    return [socket.gethostname(), boot, namespace("mnt")]


def _is_same(host: Sequence[str], other: Sequence[str]) -> bool:
    """Whether two ranks certainly see the same directory under one path."""
    return all(host) and host == other


def _named(hosts: Sequence[Sequence[str]], rank: int) -> str:
    several = any(host[0] != hosts[0][0] for host in hosts)
    return f" ({hosts[rank][0]})" if several else ""


def _unusable(paths: Sequence[str], rank: int, how: str, why: str) -> str:
    return (
        f"checkpoint_dir {paths[rank]} cannot be {how} on rank {rank} ({why}): mend that, or give all ranks another"
        " directory"
    )


def take_lock(directory: Path, collective: Collective) -> LocalLock | None:
    """The lock of a directory that no master watches over, on rank 0. Collective.

    Raises:
        RuntimeError: It is in use, or cannot be made. Raised on all ranks.
    """
    lock = problem = None
    if collective.rank == 0:
        lock = LocalLock(directory)
        try:
            lock.acquire()
        except (OSError, RuntimeError, MemoryError) as error:
            problem = str(error) or type(error).__name__
    problem = collective.broadcast(problem)
    if problem is not None:
        raise RuntimeError(problem)
    return lock


def next_epoch(store: CheckpointStore, collective: Collective) -> int:
    """The epoch of a start that no master counts, above all in the run's directory; alike on all ranks. Collective.

    Raises:
        OSError: Rank 0 cannot read the directory. Raised on all ranks.
    """
    epoch, problem = 0, ""
    if collective.rank == 0:
        try:
            epoch = store.next_epoch()
        except (OSError, MemoryError) as error:
            problem = f"{store.run_dir} cannot be read: {describe(error)}"
    epoch, problem = collective.broadcast([epoch, problem])
    if problem:
        raise OSError(problem)
    return int(epoch)


def restore_rng(resume: ResumePoint | None, seed: int | None, step: int, rank: int, world_size: int) -> None:
    """Restores the random generators as the run left them, see ``Session.restore_rng``.

    Raises:
        OSError: The checkpoint has this rank's, and it does not see them: others would draw on, this rank anew.
        ValueError: They are none.
    """
    if seed is not None or resume is not None:
        # Also if there is a state, which may lack a generator: a run on CPUs saves none for cards.
        rng.seed_rank(seed or 0, step, rank)
    if resume is not None and resume.form == SHARDED and resume.manifest.shape.world_size == world_size:
        state = rng.file_name(rank)
        if resume.sees(state):
            rng.restore((resume.path / state).read_bytes())
