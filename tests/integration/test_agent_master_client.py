"""The client of the control plane against a real gRPC server with a scripted servicer."""

from __future__ import annotations

import queue
import socket
import threading
import time
from collections.abc import Callable, Iterator
from concurrent import futures
from dataclasses import replace
from typing import Any

import grpc
import pytest

from dalsegno.agent.control import client_threads, master_client
from dalsegno.agent.control.connection import Connector, Credentials
from dalsegno.agent.control.master_client import ClientCallbacks, MasterClient
from dalsegno.agent.control.places import MasterPlaces
from dalsegno.protos import control_pb2 as pb
from dalsegno.protos import control_pb2_grpc
from dalsegno.protos.contract import CONTROL_PROTOCOL, LEADER_METADATA
from dalsegno.protos.limits import MESSAGE_BYTES

pytestmark = pytest.mark.timeout(60)
OPTIONS = (("grpc.so_reuseport", 0), ("grpc.max_receive_message_length", MESSAGE_BYTES))


class Servicer(control_pb2_grpc.ControlServicer):
    """Answers as it is told, and keeps what it heard."""

    def __init__(self, generation: int = 1) -> None:
        self.generation = generation
        self.heard: list[tuple[str, Any]] = []
        self.metadata: list[dict[str, str]] = []
        # Per method: what to answer before the good answer; a status, with a detail.
        self.errors: dict[str, list[tuple[grpc.StatusCode, str]]] = {}
        self.hold = threading.Event()
        self.hold.set()
        self.streams: list[queue.SimpleQueue[pb.Directive | None]] = []
        self.watching: list[pb.Caller] = []
        self.unrecorded = False

    def answer(self, method: str, request: Any, context: grpc.ServicerContext) -> pb.Ack:
        self.heard.append((method, request))
        self.metadata.append({key: str(value) for key, value in context.invocation_metadata()})
        self.hold.wait(10)
        if self.errors.get(method):
            context.abort(*self.errors[method].pop(0))
        return pb.Ack(generation=self.generation, unrecorded=self.unrecorded)

    def Register(self, request: pb.RegisterRequest, context: grpc.ServicerContext) -> pb.RegisterReply:
        self.answer("Register", request, context)
        return pb.RegisterReply(generation=self.generation, node=request.node or "node-0", run_id="run-0001")

    def Watch(self, request: pb.WatchRequest, context: grpc.ServicerContext) -> Iterator[pb.Directive]:
        self.hold.wait(10)
        if self.errors.get("Watch"):
            context.abort(*self.errors["Watch"].pop(0))
        stream: queue.SimpleQueue[pb.Directive | None] = queue.SimpleQueue()
        context.add_callback(lambda: stream.put(None))
        self.watching.append(request.caller)
        self.streams.append(stream)
        yield pb.Directive(generation=self.generation, epoch=len(self.streams))
        while (directive := stream.get()) is not None:
            yield directive

    def of(self, method: str) -> list[Any]:
        return [request for name, request in list(self.heard) if name == method]


def _unary(method: str) -> Callable[[Servicer, Any, grpc.ServicerContext], pb.Ack]:
    return lambda self, request, context: self.answer(method, request, context)


for _name in (
    "Join",
    "Leave",
    "Heartbeat",
    "ReportProgress",
    "ReportWarm",
    "ReportFailure",
    "CommitCheckpoint",
    "ReportHeld",
):
    setattr(Servicer, _name, _unary(_name))


class Master:
    """A server that can be stopped and started again at the same port."""

    def __init__(self, servicer: Servicer | None = None, port: int = 0, host: str = "127.0.0.1") -> None:
        self.servicer = servicer or Servicer()
        self.host, self.port = host, port
        self.start()

    def start(self) -> None:
        self.server = grpc.server(futures.ThreadPoolExecutor(16), options=[*OPTIONS])
        control_pb2_grpc.add_ControlServicer_to_server(self.servicer, self.server)
        self.port = self.server.add_insecure_port(f"{self.host}:{self.port}")
        self.server.start()

    def stop(self) -> None:
        self.server.stop(0).wait(5)

    @property
    def address(self) -> str:
        return f"{self.host}:{self.port}"


