"""One conversion, from a sealed sharded checkpoint to a sealed universal one."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from threading import Lock

from ..checkpoint import UNIVERSAL, CheckpointDamaged, CheckpointName, FileEntry, Manifest, seal, verify
from ..checkpoint.errors import is_full
from ..checkpoint.files import checksums, place_file
from ..checkpoint.manifest import VERSION
from ..checkpoint.spares import make_room
from .effort import Effort
from .errors import ConversionError, Disagrees, EnvironmentFailed, Impossible, SourceBad
from .journal import Journal, take_over
from .layout import engine_directory

Progress = Callable[[int, int], None]
"""Called with (files done, files in total), from any thread, one call at a time."""
Moved = Callable[[int], None]
"""Called with the number of bytes read, written or synced just now, from any thread, several calls at a time."""
Planned = Callable[[int], None]
"""Called once with the approximate number of bytes that will be moved."""


@dataclass(frozen=True)
class Watch:
    """Callbacks that tell how a conversion gets on.

    Attributes:
        progress: Called after every file.
        moved: Called with the number of bytes read, written or synced just now.
        planned: Called with their approximate sum before the first file is written.
    """

    progress: Progress = lambda done, total: None
    moved: Moved = lambda count: None
    planned: Planned = lambda total: None


@dataclass(frozen=True)
class Wish:
    """What a conversion should make, and how.

    Attributes:
        effort: Threads and memory.
        stage: The ZeRO stage that will load the files, if it differs from the one that saved: stages 1 and 2 load one
            form, stage 3 another.
        reset_optimizer: Leave out the optimizer's state, so that it starts anew.
        upstream: Use DeepSpeed's converter even where ours can do it.
        allow: Classes (``"module.Name"``) that may be unpickled besides those of the closed list.
    """

    effort: Effort = field(default_factory=Effort)
    stage: int | None = None
    reset_optimizer: bool = False
    upstream: bool = False
    allow: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if self.stage not in (None, 1, 2, 3):
            raise ValueError(f"stage must be 1, 2 or 3, not {self.stage}")

    @property
    def plain(self) -> bool:
        """Whether the result is the source's normal universal form."""
        return self.stage is None and not self.reset_optimizer


def convert(
    source: Path,
    target: Path,
    *,
    earlier: Sequence[Path] = (),
    digest: str | None = None,
    wish: Wish | None = None,
    watch: Watch | None = None,
) -> Manifest:
    """Makes the universal form of a sharded ZeRO checkpoint of a run and seals it.

    DeepSpeed's own converter, if it is needed, runs in a working directory of its own, and the process's working
    directory changes meanwhile. Give it a process of its own (``python -m dalsegno.elastic.universal``).

    Args:
        source: The sealed sharded checkpoint. It is only read.
        target: Directory of this lease, named ``<source>.universal.<lease>``. It must not exist.
        earlier: Directories of earlier leases; their finished files are verified and linked.
        digest: The source's recorded digest; None: accept the digest that its manifest gives.
        wish: How to do it. It cannot change what a run's universal form is.
        watch: Hears of files and bytes. Between two calls no more than about one file is touched.

    Returns:
        The manifest that seals ``target``.

    Raises:
        SourceBad: The source does not verify.
        EnvironmentFailed: The source verifies, but something else kept it from being converted.
    """
    source, target, wish, watch = Path(source), Path(target), wish or Wish(), watch or Watch()
    if not wish.plain:
        raise ValueError("a run's universal form is that of its own stage, with the optimizer's state")
    with typed_failures(), _making_room(target.parent):
        manifest = verified(source, digest, watch.moved)
        name = CheckpointName.parse(target.name)
        if name.form != UNIVERSAL or str(name.source) != source.name:
            raise EnvironmentFailed(f"{target.name} is not a name for the universal form of {source.name}")
        target.mkdir()
        with Journal(target, source_digest=manifest.digest) as journal:
            threads = wish.effort.threads
            take_over(journal, target, earlier, source_digest=manifest.digest, threads=threads, moved=watch.moved)
            files: Mapping[str, FileEntry] = {entry.path: entry for entry in manifest.files}
            if manifest.shape.strategy.startswith("deepspeed"):  # a trainer that is not ours loads no universal files
                source, files = engine_part(source, files)
            with _blameless(manifest):
                entries = produce(source, files, target, journal, wish, watch)
            sealed = seal_form(manifest, target, entries)
            journal.remove()
        return sealed


@contextmanager
def typed_failures() -> Iterator[None]:
    """Turns every failure inside into a `ConversionError`, whose type says what it means for the source."""
    try:
        yield
    except ConversionError:
        raise
    except OSError as error:
        raise EnvironmentFailed(_describe_os_error(error)) from error
    except MemoryError as error:
        raise EnvironmentFailed("out of memory") from error
    except Exception as error:
        # The source verified before: what fails now is the converter or the machine, never a reason to retire it.
        raise EnvironmentFailed(f"{type(error).__name__}: {error}") from error


@contextmanager
def _blameless(manifest: Manifest) -> Iterator[None]:
    """What is wrong with a source that verifies is no damage: a run would have it verified again, and again."""
    try:
        yield
    except SourceBad as error:
        kind = Impossible if isinstance(error, Disagrees) else EnvironmentFailed
        raise kind(f"{manifest.name} verifies, but {error}") from error


