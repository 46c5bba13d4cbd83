"""Stores for the job's one durable record.

A store holds one record: the job id, the *generation* and the state's rows, each some bytes under a key. Every start
of a master raises the generation, and every write is conditional on it, so a master that was superseded (stopped and
continued, or cut off) can never write again: it gets `Superseded` and must stop without letting any effect out.

Contract, for every kind of store:

- `save` changes all the rows that it is given, or none. It returns only once they survive a power cut. Whatever happens
  meanwhile, `load` returns the rows from before or from after it, never a mixture.
- What was damaged on the disk is never returned: `load` raises `StoreDamaged`, also if a row is missing.
- After a `StoreUnavailable` the record is as before or as intended, and the same `save` may be repeated. If it is a
  `StoreStarved`, the store is fine and this process has no file descriptor left; if it is a `StoreAway`, a service does
  not answer.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import re
import sqlite3
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from dalsegno.protos.text import one_line

from .descriptors import Reserve, are_exhausted
from .paths import is_directory, is_wrong

if TYPE_CHECKING:
    from .etcd_calls import EtcdFiles

__all__ = (
    "MemoryStore",
    "Rows",
    "SqliteStore",
    "Store",
    "StoreAway",
    "StoreDamaged",
    "StoreError",
    "StoreStarved",
    "StoreUnavailable",
    "Superseded",
    "digest_of",
    "is_news",
    "open_store",
)

SCHEMA_VERSION = 3
# Columns of the record's entry in each readable format. Format 2 had no seal; format 1 had the whole record in one row.
_COLUMNS = {
    1: ("one", "job_id", "generation", "data", "digest"),
    2: ("one", "job_id", "generation", "checksum"),
    3: ("one", "job_id", "generation", "checksum", "seal"),
}
# A change: bytes by key; None if the row is deleted.
Rows = dict[str, "bytes | None"]
# Under this key the one record of a store of format 1 is returned.
OLD_RECORD = "record"
# Seconds that a write waits for another process that holds the file's lock. A living master holds it for milliseconds,
# so a process that holds it longer is stopped, or the file system is in trouble.
LOCK_TIMEOUT_SECONDS = 5.0
# Primary codes of SQLite (https://sqlite.org/rescode.html).
_BUSY, _CANTOPEN = 5, 14
# By primary code: why a page cannot be read now, which says nothing about what is in it.
_UNREAD = {_BUSY: "database is locked", 7: "out of memory", 10: "disk I/O error", _CANTOPEN: "it cannot be opened"}
# Descriptors kept back, because a write opens the journal and its directory, and connections must not take them.
RESERVED_DESCRIPTORS = 8


class StoreError(Exception):
    """The store cannot be used; the message is one line for a person with the cause and what to change."""


class StoreDamaged(StoreError):
    """What the store holds is not what was written."""


class StoreUnavailable(StoreError):
    """A read or write failed for now (lock held, disk full, I/O error); it may be tried again."""


class StoreStarved(StoreUnavailable):
    """No file descriptor was left to open a file with. The store is fine, and the shortage passes."""


class StoreAway(StoreUnavailable):
    """The store is a service of its own that does not answer. It comes back without this process's end.

    Attributes:
        cure: what a person can do about it, which the message says, too; empty: it is not known.
    """

    def __init__(self, why: str, cure: str = "") -> None:
        super().__init__(why)
        self.cure = cure


def is_news(error: StoreUnavailable, said: set[str]) -> bool:
    """Whether a person should hear this of an outage of which they have heard `said`; it is added there.

    A service that is away has another reason with each try. The first one is news, and later what they can do.
    """
    what = error.cure if isinstance(error, StoreAway) else str(error)
    news = not said or (what != "" and what not in said)
    said.add(what)
    return news


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

        Load only afterwards, because an earlier owner may write until then. With `owner` it only works if that is the
        present generation: so an owner that learns of higher ones (from agents, after the store was lost) goes above
        them. Raises Superseded, StoreUnavailable.
        """

    def close(self) -> None:
        """Releases the store; safe to repeat."""


@dataclass
class _Record:
    generation: int = 0
    rows: dict[str, bytes] = field(default_factory=dict)


