"""Which of a script's checkpoints are complete, by the rule of their framework, and what they load at.

It goes by the names of the files, and by their first and last bytes; nothing is loaded.
"""

from __future__ import annotations

import os
import re
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

from dalsegno.elastic.checkpoint.errors import CheckpointDamaged, Damage, printable
from dalsegno.elastic.checkpoint.files import list_files
from dalsegno.elastic.checkpoint.reading import read_regular, walk

from .foreign import ACCELERATE, COUNTED, DEEPSPEED, DISTCP, FILES, NOTE_BYTES, TRANSFORMERS, Unit
from .headers import is_archive, is_sound, number_in, was_ended
from .naming import goes_on_from, is_state, ranks_of

__all__ = ["Complete", "FileState", "complete", "damaged", "is_torn", "number_of_file", "number_of_unit", "state_of"]

_OPTIMIZER = re.compile(r"(?:bf16_|fp16_)?zero_pp_rank_([0-9]{1,9})_mp_rank_00_optim_states\.pt")
_MODEL_OF_RANK = re.compile(r"zero_pp_rank_([0-9]{1,9})_mp_rank_00_model_states\.pt")
_MODEL = "mp_rank_00_model_states.pt"
_NOT_ONLY_DATA = re.compile(r"(?:layer_|expp_rank_|.*mp_rank_(?!00_)).*[-_](?:model|optim)_states\.pt")
_ENGINE = re.compile(r"(?:.*/)?global_step[0-9]{1,15}")
_TRAINER_STATE = "trainer_state.json"
_RNG_OF_RANK = re.compile(r"rng_state_([0-9]{1,9})\.pth")
_FLASH_NOTE = "dlrover_latest.txt"
_RANDOM_OF_RANK = re.compile(r"random_states_([0-9]{1,9})\.pkl")
# The most files of a unit that are searched for a number.
_MOST_READ = 4
# Files of about one size: the part of the largest by which they may be smaller.
_ABOUT = 0.01
_BEING_WRITTEN = (".tmp", ".temp", ".part", ".partial", ".incomplete", ".lock")


@dataclass(frozen=True)
class FileState:
    """What changes when a file is written again, even if it is replaced by another one.

    Attributes:
        name: relative to the script's directory.
        size: in bytes.
        written: time of the last change, in ns.
        number: of the inode.
    """

    name: str
    size: int
    written: int
    number: int


@dataclass(frozen=True)
class Complete:
    """A unit that holds all that it must.

    Attributes:
        strategy: for the manifest's shape.
        any_world_size: it loads at any world size.
        files: all its files.
        links: links in it, and where they lead, both relative to the script's directory.
        sure: its framework's rule says that nothing is missing; otherwise only that nothing changes any more says so.
        ranks: how many ranks its files name; 0: none.
    """

    unit: Unit
    strategy: str
    any_world_size: bool
    files: tuple[FileState, ...]
    links: tuple[tuple[str, str], ...] = ()
    sure: bool = True
    ranks: int = 0

    @property
    def written(self) -> int:
        """When its last file was written, in ns."""
        return max((file.written for file in self.files), default=0)

    def has_more(self, known: Collection[str]) -> bool:
        """Whether there are states under names that are not known; other data may come long after the save."""
        return any(file.name not in known and is_state(file.name) for file in self.files)


@dataclass(frozen=True)
class _Savers:
    """Who has saved, or must have.

    A worker alone may be a launcher (torchrun, accelerate) with ranks of its own, which only their files show: at first
    nobody knows how many there are.

    Attributes:
        world_size: our workers.
        seen: ranks that earlier checkpoints of the same workers have named.
    """

    world_size: int
    seen: int = 0

    def everybody(self, named: Iterable[int]) -> set[int]:
        """All ranks that must have saved where files name these ones."""
        if self.world_size > 1:
            return set(range(self.world_size))
        return set(range(max(1, self.seen, *(rank + 1 for rank in named))))

    def known(self, named: Collection[int]) -> bool:
        """Whether nobody else can be missing."""
        return self.world_size > 1 or len(named) < 2 or len(named) <= self.seen