def verified(source: Path, digest: str | None, moved: Moved) -> Manifest:
    """The manifest of a sealed sharded checkpoint, after every byte was verified against it.

    Raises:
        SourceBad: The checkpoint does not verify.
        EnvironmentFailed: It is not a sharded checkpoint, or it is not in sight.
    """
    try:
        manifest = Manifest.read(source)
        if digest is not None and manifest.digest != digest:
            raise SourceBad(f"{source.name}: its digest is {manifest.digest[:12]}, recorded was {digest[:12]}")
        if manifest.source is not None:
            raise EnvironmentFailed(f"{source.name} is a later form itself")
        verify(source, manifest, moved=moved)
        if manifest.saved_as is not None:
            _refuse_more_states(source, manifest)
    except CheckpointDamaged as error:
        # A mount that is away looks like missing files.
        if not source.is_dir():
            raise EnvironmentFailed(f"{source.name} is not in sight") from error
        raise SourceBad(str(error)) from error
    return manifest


def _refuse_more_states(source: Path, manifest: Manifest) -> None:
    """A script may have put more into its own checkpoint. What looks like states of ranks would be taken for a part."""
    listed = {entry.path for entry in manifest.files}
    for path in sorted(found.relative_to(source).as_posix() for found in source.rglob("*_states.pt")):
        if path not in listed:
            raise EnvironmentFailed(f"the script has put {path} into {source.name}, of which it is no part")


def produce(
    source: Path, entries: Mapping[str, FileEntry], target: Path, journal: Journal, wish: Wish, watch: Watch
) -> tuple[FileEntry, ...]:
    """Makes what ``journal`` does not list yet, and checks that nothing is missing.

    Args:
        source: The sharded checkpoint, or the directory in it that has DeepSpeed's files.
        entries: The source's files by relative path, at least those of model states.
        target: The directory to write, which holds what ``journal`` lists.
        journal: Notes each file.
        wish: What to make.
        watch: Hears how it gets on.

    Returns:
        All files of ``target``, sorted by path.

    Raises:
        ConversionError: See `convert`.
        OSError: The file system says no.
    """
    # Torch is imported only here. Damage must be reported without it, and agents import this package without it.
    from .check import check_complete
    from .forms import Form
    from .layout import Unsupported
    from .loading import allowing
    from .output import ConversionOutput
    from .source import open_source
    from .streaming import write

    taken = journal.entries
    with allowing(wish.allow):
        try:
            opened = open_source(source, reset_optimizer=wish.reset_optimizer)
        except Unsupported as error:
            _produce_upstream(source, target, journal, wish, watch, f"{error}: ")
            return _sorted(journal)
        with opened:
            form = Form(opened, wish.stage or opened.stage)
            if wish.upstream:
                _produce_upstream(source, target, journal, wish, watch)
                check_complete(target, form)
                return _sorted(journal)
            counter = _Counter(len(taken), len(form.files), watch.progress)
            read = sum(entry.size for entry in entries.values())
            watch.planned(read + 2 * form.nbytes + sum(entries[name].size for name in form.model_files.values()))
            with ConversionOutput(target, journal, counter.add, watch.moved, expected=len(form.files)) as output:
                write(opened, source, entries, output, form, wish.effort)
            check_complete(target, form, trusted=journal.entries.keys() - taken.keys())
    return _sorted(journal)


def engine_part(source: Path, entries: Mapping[str, FileEntry]) -> tuple[Path, Mapping[str, FileEntry]]:
    """The directory of DeepSpeed's files, and those of ``entries`` in it, by paths relative to it."""
    found = engine_directory(source)
    if found == source:
        return source, entries
    below = f"{found.relative_to(source).as_posix()}/"
    return found, {path.removeprefix(below): entry for path, entry in entries.items() if path.startswith(below)}


def _sorted(journal: Journal) -> tuple[FileEntry, ...]:
    made = journal.entries
    return tuple(made[path] for path in sorted(made))


def _produce_upstream(source: Path, target: Path, journal: Journal, wish: Wish, watch: Watch, reason: str = "") -> None:
    from . import upstream

    if not wish.plain:
        raise EnvironmentFailed(f"{reason}DeepSpeed's converter makes no other stage's form and resets nothing")
    staged = upstream.stage(source, target, watch.moved)
    names = sorted(path.relative_to(staged).as_posix() for path in staged.rglob("*") if path.is_file())
    counter = _Counter(0, len(names), watch.progress)
    for name in names:
        if name not in journal.entries:
            place_file(staged / name, target / name)
            journal.add(*checksums(target, [name], sync=True, moved=watch.moved))
        counter.add()
    upstream.clear(target)


def seal_form(manifest: Manifest, target: Path, entries: tuple[FileEntry, ...]) -> Manifest:
    """Seals ``target`` as the universal form of the checkpoint that ``manifest`` describes. Its journal goes next."""
    sealed = replace(
        manifest,
        name=target.name,
        form=UNIVERSAL,
        shape=replace(manifest.shape, any_world_size=True, reshards=False),
        source=manifest.ref,
        files=entries,
        best=None,
        candidate=None,
        version=VERSION,
    )
    seal(target, sealed)
    return sealed


@contextmanager
def _making_room(run_dir: Path) -> Iterator[None]:
    """What the run keeps for later saves goes where the disk is full: another lease goes on with what is made."""
    try:
        yield
    except OSError as error:
        make_room(run_dir, error)
        raise


def _describe_os_error(error: OSError) -> str:
    if is_full(error):
        return f"no space left for the universal checkpoint ({error.filename or error.strerror})"
    return str(error)


class _Counter:
    """Counts files, from any thread."""

    def __init__(self, done: int, total: int, progress: Progress) -> None:
        self._done, self._total, self._progress, self._lock = done, total, progress, Lock()

    def add(self) -> None:
        with self._lock:
            self._done += 1
            self._progress(min(self._done, self._total), self._total)
