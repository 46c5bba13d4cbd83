"""Which files of a memory checkpoint are on this node: a note for each node's part of it, beside the checkpoint.

A memory checkpoint is an ordinary one, of which each node has a directory of its own. At first only what its own ranks
wrote is in it: its part, named by the node's group rank in the epoch that wrote. The manifest, which is there on every
node, lists the files of all parts; ``<name>.parts/<group rank>.json`` those of one, and says that they are here, whole.
"""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import shutil
from collections.abc import Iterable
from pathlib import Path

from .files import write_exclusive
from .manifest import MAX_BYTES
from .reading import read_regular

PARTS_SUFFIX = ".parts"


def parts_directory(directory: Path) -> Path:
    """Where the notes on a checkpoint's parts are."""
    return directory.with_name(directory.name + PARTS_SUFFIX)


def part_path(directory: Path, group_rank: int) -> Path:
    """The note on one part."""
    return parts_directory(directory) / f"{group_rank}.json"


def write_part(directory: Path, group_rank: int, paths: Iterable[str]) -> None:
    """Notes that one part of the checkpoint in ``directory`` is here: its files, and the manifest, were written before.

    Raises:
        OSError: It could not be noted.
    """
    notes = parts_directory(directory)
    notes.mkdir(exist_ok=True)
    text = json.dumps({"files": sorted(paths)}).encode() + b"\n"
    aside = notes / f".part-{secrets.token_hex(8)}"
    write_exclusive(aside, text, lasting=False)
    os.replace(aside, part_path(directory, group_rank))


def read_part(directory: Path, group_rank: int) -> tuple[str, ...]:
    """Paths of one part's files, relative to the checkpoint.

    Raises:
        ValueError: The note is not what it should be.
        OSError: It cannot be read, FileNotFoundError where the part is not here.
    """
    path = part_path(directory, group_rank)
    try:
        raw = json.loads(read_regular(path, MAX_BYTES))
    except ValueError as error:
        raise ValueError(f"{path} is no list of files: {error}") from error
    files = raw.get("files") if isinstance(raw, dict) else None
    if not isinstance(files, list) or not all(isinstance(file, str) for file in files):
        raise ValueError(f"{path} is no list of files")
    return tuple(files)


def read_parts(directory: Path) -> dict[int, tuple[str, ...]]:
    """The parts that are here, by group rank, see `read_part`.

    Raises:
        ValueError, OSError: As there.
    """
    found: dict[int, tuple[str, ...]] = {}
    with contextlib.suppress(FileNotFoundError):
        for note in parts_directory(directory).iterdir():
            if note.suffix == ".json" and note.stem.isdecimal():
                found[int(note.stem)] = read_part(directory, int(note.stem))
    return found


def delete_parts(directory: Path) -> None:
    """Deletes the notes; to be done before the checkpoint itself is deleted.

    Raises:
        OSError: The file system says no.
    """
    with contextlib.suppress(FileNotFoundError):
        shutil.rmtree(parts_directory(directory))