class Agent:
    """A client with everything that it told."""

    def __init__(self, *addresses: str, token: str | None = None, places: MasterPlaces | None = None) -> None:
        self.events: queue.SimpleQueue[tuple[str, Any]] = queue.SimpleQueue()
        self.missing = 0
        self.records: bool | None = None
        self.addresses = list(addresses)
        self.connector = Connector(lambda: self.addresses, lambda: Credentials(token), self._missed, places=places)
        self.client = MasterClient(
            self.connector,
            "job",
            ClientCallbacks(
                registered=lambda incarnation, reply: self.events.put(("registered", (incarnation, reply))),
                refused=lambda code, detail: self.events.put(("refused", (code, detail))),
                directed=lambda directive: self.events.put(("directed", directive)),
                failed=lambda method, code, detail: self.events.put(("failed", (method, code, detail))),
                link=lambda up, refused: self.events.put(("link", "refused" if refused else up)),
                records=lambda records: setattr(self, "records", records),
                broken=lambda detail: self.events.put(("broken", detail)),
            ),
        )

    def held(self, kind: str, until: Callable[[], bool]) -> None:
        """Holds the thread that tells of `kind` next where it is about to do so, until then, for a second at most."""
        tell = getattr(self.client._listener, kind)
        first = iter([True])

        def late(*told: Any) -> None:
            deadline, held = time.monotonic() + 1.0, next(first, False)
            while held and not until() and time.monotonic() < deadline:
                time.sleep(0.01)
            tell(*told)

        self.client._listener = replace(self.client._listener, **{kind: late})

    def told(self) -> list[str]:
        """The kinds of everything so far, in order."""
        found = []
        while not self.events.empty():
            found.append(self.events.get()[0])
        return found

    def _missed(self) -> None:
        self.missing += 1

    def register(self, incarnation: str = "one") -> None:
        self.client.register(pb.RegisterRequest(incarnation=incarnation, node="n"))

    def expect(self, kind: str, timeout: float = 15.0) -> Any:
        deadline = time.monotonic() + timeout
        while True:
            name, value = self.events.get(timeout=max(0.01, deadline - time.monotonic()))
            if name == kind:
                return value


@pytest.fixture
def master() -> Iterator[Master]:
    one = Master()
    yield one
    one.servicer.hold.set()
    one.stop()


@pytest.fixture
def agent(master: Master) -> Iterator[Agent]:
    one = Agent(master.address, token="secret")
    yield one
    one.client.close()


def wait_for(condition: Callable[[], bool], seconds: float = 15.0) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "not in time"
        time.sleep(0.01)


def join(round_: int) -> pb.JoinRequest:
    return pb.JoinRequest(caller=pb.Caller(epoch=2), round=round_)


def test_registration_stream_and_token(master: Master, agent: Agent) -> None:
    """The caller is filled in, the token goes with everything, and directives arrive."""
    agent.register()
    incarnation, reply = agent.expect("registered")
    assert (incarnation, reply.run_id) == ("one", "run-0001")
    assert agent.expect("directed").epoch == 1
    agent.client.call("Join", join(3))
    assert agent.client.flush(5)
    caller = master.servicer.of("Join")[0].caller
    assert (caller.job_id, caller.node, caller.incarnation, caller.epoch, caller.request, caller.protocol) == (
        "job",
        "n",
        "one",
        2,
        1,
        CONTROL_PROTOCOL,
    )
    assert {heard["authorization"] for heard in master.servicer.metadata} == {"Bearer secret"}


def test_the_retry_policy_of_the_channel_is_in_force(master: Master) -> None:
    """gRPC itself repeats a call that found the master unavailable: three attempts are counted for one call."""
    master.servicer.errors["Join"] = [(grpc.StatusCode.UNAVAILABLE, "starting")] * 2
    channel = Credentials().channel(master.address)
    ack = control_pb2_grpc.ControlStub(channel).Join(join(1), timeout=5)
    assert ack.generation == 1
    assert len(master.servicer.of("Join")) == 3
    channel.close()


@pytest.mark.parametrize("code", ["UNAVAILABLE", "ABORTED", "RESOURCE_EXHAUSTED"])
def test_a_call_is_repeated_under_its_number_and_nothing_overtakes_it(master: Master, agent: Agent, code: str) -> None:
    """Seven failed attempts later it is answered, and only then does the next one go out."""
    master.servicer.errors["Join"] = [(grpc.StatusCode[code], "not now")] * 7
    agent.register()
    agent.client.call("Join", join(1))
    agent.client.call("ReportWarm", pb.WarmRequest())
    assert agent.client.flush(15)
    calls = [
        (name, request.caller.request) for name, request in master.servicer.heard if name in ("Join", "ReportWarm")
    ]
    assert calls == [("Join", 1)] * 8 + [("ReportWarm", 2)]


