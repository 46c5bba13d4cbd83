"""The exchange's arithmetic, the environment, the link's frames and the exit codes, each without a training process."""

from __future__ import annotations

import math
import os
import socket
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from datetime import timedelta
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dalsegno.elastic.rank.collective import GlooCollective, Pending, Solo
from dalsegno.elastic.rank.exchange import MAX_STEPS_APART, Exchange, Flags
from dalsegno.elastic.rank.identity import from_environment
from dalsegno.elastic.rank.link import Link
from dalsegno.protos import worker_pb2
from tests.support.held import Held


class Table(Solo):
    """Element-wise maximum over ranks that act one after the other: waits are answered once all have begun."""

    def __init__(self, ranks: int) -> None:
        self.vectors: list[list[int]] = []
        self.ranks = self.world_size = ranks  # type: ignore[misc]

    def start_max(self, values: Sequence[int]) -> Pending:
        mine = self.vectors
        mine.append(list(values))
        if len(mine) == self.ranks:
            self.vectors = []
        table = self

        class Later:
            def wait(self) -> list[int]:
                assert len(mine) == table.ranks, "a rank waits for one that exchanges nothing in this step"
                return [max(column) for column in zip(*mine, strict=True)]

        return Later()


@pytest.mark.slow
@given(
    lengths=st.lists(st.integers(1, 300), min_size=2, max_size=4),
    seconds=st.sampled_from([0.0001, 0.004, 0.02, 0.2]),
    drain_at=st.one_of(st.none(), st.tuples(st.integers(0, 3), st.integers(1, 300))),
)
def test_all_ranks_stop_at_one_boundary(lengths: list[int], seconds: float, drain_at: tuple[int, int] | None) -> None:
    """Whatever ends first, data of any rank or a drain on any rank, all ranks see it at the same step, in time."""
    table = Table(len(lengths))
    exchanges = [Exchange(table) for _ in lengths]
    step, shortest, since = 0, min(lengths), 0.0
    while True:
        step += 1
        assert step <= shortest, "a step without data on some rank"
        for rank, (exchange, length) in enumerate(zip(exchanges, lengths, strict=True)):
            drain = drain_at is not None and rank == drain_at[0] % len(lengths) and step >= drain_at[1]
            exchange.begin(step, Flags(drain=drain, master_seen=rank == 0), min(MAX_STEPS_APART, length - step))
        boundaries = {exchange.end(seconds * (1 + rank)) for rank, exchange in enumerate(exchanges)}
        assert len(boundaries) == 1
        (boundary,) = boundaries
        since += seconds
        if boundary.exchanged:
            assert boundary.master_seen
            since = 0.0
        if boundary.end or boundary.drain:
            break
        # The slowest rank's steps set the pace; the first exchanges come early, none late.
        assert since <= 0.05 + 2 * seconds
    if boundary.end:
        assert step == shortest
    else:
        assert drain_at is not None
        assert drain_at[1] <= step <= drain_at[1] + math.ceil(0.05 / seconds) + 1


def test_exchanges_are_rare_when_steps_are_fast() -> None:
    """Steps of 1 ms: after the first ones, an exchange every 50 steps."""
    exchange = Exchange(Solo())
    exchanged = []
    for step in range(1, 1001):
        exchange.begin(step, Flags(), MAX_STEPS_APART)
        exchanged.append(exchange.end(0.001).exchanged)
    assert sum(exchanged) <= 1000 / 50 + 3


def test_one_rank_waits_for_no_exchange() -> None:
    """The distance follows from the steps before, and these may have been much faster: nobody else has to be told."""
    exchange = Exchange(Solo())
    for step in range(1, 100):
        exchange.begin(step, Flags(), 64)
        told = exchange.end(0.0001)
    for step, flags in ((100, Flags(drain=True)), (101, Flags(save_order=3)), (102, Flags(save_order=3))):
        exchange.begin(step, flags, 64)
        told = exchange.end(30.0)
        assert (told.exchanged, told.drain, told.save) == (False, step == 100, step == 101)


def test_exchange_insists_on_its_order() -> None:
    """Begin and end alternate; an abandoned step can be begun again."""
    exchange = Exchange(Solo())
    with pytest.raises(RuntimeError, match="no step has begun"):
        exchange.end(0.1)
    exchange.begin(1, Flags(), 1)
    with pytest.raises(RuntimeError, match="before step 1 has ended"):
        exchange.begin(2, Flags(), 1)
    exchange.abandon()
    exchange.begin(1, Flags(drain=True), 0)
    boundary = exchange.end(0.1)
    assert (boundary.drain, boundary.end) == (True, True)


