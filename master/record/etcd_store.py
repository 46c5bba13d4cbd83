"""The record in etcd, under `/dalsegno/<job>/`: chunks of rows, named by their digests, and one head.

A save writes the chunks that are missing, and then changes the head, on the condition that the head is the one that
this owner wrote last. So the generation in the head is the fence: whoever raises it changes the head, and nobody else's
condition holds any more. What is small enough goes in one transaction.

An answer may get lost. Then the head is read: each owner has a random name, so it knows its own writes.
"""

from __future__ import annotations

import contextlib
import logging
import secrets
import shlex
from collections.abc import Iterator
from dataclasses import replace

from dalsegno.protos.grouping import grouped
from dalsegno.protos.text import one_line

from .chunks import BUCKETS, Head, WrongChunk, bucket_of, chunk_digest, decoded, encoded, packed, unpacked
from .etcd_calls import Change, Etcd, EtcdFiles, EtcdUnavailable, Value, endpoints_of
from .store import Rows, StoreAway, StoreDamaged, StoreError, StoreUnavailable, Superseded, digest_of

__all__ = ["PREFIX", "EtcdStore", "open_client", "open_etcd"]

log = logging.getLogger(__name__)

PREFIX = "/dalsegno"
# The most bytes, and changes, of one transaction: etcd's own limits are 1.5 MiB and 128.
MOST_BYTES, MOST_CHANGES = 1 << 20, 100
# How many chunks are read at once: few requests for a record of usual size, and 8 MiB at most for one.
CHUNKS_AT_ONCE = 8
# How often something is read again that others change meanwhile.
MOST_TRIES = 10


def open_etcd(hosts: str, job_id: str, files: EtcdFiles) -> EtcdStore:
    """Opens the store that `etcd://` and these hosts name. Raises StoreError: that is not possible; one line."""
    return EtcdStore(open_client(hosts, files), job_id)


def open_client(hosts: str, files: EtcdFiles, **limits: float) -> Etcd:
    """A client of the etcd that `etcd://` and these hosts name; `limits` are those of `Etcd`, in seconds.

    Raises:
        StoreError: that is not possible; one line.
    """
    if "@" in hosts:
        raise StoreError(
            "--store has a name or password in it, which everybody sees who lists processes: use certificates "
            "(--etcd-cert, --etcd-key)"
        )
    hosts = hosts.rstrip("/")
    if "/" in hosts:
        raise StoreError(f"--store etcd://{hosts} has a path: write etcd://HOST:PORT,HOST:PORT; keys are /dalsegno/JOB")
    if (files.cert is None) != (files.key is None):
        raise StoreError("--etcd-cert and --etcd-key belong together: give both or none")
    if files.cert is not None and files.ca is None:
        raise StoreError("--etcd-cert has no effect without --etcd-ca, the authority of etcd's own certificate")
    try:
        return Etcd(endpoints_of(hosts), files, **limits)
    except ValueError as error:
        raise StoreError(f"--store etcd://{hosts}: {error}") from error
    except OSError as error:
        raise StoreError(f"cannot read {error.filename} for etcd: {error.strerror or error}") from error
    except (ImportError, RuntimeError) as error:
        why = one_line(str(error))
        raise StoreError(f"--store etcd:// wants aetcd's messages ({why}): pip install 'dalsegno[etcd]'") from error


