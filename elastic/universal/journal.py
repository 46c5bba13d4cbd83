"""What one conversion lease has finished, so that the next lease need not do it again.

``JOURNAL.jsonl`` lies in the lease's own directory. Its first line names the source's digest. Every further line is one
finished file with size and checksum, written after the file was made durable. A journalled file is never opened for
writing again, so a later lease may link to it. The journal is removed once the directory is sealed: what fails at the
very end loses nothing. The process that writes the directory holds a lock on its journal.
"""

from __future__ import annotations

import errno
import fcntl
import json
import os
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Lock
from types import TracebackType

from ..checkpoint import CheckpointDamaged, FileEntry, Manifest, verify_files
from ..checkpoint.files import fsync_directory, place_file
from ..checkpoint.layout import JOURNAL
from ..checkpoint.reading import NotRegular, open_regular, read_regular

VERSION = 1
MAX_BYTES = 64 << 20


class ForeignJournal(ValueError):
    """The journal belongs to the conversion of another source."""


class Journal:
    """The journal of the conversion that owns ``directory``. Thread-safe."""

    def __init__(self, directory: Path, *, source_digest: str, resume: bool = False) -> None:
        """Creates the journal, or opens an existing one.

        Args:
            directory: The directory that the conversion writes.
            source_digest: Digest of the conversion's source.
            resume: Continue a conversion that was killed. Its finished files are in `recovered`; the journal keeps them
                until `restart`. False: there must be no journal, because each lease has a directory of its own.

        Raises:
            FileExistsError: There is a journal, and ``resume`` is False.
            BlockingIOError: The conversion that writes there is alive.
            ValueError: The journal belongs to the conversion of something else.
            OSError: The file system says no.
        """
        self._path = directory / JOURNAL
        self._lock = Lock()
        self._header = _header(source_digest)
        self._entries: dict[str, FileEntry] = {}
        self.recovered: tuple[FileEntry, ...] = ()
        if resume and os.path.lexists(self._path):
            os.close(open_regular(self._path))
        self._file = open(self._path, "a" if resume else "x", encoding="utf-8")  # noqa: SIM115 (see __exit__)
        try:
            _lock_file(self._file.fileno())
            if resume and self._path.stat().st_size > 0:
                self.recovered = _journalled(directory, source_digest, strict=True)
            else:
                self.restart(())
        except BaseException:
            self._file.close()
            raise

    def restart(self, entries: Sequence[FileEntry]) -> None:
        """Begins a new journal with ``entries``, which are finished."""
        self._file.truncate(0)
        self._write(self._header)
        for entry in entries:
            self.add(entry)

    def __enter__(self) -> Journal:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self._file.close()

    @property
    def entries(self) -> Mapping[str, FileEntry]:
        """Finished files by path."""
        with self._lock:
            return dict(self._entries)

    def add(self, entry: FileEntry) -> None:
        """Notes a file that is complete and durable. It must not be touched again."""
        with self._lock:
            self._write({"path": entry.path, "size": entry.size, "xxh3_128": entry.xxh3_128})
            self._entries[entry.path] = entry

    def remove(self) -> None:
        """Removes the journal for good, because the directory is sealed, and has no file besides what that lists."""
        self._file.close()
        self._path.unlink(missing_ok=True)
        fsync_directory(self._path.parent)

    def _write(self, record: Mapping[str, object]) -> None:
        # Not made durable: lines that a power cut takes only mean more work, and those that it leaves are verified.
        self._file.write(json.dumps(record, sort_keys=True) + "\n")
        self._file.flush()


def finished_files(directory: Path, source_digest: str) -> tuple[FileEntry, ...]:
    """The files that another lease says it finished: from its manifest if it has one, else from its journal.

    The list ends at a torn last line, which a killed lease may leave behind. A directory that is gone, or that was made
    from another source, yields no files.
    """
    try:
        manifest = Manifest.read(directory)
    except CheckpointDamaged:
        return _journalled(directory, source_digest)
    made_from = manifest.source is not None and manifest.source.digest == source_digest
    return manifest.files if made_from else ()


