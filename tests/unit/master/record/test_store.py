"""The master's store: conditional writes, power cuts, damage, other people's files."""

from __future__ import annotations

import argparse
import errno
import functools
import gc
import hashlib
import math
import os
import re
import resource
import shutil
import sqlite3
import stat
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from dalsegno.master import cli
from dalsegno.master.brain.state import MemberState, Phase
from dalsegno.master.record import store as store_module
from dalsegno.master.record.codec import JobCodec
from dalsegno.master.record.descriptors import are_exhausted
from dalsegno.master.record.store import (
    LOCK_TIMEOUT_SECONDS,
    MemoryStore,
    SqliteStore,
    Store,
    StoreDamaged,
    StoreError,
    StoreStarved,
    StoreUnavailable,
    Superseded,
    open_store,
)
from tests.support.jobs.etcd_members import ETCD, MISSING, etcd_members
from tests.support.jobs.store_writer import check_whole, killed_after, store_writer

_opened: list[SqliteStore] = []


def opened(path: Path, job_id: str = "job") -> SqliteStore:
    """A store that is closed at the test's end: its reserved descriptors would never be given back."""
    _opened.append(SqliteStore(path, job_id))
    return _opened[-1]


@pytest.fixture(autouse=True)
def closed() -> Iterator[None]:
    yield
    while _opened:
        _opened.pop().close()