def complete(root: Path, unit: Unit, world_size: int, seen: int = 0) -> Complete | str:
    """A unit below the script's directory, if all of it is there; else what is missing.

    Args:
        root: the script's directory.
        unit: what it may be.
        world_size: our workers.
        seen: where there is one worker: the ranks that its earlier checkpoints have named.

    Raises:
        CheckpointDamaged: it holds something that is no file.
        ValueError: it was not written by data parallelism alone.
        OSError: the file system says no.
    """
    if unit.layout == FILES:
        _check_names(unit.names)
        return _of_files(root, unit, world_size)
    savers = _Savers(world_size, seen)
    path = root / unit.path
    names, links = (list_files(path), ()) if unit.layout in COUNTED else _tree(root, unit.path)
    _check_names((unit.path, *names))
    if unit.layout in (DEEPSPEED, TRANSFORMERS):
        found = (_of_deepspeed if unit.layout == DEEPSPEED else _of_transformers)(path, names, savers)
    elif unit.layout == ACCELERATE:
        found = _of_accelerate(path, names, savers)
    elif unit.layout == DISTCP:
        found = _of_distcp(path, names)
    else:
        found = _of_any(path, names)
    if isinstance(found, str):
        return found
    strategy, anywhere, sure = found
    files = state_of(root, [f"{unit.path}/{name}" for name in names])
    return Complete(unit, strategy, anywhere, files, links, sure, len(_named(names)))


def _named(names: Iterable[str]) -> set[int]:
    """The ranks that files of these frameworks name, in whichever directory they lie."""
    patterns = (_OPTIMIZER, _MODEL_OF_RANK, _RNG_OF_RANK, _RANDOM_OF_RANK)
    plain = [name.rpartition("/")[2] for name in names]
    return {int(match[1]) for name in plain for one in patterns if (match := one.fullmatch(name))}


def _check_names(names: Iterable[str]) -> None:
    for name in names:
        try:
            name.encode()
        except UnicodeEncodeError as error:
            raise ValueError(
                f"the name of a file is not UTF-8: {printable(name)}; have the script rename it, or leave it out"
            ) from error


# Strategy, whether it loads at any world size, whether the rule is sure.
_Verdict = tuple[str, bool, bool]


def _tree(root: Path, path: str) -> tuple[list[str], tuple[tuple[str, str], ...]]:
    """Files below a unit, relative to it, and its links to what is in it."""
    try:
        return list_files(root / path), ()
    except CheckpointDamaged:
        links = _links(root, path)
    files = [
        os.path.relpath(os.path.join(where, name), root / path)
        for where, _, names in walk(root / path)
        for name in names
        if not os.path.islink(os.path.join(where, name))
    ]
    return sorted(files), links


def _links(root: Path, path: str) -> tuple[tuple[str, str], ...]:
    """All links in a unit, if there is nothing else that is no file, and none leads out of it."""
    found = []
    for where, directories, names in walk(root / path):
        for name in (*directories, *names):
            one = Path(where, name)
            if one.is_symlink():
                target = os.path.normpath(os.path.join(where, os.readlink(one)))
                if not target.startswith(f"{root / path}{os.sep}"):
                    raise CheckpointDamaged(root / path, str(one.relative_to(root / path)), Damage.NOT_A_FILE)
                found.append((str(one.relative_to(root)), os.path.relpath(target, root)))
            elif name in names and not one.is_file():
                raise CheckpointDamaged(root / path, str(one.relative_to(root / path)), Damage.NOT_A_FILE)
    return tuple(found)


def _of_deepspeed(path: Path, names: list[str], savers: _Savers) -> _Verdict | str:
    partitioned = _engine(path, names, savers)
    if isinstance(partitioned, str):
        return partitioned
    if not partitioned and not _is_named(path, names):
        return "`latest` does not name it yet"
    return "deepspeed", not partitioned, savers.known(_named(names))


def _is_named(path: Path, names: Iterable[str]) -> bool:
    """Whether `latest` names it, which DeepSpeed writes after all files of rank 0: without ZeRO there are no others.

    A kill right then leaves `latest` empty, but younger than all that it was to name.
    """
    note = path.parent / "latest"
    try:
        named = read_regular(note, NOTE_BYTES).decode().strip()
        written = os.stat(note).st_mtime_ns
    except FileNotFoundError:
        return False
    return named == path.name or (not named and all(os.stat(path / name).st_mtime_ns <= written for name in names))


