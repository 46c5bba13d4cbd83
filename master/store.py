"""Where the job's one durable record lives.

A store holds one record: the job id, the *generation* and the state's rows, each some bytes under a key. Every start
of a master raises the generation, and every write is conditional on it, so a master that was superseded (stopped and
continued, or cut off) can never write again: it gets `Superseded` and must stop without letting any effect out.

Contract, for every kind of store:

- `save` changes all the rows that it is given, or none. It returns only once they survive a power cut; whatever happens
  meanwhile, `load` gives the rows as they were before or as they are then, never a mixture.
- What was damaged on the disk is never returned: `load` raises `StoreDamaged`, also where a row is missing.
- A `StoreUnavailable` leaves the record as it was or as it was meant to become, and the same `save` may be repeated;
  where it is `StoreStarved`, the store is well and this process has no file descriptor left.
"""

from __future__ import annotations

import contextlib
import hashlib
import sqlite3
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

from .descriptors import Reserve, are_exhausted

__all__ = (
    "MemoryStore",
    "Rows",
    "SqliteStore",
    "Store",
    "StoreDamaged",
    "StoreError",
    "StoreStarved",
    "StoreUnavailable",
    "Superseded",
    "open_store",
)

SCHEMA_VERSION = 2
# What changes: bytes by key; None where a row goes.
Rows = dict[str, "bytes | None"]
# Under this key the one record of a store of format 1 is handed out.
OLD_RECORD = "record"
# How long a write waits for another process that holds the file's lock; in seconds. A living master holds it for
# milliseconds, so whoever holds it longer is stopped or the file system is in trouble.
LOCK_TIMEOUT = 5.0
# A write opens the journal and its directory; connections must not be able to take what it needs.
RESERVED_DESCRIPTORS = 8


class StoreError(Exception):
    """The store cannot be used; the message is one line for a person with the cause and what to change."""


class StoreDamaged(StoreError):
    """What the store holds is not what was written."""


class StoreUnavailable(StoreError):
    """A read or write failed for now (lock held, disk full, I/O error); it may be tried again."""


class StoreStarved(StoreUnavailable):
    """No file descriptor was left to open a file with. That is no failure of the store's, and passes."""


class Superseded(StoreError):
    """Another master has raised the generation: this one must stop."""

    def __init__(self, own: int, present: int) -> None:
        super().__init__(f"generation {own} was superseded by generation {present}: another master serves this job")
        self.own = own
        self.present = present


class Store(Protocol):
    """One job's durable record. Methods block; they are called from one thread at a time, not always the same."""

    def load(self) -> dict[str, bytes]:
        """All rows; empty before the first `save`.

        Raises StoreDamaged, StoreUnavailable.
        """

    def save(self, rows: Rows, generation: int) -> None:
        """Changes these rows in one transaction, on the condition that `generation` is the store's.

        Raises Superseded, StoreUnavailable.
        """

    def raise_generation(self, above: int = 0, owner: int | None = None) -> int:
        """Makes the caller the store's owner: sets the generation to max(present, above) + 1 and returns it.

        Load only afterwards: an earlier owner may write until then. With `owner`, only if that is the present
        generation: so an owner that learns of higher ones (from agents, after the store was lost) goes above them.
        Raises Superseded, StoreUnavailable.
        """

    def close(self) -> None:
        """Releases the store; safe to repeat."""


@dataclass
class _Record:
    generation: int = 0
    rows: dict[str, bytes] = field(default_factory=dict)


class MemoryStore:
    """A record that dies with the process, for tests and simulations; `share` gives a second owner the same record."""

    def __init__(self, record: _Record | None = None) -> None:
        self._record = record if record is not None else _Record()

    def share(self) -> MemoryStore:
        return MemoryStore(self._record)

    def load(self) -> dict[str, bytes]:
        return dict(self._record.rows)

    def save(self, rows: Rows, generation: int) -> None:
        if generation != self._record.generation:
            raise Superseded(generation, self._record.generation)
        for key, data in rows.items():
            if data is None:
                self._record.rows.pop(key, None)
            else:
                self._record.rows[key] = data

    def raise_generation(self, above: int = 0, owner: int | None = None) -> int:
        if owner is not None and owner != self._record.generation:
            raise Superseded(owner, self._record.generation)
        self._record.generation = max(self._record.generation, above) + 1
        return self._record.generation

    def close(self) -> None:
        pass