@pytest.fixture(scope="module")
def etcd(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """A real one, as `--store` names it."""
    if ETCD is None:
        pytest.skip(MISSING)
    with etcd_members(tmp_path_factory.mktemp("etcd"), unread="its tests damage records") as members:
        yield members.url


@pytest.fixture(params=["sqlite", "memory", "etcd"])
def pair(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[tuple[Store, Store]]:
    """Two owners of one record, as two masters of one job have it."""
    if request.param == "memory":
        memory = MemoryStore()
        yield memory, memory.share()
    elif request.param == "sqlite":
        yield opened(tmp_path / "s.sqlite"), opened(tmp_path / "s.sqlite")
    else:
        job = request.node.originalname
        stores = [open_store(request.getfixturevalue("etcd"), job) for _ in range(2)]
        yield stores[0], stores[1]
        for store in stores:
            store.close()


@pytest.mark.slow
def test_a_new_store_is_empty_and_gives_back_what_was_saved(pair: tuple[Store, Store]) -> None:
    """Load gives no rows first, then each row as it was saved last, without those that are gone."""
    store, other = pair
    assert store.load() == {}
    generation = store.raise_generation()
    store.save({"a": b"one", "b": b"1"}, generation)
    store.save({"a": b"\x00two", "c": b"3"}, generation)
    store.save({"b": None, "never": None}, generation)
    assert store.load() == other.load() == {"a": b"\x00two", "c": b"3"}


def test_only_its_user_reads_the_record(tmp_path: Path) -> None:
    """It has the secrets that agents ask each other for; nor the journal beside it, which has the file's mode."""
    before = os.umask(0o002)
    try:
        store = opened(tmp_path / "job.sqlite")
    finally:
        os.umask(before)
    store.save({"row": b"data"}, store.raise_generation())
    assert [stat.S_IMODE(path.stat().st_mode) for path in tmp_path.iterdir()] == [0o600]


def test_a_superseded_owner_never_writes_again(pair: tuple[Store, Store]) -> None:
    """Every write is conditional on the generation."""
    old, new = pair
    first = old.raise_generation()
    old.save({"a": b"old"}, first)
    second = new.raise_generation()
    assert second > first
    with pytest.raises(Superseded, match=f"generation {first} was superseded by generation {second}"):
        old.save({"a": b"late"}, first)
    assert new.load() == {"a": b"old"}
    with pytest.raises(Superseded):
        old.raise_generation(above=99, owner=first)
    new.save({"a": b"new"}, second)
    assert old.load() == {"a": b"new"}


def test_the_generation_goes_above_what_agents_have_seen(pair: tuple[Store, Store]) -> None:
    """After a lost store the owner jumps over the generations that agents know; they only grow."""
    store, _ = pair
    first = store.raise_generation()
    assert store.raise_generation(above=41, owner=first) == 42
    assert store.raise_generation(above=7) == 43


@pytest.mark.slow
def test_kill_between_any_two_writes_leaves_a_whole_record(tmp_path: Path) -> None:
    """SIGKILL of a writing process, at many moments: the record is the last one acknowledged, or the one after."""
    path = tmp_path / "s.sqlite"
    for attempt in range(6):
        acknowledged = killed_after(store_writer(f"sqlite:///{path}", "job"), 3 + 7 * attempt)
        store = opened(path)
        check_whole(store, acknowledged)
        store.close()


def test_a_power_cut_within_a_transaction_rolls_back(tmp_path: Path) -> None:
    """The files as they lie in the middle of a transaction (database half written, journal there) load as before."""
    path, cut = tmp_path / "s.sqlite", tmp_path / "cut"
    store = opened(path)
    generation = store.raise_generation()
    before = {"a": b"before " * 20_000, "b": b"before"}
    store.save(before, generation)
    database = sqlite3.connect(path, isolation_level=None)
    # A cache of one page: SQLite has to spill into the database file before the commit.
    database.execute("PRAGMA cache_size = 1")
    database.execute("BEGIN IMMEDIATE")
    database.execute("UPDATE rows SET data = ?", (b"after  " * 20_000,))
    cut.mkdir()
    for file in tmp_path.glob("s.sqlite*"):
        shutil.copy(file, cut / file.name)
    database.close()
    assert (cut / "s.sqlite-journal").exists()
    assert (cut / "s.sqlite").read_bytes() != path.read_bytes()
    assert opened(cut / "s.sqlite").load() == before


def test_every_commit_is_durable(tmp_path: Path) -> None:
    """A rollback journal with synchronous=EXTRA (3): a commit that was acknowledged is not undone by a power cut."""
    store = opened(tmp_path / "s.sqlite")
    assert store._db.execute("PRAGMA synchronous").fetchone() == (3,)
    assert store._db.execute("PRAGMA journal_mode").fetchone() == ("delete",)


def one_line(error: pytest.ExceptionInfo[StoreError]) -> str:
    text = str(error.value)
    assert "\n" not in text
    return text


@pytest.mark.parametrize("damage", ["garbage", "header", "byte", "truncated", "record", "row", "sum"])
def test_a_damaged_file_gives_one_clear_line(tmp_path: Path, damage: str) -> None:
    """Whatever was overwritten, nothing wrong is ever loaded."""
    path = tmp_path / "s.sqlite"
    store = opened(path)
    store.save({"a": b"state " * 4000, "b": b"state"}, store.raise_generation())
    store.close()
    content = bytearray(path.read_bytes())
    if damage == "garbage":
        path.write_bytes(b"no database" * 1000)
    elif damage == "header":
        path.write_bytes(b"\xff" * 100 + content[100:])
    elif damage == "byte":
        content[content.rindex(b"state ")] ^= 1
        path.write_bytes(content)
    elif damage == "truncated":
        path.write_bytes(content[: len(content) // 2])
    else:
        wrong = {"record": "DELETE FROM record", "row": "DELETE FROM rows WHERE key = 'b'"}
        with sqlite3.connect(path) as database:
            database.execute(wrong.get(damage, "UPDATE record SET checksum = 'none'"))
    with pytest.raises(StoreDamaged) as error:
        opened(path).load()
    assert "damaged" in one_line(error)
    assert "move the file away" in one_line(error)


@pytest.mark.parametrize(
    "change",
    [
        "UPDATE record SET generation = 7",
        "UPDATE record SET generation = 'many'",
        "UPDATE record SET job_id = 'jab'",
        "UPDATE record SET job_id = CAST(x'6a6fe2' AS TEXT)",
        "UPDATE record SET job_id = x'1b5b324a'",
        "UPDATE record SET seal = x'00'",
        "UPDATE rows SET key = CAST(x'e2' AS TEXT)",
        "UPDATE rows SET data = 'text'",
        "PRAGMA user_version = 0",
        "PRAGMA user_version = 1",
        "PRAGMA user_version = 2",
        "PRAGMA user_version = 7",
        "ALTER TABLE record ADD COLUMN more",
    ],
)
def test_nothing_of_the_entry_is_believed_that_was_not_sealed(tmp_path: Path, change: str) -> None:
    """The job, the generation (which is the fence) and the format, as little as the rows: damage, and nothing else."""
    path = tmp_path / "s.sqlite"
    store = opened(path)
    store.save({"a": b"state"}, store.raise_generation())
    store.close()
    with sqlite3.connect(path) as database:
        database.execute(change)
    with pytest.raises(StoreDamaged) as error:
        opened(path).load()
    assert one_line(error).isprintable()


def test_a_damage_is_told_in_one_printable_line(tmp_path: Path) -> None:
    """SQLite's own words carry names out of the file."""
    path = tmp_path / "s.sqlite"
    with sqlite3.connect(path) as database:
        database.execute('CREATE TABLE "a\x1b[2Jb" (x NOT NULL)')
        database.execute('INSERT INTO "a\x1b[2Jb" VALUES (1)')
        database.execute("PRAGMA writable_schema = ON")
        database.execute("UPDATE sqlite_master SET sql = replace(sql, 'NOT NULL', 'NOT NUL')")
    with pytest.raises(StoreError) as error:
        opened(path)
    assert "a\\x1b[2Jb" in one_line(error)
    assert one_line(error).isprintable()


def test_a_message_that_is_no_text_is_a_damage_too(tmp_path: Path) -> None:
    """SQLite quotes the schema that it cannot read, byte for byte."""
    path = tmp_path / "s.sqlite"
    opened(path).close()
    content = path.read_bytes()
    assert content.count(b"CREATE TABLE rows (key") == 1
    path.write_bytes(content.replace(b"CREATE TABLE rows (key", b"CREATE TABLE rows \xac\xac\xac\xac"))
    with pytest.raises(StoreDamaged) as error:
        opened(path).load()
    assert one_line(error).isprintable()


@pytest.mark.parametrize(
    ("code", "kind", "why"),
    [
        (266, StoreUnavailable, "disk I/O error"),
        (10, StoreUnavailable, "disk I/O error"),
        (7, StoreUnavailable, "out of memory"),
        (14, StoreUnavailable, "it cannot be opened"),
        (261, StoreUnavailable, "database is locked"),
        (11, StoreDamaged, "unable to get the page"),
        (267, StoreDamaged, "unable to get the page"),
        (None, StoreDamaged, "unable to get the page"),
    ],
)
def test_a_page_that_cannot_be_read_now_is_no_damage(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: int | None, kind: type[StoreError], why: str
) -> None:
    """SQLite's check answers so, without an error: a job's own master put the sound file aside, and began anew."""
    path = tmp_path / "s.sqlite"
    store = opened(path)
    store.save({"a": b"state"}, store.raise_generation())
    words = "unable to get the page" + (f". error code={code}" if code else "")

    class Failing(sqlite3.Connection):
        def execute(self, sql: str, *rest: object) -> sqlite3.Cursor:
            if sql.startswith("PRAGMA integrity_check"):
                return super().execute("SELECT ?", (f"*** in database main ***\nPage 4: {words}",))
            return super().execute(sql, *rest)  # type: ignore[arg-type]

    with monkeypatch.context() as patch:
        patch.setattr(sqlite3, "connect", functools.partial(sqlite3.connect, factory=Failing))
        with pytest.raises(StoreError, match=re.escape(why)) as error:
            opened(path)
    assert type(error.value) is kind
    assert one_line(error).endswith("move the file away to have the job found again from its checkpoints")
    assert opened(path).load() == {"a": b"state"}


@pytest.mark.parametrize(("embedded", "fails"), [(True, 2), (True, 1000), (False, 1)])
def test_a_jobs_own_master_looks_again_at_what_cannot_be_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, embedded: bool, fails: int
) -> None:
    """One I/O error as it starts ended the agent with 2. A service's supervisor starts the master again."""
    path = tmp_path / "s.sqlite"
    opened(path).close()
    pauses: list[float] = []
    left = iter(range(fails))

    class Failing(sqlite3.Connection):
        def execute(self, sql: str, *rest: object) -> sqlite3.Cursor:
            if sql.startswith("PRAGMA integrity_check") and next(left, None) is not None:
                return super().execute("SELECT ?", ("Page 4: unable to get the page. error code=266",))
            return super().execute(sql, *rest)  # type: ignore[arg-type]

    monkeypatch.setattr(sqlite3, "connect", functools.partial(sqlite3.connect, factory=Failing))
    monkeypatch.setattr(time, "sleep", pauses.append)
    etcd = dict.fromkeys(("etcd_ca", "etcd_cert", "etcd_key"))
    options = argparse.Namespace(store=f"sqlite:///{path}", job_id="job", embedded=embedded, **etcd)
    if embedded and fails == 2:
        store, remark = cli._open(options)
        store.close()
        assert (remark, len(pauses)) == ("", 2)
    else:
        with pytest.raises(StoreUnavailable, match="disk I/O error"):
            cli._open(options)
        # The agent waits for a minute, and a lock may be waited for with each look.
        assert sum(pauses) + len(pauses) * LOCK_TIMEOUT_SECONDS < 40.0
        assert bool(pauses) is embedded
    assert [one.name for one in tmp_path.iterdir()] == [path.name]


def test_a_store_of_another_job_or_of_something_else_is_refused(tmp_path: Path) -> None:
    """Nothing is written into a file that is not this job's."""
    opened(tmp_path / "s.sqlite").close()
    with pytest.raises(StoreError, match="belongs to job 'job', not to 'other'") as error:
        opened(tmp_path / "s.sqlite", "other")
    one_line(error)
    with sqlite3.connect(tmp_path / "x.sqlite") as database:
        database.execute("CREATE TABLE mine (x)")
    with pytest.raises(StoreError, match="a database of something else"):
        opened(tmp_path / "x.sqlite")
    with sqlite3.connect(tmp_path / "s.sqlite") as database:
        database.execute("PRAGMA user_version = 9")
        database.execute("UPDATE record SET seal = 'as format 9 has it'")
    with pytest.raises(StoreError, match="has format 9, this master reads 3"):
        opened(tmp_path / "s.sqlite")


def test_a_locked_store_says_so_and_works_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A stopped process may hold the lock: the write fails in a bounded time, and the same write can be repeated."""
    monkeypatch.setattr(store_module, "LOCK_TIMEOUT_SECONDS", 0.1)
    store = opened(tmp_path / "s.sqlite")
    generation = store.raise_generation()
    holder = sqlite3.connect(tmp_path / "s.sqlite", isolation_level=None)
    holder.execute("BEGIN IMMEDIATE")
    with pytest.raises(StoreUnavailable, match="another process holds its lock"):
        store.save({"a": b"x"}, generation)
    holder.execute("ROLLBACK")
    store.save({"a": b"x"}, generation)
    assert store.load() == {"a": b"x"}


@pytest.mark.parametrize(
    ("url", "line"),
    [
        ("job.sqlite", "is not a URL"),
        ("sqlite://", "names no file"),
        ("sqlite:///", "names no file"),
        ("mysql:///x", "no 'mysql' store"),
        ("sqlite:////nowhere/at/all/s.sqlite", "/nowhere/at/all does not exist"),
        ("sqlite:////proc/s.sqlite", "cannot open the store /proc/s.sqlite"),
        ("sqlite:////usr", "is a directory"),
        (f"sqlite:///{'n' * 300}", "cannot open the store n+: File name too long"),
        (f"sqlite:///{'n' * 300}/s.sqlite", "cannot open the store n+/s.sqlite: File name too long"),
    ],
)
def test_a_bad_store_url_gives_one_clear_line(url: str, line: str) -> None:
    """The cause and what to change."""
    with pytest.raises(StoreError, match=line) as error:
        open_store(url, "job")
    one_line(error)


@pytest.mark.parametrize("number", [errno.ESTALE, errno.EIO, errno.ENOTCONN, errno.ETIMEDOUT])
@pytest.mark.parametrize("where", ["its directory", "its file"])
def test_a_mount_that_fails_says_nothing_about_a_store(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, where: str, number: int
) -> None:
    """It is tried again, and nothing is made there. A path that is closed is a person's to change."""
    path, real = tmp_path / "s.sqlite", os.stat
    failing, present = (tmp_path if where == "its directory" else path), number

    def failing_stat(looked: object, **options: Any) -> os.stat_result:
        if looked == failing:
            raise OSError(present, os.strerror(present), str(looked))
        return real(looked, **options)  # type: ignore[call-overload, no-any-return]

    with monkeypatch.context() as patched:
        patched.setattr(os, "stat", failing_stat)
        with pytest.raises(StoreUnavailable, match=f"cannot open the store .*: {os.strerror(number)}") as error:
            opened(path)
        one_line(error)
        for present in (errno.EACCES, errno.EPERM, errno.ELOOP):
            with pytest.raises(StoreError, match=os.strerror(present)) as closed:
                opened(path)
            assert not isinstance(closed.value, StoreUnavailable)
    assert not list(tmp_path.iterdir())
    opened(path)


def test_urls_name_relative_and_absolute_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Three slashes and four, as everybody else has it."""
    monkeypatch.chdir(tmp_path)
    open_store("sqlite:///a.sqlite", "job").close()
    open_store(f"sqlite:///{tmp_path}/b.sqlite", "job").close()
    assert sorted(file.name for file in tmp_path.iterdir()) == ["a.sqlite", "b.sqlite"]


@pytest.mark.slow
def test_one_changed_row_costs_one_row(tmp_path: Path) -> None:
    """Of ten thousand rows one is written: the file does not grow, and the rest is as it was."""
    path = tmp_path / "s.sqlite"
    store = opened(path)
    generation = store.raise_generation()
    rows: dict[str, bytes | None] = {f"checkpoint/{number}": b"x" * 300 for number in range(10_000)}
    store.save(rows, generation)
    size = path.stat().st_size
    for number in range(20):
        store.save({"job": b"%d" % number}, generation)
    assert path.stat().st_size - size < 20_000
    assert store.load() == rows | {"job": b"19"}


RECORDED = Path(__file__).parents[2] / "recorded" / "master_state_1.json"


def recorded() -> dict[str, bytes]:
    return {"record": RECORDED.read_bytes()}


def test_a_store_of_format_1_is_taken_over(tmp_path: Path) -> None:
    """As version 0.1 wrote it: opened, read, and written anew in rows; its generation goes on."""
    path = tmp_path / "s.sqlite"
    data = RECORDED.read_bytes()
    with sqlite3.connect(path) as database:
        database.execute(
            "CREATE TABLE record (one INTEGER PRIMARY KEY CHECK (one = 1), job_id TEXT NOT NULL,"
            " generation INTEGER NOT NULL, data BLOB, digest TEXT)"
        )
        digest = hashlib.sha256(data).hexdigest()
        database.execute("INSERT INTO record VALUES (1, 'job', 41, ?, ?)", (data, digest))
        database.execute("PRAGMA user_version = 1")
    store = opened(path)
    generation = store.raise_generation()
    assert generation == 42
    codec = JobCodec()
    job = codec.decode(store.load())
    store.save(codec.changes(job), generation)
    store.close()
    rows = opened(path).load()
    assert "record" not in rows
    assert JobCodec().decode(rows) == job


@pytest.mark.parametrize("sound", [True, False])
def test_a_store_of_format_2_is_taken_over(tmp_path: Path, sound: bool) -> None:
    """It had no seal; its rows' checksum counts, and its generation goes on."""
    path = tmp_path / "s.sqlite"
    store = opened(path)
    store.save({"a": b"one", "b": b"two"}, store.raise_generation(above=40))
    store.close()
    with sqlite3.connect(path) as database:
        database.execute("ALTER TABLE record DROP COLUMN seal")
        database.execute("PRAGMA user_version = 2")
        if not sound:
            database.execute("UPDATE rows SET data = x'00' WHERE key = 'b'")
    if not sound:
        with pytest.raises(StoreDamaged, match="checksum is wrong"):
            opened(path)
        return
    store = opened(path)
    assert store.raise_generation() == 42
    store.save({"b": None}, 42)
    store.close()
    assert opened(path).load() == {"a": b"one"}


def test_a_record_of_version_1_comes_back_whole() -> None:
    """A draining job with a joining and a leaving node, a failure in its budget and three checkpoints."""
    job = JobCodec().decode(recorded())
    assert job.world is not None
    assert (job.phase, job.epoch, [job.part(member) for member in job.world.members]) == (
        Phase.DRAINING,
        2,
        [MemberState.RUNNING] * len(job.world.members),
    )
    assert job.told.first_step
    assert job.drain is not None
    assert [record.step for record in job.checkpoints.usable] == [2, 4, 5]
    assert sum(node.leaving for node in job.nodes.values()) == 1
    assert sum(node.joined is not None for node in job.nodes.values()) == 1
    assert job.history[-1].epoch == 2
    assert JobCodec().decode(JobCodec.everything(job)) == job


def test_the_codec_keeps_the_floats_that_json_does_not_know() -> None:
    """NaN and infinities of settings and metrics come back as numbers."""
    job = JobCodec().decode(recorded())
    job.settings = replace(job.settings, stall_timeout=math.inf)
    job.checkpoints.put(replace(job.checkpoints[0], metric=math.nan))
    back = JobCodec().decode(JobCodec.everything(job))
    assert back.settings.stall_timeout == math.inf
    assert math.isnan(back.checkpoints.table[job.checkpoints[0].digest].metric or 0.0)


def test_only_what_changed_is_encoded() -> None:
    """A node, a part, a checkpoint, the job: one row each; nothing where nothing changed."""
    job = JobCodec().decode(recorded())
    codec = JobCodec()
    codec.changes(job)
    assert codec.changes(job) == {}
    name = next(iter(job.nodes))
    job.nodes.put(name, replace(job.nodes[name], warm=not job.nodes[name].warm))
    assert list(codec.changes(job)) == [f"node/{name}"]
    assert job.world is not None
    job.parts[job.world.members[0].incarnation] = MemberState.LOST
    assert list(codec.changes(job)) == ["parts"]
    job.checkpoints.drop(job.checkpoints[0].digest)
    (rows,) = codec.changes(job).items()
    assert rows[0].startswith("checkpoint/")
    assert rows[1] is None
    job.epoch += 1
    assert list(codec.changes(job)) == ["job"]


@pytest.mark.parametrize(
    ("change", "line"),
    [
        ({"job": b"{"}, "not JSON"),
        ({"job": b"[" * 200_000}, "not JSON"),
        ({"job": b"[]"}, "has version None"),
        ({"job": b'{"version": 4}'}, "has version 4"),
        ({"job": b'{"version": 2}'}, "job.job_id: Field required"),
        ({"world": b"[]"}, "world"),
        ({"parts": b"rr?"}, "parts"),
        ({"node/x": b'{"name": 1}'}, "node/x"),
        ({"record": b'{"version": 7}'}, "has version 7"),
        ({"record": b'{"version": 1, "job": {}}'}, "version 1 cannot be read"),
    ],
)
def test_the_codec_refuses_what_it_does_not_understand(change: dict[str, bytes], line: str) -> None:
    """Another version or shape is one clear line, not a half-understood state."""
    rows = JobCodec.everything(JobCodec().decode(recorded())) | change
    if "record" in change:
        del rows["job"]
    with pytest.raises(StoreError, match=line):
        JobCodec().decode(rows)


@contextmanager
def no_descriptor_left() -> Iterator[None]:
    """As if connections held every one that this process may have."""
    gc.collect()  # what earlier tests have left gives none back meanwhile
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    held = [os.open(os.devnull, os.O_RDONLY)]
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(held[0], *map(int, os.listdir("/proc/self/fd"))) + 1, hard))
    try:
        while not are_exhausted():
            held.append(os.open(os.devnull, os.O_RDONLY))
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        for descriptor in held:
            os.close(descriptor)


def test_a_write_needs_no_descriptor_that_others_can_take(tmp_path: Path) -> None:
    """The store has what a transaction opens in reserve, and takes it back afterwards."""
    store = opened(tmp_path / "s.sqlite")
    with no_descriptor_left():
        assert [store.raise_generation() for _ in range(3)] == [1, 2, 3]
    store.close()


def test_want_of_descriptors_is_no_failure_of_the_store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Told apart, with the line that says so; it passes."""
    monkeypatch.setattr(store_module, "RESERVED_DESCRIPTORS", 0)
    store = opened(tmp_path / "s.sqlite")
    with no_descriptor_left(), pytest.raises(StoreStarved, match="no file descriptor is left"):
        store.raise_generation()
    assert store.raise_generation() == 1
    store.close()


def reserved() -> int:
    """How many descriptors this process has of what a reserve holds."""
    fds = (f"/proc/self/fd/{number}" for number in os.listdir("/proc/self/fd"))
    return sum(os.path.lexists(fd) and os.readlink(fd) == os.devnull for fd in fds)


def test_a_store_that_cannot_be_opened_keeps_no_descriptors(tmp_path: Path) -> None:
    """A master that waits for its store tries again and again."""
    (tmp_path / "s.sqlite").write_bytes(b"not a database" * 1000)
    before = reserved()
    for path in (tmp_path / "s.sqlite", tmp_path, tmp_path / "none" / "s.sqlite"):
        with pytest.raises(StoreError):
            opened(path)
    assert reserved() == before


def test_a_store_knows_whether_its_file_is_where_it_was(tmp_path: Path) -> None:
    """Deleted, or another one in its place: what is written would be nobody's."""
    store = SqliteStore(tmp_path / "master.sqlite", "job")
    assert store.is_there()
    (tmp_path / "master.sqlite").rename(tmp_path / "aside")
    assert not store.is_there()
    (tmp_path / "master.sqlite").write_bytes(b"")
    assert not store.is_there()
    (tmp_path / "aside").rename(tmp_path / "master.sqlite")
    assert store.is_there()
    store.close()
