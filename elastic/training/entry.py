"""Opens the session of this process, once, from its environment."""

from __future__ import annotations

import gc
import logging
import threading
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import torch.distributed as dist

from dalsegno.protos import ahead
from dalsegno.protos.trace import mark

from ..checkpoint import CheckpointStore
from ..data.loaders import shield_loaders
from ..rank.address import put_back
from ..rank.agreement import agree
from ..rank.collective import Collective, GlooCollective, Solo
from ..rank.exits import end_if_decided
from ..rank.gloo_threads import settle_at_exit
from ..rank.identity import Identity, from_environment
from ..rank.link import Link
from ..rank.meetings import Meetings, may_be_a_peers, watch_for_refusals, watch_the_end
from ..rank.notices import Notice, noticed
from ..rank.semaphores import name_semaphores
from ..rank.way_in import SESSION, watch, way_in
from ..saving.resuming import Damaged, handed_out, newest
from .examination import is_examined
from .opening import beside, check_directory, check_world, hello, next_epoch, refuse, take_lock
from .session import BareSession
from .staying import wait_for_a_place
from .unopened import is_unopened, unopened

log = logging.getLogger(__name__)

# The session of this process, and how many it had before.
_sessions: list[BareSession] = []
_before = [0]
# Whether it reads what it resumes from before anything is loaded.
_verifies = [True]
S = TypeVar("S", bound=BareSession)
# From here on, because a script may make its process group before it opens its session.
watch()


def open_session(kind: type[S], checkpoint_dir: str | Path | None = None, *, keep: int = 0, verify: bool = True) -> S:
    """The session of this process. A second call returns the first one's, until that one is closed.

    Where it comes from, what it does with signals, and its other arguments: see ``script.session.session``.

    Args:
        kind: The class of a new session.

    Raises:
        RuntimeError: The environment is incomplete, the directory is in use or some rank cannot use it, the checkpoints
            there do not fit, or the session of this process has another directory. Or it is closed, and this is
            ``dlrover-run``.
        ValueError: The ranks were given directories that are not the same.
        OSError: The agent or the directory cannot be reached.
        BadResumePoint: The resume point is damaged; the agent was told. Exit code 84.
    """
    end_if_decided()
    directory = None if checkpoint_dir is None else Path(checkpoint_dir).absolute()
    if _sessions and is_unopened(_sessions[0]):
        pass  # It is the one of this process, and nobody has used it.
    elif _sessions and _sessions[0].closed:
        _check_may_follow(_sessions[0])
        _sessions.clear()
        _before[0] += 1
    if _sessions:
        _check_same_run(_sessions[0], directory)
    else:
        _verifies[:] = [verify]
        begins = partial(_begin, directory=directory, keep=keep, verify=verify)
        running = ahead.running()
        _sessions.append(begins(kind) if running is None else unopened(kind, begins, running))
    found = _sessions[0]
    assert isinstance(found, kind)
    return found


def _begin(kind: Callable[..., S], directory: Path | None, keep: int, verify: bool) -> S:
    put_back()
    way_in.at(SESSION)
    return _enter(kind, directory, keep, verify)


def _enter(
    kind: Callable[..., S], directory: Path | None, keep: int, verify: bool, unread: Collection[str] | None = None
) -> S:
    mark("session")
    name_semaphores()
    found = _open(kind, from_environment(checkpoint_dir=directory), keep, verify, unread)
    if found.resume is None or found.resume.verification is None:
        mark("verified")
    return found


def move(
    session: BareSession,
    held: Mapping[str, str],
    unread: Collection[str] = (),
    *,
    broken: bool = False,
    before: Callable[[], None] = lambda: None,
) -> None:
    """Leaves the present world, waits for a place in the next one, and enters that as those do that begin there.

    What their ranks call between that and the training is the caller's business (``way_in.again``).

    The session of this process is then open in the same object. What it was told before stays with it.

    Args:
        held: What this process holds, see ``protos.staying.Wait``.
        unread: Files of the resume point that this process will not read, because it has what is in them.
        broken: The present world has.
        before: What new processes do before they open their session, besides that.

    Raises:
        Drained: There is no place.
        OSError, RuntimeError, BadResumePoint: As with ``open_session``.
    """
    if dist.is_initialized():
        dist.destroy_process_group()
    BareSession.close(session)
    gc.collect()
    wait_for_a_place(held, broken=broken)
    before()
    way_in.again(SESSION)
    tracked = session.tracking.tracked

    def again(*arguments: Any, **options: Any) -> BareSession:
        session.__init__(*arguments, **options)  # type: ignore[misc]  # everything in it is of one world
        return session

    _enter(again, None, session.saves.keep, _verifies[0], unread)
    if tracked is not None:
        session.tracking.track(tracked)
    log.info("epoch %d: this process has stayed, as rank %d of %d", session.epoch, session.rank, session.world_size)


def is_begun() -> bool:
    """Whether this process has a session that is not over."""
    return bool(_sessions) and (is_unopened(_sessions[0]) or not _sessions[0].closed)


def refused_together() -> AbstractContextManager[None]:
    """``Meetings.together`` of this process's session, if it has one that is not over; else nothing. Collective."""
    found = _sessions[0] if _sessions and not is_unopened(_sessions[0]) else None
    return nullcontext() if found is None or found.meetings.over else found.meetings.together()


