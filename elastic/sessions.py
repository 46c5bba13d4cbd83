"""The session of this process: found in its environment, opened once."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from .checkpoint import CheckpointStore
from .collective import Collective, GlooCollective, Solo
from .identity import Identity, from_environment
from .link import Link
from .loaders import shield_loaders
from .notices import Notice, noticed
from .opening import check_world, hello, refuse, take_lock
from .resuming import Damaged, handed_out, newest
from .worker_session import Session

_sessions: list[Session] = []


def session(checkpoint_dir: str | Path | None = None, *, keep: int = 0, verify: bool = True) -> Session:
    """The session of this process; a second call gives the first one's.

    Under ``dlrover-run`` everything comes from the environment. Outside, the world is torchrun's or one rank, and with
    a ``checkpoint_dir`` the newest sound checkpoint there is the resume point and SIGTERM saves before it stops. So do,
    under ``dlrover-run``, all signals that its agent takes for a notice to leave. DataLoader processes that are started
    afterwards pass over them, so that they are there for the step that is saved.

    Args:
        checkpoint_dir: Only for use outside ``dlrover-run``, which has its own.
        keep: Outside ``dlrover-run``: how many checkpoints to keep; 0: all.
        verify: Read the resume point's files and compare their checksums before anything is loaded.

    Raises:
        RuntimeError: The environment is incomplete, the directory is in use, or the checkpoints there do not fit.
        OSError: The agent or the directory cannot be reached.
        BadResumePoint: The resume point is damaged; the agent was told. Exit code 84.
    """
    if not _sessions:
        directory = None if checkpoint_dir is None else Path(checkpoint_dir).absolute()
        _sessions.append(_open(from_environment(checkpoint_dir=directory), keep, verify))
    return _sessions[0]


def _open(identity: Identity, keep: int, verify: bool) -> Session:
    notice = Notice()
    try:
        return _open_with(notice, identity, keep, verify)
    except BaseException:
        notice.release()
        raise


def _open_with(notice: Notice, identity: Identity, keep: int, verify: bool) -> Session:
    collective: Collective = Solo()
    if identity.world_size > 1:
        collective = GlooCollective(identity.rank, identity.world_size, identity.epoch)
    link = lock = resume = None
    if identity.socket is not None:
        # Before the agent hears that there is a session: from then on it expects this rank to save.
        notice.watch(noticed())
        link = Link(identity.socket, hello(identity))
        if identity.resume is not None and identity.run_dir is not None:
            found = handed_out(identity.resume, identity.run_dir, collective, verify=verify)
            if isinstance(found, Damaged):
                refuse(link, found)
            check_world(found, identity.world_size)
            resume = found
    elif identity.run_dir is not None:
        lock = take_lock(identity.run_dir, collective)
        store = CheckpointStore(identity.run_dir)
        resume = newest(store, collective, identity.world_size)
        # Nobody counts epochs here. Names and manifests need them all the same: where the run goes back to an earlier
        # checkpoint, what it makes from there is newer than what it left.
        identity = replace(identity, epoch=collective.broadcast(store.next_epoch() if identity.rank == 0 else None))
        if resume is not None:
            identity = replace(identity, job_id=resume.manifest.job_id, run_id=resume.manifest.run_id)
    if not identity.alone or identity.run_dir is not None:
        notice.watch(noticed())
        shield_loaders()
    return Session(identity, collective, link=link, lock=lock, resume=resume, keep=keep, notice=notice)