class MemoryStore:
    """A record that ends with the process, for tests and simulations; `share` gives a second owner the same record."""

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


@dataclass(frozen=True)
class _Head:
    """The record's entry; `total` is the checksum of all rows."""

    job_id: str
    generation: int
    total: int


class SqliteStore:
    """The record in a SQLite file: a table of rows, and one entry with job id, generation and a checksum of all rows.

    The entry has a seal of its own, because every write relies on the generation in it, which is the fence.

    A rollback journal, not a WAL: one file that can be copied when the master is down (after a kill with its
    `-journal`, if there is one), and that works on the file systems where a WAL's shared memory does not.
    `synchronous=EXTRA` is FULL plus a sync of the directory after the journal was removed: without it a power cut right
    after a commit may bring the journal back and undo the commit (https://sqlite.org/pragma.html#pragma_synchronous),
    and by then its effects have left.
    """

    def __init__(self, path: Path, job_id: str) -> None:
        """Opens or creates `path`. Raises StoreError if it cannot be used now or ever, or belongs to another job."""
        self._path = path
        try:
            has_parent, is_taken = is_directory(path.parent), is_directory(path)
        except OSError as error:
            kind = StoreError if is_wrong(error) else StoreUnavailable
            raise kind(f"cannot open the store {path}: {error.strerror}") from error
        if not has_parent:
            raise StoreError(
                f"cannot open the store {path}: the directory {path.parent.absolute()} does not exist"
                " (an absolute path takes four slashes: sqlite:////dir/file)"
            )
        if is_taken:
            raise StoreError(f"cannot open the store {path}: it is a directory, name a file in it")
        with contextlib.suppress(OSError):  # it is there, or SQLite says why not
            # Nobody else's: by an agent's address in it one may ask for what the agent has in memory.
            os.close(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600))
        with self._errors("open"):
            # Statements outside `_transaction` commit by themselves (isolation_level None).
            self._db = sqlite3.connect(
                path, timeout=LOCK_TIMEOUT_SECONDS, isolation_level=None, check_same_thread=False
            )
        self._reserve = Reserve(RESERVED_DESCRIPTORS)
        # Invalid text is returned in a form in which a checksum or a seal finds it wrong.
        self._db.text_factory = lambda data: data.decode(errors="surrogateescape")
        try:
            self._prepare(job_id)
        except BaseException:
            self.close()
            raise
        self._file = self._now()

    def is_there(self) -> bool:
        """Whether the file is where it was opened, as SQLite asks before it writes. It may take as long as its disk.

        What nobody can tell for the moment counts as there.
        """
        now = self._now()
        return now == self._file or None in (now, self._file)

    def _now(self) -> int | None:
        """The file's number; 0: there is none; None: nobody can tell."""
        try:
            return os.stat(self._path).st_ino
        except FileNotFoundError:
            return 0
        except OSError:
            return None

    def load(self) -> dict[str, bytes]:
        with self._errors("read"):
            return self._rows(_hex(self._head().total))

    def _rows(self, checksum: object) -> dict[str, bytes]:
        """All rows, which must have this checksum."""
        found: dict[str, bytes] = {}
        total = 0
        for key, data in self._db.execute("SELECT key, data FROM rows"):
            if not isinstance(key, str) or not isinstance(data, bytes):
                raise self._damaged("a row is not bytes")
            found[key] = data
            total ^= digest_of(key, data)
        if _hex(total) != checksum:
            raise self._damaged("the record's checksum is wrong")
        return found

    def save(self, rows: Rows, generation: int) -> None:
        with self._transaction("write"):
            # Conditional on the generation. In a transaction that holds the write lock (BEGIN IMMEDIATE) nobody can
            # raise it between this read and the commit.
            head = self._head()
            if head.generation != generation:
                raise Superseded(generation, head.generation)
            total = head.total
            for key, data in rows.items():
                total ^= self._replace(key, data)
            self._put_head(replace(head, total=total))

    def _replace(self, key: str, data: bytes | None) -> int:
        """Replaces one row, in a transaction. Returns how the checksum of all rows changes."""
        before = self._db.execute("SELECT data FROM rows WHERE key = ?", (key,)).fetchone()
        if before is not None and not isinstance(before[0], bytes):
            raise self._damaged("a row is not bytes")
        change = 0 if before is None else digest_of(key, before[0])
        if data is None:
            self._db.execute("DELETE FROM rows WHERE key = ?", (key,))
            return change
        self._db.execute("INSERT OR REPLACE INTO rows (key, data) VALUES (?, ?)", (key, data))
        return change ^ digest_of(key, data)

    def raise_generation(self, above: int = 0, owner: int | None = None) -> int:
        with self._transaction("write"):
            head = self._head()
            if owner is not None and owner != head.generation:
                raise Superseded(owner, head.generation)
            generation = max(head.generation, above) + 1
            self._put_head(replace(head, generation=generation))
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
            raise self._not_sound(str(verdict))
        with self._transaction("open"):
            version = self._format()
            if version == 0:
                self._create(job_id)
            elif version < SCHEMA_VERSION:
                self._upgrade(version)
            head = self._head()
        if head.job_id != job_id:
            raise StoreError(
                f"the store {self._path} belongs to job {head.job_id!r}, not to {job_id!r}:"
                " give each job its own --store"
            )

    def _not_sound(self, verdict: str) -> StoreError:
        """What the integrity check has found. A page that it could not read is a finding, too, and no error."""
        code = re.search(r"error code=(\d+)", verdict)
        if why := _UNREAD.get(int(code[1]) & 0xFF if code else 0):
            return StoreUnavailable(
                f"cannot read the store {self._path}: {why}; if the same comes again and again, {_CURE}"
            )
        return self._damaged(one_line(verdict))

    def _format(self) -> int:
        """Format of the file; 0: nothing was written yet. The number alone is not believed: it has no checksum."""
        version = int(self._db.execute("PRAGMA user_version").fetchone()[0])
        tables = self._db.execute("SELECT count(*) FROM sqlite_master").fetchone()[0]
        columns = tuple(row[1] for row in self._db.execute("PRAGMA table_info(record)").fetchall())
        if version == 0 and not tables:
            return 0
        if version in _COLUMNS and columns == _COLUMNS[version]:
            return version
        # A file with our seal is ours, whatever number it has.
        if version in _COLUMNS or (columns == _COLUMNS[SCHEMA_VERSION] and self._is_sealed()):
            raise self._damaged(f"it is said to have format {version}, and has not")
        if version == 0:
            raise StoreError(f"{self._path} is a database of something else: name another file with --store")
        raise StoreError(
            f"the store {self._path} has format {version}, this master reads {SCHEMA_VERSION}:"
            " use the version of dalsegno that wrote it"
        )

    def _create(self, job_id: str) -> None:
        self._db.execute(
            "CREATE TABLE record (one INTEGER PRIMARY KEY CHECK (one = 1), job_id TEXT NOT NULL,"
            " generation INTEGER NOT NULL, checksum TEXT NOT NULL, seal TEXT NOT NULL)"
        )
        self._db.execute("CREATE TABLE rows (key TEXT PRIMARY KEY, data BLOB NOT NULL)")
        self._db.execute("INSERT INTO record VALUES (1, '', 0, '', '')")
        self._put_head(_Head(job_id, 0, 0))
        self._db.execute(f"PRAGMA user_version = {SCHEMA_VERSION}")

    def _upgrade(self, version: int) -> None:
        """Upgrades an older format. The single row of format 1 is returned as such until it is written anew."""
        found = self._db.execute("SELECT * FROM record").fetchall()
        if len(found) != 1:
            raise self._damaged(f"{len(found)} records instead of one")
        _, job_id, generation, *rest = found[0]
        if version == 1:
            data, digest = rest
            if data is not None and (not isinstance(data, bytes) or hashlib.sha256(data).hexdigest() != digest):
                raise self._damaged("the record's checksum is wrong")
            rows = {} if data is None else {OLD_RECORD: data}
        else:
            rows = self._rows(rest[0])
            self._db.execute("DROP TABLE rows")
        self._db.execute("DROP TABLE record")
        self._create(job_id)
        total = 0
        for key, data in rows.items():
            total ^= self._replace(key, data)
        self._put_head(_Head(job_id, generation, total))

    def _head(self) -> _Head:
        rows = self._db.execute("SELECT job_id, generation, checksum, seal FROM record").fetchall()
        if len(rows) != 1:
            raise self._damaged(f"{len(rows)} records instead of one")
        job_id, generation, checksum, seal = rows[0]
        if seal != _seal(job_id, generation, checksum):
            raise self._damaged("the seal of its job, generation and checksum is wrong")
        return _Head(job_id, generation, int(checksum, 16))

    def _is_sealed(self) -> bool:
        try:
            self._head()
        except StoreDamaged:
            return False
        return True

    def _put_head(self, head: _Head) -> None:
        values = (head.job_id, head.generation, _hex(head.total))
        self._db.execute(
            "UPDATE record SET job_id = ?, generation = ?, checksum = ?, seal = ?", (*values, _seal(*values))
        )

    def _damaged(self, how: str) -> StoreDamaged:
        return StoreDamaged(f"the store {self._path} is damaged: {how}; {_CURE}")

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
            text = one_line(str(error))
            # If a process is out of descriptors, SQLite only says that it cannot open a file.
            if _is(error, _CANTOPEN, "unable to open") and are_exhausted():
                raise StoreStarved(
                    f"cannot {doing} the store {self._path}: no file descriptor is left, connections hold them all:"
                    " raise the limit (ulimit -n), or see who connects"
                ) from error
            if _is(error, _BUSY, "locked"):
                text = f"another process holds its lock for more than {LOCK_TIMEOUT_SECONDS:g} s (a stopped master?)"
            raise StoreUnavailable(f"cannot {doing} the store {self._path}: {text}") from error
        except (sqlite3.DatabaseError, UnicodeDecodeError) as error:
            # SQLite's own message may quote bytes of the file that are no text.
            raise self._damaged(one_line(str(error))) from error