def held(step: int, *parts: int) -> pb.HeldRequest:
    return pb.HeldRequest(checkpoint=pb.Checkpoint(ref=pb.CheckpointRef(digest=f"d{step}")), parts=parts)


def test_what_is_held_is_told_as_it_is_when_it_is_sent(master: Master, agent: Agent) -> None:
    """In its place among the others, unless it is gone before. What may have come to the master stays as it is."""
    told: list[tuple[str, int, pb.Replication | None]] = []
    agent.client._listener = replace(agent.client._listener, replication=lambda *said: told.append(said))
    master.servicer.errors["ReportHeld"] = [(grpc.StatusCode.UNAVAILABLE, "not now")] * 3
    agent.register()
    agent.client.call("ReportHeld", held(1, 0))
    wait_for(lambda: bool(master.servicer.of("ReportHeld")))
    for request in (held(2, 0), held(1, 0, 1), held(2), pb.HeldRequest(all=True), held(2, 1), pb.HeldRequest(all=True)):
        agent.client.call("ReportHeld", request)
    assert agent.client.flush(15)
    heard = master.servicer.of("ReportHeld")[3:]
    assert [(call.caller.request, call.checkpoint.ref.digest, tuple(call.parts)) for call in heard] == [
        (1, "d1", (0,)),
        (3, "d1", (0, 1)),
        (4, "", ()),
        (5, "d2", (1,)),
        (6, "", ()),
    ]
    assert [digest for digest, _, _ in told] == ["d1", "d1", "", "d2", ""]
    assert {(generation, said) for _, generation, said in told} == {(1, None)}


def test_steps_that_come_and_go_unheard_leave_nothing_behind() -> None:
    """A long outage ended the training: each memory checkpoint left a call, and there is a limit. So for shortages."""
    one = Agent()
    one.register()
    one.client.call("ReportShortage", pb.ShortageRequest(missing_bytes=1))
    before = one.client.waiting()
    for step in range(1, 4):
        one.client.call("ReportHeld", held(step, 0))
        one.client.call("ReportShortage", pb.ShortageRequest(missing_bytes=step))
        one.client.call("ReportHeld", held(step, 0, 1))
        one.client.call("ReportHeld", held(step))
    assert one.client.waiting() == before
    assert [waiting.request.missing_bytes for waiting in one.client._queue if waiting.method == "ReportShortage"] == [3]
    one.client.close()


def test_what_the_master_has_heard_of_is_said_to_be_gone(master: Master, agent: Agent) -> None:
    """Also where it came again, and went again, while the master was away."""
    agent.register()
    agent.client.call("ReportHeld", held(1, 0))
    assert agent.client.flush(15)
    agent.client.call("ReportHeld", held(2, 0))
    assert agent.client.flush(15)
    master.servicer.hold.clear()
    agent.client.call("Join", join(1))
    for request in (held(1, 0, 1), held(1), held(1, 0), held(1), held(2), held(2, 0)):
        agent.client.call("ReportHeld", request)
    master.servicer.hold.set()
    assert agent.client.flush(15)
    heard = master.servicer.of("ReportHeld")[2:]
    assert [(call.checkpoint.ref.digest, tuple(call.parts)) for call in heard] == [("d1", ()), ("d2", (0,))]


def test_a_final_answer_is_told_and_the_next_call_goes_out(master: Master, agent: Agent) -> None:
    """FAILED_PRECONDITION is not repeated."""
    master.servicer.errors["CommitCheckpoint"] = [(grpc.StatusCode.FAILED_PRECONDITION, "epoch 2 is closed")]
    agent.register()
    agent.client.call("CommitCheckpoint", pb.CommitRequest())
    agent.client.call("Join", join(1))
    assert agent.expect("failed") == ("CommitCheckpoint", "FAILED_PRECONDITION", "epoch 2 is closed")
    assert agent.client.flush(5)
    assert [len(master.servicer.of(name)) for name in ("CommitCheckpoint", "Join")] == [1, 1]


def test_a_call_that_is_larger_than_the_master_takes_holds_up_no_other(agent: Agent) -> None:
    """It was repeated for ever. gRPC answers it, under a code that otherwise says "not now"."""
    agent.client.call("ReportFailure", pb.FailureRequest(message="x" * (MESSAGE_BYTES + 1)))
    agent.client.call("Join", join(1))
    agent.register()
    method, code, _ = agent.expect("failed")
    assert (method, code) == ("ReportFailure", "RESOURCE_EXHAUSTED")
    assert agent.client.flush(15)


