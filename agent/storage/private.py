"""A job's private directory, `.dalsegno/<job>`: only files of its owner are trusted.

Others may be able to write the checkpoint directory. A planted token would let them in to the job's master. A planted
claim would make the agent end a stranger's process. A planted link as log file would make it write anywhere.
"""

from __future__ import annotations

import contextlib
import errno
import os
import secrets
import stat
import time
from pathlib import Path

__all__ = ["PRIVATE", "NotPrivateError", "check_private", "open_private", "put_aside", "read_private"]

# Below the checkpoint directory; below it each job has one.
PRIVATE = ".dalsegno"
# The most bytes of a file of ours.
_MOST_READ_BYTES = 1 << 16
_MOST_PUT_ASIDE = 9
# Owners of the directories that this process has checked: who owns the one above can put another in the place of one.
_checked: dict[Path, int] = {}
# How often an empty file is looked at, and seconds between two looks.
PUBLISHED_TRIES, PUBLISHED_PAUSE_SECONDS = 40, 0.05


class NotPrivateError(OSError):
    """It belongs to another user, or others can write it; one line that says what to change."""


def check_private(directory: Path) -> None:
    """Checks that `directory` is ours, and that nobody else can write it. From then on only our files count in it.

    Ours is what belongs to the user to whom the file system assigns a file that we make there: with NFS and
    `root_squash` that is not the user who runs this.

    Raises:
        NotPrivateError: it is not ours alone.
        OSError: nothing can be written there.
    """
    found = os.lstat(directory)
    if not stat.S_ISDIR(found.st_mode):
        raise NotPrivateError(f"{directory} is a link or a file: delete it, the agent makes a directory of its own")
    if found.st_uid not in (os.geteuid(), owner := _owner_of_ours(directory)):
        raise NotPrivateError(
            # Not to delete it: its user's run may be live, whose master and token are in it.
            f"{directory} belongs to user {found.st_uid}, what this agent makes there to user {owner}: let one user"
            f" run all of a job, so run this as user {found.st_uid}, or give another --job-id or --checkpoint-dir"
        )
    if found.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        raise NotPrivateError(
            f"{directory} can be written by others (mode {stat.S_IMODE(found.st_mode):o}), so nothing in it proves"
            " anything: if nobody else did, `chmod go-w` it, else, while no node runs the job, delete it; where the"
            " mount gives all files this mode, give another --checkpoint-dir"
        )
    _checked[directory] = found.st_uid


def _owner_of_ours(directory: Path) -> int:
    trial = directory / f".owner-{secrets.token_hex(8)}"
    descriptor = os.open(trial, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    try:
        return os.fstat(descriptor).st_uid
    finally:
        os.close(descriptor)
        os.unlink(trial)


def open_private(path: Path, flags: int, *, secret: bool = False) -> int:
    """Opens a regular file that belongs to its directory's owner; never a link, and never waiting for a pipe.

    Args:
        path: in a private directory.
        flags: as for os.open; a new file is readable and writable for its owner only.
        secret: others may not even read it.

    Raises:
        NotPrivateError: it is a link or no file, or belongs to another user.
        OSError: it cannot be opened.
    """
    try:
        descriptor = os.open(path, flags | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, 0o600)
    except OSError as error:
        if error.errno in (errno.ELOOP, errno.ENXIO, errno.EISDIR):
            raise NotPrivateError(f"{path} is no regular file: delete it, the agent makes its own") from error
        raise
    try:
        _check_file(path, os.fstat(descriptor), secret)
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor


def _check_file(path: Path, found: os.stat_result, secret: bool) -> None:
    now = os.stat(path.parent).st_uid
    owner = _checked.get(path.parent, now)
    if not stat.S_ISREG(found.st_mode):
        raise NotPrivateError(f"{path} is no regular file: delete it, the agent makes its own")
    if found.st_uid != owner != now:
        raise NotPrivateError(
            f"{path.parent} was replaced: it belonged to user {owner}, and belongs to user {now} now. Whoever owns"
            f" {path.parent.parent} can do that: run the job with another --checkpoint-dir"
        )
    if found.st_uid != owner:
        raise NotPrivateError(
            f"{path} belongs to user {found.st_uid}, its directory to user {owner}: while no node runs the job, delete"
            " it, the agent makes its own"
        )
    if secret and found.st_mode & (stat.S_IRWXG | stat.S_IRWXO):
        raise NotPrivateError(
            f"{path} can be read or written by others (mode {stat.S_IMODE(found.st_mode):o}): `chmod 600` it if nobody"
            " else did, else delete it; where the mount gives all files this mode, give another --checkpoint-dir"
        )


def read_private(path: Path, *, secret: bool = False) -> bytes:
    """The content of a small private file. An empty one is looked at again: see `publish`.

    Raises:
        FileNotFoundError: there is none yet.
        NotPrivateError: see `open_private`.
        OSError: it cannot be read.
    """
    for _ in range(PUBLISHED_TRIES):
        with open(open_private(path, os.O_RDONLY, secret=secret), "rb") as file:
            data = file.read(_MOST_READ_BYTES)
        if data:
            break
        time.sleep(PUBLISHED_PAUSE_SECONDS)  # why: on a mount without links its maker is about to write; no event tells
    return data


def put_aside(path: Path) -> Path:
    """Gives a damaged file another name, the next free one of a few; returns it.

    Raises:
        OSError: the file system does not let us.
    """
    names = [path.with_name(f"{path.name}.damaged-{number}") for number in range(1, _MOST_PUT_ASIDE + 1)]
    aside = next((name for name in names if not os.path.lexists(name)), names[-1])
    with contextlib.suppress(FileNotFoundError):
        os.replace(path, aside)
    return aside
