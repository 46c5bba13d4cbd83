"""Which files of a memory checkpoint are on this node: a note for each node's part of it, beside the checkpoint.

A memory checkpoint is an ordinary one, of which each node has a directory of its own. At first only what its own ranks
wrote is in it: its part, named by the node's group rank in the epoch that wrote. The manifest, which is there on every
node, lists the files of all parts; ``<name>.parts/<group rank>.json`` those of one, and says that they are here, whole.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
from collections.abc import Iterable
from pathlib import Path

from .files import write_exclusive

_SUFFIX = ".parts"


def parts_directory(directory: Path) -> Path:
    """Where the notes on a checkpoint's parts are."""
    return directory.with_name(directory.name + _SUFFIX)


def write_part(directory: Path, group_rank: int, paths: Iterable[str]) -> None:
    """Notes that one part of the checkpoint in ``directory`` is here: its files, and the manifest, were written before.

    Raises:
        OSError: It could not be noted.
    """
    notes = parts_directory(directory)
    notes.mkdir(exist_ok=True)
    text = json.dumps({"files": sorted(paths)}).encode() + b"\n"
    temporary = notes / f".{group_rank}.json.tmp"
    temporary.unlink(missing_ok=True)
    write_exclusive(temporary, text, lasting=False)
    os.replace(temporary, notes / f"{group_rank}.json")


def read_parts(directory: Path) -> dict[int, tuple[str, ...]]:
    """The parts that are here, by group rank: paths of their files, relative to the checkpoint.

    Raises:
        OSError: They cannot be read.
    """
    found: dict[int, tuple[str, ...]] = {}
    with contextlib.suppress(FileNotFoundError):
        for note in parts_directory(directory).iterdir():
            if note.suffix == ".json" and note.stem.isdecimal():
                found[int(note.stem)] = tuple(json.loads(note.read_bytes())["files"])
    return found


def delete_parts(directory: Path) -> None:
    """Deletes the notes; to be done before the checkpoint itself is deleted.

    Raises:
        OSError: The file system says no.
    """
    with contextlib.suppress(FileNotFoundError):
        shutil.rmtree(parts_directory(directory))
