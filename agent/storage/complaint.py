"""Tells people why a directory cannot be used by this node: the checkpoint directory, and those of other flags."""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import pwd
import shlex
import stat
from collections.abc import Callable
from pathlib import Path

from dalsegno.elastic.checkpoint.errors import printable
from dalsegno.protos.shortage import shortage

from .private import PRIVATE

__all__ = [
    "Complaint",
    "FailingError",
    "UnreadableError",
    "is_forbidden",
    "not_made",
    "of_another",
    "unread",
    "unreadable",
    "unwritable",
    "user",
]

# The most things of which people are warned once each.
_MOST_WARNINGS = 100

logger = logging.getLogger(__name__)


class UnreadableError(OSError):
    """A checkpoint that may be the newest is there, but not for this user: one line that says what to change."""


class FailingError(UnreadableError):
    """As that one, but nobody forbids it: the file system fails, for this reason."""

    reason = ""


class Complaint:
    """Why the directory cannot be read, once for each reason until it can. Thread-safe enough: a line may come twice.

    The master only hears that a node does not see the directory. The reason is the node's own.

    Attributes:
        say: prints one line for people.
    """

    def __init__(self) -> None:
        self.say: Callable[[str, bool], None] = lambda text, warning: None
        self._told: set[int | str | None] = set()
        self._once: set[str] = set()

    def __call__(self, error: Exception) -> None:
        """Notes why it could not be read. That it is not there is the master's to say."""
        kind: int | str | None
        kind, text = (error.errno, str(error)) if isinstance(error, OSError) else (type(error).__name__, repr(error))
        if isinstance(error, UnreadableError):
            kind = text
        told = kind in self._told
        # Somebody may look for days.
        logger.log(logging.DEBUG if told else logging.WARNING, "the checkpoint directory cannot be read: %s", text)
        self._told.add(kind)
        if isinstance(error, UnreadableError) and not told:
            self.say(text, True)
        elif not told and not isinstance(error, FileNotFoundError):
            why = shortage(error) or printable(text)
            self.say(f"this node cannot read the checkpoint directory: {why}", True)

    def once(self, thing: str, text: str) -> None:
        """Warns people of what has gone wrong, once of each thing: the text may have other numbers each time."""
        if thing not in self._once and len(self._once) < _MOST_WARNINGS:
            self._once.add(thing)
            self.say(text, True)

    def over(self) -> None:
        """It was read."""
        self._told.clear()


def unwritable(root: Path, error: OSError) -> str:
    """Why a checkpoint directory cannot be written, and what to do, in one line.

    Args:
        root: the checkpoint directory.
        error: what came of an attempt to make something in it.
    """
    why = error.strerror or str(error)
    known = of_another(root, error) or _of_link(root, "--checkpoint-dir", error)
    return known or (
        f"the checkpoint directory {root} cannot be written ({why}); choose another with --checkpoint-dir, or fix its"
        " permissions"
    )


def unread(root: Path, error: OSError) -> str:
    """Why nothing can be told of a checkpoint directory, in one line. Args: as of `unwritable`."""
    if isinstance(error, UnreadableError):
        return str(error)
    return of_another(root, error) or f"the checkpoint directory cannot be read: {error}"


def not_made(flag: str, directory: str | Path, error: OSError) -> str:
    """Why another flag's directory cannot be made, and what to do, in one line.

    Args:
        flag: what a person gave it with.
        directory: as they gave it.
        error: what came of the attempt.
    """
    why = error.strerror or str(error)
    return _of_link(Path(directory).absolute(), flag, error) or (
        f"{flag}: {directory} cannot be written ({why}); choose another, or make it writable"
    )


def _of_link(directory: Path, flag: str, error: OSError) -> str:
    """Which link on the way to a directory leads nowhere, as to a volume that is not mounted; empty: none does."""
    # Whoever may not look behind a link does not know what is there.
    for path in (directory, *directory.parents) if isinstance(error, (FileExistsError, FileNotFoundError)) else ():
        if os.path.islink(path) and not os.path.exists(path):
            what = "mount or make that, or choose another"
            return f"{path} is a link to {os.readlink(path)}, which is not there: {what} {flag}"
    return ""