def _check_same_run(first: BareSession, directory: Path | None) -> None:
    if not is_unopened(first) and first.alone and directory is not None and directory != first.run_dir:
        raise RuntimeError(
            f"this process has a session with checkpoint_dir={first.run_dir}, and trains that run alone, not one in "
            f"{directory}, too: leave the first one before (`with session(...) as s:`), or use another process"
        )


def _check_may_follow(before: BareSession) -> None:
    if not before.alone:
        raise RuntimeError(
            "under dlrover-run a process trains one run, whose session was left: start each run with a dlrover-run of "
            "its own"
        )


def _open(
    kind: Callable[..., S], identity: Identity, keep: int, verify: bool, unread: Collection[str] | None = None
) -> S:
    notice = Notice()
    try:
        return _open_with(kind, notice, identity, keep, verify, unread)
    except BaseException:
        notice.release()
        raise


def _check_thread(identity: Identity, collective: Collective) -> None:
    """Raises OtherThread if another thread opens the session than may go on with it. The agent is told."""
    if threading.current_thread() is threading.main_thread():
        return
    with _linked(identity) as link:
        Meetings(collective, link).check_thread()


@contextmanager
def _linked(identity: Identity) -> Iterator[Link | None]:
    """A connection to the agent, if there is one, for what is said without a session."""
    link = None if identity.socket is None else Link(identity.socket, hello(identity))
    try:
        yield link
    finally:
        if link is not None:
            link.close()


def tell_of_refusals() -> None:
    """From here on the agent learns if this process ends by what we refuse, before its session as well as behind it.

    It would be refused at each start.
    """
    watch_for_refusals(_tell_refusal)


def _tell_refusal(text: str) -> None:
    # A process without a place has nobody to tell.
    with suppress(OSError, RuntimeError), _linked(from_environment()) as link:
        Meetings(Solo(), link).refused(text)


@contextmanager
def _telling_of_peers(meetings: Meetings) -> Iterator[None]:
    """The agent learns whether a peer's end is why this block fails. Later `watch_the_end` sees to that."""
    try:
        yield
    except Exception as error:
        if may_be_a_peers(error) or (error.__cause__ is not None and may_be_a_peers(error.__cause__)):
            meetings.say_if_a_peer_is_lost()
        raise


def _open_with(
    kind: Callable[..., S], notice: Notice, identity: Identity, keep: int, verify: bool, unread: Collection[str] | None
) -> S:
    """``unread``: as in ``move``; None in a process that begins here, and has something to build meanwhile.

    The others do what it has to do with them in any case: one world may have ranks of both kinds.
    """
    collective: Collective = Solo()
    if identity.world_size > 1:
        # All ranks open their sessions in the same order, so these have numbers.
        collective = GlooCollective(identity.rank, identity.world_size, identity.epoch, number=_before[0])
        mark("met")
    _check_thread(identity, collective)
    if identity.socket is None:  # dlrover-run's workers end without what could meet these threads.
        settle_at_exit()  # a world of one rank has them, too, once its model is wrapped
    link = lock = resume = None
    if identity.socket is not None:
        # Watch before the agent hears that there is a session: from then on it expects this rank to save.
        notice.watch(noticed())
        link = Link(identity.socket, hello(identity))
        if identity.resume is not None and identity.run_dir is not None:
            with _telling_of_peers(Meetings(collective, link)):
                point = handed_out(
                    identity.resume,
                    identity.run_dir,
                    collective,
                    verify=verify,
                    identity=identity,
                    unread=unread or (),
                    beside=partial(beside, collective, link),
                )
                if unread is not None and not isinstance(point, Damaged):
                    point.wait()
            if isinstance(point, Damaged):
                refuse(link, point)
            try:
                check_world(point, identity.world_size)
            except RuntimeError as error:
                point.end()
                Meetings(collective, link).refused(str(error))
                raise
            resume = point
    else:
        # Compared before any rank acts on it, because ranks without a directory would not take part.
        agree(collective, {"a checkpoint_dir is given": identity.run_dir is not None})
        if identity.run_dir is not None and not is_examined():
            check_directory(identity.run_dir, collective)
    if identity.socket is None and identity.run_dir is not None:
        # The doctor changes nothing, and may look at a run that goes on.
        lock = None if is_examined() else take_lock(identity.run_dir, collective)
        store = CheckpointStore(identity.run_dir)
        resume = newest(store, collective, identity.world_size, verify=verify)
        # Nobody counts epochs here, but names and manifests need them: after the run has gone back to an earlier
        # checkpoint, what it then saves must be newer than what it left.
        identity = replace(identity, epoch=next_epoch(store, collective))
        if resume is not None:
            identity = replace(identity, job_id=resume.manifest.job_id, run_id=resume.manifest.run_id)
    if not identity.alone or identity.run_dir is not None:
        notice.watch(noticed())
        shield_loaders()
    found = kind(identity, collective, link=link, lock=lock, resume=resume, keep=keep, notice=notice)
    if link is not None:
        watch_the_end(found.meetings, lambda: found.survivor.peer_lost(False))
    return found
