"""Checks what a file of ``torch.save`` claims to hold against its size, and finds its records; unpacks nothing.

``torch.save`` compresses nothing: each record lies in the file as it is in memory. But torch unpacks what somebody else
has compressed, and two megabytes become gigabytes.
"""

from __future__ import annotations

import os
import struct
import zipfile
from pathlib import Path

_ZIP = b"PK\x03\x04"
_LOCAL_HEADER = struct.Struct("<26xHH")  # lengths of the name and of the extra field behind it
HEADER_BYTES = _LOCAL_HEADER.size
"""How much of a record's own header `first_byte` reads."""


class Packed(RuntimeError):
    """The file claims to hold more than it can."""


def refuse_packed(path: Path) -> list[zipfile.ZipInfo] | None:
    """Reads only the archive's directory, and returns its records. None: it is of an older format of torch's.

    Raises:
        Packed: Records are compressed, or together larger than the file.
        RuntimeError: The archive is not whole.
        OSError: It cannot be read.
    """
    with open(path, "rb") as file:
        if file.read(len(_ZIP)) != _ZIP:
            return None
        size = os.fstat(file.fileno()).st_size
        try:
            with zipfile.ZipFile(file) as archive:
                listed = archive.infolist()
        except (zipfile.BadZipFile, ValueError, NotImplementedError) as error:
            raise RuntimeError(f"it is no whole archive: {error}") from error
    for info in listed:
        if info.compress_type != zipfile.ZIP_STORED or info.file_size != info.compress_size:
            raise Packed(
                f"{info.filename!r} in it is compressed, {info.compress_size} bytes that would become"
                f" {info.file_size}: torch.save makes no such file"
            )
    claimed = sum(info.file_size for info in listed)
    if claimed > size:
        raise Packed(f"its {len(listed)} records are of {claimed} bytes together, and the file has {size}")
    return listed


def first_byte(info: zipfile.ZipInfo, header: bytes) -> int:
    """Where in its archive a record's content begins. What is not compressed lies there as it is in memory.

    Args:
        header: `HEADER_BYTES` of the file, from ``info.header_offset`` on.

    Raises:
        struct.error: They are fewer.
    """
    name, extra = _LOCAL_HEADER.unpack(header)
    return info.header_offset + HEADER_BYTES + int(name) + int(extra)
