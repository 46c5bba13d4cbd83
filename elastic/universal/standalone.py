"""A conversion that a person asks for: of any DeepSpeed checkpoint, into any directory.

The directory is written in place. If the conversion is killed, the same call continues it: finished files that verify
are kept. The last file written is `COMPLETE`, which lists all others with their checksums. If the names are those of a
run's checkpoints, it is a manifest instead, so that the run knows the directory. Only then the journal is removed.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path

from ..checkpoint import MANIFEST, UNIVERSAL, CheckpointDamaged, CheckpointName, FileEntry, Manifest, is_checkpoint_name
from ..checkpoint.files import checksums, fsync_tree, list_files, replace_file, write_exclusive
from ..checkpoint.layout import JOURNAL
from ..checkpoint.reading import is_there
from .conversion import Watch, Wish, engine_part, produce, seal_form, typed_failures, verified
from .errors import EnvironmentFailed, SourceBad
from .journal import ForeignJournal, Journal, keep_finished
from .layout import engine_directory
from .readers import reading

COMPLETE = "CONVERTED.json"
LATEST = "latest_universal"
VERSION = 1


def convert_directory(
    source: Path, target: Path, *, wish: Wish | None = None, watch: Watch | None = None, latest: bool = True
) -> tuple[FileEntry, ...]:
    """Makes the universal form of a sharded ZeRO checkpoint in ``target``.

    DeepSpeed's own converter, if it is needed, changes the process's working directory meanwhile. Give it a process of
    its own (``python -m dalsegno.elastic.universal``).

    Args:
        source: A directory that DeepSpeed's ``save_checkpoint`` made. It is only read. If it is sealed, it is verified
            first.
        target: It does not exist, or is empty, or holds the beginning of the same conversion.
        wish: What to make, and how.
        watch: Hears how it gets on.
        latest: Let ``latest_universal`` beside ``target`` name it. DeepSpeed reads that file if it is given no tag.

    Returns:
        The files of ``target``; none if it was complete already.

    Raises:
        SourceBad: The source is damaged or incomplete.
        EnvironmentFailed: Anything else failed, or ``target`` holds something else.
    """
    source, target, wish, watch = Path(source), Path(target), wish or Wish(), watch or Watch()
    with typed_failures(), contextlib.ExitStack() as held:
        if not source.is_dir():
            raise EnvironmentFailed(f"{source} is no directory")
        if not is_there(source / MANIFEST):
            source = engine_directory(source)
        held.enter_context(reading(source))
        manifest = verified(source, None, watch.moved) if is_there(source / MANIFEST) else None
        entries = {entry.path: entry for entry in manifest.files} if manifest else _model_files(source, wish, watch)
        name = _made_from(source, manifest, wish)
        if _is_complete(target, name):
            # It was killed right behind its seal. A directory that may only be read is complete all the same.
            with contextlib.suppress(OSError):
                (target / JOURNAL).unlink(missing_ok=True)
            _name_latest(target, latest)
            return ()
        _refuse_occupied(source, target)
        target.mkdir(parents=True, exist_ok=True)
        with _journal(target, name) as journal:
            keep_finished(journal, target, threads=wish.effort.threads, moved=watch.moved)
            made = produce(*engine_part(source, entries), target, journal, wish, watch)
            if manifest is not None and wish.plain and _is_form_of(target.name, source.name):
                seal_form(manifest, target, made)
            else:
                _complete(target, name, made)
            journal.remove()
        _name_latest(target, latest)
        return made


def _name_latest(target: Path, latest: bool) -> None:
    file, name = target.parent / LATEST, target.name.encode()
    # Not written where it is right, as the directory may be read only by then.
    if latest and not (file.is_file() and file.read_bytes() == name):
        replace_file(file, name)


def _journal(target: Path, name: str) -> Journal:
    try:
        return Journal(target, source_digest=name, resume=True)
    except BlockingIOError as error:
        raise EnvironmentFailed(f"another conversion is writing {target}: wait for its end, or stop it") from error
    except ForeignJournal as error:
        raise EnvironmentFailed(f"{error}: remove it, or choose another directory") from error


def _model_files(source: Path, wish: Wish, watch: Watch) -> Mapping[str, FileEntry]:
    """Entries of the model states, which are taken over unchanged. No manifest vouches for them: checksum them now."""
    names = sorted(path.name for path in source.glob("*_model_states.pt"))
    found = checksums(source, names, threads=wish.effort.threads, moved=watch.moved)
    return {entry.path: entry for entry in found}


def _made_from(source: Path, manifest: Manifest | None, wish: Wish) -> str:
    """Identifies what a conversion is made from. Only the beginning of the same conversion is continued."""
    if manifest is not None:
        origin = manifest.digest
    else:
        files = [(path.name, path.stat().st_size, path.stat().st_mtime_ns) for path in sorted(source.glob("*.pt"))]
        if not files:
            raise SourceBad(f"{source} holds no files of a DeepSpeed checkpoint (*.pt)")
        origin = hashlib.sha256(json.dumps(files).encode()).hexdigest()
    wanted = [f"stage={wish.stage}"] if wish.stage else []
    wanted += ["reset"] if wish.reset_optimizer else []
    return " ".join([origin, *wanted])


def _is_complete(target: Path, name: str) -> bool:
    """Whether the same conversion has completed before. One that was killed as it wrote that is gone on with.

    Raises:
        EnvironmentFailed: Another conversion has, or what says so is damaged.
    """
    begun = (target / JOURNAL).exists()
    try:
        made_from = _source_of(target)
    except (ValueError, LookupError, TypeError, CheckpointDamaged) as error:
        if begun:
            return False
        raise EnvironmentFailed(f"{target} is damaged: remove it, or choose another directory") from error
    if made_from is None:
        return False
    if made_from != name:
        raise EnvironmentFailed(f"{target} holds something else already: remove it, or choose another directory")
    return True


def _source_of(target: Path) -> str | None:
    """What a complete directory was made from; None: it is not complete."""
    try:
        return str(json.loads((target / COMPLETE).read_bytes())["source"])
    except (FileNotFoundError, NotADirectoryError):
        if not is_there(target / MANIFEST):
            return None
        sealed = Manifest.read(target)
        return sealed.source.digest if sealed.source is not None else ""


def _refuse_occupied(source: Path, target: Path) -> None:
    if target.exists() and not target.is_dir():
        raise EnvironmentFailed(f"{target} is a file")
    if target.is_dir() and not (target / JOURNAL).exists() and any(target.iterdir()):
        raise EnvironmentFailed(f"{target} is not empty: remove it, or choose another directory")
    inside = source.resolve() == target.resolve() or source.resolve() in target.resolve().parents
    if inside:
        raise EnvironmentFailed(f"{target} lies in the checkpoint that is to be converted: choose another directory")


def _is_form_of(target: str, source: str) -> bool:
    if not is_checkpoint_name(target):
        return False
    name = CheckpointName.parse(target)
    return name.form == UNIVERSAL and str(name.source) == source


def _complete(target: Path, name: str, made: tuple[FileEntry, ...]) -> None:
    if [path for path in list_files(target) if path != JOURNAL] != [entry.path for entry in made]:
        raise EnvironmentFailed(f"{target} holds files that the conversion did not make")
    fsync_tree(target)
    content = {"version": VERSION, "source": name, "files": [asdict(entry) for entry in made]}
    write_exclusive(target / COMPLETE, json.dumps(content, sort_keys=True).encode() + b"\n")
