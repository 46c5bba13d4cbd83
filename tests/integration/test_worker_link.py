"""Who may speak for a rank on the agent's socket: real processes, connections by the hundred, and ranks that lie."""

from __future__ import annotations

import contextlib
import os
import queue
import resource
import shutil
import socket
import stat
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from dalsegno.agent.shell.mailbox import MailboxFull
from dalsegno.agent.workers import worker_link
from dalsegno.agent.workers.socket_place import sweep
from dalsegno.agent.workers.worker_link import WorkerLink
from dalsegno.elastic.rank import link
from dalsegno.protos import worker_pb2
from tests.conftest import ROOT

pytestmark = pytest.mark.timeout(60)

EPOCH, FIRST = 7, 2
PATIENCE = 20.0
# Waits for its turn, says who it is and makes a step; then it waits for an end of file.
SPEAK = """
import os, socket, struct, subprocess, sys, time
from dalsegno.elastic.rank import link
from dalsegno.protos import worker_pb2
path, rank, step, how = sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), sys.argv[4]
if how != "at once":
    sys.stdin.readline()
if how == "child":
    sys.exit(subprocess.run([sys.executable, "-c", sys.orig_argv[2], path, str(rank), str(step), "at once"]).returncode)
if how == "orphan" and os.fork():
    sys.exit(sys.stdin.readline() != "")
if how == "orphan":
    while os.getppid() == os.getsid(0):
        time.sleep(0.01)
link = socket.socket(socket.AF_UNIX)
link.connect(path)
try:
    for body in ({"hello": worker_pb2.Hello(epoch=7, rank=rank)}, {"progress": worker_pb2.Progress(step=step)}):
        data = worker_pb2.ToAgent(**body).SerializeToString()
        link.sendall(struct.pack(">I", len(data)) + data)
    while link.recv(1000):
        pass
except (BrokenPipeError, ConnectionResetError):
    pass
print("cut", flush=True)
"""


class Listener:
    """The agent's end, and what it was told."""

    def __init__(self) -> None:
        self.said: queue.SimpleQueue[tuple[int, worker_pb2.ToAgent]] = queue.SimpleQueue()
        self.full = 0
        # The agent's thread waits at this gate with each message.
        self.gate = threading.Event()
        self.gate.set()
        self.link = WorkerLink(self._hear)
        self.link.expect(EPOCH, FIRST, 2)

    def _hear(self, epoch: int, rank: int, message: worker_pb2.ToAgent) -> None:
        self.gate.wait(PATIENCE)
        if self.full:
            self.full -= 1
            raise MailboxFull("nobody reads")
        self.said.put((rank, message))

    def connect(self) -> socket.socket:
        """A connection of this process."""
        channel = socket.socket(socket.AF_UNIX)
        channel.settimeout(PATIENCE)
        channel.connect(str(self.link.path))
        return channel

    def next(self, kind: str) -> tuple[int, worker_pb2.ToAgent]:
        """The next message of a kind, with the rank that said it."""
        while True:
            rank, message = self.said.get(timeout=PATIENCE)
            if message.WhichOneof("body") == kind:
                return rank, message


@pytest.fixture
def listener() -> Iterator[Listener]:
    one = Listener()
    yield one
    one.link.close()


@contextlib.contextmanager
def speaker(listener: Listener, rank: int, step: int, how: str = "self") -> Iterator[subprocess.Popen[str]]:
    """A process that speaks for a rank once a line is written to it."""
    command = [sys.executable, "-c", SPEAK, str(listener.link.path), str(rank), str(step), how]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=ROOT / "tests", start_new_session=True
    ) as process:
        try:
            yield process
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, 9)


def begin(process: subprocess.Popen[str]) -> None:
    assert process.stdin is not None
    process.stdin.write("\n")
    process.stdin.flush()


def cut(channel: socket.socket) -> bool:
    """Whether the other end has ended the connection; reads what was said before."""
    try:
        while channel.recv(1000):
            pass
    except ConnectionResetError:
        return True
    return True


def frame(**body: object) -> bytes:
    data = worker_pb2.ToAgent(**body).SerializeToString()  # type: ignore[arg-type]
    return struct.pack(">I", len(data)) + data


HELLO = frame(hello=worker_pb2.Hello(epoch=EPOCH, rank=FIRST))


