"""Finds checkpoints in the layouts of DeepSpeed and of Hugging Face's Trainer, and tells whether they are complete.

It goes by the names of the files and their last bytes; nothing is loaded.
"""

from __future__ import annotations

import os
import re
import zipfile
from dataclasses import dataclass
from pathlib import Path

from dalsegno.elastic.checkpoint.errors import printable
from dalsegno.elastic.checkpoint.files import list_files
from dalsegno.elastic.checkpoint.reading import read_regular

__all__ = ["Foreign", "candidates", "complete", "state_of"]

_DEEPSPEED = re.compile(r"global_step([0-9]{1,18})")
_TRANSFORMERS = re.compile(r"checkpoint-([0-9]{1,18})")
_OPTIMIZER = re.compile(r"(?:bf16_|fp16_)?zero_pp_rank_([0-9]{1,9})_mp_rank_00_optim_states\.pt")
_MODEL_OF_RANK = re.compile(r"zero_pp_rank_([0-9]{1,9})_mp_rank_00_model_states\.pt")
_MODEL = "mp_rank_00_model_states.pt"
_NOT_ONLY_DATA = re.compile(r"(?:layer_|expp_rank_|.*mp_rank_(?!00_)).*[-_](?:model|optim)_states\.pt")
_TRAINER_STATE = "trainer_state.json"
# The most bytes of DeepSpeed's `latest`, which holds the name of a directory.
_MAX_TAG_BYTES = 4096
_RNG_OF_RANK = re.compile(r"rng_state_([0-9]{1,9})\.pth")


@dataclass(frozen=True)
class Foreign:
    """A complete checkpoint in the layout of its framework.

    Attributes:
        path: its directory.
        step: optimizer steps done.
        strategy: the strategy, for the manifest's shape.
        any_world_size: it loads at any world size.
        state: names, sizes and times of its files, which change while it is being written.
    """

    path: Path
    step: int
    strategy: str
    any_world_size: bool
    state: tuple[tuple[str, int, int], ...]


def candidates(directory: Path) -> list[tuple[int, Path]]:
    """(step, directory) of everything that is named like a checkpoint in a script's directory, newest first.

    Raises:
        OSError: the file system says no.
    """
    found = []
    with os.scandir(directory) as entries:
        for entry in entries:
            match = _DEEPSPEED.fullmatch(entry.name) or _TRANSFORMERS.fullmatch(entry.name)
            if match and entry.is_dir(follow_symlinks=False):
                found.append((int(match[1]), Path(entry.path)))
    return sorted(found, reverse=True)


def complete(path: Path, step: int, world_size: int) -> Foreign | None:
    """One of the `candidates`, if all ranks have written their files.

    Raises:
        CheckpointDamaged: it holds something that is no file.
        ValueError: it was not written by data parallelism alone.
        OSError: the file system says no.
    """
    look = _of_deepspeed if _DEEPSPEED.fullmatch(path.name) else _of_transformers
    return look(path, step, world_size)


def _of_deepspeed(path: Path, step: int, world_size: int) -> Foreign | None:
    names = list_files(path)
    partitioned = _engine_is_complete(path, names, world_size)
    if partitioned is None or not (partitioned or _latest(path.parent) == path.name):
        return None
    return Foreign(path, step, "deepspeed", not partitioned, state_of(path, names))


def _latest(directory: Path) -> str:
    """The tag that DeepSpeed writes after all files of rank 0: then everything that is not partitioned is there."""
    try:
        return read_regular(directory / "latest", _MAX_TAG_BYTES).decode().strip()
    except FileNotFoundError:
        return ""


def _of_transformers(path: Path, step: int, world_size: int) -> Foreign | None:
    """A Trainer's own files and, if DeepSpeed trains, those of its engine in a directory below."""
    names = list_files(path)
    ranks = {int(match[1]) for name in names if (match := _RNG_OF_RANK.fullmatch(name))}
    if _TRAINER_STATE not in names or ranks not in (set(), set(range(world_size))):
        return None
    # Files of other ranks, which the Trainer's state does not mention.
    if not all(_is_archive(path / name) for name in names if _RNG_OF_RANK.fullmatch(name)):
        return None
    engines = {name.partition("/")[0] for name in names if _DEEPSPEED.fullmatch(name.partition("/")[0])}
    for engine in engines:
        inner = [name.removeprefix(f"{engine}/") for name in names if name.startswith(f"{engine}/")]
        if _engine_is_complete(path / engine, inner, world_size) is None:
            return None
    strategy = "transformers-deepspeed" if engines else "transformers"
    return Foreign(path, step, strategy, not engines, state_of(path, names))


def _engine_is_complete(path: Path, names: list[str], world_size: int) -> bool | None:
    """Whether DeepSpeed's states are partitioned by rank; None: something is still missing.

    Raises:
        ValueError: nobody can tell which files must be there.
    """
    everybody = set(range(world_size))
    if other := next(filter(_NOT_ONLY_DATA.fullmatch, names), ""):
        raise ValueError(f"{printable(other)}: tensor or pipeline parallelism, or experts: this is not taken over")
    optimizer = {int(match[1]) for name in names if (match := _OPTIMIZER.fullmatch(name))}
    model = {int(match[1]) for name in names if (match := _MODEL_OF_RANK.fullmatch(name))}
    if model and (model != everybody or optimizer != everybody):
        return None  # stage 3
    if not model and (_MODEL not in names or optimizer not in (set(), everybody)):
        return None
    # torch.save writes the archive's directory last.
    whole = all(_is_archive(path / name) for name in names if name.endswith("_states.pt"))
    return bool(optimizer) if whole else None


def _is_archive(path: Path) -> bool:
    try:
        return zipfile.is_zipfile(path)
    except zipfile.BadZipFile:
        return False


def state_of(path: Path, names: list[str]) -> tuple[tuple[str, int, int], ...]:
    """Name, size and time of each file.

    Raises:
        OSError: one is not there.
    """
    found = ((name, os.stat(path / name)) for name in names)
    return tuple((name, stat.st_size, stat.st_mtime_ns) for name, stat in found)