def _of_transformers(path: Path, names: list[str], savers: _Savers) -> _Verdict | str:
    """A Trainer's own files and, if DeepSpeed trains, those of its engine in a directory below."""
    ranks = {int(match[1]) for name in names if (match := _RNG_OF_RANK.fullmatch(name))}
    if _TRAINER_STATE not in names:
        return f"{_TRAINER_STATE} is missing"
    # A Trainer alone gives its file no number.
    everybody = savers.everybody(ranks | {1} if ranks else ())
    if ranks and ranks != everybody:
        return f"rng_state_….pth of some of {len(everybody)} ranks are missing"
    # Files of other ranks, which the Trainer's state does not mention.
    if torn := [name for name in names if _RNG_OF_RANK.fullmatch(name) and not is_archive(path / name)]:
        return f"{torn[0]} is not written to its end"
    engines = {name.partition("/")[0] for name in names if _ENGINE.fullmatch(name.partition("/")[0])}
    for engine in engines:
        inner = [name.removeprefix(f"{engine}/") for name in names if name.startswith(f"{engine}/")]
        if isinstance(missing := _engine(path / engine, inner, savers), str):
            return missing
    sure = savers.known(_named(names))
    return "transformers-deepspeed" if engines else "transformers", not engines, sure


def _engine(path: Path, names: list[str], savers: _Savers) -> bool | str:
    """Whether DeepSpeed's states are partitioned by rank; or what is still missing.

    Raises:
        ValueError: nobody can tell which files must be there.
    """
    if other := next(filter(_NOT_ONLY_DATA.fullmatch, names), ""):
        raise ValueError(f"{printable(other)}: tensor or pipeline parallelism, or experts: this is not taken over")
    optimizer = {int(match[1]) for name in names if (match := _OPTIMIZER.fullmatch(name))}
    model = {int(match[1]) for name in names if (match := _MODEL_OF_RANK.fullmatch(name))}
    everybody = savers.everybody(optimizer | model)
    missing = f"files of some of {len(everybody)} ranks are missing"
    if model and (model != everybody or optimizer != everybody):
        return missing  # stage 3
    if not model and (_MODEL not in names or optimizer not in (set(), everybody)):
        return missing
    # torch.save writes the archive's directory last.
    torn = [name for name in names if name.endswith("_states.pt") and not is_archive(path / name)]
    return f"{torn[0]} is not written to its end" if torn else bool(optimizer)


def _of_accelerate(path: Path, names: list[str], savers: _Savers) -> _Verdict | str:
    """Each rank writes its random states after all that is common."""
    ranks = {int(match[1]) for name in names if (match := _RANDOM_OF_RANK.fullmatch(name))}
    if lacking := sorted(savers.everybody(ranks) - ranks):
        return f"random_states_{lacking[0]}.pkl is missing"
    if torn := _torn(path, names):
        return torn
    anywhere = True
    for engine in sorted({name.rpartition("/")[0] for name in names if name.endswith("_states.pt")}):
        inner = [name.removeprefix(f"{engine}/") for name in names if name.startswith(f"{engine}/")]
        partitioned = _engine(path / engine, inner, savers)
        if isinstance(partitioned, str):
            return partitioned
        anywhere = anywhere and not partitioned
    # FSDP's LOCAL_STATE_DICT.
    return "accelerate", anywhere and len(ranks_of(names)) < 2, savers.known(ranks)


def _of_distcp(path: Path, names: list[str]) -> _Verdict | str:
    """`.metadata` comes last, from the rank that has heard of all others' files."""
    if ".metadata" not in names:
        return ".metadata is missing"
    return _torn(path, names) or ("torch-distributed", True, True)


def _of_any(path: Path, names: list[str]) -> _Verdict | str:
    """Nobody knows what must be in it, but what is being written often shows."""
    if not names:
        return "it is empty"
    named = _named_by_flash(path)
    if named is False:
        return f"`{_FLASH_NOTE}` does not name it yet"
    sharded = any(name.endswith("_optim_states.pt") for name in names)
    return _torn(path, names) or ("directory", len(ranks_of(names)) < 2 and not sharded, named is True)


