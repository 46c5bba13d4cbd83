"""A part as a stream of `Piece` messages: a header, then the bytes of the manifest and of all files, without gaps.

Many small files share one message, so 10,000 of them are not much slower than one large one. Messages with bytes are
written and read here by hand, as protobuf would: it copies them once more on each side.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterator
from pathlib import Path

import xxhash
from google.protobuf.message import DecodeError

from dalsegno.elastic.checkpoint import MANIFEST, CheckpointDamaged, Damage, FileEntry
from dalsegno.elastic.checkpoint.manifest import MAX_BYTES
from dalsegno.elastic.checkpoint.reading import NotRegular, open_regular, read_regular
from dalsegno.protos import peer_pb2

from .holdings import StepPart

__all__ = ["MESSAGE_BYTES", "PIECE_BYTES", "decode", "encode", "open_sealed", "read_part"]

# Of a checkpoint, in one message.
PIECE_BYTES = 1 << 20
# Of one message: a header names all files of a part.
MESSAGE_BYTES = 16 << 20
# The field `data`: number 2, wire type 2, so its length follows (protobuf's encoding).
_TAG = b"\x12"
_MOST_LENGTH_BYTES = 5


def encode(data: memoryview) -> bytes:
    """A message with these bytes."""
    length, rest = bytearray(), len(data)
    while rest > 0x7F:
        length.append(rest & 0x7F | 0x80)
        rest >>= 7
    length.append(rest)
    return b"".join((_TAG, length, data))


def decode(message: bytes) -> memoryview | peer_pb2.Header:
    """What a message holds.

    Raises:
        ValueError: it is no message of this kind.
    """
    if message[:1] == _TAG:
        length = 0
        for index, byte in enumerate(message[1 : 1 + _MOST_LENGTH_BYTES]):
            length |= (byte & 0x7F) << 7 * index
            if byte < 0x80:
                if len(message) == 2 + index + length:
                    return memoryview(message)[2 + index :]
                break
    try:
        piece = peer_pb2.Piece.FromString(message)
    except DecodeError as error:
        raise ValueError("not a message of this protocol") from error
    return piece.header if piece.WhichOneof("body") == "header" else memoryview(piece.data)


def read_part(part: StepPart, job_id: str, piece_bytes: int = PIECE_BYTES) -> Iterator[bytes]:
    """The messages of a part, read as they are asked for, and summed on the way.

    Raises:
        CheckpointDamaged: a file of it is not what was sealed.
        OSError: it cannot be read.
    """
    manifest = memoryview(_read_manifest(part))
    yield _header_of(part, job_id, len(manifest))
    for begin in range(0, len(manifest), piece_bytes):
        yield encode(manifest[begin : begin + piece_bytes])
    buffer = memoryview(bytearray(piece_bytes))
    filled = 0
    for entry in part.entries:
        digest = xxhash.xxh3_128()
        left = entry.size
        descriptor = open_sealed(part.place.files, entry)
        try:
            while left:
                count = os.readv(descriptor, [buffer[filled : filled + left]])
                if not count:
                    break
                digest.update(buffer[filled : filled + count])
                filled, left = filled + count, left - count
                if filled == piece_bytes:
                    yield encode(buffer)
                    filled = 0
        finally:
            os.close(descriptor)
        if left or digest.hexdigest() != entry.xxh3_128:
            raise CheckpointDamaged(part.place.files, entry.path, Damage.WRONG_CHECKSUM)
    if filled:
        yield encode(buffer[:filled])


def _read_manifest(part: StepPart) -> bytes:
    """The bytes of a manifest as they lie there: making them anew takes longer."""
    try:
        data = read_regular(part.place.files / MANIFEST, MAX_BYTES)
    except (FileNotFoundError, NotRegular, ValueError) as error:
        raise CheckpointDamaged(part.place.files, MANIFEST, Damage.MANIFEST, str(error)) from error
    if hashlib.sha256(data).hexdigest() != part.manifest.digest:
        raise CheckpointDamaged(part.place.files, MANIFEST, Damage.DIGEST)
    return data


def _header_of(part: StepPart, job_id: str, manifest_bytes: int) -> bytes:
    header = peer_pb2.Header(
        job_id=job_id,
        run_id=part.run_id,
        epoch=part.manifest.epoch,
        name=part.manifest.name,
        digest=part.manifest.digest,
        group_rank=part.group_rank,
        manifest_bytes=manifest_bytes,
        paths=[entry.path for entry in part.entries],
    )
    return peer_pb2.Piece(header=header).SerializeToString()


def open_sealed(directory: Path, entry: FileEntry) -> int:
    """A descriptor of a file of a checkpoint, to be read.

    Raises:
        CheckpointDamaged: it is missing, no file, or has another size.
        OSError: what the file system says otherwise.
    """
    try:
        descriptor = open_regular(Path(f"{directory}/{entry.path}"))
    except FileNotFoundError as error:
        raise CheckpointDamaged(directory, entry.path, Damage.MISSING_FILE) from error
    except NotRegular as error:
        raise CheckpointDamaged(directory, entry.path, Damage.NOT_A_FILE) from error
    size = os.fstat(descriptor).st_size
    if size != entry.size:
        os.close(descriptor)
        raise CheckpointDamaged(directory, entry.path, Damage.WRONG_SIZE, f"{size} bytes, sealed were {entry.size}")
    return descriptor