def _journalled(directory: Path, source_digest: str, *, strict: bool = False) -> tuple[FileEntry, ...]:
    try:
        lines = read_regular(directory / JOURNAL, MAX_BYTES).split(b"\n")
    except (FileNotFoundError, NotADirectoryError):
        return ()
    except (ValueError, NotRegular) as error:
        if strict:
            raise ForeignJournal(f"{directory / JOURNAL} is no journal: {error}") from error
        return ()
    entries: list[FileEntry] = []
    for number, line in enumerate(lines[:-1]):  # what follows the last newline is torn
        try:
            record = json.loads(line)
            if number > 0:
                entries.append(FileEntry(**record))
                continue
        except (ValueError, RecursionError, TypeError):
            break
        if record != _header(source_digest):
            if strict:
                raise ForeignJournal(f"{directory} holds the beginning of a conversion of something else")
            return ()
    return tuple(entries)


def _header(source_digest: str) -> dict[str, object]:
    return {"source": source_digest, "version": VERSION}


def take_over(
    journal: Journal,
    target: Path,
    earlier: Sequence[Path],
    *,
    source_digest: str,
    threads: int = 1,
    moved: Callable[[int], None] = lambda count: None,
) -> int:
    """Links (or copies) the verified finished files of earlier leases into ``target``.

    ``moved`` is called on any of ``threads`` threads with the number of bytes that were read just now.

    Returns:
        How many files need not be made again.

    Raises:
        OSError: ``target`` cannot be written.
    """

    def take(directory: Path, entry: FileEntry) -> None:
        try:
            verify_files(directory, [entry], threads=1, moved=moved)
        except (CheckpointDamaged, OSError):
            return  # made anew later: a file that does not verify counts as unfinished
        place_file(directory / entry.path, target / entry.path)
        if not os.path.samefile(directory / entry.path, target / entry.path):
            verify_files(target, [entry], threads=1, moved=moved)
        journal.add(entry)

    with ThreadPoolExecutor(threads, thread_name_prefix="dalsegno-take-over") as pool:
        for directory in earlier:
            there = journal.entries
            wanted = {e.path: e for e in finished_files(directory, source_digest) if e.path not in there}
            for _ in pool.map(lambda entry: take(directory, entry), filter(_inside, wanted.values())):  # noqa: B023
                pass
    return len(journal.entries)


def keep_finished(
    journal: Journal, target: Path, *, threads: int = 1, moved: Callable[[int], None] = lambda count: None
) -> int:
    """Continues in a directory whose conversion was killed: keeps finished files that verify, deletes all else.

    Returns:
        How many files need not be made again.

    Raises:
        OSError: ``target`` cannot be read or written.
    """

    def intact(entry: FileEntry) -> bool:
        try:
            verify_files(target, [entry], threads=1, moved=moved)
        except (CheckpointDamaged, OSError):
            return False
        return True

    candidates = list({entry.path: entry for entry in journal.recovered if _inside(entry)}.values())
    with ThreadPoolExecutor(threads, thread_name_prefix="dalsegno-keep") as pool:
        kept = [entry for entry, good in zip(candidates, pool.map(intact, candidates), strict=True) if good]
    names = {entry.path for entry in kept} | {JOURNAL}
    for current, _, files in os.walk(target):
        for path in (Path(current) / file for file in files):
            if path.relative_to(target).as_posix() not in names:
                path.unlink()
    journal.restart(kept)
    return len(kept)


def _lock_file(descriptor: int) -> None:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise
    except OSError as error:
        # Without locks O_EXCL still protects: of two processes that write one directory, one fails at its next file.
        if error.errno not in (errno.ENOLCK, errno.ENOTSUP, errno.ENOSYS, errno.EINVAL):
            raise


def is_written(directory: Path) -> bool:
    """Whether a living conversion writes ``directory``."""
    try:
        with open(open_regular(directory / JOURNAL), "rb") as file:
            # A shared lock: some network file systems grant no exclusive one on a file that is open for reading only.
            fcntl.flock(file.fileno(), fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError:  # no journal; or no locks, and then nobody can tell
        return False
    return False


def _inside(entry: FileEntry) -> bool:
    path = Path(entry.path)
    return bool(path.parts) and not path.is_absolute() and ".." not in path.parts
