"""Opens files of ``torch.save`` that hold plain values and plain tensors, mapped, without going through torch.

``torch.load(weights_only=True)`` runs an interpreter of its own, written in Python, over the description of each
tensor: 0.2 s for 2,400 of them. Here the interpreter's own unpickler does it, with a closed list of names. None of them
gives a description a class or a function of anybody else's in hand: an ordered dictionary, torch's sizes and kinds of
storages, what puts a tensor together, and stand-ins of the plain classes that a caller lists. Whatever else a file has
in it is left to ``torch.load``, with its own checks and errors.

The list keeps a file from running anything. Files are read beside their verification, too, so a flipped bit must not
take much memory either, see `check_places`. A file that was made for it still can.
"""

from __future__ import annotations

import io
import mmap
import pickle
import re
import struct
import sys
import zipfile
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from .archive import HEADER_BYTES, first_byte

_DATA, _PICKLE, _BYTE_ORDER = "data/", "data.pkl", "byteorder"
_DTYPES: Mapping[str, torch.dtype] = {
    "FloatStorage": torch.float32,
    "DoubleStorage": torch.float64,
    "HalfStorage": torch.float16,
    "BFloat16Storage": torch.bfloat16,
    "LongStorage": torch.int64,
    "IntStorage": torch.int32,
    "ShortStorage": torch.int16,
    "CharStorage": torch.int8,
    "ByteStorage": torch.uint8,
    "BoolStorage": torch.bool,
}


class NotPlainError(Exception):
    """There is something in the file that only ``torch.load`` knows, or refuses."""