def _is(error: sqlite3.Error, code: int, words: str) -> bool:
    """Whether it is this error of SQLite's. In Python 3.10 only its words tell."""
    found: int | None = getattr(error, "sqlite_errorcode", None)
    return words in str(error) if found is None else found & 0xFF == code


def _seal(job_id: object, generation: object, checksum: object) -> str:
    """Seal of the record's entry, whatever values it has."""
    text = f"{SCHEMA_VERSION}:{generation!r}:{checksum!r}:{job_id!r}"
    return hashlib.sha256(text.encode(errors="surrogateescape")).hexdigest()


def digest_of(key: str, data: bytes) -> int:
    """Digest of one row. Those of all rows are combined by exclusive or, so changing one row costs one row."""
    named = f"{len(key)}:{key}:".encode(errors="surrogateescape")
    return int.from_bytes(hashlib.sha256(named + data).digest(), "big")


def _hex(total: int) -> str:
    return f"{total:064x}"


_CURE = "move the file away to have the job found again from its checkpoints"


def open_store(url: str, job_id: str, etcd: EtcdFiles | None = None) -> Store:
    """Opens the store that `url` names for `job_id`.

    `sqlite:///FILE` (three slashes and a relative path, or four if it is absolute), `etcd://HOST:PORT,HOST:PORT` with
    the files for its TLS, or `memory://`. Raises StoreError with one line if that is not possible.
    """
    scheme, separator, rest = url.partition("://")
    if not separator:
        raise StoreError(f"--store {url!r} is not a URL: write sqlite:///FILE, or etcd://HOST:PORT")
    if scheme == "etcd":
        from .etcd_calls import EtcdFiles
        from .etcd_store import open_etcd

        return open_etcd(rest, job_id, etcd or EtcdFiles())
    if etcd is not None:
        raise StoreError(f"--store {url!r} is not etcd's: --etcd-ca, --etcd-cert and --etcd-key have no effect with it")
    if scheme == "memory":
        return MemoryStore()
    if scheme == "sqlite":
        if not rest.startswith("/") or rest == "/":
            raise StoreError(f"--store {url!r} names no file: write sqlite:///FILE (sqlite:////dir/file if absolute)")
        return SqliteStore(Path(rest[1:]), job_id)
    raise StoreError(f"--store {url!r}: there is no {scheme!r} store, write sqlite:///FILE, or etcd://HOST:PORT")