def test_the_step_after_one_that_was_left_is_exchanged() -> None:
    """Also where the one that was left counts, and so another number comes next: ranks must not wait for it in vain."""
    exchange = Exchange(Solo())
    exchange.begin(1, Flags(), 5)
    exchange.abandon()
    exchange.begin(2, Flags(drain=True), 5)
    assert exchange.end(0.1).drain


class Channels(Table):
    """A `Table` whose ranks have a store beside it."""

    def __init__(self, ranks: int, held: Held, rank: int, table: Table) -> None:
        super().__init__(ranks)
        self.held, self.rank, self.world_size, self.table, self.opened = held, rank, ranks, table, 0

    def start_max(self, values: Sequence[int]) -> Pending:
        return self.table.start_max(values)

    def channel(self, use: str) -> Held:
        assert use == "hurry"
        self.opened += 1
        return self.held


@pytest.mark.parametrize("trained", [False, True])
def test_a_loop_behind_a_break_drains_at_one_step(trained: bool) -> None:
    """Each rank answers a call once, with the step that it is in, however many loops were left before."""
    held, table = Held(), Table(2)
    channels = [Channels(2, held, rank, table) for rank in range(2)]
    exchanges = [Exchange(channel) for channel in channels]
    step = 0

    def make(number: int, drain: bool = False) -> set[bool]:
        for rank, exchange in enumerate(exchanges):
            exchange.begin(number, Flags(drain=drain and rank == 1), MAX_STEPS_APART)
        return {exchange.end(0.001).drain for exchange in exchanges}

    try:
        for _ in range(3):
            for _ in range(4):
                step += 1
                assert make(step) == {False}
            for exchange in exchanges:
                exchange.begin(step + 1, Flags(), MAX_STEPS_APART)
                exchange.abandon()
            table.vectors = []
            step += int(trained)
        assert make(step + 1) == {False}
        for rank, exchange in enumerate(exchanges):
            exchange.begin(step + 2, Flags(drain=rank == 1), MAX_STEPS_APART)
        held.wait(["0/boundary"], timedelta(seconds=30))
        assert held.get("0/boundary") == str(step + 2).encode()
        assert {exchange.end(0.001).drain for exchange in exchanges} == {True}
        assert [channel.opened for channel in channels] == [2, 2], "of the thread and of its rank"
    finally:
        for exchange in exchanges:
            exchange.close()


@pytest.mark.parametrize("trained", [False, True])
def test_a_call_reaches_ranks_that_leave_their_loop(trained: bool) -> None:
    """One has left the step in which the other calls: both drain where they next end a step."""
    held, table = Held(), Table(2)
    exchanges = [Exchange(Channels(2, held, rank, table)) for rank in range(2)]
    try:
        for step in range(1, 5):
            for exchange in exchanges:
                exchange.begin(step, Flags(), MAX_STEPS_APART)
            assert {exchange.end(0.001).drain for exchange in exchanges} == {False}
        exchanges[0].begin(5, Flags(), MAX_STEPS_APART)
        exchanges[0].abandon()
        exchanges[1].begin(5, Flags(drain=True), MAX_STEPS_APART)
        exchanges[1].abandon()
        held.wait(["0/boundary"], timedelta(seconds=30))
        for exchange in exchanges:
            exchange.begin(5 + trained, Flags(), MAX_STEPS_APART)
        assert {exchange.end(0.001).drain for exchange in exchanges} == {True}
    finally:
        for exchange in exchanges:
            exchange.close()


def test_an_order_to_save_is_seen_once_by_all_ranks() -> None:
    """Whoever hears of it first, and however long it is told: one boundary for all; a newer order is another one."""
    table = Table(2)
    exchanges = [Exchange(table, interval=0.0) for _ in range(2)]
    seen = []
    for step, told in enumerate([(0, 0), (3, 0), (3, 3), (0, 3), (0, 0), (3, 0), (3, 8), (8, 8)], start=1):
        for exchange, order in zip(exchanges, told, strict=True):
            exchange.begin(step, Flags(save_order=order), 5)
        (boundary,) = {exchange.end(0.1) for exchange in exchanges}
        seen.append(boundary.save)
    assert [step for step, save in enumerate(seen, start=1) if save] == [2, 7]


