"""The record in a real etcd: what is left behind, damage, lost answers, and members that are killed and stopped.

The contract of all stores is in `tests/unit/master/record/test_store.py`.
"""

from __future__ import annotations

import os
import re
import shutil
import signal
import threading
from collections.abc import Iterator
from dataclasses import replace
from itertools import count
from pathlib import Path

import grpc
import pytest

pytest.importorskip("aetcd")

from aetcd.rpc import rpc_pb2, rpc_pb2_grpc

from dalsegno.master.record import etcd_calls
from dalsegno.master.record.chunks import decoded, encoded
from dalsegno.master.record.etcd_calls import Change, Etcd, EtcdFiles, EtcdUnavailable
from dalsegno.master.record.etcd_store import EtcdStore
from dalsegno.master.record.store import StoreAway, StoreDamaged, StoreError, StoreUnavailable, Superseded, open_store
from tests.support.jobs.etcd_members import ETCD, MISSING, Members, etcd_members
from tests.support.jobs.store_writer import check_whole, killed_after, store_writer

pytestmark = [pytest.mark.timeout(180), pytest.mark.skipif(ETCD is None, reason=MISSING)]
_jobs = count()


@pytest.fixture(scope="module")
def one(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Members]:
    with etcd_members(tmp_path_factory.mktemp("etcd"), unread="its tests damage records") as members:
        yield members


@pytest.fixture(scope="module")
def three(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Members]:
    with etcd_members(tmp_path_factory.mktemp("etcd"), 3) as members:
        yield members


@pytest.fixture
def job() -> str:
    """A job that no other test has."""
    return f"job-{os.getpid()}-{next(_jobs)}"


class Owners:
    """Two owners of one record, as two masters of one job have it; and etcd as they see it."""

    def __init__(self, members: Members, job: str) -> None:
        self.job, self.members = job, members
        self.store, self.other = open_store(members.url, job), open_store(members.url, job)
        self.etcd = Etcd(members.endpoints, EtcdFiles())

    def chunks(self) -> set[str]:
        return {name.rpartition("/")[2] for name in self.etcd.names(f"/dalsegno/{self.job}/chunk/")}

    def named(self) -> set[str]:
        head = self.etcd.get(f"/dalsegno/{self.job}/head")
        assert head is not None
        return decoded(head.data).digests()

    def put(self, key: str, data: bytes | None) -> None:
        """As somebody else would, whatever is there."""
        key = f"/dalsegno/{self.job}/{key}"
        before = self.etcd.get(key)
        assert self.etcd.change(key, 0 if before is None else before.revision, [Change(key, data)])

    def compact(self) -> None:
        """As etcd does by itself: nothing is kept but what is there now."""
        with grpc.insecure_channel(self.members.endpoints[0]) as channel:
            stub = rpc_pb2_grpc.KVStub(channel)
            now = stub.Range(rpc_pb2.RangeRequest(key=b"any"), timeout=10).header.revision
            stub.Compact(rpc_pb2.CompactionRequest(revision=now, physical=True), timeout=10)

    def close(self) -> None:
        for each in (self.store, self.other, self.etcd):
            each.close()


@pytest.fixture
def pair(one: Members, job: str) -> Iterator[Owners]:
    owners = Owners(one, job)
    yield owners
    owners.close()


def test_what_no_head_names_is_deleted(pair: Owners) -> None:
    """With the next writes, also what a writer has left that was killed between chunks and head."""
    generation = pair.store.raise_generation()
    for number in range(5):
        pair.store.save({"a": b"%d" % number, f"{number}": b"x"}, generation)
    assert pair.chunks() == pair.named()
    pair.put("chunk/left", b"of a write that did not end")
    generation = pair.other.raise_generation()
    pair.other.save({"a": b"new"}, generation)
    assert pair.chunks() == pair.named()