class SqliteStore:
    """The record in a SQLite file: a table of rows, and one entry with the generation and a checksum of all of them.

    A rollback journal, not a WAL: one file that can be copied when the master is down, and that works on the file
    systems where a WAL's shared memory does not. `synchronous=EXTRA` is FULL plus a sync of the directory after the
    journal was removed: without it a power cut right after a commit may bring the journal back and undo the commit
    (https://sqlite.org/pragma.html#pragma_synchronous), and by then its effects have left.
    """

    def __init__(self, path: Path, job_id: str) -> None:
        """Opens or creates `path`. Raises StoreError where it cannot be used or belongs to another job."""
        self._path = path
        self._reserve = Reserve(RESERVED_DESCRIPTORS)
        if not path.parent.is_dir():
            raise StoreError(
                f"cannot open the store {path}: the directory {path.parent.absolute()} does not exist"
                " (an absolute path takes four slashes: sqlite:////dir/file)"
            )
        if path.is_dir():
            raise StoreError(f"cannot open the store {path}: it is a directory, name a file in it")
        with self._errors("open"):
            # Statements outside `_transaction` commit by themselves (isolation_level None).
            self._db = sqlite3.connect(path, timeout=LOCK_TIMEOUT, isolation_level=None, check_same_thread=False)
        try:
            self._prepare(job_id)
        except BaseException:
            self.close()
            raise

    def load(self) -> dict[str, bytes]:
        with self._errors("read"):
            rows = self._db.execute("SELECT key, data FROM rows").fetchall()
            total = self._total()
        found: dict[str, bytes] = {}
        check = 0
        for key, data in rows:
            if not isinstance(key, str) or not isinstance(data, bytes):
                raise StoreDamaged(f"the store {self._path} is damaged: a row is not bytes; {_CURE}")
            found[key] = data
            check ^= _digest(key, data)
        if check != total:
            raise StoreDamaged(f"the store {self._path} is damaged: the record's checksum is wrong; {_CURE}")
        return found

    def save(self, rows: Rows, generation: int) -> None:
        with self._transaction("write"):
            # Conditional on the generation. In a transaction that holds the write lock (BEGIN IMMEDIATE) nobody can
            # raise it between this read and the commit.
            present = self._generation()
            if present != generation:
                raise Superseded(generation, present)
            total = self._total()
            for key, data in rows.items():
                total ^= self._replace(key, data)
            self._db.execute("UPDATE record SET checksum = ?", (_hex(total),))

    def _replace(self, key: str, data: bytes | None) -> int:
        """One row, in a transaction. Returns by what the checksum of all rows changes."""
        before = self._db.execute("SELECT data FROM rows WHERE key = ?", (key,)).fetchone()
        change = 0 if before is None else _digest(key, before[0])
        if data is None:
            self._db.execute("DELETE FROM rows WHERE key = ?", (key,))
            return change
        self._db.execute("INSERT OR REPLACE INTO rows (key, data) VALUES (?, ?)", (key, data))
        return change ^ _digest(key, data)

    def raise_generation(self, above: int = 0, owner: int | None = None) -> int:
        with self._transaction("write"):
            present = self._generation()
            if owner is not None and owner != present:
                raise Superseded(owner, present)
            generation = max(present, above) + 1
            self._db.execute("UPDATE record SET generation = ?", (generation,))
        return generation

    def close(self) -> None:
        self._db.close()
        self._reserve.close()

    def _prepare(self, job_id: str) -> None:
        with self._errors("open"):
            self._db.execute("PRAGMA journal_mode = DELETE")
            self._db.execute("PRAGMA synchronous = EXTRA")
            verdict = self._db.execute("PRAGMA integrity_check(1)").fetchone()[0]
        if verdict != "ok":
            raise StoreDamaged(f"the store {self._path} is damaged: {_one_line(verdict)}; {_CURE}")
        with self._transaction("open"):
            version = self._db.execute("PRAGMA user_version").fetchone()[0]
            if version == 0:
                self._create(job_id)
            elif version == 1:
                self._upgrade()
            elif version != SCHEMA_VERSION:
                raise StoreError(
                    f"the store {self._path} has format {version}, this master reads {SCHEMA_VERSION}:"
                    " use the version of dalsegno that wrote it"
                )
            rows = self._db.execute("SELECT job_id FROM record").fetchall()
        if len(rows) != 1:
            raise StoreDamaged(f"the store {self._path} is damaged: {len(rows)} records instead of one; {_CURE}")
        if rows[0][0] != job_id:
            raise StoreError(
                f"the store {self._path} belongs to job {rows[0][0]!r}, not to {job_id!r}:"
                " give each job its own --store"
            )

    def _create(self, job_id: str) -> None:
        tables = self._db.execute("SELECT count(*) FROM sqlite_master").fetchone()[0]
        if tables:
            raise StoreError(f"{self._path} is a database of something else: name another file with --store")
        self._db.execute(
            "CREATE TABLE record (one INTEGER PRIMARY KEY CHECK (one = 1), job_id TEXT NOT NULL,"
            " generation INTEGER NOT NULL, checksum TEXT NOT NULL)"
        )
        self._db.execute("CREATE TABLE rows (key TEXT PRIMARY KEY, data BLOB NOT NULL)")
        self._db.execute(
            "INSERT INTO record (one, job_id, generation, checksum) VALUES (1, ?, 0, ?)", (job_id, _hex(0))
        )
        self._db.execute(f"PRAGMA user_version = {SCHEMA_VERSION}")

    def _upgrade(self) -> None:
        """Format 1 had the whole record in one row. It is handed out as such until it is written anew."""
        old = self._db.execute("SELECT job_id, generation, data, digest FROM record").fetchall()
        if len(old) != 1:
            raise StoreDamaged(f"the store {self._path} is damaged: {len(old)} records instead of one; {_CURE}")
        job_id, generation, data, digest = old[0]
        if data is not None and (not isinstance(data, bytes) or hashlib.sha256(data).hexdigest() != digest):
            raise StoreDamaged(f"the store {self._path} is damaged: the record's checksum is wrong; {_CURE}")
        self._db.execute("DROP TABLE record")
        self._create(job_id)
        total = 0 if data is None else self._replace(OLD_RECORD, data)
        self._db.execute("UPDATE record SET generation = ?, checksum = ?", (generation, _hex(total)))

    def _total(self) -> int:
        row = self._db.execute("SELECT checksum FROM record").fetchone()
        if row is None:
            raise StoreDamaged(f"the store {self._path} is damaged: its record is gone; {_CURE}")
        try:
            return int(row[0], 16)
        except (TypeError, ValueError):
            raise StoreDamaged(f"the store {self._path} is damaged: its checksum is no number; {_CURE}") from None

    def _generation(self) -> int:
        row = self._db.execute("SELECT generation FROM record").fetchone()
        if row is None:
            raise StoreDamaged(f"the store {self._path} is damaged: its record is gone; {_CURE}")
        return int(row[0])

    @contextlib.contextmanager
    def _transaction(self, doing: str) -> Iterator[None]:
        with self._errors(doing), self._reserve.released():
            self._db.execute("BEGIN IMMEDIATE")
            try:
                yield
                self._db.execute("COMMIT")
            except BaseException:
                # SQLite ends the transaction itself on some errors (disk full, I/O error).
                if self._db.in_transaction:
                    self._db.execute("ROLLBACK")
                raise

    @contextlib.contextmanager
    def _errors(self, doing: str) -> Iterator[None]:
        """Turns SQLite's errors into ours. Its names are on https://sqlite.org/rescode.html."""
        try:
            yield
        except sqlite3.OperationalError as error:
            text = _one_line(str(error))
            # SQLite says of an exhausted process only that it cannot open a file.
            if "unable to open" in text and are_exhausted():
                raise StoreStarved(
                    f"cannot {doing} the store {self._path}: no file descriptor is left, connections hold them all:"
                    " raise the limit (ulimit -n), or see who connects"
                ) from error
            if "locked" in text:
                text = f"another process holds its lock for more than {LOCK_TIMEOUT:g} s (a stopped master?)"
            raise StoreUnavailable(f"cannot {doing} the store {self._path}: {text}") from error
        except sqlite3.DatabaseError as error:
            raise StoreDamaged(f"the store {self._path} is damaged: {_one_line(str(error))}; {_CURE}") from error