def test_an_error_of_the_master_is_repeated_but_not_for_ever(master: Master, agent: Agent) -> None:
    """A master that always fails on one call does not hold up the others."""
    master.servicer.errors["Join"] = [(grpc.StatusCode.INTERNAL, "a bug")] * 50
    agent.register()
    agent.client.call("Join", join(1))
    agent.client.call("ReportWarm", pb.WarmRequest())
    assert agent.expect("failed")[:2] == ("Join", "INTERNAL")
    assert agent.client.flush(5)
    assert len(master.servicer.of("Join")) == 6


def test_a_refused_registration(master: Master, agent: Agent) -> None:
    """A live node's name: told once, not repeated."""
    master.servicer.errors["Register"] = [(grpc.StatusCode.ALREADY_EXISTS, "n is alive")]
    agent.register()
    assert agent.expect("refused") == ("ALREADY_EXISTS", "n is alive")
    assert agent.client.flush(5)
    assert len(master.servicer.of("Register")) == 1


def test_a_new_registration_drops_what_the_old_one_left(master: Master, agent: Agent) -> None:
    """Calls of a fenced incarnation are never sent; the new one counts from 1 and watches anew."""
    agent.register("one")
    agent.expect("directed")
    master.servicer.errors["Join"] = [(grpc.StatusCode.UNAVAILABLE, "away")] * 1000
    agent.client.call("Join", join(1))
    agent.client.call("ReportFailure", pb.FailureRequest())
    wait_for(lambda: len(master.servicer.of("Join")) > 2)
    agent.register("two")
    assert agent.expect("registered")[0] == "two"
    agent.expect("directed")
    agent.client.call("ReportWarm", pb.WarmRequest())
    assert agent.client.flush(5)
    assert master.servicer.of("ReportFailure") == []
    assert [(r.caller.incarnation, r.caller.request) for r in master.servicer.of("ReportWarm")] == [("two", 1)]
    assert [caller.incarnation for caller in master.servicer.watching] == ["one", "two"]


def test_calls_of_a_new_session_wait_for_its_registration_and_are_not_lost(master: Master, agent: Agent) -> None:
    """The session begins when the agent decides to register; reading the directory for it takes a while."""
    agent.register("one")
    agent.expect("directed")
    master.servicer.errors["Join"] = [(grpc.StatusCode.UNAVAILABLE, "away")] * 1000
    agent.client.call("Join", join(1))
    agent.client.new_session()
    agent.client.call("ReportFailure", pb.FailureRequest(message="kept"))
    agent.client.new_session()
    time.sleep(0.3)
    assert master.servicer.of("ReportFailure") == []
    master.servicer.errors["Register"] = [(grpc.StatusCode.ALREADY_EXISTS, "n is alive")]
    agent.register("two")
    assert agent.expect("refused")[0] == "ALREADY_EXISTS"
    agent.client.new_session()
    agent.client.call("ReportWarm", pb.WarmRequest())
    time.sleep(0.3)
    assert master.servicer.of("ReportWarm") == []
    agent.register("three")
    assert agent.client.flush(5)
    callers = [master.servicer.of(name)[0].caller for name in ("ReportFailure", "ReportWarm")]
    assert [(caller.incarnation, caller.request) for caller in callers] == [("three", 1), ("three", 2)]


def test_an_incarnation_that_says_more_of_itself_loses_no_call(master: Master, agent: Agent) -> None:
    """What it was not answered yet is sent behind that, and the master repeats its directive."""
    agent.register("one")
    agent.expect("directed")
    master.servicer.errors["Join"] = [(grpc.StatusCode.UNAVAILABLE, "away")] * 2
    agent.client.call("Join", join(1))
    agent.client.register(pb.RegisterRequest(incarnation="one", node="n", peer_address="10.0.0.1:7"))
    assert agent.expect("registered")[0] == "one"
    agent.expect("directed")
    agent.client.call("ReportWarm", pb.WarmRequest())
    assert agent.client.flush(5)
    assert [request.peer_address for request in master.servicer.of("Register")] == ["", "10.0.0.1:7"]
    assert {request.caller.request for request in master.servicer.of("Join")} == {1}
    assert [request.caller.request for request in master.servicer.of("ReportWarm")] == [2]


