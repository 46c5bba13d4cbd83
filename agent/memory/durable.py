"""Writing a memory checkpoint to the run's directory, so that it outlives all memories.

The files are written aside, in batches; a batch is made durable, and only then its files get their names; the manifest
comes last. So whoever finds a directory without a manifest goes on where another node was killed: what has its name and
its checksum is there for good. Several nodes may do this at the same time: what two of them write are the same bytes.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import shutil
import stat
import threading
from collections.abc import Callable, Collection, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from dalsegno.elastic.checkpoint import (
    MANIFEST,
    CheckpointDamaged,
    CheckpointName,
    Damage,
    FileEntry,
    Manifest,
    is_checkpoint_name,
    read_sealed,
    seal,
    verify_listing,
)
from dalsegno.elastic.checkpoint.durability import FileSystem, at_once, unwritten
from dalsegno.elastic.checkpoint.errors import is_full
from dalsegno.elastic.checkpoint.files import READ_BYTES, THREADS, checksum
from dalsegno.elastic.checkpoint.marks import marked
from dalsegno.elastic.checkpoint.reading import NotRegular, is_there, size_of_regular
from dalsegno.elastic.checkpoint.spares import clear_spares, make_room, spare_bytes, take_spare
from dalsegno.elastic.checkpoint.summing import SummingWriter
from dalsegno.protos.grouping import grouped

from .pieces import open_sealed

__all__ = ["NothingThere", "PartlyWritten", "look_for", "make_durable", "seal_written", "what_it_says"]

# What is made durable at once, at most: a kill in the middle costs so much again, and a disk is silent until then.
_BATCH_BYTES, _BATCH_FILES = 256 << 20, 2048
# Of one file so many bytes wait for the disk at most: of a slow one it is to be heard that it moves.
_WAITING_BYTES = 64 << 20
# What is being written lies there, in the run's directory.
_ASIDE = ".durable"
# Where two nodes write the same, one finds at its second look that the other has sealed it.
_TRIES = 3
# Seconds between two looks for what other nodes have written: over NFS it may come into sight late.
_SIGHT_PAUSES_SECONDS = (0.2, 0.5, 1.0, 3.0, 6.0)


class PartlyWritten(str):
    """Why a checkpoint is not sealed, although all of it that is here is on the disk: the rest is elsewhere.

    Attributes:
        parts: what is there, by the group ranks that wrote it.
    """

    parts: tuple[int, ...] = ()


class NothingThere(str):
    """Why what was looked for was not found: it is not on the disk, for all that can be seen."""


class _Stopped(Exception):
    """It is given up."""


def make_durable(
    source: Path,
    manifest: Manifest,
    here: Collection[str],
    run_dir: Path,
    stopped: Callable[[], str],
    *,
    seals: bool = True,
) -> str:
    """Why `source` could not be written to `run_dir` under its name; empty where all of it is there, and sealed.

    `PartlyWritten` where only what is not here is missing.

    What is not here may have been written by others. Where something is missing, the rest is there for them.

    Args:
        source: the checkpoint in memory.
        here: paths of its files that are here.
        manifest: of it.
        run_dir: made if need be, the directory above it is not.
        stopped: asked whenever it has got on: a reason to give up, or "".
        seals: False: only what is here is written, and another node seals, see `seal_written`.

    Raises:
        CheckpointDamaged: a file in memory is not what was sealed.
    """
    target = run_dir / manifest.name
    problem = ""
    for _ in range(_TRIES):
        try:
            run_dir.mkdir(exist_ok=True)
            if _is_sealed(target, manifest):
                return ""
            if problem := _obstacle(target):
                return problem
            return _write(source, manifest, here, target, stopped, seals=seals)
        except _Stopped as why:
            return str(why)
        except (FileNotFoundError, FileExistsError) as error:
            # Another node is at it as well, and has cleared away or sealed what we were writing: we look again.
            problem = what_it_says(error, run_dir)
        except CheckpointDamaged as damaged:
            if damaged.directory == source:
                raise
            problem = str(damaged)
        except OSError as error:
            problem = what_it_says(error, run_dir)
            if not (is_full(error) and spare_bytes(run_dir)):
                return problem
            # Also what no file is written for: a directory, the manifest.
            clear_spares(run_dir)
    return problem


def what_it_says(error: OSError, run_dir: Path) -> str:
    """For a person; the same for each checkpoint, so that what lasts is said once."""
    said = error.strerror or str(error)
    if is_full(error):
        return f"{said[:1].lower()}{said[1:]} in {run_dir}: make room there, it is tried again"
    return f"{said} ({run_dir})"


def seal_written(manifest: Manifest, run_dir: Path, stopped: Callable[[], str]) -> str:
    """Why it could not be sealed; empty where it is. Others have said that all files are there, as they summed them.

    Args:
        manifest, run_dir, stopped: See `make_durable`.
    """
    target, problem = run_dir / manifest.name, ""
    for pause in (*_SIGHT_PAUSES_SECONDS, 0.0):
        if why := stopped():
            return why
        try:
            if not _is_sealed(target, manifest):
                if problem := _obstacle(target):
                    return problem
                verify_listing(target, manifest)
                seal(target, manifest)
            with contextlib.suppress(OSError):
                _sweep(target)
            return ""
        except (CheckpointDamaged, FileNotFoundError, FileExistsError) as error:
            problem = f"it cannot be sealed there: {error}"
            lacks = isinstance(error, CheckpointDamaged) and error.reason is Damage.MISSING_FILE
            problem = NothingThere(problem) if lacks else problem
        except OSError as error:
            return f"it cannot be sealed there: {what_it_says(error, run_dir)}"
        # No event tells when another machine's files come into sight over NFS.
        threading.Event().wait(pause)
    return problem


def look_for(manifest: Manifest, here: Collection[str], run_dir: Path, stopped: Callable[[], str]) -> str:
    """Whether nodes that are gone have written anything of what is not here: ""; `NothingThere`; or why nobody knows.

    A file has its name when it is whole. What is there of the rest shows itself as it is sealed.

    Args:
        manifest, here, run_dir, stopped: See `make_durable`.
    """
    target = run_dir / manifest.name
    for pause in (_SIGHT_PAUSES_SECONDS[0], 0.0):
        try:
            # Opening directories makes NFS look again if it remembers that there was no such checkpoint.
            if run_dir.name in os.listdir(run_dir.parent):
                os.listdir(run_dir)
            if _is_sealed(target, manifest):
                return ""
            if problem := _obstacle(target):
                return problem
            for entry in manifest.files:
                if why := stopped():
                    return why
                if entry.path not in here and _size(target / entry.path) == entry.size:
                    return ""
        except (CheckpointDamaged, OSError) as error:
            return f"{manifest.name} cannot be looked for on the disk: {error}"
        # No event tells when another machine's files come into sight over NFS.
        threading.Event().wait(pause)
    return NothingThere(f"what this node does not have of {manifest.name} is not on the disk")


def _size(path: Path) -> int | None:
    """Of a regular file; None: there is none."""
    try:
        return size_of_regular(path)
    except (FileNotFoundError, NotADirectoryError, NotRegular):
        return None


def _is_sealed(target: Path, manifest: Manifest) -> bool:
    """Whether it is. What nobody can tell is no "no", or the files of what was sealed were written again.

    Raises:
        CheckpointDamaged: something else is sealed there, or not all of it is there.
        OSError: the file system fails.
    """
    if not is_there(target / MANIFEST):
        return False
    verify_listing(target, read_sealed(target, manifest.digest))
    return True


def _obstacle(target: Path) -> str:
    """Why nothing may be written there."""
    if not is_there(target):
        return ""
    if not stat.S_ISDIR(os.lstat(target).st_mode):
        return f"{target} is a link or a file: delete it"
    if target.name in marked(target.parent):
        return f"{target} was sealed once and has lost its manifest: delete it by hand"
    return ""


def _write(
    source: Path, manifest: Manifest, here: Collection[str], target: Path, stopped: Callable[[], str], *, seals: bool
) -> str:
    if why := stopped():
        return why
    target.mkdir(exist_ok=True)
    _clear(target, manifest)
    with _aside(target) as aside, FileSystem(target) as system:
        # Not all at once: which of them are there is looked at batch by batch.
        entries = (one for one in manifest.files if one.path in here and not _is_there(target, one, stopped))
        for batch in grouped(entries, lambda entry: entry.size, _BATCH_FILES, _BATCH_BYTES):
            for number, entry in enumerate(batch):
                _copy_in(source, entry, target.parent, aside / str(number), stopped)
            _sync(system, [aside / str(number) for number in range(len(batch))], stopped)
            for number, entry in enumerate(batch):
                if why := stopped():
                    return why  # The directory may be deleted just now, and must not be made again.
                path = target / entry.path
                path.parent.mkdir(parents=True, exist_ok=True)
                os.replace(aside / str(number), path)
    if not seals:
        return ""
    missing = [
        entry.path for entry in manifest.files if entry.path not in here and not _is_there(target, entry, stopped)
    ]
    if missing:
        return PartlyWritten(f"{missing[0]} of {manifest.name} is not in this node's memory")
    if why := stopped():
        return why
    seal(target, manifest)
    with contextlib.suppress(OSError):
        _sweep(target)
    return ""


@contextlib.contextmanager
def _aside(target: Path) -> Iterator[Path]:
    """A directory beside the checkpoints, so that a sealed one never has anything of it."""
    path = target.parent / _ASIDE / f"{target.name}-{secrets.token_hex(8)}"
    path.parent.mkdir(exist_ok=True)
    path.mkdir()
    try:
        yield path
    finally:
        shutil.rmtree(path, ignore_errors=True)


def _sweep(target: Path) -> None:
    """Once it is sealed: what others have aside of it, and of older ones, is of those who were killed, or too late."""
    folder, age = target.parent / _ASIDE, CheckpointName.parse(target.name).age
    for left in os.listdir(folder):
        name = left.rpartition("-")[0]
        if is_checkpoint_name(name) and CheckpointName.parse(name).age <= age:
            shutil.rmtree(folder / left, ignore_errors=True)
    with contextlib.suppress(OSError):
        folder.rmdir()  # unless others write newer ones


def _clear(target: Path, manifest: Manifest) -> None:
    """Deletes what the manifest does not list from a directory that was not sealed just now; of links only the link.

    The manifest itself stays: another node may have sealed it since.
    """
    listed = {entry.path for entry in manifest.files}
    folders = {str(Path(path).parents[up]) for path in listed for up in range(len(Path(path).parents))}
    pending = [""]
    while pending:
        prefix = pending.pop()
        with os.scandir(target / prefix) as entries:
            for entry in entries:
                path = f"{prefix}{entry.name}"
                if entry.is_dir(follow_symlinks=False):
                    if path in folders:
                        pending.append(path + "/")
                    else:
                        shutil.rmtree(target / path)
                elif path != MANIFEST and (path not in listed or not entry.is_file(follow_symlinks=False)):
                    (target / path).unlink()


def _is_there(target: Path, entry: FileEntry, stopped: Callable[[], str]) -> bool:
    """Whether an earlier try has written a file already. It is made durable once more: another may have left it.

    A large file takes minutes to read: each piece of it says that the disk does not hang.
    """

    def moved(_: int = 0) -> None:
        if why := stopped():
            raise _Stopped(why)

    moved()
    try:
        if size_of_regular(target / entry.path) != entry.size or checksum(target, entry.path, moved=moved) != entry:
            return False
    except (FileNotFoundError, NotRegular, CheckpointDamaged):
        return False
    _fsync(target / entry.path)
    return True


def _copy_in(source: Path, entry: FileEntry, run_dir: Path, path: Path, stopped: Callable[[], str]) -> None:
    """`_copy`; where room is short, what is kept for later saves goes."""
    try:
        _copy(source, entry, run_dir, path, stopped)
    except OSError as error:
        make_room(run_dir, error)
        path.unlink(missing_ok=True)
        _copy(source, entry, run_dir, path, stopped)


def _copy(source: Path, entry: FileEntry, run_dir: Path, path: Path, stopped: Callable[[], str]) -> None:
    """Writes one file aside, and sums it on the way."""
    buffer = memoryview(bytearray(min(READ_BYTES, entry.size) or 1))
    spare = take_spare(run_dir, entry.path, path)
    new = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
    with (
        open(os.open(path, new, 0o666) if spare is None else spare, "wb", buffering=0) as file,
        open(open_sealed(source, entry), "rb", buffering=0) as reader,
    ):
        writer, waiting = SummingWriter(file.fileno()), 0
        while count := reader.readinto(buffer):
            if why := stopped():
                raise _Stopped(why)
            writer.write(buffer[:count])
            waiting += count
            if waiting >= _WAITING_BYTES:
                os.fsync(file.fileno())
                waiting = 0
        file.truncate(writer.size)
    if writer.digest != entry.xxh3_128:
        raise CheckpointDamaged(source, entry.path, Damage.WRONG_CHECKSUM)


def _sync(system: FileSystem, paths: list[Path], moved: Callable[[], object]) -> None:
    if system.tells and at_once(len(paths), unwritten()):
        system.sync()
        return
    with ThreadPoolExecutor(THREADS, thread_name_prefix="memory-sync") as pool:
        for _ in pool.map(_fsync, paths):
            moved()


def _fsync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
