"""A part as it is sent: a header, then the bytes of the manifest and of all files, in pieces without gaps.

Many small files share one piece, so 10,000 of them are not much slower than one large one.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterator
from pathlib import Path

import xxhash

from dalsegno.elastic.checkpoint import MANIFEST, CheckpointDamaged, Damage, FileEntry
from dalsegno.elastic.checkpoint.manifest import MAX_BYTES
from dalsegno.elastic.checkpoint.reading import NotRegular, open_regular, read_regular
from dalsegno.protos import peer_pb2

from .connection import PIECE_BYTES
from .filling import Filling, cut
from .holdings import StepPart

__all__ = ["header_of", "open_sealed", "read_manifest", "read_part"]


def read_manifest(part: StepPart) -> bytes:
    """The bytes of a part's manifest as they lie there: making them anew takes longer.

    Raises:
        CheckpointDamaged: it is not what was sealed.
        OSError: it cannot be read.
    """
    try:
        data = read_regular(part.place.files / MANIFEST, MAX_BYTES)
    except (FileNotFoundError, NotRegular, ValueError) as error:
        raise CheckpointDamaged(part.place.files, MANIFEST, Damage.MANIFEST, str(error)) from error
    if hashlib.sha256(data).hexdigest() != part.manifest.digest:
        raise CheckpointDamaged(part.place.files, MANIFEST, Damage.DIGEST)
    return data


def header_of(part: StepPart, job_id: str, manifest_bytes: int) -> peer_pb2.Header:
    """What a part is announced with."""
    return peer_pb2.Header(
        job_id=job_id,
        run_id=part.run_id,
        epoch=part.manifest.epoch,
        name=part.manifest.name,
        digest=part.manifest.digest,
        group_rank=part.group_rank,
        manifest_bytes=manifest_bytes,
        paths=[entry.path for entry in part.entries],
    )


def read_part(part: StepPart, manifest: bytes, piece_bytes: int = PIECE_BYTES) -> Iterator[memoryview]:
    """The manifest and the files of a part, read as they are asked for, and summed on the way.

    Yields:
        Pieces of `piece_bytes` at most, each good until the next one.

    Raises:
        CheckpointDamaged: a file of it is not what was sealed.
        OSError: it cannot be read.
    """
    yield from cut(manifest, piece_bytes)
    piece = Filling(piece_bytes)
    for entry in part.entries:
        digest, done = xxhash.xxh3_128(), 0
        descriptor = open_sealed(part.place.files, entry)
        try:
            while done < entry.size and (come := piece.read(descriptor, entry.size - done, done)):
                digest.update(come)
                done += len(come)
                if piece.is_full:
                    yield piece.take()
        finally:
            os.close(descriptor)
        if done < entry.size or digest.hexdigest() != entry.xxh3_128:
            raise CheckpointDamaged(part.place.files, entry.path, Damage.WRONG_CHECKSUM)
    if piece:
        yield piece.take()


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