def test_a_token_that_cannot_be_read_ends_no_thread(master: Master) -> None:
    """The file system is away when the connection is made, and again when it is made anew: the last token counts."""
    agent = Agent(master.address)
    away = threading.Event()
    away.set()

    def credentials() -> Credentials:
        if away.is_set():
            raise OSError(116, "Stale file handle")
        return Credentials("secret")

    agent.connector._credentials = credentials
    try:
        agent.register()
        wait_for(lambda: agent.missing > 2)
        away.clear()
        agent.expect("directed")
        away.set()
        master.stop()
        assert agent.expect("link") is False
        agent.client.call("Join", join(9))
        agent.client.call("ReportProgress", pb.ProgressRequest(step=7))
        master.start()
        assert agent.client.flush(10)
        wait_for(lambda: master.servicer.of("ReportProgress") != [])
        assert {heard["authorization"] for heard in master.servicer.metadata} == {"Bearer secret"}
    finally:
        agent.client.close()


def test_progress_is_kept_while_no_address_is_known(master: Master, agent: Agent) -> None:
    """An embedded master is being started: what a rank said last is told afterwards."""
    agent.register()
    agent.expect("directed")
    agent.addresses.clear()
    master.stop()
    assert agent.expect("link") is False
    agent.client.call("ReportProgress", pb.ProgressRequest(step=7))
    time.sleep(1.5)
    master.start()
    agent.addresses.append(master.address)
    wait_for(lambda: [request.step for request in master.servicer.of("ReportProgress")] == [7])


def test_only_the_newest_progress_counts(master: Master, agent: Agent) -> None:
    """Hundreds of reports become a few, the first and the last of them included; a heartbeat comes every second."""
    agent.register()
    agent.expect("directed")
    agent.client.call("ReportProgress", pb.ProgressRequest(step=1))
    wait_for(lambda: len(master.servicer.of("ReportProgress")) == 1, 0.5)
    began = time.monotonic()
    for step in range(2, 500):
        agent.client.call("ReportProgress", pb.ProgressRequest(caller=pb.Caller(epoch=4), step=step))
        time.sleep(0.001)
    wait_for(lambda: master.servicer.of("ReportProgress")[-1].step == 499)
    steps = [request.step for request in master.servicer.of("ReportProgress")]
    assert steps == sorted(steps)
    # Ten a second, however long a busy machine took for them.
    assert len(steps) < 20 + 10 * (time.monotonic() - began)
    wait_for(lambda: len(master.servicer.of("Heartbeat")) >= 3, 4.0)
    assert master.servicer.of("Heartbeat")[-1].caller.epoch == 4
    assert agent.client.waiting() == 0


def test_signs_of_life_tell_whether_the_master_records(master: Master, agent: Agent) -> None:
    """Heartbeats and progress; it is heard all the while."""
    agent.register()
    agent.expect("directed")
    wait_for(lambda: agent.records is True)
    master.servicer.unrecorded = True
    wait_for(lambda: agent.records is False)
    agent.client.call("Leave", pb.LeaveRequest())
    master.servicer.unrecorded = False
    agent.client.call("ReportProgress", pb.ProgressRequest(step=1))
    wait_for(lambda: agent.records is True)
    assert "link" not in agent.told()


def test_the_master_is_killed_and_comes_back(master: Master, agent: Agent) -> None:
    """The link goes down and up, the stream is opened again, and what was to be said in between is said."""
    agent.register()
    agent.expect("directed")
    master.stop()
    agent.client.call("Join", join(9))
    assert agent.expect("link") is False
    assert agent.missing > 0
    master.servicer.generation = 2
    master.start()
    assert agent.expect("link") is True
    assert agent.expect("directed").generation == 2
    assert agent.client.flush(10)
    assert [(r.round, r.caller.request) for r in master.servicer.of("Join")][-1] == (9, 1)
    assert agent.client.generation == 2


def test_that_the_master_is_back_is_told_before_what_it_says(master: Master, agent: Agent) -> None:
    """Also where the thread that heard it first comes to tell that last."""
    agent.register()
    agent.expect("directed")
    master.stop()
    agent.client.call("Join", join(9))
    assert agent.expect("link") is False
    tell, first, told = agent.client._tell_link, iter([True]), threading.Event()

    def late() -> None:
        if next(first, False):
            told.wait(1.0)
        tell()
        told.set()

    agent.client._tell_link = late  # type: ignore[method-assign]
    # The stream is opened behind the answer to the call.
    master.servicer.errors["Watch"] = [(grpc.StatusCode.UNAVAILABLE, "not yet")] * 2
    master.start()
    kinds = []
    while not kinds or kinds[-1] != "directed":
        kinds.append(agent.events.get(timeout=15.0)[0])
    assert "link" in kinds