def _digest(key: str, data: bytes) -> int:
    """Of one row. Those of all rows are combined by exclusive or, so that one row's change costs one row."""
    named = f"{len(key)}:{key}:".encode()
    return int.from_bytes(hashlib.sha256(named + data).digest(), "big")


def _hex(total: int) -> str:
    return f"{total:064x}"


_CURE = "move the file away to have the job found again from its checkpoints"


def _one_line(text: str) -> str:
    return " ".join(text.split())


def open_store(url: str, job_id: str) -> Store:
    """Opens the store that `url` names for `job_id`.

    `sqlite:///FILE` (three slashes and a relative path, or four for an absolute one) or `memory://`.
    Raises StoreError with one line where that is not possible.
    """
    scheme, separator, rest = url.partition("://")
    if not separator:
        raise StoreError(f"--store {url!r} is not a URL: write sqlite:///FILE")
    if scheme == "memory":
        return MemoryStore()
    if scheme == "sqlite":
        if not rest.startswith("/") or rest == "/":
            raise StoreError(f"--store {url!r} names no file: write sqlite:///FILE (sqlite:////dir/file if absolute)")
        return SqliteStore(Path(rest[1:]), job_id)
    raise StoreError(f"--store {url!r}: there is no {scheme!r} store, write sqlite:///FILE")