def of_another(root: Path, error: OSError) -> str:
    """Which directory of another user is in the way, and what to do, in one line; empty: it is something else.

    Args:
        root, error: as in `unwritable`, of any attempt.
    """
    path = _in_the_way(root, error)
    found, within = _found(path), path == root or root in path.parents
    if found is not None and is_forbidden(error) and within and found.st_uid != os.geteuid():
        other = " or --job-id" if path not in (root / PRIVATE, root) else ""
        return (
            f"{path} belongs to {user(found.st_uid)} (mode {stat.S_IMODE(found.st_mode):o}), and"
            f" {user(os.geteuid())} cannot use it ({error.strerror}): let one user run all of a job, or give another"
            f" --checkpoint-dir{other}"
        )
    return ""


def is_forbidden(error: OSError) -> bool:
    """Whether a file may be there, but this user may not read it: that says nothing of its being gone."""
    return error.errno in (errno.EACCES, errno.EPERM)


def unreadable(directory: Path, error: OSError) -> UnreadableError:
    """Whose a checkpoint is that this user may not read, or that nobody can, and what to do, in one line.

    Args:
        directory: the checkpoint's.
        error: what came of reading its manifest. It does not say that none is there.
    """
    if not is_forbidden(error):
        # A rename reads nothing of it. Of a run that trains elsewhere it would take the newest checkpoint.
        move = f"mv {shlex.quote(str(directory))} {shlex.quote(str(_aside(directory)))}"
        reason = error.strerror or str(error)
        failing = FailingError(
            f"{directory.name} is there, and may be the newest checkpoint, but the file system does not let it be read"
            f" ({reason}). This node does not start without it: mend the mount or disk. If other nodes cannot read it"
            f" either, and none trains, the run goes back without it after `{move}`; another --job-id begins anew"
        )
        failing.reason = reason
        return failing
    path = _in_the_way(directory, error)
    found, me = _found(path), os.geteuid()
    # Whoever runs the job has made the run's directory.
    run = _found(directory.parent)
    ours = run is not None and run.st_uid == me
    # The rest of a checkpoint is as closed as the first file in it that is met.
    within = path == directory or directory in path.parents
    whole = shlex.quote(str(directory if within else path))
    help_, whose = f"let {user(me)} read it", ""
    if found is not None:
        whose = f": {path} belongs to {user(found.st_uid)} (mode {stat.S_IMODE(found.st_mode):o}), this agent is of"
        whose += f" {user(me)}"
        if found.st_uid == me and _lets_its_owner(found):
            help_ = "let it be read (a rule of the mount forbids it: ACL, SELinux)"
        elif found.st_uid == me:
            help_ = f"let it be read (`chmod -R u+rwX {whole}`)"
        elif ours:
            like = shlex.quote(str(directory.parent))
            help_ = (
                "let one user run all of a job, and give that user what is there (as root: `chown -R"
                f" --reference={like} {whole}`)"
            )
        else:
            help_ = f"let {user(found.st_uid)} run all of the job, as before"
    if ours and within:
        # The owner of a directory may rename another's in it, also one that only that user may enter.
        aside = shlex.quote(str(_aside(directory)))
        help_ += f", or, to go back without it: `mv {whole} {aside}`"
    return UnreadableError(
        f"{directory.name} is there, and may be the newest checkpoint, but this agent cannot read it"
        f" ({error.strerror}){whose}. The run does not go on without it: {help_}; another --job-id begins anew"
    )


def _aside(directory: Path) -> Path:
    """A name under which nobody takes it for a checkpoint."""
    return directory.with_name(f"aside-{directory.name}")


def _lets_its_owner(found: os.stat_result) -> bool:
    """Whether the mode lets the owner read the file, or a directory's files."""
    needed = stat.S_IRUSR | (stat.S_IXUSR if stat.S_ISDIR(found.st_mode) else 0)
    return found.st_mode & needed == needed


def _in_the_way(root: Path, error: OSError) -> Path:
    """What cannot be used. Of what cannot be entered nothing is known: then it is the nearest directory above."""
    path = Path(os.fsdecode(error.filename)) if error.filename else root
    while not os.path.lexists(path) and path != path.parent:
        path = path.parent
    return path


def _found(path: Path) -> os.stat_result | None:
    with contextlib.suppress(OSError):  # it may go in this moment
        return os.lstat(path)
    return None


def user(number: int) -> str:
    """A user in a line for people: by name, if it has one."""
    try:
        return f"user {pwd.getpwuid(number).pw_name}"
    except KeyError:
        return f"user {number}"
