"""A milestone from the hub back among a run's checkpoints, or a baseline: only what verifies, byte by byte."""

from __future__ import annotations

import contextlib
import errno
import os
import secrets
import shutil
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from dalsegno.elastic.checkpoint import CheckpointDamaged, Manifest, is_checkpoint_name, verify
from dalsegno.elastic.checkpoint.files import CANNOT, fsync_directory, fsync_tree, place_file, write_exclusive
from dalsegno.elastic.checkpoint.layout import MANIFEST
from dalsegno.elastic.checkpoint.marks import mark
from dalsegno.elastic.checkpoint.reading import NotRegular, read_regular
from dalsegno.protos.options import UsageError
from dalsegno.protos.text import one_line

from .child import FULL_ERRNOS, Outcome, Transfer, patience
from .commander_client import Milestone
from .run_manifest import FOLDER, MANIFEST_PATH, MAX_BYTES, RunManifest

__all__ = ("HubUnusable", "RevisionRefused", "Unreachable", "VolumeFull", "baseline", "restore", "restore_newest")

_DOWNLOADED = ".downloaded"
_PAUSES_SECONDS = (0.5, 2.0, 8.0, 30.0)
# This process's name, and where it has begun.
_OWN = secrets.token_hex(4)
_BEGUN: set[Path] = set()
# A file with this, and the name of the process whose directory it is.
_OF = ".of-"
# A download has no known size before it begins.
_ASSUMED_BYTES = 1 << 36


class RevisionRefused(Exception):
    """A revision does not hold what it should, and never will; one line."""


class Unreachable(Exception):
    """The hub does not answer now, or not with what we may see: another try may help; one line."""


class VolumeFull(UsageError):
    """What is to be restored has no room on the volume: a person makes some; one line, which says how much."""


class HubUnusable(UsageError):
    """This installation cannot speak to the hub: a person completes it; one line."""


@dataclass(frozen=True)
class Restored:
    """A checkpoint that is in its place again.

    Attributes:
        path: its directory.
        manifest: what it holds.
    """

    path: Path
    manifest: Manifest


def restore_newest(
    milestones: Sequence[Milestone], checkpoints: Path, hf: Path, say: Callable[[str], None]
) -> Restored | None:
    """Restores the newest milestone that verifies. Each one that does not is named with a line.

    Args:
        milestones: newest first, as the Commander lists them.
        checkpoints: the job's directory: a checkpoint lies in it under its run's id.
        hf: where it is downloaded to, on the same volume.
        say: takes the lines.

    Returns:
        None: there is none that verifies.

    Raises:
        Unreachable: the hub does not answer. An older milestone is not taken for that.
        VolumeFull: it has no room. Neither is it for that.
        HubUnusable: nothing here can speak to the hub.
        OSError: the volume says no.
    """
    for one in milestones:
        say(f"restoring step {one.step} from {one.repo}@{one.revision}")
        try:
            return restore(one, checkpoints, hf)
        except RevisionRefused as refused:
            say(f"refused: {refused}: trying the milestone before")
    return None


def restore(milestone: Milestone, checkpoints: Path, hf: Path) -> Restored:
    """Downloads one, checks every byte, and puts it in its place. Killed at any moment, it goes on with what is there.

    Args:
        milestone: what the Commander has on its record.
        checkpoints, hf: see `restore_newest`.

    Raises:
        RevisionRefused: it is not that checkpoint, or not whole.
        Unreachable: the hub does not answer.
        VolumeFull: it has no room; what has come stays.
        HubUnusable: nothing here can speak to the hub.
        OSError: the volume says no.
    """
    if not milestone.checkpoint:
        raise RevisionRefused(
            f"{milestone.repo}@{milestone.revision} was reported by a worker that is not ours: it names no checkpoint "
            "of this store, and so nothing can be compared; only such a worker goes on from it"
        )
    # Not all volumes let machines see each other's locks: another pod may do the same.
    for pause in (*_PAUSES_SECONDS, None):
        if (found := _found(milestone, checkpoints)) is not None:
            return found
        try:
            return _restore(milestone, checkpoints, hf / "incoming")
        except (FileNotFoundError, FileExistsError):
            if pause is None:
                raise
            time.sleep(pause)  # why: nothing tells when a pod far away is through
    raise AssertionError("the last try returns or raises")


def _found(milestone: Milestone, checkpoints: Path) -> Restored | None:
    """Where another pod has brought it."""
    if not is_checkpoint_name(milestone.checkpoint):
        return None
    for manifest in checkpoints.glob(f"*/{milestone.checkpoint}/{MANIFEST}"):
        with contextlib.suppress(CheckpointDamaged, OSError):
            found = Manifest.read(manifest.parent)
            if found.digest == milestone.digest:
                verify(manifest.parent, found)
                return Restored(manifest.parent, found)
    return None