def test_a_record_that_is_larger_than_a_request(pair: Owners) -> None:
    """Rows of megabytes that cannot be compressed, and thousands of them."""
    generation = pair.store.raise_generation()
    rows = {"large": os.urandom(3 << 20), **{f"row-{n}": os.urandom(500) for n in range(8000)}}
    pair.store.save(dict(rows), generation)
    assert pair.other.load() == rows
    pair.store.save({"large": None}, generation)
    del rows["large"]
    assert pair.other.load() == rows
    for number in range(3):
        pair.store.save({"a": b"%d" % number}, generation)
    assert pair.chunks() == pair.named()


@pytest.mark.parametrize("damage", ["head", "seal", "chunk", "lost chunk", "lost head"])
def test_what_was_damaged_is_never_returned(pair: Owners, damage: str) -> None:
    """One line says what is wrong, and what to do."""
    generation = pair.store.raise_generation()
    pair.store.save({"a": b"one"}, generation)
    (chunk,) = pair.named()
    head = pair.etcd.get(f"/dalsegno/{pair.job}/head")
    assert head is not None
    key, data = {
        "head": ("head", b"something else"),
        "seal": ("head", head.data.replace(b'"generation":1', b'"generation":2')),
        "chunk": (f"chunk/{chunk}", b"something else"),
        "lost chunk": (f"chunk/{chunk}", None),
        "lost head": ("head", None),
    }[damage]
    pair.put(key, data)
    cure = re.escape(f"delete its keys (etcdctl del --prefix /dalsegno/{pair.job}/)")
    if damage == "lost head":
        assert pair.other.load() == {}
        with pytest.raises(StoreDamaged, match=f"head is gone; {cure}"):
            pair.store.save({"a": b"two"}, generation)
        return
    with pytest.raises(StoreDamaged, match=f"is damaged: .*; {cure}"):
        pair.other.load()


def test_an_answer_that_is_lost(pair: Owners, monkeypatch: pytest.MonkeyPatch) -> None:
    """The write was made, and the owner finds that out; it is not taken for another one's."""
    generation = pair.store.raise_generation()
    plain = Etcd.change

    def lost(self: Etcd, *arguments: object) -> int:
        plain(self, *arguments)  # type: ignore[arg-type]
        return plain(self, *arguments)  # type: ignore[arg-type]

    monkeypatch.setattr(Etcd, "change", lost)
    for number in range(3):
        pair.store.save({"a": b"%d" % number}, generation)
    assert pair.store.raise_generation(owner=generation) == generation + 1
    monkeypatch.undo()
    assert pair.other.load() == {"a": b"2"}


def test_a_record_is_read_as_of_one_moment(pair: Owners) -> None:
    """However fast another owner writes, and deletes what it has replaced: nothing counts as damaged."""
    generation = pair.store.raise_generation()
    pair.store.save({f"row {number}": b"0" for number in range(200)}, generation)
    over = threading.Event()

    def write() -> None:
        number = 0
        while not over.is_set():
            number += 1
            rows = {f"row {(number + place) % 200}": b"%d" % number for place in range(20)}
            pair.store.save(rows, generation)

    writer = threading.Thread(target=write)
    writer.start()
    try:
        for _ in range(10):
            fresh = open_store(pair.members.url, pair.job)
            assert len(fresh.load()) == 200
            fresh.close()
    finally:
        over.set()
        writer.join()


def test_a_record_is_compacted_while_it_is_read(pair: Owners, monkeypatch: pytest.MonkeyPatch) -> None:
    """What was to be read is gone by then: that is no damage, and the next try reads what is there now."""
    generation = pair.store.raise_generation()
    pair.store.save({"a": b"one"}, generation)
    plain = EtcdStore._chunks

    def late(self: EtcdStore, digests: list[str], at: int) -> dict[str, bytes]:
        monkeypatch.undo()
        pair.store.save({"a": b"two"}, generation)
        pair.compact()
        return plain(self, digests, at)

    monkeypatch.setattr(EtcdStore, "_chunks", late)
    with pytest.raises(StoreAway, match="compacted"):
        pair.other.load()
    assert pair.other.load() == {"a": b"two"}


def test_two_owners_raise_at_once(one: Members, job: str) -> None:
    """Each gets a generation of its own, and the last one may write."""
    stores = [open_store(one.url, job) for _ in range(4)]
    found: list[int] = []
    threads = [threading.Thread(target=lambda s=store: found.append(s.raise_generation())) for store in stores]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(found) == [1, 2, 3, 4]
    for store in stores:
        store.close()


