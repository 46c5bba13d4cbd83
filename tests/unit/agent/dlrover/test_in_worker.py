"""What a worker changes in DLRover's library, on a module of the same shape; the library's own is in `integration`."""

from __future__ import annotations

import contextlib
import socket
import threading
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from dalsegno.agent.dlrover import in_worker


class Comm:
    """As the library's: a request and its answer on a socket, which it keeps if it is a lock's."""

    keeps = False

    def __init__(self, path: Path) -> None:
        self._socket_file, self._client, self.tries = str(path), None, 0

    def _request(self, message: Any) -> str:
        if self._client is None:
            # The library tries for half a minute.
            self.tries += 1
            self._client = socket.socket(socket.AF_UNIX)
            self._client.connect(self._socket_file)
        self._client.sendall(message.method.encode() + b"\n")
        answer = self._client.recv(100).decode()
        if not answer:
            raise EOFError("Ran out of input")
        if not self.keeps:
            self._client.close()
            self._client = None
        return answer


class Lock(Comm):
    """Keeps its connection."""

    keeps = True


@contextlib.contextmanager
def saver(path: Path, says: str) -> Iterator[None]:
    """A process that answers, until it dies with all its connections."""
    path.unlink(missing_ok=True)
    made: list[socket.socket] = []
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(str(path))
        server.listen()

        def serve() -> None:
            with contextlib.suppress(OSError):
                while True:
                    made.append(server.accept()[0])
                    threading.Thread(target=answer, args=(made[-1],), daemon=True).start()

        def answer(connection: socket.socket) -> None:
            with contextlib.suppress(OSError):
                while connection.recv(100):
                    connection.sendall(says.encode())

        threading.Thread(target=serve, daemon=True).start()
        yield
        server.shutdown(socket.SHUT_RDWR)
        for one in made:
            with contextlib.suppress(OSError), one:
                one.shutdown(socket.SHUT_RDWR)


@pytest.fixture
def lock(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Lock:
    """A worker's, whose library is changed."""
    monkeypatch.setattr(Comm, "_request", Comm._request)
    monkeypatch.setattr(Lock, "_request", Lock._request)
    module = ModuleType("multi_process")
    module.LocalSocketComm, module.SharedLock = Comm, Lock  # type: ignore[attr-defined]
    in_worker._change_sockets(module)
    return Lock(tmp_path / "lock")


ACQUIRE, RELEASE = SimpleNamespace(method="acquire"), SimpleNamespace(method="release")


def test_a_lock_finds_the_saver_that_follows(lock: Lock, tmp_path: Path) -> None:
    """While there is none, it says so at once; the next save is tried anew."""
    with saver(tmp_path / "lock", "first"):
        assert lock._request(ACQUIRE) == "first"
    for _ in range(2):
        with pytest.raises(OSError, match=r"refused|No such file"):
            lock._request(ACQUIRE)
    assert lock.tries == 1, "the training does not wait for it"
    with saver(tmp_path / "lock", "second"):
        assert lock._request(ACQUIRE) == "second"


def test_what_the_dead_one_held_needs_no_release(lock: Lock, tmp_path: Path) -> None:
    """The training goes on."""
    with saver(tmp_path / "lock", "first"):
        lock._request(ACQUIRE)
    assert lock._request(RELEASE) is None


def test_an_answer_that_does_not_come_is_asked_for_again(lock: Lock, tmp_path: Path) -> None:
    """Theirs ends the training with an EOFError."""
    comm, path = Comm(tmp_path / "dict"), tmp_path / "dict"
    with saver(path, "first"):
        comm._client = socket.socket(socket.AF_UNIX)
        comm._client.connect(str(path))
        comm._client.shutdown(socket.SHUT_RD)
        assert comm._request(ACQUIRE) == "first"


def test_a_class_that_needs_their_master_says_so() -> None:
    """Wherever the script has it from."""
    module = ModuleType("client")
    module.ShardingClient = type("ShardingClient", (), {})  # type: ignore[attr-defined]
    in_worker._change_clients(module)
    with pytest.raises(RuntimeError, match="the script uses ShardingClient of dlrover, which needs DLRover's master"):
        module.ShardingClient("data", batch_size=4)