def test_a_save_is_over_when_it_is_so_on_all_ranks() -> None:
    """Of each exchange: what some rank still writes all ranks know of, and so when nobody does any more."""
    table = Table(2)
    exchanges = [Exchange(table, interval=0.0) for _ in range(2)]
    seen = []
    for step, writing in enumerate([(True, True), (False, True), (True, False), (False, False)], start=1):
        for exchange, saving in zip(exchanges, writing, strict=True):
            exchange.begin(step, Flags(saving=saving), 5)
        (boundary,) = {exchange.end(0.1) for exchange in exchanges}
        seen.append(boundary.saving)
    assert seen == [True, True, True, False]


def test_collectives_belong_to_the_main_thread() -> None:
    """A collective from another thread is refused before it can pair up wrongly."""
    caught: list[BaseException] = []

    def elsewhere() -> None:
        try:
            GlooCollective(0, 2, 1).barrier()
        except RuntimeError as error:
            caught.append(error)

    thread = threading.Thread(target=elsewhere)
    thread.start()
    thread.join(10)
    assert "main thread" in str(caught[0])


def test_the_environment_is_the_one_that_there_is_now(monkeypatch: pytest.MonkeyPatch) -> None:
    """`datasets` puts a copy in its place; what is set from then on is set there."""
    monkeypatch.setattr(os, "environ", dict(os.environ))
    os.environ.update(RANK="3", WORLD_SIZE="4", LOCAL_RANK="0")
    assert (from_environment().rank, from_environment().world_size) == (3, 4)


