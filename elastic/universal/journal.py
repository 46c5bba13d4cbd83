"""What one conversion lease has finished, so that the next lease need not do it again.

``JOURNAL.jsonl`` in the lease's own directory: the first line names the source's digest,
every further line is one finished file with size and checksum, written after the file itself was made durable. A
journalled file is never opened for writing again, so a later lease may link to it. The journal is removed before the
directory is sealed.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from threading import Lock
from types import TracebackType

from dalsegno.elastic.checkpoint import CheckpointDamaged, FileEntry, Manifest, verify_files

JOURNAL = "JOURNAL.jsonl"
VERSION = 1
MAX_BYTES = 64 << 20


class Journal:
    """The journal of the lease that owns ``directory``. Thread-safe."""

    def __init__(self, directory: Path, *, source_digest: str) -> None:
        """Creates the journal.

        Raises:
            FileExistsError: There is one: each lease writes into a directory of its own.
            OSError: The file system says no.
        """
        self._path = directory / JOURNAL
        self._lock = Lock()
        self._entries: dict[str, FileEntry] = {}
        self._file = open(self._path, "x", encoding="utf-8")  # noqa: SIM115 (closed by __exit__)
        self._write(_header(source_digest))

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
            self._write(asdict(entry))
            self._entries[entry.path] = entry

    def remove(self) -> None:
        """Takes the journal away: the directory is about to be sealed."""
        self._file.close()
        self._path.unlink()

    def _write(self, record: Mapping[str, object]) -> None:
        # Not made durable: what a power cut takes from it is only made anew, and what it leaves is verified.
        self._file.write(json.dumps(record, sort_keys=True) + "\n")
        self._file.flush()


def finished_files(directory: Path, source_digest: str) -> tuple[FileEntry, ...]:
    """The files that another lease says it finished: from its manifest if it came to that, else from its journal.

    A torn last line is what a killed lease leaves behind and ends the list. A directory that is gone, or that was made
    from another source, has nothing to offer.
    """
    try:
        manifest = Manifest.read(directory)
    except CheckpointDamaged:
        return _journalled(directory, source_digest)
    made_from = manifest.source is not None and manifest.source.digest == source_digest
    return manifest.files if made_from else ()


def _journalled(directory: Path, source_digest: str) -> tuple[FileEntry, ...]:
    try:
        with open(directory / JOURNAL, "rb") as file:
            lines = file.read(MAX_BYTES).split(b"\n")
    except (FileNotFoundError, NotADirectoryError):
        return ()
    entries: list[FileEntry] = []
    for number, line in enumerate(lines[:-1]):  # what follows the last newline is torn
        try:
            record = json.loads(line)
            if number > 0:
                entries.append(FileEntry(**record))
            elif record != _header(source_digest):
                return ()
        except (ValueError, TypeError):
            break
    return tuple(entries)


def _header(source_digest: str) -> dict[str, object]:
    return {"source": source_digest, "version": VERSION}


def take_over(
    journal: Journal,
    target: Path,
    earlier: Sequence[Path],
    *,
    source_digest: str,
    moved: Callable[[int], None] = lambda count: None,
) -> int:
    """Links (or copies) the verified finished files of earlier leases into ``target``.

    ``moved`` is told how many bytes were read just now.

    Returns:
        How many files need not be made again.

    Raises:
        OSError: ``target`` cannot be written.
    """
    taken: dict[str, FileEntry] = {}
    for directory in earlier:
        for entry in finished_files(directory, source_digest):
            if entry.path in taken or not _inside(entry.path):
                continue
            try:
                verify_files(directory, [entry], threads=1, moved=moved)
            except (CheckpointDamaged, OSError):
                continue  # made anew below: a file that does not verify is simply not finished
            place(directory / entry.path, target / entry.path)
            verify_files(target, [entry], threads=1, moved=moved)
            journal.add(entry)
            taken[entry.path] = entry
    return len(taken)


def place(source: Path, target: Path) -> None:
    """Puts a finished file under a second name: a hard link, or a durable copy where links are not possible.

    Raises:
        FileExistsError: ``target`` is there already.
        OSError: The file system says no.
    """
    target.parent.mkdir(parents=True, exist_ok=True)
    try:
        os.link(source, target, follow_symlinks=False)
    except FileExistsError:
        raise
    except OSError:
        # Across file systems, or one without links (some FUSE mounts, SMB).
        with open(source, "rb") as reader, open(target, "xb") as writer:
            shutil.copyfileobj(reader, writer, 4 << 20)
            writer.flush()
            os.fsync(writer.fileno())


def _inside(path: str) -> bool:
    parts = Path(path).parts
    return bool(parts) and not Path(path).is_absolute() and ".." not in parts