def _restore(milestone: Milestone, checkpoints: Path, root: Path) -> Restored:
    """One try. Raises FileNotFoundError, too, if another pod has taken over what came, and FileExistsError."""
    name = f"{milestone.repo}@{milestone.revision}"
    incoming = _own(root, _safe(name))
    try:
        _download({"repo": milestone.repo, "revision": milestone.revision, "milestone": True}, incoming)
        restored = _checked(milestone, name, incoming, checkpoints)
    except (RevisionRefused, Unreachable, VolumeFull, HubUnusable) as error:
        _check_own(incoming)
        if (found := _found(milestone, checkpoints)) is not None:
            return found  # and whoever brought it removes what has come here
        if isinstance(error, RevisionRefused):
            shutil.rmtree(incoming, ignore_errors=True)
        raise
    for left in _tries(root, _safe(name)):
        shutil.rmtree(left, ignore_errors=True)
    return restored


def _own(root: Path, name: str) -> Path:
    """This process's place for a revision; what a pod left that was killed is taken over, once.

    No two processes share one: what one of them removes, or moves to its place, would be the other's, too.
    """
    mine = root / f"{name}.{_OWN}"
    root.mkdir(parents=True, exist_ok=True)
    for left in () if mine in _BEGUN else _tries(root, name):
        if (left / _DOWNLOADED).exists():
            continue  # somebody begins from it
        with contextlib.suppress(OSError):  # another pod was faster, or the mount cannot rename
            os.rename(left, mine)
            break
    _BEGUN.add(mine)
    mine.mkdir(exist_ok=True)
    (mine / f"{_OF}{_OWN}").touch()
    return mine


def _check_own(mine: Path) -> None:
    """Raises FileNotFoundError if another pod has taken it over; a directory of that name may have come anew."""
    if not (mine / f"{_OF}{_OWN}").exists():
        raise FileNotFoundError(errno.ENOENT, "another pod has taken it over", str(mine))


def _tries(root: Path, name: str) -> list[Path]:
    return [one for one in root.iterdir() if one.name == name or one.name.startswith(f"{name}.")]


def _checked(milestone: Milestone, name: str, incoming: Path, checkpoints: Path) -> Restored:
    try:
        own = RunManifest.from_bytes(read_regular(incoming / MANIFEST_PATH, MAX_BYTES))
    except (ValueError, FileNotFoundError, NotRegular) as error:  # any other OSError says nothing about the milestone
        raise RevisionRefused(f"{name}: {MANIFEST_PATH}: {one_line(str(error), 200)}") from error
    if (own.checkpoint, own.digest) != (milestone.checkpoint, milestone.digest):
        raise RevisionRefused(
            f"{name} holds {own.checkpoint} with another digest than {milestone.checkpoint} has on record"
        )
    try:
        return _place(incoming / FOLDER, own, checkpoints)
    except (CheckpointDamaged, ValueError) as error:
        raise RevisionRefused(f"{name}: {one_line(str(error), 200)}") from error


def _place(source: Path, own: RunManifest, checkpoints: Path) -> Restored:
    """Puts verified files in place as the sealed checkpoint that they were, its manifest last."""
    try:
        manifest = Manifest.from_bytes(read_regular(source / MANIFEST, MAX_BYTES))
    except (FileNotFoundError, NotRegular) as error:
        raise ValueError(str(error)) from error
    if (manifest.name, manifest.digest) != (own.checkpoint, own.digest):
        raise ValueError(f"its {MANIFEST} is not that of {own.checkpoint}")
    if manifest.run_id in ("", ".", "..") or "/" in manifest.run_id:
        raise ValueError(f"{manifest.run_id!r} is no run's id")
    verify(source, manifest)
    target = checkpoints / manifest.run_id / manifest.name
    before = _stamp(target)
    if _is_there(target, manifest):
        return Restored(target, manifest)
    target.parent.mkdir(parents=True, exist_ok=True)
    fsync_tree(source)
    if os.path.lexists(target) and _stamp(target) == before:
        # What is damaged there stays for a person, under a name that nobody takes for a checkpoint.
        _set_aside(target)
    try:
        os.rename(source, target)
        fsync_directory(target.parent)
    except OSError as error:
        if error.errno in (errno.ENOTEMPTY, errno.EEXIST):
            raise FileExistsError(error.errno, error.strerror, str(target)) from error  # another pod has brought it
        if error.errno not in CANNOT:
            raise
        target.mkdir(exist_ok=True)
        for entry in manifest.files:
            place_file(source / entry.path, target / entry.path)
        fsync_tree(target)
        write_exclusive(target / MANIFEST, manifest.to_bytes())
        fsync_directory(target)
    mark(target)
    return Restored(target, manifest)


