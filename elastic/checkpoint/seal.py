"""Sealing: the last act of writing a checkpoint."""

from __future__ import annotations

from pathlib import Path

from dalsegno.protos import trace

from .errors import CheckpointDamaged, Damage
from .files import THREADS, checksums, fsync_directory, fsync_tree, list_files, write_exclusive
from .layout import BESIDES, MANIFEST
from .manifest import FileEntry, Manifest
from .marks import mark


def describe(directory: Path, *, threads: int = THREADS, sync: bool = True) -> tuple[FileEntry, ...]:
    """Entries of all files in ``directory``, sorted by path. Makes the files durable unless ``sync`` is False."""
    return tuple(checksums(directory, list_files(directory), threads=threads, sync=sync))


def seal(directory: Path, manifest: Manifest) -> str:
    """Writes ``MANIFEST.json``, after which ``directory`` is never changed again.

    The files must be durable already (``describe`` does that). The order is: names below the directory, then the
    manifest, then the directory and its parent. So if a manifest survives a power cut, its files have survived too.

    Returns:
        The digest.

    Raises:
        ValueError: ``manifest`` is for another directory.
        CheckpointDamaged: The directory holds other files than ``manifest`` lists.
        FileExistsError: It is sealed already.
        OSError: The manifest could not be written; nothing of it is left.
    """
    if manifest.name != directory.name:
        raise ValueError(f"the manifest of {manifest.name} cannot seal {directory.name}")
    there = set(list_files(directory)).difference(BESIDES.get(manifest.form, ()))
    listed = {entry.path for entry in manifest.files}
    for path in sorted(there ^ listed):
        raise CheckpointDamaged(directory, path, Damage.EXTRA_FILE if path in there else Damage.MISSING_FILE)
    fsync_tree(directory)
    write_exclusive(directory / MANIFEST, manifest.to_bytes())
    fsync_directory(directory)
    mark(directory)
    trace.mark("sealed")
    return manifest.digest
