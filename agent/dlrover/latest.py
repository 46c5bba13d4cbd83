"""In a worker and in the saver's process: `latest` and `dlrover_latest.txt` always name a checkpoint that is whole.

DeepSpeed and DLRover open these files, which cuts them off, and then write: a kill in between leaves nothing in them.
DeepSpeed's `latest` names each save to memory, too, until DLRover's class has written it back; of a save to the disk it
names what the saver has not written yet. And where nothing was saved by DLRover's class, that removes it.
"""

from __future__ import annotations

import functools
import os
from pathlib import Path
from types import ModuleType
from typing import Any

from dalsegno.elastic.checkpoint.errors import CheckpointDamaged, printable
from dalsegno.elastic.checkpoint.files import replace_file
from dalsegno.elastic.checkpoint.reading import read_regular
from dalsegno.protos.imported import when_imported

from ..storage.foreign import DEEPSPEED, NOTE_BYTES, Unit
from ..storage.layouts import complete

__all__ = ["install", "mend"]

LATEST, NOTE = "latest", "dlrover_latest.txt"
_NOTES = frozenset({LATEST, NOTE, "latest_checkpointed_iteration.txt"})
# Below it the saver has a directory for each save that is not written by all nodes yet.
_STAGE = "._dlrover_ckpt_stage"


def install() -> None:
    """Does it as soon as those modules are imported."""
    when_imported("dlrover.python.common.storage", _write_whole)
    when_imported("dlrover.trainer.torch.flash_checkpoint.deepspeed", _name_what_is_whole)


def mend(directory: Path) -> str:
    """Has `latest` name a checkpoint again, if it is there and names none: the one of `dlrover_latest.txt`.

    If that says nothing either, the newest complete one; and if there is none, nothing is left that could be loaded.
    All ranks may do this at once.

    Args:
        directory: the script's, with DLRover's checkpoints.

    Returns:
        What was done, in one line; empty: nothing was wrong, or it cannot be mended.

    Raises:
        OSError: the file system says no.
    """
    named, noted = _said(directory / LATEST), _said(directory / NOTE)
    if named is None or (named and (named == noted or not named.isdecimal()) and _is_there(directory / named)):
        return ""
    if named and _is_whole(directory, named):
        return ""
    saved = sorted((name for name in os.listdir(directory) if name.isdecimal()), key=int, reverse=True)
    found = noted if noted and _is_whole(directory, noted, committed=True) else ""
    found = found or next((name for name in saved if _is_whole(directory, name)), "")
    was = f"named {printable(named)}, which is not all there" if named else "was empty"
    if found:
        replace_file(directory / LATEST, found.encode())
        return f"{directory / LATEST} {was}, as after a kill: it names {found} now, the last complete checkpoint"
    if any(_is_there(directory / name) for name in saved):
        return ""
    (directory / LATEST).unlink(missing_ok=True)
    return f"{directory / LATEST} {was}, as after a kill, and nothing is saved there: it is removed"


def _said(note: Path) -> str | None:
    try:
        return read_regular(note, NOTE_BYTES).decode().strip()
    except FileNotFoundError:
        return None
    except (UnicodeDecodeError, CheckpointDamaged):
        return ""


def _is_there(checkpoint: Path) -> bool:
    return checkpoint.is_dir() and any(checkpoint.iterdir())


def _is_whole(directory: Path, name: str, *, committed: bool = False) -> bool:
    """Whether a step's directory holds all that it must.

    Args:
        committed: the saver has said so. If it was killed right after, it has left its directory for the step.
    """
    staged = (directory / _STAGE / f"{name}.done").exists() and not committed
    if not name.isdecimal() or staged or not _is_there(directory / name):
        return False
    try:
        # The number of ranks is not known, so the files say it.
        found = complete(directory, Unit(name, "", DEEPSPEED, int(name)), 1)
    except CheckpointDamaged:
        return False
    except ValueError:
        return True  # experts, or another parallelism than that of data: nobody can tell
    # Stage 0 is complete when `latest` names it.
    return not isinstance(found, str) or found.startswith(f"`{LATEST}`")


def _write_whole(module: ModuleType) -> None:
    plain = module.PosixDiskStorage.write

    @functools.wraps(plain)
    def write(self: Any, content: Any, path: Any) -> None:
        if isinstance(content, str) and os.path.basename(path) in _NOTES:
            replace_file(Path(path), content.encode())
        else:
            plain(self, content, path)

    module.PosixDiskStorage.write = write


def _name_what_is_whole(module: ModuleType) -> None:
    found = module.DeepSpeedCheckpointer
    for name in ("_save_checkpoint_to_memory", "_save_checkpoint_to_storage"):
        setattr(found, name, _without_latest(getattr(found, name)))
    found._update_tracer_file = _remove_empty
    found.load_checkpoint = _mended(found.load_checkpoint)


def _without_latest(plain: Any) -> Any:
    """The saver writes `latest` when all nodes have written."""

    @functools.wraps(plain)
    def save(self: Any, save_dir: Any, tag: Any = None, client_state: Any = None, save_latest: bool = True) -> None:
        plain(self, save_dir, tag, {} if client_state is None else client_state, False)

    return save


def _remove_empty(self: Any, tag: Any) -> None:
    """After a save to memory: the directory that DeepSpeed has made for it on the disk. `latest` was left alone."""
    if self.engine.global_rank == 0 and _said(Path(self.checkpoint_dir) / LATEST) != str(tag):
        self.storage.safe_rmtree(os.path.join(self.checkpoint_dir, str(tag)))


def _mended(plain: Any) -> Any:
    @functools.wraps(plain)
    def load_checkpoint(self: Any, load_dir: Any, tag: Any = None, *arguments: Any, **named: Any) -> Any:
        if tag is None and (told := mend(Path(load_dir))) and self.engine.global_rank == 0:
            # Where people see it: what workers say as errors goes to a file.
            print(told, flush=True)
        return plain(self, load_dir, tag, *arguments, **named)

    return load_checkpoint