class EtcdStore:
    """A job's record in etcd. See `store.Store`.

    Args:
        client: its own from here on.
        job_id: whose record it is.
    """

    def __init__(self, client: Etcd, job_id: str) -> None:
        self._client, self._job_id = client, job_id
        self._at = f"{PREFIX}/{job_id}/"
        self._owner = secrets.token_hex(8)
        # The head as it was read or written last, with its bytes, the revision of its key (0: it is not there), and the
        # rows.
        self._head, self._held, self._revision = Head(job_id), b"", 0
        self._rows: list[dict[str, bytes]] = [{} for _ in range(BUCKETS)]
        # Chunks that are there and that no head names any more.
        self._garbage: set[str] = set()
        self._is_checked = False
        # Who was to raise the generation last, and to which one.
        self._tried: tuple[int | None, int] = (None, 0)

    def load(self) -> dict[str, bytes]:
        """See `store.Store`."""
        if not self._is_checked:
            self._check()
        with self._errors("read"):
            self._refresh()
        self._is_checked = True
        return {key: data for rows in self._rows for key, data in rows.items()}

    def save(self, rows: Rows, generation: int) -> None:
        """See `store.Store`."""
        with self._errors("write"):
            for _ in range(MOST_TRIES):
                if (self._head.generation, self._head.owner) != (generation, self._owner):
                    self._refresh()
                # With an old copy of etcd another master may have been given the same generation.
                if (self._head.generation, self._head.owner) != (generation, self._owner):
                    raise Superseded(generation, self._head.generation)
                if self._put(self._changed(rows), generation):
                    return
        raise StoreUnavailable(f"cannot write the store in etcd: its head has changed {MOST_TRIES} times meanwhile")

    def raise_generation(self, above: int = 0, owner: int | None = None) -> int:
        """See `store.Store`."""
        with self._errors("write"):
            for _ in range(MOST_TRIES):
                self._refresh()
                before = self._head.generation
                # With an old copy of etcd another master may have been given the same generation.
                if owner is not None and (owner, self._owner) != (before, self._head.owner):
                    # It may have been this owner, in a try of which the answer was lost.
                    if self._head.owner != self._owner or self._tried != (owner, before):
                        raise Superseded(owner, before)
                    if before > above:
                        self._sweep()
                        return before
                generation = max(before, above) + 1
                self._tried = (owner, generation)
                head = replace(self._head, generation=generation, owner=self._owner, number=self._head.number + 1)
                if self._put_head(head, [], self._rows):
                    self._sweep()
                    return generation
        raise StoreUnavailable(f"cannot write the store in etcd: its head has changed {MOST_TRIES} times meanwhile")

    def give_up(self) -> None:
        """The process ends: what is read or written fails within the time of one call. For another thread."""
        self._client.give_up()

    def close(self) -> None:
        """See `store.Store`."""
        self._client.close()

    def _check(self) -> None:
        """Raises StoreError if the endpoints are not of one etcd."""
        if (two := self._client.strangers()) is not None:
            raise StoreError(
                f"--store names {two[1]} and {two[0]}: two etcds with a record each: name the members of one, or make"
                " them one (--initial-cluster)"
            )

    # Writing.

    def _changed(self, rows: Rows) -> dict[int, dict[str, bytes]]:
        """The buckets that these changes make other ones."""
        found: dict[int, dict[str, bytes]] = {}
        for key, data in rows.items():
            number = bucket_of(key)
            bucket = found.setdefault(number, dict(self._rows[number]))
            if data is None:
                bucket.pop(key, None)
            else:
                bucket[key] = data
        return {number: bucket for number, bucket in found.items() if bucket != self._rows[number]}

    def _put(self, buckets: dict[int, dict[str, bytes]], generation: int) -> bool:
        """Writes these buckets. False: the head is another one now, which was read."""
        names, there = list(self._head.chunks), self._head.digests() | self._garbage
        missing: dict[str, bytes] = {}
        total = int(self._head.total, 16)
        kept = list(self._rows)
        for number, rows in buckets.items():
            chunks = [(chunk_digest(chunk), chunk) for chunk in packed(rows)]
            names[number] = tuple(digest for digest, _ in chunks)
            missing |= {digest: chunk for digest, chunk in chunks if digest not in there}
            for key, data in (*self._rows[number].items(), *rows.items()):
                total ^= digest_of(key, data)
            kept[number] = rows
        head = replace(
            self._head,
            generation=generation,
            owner=self._owner,
            number=self._head.number + 1,
            total=f"{total:064x}",
            chunks=tuple(names),
        )
        return self._put_head(head, self._first(missing), kept)

    def _first(self, missing: dict[str, bytes]) -> list[Change]:
        """Writes chunks for which one transaction has no room. Returns the changes that go into the head's."""
        chunks = grouped(missing.items(), lambda one: len(one[1]), MOST_CHANGES, MOST_BYTES)
        groups = [[Change(self._chunk(digest), chunk) for digest, chunk in group] for group in chunks] or [[]]
        for group in groups[:-1]:
            # If the head is another one by now, nothing is written here, and the head's own write finds that out.
            self._client.change(self._at + "head", self._revision, group, self._held)
        return groups[-1]

    def _put_head(self, head: Head, changes: list[Change], rows: list[dict[str, bytes]]) -> bool:
        """Writes the head with these changes, and deletes chunks that it does not name. False: as with `_put`."""
        old = (self._head.digests() | self._garbage) - head.digests()
        deleted = sorted(old)[: max(0, MOST_CHANGES - len(changes))]
        changes = [*changes, *(Change(self._chunk(digest), None) for digest in deleted)]
        key, data = self._at + "head", encoded(head)
        revision = self._client.change(key, self._revision, [*changes, Change(key, data)], self._held)
        if not revision:
            # Somebody else's is there; or ours, of a try of which the answer was lost.
            found = self._client.get(key)
            if found is None or found.data != data:
                self._refresh()
                return False
            revision = found.revision
        self._head, self._held, self._revision, self._rows = head, data, revision, rows
        self._garbage = old - set(deleted)
        return True

    def _sweep(self) -> None:
        """Finds chunks that no head names: those of writes that were not ended. They go with the next writes."""
        start = len(self._at) + len("chunk/")
        self._garbage = {name[start:] for name in self._client.names(self._chunk(""))} - self._head.digests()

    # Reading.

    def _refresh(self) -> None:
        """Reads the head and what it names, as far as that is not known: all as of one revision, whoever writes."""
        found = self._client.get(self._at + "head")
        if found is None:
            if self._revision:
                raise StoreDamaged(f"the store in etcd is damaged: {self._at}head is gone; {self._cure}")
            return
        head = decoded(found.data)
        if head.job_id != self._job_id:
            raise StoreError(f"{self._at}head in etcd is of job {head.job_id!r}: give each job its own name")
        if self._has_gone_back(head):
            self._write_anew(head, found)
            return
        self._rows = self._read(head, found.at)
        self._head, self._held, self._revision = head, found.data, found.revision

    def _has_gone_back(self, head: Head) -> bool:
        """Whether this is older than what this owner wrote last: somebody has put an old copy of etcd in its place."""
        earlier = head.owner == self._owner or head.generation < self._head.generation
        return self._head.owner == self._owner and earlier and head.number < self._head.number

    def _write_anew(self, old: Head, found: Value) -> None:
        """Writes all rows over an older record: mixed with that one's, changes that nobody repeats would be lost.

        Raises EtcdUnavailable; StoreAway if the record has changed meanwhile. Then the next try finds it out again.
        """
        before = head, rows, *_ = self._head, self._rows, self._held, self._revision, self._garbage
        log.warning(
            "the record in etcd has gone back, from write %d to write %d: all of it is written anew",
            head.number,
            old.number,
        )
        everything: Rows = {key: data for bucket in rows for key, data in bucket.items()}
        self._head, self._rows = Head(self._job_id, number=old.number), [{} for _ in range(BUCKETS)]
        self._held, self._revision, self._garbage = found.data, found.revision, old.digests()
        written = False
        try:
            written = self._put(self._changed(everything), head.generation)
        finally:
            if not written:
                # Whatever was read meanwhile: this owner's own chunks may not be there.
                self._head, self._rows, self._held, self._revision, self._garbage = before
        if not written:
            raise StoreAway("cannot write the store in etcd: it has gone back, and changed meanwhile")
        self._sweep()

    def _read(self, head: Head, at: int) -> list[dict[str, bytes]]:
        """The rows that a head names, as they were in this revision."""
        changed = [number for number in range(BUCKETS) if head.chunks[number] != self._head.chunks[number]]
        chunks = self._chunks([digest for number in changed for digest in head.chunks[number]], at)
        found = list(self._rows)
        for number in changed:
            found[number] = unpacked([chunks[digest] for digest in head.chunks[number]])
        total = 0
        for rows in found:
            for key, value in rows.items():
                total ^= digest_of(key, value)
        if f"{total:064x}" != head.total:
            raise WrongChunk("the record's checksum is wrong")
        return found

    def _chunks(self, digests: list[str], at: int) -> dict[str, bytes]:
        """These chunks, as they were in this revision."""
        found: dict[str, bytes] = {}
        for first in range(0, len(digests), CHUNKS_AT_ONCE):
            some = digests[first : first + CHUNKS_AT_ONCE]
            for digest, chunk in zip(some, self._client.get_all([self._chunk(one) for one in some], at), strict=True):
                if chunk is None:
                    raise WrongChunk("chunks that its head names are gone")
                if chunk_digest(chunk.data) != digest:
                    raise WrongChunk("a chunk is not what its name says")
                found[digest] = chunk.data
        return found

    def _chunk(self, digest: str) -> str:
        return f"{self._at}chunk/{digest}"

    @contextlib.contextmanager
    def _errors(self, doing: str) -> Iterator[None]:
        try:
            yield
        except EtcdUnavailable as error:
            raise StoreAway(f"cannot {doing} the store in etcd: {error}", error.cure) from error
        except WrongChunk as error:
            raise StoreDamaged(f"the store in etcd ({self._at}) is damaged: {error}; {self._cure}") from error

    @property
    def _cure(self) -> str:
        # Without the last slash the keys of every job go whose name begins like this one's.
        command = f"etcdctl del --prefix {shlex.quote(self._at)}"
        return f"delete its keys ({command}) to have the job found again from its checkpoints"