def _stamp(target: Path) -> tuple[int, int] | None:
    """Tells one manifest from another that took its place meanwhile. (Mounts of object stores change inodes.)"""
    try:
        found = os.stat(target / MANIFEST, follow_symlinks=False)
    except OSError:
        return None
    return found.st_size, found.st_mtime_ns


def _is_there(target: Path, manifest: Manifest) -> bool:
    try:
        if Manifest.read(target).digest != manifest.digest:
            return False
        verify(target, manifest)
    except (CheckpointDamaged, OSError):
        return False
    return True


def _set_aside(target: Path) -> None:
    for number in range(1000):
        aside = target.with_name(f".damaged-{number}.{target.name}")
        if not os.path.lexists(aside):
            try:
                os.rename(target, aside)
            except OSError as error:
                if error.errno not in CANNOT:
                    raise
                shutil.rmtree(target)
            return


def baseline(name: str, hf: Path) -> Path:
    """Downloads ``OWNER/NAME@REVISION``, which need be no milestone, and returns its directory.

    Each file must have the checksum that the hub lists. Killed at any moment, it goes on with what is there.

    Args:
        name: as in ``run.yaml``.
        hf: where it is downloaded to.

    Raises:
        RevisionRefused: a file is not what its checksum says, however often it is fetched.
        Unreachable: the hub does not answer.
        VolumeFull: it has no room; what has come stays.
        HubUnusable: nothing here can speak to the hub.
        OSError: the volume says no.
    """
    root = hf / "baseline"
    for pause in (*_PAUSES_SECONDS, None):
        if (found := _complete(root, _safe(name))) is not None:
            return found
        try:
            return _brought(name, root)
        except FileNotFoundError:  # another pod has taken over what had come
            if pause is None:
                raise
            time.sleep(pause)  # why: nothing tells when a pod far away is through
    raise AssertionError("the last try returns or raises")


def _complete(root: Path, name: str) -> Path | None:
    """Where all of it is, in whoever's directory."""
    if not root.is_dir():
        return None
    return next((one for one in sorted(_tries(root, name)) if (one / _DOWNLOADED).exists()), None)


def _brought(name: str, root: Path) -> Path:
    repo, _, revision = name.partition("@")
    target = _own(root, _safe(name))
    try:
        _download({"repo": repo, "revision": revision, "milestone": False}, target)
    except (RevisionRefused, Unreachable, VolumeFull, HubUnusable) as error:
        _check_own(target)
        if isinstance(error, RevisionRefused):
            shutil.rmtree(target, ignore_errors=True)
        raise
    shutil.rmtree(target / ".cache", ignore_errors=True)
    fsync_tree(target)
    _check_own(target)
    for mark_of in target.glob(f"{_OF}*"):
        mark_of.unlink(missing_ok=True)
    write_exclusive(target / _DOWNLOADED, b"")
    fsync_directory(target)
    first = _complete(root, _safe(name)) or target
    if first != target:  # by its name, so that of two pods one keeps its own
        shutil.rmtree(target, ignore_errors=True)
    return first


def _download(job: Outcome, target: Path) -> None:
    target.mkdir(parents=True, exist_ok=True)
    seconds = patience(_ASSUMED_BYTES, None)
    outcome: Outcome = {}
    # The Xet way has no way back by itself: where it fails, the plain one is tried.
    for environment in ({}, {"HF_HUB_DISABLE_XET": "1"}):
        with Transfer({"do": "download", **job, "target": str(target)}, environment) as transfer:
            outcome = transfer.result(seconds, 60.0, lambda: None, lambda event: None)
        if not outcome.get("xet"):
            break
    if "refused" in outcome:
        raise RevisionRefused(str(outcome["refused"]))
    if "failed" in outcome:
        line = f"{job['repo']}@{job['revision']}: {outcome['failed']}"
        if outcome.get("lacking"):
            raise HubUnusable(line)
        number = outcome.get("errno", 0)
        if number in FULL_ERRNOS:
            raise VolumeFull(f"the volume is full: {line}: make room, or mount a larger one, and start this anew")
        if number:
            raise OSError(number, line)
        raise Unreachable(line)


def _safe(name: str) -> str:
    return name.replace("/", "--")
