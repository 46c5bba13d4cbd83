"""One part on its way in: summed while it is written aside, and put in its place as a whole."""

from __future__ import annotations

import errno
import hashlib
import os
import secrets
import shutil
from collections.abc import Iterable
from contextlib import ExitStack
from pathlib import Path

import grpc

from dalsegno.elastic.checkpoint import CheckpointDamaged, FileEntry, Manifest
from dalsegno.elastic.checkpoint.errors import is_full
from dalsegno.elastic.checkpoint.manifest import MAX_BYTES
from dalsegno.elastic.checkpoint.spares import LEAST_BYTES, take_spare
from dalsegno.elastic.checkpoint.summing import SummingWriter
from dalsegno.protos import peer_pb2

from .arrivals import Arrival
from .holdings import HeldParts, Holdings, checked_paths, manifest_of
from .space import NoSpaceError, Space

__all__ = ["Incoming", "PartRefusedError", "named", "receive"]


class PartRefusedError(Exception):
    """A part, or a call, that is not taken: the status, and one line that says why.

    Attributes:
        others: addresses of agents that may have what was asked for.
    """

    def __init__(self, code: grpc.StatusCode, reason: str, others: tuple[str, ...] = ()) -> None:
        super().__init__(reason)
        self.code, self.others = code, others


def named(header: peer_pb2.Header) -> str:
    """For a person."""
    return f"part {header.group_rank} of {header.name}"


def receive(header: peer_pb2.Header, pieces: Iterable[memoryview], holdings: Holdings, space: Space) -> HeldParts:
    """Takes the part behind a header, and puts it in its place.

    Args:
        header: its names are checked already.
        pieces: its bytes. What this raises ends it.
        holdings, space: of this node.

    Raises:
        PartRefusedError: it cannot be, or is not what was announced.
    """
    incoming = Incoming(header, holdings, space)
    try:
        for piece in pieces:
            incoming.feed(piece)
        return incoming.finish()
    finally:
        incoming.close()


