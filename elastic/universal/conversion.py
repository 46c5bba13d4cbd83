"""One conversion, from a sealed sharded checkpoint to a sealed universal one."""

from __future__ import annotations

import errno
from collections.abc import Callable, Sequence
from pathlib import Path
from threading import Lock

from dalsegno.elastic.checkpoint import (
    UNIVERSAL,
    CheckpointDamaged,
    CheckpointName,
    FileEntry,
    Manifest,
    Shape,
    seal,
    verify,
)
from dalsegno.elastic.checkpoint.files import checksum

from .errors import ConversionError, EnvironmentFailed, SourceBad
from .journal import Journal, place, take_over

Progress = Callable[[int, int], None]
"""Called with (files done, files in total), from any thread, one call at a time."""
Moved = Callable[[int], None]
"""Called with the number of bytes that were read, written or synced just now, from any thread, several at a time."""


def convert(
    source: Path,
    target: Path,
    *,
    earlier: Sequence[Path] = (),
    digest: str | None = None,
    progress: Progress | None = None,
    moved: Moved = lambda count: None,
    upstream: bool = False,
) -> Manifest:
    """Makes the universal form of a sharded ZeRO checkpoint and seals it.

    Runs in the process's own working directory and may change it meanwhile: give it a process of its own
    (``python -m dalsegno.elastic.universal``).

    Args:
        source: The sealed sharded checkpoint. Only read.
        target: Directory of this lease, named ``<source>.universal.<lease>``, not there yet.
        earlier: Directories of earlier leases; their finished files are verified and linked.
        digest: The source's recorded digest; None: whatever its manifest says.
        progress: Told after every file.
        moved: Told of bytes, in between too. No step that is not told of touches more than about one file.
        upstream: Use DeepSpeed's converter even where ours can do it.

    Returns:
        The manifest that seals ``target``.

    Raises:
        SourceBad: The source is damaged or incomplete.
        EnvironmentFailed: Anything else that kept the source, which verifies, from being converted.
    """
    source, target = Path(source), Path(target)
    try:
        manifest = _verified(source, digest, moved)
        name = CheckpointName.parse(target.name)
        if name.form != UNIVERSAL or str(name.source) != source.name:
            raise EnvironmentFailed(f"{target.name} is not a name for the universal form of {source.name}")
        target.mkdir()
        entries = _convert(source, manifest, target, list(earlier), progress, moved, upstream)
        return _seal(manifest, target, entries)
    except ConversionError:
        raise
    except OSError as error:
        raise EnvironmentFailed(_describe_os_error(error)) from error
    except MemoryError as error:
        raise EnvironmentFailed("out of memory") from error
    except Exception as error:
        # The source verified above: what fails now is the converter or the machine, never a reason to retire it.
        raise EnvironmentFailed(f"{type(error).__name__}: {error}") from error


def _verified(source: Path, digest: str | None, moved: Moved) -> Manifest:
    try:
        manifest = Manifest.read(source)
        if digest is not None and manifest.digest != digest:
            raise SourceBad(f"{source.name}: its digest is {manifest.digest[:12]}, recorded was {digest[:12]}")
        if manifest.source is not None:
            raise EnvironmentFailed(f"{source.name} is a later form itself")
        verify(source, manifest, moved=moved)
    except CheckpointDamaged as error:
        raise SourceBad(str(error)) from error
    return manifest


def _convert(
    source: Path,
    manifest: Manifest,
    target: Path,
    earlier: list[Path],
    progress: Progress | None,
    moved: Moved,
    upstream: bool,
) -> tuple[FileEntry, ...]:
    # Torch is imported only here: damage is told without it, and an agent imports this package without it.
    from .check import check_complete, expected_files
    from .source import Unsupported, open_source

    with Journal(target, source_digest=manifest.digest) as journal:
        taken = take_over(journal, target, earlier, source_digest=manifest.digest, moved=moved)
        try:
            opened = open_source(source)
        except Unsupported:
            _run_upstream(source, target, journal, moved)
        else:
            counter = _Counter(taken, len(expected_files(opened)), progress)
            if upstream:
                _run_upstream(source, target, journal, moved)
            else:
                from .streaming import Output, write

                files = {entry.path: entry for entry in manifest.files}
                with Output(target, journal, counter.add, moved) as output:
                    write(opened, source, files, output)
            check_complete(target, opened)
        entries = journal.entries
        journal.remove()
    return tuple(entries[path] for path in sorted(entries))


def _run_upstream(source: Path, target: Path, journal: Journal, moved: Moved) -> None:
    from . import upstream

    staged = upstream.stage(source, target, moved)
    for path in sorted(path for path in staged.rglob("*") if path.is_file()):
        name = path.relative_to(staged).as_posix()
        if name not in journal.entries:
            place(path, target / name)
            journal.add(checksum(target, name, sync=True, moved=moved))
    upstream.clear(target)


def _seal(manifest: Manifest, target: Path, entries: tuple[FileEntry, ...]) -> Manifest:
    sealed = Manifest(
        name=target.name,
        job_id=manifest.job_id,
        run_id=manifest.run_id,
        step=manifest.step,
        epoch=manifest.epoch,
        generation=manifest.generation,
        form=UNIVERSAL,
        shape=Shape(manifest.shape.world_size, manifest.shape.strategy, any_world_size=True),
        position=manifest.position,
        order=manifest.order,
        source=manifest.ref,
        resumed_from=manifest.resumed_from,
        min_nodes=manifest.min_nodes,
        max_nodes=manifest.max_nodes,
        metric=manifest.metric,
        files=entries,
    )
    seal(target, sealed)
    return sealed


def _describe_os_error(error: OSError) -> str:
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        return f"no space left for the universal checkpoint ({error.filename or error.strerror})"
    return str(error)


class _Counter:
    """Counts files, from any thread."""

    def __init__(self, done: int, total: int, progress: Progress | None) -> None:
        self._done, self._total, self._progress, self._lock = done, total, progress, Lock()

    def add(self) -> None:
        with self._lock:
            self._done += 1
            if self._progress is not None:
                self._progress(min(self._done, self._total), self._total)