def test_the_next_address_is_tried(master: Master) -> None:
    """With several masters, one that is away costs little."""
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        agent = Agent(f"127.0.0.1:{unused.getsockname()[1]}", master.address)
        try:
            agent.register()
            agent.expect("registered")
            agent.expect("directed")
        finally:
            agent.client.close()


def test_a_superseded_master_is_not_listened_to(master: Master) -> None:
    """An older generation's directives and answers are refused; the newer one is found again."""
    old = Master(Servicer(generation=1))
    master.servicer.generation = 2
    agent = Agent(master.address)
    try:
        agent.register()
        agent.expect("directed")
        agent.addresses[:] = [old.address, master.address]
        master.stop()
        wait_for(lambda: len(old.servicer.streams) >= 1)
        agent.client.call("Join", join(1))
        wait_for(lambda: len(old.servicer.of("Join")) >= 1)
        assert agent.client.waiting() == 1
        master.start()
        assert agent.client.flush(10)
        assert agent.expect("directed").generation == 2
    finally:
        agent.client.close()
        old.stop()


def test_a_master_that_hangs_is_noticed(master: Master, agent: Agent, monkeypatch: pytest.MonkeyPatch) -> None:
    """A stopped process keeps its connections open: silence counts, not only errors."""
    monkeypatch.setattr(master_client, "_HEARTBEAT_TIMEOUT_SECONDS", 0.5)
    monkeypatch.setattr(client_threads, "AWAY_AFTER_SECONDS", 1.0)
    agent.register()
    agent.expect("directed")
    master.servicer.hold.clear()
    assert agent.expect("link") is False
    master.servicer.hold.set()
    assert agent.expect("link") is True


def test_a_token_that_is_refused_in_mid_run_is_tried_again(master: Master, agent: Agent) -> None:
    """Every call is kept, and comes through when the token is taken again; nothing counts as failed."""
    agent.register()
    agent.expect("directed")
    refusal = (grpc.StatusCode.UNAUTHENTICATED, "missing or wrong token")
    master.servicer.errors["ReportWarm"] = [refusal] * 3
    agent.client.call("ReportWarm", pb.WarmRequest())
    assert agent.client.flush(10)
    assert not master.servicer.errors["ReportWarm"]
    assert set(agent.told()) <= {"link", "directed"}


def test_a_stream_that_is_refused_is_told_and_not_reopened(master: Master, agent: Agent) -> None:
    """Fenced while it was away: the agent learns it, and watches again after it registered anew."""
    master.servicer.errors["Watch"] = [(grpc.StatusCode.NOT_FOUND, "declared dead")]
    agent.register()
    assert agent.expect("failed") == ("Watch", "NOT_FOUND", "declared dead")
    assert master.servicer.streams == []
    agent.register("two")
    agent.expect("directed")


@pytest.mark.parametrize("method", ["Watch", "ReportProgress", "ReportFailure", "Register"])
def test_another_program_where_the_master_was_is_silence(master: Master, agent: Agent, method: str) -> None:
    """It has taken the port while the master is away, or a proxy answers 404 for it: no word of the master's."""
    agent.register()
    agent.expect("directed")
    master.servicer.errors[method] = [(grpc.StatusCode.UNIMPLEMENTED, "Method not found!")] * 2
    if method == "Watch":
        master.servicer.streams[-1].put(None)
        agent.expect("directed")
    elif method == "Register":
        agent.register("two")
        agent.expect("registered")
    elif method == "ReportFailure":
        agent.client.call("ReportFailure", pb.FailureRequest())
        assert agent.client.flush(10)
    else:
        agent.client.call("ReportProgress", pb.ProgressRequest(step=1))
        wait_for(lambda: len(master.servicer.of("ReportProgress")) == 3)
    assert not master.servicer.errors[method]
    assert set(agent.told()) <= {"link", "directed"}


def test_a_call_that_an_older_master_lacks_holds_up_no_other(master: Master, agent: Agent) -> None:
    """It is heard all the while: commits, joins and leaves waited behind it for ever, and no line said why."""
    agent.register()
    agent.expect("directed")
    agent.client.call("ReportShortage", pb.ShortageRequest())
    agent.client.call("CommitCheckpoint", pb.CommitRequest())
    assert agent.client.flush(20)
    assert len(master.servicer.of("CommitCheckpoint")) == 1
    assert agent.expect("failed")[:2] == ("ReportShortage", "UNIMPLEMENTED")


def test_closing_is_prompt_without_a_master() -> None:
    """Nothing waits for a master that is not there."""
    agent = Agent("127.0.0.1:9")
    agent.register()
    wait_for(lambda: agent.missing > 0)
    begin = time.monotonic()
    agent.client.close()
    # Its threads would be waited for as long as a call may take.
    assert time.monotonic() - begin < master_client.CALL_TIMEOUT_SECONDS


