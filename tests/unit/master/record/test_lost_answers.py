"""The store in etcd when etcd does what was asked for, and its answer gets lost."""

from __future__ import annotations

import socket
from collections.abc import Sequence

import pytest

from dalsegno.master.record.etcd_calls import Change, Etcd, EtcdFiles, EtcdUnavailable, Value
from dalsegno.master.record.etcd_store import EtcdStore
from dalsegno.master.record.store import StoreAway, Superseded


class LosingEtcd:
    """As much of `etcd_calls.Etcd` as the store uses; `loses`: the answer to the next change."""

    def __init__(self) -> None:
        self.loses = False
        self.values: dict[str, tuple[bytes, int]] = {}
        self._revision = 0

    def get(self, key: str, at: int = 0) -> Value | None:
        found = self.values.get(key)
        return Value(*found, self._revision) if found is not None else None

    def get_all(self, keys: Sequence[str], at: int = 0) -> list[Value | None]:
        return [self.get(key) for key in keys]

    def names(self, prefix: str) -> list[str]:
        return [key for key in self.values if key.startswith(prefix)]

    def change(self, key: str, revision: int, changes: Sequence[Change], held: bytes | None = None) -> int:
        if self.values.get(key, (b"", 0))[1] != revision:
            return 0
        self._revision += 1
        for change in changes:
            if change.data is None:
                self.values.pop(change.key, None)
            else:
                self.values[change.key] = change.data, self._revision
        if self.loses:
            self.loses = False
            raise EtcdUnavailable("no answer")
        return self._revision

    def strangers(self) -> None:
        return None


def opened(etcd: LosingEtcd) -> EtcdStore:
    return EtcdStore(etcd, "job")  # type: ignore[arg-type]


def owned(etcd: LosingEtcd) -> EtcdStore:
    """A store with a record, and this owner's generation 1."""
    store = opened(etcd)
    assert store.raise_generation() == 1
    assert store.load() == {}
    store.save({"job": b"{}"}, 1)
    return store


def test_who_has_raised_the_generation_without_hearing_so_is_not_superseded_by_itself() -> None:
    """The driver tries again with what it had before."""
    etcd = LosingEtcd()
    store = owned(etcd)
    etcd.loses = True
    with pytest.raises(StoreAway):
        store.raise_generation(above=40, owner=1)
    assert store.raise_generation(above=40, owner=1) == 41
    store.save({"job": b"[]"}, 41)
    assert opened(etcd).load() == {"job": b"[]"}


def test_who_has_raised_it_too_little_raises_it_again() -> None:
    """It has heard of a higher one before it tried again."""
    etcd = LosingEtcd()
    store = owned(etcd)
    etcd.loses = True
    with pytest.raises(StoreAway):
        store.raise_generation(above=40, owner=1)
    assert store.raise_generation(above=50, owner=1) == 51


def test_somebody_else_who_has_raised_it_supersedes() -> None:
    """Before the lost try, and after it."""
    etcd = LosingEtcd()
    store = owned(etcd)
    etcd.loses = True
    with pytest.raises(StoreAway):
        store.raise_generation(above=40, owner=1)
    assert opened(etcd).raise_generation() == 42
    with pytest.raises(Superseded):
        store.raise_generation(above=40, owner=1)
    with pytest.raises(Superseded):
        store.save({"job": b"[]"}, 41)


def test_whoever_takes_it_over_in_the_same_process_supersedes_too() -> None:
    """A process that leads again uses the same store, and what it decided before must not be written."""
    etcd = LosingEtcd()
    store = owned(etcd)
    assert store.raise_generation() == 2
    with pytest.raises(Superseded):
        store.raise_generation(above=1, owner=1)
    with pytest.raises(Superseded):
        store.raise_generation(above=40, owner=1)


def test_whoever_was_given_the_same_generation_over_an_old_copy_is_somebody_else() -> None:
    """Else the next save would write into the rows of the other master."""
    etcd = LosingEtcd()
    old = opened(etcd)
    copy = dict(etcd.values)
    assert old.raise_generation() == 1
    old.load()
    old.save({"job": b"old"}, 1)
    etcd.values = copy
    new = opened(etcd)
    assert new.raise_generation() == 1
    new.load()
    new.save({"job": b"new", "node/b": b"1"}, 1)
    with pytest.raises(Superseded):
        old.raise_generation(above=4, owner=1)
    new.save({"job": b"newer"}, 1)
    assert opened(etcd).load() == {"job": b"newer", "node/b": b"1"}


def test_etcd_is_not_asked_through_the_proxy_of_the_web(monkeypatch: pytest.MonkeyPatch) -> None:
    """Members are addresses of the cluster, which a proxy for the web does not know, or refuses."""
    pytest.importorskip("aetcd", reason="needs the extra etcd")
    for name in ("grpc_proxy", "https_proxy", "no_grpc_proxy", "no_proxy", "NO_PROXY"):
        monkeypatch.delenv(name, raising=False)
    with socket.create_server(("127.0.0.1", 0)) as proxy, socket.socket() as dead:
        dead.bind(("127.0.0.1", 0))
        monkeypatch.setenv("http_proxy", f"http://127.0.0.1:{proxy.getsockname()[1]}")
        client = Etcd([f"127.0.0.1:{dead.getsockname()[1]}"], EtcdFiles(), call_seconds=0.5, patience_seconds=0.5)
        with pytest.raises(EtcdUnavailable):
            client.get("key")
        client.close()
        proxy.setblocking(False)
        with pytest.raises(BlockingIOError):
            proxy.accept()
