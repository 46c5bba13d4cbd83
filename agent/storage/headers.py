"""What the first and last bytes of a file tell: whether it was written to its end, and how far its training was.

No file is unpickled: the numbers come from reading pickle's instructions, of which none is carried out.
"""

from __future__ import annotations

import json
import os
import pickletools
import zipfile
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

from dalsegno.elastic.checkpoint.reading import open_regular

from .naming import LARGEST

__all__ = ["count_in", "is_archive", "is_sound", "number_in", "was_ended"]

_ZIP = b"PK\x03\x04"
# Torch's old format, whose tensors come behind the pickles.
_OLD_TORCH = b"\x80\x02\x8a\x0al\xfc\x9c\x46\xf9\x20\x6a\xa8\x50\x19."
_PICKLES = tuple(bytes([0x80, protocol]) for protocol in (2, 3, 4, 5))
# Most bytes of a safetensors header, and of a pickle whose instructions are read.
_MAX_HEADER_BYTES = 100 << 20
_MAX_PICKLE_BYTES = 8 << 20
# Endings of files that are never empty.
_NEVER_EMPTY = (".pt", ".pth", ".ckpt", ".bin", ".safetensors", ".pkl", ".npz", ".npy", ".distcp", ".h5", ".tar")
# Keys at the top of a checkpoint that count steps, then saves and passes; the first that is there counts.
_KEYS = (
    *("global_step", "global_steps", "iter_num", "iteration", "iterations", "num_updates", "step", "steps", "it"),
    *("iter", "current_step", "epoch", "epochs", "epochs_run", "current_epoch"),
)
# What a scheduler counts, in its own file.
_SCHEDULER_KEYS = ("_step_count", "last_epoch")
# What reading a damaged archive raises. RuntimeError: a bit says that it is encrypted.
_DAMAGED = (zipfile.BadZipFile, zlib.error, ValueError, NotImplementedError, RuntimeError, EOFError)
_PUSHES_NOTHING = frozenset({"PROTO", "FRAME", "MEMOIZE", "PUT", "BINPUT", "LONG_BINPUT"})


def was_ended(path: Path) -> bool | None:
    """Whether a file was written to its end; None: its format does not tell.

    Raises:
        OSError: the file system says no, or it is no regular file.
    """
    with open(open_regular(path), "rb") as file:
        size = os.fstat(file.fileno()).st_size
        start = file.read(16)
        if path.suffix == ".safetensors":
            return _safetensors_ends(start[:8], size, _rest(file, start))
        if not size:
            return False if path.suffix in _NEVER_EMPTY else None
        if start.startswith(_OLD_TORCH):
            return None
        if start.startswith(_PICKLES):
            file.seek(-1, os.SEEK_END)
            return file.read(1) == b"."
    # An archive's directory is written last.
    return is_archive(path) if start.startswith(_ZIP) else None


def is_archive(path: Path) -> bool:
    """Whether a file ends as `torch.save` ends one."""
    try:
        return zipfile.is_zipfile(path)
    except zipfile.BadZipFile:
        return False


def is_sound(path: Path) -> bool:
    """Whether an archive holds what its checksums say. Reads all of it.

    What a machine had not written when it was lost may be missing in the middle, though the end is there.
    """
    try:
        with zipfile.ZipFile(path) as archive:
            return archive.testzip() is None
    except _DAMAGED:
        return False


def _rest(file: BinaryIO, start: bytes) -> bytes:
    length = int.from_bytes(start[:8], "little")
    if length > _MAX_HEADER_BYTES:
        return b""
    return (start[8:] + file.read(max(0, length - len(start[8:]))))[:length]


def _safetensors_ends(length: bytes, size: int, header: bytes) -> bool:
    count = int.from_bytes(length, "little")
    if len(length) < 8 or len(header) < count:
        return False
    try:
        tensors = json.loads(header)
        ends = [entry["data_offsets"][1] for name, entry in tensors.items() if name != "__metadata__"]
        return bool(8 + count + max(ends, default=0) == size)
    except (ValueError, TypeError, KeyError, IndexError, AttributeError, RecursionError):
        return False


def number_in(path: Path) -> int | None:
    """How far a training was, as a checkpoint of `torch.save` says it at its top; None: it does not.

    Raises:
        OSError: the file system says no.
    """
    found = _numbers_in(path)
    return next((found[key] for key in _KEYS if key in found), None)


def count_in(path: Path) -> int | None:
    """How often a scheduler has stepped, as `torch.save` wrote its state; None: that does not say.

    Raises:
        OSError: the file system says no.
    """
    found = _numbers_in(path)
    return next((found[key] for key in _SCHEDULER_KEYS if key in found), None)


def _numbers_in(path: Path) -> dict[str, int]:
    """The whole numbers at the top of a file of `torch.save`, by their keys; none if it is no such file."""
    try:
        with zipfile.ZipFile(path) as archive:
            names = [name for name in archive.namelist() if name.endswith("/data.pkl") or name == "data.pkl"]
            if len(names) != 1 or archive.getinfo(names[0]).file_size > _MAX_PICKLE_BYTES:
                return {}
            text = archive.read(names[0])
    except (*_DAMAGED, KeyError):
        return {}
    found: dict[str, int] = {}
    try:
        for key, number in _pairs(text):
            found.setdefault(key.lower(), number)
    except (ValueError, TypeError, IndexError, KeyError):
        pass  # no pickle, or one of a kind that is not known; what was read before still counts
    return found


def _pairs(text: bytes) -> Iterator[tuple[str, int]]:
    """Text that is followed by a whole number, where the outermost dictionary has its keys and values."""
    memo: dict[int, str] = {}
    depth, dictionaries, last, before = 0, 0, "", ""
    # A key, whether an inner dictionary begins right before it, and its number once that is known.
    key: tuple[str, bool] | None = None
    pair: tuple[str, int] | None = None
    for opcode, argument, _ in pickletools.genops(text):
        name = opcode.name
        if name in _PUSHES_NOTHING:
            if name in ("BINPUT", "LONG_BINPUT", "PUT", "MEMOIZE"):
                # MEMOIZE counts for itself; what is no text takes a number, too.
                memo[len(memo) if argument is None else int(argument)] = last
            continue
        if name == "MARK":
            depth += 1
        elif opcode.stack_before and pickletools.markobject in opcode.stack_before:
            depth -= 1
        if pair is not None:
            # An inner dictionary of one entry has no mark.
            if not (key is not None and key[1] and name == "SETITEM"):
                yield pair
            key = pair = None
        number = argument if name in ("BININT", "BININT1", "BININT2", "LONG1", "INT") else None
        if key is not None and depth <= 1 and type(number) is int and 0 <= number < LARGEST:
            pair = key[0], number
            continue
        if name in ("BINGET", "LONG_BINGET", "GET"):
            last = memo.get(int(argument or 0), "")
        else:
            last = argument if "UNICODE" in name and isinstance(argument, str) else ""
        dictionaries += name == "EMPTY_DICT"
        key = (last, before == "EMPTY_DICT" and dictionaries > 1) if last else None
        before = name