class Incoming:
    """Takes the bytes behind a header. For one thread; `close` always, also after `finish`.

    Args:
        header: its names are checked already.
        holdings, space: of this node.

    Raises:
        PartRefusedError: it cannot be.
    """

    def __init__(self, header: peer_pb2.Header, holdings: Holdings, space: Space) -> None:
        if not 0 < header.manifest_bytes <= MAX_BYTES:
            raise PartRefusedError(grpc.StatusCode.INVALID_ARGUMENT, f"a manifest of {header.manifest_bytes} bytes")
        self._header, self._holdings, self._space = header, holdings, space
        self._place = holdings.place(header.run_id, header.name)
        self._open = ExitStack()
        self._open.enter_context(holdings.at_work(header.run_id, header.name))
        self._head = bytearray()
        self._manifest: Manifest | None = None
        self._entries: list[FileEntry] = []
        # As text: there may be ten thousand files, and paths cost more than these.
        self._aside = str(self._place.parts / f".in-{header.group_rank}-{secrets.token_hex(8)}")
        # The file that is being written: how many came before it, and its writer.
        self._count = 0
        self._writer: SummingWriter | None = None

    def feed(self, data: memoryview) -> None:
        """The next bytes.

        Raises:
            PartRefusedError: they are not what was announced, or there is no room.
        """
        try:
            while data:
                data = self._to_file(data) if self._manifest is not None else self._to_manifest(data)
        except OSError as error:
            raise self._failed(error) from error

    def finish(self) -> HeldParts:
        """All bytes have come: the part is put in its place.

        Raises:
            PartRefusedError: they have not, or it cannot be.
        """
        if self._manifest is None or self._count < len(self._entries):
            raise PartRefusedError(grpc.StatusCode.DATA_LOSS, f"{named(self._header)} ended too early")
        paths = tuple(entry.path for entry in self._entries)
        try:
            self._put_in_place(paths)
            return self._holdings.add(self._header.run_id, self._manifest, self._header.group_rank, paths)
        except OSError as error:
            raise self._failed(error) from error
        except (CheckpointDamaged, ValueError) as error:
            raise PartRefusedError(grpc.StatusCode.ALREADY_EXISTS, str(error)) from error

    def close(self) -> None:
        """Takes away what was not put in its place."""
        if self._writer is not None:
            os.close(self._writer.descriptor)
            self._writer = None
        shutil.rmtree(self._aside, ignore_errors=True)
        self._open.close()

    def _to_manifest(self, data: memoryview) -> memoryview:
        wanted = self._header.manifest_bytes - len(self._head)
        self._head += data[:wanted]
        if len(self._head) == self._header.manifest_bytes:
            self._begin(bytes(self._head))
        return data[wanted:]

    def _begin(self, data: bytes) -> None:
        """The manifest is there: what follows is known."""
        header = self._header
        try:
            manifest = self._known(data) or manifest_of(data, header.digest)
            entries = {entry.path: entry for entry in manifest.files}
            self._entries = [entries[path] for path in checked_paths(header.paths, manifest)]
        except ValueError as error:
            raise PartRefusedError(grpc.StatusCode.INVALID_ARGUMENT, str(error)) from error
        if (manifest.name, manifest.job_id, manifest.run_id) != (header.name, header.job_id, header.run_id):
            raise PartRefusedError(
                grpc.StatusCode.INVALID_ARGUMENT, f"the manifest is that of {manifest.name} of {manifest.run_id}"
            )
        try:
            size = sum(entry.size for entry in self._entries)
            self._open.enter_context(self._space.promised(size, named(header)))
        except NoSpaceError as error:
            raise PartRefusedError(grpc.StatusCode.RESOURCE_EXHAUSTED, str(error)) from error
        self._manifest = manifest
        os.makedirs(self._aside, mode=0o700)
        self._arrival = Arrival(header, data, self._entries, self._aside, self._place.files)
        self._open.enter_context(self._holdings.arrivals.coming(self._arrival))
        self._open_next()

    def _known(self, data: bytes) -> Manifest | None:
        """The same manifest, if another part of the step has brought it here: large ones take long to read."""
        manifest = self._holdings.manifest(self._header.run_id, self._header.name)
        if manifest is None or manifest.digest != hashlib.sha256(data).hexdigest():
            return None
        return manifest if manifest.digest == self._header.digest else None

    def _open_next(self) -> None:
        """Opens the next file that has bytes; empty ones are done at once."""
        while self._count < len(self._entries):
            entry = self._entries[self._count]
            self._writer = SummingWriter(self._new_file(entry), self._arrival.moved)
            if entry.size:
                return
            self._end_file(self._writer)

    def _new_file(self, entry: FileEntry) -> int:
        aside = f"{self._aside}/{self._count}"
        if entry.size >= LEAST_BYTES:
            taken = take_spare(self._place.files.parent, entry.path, Path(aside))
            if taken is not None:
                os.ftruncate(taken, entry.size)
                return taken
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
        return os.open(aside, flags, 0o644)

    def _to_file(self, data: memoryview) -> memoryview:
        if self._writer is None:
            raise PartRefusedError(
                grpc.StatusCode.INVALID_ARGUMENT, f"{named(self._header)} has more bytes than its manifest says"
            )
        left = self._entries[self._count].size - self._writer.size
        self._writer.write(data[:left])
        if len(data) >= left:
            self._end_file(self._writer)
            self._open_next()
        return data[left:]

    def _end_file(self, writer: SummingWriter) -> None:
        os.close(writer.descriptor)
        self._writer = None
        entry = self._entries[self._count]
        if writer.digest != entry.xxh3_128:
            raise PartRefusedError(
                grpc.StatusCode.DATA_LOSS, f"{self._header.name}/{entry.path} did not arrive as it was sealed"
            )
        self._count += 1

    def _put_in_place(self, paths: tuple[str, ...]) -> None:
        # First the manifest: where another step of this name is here, none of its files is touched.
        self._place.files.mkdir(mode=0o700, exist_ok=True)
        _make_folder(self._place.files)
        self._place.publish_manifest(bytes(self._head))
        files = str(self._place.files)
        for folder in sorted({os.path.dirname(path) for path in paths}):
            _make_folder(self._place.files / folder)
        for number, path in enumerate(paths):
            os.rename(f"{self._aside}/{number}", f"{files}/{path}")
        self._place.write_part(self._header.group_rank, paths)

    def _failed(self, error: OSError) -> PartRefusedError:
        if is_full(error) or error.errno == errno.ENOMEM:
            reason = f"there is no room for {named(self._header)}: {error.strerror}"
            return PartRefusedError(grpc.StatusCode.RESOURCE_EXHAUSTED, reason)
        return PartRefusedError(grpc.StatusCode.INTERNAL, f"{named(self._header)} cannot be written: {error}")


def _make_folder(folder: Path) -> None:
    """Makes it, where no link leads elsewhere."""
    folder.mkdir(mode=0o755, parents=True, exist_ok=True)
    if os.path.realpath(folder) != str(folder):
        raise OSError(errno.ELOOP, "a link is in its way", str(folder))