def open_mapped(
    path: Path, records: Sequence[zipfile.ZipInfo], classes: Sequence[type] = ()
) -> tuple[Any, list[torch.UntypedStorage]]:
    """What is in a file of ``torch.save``, on the CPU. Tensors are mapped: only what is read of them is loaded.

    Args:
        path: The file. What is written to its tensors does not reach it.
        records: From ``archive.refuse_packed``.
        classes: Of these objects are made, too, without their ``__init__``.

    Returns:
        The content, and its storages, each once.

    Raises:
        NotPlainError: It is not of plain values and plain tensors alone, or not whole.
        OSError: It cannot be read.
    """
    with open(path, "rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as view:
        places = _places(view, records)
        described = bytes(_cut(view, places, _PICKLE))
        if _BYTE_ORDER in places and bytes(_cut(view, places, _BYTE_ORDER)).decode("latin-1") != sys.byteorder:
            raise NotPlainError("it was saved on a machine with another order of bytes")
        size = len(view)
    check_places(described)
    whole: Any = torch.UntypedStorage.from_file(str(path), False, size)
    reader = _PlainReader(described, whole, places, classes)
    try:
        content = reader.load()
    # Each opcode fails in its own way where the description is not what torch.save writes.
    except (
        pickle.UnpicklingError,
        ArithmeticError,
        AttributeError,
        EOFError,
        LookupError,
        TypeError,
        ValueError,
    ) as error:
        raise NotPlainError(f"{type(error).__name__} {error}") from error
    except RuntimeError as error:  # a tensor that is larger than its storage
        raise NotPlainError(str(error)) from error
    return content, reader.storages


def _places(view: mmap.mmap, records: Sequence[zipfile.ZipInfo]) -> dict[str, tuple[int, int]]:
    """First byte and size of each record, by its name without the archive's own."""
    found = {}
    for info in records:
        try:
            start = first_byte(info, view[info.header_offset : info.header_offset + HEADER_BYTES])
        except struct.error as error:
            raise NotPlainError(f"{info.filename!r} lies outside of the file") from error
        if start + info.file_size > len(view):
            raise NotPlainError(f"{info.filename!r} lies outside of the file")
        found[info.filename.partition("/")[2]] = start, info.file_size
    return found


def _cut(view: mmap.mmap, places: Mapping[str, tuple[int, int]], name: str) -> bytes:
    if name not in places:
        raise NotPlainError(f"it has no {name}")
    start, size = places[name]
    return view[start : start + size]


def check_places(described: bytes) -> None:
    """Checks the places at which a description keeps values to come back to: none is far behind all others.

    The interpreter makes room for twice as many as the largest number says, which one bit changes to two billion.

    Raises:
        NotPlainError: One is, or something is written as text, or cut.
    """
    # Each value that is kept took a byte at least.
    bound = len(described) >> 16
    high = b"[\\0-\\x%02x]\\0" % bound if bound < 256 else b".[\\0-\\x%02x]" % min(bound >> 8, 255)
    plain = re.compile(_PLAIN % high, re.DOTALL)
    at = 0
    while at < len(described) and described[at] != _STOP:
        size = _SIZES.get(described[at])
        if size is not None:
            at += 1 + size + int.from_bytes(described[at + 1 : at + 1 + size], "little")
            continue
        found = plain.match(described, at)
        if found is None:
            raise NotPlainError(f"it has {described[at : at + 5]!r}: a place far behind all others, or text")
        at = found.end()


# The opcode behind which nothing is read.
_STOP = ord(".")
# Opcodes with nothing behind them, and with so many bytes; and one with two lines of text.
_PLAIN = (
    rb"(?:[(012NQRabde}l\]ost)u\x81\x85-\x89\x8f-\x94\x97\x98]+|[Khq\x80\x82].|[M\x83]..|[Jj\x84]....|[G\x95].{8}"
    rb"|c[^\n]*\n[^\n]*\n|r..%b){1,1000}"
)
# Of how many bytes the length is that stands behind an opcode, before as many bytes.
_SIZES = {
    **dict.fromkeys(b"UC\x8a\x8c", 1),
    **dict.fromkeys(b"TXB\x8b", 4),
    **dict.fromkeys(b"\x8d\x8e\x96", 8),
}


class _StorageKind:
    """One of torch's kinds of storages in a description: it stands for a dtype and can do nothing."""

    __slots__ = ("dtype",)

    def __init__(self, dtype: torch.dtype) -> None:
        self.dtype = dtype


class _PutTogether:
    """Stands for ``torch._utils._rebuild_tensor_v2``. One for each file, and nothing can be set on it."""

    __slots__ = ()

    def __call__(
        self,
        storage: tuple[torch.UntypedStorage, torch.dtype],
        offset: int,
        shape: tuple[int, ...],
        stride: tuple[int, ...],
        requires_grad: bool,
        hooks: Any,
    ) -> Tensor:
        if hooks or type(requires_grad) is not bool or type(storage) is not tuple:
            raise NotPlainError("a tensor in it is no plain one")
        # torch refuses what does not lie within the storage, and gradients of whole numbers. DeepSpeed's weights in
        # fp32 require them.
        placed = torch.empty(0, dtype=storage[1]).set_(storage[0], offset, shape, stride)
        return placed.requires_grad_(requires_grad)


class _Unchanging(type):
    """A kind of classes on which a description can set nothing."""

    def __setattr__(cls, name: str, value: Any) -> None:
        raise NotPlainError(f"it sets {name} of {cls.__name__}")


def _stand_in(real: type) -> type:
    """What makes objects of a class, and is not that class."""
    made = {"__slots__": (), "__new__": lambda cls, *arguments: real.__new__(real, *arguments)}
    return _Unchanging(real.__name__, (), made)


class _PlainReader(pickle.Unpickler):
    """Makes plain values, tensors and objects of the listed classes only: `find_class` knows no other names."""

    def __init__(
        self,
        described: bytes,
        whole: torch.UntypedStorage,
        places: Mapping[str, tuple[int, int]],
        classes: Sequence[type],
    ) -> None:
        super().__init__(io.BytesIO(described), encoding="utf-8")
        self._whole, self._places = whole, places
        self._classes = {(one.__module__, one.__qualname__): one for one in classes}
        self._known: dict[str, torch.UntypedStorage] = {}

    @property
    def storages(self) -> list[torch.UntypedStorage]:
        """All that the content has."""
        return list(self._known.values())

    def find_class(self, module: str, name: str, /) -> Any:
        if (module, name) == ("collections", "OrderedDict"):
            return OrderedDict
        if (module, name) == ("torch", "Size"):
            return torch.Size
        if (module, name) == ("torch._utils", "_rebuild_tensor_v2"):
            return _PutTogether()
        if module == "torch" and name in _DTYPES:
            return _StorageKind(_DTYPES[name])
        if (module, name) in self._classes:
            return _stand_in(self._classes[module, name])
        raise NotPlainError(f"it holds {module}.{name}")

    def persistent_load(self, key: Any, /) -> Any:
        what, kind, name, _, numel = key
        if what != "storage" or type(kind) is not _StorageKind or type(name) is not str:
            raise NotPlainError("a storage in it is of an unknown kind")
        start, size = self._places[f"{_DATA}{name}"]
        if numel * kind.dtype.itemsize != size:
            raise NotPlainError(f"{name} has another size than the description says")
        if name not in self._known:
            self._known[name] = self._whole[start : start + size]
        return self._known[name], kind.dtype