@pytest.mark.parametrize("how", ["self", "child", "orphan"])
def test_a_worker_and_what_it_starts_may_speak_for_its_rank(listener: Listener, how: str) -> None:
    """A wrapper's child is the rank as well, also when the wrapper is gone; while it speaks, nobody else is heard."""
    with speaker(listener, FIRST, 11, how) as worker, speaker(listener, FIRST, 12) as other:
        listener.link.started(0, lambda: worker.pid)
        begin(worker)
        if how == "orphan":
            assert worker.stdin is not None
            worker.stdin.close()
            os.waitid(os.P_PID, worker.pid, os.WEXITED | os.WNOWAIT)
        rank, message = listener.next("progress")
        assert (rank, message.progress.step) == (FIRST, 11)
        begin(other)
        assert other.stdout is not None
        assert other.stdout.readline() == "cut\n"
        assert listener.said.empty()


def test_a_deleted_socket_is_made_again(listener: Listener) -> None:
    """Whoever has a connection keeps it; newcomers find the socket at its path."""
    said: list[str] = []
    listener.link.stand(lambda text, _: said.append(text))
    early = listener.connect()
    shutil.rmtree(listener.link.directory)
    with pytest.raises(FileNotFoundError, match=rf"agent's socket.*{listener.link.path}"):
        link.Link(str(listener.link.path), worker_pb2.Hello())
    listener.link.stand(lambda text, _: said.append(text))
    assert said == [f"the socket of the workers was deleted: {listener.link.path} is made again"]
    assert stat.S_IMODE(listener.link.path.stat().st_mode) == 0o600
    assert stat.S_IMODE(listener.link.directory.stat().st_mode) == 0o700
    assert not [path for path in sweep() if path == listener.link.directory]
    early.sendall(HELLO)
    assert listener.next("hello")[0] == FIRST
    early.close()
    listener.link.expect(EPOCH, FIRST, 2)
    listener.connect().sendall(HELLO + frame(progress=worker_pb2.Progress(step=3)))
    assert listener.next("progress")[1].progress.step == 3
    # A cleaner that goes by the age of files deletes the socket alone.
    listener.link.path.unlink()
    listener.link.stand(lambda text, _: said.append(text))
    assert len(said) == 2
    listener.connect().close()


