"""Lists a run's checkpoints: what an agent reports with ``Register`` and ``Join``."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

from .errors import CheckpointDamaged, Damage
from .layout import MANIFEST, is_checkpoint_name
from .manifest import Manifest
from .marks import marked
from .reading import NotRegular, is_directory, size_of_regular


@dataclass(frozen=True)
class Unsealed:
    """An entry with a checkpoint's name that is no sealed checkpoint: unfinished, given up, damaged or unreadable.

    Attributes:
        name, reason: For a person.
        damaged: It has been sealed once: it has the mark, or something else stands in place of its manifest, or its
            files are not those of the manifest.
        unreadable: The file system does not let us read it, and it is, or may be, a directory. That says nothing about
            the checkpoint.
    """

    name: str
    reason: str
    damaged: bool = False
    unreadable: bool = False


@dataclass(frozen=True)
class Inventory:
    """What one look at a run's directory found: sealed checkpoints from old to new, each before its later forms."""

    sealed: tuple[Manifest, ...]
    unsealed: tuple[Unsealed, ...]


def inspect(run_dir: Path, *, check_sizes: bool = True) -> Inventory:
    """Looks at everything in ``run_dir`` that carries a checkpoint's name.

    Args:
        run_dir: The run's directory; one that does not exist is empty.
        check_sizes: Also require that every listed file is there with its size. False only answers whether a manifest
            is in sight, which is what a node must see of a *recorded* checkpoint; ``verify`` checks the content.

    Raises:
        OSError: The directory exists but cannot be read.
    """
    try:
        names = sorted(filter(is_checkpoint_name, os.listdir(run_dir)))
        known = marked(run_dir)
    except FileNotFoundError:
        return Inventory((), ())
    sealed, unsealed = [], []
    for name in names:
        try:
            manifest = Manifest.read(run_dir / name)
            if check_sizes:
                _check_sizes(run_dir / name, manifest)
        except (CheckpointDamaged, FileNotFoundError, NotRegular) as error:
            damaged = name in known or os.path.lexists(run_dir / name / MANIFEST)
            unsealed.append(Unsealed(name, str(error), damaged))
        except OSError as error:
            # Each entry is judged by itself: a bad one does not hide the others.
            unsealed.append(Unsealed(name, str(error), unreadable=_may_be_directory(run_dir / name)))
        else:
            sealed.append(manifest)
    sealed.sort(key=_order)
    return Inventory(tuple(sealed), tuple(unsealed))


def inventory(run_dir: Path, *, check_sizes: bool = True) -> list[Manifest]:
    """The sealed checkpoints in ``run_dir``, oldest first. See ``inspect``."""
    return list(inspect(run_dir, check_sizes=check_sizes).sealed)


def _may_be_directory(path: Path) -> bool:
    try:
        return is_directory(path)
    except OSError:
        return True  # a stale handle, or a disk's error, says nothing of what is there


def _check_sizes(directory: Path, manifest: Manifest) -> None:
    for entry in manifest.files:
        size = size_of_regular(directory / entry.path)
        if size != entry.size:
            raise CheckpointDamaged(directory, entry.path, Damage.WRONG_SIZE, f"{size}, sealed were {entry.size}")


def _order(manifest: Manifest) -> tuple[tuple[int, int, int], str, int]:
    name = manifest.parsed_name
    return name.age, "" if name.lease is None else name.form, name.lease or 0
