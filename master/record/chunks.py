"""The record as pieces that are named by what is in them, and a head that names them all. Pure.

Rows lie in a fixed number of buckets, by their key, so a change of some rows makes a few buckets anew. A bucket is
compressed and cut into chunks that a store takes at once. Chunks are never changed: whoever has the head's digests has
exactly the rows that its writer meant.
"""

from __future__ import annotations

import hashlib
import json
import struct
import zlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass

__all__ = (
    "BUCKETS",
    "CHUNK_BYTES",
    "Head",
    "WrongChunk",
    "bucket_of",
    "chunk_digest",
    "decoded",
    "encoded",
    "packed",
    "unpacked",
)

FORMAT = 1
BUCKETS = 64
# The most bytes of a chunk. etcd refuses requests of 1.5 MiB, with all that is around them.
CHUNK_BYTES = 1 << 20
_LENGTHS = struct.Struct(">II")


class WrongChunk(Exception):
    """What was read is not what was written; the message says how."""


@dataclass(frozen=True)
class Head:
    """What there is, and whose it is.

    Attributes:
        job_id: whose record it is.
        generation: of its owner.
        owner: a random name of the one that wrote it: two heads with the same name and generation are of one writer.
        number: of its writes so far; it grows with each.
        total: checksum of all rows, as hex digits.
        chunks: for each bucket, the digests of its chunks in order.
    """

    job_id: str
    generation: int = 0
    owner: str = ""
    number: int = 0
    total: str = f"{0:064x}"
    chunks: tuple[tuple[str, ...], ...] = ((),) * BUCKETS

    def digests(self) -> set[str]:
        """All chunks that it names."""
        return {digest for bucket in self.chunks for digest in bucket}


def encoded(head: Head) -> bytes:
    """The head's bytes, with a seal."""
    text = json.dumps({"format": FORMAT, **asdict(head)}, separators=(",", ":"), sort_keys=True)
    return f"{_seal(text)}\n{text}".encode()


def decoded(data: bytes) -> Head:
    """The head in these bytes.

    Raises:
        WrongChunk: they are no head, or a damaged one, or one of another format.
    """
    try:
        seal, _, text = data.decode().partition("\n")
        known = json.loads(text)
        if seal != _seal(text):
            raise WrongChunk("the seal of its head is wrong")
        if known.pop("format") != FORMAT:
            raise WrongChunk("its head has another format: use the version of dalsegno that wrote it")
        chunks = tuple(tuple(str(digest) for digest in bucket) for bucket in known.pop("chunks"))
        head = Head(**known, chunks=chunks)
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise WrongChunk("its head is nothing that a master wrote") from error
    if len(head.chunks) != BUCKETS:
        raise WrongChunk(f"its head has {len(head.chunks)} buckets instead of {BUCKETS}")
    return head


def bucket_of(key: str) -> int:
    """The bucket in which a row lies."""
    return hashlib.sha256(key.encode(errors="surrogateescape")).digest()[0] % BUCKETS


def packed(rows: Mapping[str, bytes]) -> list[bytes]:
    """The chunks of a bucket; none if it is empty."""
    if not rows:
        return []
    parts: list[bytes] = []
    for key, data in sorted(rows.items()):
        name = key.encode(errors="surrogateescape")
        parts += [_LENGTHS.pack(len(name), len(data)), name, data]
    whole = zlib.compress(b"".join(parts), level=1)
    return [whole[at : at + CHUNK_BYTES] for at in range(0, len(whole), CHUNK_BYTES)]


def unpacked(chunks: Sequence[bytes]) -> dict[str, bytes]:
    """The rows of a bucket.

    Raises:
        WrongChunk: these are no chunks of one.
    """
    try:
        whole = zlib.decompress(b"".join(chunks)) if chunks else b""
        return dict(_rows(whole))
    except (zlib.error, struct.error, UnicodeDecodeError) as error:
        raise WrongChunk("a chunk cannot be unpacked") from error


def chunk_digest(chunk: bytes) -> str:
    """The name of a chunk."""
    return hashlib.sha256(chunk).hexdigest()


def _rows(whole: bytes) -> Iterable[tuple[str, bytes]]:
    at = 0
    while at < len(whole):
        name, data = _LENGTHS.unpack_from(whole, at)
        at += _LENGTHS.size
        key = whole[at : at + name].decode(errors="surrogateescape")
        yield key, whole[at + name : at + name + data]
        at += name + data


def _seal(text: str) -> str:
    return hashlib.sha256(f"{FORMAT}:{text}".encode(errors="surrogateescape")).hexdigest()