def test_kill_between_any_two_writes_leaves_a_whole_record(one: Members) -> None:
    """SIGKILL of a writing process, at many moments."""
    for attempt in range(4):
        name = f"killed-{os.getpid()}-{attempt}"
        acknowledged = killed_after(store_writer(one.url, name), 3 + 7 * attempt)
        store = open_store(one.url, name)
        check_whole(store, acknowledged)
        store.close()


@pytest.mark.parametrize("how", [signal.SIGKILL, pytest.param(signal.SIGSTOP, marks=pytest.mark.full)])
def test_members_that_go_and_come_back(three: Members, job: str, how: signal.Signals) -> None:
    """Each of three in turn, while a master writes: it goes on, and nothing that was acknowledged is lost."""
    process = store_writer(three.url, job)
    assert process.stdout is not None
    with process:
        last = 0
        for number in range(3):
            for _ in range(10):
                last = int(process.stdout.readline())
            three.send(number, how)
            for _ in range(30):
                last = int(process.stdout.readline())
            if how == signal.SIGKILL:
                three.start(number)
            else:
                three.send(number, signal.SIGCONT)
            three.wait(number)
        process.kill()
        rest = [line for line in process.stdout.readlines() if line.endswith("\n")]
    store = open_store(three.url, job)
    check_whole(store, int(rest[-1]) if rest else last)
    store.close()