def test_environment_is_read_or_refused_with_a_reason(tmp_path: Path) -> None:
    """Plain python, torchrun and an agent's variables; what is missing is named."""
    assert from_environment({}).alone
    torchrun = from_environment({"RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "1"}, tmp_path)
    assert (torchrun.rank, torchrun.epoch, torchrun.run_dir) == (1, 0, tmp_path)
    environ = {"DALSEGNO_SOCKET": "/s", "DALSEGNO_EPOCH": "7", "DALSEGNO_JOB_ID": "j", "DALSEGNO_RUN_ID": "r"}
    environ |= {"DALSEGNO_NODE": "n", "DALSEGNO_GENERATION": "2", "DALSEGNO_MIN_NODES": "1", "DALSEGNO_MAX_NODES": "4"}
    with pytest.raises(RuntimeError, match="DALSEGNO_RUN_DIR is missing"):
        from_environment(environ)
    environ["DALSEGNO_RUN_DIR"] = "/runs/r"
    assert from_environment(environ, tmp_path).run_dir == Path("/runs/r")
    with pytest.raises(RuntimeError, match="DALSEGNO_EPOCH is 'x'"):
        from_environment({**environ, "DALSEGNO_EPOCH": "x"})
    environ |= {
        "DALSEGNO_RESUME_NAME": "step-1.e1.1",
        "DALSEGNO_RESUME_DIGEST": "d",
        "DALSEGNO_RESUME_FORM": "universal",
    }
    with pytest.raises(RuntimeError, match="DALSEGNO_UNIVERSAL_NAME is missing"):
        from_environment(environ)
    environ |= {"DALSEGNO_UNIVERSAL_NAME": "step-1.e1.1.universal.1", "DALSEGNO_UNIVERSAL_DIGEST": "u"}
    resume = from_environment(environ).resume
    assert resume is not None
    assert resume.universal is not None


class Agent:
    def __init__(self, tmp_path: Path) -> None:
        self.path = str(tmp_path / "agent.sock")
        self.server = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self.server.bind(self.path)
        self.server.listen()
        self.server.settimeout(10)

    def connect(self) -> Link:
        link = Link(self.path, worker_pb2.Hello(protocol=1, epoch=5, rank=3))
        self.peer, _ = self.server.accept()
        self.peer.settimeout(10)
        return link

    def receive(self) -> worker_pb2.ToAgent:
        with self.peer.makefile("rb", buffering=0) as stream:
            (length,) = struct.unpack(">I", stream.read(4) or b"")
            return worker_pb2.ToAgent.FromString(stream.read(length) or b"")


def eventually(true: object, seconds: float = 5.0) -> None:
    deadline = time.monotonic() + seconds
    while not true():  # type: ignore[operator]
        assert time.monotonic() < deadline
        time.sleep(0.005)


def frame(message: worker_pb2.ToWorker) -> bytes:
    data = message.SerializeToString()
    return struct.pack(">I", len(data)) + data


def test_link_says_hello_and_follows_the_flags(tmp_path: Path) -> None:
    """Frames cut anywhere are put together; the last message counts, withdrawal included."""
    agent = Agent(tmp_path)
    link = agent.connect()
    hello = agent.receive().hello
    assert (hello.epoch, hello.rank) == (5, 3)
    data = frame(worker_pb2.ToWorker(drain=True, master_seen=True))
    for byte in data:
        agent.peer.sendall(bytes([byte]))
    eventually(lambda: link.drain and link.master_seen)
    agent.peer.sendall(frame(worker_pb2.ToWorker(master_seen=True)) + frame(worker_pb2.ToWorker()))
    eventually(lambda: not link.drain and not link.master_seen)
    link.close()


@pytest.mark.parametrize("nonsense", [b"\xff\xff\xff\xff", struct.pack(">I", 2) + b"\xff\xff"])
def test_link_gives_up_on_an_agent_that_talks_nonsense(tmp_path: Path, nonsense: bytes) -> None:
    """Garbage on the socket ends the connection, not the process."""
    agent = Agent(tmp_path)
    link = agent.connect()
    agent.peer.sendall(nonsense)
    eventually(lambda: not link.alive)
    link.send(worker_pb2.ToAgent(finished=worker_pb2.Finished(step=1)))
    link.close()


@pytest.mark.slow
def test_agent_that_does_not_read_costs_bounded_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Progress is left out, important messages wait for a bounded time, and then the agent counts as gone."""
    monkeypatch.setattr("dalsegno.elastic.rank.link.SEND_SECONDS", 0.3)
    agent = Agent(tmp_path)
    link = agent.connect()
    message = worker_pb2.ToAgent(save_failed=worker_pb2.SaveFailed(reason="x" * 60_000))
    began = time.monotonic()
    for _ in range(100):
        link.send(worker_pb2.ToAgent(progress=worker_pb2.Progress(step=1)), droppable=True)
    for _ in range(100):
        link.send(message)
    # Each of a hundred would wait that long.
    assert time.monotonic() - began < 25
    assert not link.alive
    link.close()


def test_forked_child_does_not_keep_the_connection(tmp_path: Path) -> None:
    """The agent sees a worker's end at once, although a DataLoader process that it forked lives on."""
    agent = Agent(tmp_path)
    code = (
        "import os, sys, time\n"
        "from dalsegno.elastic.rank.link import Link\n"
        "from dalsegno.protos import worker_pb2\n"
        f"link = Link({agent.path!r}, worker_pb2.Hello(rank=1))\n"
        "if os.fork() == 0:\n"
        "    sys.stdin.read(); os._exit(0)\n"
        "os._exit(7)\n"
    )
    process = subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE)
    agent.peer, _ = agent.server.accept()
    agent.peer.settimeout(10)
    assert process.wait(20) == 7
    agent.receive()
    assert agent.peer.recv(1) == b""
    assert process.stdin is not None
    process.stdin.close()


def test_missing_agent_is_an_error(tmp_path: Path) -> None:
    """A worker whose agent is not there must not train on its own."""
    with pytest.raises(OSError, match="No such file"):
        Link(str(tmp_path / "none.sock"), worker_pb2.Hello())


@pytest.mark.parametrize(
    ("ending", "said"),
    [
        ("sys.exit(0)", ""),
        ("raise RuntimeError('late trouble')", "late trouble"),
        ("raise Drained", ""),
        ("import atexit; atexit.register(lambda: print('later', flush=True))", ""),
        ("import multiprocessing, logging; logging.error('last words')", "last words"),
    ],
)
def test_decided_exit_code_wins(ending: str, said: str) -> None:
    """However a script ends after the decision, its exit code is the decided one, and output is not lost."""
    code = (
        "import sys\nfrom dalsegno.elastic.rank.exits import Drained, insist\n"
        f"print('before', end='')\ninsist(83)\n{ending}\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=30, env=dict(os.environ)
    )
    assert done.returncode == 83
    assert done.stdout.startswith("before")
    assert said in done.stderr
