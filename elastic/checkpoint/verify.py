"""Checks whether a checkpoint still holds what was sealed. Listing and sizes are cheap; checksums read every byte."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence
from pathlib import Path

from dalsegno.protos.grouping import grouped

from .errors import CheckpointDamaged, Damage
from .files import THREADS, checksum, list_files
from .layout import BESIDES
from .manifest import FileEntry, Manifest
from .pool import Pool
from .reading import NotRegular, is_directory, size_of_regular

# What a thread reads without asking for more: the threads share the work even where there are few files.
TOGETHER_BYTES, TOGETHER_FILES = 4 << 20, 64


def read_sealed(directory: Path, digest: str) -> Manifest:
    """Reads the manifest of ``directory`` and compares its digest with the recorded ``digest``.

    Raises:
        CheckpointDamaged: MANIFEST or DIGEST.
    """
    manifest = Manifest.read(directory)
    if manifest.digest != digest:
        raise CheckpointDamaged(
            directory, "MANIFEST.json", Damage.DIGEST, f"it is {manifest.digest[:12]}, recorded was {digest[:12]}"
        )
    return manifest


def verify_listing(directory: Path, manifest: Manifest, paths: Collection[str] | None = None) -> None:
    """Checks that exactly the listed files are there, each with its size. Reads no file.

    A script that was handed its own checkpoint may have put more into it. Nothing of what it had saved is lost by that:
    only what is listed counts, and the rest is set aside before somebody loads it again.

    Args:
        paths: Only these are looked at: of the others some are there, and some may be on their way.

    Raises:
        CheckpointDamaged: MISSING_FILE, EXTRA_FILE, NOT_A_FILE or WRONG_SIZE.
    """
    if paths is not None:
        _check_sizes(directory, [entry for entry in manifest.files if entry.path in paths])
        return
    listed = {entry.path for entry in manifest.files}
    try:
        there = set(list_files(directory)) if manifest.saved_as is None else None
    except FileNotFoundError as error:
        raise CheckpointDamaged(directory, ".", Damage.MISSING_FILE, "the directory is gone") from error
    if there is None and not is_directory(directory):
        raise CheckpointDamaged(directory, ".", Damage.MISSING_FILE, "the directory is gone")
    for entry in manifest.files:
        if there is not None and entry.path not in there:
            raise CheckpointDamaged(directory, entry.path, Damage.MISSING_FILE)
        _check_sizes(directory, [entry])
    for path in sorted((there or listed) - listed - BESIDES.get(manifest.form, frozenset())):
        raise CheckpointDamaged(directory, path, Damage.EXTRA_FILE)


def _check_sizes(directory: Path, entries: Iterable[FileEntry]) -> None:
    for entry in entries:
        size = _size(directory, entry.path)
        if size != entry.size:
            detail = f"{size} bytes, sealed were {entry.size}"
            raise CheckpointDamaged(directory, entry.path, Damage.WRONG_SIZE, detail)


def _size(directory: Path, path: str) -> int:
    try:
        return size_of_regular(directory / path)
    except FileNotFoundError as error:
        raise CheckpointDamaged(directory, path, Damage.MISSING_FILE) from error
    except NotRegular as error:
        raise CheckpointDamaged(directory, path, Damage.NOT_A_FILE) from error


def verify_files(
    directory: Path,
    entries: Sequence[FileEntry],
    *,
    threads: int = THREADS,
    moved: Callable[[int], None] = lambda count: None,
) -> None:
    """Reads the given files and compares size and checksum: one rank's part of a shared verification.

    ``moved`` is called on the threads that read, with the number of bytes that were read just now.

    Raises:
        CheckpointDamaged: The first culprit in the order of ``entries``.
    """

    def check(entry: FileEntry) -> None:
        found = checksum(directory, entry.path, moved=moved)
        if found.size != entry.size:
            detail = f"{found.size} bytes, sealed were {entry.size}"
            raise CheckpointDamaged(directory, entry.path, Damage.WRONG_SIZE, detail)
        if found.xxh3_128 != entry.xxh3_128:
            raise CheckpointDamaged(directory, entry.path, Damage.WRONG_CHECKSUM)

    def check_all(some: Sequence[FileEntry]) -> None:
        for entry in some:
            check(entry)

    with Pool(max(1, threads), thread_name_prefix="dalsegno-verify") as pool:
        # Small ones together: to hand each one to a thread takes longer than to read it.
        for _ in pool.map(check_all, grouped(entries, lambda entry: entry.size, TOGETHER_FILES, TOGETHER_BYTES)):
            pass


def verify(
    directory: Path,
    manifest: Manifest,
    threads: int = THREADS,
    *,
    moved: Callable[[int], None] = lambda count: None,
) -> None:
    """Checks everything: the listing, every size, every byte. ``moved``: see ``verify_files``.

    Raises:
        CheckpointDamaged: The first damage that was found.
        OSError: The file system failed in another way, which says nothing about the checkpoint.
    """
    verify_listing(directory, manifest)
    verify_files(directory, manifest.files, threads=threads, moved=moved)