def test_an_etcd_that_is_away_is_one_line(tmp_path: Path, job: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """And the same save may be repeated once it is back."""
    monkeypatch.setattr(etcd_calls, "PATIENCE_SECONDS", 1.0)
    with etcd_members(tmp_path / "etcd") as members:
        store = open_store(members.url, job)
        generation = store.raise_generation()
        members.send(0, signal.SIGKILL)
        with pytest.raises(StoreUnavailable, match=r"^cannot write the store in etcd: 127\.0\.0\.1:\d+: .+$") as caught:
            store.save({"a": b"one"}, generation)
        assert "\n" not in str(caught.value)
        members.start(0)
        members.wait(0)
        store.save({"a": b"one"}, generation)
        assert store.load() == {"a": b"one"}
        store.close()


def test_endpoints_of_two_etcds_are_one_line(one: Members, job: str, tmp_path: Path) -> None:
    """Each of them would have a leader and a record of its own, and neither would know of the other."""
    with etcd_members(tmp_path / "etcd") as other:
        store = open_store(f"{one.url},{other.endpoints[0]}", job)
        with pytest.raises(StoreError, match=r"^--store names .*: two etcds with a record each: ") as caught:
            store.load()
        assert not isinstance(caught.value, StoreUnavailable)
        assert "\n" not in str(caught.value)
        store.close()


@pytest.mark.full
def test_another_etcd_is_not_written_to(tmp_path: Path, job: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also if it comes only when the first one is gone; where all are others by now, that is the etcd."""
    monkeypatch.setattr(etcd_calls, "PATIENCE_SECONDS", 1.0)
    with (
        etcd_members(tmp_path / "first", unread="it goes and comes") as first,
        etcd_members(tmp_path / "second", unread="nothing is in it") as second,
    ):
        second.send(0, signal.SIGKILL)
        store = open_store(f"{first.url},{second.endpoints[0]}", job)
        assert store.load() == {}
        store.save({"a": b"one"}, generation := store.raise_generation())
        second.start(0)
        second.wait(0)
        first.send(0, signal.SIGKILL)
        with pytest.raises(StoreAway, match=f"{second.endpoints[0]}: it belongs to another etcd"):
            store.save({"a": b"two"}, generation)
        first.start(0)
        first.wait(0)
        store.save({"a": b"two"}, generation)
        assert store.load() == {"a": b"two"}
        there = Etcd(second.endpoints, EtcdFiles())
        assert there.names("/dalsegno/") == []
        there.close()
        store.close()


def test_an_address_with_two_etcds_behind_it(one: Members, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever answers is another one than was asked before: that ends with a reason, and in time."""
    numbers = count(1)
    monkeypatch.setattr(Etcd, "_ask_cluster", lambda self, number: next(numbers))
    etcd = Etcd(one.endpoints, EtcdFiles(), patience_seconds=0.5)
    with pytest.raises(EtcdUnavailable, match="belongs to another etcd"):
        etcd.get("/dalsegno/a")
    etcd.close()


def test_an_etcd_that_was_restored_is_the_same(tmp_path: Path, job: str) -> None:
    """`etcdctl snapshot restore` gives it another number: all members have it then."""
    with etcd_members(tmp_path / "etcd", unread="it forgets") as members:
        etcd = Etcd(members.endpoints, EtcdFiles())
        assert etcd.change("/dalsegno/a", 0, [Change("/dalsegno/a", b"one")])
        members.send(0, signal.SIGKILL)
        shutil.rmtree(tmp_path / "etcd" / "m0")
        members.start(0, token="anew")
        members.wait(0)
        etcd.change("/dalsegno/a", 0, [Change("/dalsegno/a", b"two")])
        found = etcd.get("/dalsegno/a")
        assert found is not None
        assert found.data == b"two"
        etcd.close()


WRONG = {
    "etcd://": "is no endpoint",
    "etcd://here:port:x": "is no endpoint",
    "etcd://here:70000": "is no endpoint",
    "etcd://a:1,,b:2": "is no endpoint",
    "etcd://user:secret@here:2379": "name or password",
    "etcd://here:2379/some/path": "has a path",
}


@pytest.mark.parametrize("url", WRONG)
def test_a_wrong_url_is_one_line(url: str) -> None:
    with pytest.raises(StoreError, match=WRONG[url]) as caught:
        open_store(url, "job")
    assert "\n" not in str(caught.value)
    assert "secret" not in str(caught.value)


def test_files_that_do_not_fit(tmp_path: Path) -> None:
    """Each is one line."""
    here = tmp_path / "nowhere"
    for files, why in (
        (EtcdFiles(cert=here), "belong together"),
        (EtcdFiles(cert=here, key=here), "no effect without --etcd-ca"),
        (EtcdFiles(ca=here), "cannot read .*nowhere for etcd"),
    ):
        with pytest.raises(StoreError, match=why):
            open_store("etcd://127.0.0.1:1", "job", files)
    with pytest.raises(StoreError, match="is not etcd's"):
        open_store("memory://", "job", EtcdFiles(ca=here))


def test_another_job_s_head_is_not_overwritten(pair: Owners) -> None:
    """Somebody has copied keys: the record says whose it is."""
    pair.store.raise_generation()
    head = pair.etcd.get(f"/dalsegno/{pair.job}/head")
    assert head is not None
    key = f"/dalsegno/{pair.job}-copy/head"
    assert pair.etcd.change(key, 0, [Change(key, head.data)])
    copy = open_store(pair.members.url, f"{pair.job}-copy")
    with pytest.raises(StoreError, match=f"is of job '{pair.job}'"):
        copy.load()
    copy.close()


@pytest.mark.full
def test_etcd_goes_back_under_its_master(tmp_path: Path, job: str, caplog: pytest.LogCaptureFixture) -> None:
    """Somebody has put an old copy in its place: what the master knows is written anew, and nothing is mixed."""
    with etcd_members(tmp_path / "etcd", unread="it forgets") as members:
        owners = Owners(members, job)
        generation = owners.store.raise_generation()
        owners.store.save({f"row {number}": b"old" for number in range(100)}, generation)
        with members.put_back(0):
            owners.store.save({f"row {number}": b"new" for number in range(50)} | {"row 99": None}, generation)
            owners.store.save({"more": b"new"}, generation)
        # While etcd is not there nothing of this is lost.
        members.send(0, signal.SIGKILL)
        with pytest.raises(StoreUnavailable):
            owners.store.save({"last": b"new"}, generation)
        members.start(0)
        members.wait(0)
        owners.store.save({"last": b"new"}, generation)
        expected = {f"row {number}": b"new" if number < 50 else b"old" for number in range(99)}
        assert owners.other.load() == expected | {"more": b"new", "last": b"new"}
        assert owners.chunks() == owners.named()
        assert [line.getMessage() for line in caplog.records] == [
            "the record in etcd has gone back, from write 4 to write 2: all of it is written anew"
        ]
        owners.close()


@pytest.mark.parametrize("taken", [False, True], ids=["", "taken over meanwhile"])
def test_etcd_goes_back_to_an_earlier_master(one: Members, job: str, taken: bool) -> None:
    """Whoever wrote last writes it anew, unless another one has taken the old record over since."""
    owners = Owners(one, job)
    owners.store.save({"a": b"old", "b": b"old"}, owners.store.raise_generation())
    old = owners.etcd.get(f"/dalsegno/{job}/head")
    assert old is not None
    chunks = {name: owners.etcd.get(f"/dalsegno/{job}/chunk/{name}") for name in owners.chunks()}
    generation = owners.other.raise_generation()
    for number in range(3):
        owners.other.save({"a": b"%d" % number, "c": b"new"}, generation)
    for name, chunk in chunks.items():
        assert chunk is not None
        owners.put(f"chunk/{name}", chunk.data)
    owners.put("head", old.data)
    if taken:
        third = open_store(one.url, job)
        third.save({"d": b"third"}, third.raise_generation())
        with pytest.raises(Superseded):
            owners.other.save({"d": b"other"}, generation)
        assert third.load() == {"a": b"old", "b": b"old", "d": b"third"}
        third.close()
    else:
        owners.other.save({"d": b"other"}, generation)
        fresh = open_store(one.url, job)
        assert fresh.load() == {"a": b"2", "b": b"old", "c": b"new", "d": b"other"}
        fresh.close()
    owners.close()


@pytest.mark.full
def test_revisions_that_come_again_are_no_fence(tmp_path: Path, job: str) -> None:
    """An old copy counts its revisions anew: one who wrote at 9 then must not take another one's write at 9 for it."""
    with etcd_members(tmp_path / "etcd", unread="it forgets") as members:
        owners = Owners(members, job)
        owners.store.save({"a": b"old"}, owners.store.raise_generation())
        with members.put_back(0):
            generation = owners.other.raise_generation()
            for number in range(3):
                owners.other.save({"a": b"%d" % number}, generation)
            before = owners.etcd.get(f"/dalsegno/{job}/head")
            assert before is not None
        third = open_store(members.url, job)
        now = third.raise_generation()
        assert now == generation
        for number in range(20):
            third.save({"third": b"%d" % number}, now)
            found = owners.etcd.get(f"/dalsegno/{job}/head")
            assert found is not None
            if found.revision == before.revision:
                break
        else:
            raise AssertionError("the revisions do not meet")
        with pytest.raises(Superseded):
            owners.other.save({"b": b"stale"}, generation)
        assert third.load() == {"a": b"old", "third": b"%d" % number}
        third.save({"third": b"last"}, now)
        third.close()
        owners.close()


def test_a_history_that_breaks_is_found(tmp_path: Path, job: str) -> None:
    """What every scene over etcd is asked in the end, also with its members gone."""
    with etcd_members(tmp_path / "etcd", unread="this is the test of it") as members:
        owners = Owners(members, job)
        owners.store.save({"a": b"one"}, owners.store.raise_generation())
        found = owners.etcd.get(f"/dalsegno/{job}/head")
        assert found is not None
        members.send(0, signal.SIGKILL)
        members.assert_histories()
        head = decoded(found.data)
        for wrong, said in (
            (replace(head, number=head.number + 2), "the chain of heads breaks"),
            (replace(head, number=head.number + 1, owner="other"), "two writers of one generation"),
            (replace(head, number=head.number + 1, generation=0), "generations fall"),
        ):
            owners.put("head", encoded(wrong))
            with pytest.raises(AssertionError, match=said):
                members.assert_histories()
            # Its history begins anew.
            owners.put("head", None)
            owners.put("head", found.data)
        owners.close()
