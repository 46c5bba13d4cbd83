"""A real `dlrover-master` under callers that have no token, or that lie, with a good agent beside them."""

from __future__ import annotations

import contextlib
import http.client
import resource
import selectors
import socket
import subprocess
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grpc
import pytest

from dalsegno.protos import control_pb2 as pb
from tests.support.jobs.master_process import (
    Agent,
    MasterProcess,
    command,
    eventually,
    master_process,
    open_world,
    serving,
    settings,
)

pytestmark = pytest.mark.timeout(180)

TOKEN = "0123456789abcdef0123"
IDLERS = 1500
# Seconds that a good agent's call may take meanwhile, on a loaded machine; agents wait 10.
BOUND = 5.0


def memory(master: MasterProcess, what: str = "VmHWM") -> int:
    """The highest resident size so far, bytes."""
    status = Path(f"/proc/{master.process.pid}/status").read_text()
    line = next(line for line in status.splitlines() if line.startswith(f"{what}:"))
    return int(line.split()[1]) * 1024


@contextlib.contextmanager
def limited_master(store: Path, descriptors: int, *arguments: str) -> Iterator[MasterProcess]:
    """A master that cannot have more descriptors than this, whatever it does."""
    line = ["sh", "-c", f'ulimit -n {descriptors}; exec "$@"', "sh", *command(store, *arguments)]
    with subprocess.Popen(line, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        try:
            yield serving(process)
        finally:
            process.kill()


class Idlers:
    """Keeps so many silent connections to an address open, and opens anew what is ended, up to 200 a second."""

    def __init__(self, address: str, count: int) -> None:
        host, _, port = address.rpartition(":")
        self._target = (host, int(port))
        self._selector = selectors.DefaultSelector()
        self._stop = threading.Event()
        self.opened = 0
        for number in range(count):
            self._open()
            if number % 20 == 0:
                time.sleep(0.03)  # why: those that find the queue full come again later, and then are a flood
        self._thread = threading.Thread(target=self._again, daemon=True)
        self._thread.start()

    def close(self) -> None:
        self._stop.set()
        self._thread.join(30)
        for key in list(self._selector.get_map().values()):
            assert isinstance(key.fileobj, socket.socket)
            key.fileobj.close()
        self._selector.close()

    def _open(self) -> None:
        """Begins a connection. Its end is not waited for: where nobody takes it, that would be seconds for each."""
        idler = socket.socket()
        idler.setblocking(False)
        idler.connect_ex(self._target)
        self._selector.register(idler, selectors.EVENT_READ)
        self.opened += 1

    def _again(self) -> None:
        while not self._stop.is_set():
            for key, _ in self._selector.select(0.2)[:10]:
                assert isinstance(key.fileobj, socket.socket)
                with contextlib.suppress(OSError):
                    if key.fileobj.recv(1 << 16):
                        continue
                self._selector.unregister(key.fileobj)
                key.fileobj.close()
                self._open()
            # why: a flood takes the processor that both share here, and the question is what idlers cost.
            time.sleep(0.05)


@pytest.fixture
def many_descriptors() -> Iterator[None]:
    """For the attacker's own side."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard != resource.RLIM_INFINITY and hard < 2 * IDLERS + 500:
        pytest.skip(f"the test itself needs {2 * IDLERS + 500} file descriptors, the limit is {hard}")
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, 2 * IDLERS + 500), hard))
    yield
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def timed(call: Any) -> float:
    start = time.monotonic()
    call()
    return time.monotonic() - start


def healthy(address: str) -> bool:
    connection = http.client.HTTPConnection(address, timeout=BOUND)
    with contextlib.closing(connection):
        try:
            connection.request("GET", "/healthz")
            return connection.getresponse().status == 200
        except (OSError, http.client.HTTPException):
            # Many newcomers at once may push each other out.
            return False


def slowest_of_a_good_agent(agent: Agent, epoch: int, first: int, http_address: str) -> float:
    """Heartbeats, progress and commits of a member, and a person's look, one after the other."""
    slowest = 0.0
    for step in range(first, first + 20):
        slowest = max(
            slowest,
            timed(agent.heartbeat),
            timed(lambda step=step: agent.progress(epoch, step)),
            timed(lambda step=step: agent.commit(epoch, step)),
            timed(lambda: eventually(lambda: healthy(http_address))),
        )
    return slowest


@pytest.mark.parametrize("descriptors", [1024, pytest.param(4096, marks=pytest.mark.full)])
def test_idle_connections_cost_nobody_anything(tmp_path: Path, many_descriptors: None, descriptors: int) -> None:
    """1,500 on each port, opened anew as they are ended: commits go on; at a usual limit newcomers get in, too."""
    pytest.importorskip("uvicorn", reason="needs the extra http")
    with limited_master(tmp_path / "s.sqlite", descriptors, "--http-port", "0", "--nnodes", "1:2") as master:
        agent = Agent(master.address, "a")
        epoch = open_world([agent], settings((1, 2)))
        # As every agent has it: a connection without a stream is idle, too, between two calls.
        stream = agent.watch(timeout=300.0)
        next(stream)
        attackers = [Idlers(address, IDLERS) for address in (master.address, master.http)]
        try:
            slowest = slowest_of_a_good_agent(agent, epoch, 1, master.http)
            if descriptors > 2 * IDLERS:
                slowest = max(slowest, timed(lambda: Agent(master.address, "b").register(settings((1, 2)))))
            print(f"slowest call {slowest:.2f} s, {[attacker.opened for attacker in attackers]} connections")
            assert slowest < BOUND
            open_now = len(list(Path(f"/proc/{master.process.pid}/fd").iterdir()))
            assert open_now < descriptors
        finally:
            for attacker in attackers:
                attacker.close()
        assert agent.status().head.step == 20
        assert master.process.poll() is None
        # Whoever came while nobody else could gets in afterwards.
        eventually(lambda: gets_in(master, "c"), 30)
        stream.cancel()


def gets_in(master: MasterProcess, node: str) -> bool:
    newcomer = Agent(master.address, node)
    try:
        newcomer.register(settings((1, 2)))
    except grpc.RpcError:
        return False
    finally:
        newcomer.channel.close()
    return True


def test_bodies_without_a_token_are_not_read(tmp_path: Path) -> None:
    """150 calls of 15 MB at once, each on its own connection: refused, and the master does not grow."""
    token = tmp_path / "token"
    token.write_text(TOKEN)
    with master_process(tmp_path / "s.sqlite", "--token-file", str(token)) as master:
        body = bytes(15 << 20)
        codes: list[grpc.StatusCode] = []

        def call() -> None:
            options = [("grpc.use_local_subchannel_pool", 1), ("grpc.max_send_message_length", -1)]
            with grpc.insecure_channel(master.address, options=options) as channel:
                method = channel.unary_unary("/dalsegno.control.v1.Control/Register")
                codes.append(method.future(body, timeout=60).code())

        before = memory(master)
        threads = [threading.Thread(target=call) for _ in range(150)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(120)
        grown = memory(master) - before
        print(f"grew by {grown / 1e6:.0f} MB")
        # The connection may be ended while the body is still under way.
        assert set(codes) <= {grpc.StatusCode.UNAUTHENTICATED, grpc.StatusCode.UNAVAILABLE}
        assert codes.count(grpc.StatusCode.UNAUTHENTICATED) > 100
        assert grown < 150e6


LIES: list[dict[str, Any]] = [
    {field: value} for field in ("epoch", "generation") for value in (2**63, 2**63 - 1, 2**63 - 2, 2**64 - 1, 2**53 + 1)
]


def checkpoint(**lie: Any) -> pb.Checkpoint:
    """Sealed in epoch 2, but for the lie."""
    values: dict[str, Any] = {
        "ref": pb.CheckpointRef(name="step-10.e2.0", digest="1" * 64),
        "run_id": "run-0001",
        "step": 10,
        "epoch": 2,
        "generation": 4,
        "form": pb.FORM_SHARDED,
        "shape": pb.Shape(world_size=1, strategy="ddp", any_world_size=True),
        "min_nodes": 1,
        "max_nodes": 2,
    }
    return pb.Checkpoint(**(values | lie))


def test_lying_numbers_neither_end_nor_brick_the_master(tmp_path: Path) -> None:
    """Each is refused; the greatest that pass leave a master that serves, starts again, and opens worlds."""
    store = tmp_path / "s.sqlite"
    with master_process(store) as master:
        liar = Agent(master.address, "liar")
        for lie in LIES:
            with pytest.raises(grpc.RpcError) as error:
                liar.register(settings(), **lie)
            assert error.value.code() is grpc.StatusCode.INVALID_ARGUMENT  # type: ignore[attr-defined]
        liar.register(settings(), epoch=2**53, generation=2**53)
        liar.heartbeat()
    for number in range(2):
        with master_process(store) as master:
            good = Agent(master.address, f"good-{number}")
            generation = good.register(settings()).generation
            assert 2**48 <= generation < 2**48 + 10
            # What it was told it may bring back.
            again = Agent(master.address, f"again-{number}")
            again.register(settings(), epoch=2**48 + 5, generation=generation)


def test_a_lying_manifest_after_a_lost_store(tmp_path: Path) -> None:
    """It is left out of the inventory; the run goes on from the others."""
    lies = [
        checkpoint(epoch=2**64 - 1, ref=pb.CheckpointRef(name=f"step-10.e{2**64 - 1}.0", digest="2" * 64)),
        checkpoint(generation=2**63),
        checkpoint(step=2**63, ref=pb.CheckpointRef(name=f"step-{2**63}.e2.0", digest="3" * 64)),
        checkpoint(ref=pb.CheckpointRef(name="../../../etc", digest="4" * 64)),
    ]
    with master_process(tmp_path / "s.sqlite") as master:
        agent = Agent(master.address, "a")
        agent.register(settings((1, 1), node_timeout=5.0), inventory=[*lies, checkpoint()], epoch=2, generation=4)
        eventually(lambda: agent.status().head.step == 10, 20)
        assert agent.status().generation < 100


@pytest.mark.parametrize(
    "name",
    ["a\nb", "a\x1b[2J", "x" * 900_000, "../b", "a/b"],
    ids=["newline", "escapes", "long", "above", "slash"],
)
def test_names_that_would_reach_logs_and_paths(tmp_path: Path, name: str) -> None:
    """Refused with one line; the master's log has nothing of them."""
    log = tmp_path / "master.log"
    with master_process(tmp_path / "s.sqlite", "--log-file", str(log)) as master:
        for field in ("node", "host"):
            agent = Agent(master.address, "a")
            request = {"job_id": "job", "incarnation": "i", "nproc": 1, "secret": bytes(16), "settings": settings()}
            with pytest.raises(grpc.RpcError) as error:
                agent.stub.Register(pb.RegisterRequest(**(request | {field: name})), timeout=10)
            assert isinstance(error.value, grpc.Call)
            assert error.value.code() is grpc.StatusCode.INVALID_ARGUMENT
            assert (error.value.details() or "").isprintable()
        good = Agent(master.address, "good")
        epoch = open_world([good], settings((1, 1)))
        stream = good.watch()
        next(stream)
        request = pb.FailureRequest(caller=good.next_caller(epoch), message=f"boom {name}")
        good.stub.ReportFailure(request, timeout=10)
        eventually(lambda: "boom" in log.read_text(), 10)
        lines = log.read_text().splitlines()
        assert all(line.isprintable() and "[job/master]" in line for line in lines)
        assert max(map(len, lines)) < 5000