# ---- threads that are late, or fail ---------------------------------------------------------------------------------


def test_no_directive_overtakes_the_answer_to_the_registration(master: Master, agent: Agent) -> None:
    """The thread with the answer is held up; the stream is open meanwhile, and what comes on it waits."""
    agent.held("registered", lambda: not agent.events.empty())
    agent.register()
    wait_for(lambda: agent.events.qsize() >= 2)
    assert agent.told() == ["registered", "directed"]


def test_a_late_directive_of_the_old_session_does_not_come_after_the_new_registration(
    master: Master, agent: Agent
) -> None:
    """The thread with an order to the old incarnation is held up while the agent registers anew."""
    agent.register("one")
    agent.expect("directed")
    holding = threading.Event()

    def registered_anew() -> bool:
        holding.set()
        return not agent.events.empty()

    agent.held("directed", registered_anew)
    master.servicer.streams[0].put(pb.Directive(generation=1, fenced=pb.Fenced(reason="silent")))
    assert holding.wait(10)
    agent.register("two")
    assert [agent.events.get(timeout=10)[0] for _ in range(3)] == ["directed", "registered", "directed"]


def test_the_last_word_on_the_link_is_how_it_is(master: Master, agent: Agent) -> None:
    """The thread that has found the master away is held up; meanwhile it is heard, which must not be overtaken."""
    agent.register()
    agent.expect("directed")
    # From the next heartbeat on nothing is heard, until it is let go.
    master.servicer.hold.clear()
    beats = len(master.servicer.of("Heartbeat"))
    wait_for(lambda: len(master.servicer.of("Heartbeat")) > beats)
    holding = threading.Event()
    with agent.client._changed:
        agent.client._up = False

    def heard_meanwhile() -> bool:
        holding.set()
        return not agent.events.empty()

    agent.held("link", heard_meanwhile)
    late = threading.Thread(target=agent.client._tell_link)
    late.start()
    assert holding.wait(10)
    master.servicer.hold.set()
    late.join(10)
    wait_for(lambda: agent.events.qsize() >= 2)
    assert [agent.events.get() for _ in range(2)] == [("link", False), ("link", True)]


def test_a_thread_that_fails_goes_on(master: Master, agent: Agent) -> None:
    """Whatever the bug: the outbox repeats the call, the stream is opened again."""
    tell = agent.client._listener
    failures = {"registered": 1, "directed": 2}

    def failing(kind: str) -> Callable[..., None]:
        def call(*told: Any) -> None:
            if failures[kind]:
                failures[kind] -= 1
                raise RuntimeError("a bug")
            getattr(tell, kind)(*told)

        return call

    agent.client._listener = replace(tell, registered=failing("registered"), directed=failing("directed"))
    agent.register()
    agent.expect("registered")
    agent.expect("directed")
    agent.client.call("Join", join(1))
    assert agent.client.flush(5)


def test_a_thread_that_always_fails_is_told(master: Master, agent: Agent, monkeypatch: pytest.MonkeyPatch) -> None:
    """A deaf agent would be worse than none: it is to end, with a line."""
    monkeypatch.setattr(client_threads, "LAST_BACKOFF_SECONDS", 0.01)
    agent.register()
    agent.expect("directed")
    agent.client.call("NoSuchCall", pb.WarmRequest())
    detail = agent.expect("broken")
    assert "'outbox'" in detail
    assert "NoSuchCall" in detail


def test_closing_has_one_bound_for_all_threads(master: Master, agent: Agent, monkeypatch: pytest.MonkeyPatch) -> None:
    """Threads that hang are left behind after the time of one, not of three."""
    monkeypatch.setattr(master_client, "CALL_TIMEOUT_SECONDS", 4.0)
    release = threading.Event()
    stuck = [threading.Thread(target=release.wait, daemon=True) for _ in range(3)]
    for thread in stuck:
        thread.start()
    agent.client._threads += stuck
    begin = time.monotonic()
    agent.client.close()
    assert time.monotonic() - begin < 12.0
    release.set()


class StandsBy(Servicer):
    """Refuses everything, and names another master; counts the calls."""

    def __init__(self, leader: str) -> None:
        super().__init__()
        self.leader, self.refused = leader, 0

    def Register(self, request: pb.RegisterRequest, context: grpc.ServicerContext) -> pb.RegisterReply:
        self.refused += 1
        context.set_trailing_metadata(((LEADER_METADATA, self.leader), ("grpc-retry-pushback-ms", "-1")))
        context.abort(grpc.StatusCode.UNAVAILABLE, "this master stands by")
        raise AssertionError