def _named_by_flash(path: Path) -> bool | None:
    """Whether the note of DLRover's saver names this step or a later one, which it does after all ranks' files.

    None: there is no such note, or it does not go by steps.
    """
    try:
        newest = read_regular(path.parent / _FLASH_NOTE, NOTE_BYTES).decode().strip()
    except (FileNotFoundError, UnicodeDecodeError):
        return None
    both = newest.isdecimal() and path.name.isdecimal()
    return int(path.name) <= int(newest) if both else None


def _of_files(root: Path, unit: Unit, world_size: int) -> Complete | str:
    if torn := _torn(root, unit.names):
        return torn
    # A file alone that has an end is complete, and so is one that counts steps itself; of others one may be to come.
    ended = all(_ended(root / name) is True for name in unit.names)
    numbers = {None} if len(unit.names) == 1 and not unit.together else {number_of_file(root / n) for n in unit.names}
    if unit.together and len(numbers) > 1:
        return "its files are of different steps"
    sure = ended and (len(unit.names) == 1 or None not in numbers)
    ranks = ranks_of(unit.names)
    if ranks and ranks != set(range(world_size)):
        sure = False
    return Complete(unit, "files", len(ranks) < 2, state_of(root, unit.names), (), sure)


def _torn(path: Path, names: Iterable[str]) -> str:
    """The first file that shows that it is being written; empty if none does."""
    for name in names:
        if name.endswith(_BEING_WRITTEN):
            return f"{printable(name)} looks as if it was being written"
        if _ended(path / name) is False:
            return f"{printable(name)} is not written to its end"
    return ""


def is_torn(path: Path) -> bool:
    """Whether a file shows that it is not written to its end."""
    return _ended(path) is False


def _ended(path: Path) -> bool | None:
    stat = os.stat(path, follow_symlinks=False)
    return _was_ended(path, stat.st_size, stat.st_mtime_ns, stat.st_ino)


@lru_cache(maxsize=65536)
def _was_ended(path: Path, *state: int) -> bool | None:
    """Remembered for as long as the file stays the same, because all files are looked at every second."""
    return was_ended(path)


def damaged(root: Path, files: Iterable[FileState]) -> str:
    """The first of these archives whose contents are not what their checksums say; empty if there is none."""
    return next((file.name for file in files if _is_damaged(root / file.name, file)), "")


@lru_cache(maxsize=1024)
def _is_damaged(path: Path, *state: FileState) -> bool:
    return is_archive(path) and not is_sound(path)


def number_of_file(path: Path) -> int | None:
    """See `number_in`; remembered for as long as the file stays the same."""
    stat = os.stat(path, follow_symlinks=False)
    return _number_in(path, stat.st_size, stat.st_mtime_ns, stat.st_ino)


def number_of_unit(root: Path, one: Complete) -> int | None:
    """The number in the files of a unit: in the one that a script goes on from, if that is known, else in the largest.

    Of several that are about as large, such as a checkpoint and an older one that was kept, the last that was written.

    Args:
        root: the script's directory.
        one: the unit.

    Raises:
        OSError: one of its files is not there any more.
    """
    first = goes_on_from(one.unit.names)
    largest = max((file.size for file in one.files), default=0)

    def order(file: FileState) -> tuple[bool, bool, int, int, str]:
        about = file.size >= largest * (1 - _ABOUT)
        return file.name == first, about, 0 if about else file.size, file.written, file.name

    read = sorted(one.files, key=order, reverse=True)[:_MOST_READ]
    numbers = (number_of_file(root / file.name) for file in read)
    return next((number for number in numbers if number is not None), None)


@lru_cache(maxsize=256)
def _number_in(path: Path, *state: int) -> int | None:
    return number_in(path)


def state_of(root: Path, names: Sequence[str]) -> tuple[FileState, ...]:
    """How each file is now.

    Raises:
        OSError: one is not there.
    """
    found = ((name, os.stat(root / name, follow_symlinks=False)) for name in names)
    return tuple(FileState(name, stat.st_size, stat.st_mtime_ns, stat.st_ino) for name, stat in found)
