"""What checkpoints are there: the answer that an agent gives with ``Register`` and ``Join``."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

from .errors import CheckpointDamaged, Damage
from .layout import FINISHED, is_checkpoint_name
from .manifest import Manifest


@dataclass(frozen=True)
class Unsealed:
    """A directory with a checkpoint's name that is not one: still being written, given up, or damaged."""

    name: str
    reason: str


@dataclass(frozen=True)
class Inventory:
    """One look at a run's directory: sealed checkpoints from old to new (later forms after their source)."""

    sealed: tuple[Manifest, ...]
    unsealed: tuple[Unsealed, ...]


def inspect(run_dir: Path, *, check_sizes: bool = True) -> Inventory:
    """Looks at every directory in ``run_dir`` that carries a checkpoint's name.

    Args:
        run_dir: The run's directory; one that does not exist is empty.
        check_sizes: Also want every listed file there with its size. False answers only "is a manifest in sight",
            which is what a node must see of a *recorded* checkpoint; whether its content is sound is for ``verify``.

    Raises:
        OSError: The directory is there but cannot be read.
    """
    try:
        names = sorted(filter(is_checkpoint_name, os.listdir(run_dir)))
    except FileNotFoundError:
        return Inventory((), ())
    sealed, unsealed = [], []
    for name in names:
        try:
            manifest = Manifest.read(run_dir / name)
            if check_sizes:
                _check_sizes(run_dir / name, manifest)
        except (CheckpointDamaged, FileNotFoundError) as error:
            unsealed.append(Unsealed(name, str(error)))
        else:
            sealed.append(manifest)
    sealed.sort(key=_order)
    return Inventory(tuple(sealed), tuple(unsealed))


def inventory(run_dir: Path, *, check_sizes: bool = True) -> list[Manifest]:
    """The sealed checkpoints in ``run_dir``, oldest first. See ``inspect``."""
    return list(inspect(run_dir, check_sizes=check_sizes).sealed)


def finished_runs(job_dir: Path) -> list[str]:
    """Ids of the runs below a job's directory that carry the mark of a finished run, sorted."""
    try:
        names = sorted(os.listdir(job_dir))
    except FileNotFoundError:
        return []
    return [name for name in names if (job_dir / name / FINISHED).is_file()]


def _check_sizes(directory: Path, manifest: Manifest) -> None:
    for entry in manifest.files:
        size = (directory / entry.path).stat().st_size
        if size != entry.size:
            raise CheckpointDamaged(directory, entry.path, Damage.WRONG_SIZE, f"{size}, sealed were {entry.size}")


def _order(manifest: Manifest) -> tuple[tuple[int, int, int], str, int]:
    name = manifest.parsed_name
    return name.age, "" if name.lease is None else name.form, name.lease or 0