def test_who_connected_before_the_socket_was_deleted_is_heard(
    listener: Listener, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where the serving thread was busy since, and had not accepted it."""
    busy, wait = threading.Event(), listener.gate.wait
    monkeypatch.setattr(listener.gate, "wait", lambda seconds: (busy.set(), wait(seconds)))
    listener.gate.clear()
    first = listener.connect()
    first.sendall(HELLO)
    assert busy.wait(PATIENCE)
    early = listener.connect()
    shutil.rmtree(listener.link.directory)
    listener.link.stand(lambda *_: None)
    listener.link.expect(EPOCH, FIRST, 2)
    listener.gate.set()
    early.sendall(HELLO + frame(progress=worker_pb2.Progress(step=3)))
    assert listener.next("progress")[1].progress.step == 3


def test_no_socket_is_made_in_the_directory_of_others(listener: Listener) -> None:
    """Where it was deleted, anybody may make one of its name."""
    shutil.rmtree(listener.link.directory)
    listener.link.directory.mkdir(mode=0o700)
    listener.link.directory.chmod(0o777)
    with pytest.raises(OSError, match=f"{listener.link.directory} was deleted, and is not this user's alone"):
        listener.link.stand(lambda *_: None)
    listener.link.directory.chmod(0o700)
    listener.link.stand(lambda *_: None)
    listener.connect().close()


def test_a_rank_cannot_be_another(listener: Listener) -> None:
    """The worker of local rank 1 says that it is local rank 0, and comes first: it is cut, and the true one heard."""
    with speaker(listener, FIRST, 12) as impostor, speaker(listener, FIRST, 11) as worker:
        listener.link.started(0, lambda: worker.pid)
        listener.link.started(1, lambda: impostor.pid)
        begin(impostor)
        assert impostor.stdout is not None
        assert impostor.stdout.readline() == "cut\n"
        begin(worker)
        assert listener.next("progress")[1].progress.step == 11


def test_a_second_process_of_a_worker_is_not_the_rank(listener: Listener) -> None:
    """A script that runs another one with its own environment: what that says does not count while it speaks itself."""
    first = listener.connect()
    first.sendall(HELLO)
    listener.next("hello")
    second = listener.connect()
    second.sendall(HELLO + frame(finished=worker_pb2.Finished(step=1)))
    assert cut(second)
    assert listener.said.empty()
    first.sendall(frame(progress=worker_pb2.Progress(step=3)))
    assert listener.next("progress")[1].progress.step == 3


def test_the_next_process_of_a_rank_is_heard(listener: Listener) -> None:
    """A script that is started anew by its wrapper; the last words of the one before are read first, however many."""
    first = listener.connect()
    first.sendall(HELLO)
    listener.next("hello")
    # The successor's connection is served first: its Hello waits, and so does all that the first one says.
    second = listener.connect()
    listener.gate.clear()
    second.sendall(HELLO[:-1])
    first.sendall(frame(progress=worker_pb2.Progress(step=4)))
    many = frame(progress=worker_pb2.Progress(step=4, loss=1.0, seconds=1.0, longest=1.0)) * 4000
    first.sendall(many)
    first.close()
    second.sendall(HELLO[-1:] + frame(progress=worker_pb2.Progress(step=5)))
    listener.gate.set()
    assert [listener.next("progress")[1].progress.step for _ in range(4002)] == [4] * 4001 + [5]


@pytest.mark.parametrize(
    "hello",
    [
        worker_pb2.Hello(epoch=EPOCH - 1, rank=FIRST),
        worker_pb2.Hello(epoch=2**64 - 1, rank=FIRST),
        worker_pb2.Hello(epoch=EPOCH, rank=FIRST - 1),
        worker_pb2.Hello(epoch=EPOCH, rank=FIRST + 2, local_rank=2),
        worker_pb2.Hello(epoch=EPOCH, rank=FIRST, local_rank=1),
    ],
    ids=["older", "newer", "other node", "too many", "other local rank"],
)
def test_who_was_not_started_is_not_heard(listener: Listener, hello: worker_pb2.Hello) -> None:
    """Only the ranks of the last start, as the agent numbered them."""
    channel = listener.connect()
    channel.sendall(frame(hello=hello) + frame(finished=worker_pb2.Finished(step=1)))
    assert cut(channel)
    assert listener.said.empty()


def test_an_epochs_end_does_not_cut_its_workers(listener: Listener) -> None:
    """What an older epoch seals is still worth recording; its ranks do not stand in the way of the new one's."""
    old = listener.connect()
    old.sendall(HELLO)
    listener.next("hello")
    listener.link.expect(EPOCH + 1, FIRST, 2)
    new = listener.connect()
    new.sendall(frame(hello=worker_pb2.Hello(epoch=EPOCH + 1, rank=FIRST)))
    listener.next("hello")
    old.sendall(frame(draining=worker_pb2.Draining(step=3)))
    assert listener.next("draining")[1].draining.step == 3


def test_a_crowd_that_says_nothing(listener: Listener, monkeypatch: pytest.MonkeyPatch) -> None:
    """Hundreds of silent connections: a worker is served at once, and the crowd does not stay."""
    monkeypatch.setattr(worker_link, "_HELLO_TIMEOUT_SECONDS", 1000.0)
    crowd = [listener.connect() for _ in range(300)]
    began = time.monotonic()
    worker = listener.connect()
    worker.sendall(HELLO)
    listener.next("hello")
    assert time.monotonic() - began < 60.0
    more = [listener.connect() for _ in range(100)]
    worker.sendall(frame(progress=worker_pb2.Progress(step=1)))
    listener.next("progress")
    assert all(cut(channel) for channel in crowd)
    for channel in more:
        channel.close()


def test_all_ranks_of_a_large_node_may_come_at_once(listener: Listener) -> None:
    """Each says who it is a moment after it has connected: the first of them were cut."""
    ranks = 100
    listener.link.expect(EPOCH, FIRST, ranks)
    channels = {rank: listener.connect() for rank in range(FIRST, FIRST + ranks)}
    # The last one first: once it is heard, all others have been accepted.
    for rank in sorted(channels, reverse=True):
        channels[rank].sendall(frame(hello=worker_pb2.Hello(epoch=EPOCH, rank=rank)))
        assert listener.next("hello")[0] == rank
    for channel in channels.values():
        channel.close()


def test_a_hello_in_a_crowd_is_read(listener: Listener) -> None:
    """It came in time, and was only not read yet when a hundred others came after it."""
    busy = listener.connect()
    listener.gate.clear()
    busy.sendall(HELLO)
    worker = listener.connect()
    worker.sendall(frame(hello=worker_pb2.Hello(epoch=EPOCH, rank=FIRST + 1)))
    crowd = [listener.connect() for _ in range(100)]
    listener.gate.set()
    assert {listener.next("hello")[0], listener.next("hello")[0]} == {FIRST, FIRST + 1}
    for channel in crowd:
        channel.close()


def test_a_long_hello_is_cut(listener: Listener) -> None:
    """Who has not said who it is has no memory of ours."""
    channel = listener.connect()
    channel.sendall(struct.pack(">I", 2000))
    assert cut(channel)


def test_who_does_not_say_hello_goes(listener: Listener, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also one alone, and one that is in the middle of it."""
    monkeypatch.setattr(worker_link, "_HELLO_TIMEOUT_SECONDS", 0.3)
    silent, slow = listener.connect(), listener.connect()
    slow.sendall(HELLO[:-1])
    assert cut(silent)
    assert cut(slow)


def test_no_descriptors_left(listener: Listener) -> None:
    """The agent has opened all that it may: who is connected is served, and the next one gets in once there is room."""
    worker = listener.connect()
    worker.sendall(HELLO)
    listener.next("hello")
    waiting = [socket.socket(socket.AF_UNIX) for _ in range(3)]
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    highest = max(map(int, os.listdir("/proc/self/fd")))
    resource.setrlimit(resource.RLIMIT_NOFILE, (highest + 1, hard))
    taken: list[int] = []
    try:
        with contextlib.suppress(OSError):
            while True:
                taken.append(os.dup(0))
        for channel in waiting:
            channel.settimeout(PATIENCE)
            channel.connect(str(listener.link.path))
        worker.sendall(frame(progress=worker_pb2.Progress(step=1)))
        listener.next("progress")
    finally:
        for descriptor in taken:
            os.close(descriptor)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    waiting[2].sendall(frame(hello=worker_pb2.Hello(epoch=EPOCH, rank=FIRST + 1)))
    assert listener.next("hello")[0] == FIRST + 1


def test_a_full_mailbox_loses_nothing(listener: Listener) -> None:
    """Whoever decides is far behind: the word is handed over once there is room, and the thread lives."""
    listener.full = 3
    worker = listener.connect()
    worker.sendall(HELLO + frame(finished=worker_pb2.Finished(step=9)))
    assert listener.next("finished")[1].finished.step == 9
    assert any(thread.name == "worker-link" for thread in threading.enumerate())


def test_a_lie_ends_the_connection(listener: Listener, caplog: pytest.LogCaptureFixture) -> None:
    """What no worker says is not believed; the log names it in one line, however often it happens."""
    for _ in range(100):
        channel = listener.connect()
        channel.sendall(HELLO + frame(sealed=worker_pb2.Sealed(name="../\n\x1b[2J", digest="0" * 64)))
        assert cut(channel)
    lines = [record.message for record in caplog.records if record.name == worker_link.__name__]
    assert any("which rank 0 does" in line for line in lines)
    assert all(line.isprintable() for line in lines)
    assert len(lines) <= 20


def test_a_worker_waits_to_be_let_in(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where more connect than the kernel queues, the next one waits for its turn, and not for ever."""
    path = str(tmp_path / "s")
    with socket.socket(socket.AF_UNIX) as server, contextlib.ExitStack() as stack:
        server.bind(path)
        server.listen(0)
        first = stack.enter_context(socket.socket(socket.AF_UNIX))
        first.connect(path)
        monkeypatch.setattr(link, "CONNECT_SECONDS", 0.3)
        with pytest.raises(TimeoutError, match="let nobody in"):
            link.Link(path, worker_pb2.Hello())
        monkeypatch.setattr(link, "CONNECT_SECONDS", PATIENCE)
        accepting = threading.Timer(0.2, lambda: stack.enter_context(server.accept()[0]))
        accepting.start()
        waited = link.Link(path, worker_pb2.Hello())
        accepting.join()
        assert waited.alive
        waited.close()