def test_a_master_that_stands_by_names_the_one_to_go_to() -> None:
    """Once asked, it is not asked again; and where the named one is gone, the given addresses are tried in turn."""
    leader = Master()
    first = Master(StandsBy(leader.address))
    wrong = Master(StandsBy("127.0.0.1:1"))
    agent = Agent(wrong.address, first.address)
    try:
        agent.register()
        agent.expect("registered")
        assert (wrong.servicer.refused, first.servicer.refused) == (1, 1)  # type: ignore[attr-defined]
        leader.stop()
        leader.start()
        agent.register("two")
        agent.expect("registered")
    finally:
        agent.client.close()
        for master in (leader, first, wrong):
            master.stop()


@pytest.mark.parametrize("all_refuse", [False, True], ids=["one of two", "both"])
def test_one_of_several_masters_that_has_another_token_keeps_nobody_out(all_refuse: bool) -> None:
    """The first that is asked refuses, the next one lets this node in; where all refuse, the token is wrong."""
    wrong, right = Master(), Master()
    refusals = [(grpc.StatusCode.UNAUTHENTICATED, "missing or wrong token")]
    wrong.servicer.errors["Register"] = list(refusals)
    right.servicer.errors["Register"] = list(refusals) if all_refuse else []
    agent = Agent(wrong.address, right.address)
    try:
        agent.register()
        if all_refuse:
            assert agent.expect("refused") == ("UNAUTHENTICATED", "missing or wrong token")
        else:
            agent.expect("registered")
            assert "refused" not in agent.told()
    finally:
        agent.client.close()
        for master in (wrong, right):
            master.stop()


@pytest.mark.parametrize("right", [0, 1, 2, None])
def test_one_behind_a_name_that_has_another_token_keeps_nobody_out(right: int | None) -> None:
    """All addresses of the name are asked before the token counts as wrong, each one once that listens."""
    refusal = (grpc.StatusCode.UNAUTHENTICATED, "missing or wrong token")
    hosts, masters, port = ["127.0.0.1", "127.0.0.2", "127.0.0.3"], list[Master](), 0
    for number, host in enumerate(hosts):
        masters.append(Master(port=port, host=host))
        port = masters[0].port
        # One refusal more than there may be, so that a master that is asked again does not let the node in.
        masters[-1].servicer.errors["Register"] = [] if number == right else [refusal] * 9
    agent = Agent(f"masters.test:{port}", places=MasterPlaces(lambda host, port: hosts))
    try:
        agent.register()
        if right is None:
            assert agent.expect("refused") == ("UNAUTHENTICATED", "missing or wrong token")
        else:
            agent.expect("registered")
        assert "refused" not in agent.told()
        # The first connection falls back on the others where nobody listens: it proves nothing of one of them.
        assert sum(len(master.servicer.of("Register")) for master in masters) <= 4
    finally:
        agent.client.close()
        for master in masters:
            master.stop()


def test_one_behind_a_name_that_is_away_may_have_the_right_token() -> None:
    """The one that is there refuses; the token is not wrong before the other has said so, too."""
    hosts, there = ["127.0.0.1", "127.0.0.2"], Master(host="127.0.0.2")
    there.servicer.errors["Register"] = [(grpc.StatusCode.UNAUTHENTICATED, "missing or wrong token")] * 99
    agent = Agent(f"masters.test:{there.port}", places=MasterPlaces(lambda host, port: hosts))
    comes = None
    try:
        agent.register()
        wait_for(lambda: len(there.servicer.of("Register")) > 2)
        comes = Master(port=there.port, host="127.0.0.1")
        agent.expect("registered")
        assert "refused" not in agent.told()
    finally:
        agent.client.close()
        for master in (there, comes):
            if master is not None:
                master.stop()


def test_the_leader_that_has_another_token_keeps_everybody_out() -> None:
    """The others name it: nobody else would let this node in."""
    leader = Master()
    leader.servicer.errors["Register"] = [(grpc.StatusCode.UNAUTHENTICATED, "missing or wrong token")]
    standby = Master(StandsBy(leader.address))
    agent = Agent(standby.address, leader.address)
    try:
        agent.register()
        assert agent.expect("refused")[0] == "UNAUTHENTICATED"
    finally:
        agent.client.close()
        for master in (leader, standby):
            master.stop()
