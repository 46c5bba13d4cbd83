"""What the agent's hands make of things that cannot be done."""

from __future__ import annotations

import errno
import queue
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from dalsegno.agent.control.connection import Connector, Credentials
from dalsegno.agent.decisions import events as ev
from dalsegno.agent.processes.lifeline import Lifeline
from dalsegno.agent.shell.config import AgentConfig
from dalsegno.agent.shell.effects import Effects
from dalsegno.agent.shell.mailbox import Mailbox
from dalsegno.agent.storage import survey
from dalsegno.agent.storage.job_directory import JobDirectory, Survey
from dalsegno.protos import control_pb2
from tests.support.checkpoints.memory import RUN, manifest_of, nodes

CHANGED_BY = (
    "; to change them (but what its master was given itself), stop the job (dalsegno stop; where its master is a"
    " service then dalsegno start) and start its nodes anew"
)

pytestmark = pytest.mark.timeout(60)


@pytest.fixture
def mailbox() -> Mailbox[ev.Event]:
    return Mailbox()


@pytest.fixture
def said() -> list[str]:
    return []


@pytest.fixture
def effects(tmp_path: Path, mailbox: Mailbox[ev.Event], said: list[str]) -> Iterator[Effects]:
    """Of an agent whose master has no address yet."""
    directory = JobDirectory(tmp_path, "job")
    directory.prepare()
    config = AgentConfig("job", 1, control_pb2.Settings(min_nodes=1, max_nodes=1), tmp_path, tmp_path)
    lifeline = Lifeline()
    one = Effects(
        config,
        directory,
        Connector(lambda: [], Credentials),
        ["127.0.0.1:1"],
        lifeline,
        mailbox,
        lambda text, warning: said.append(text),
    )
    one.run_id = "run-0001"
    yield one
    one.close(0.0)
    lifeline.close()


@pytest.mark.parametrize("error", [OSError("no address"), RuntimeError("the server socket failed to listen")])
def test_a_store_that_cannot_be_opened_is_told(
    effects: Effects, mailbox: Mailbox[ev.Event], monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    """Nobody's loop ends by it, and the decisions hear of it; when it can be opened the Join is prepared."""
    plain = effects.stores.open

    def fails(world: object) -> tuple[str, int]:
        raise error

    order = ev.PrepareJoin(2, control_pb2.CheckpointRef(name="step-1.e1.1", digest=""))
    monkeypatch.setattr(effects.stores, "open", fails)
    assert effects.perform(order)
    event = mailbox.get(10.0)
    assert isinstance(event, ev.JoinFailed)
    assert event.round == 2
    assert str(error) in event.message
    assert "--local-addr" in event.message
    monkeypatch.setattr(effects.stores, "open", plain)
    assert effects.perform(order)
    event = mailbox.get(20.0)
    assert isinstance(event, ev.JoinPrepared)
    assert event.store_port


@pytest.mark.parametrize("patient", [True, False])
def test_a_look_without_a_thread_is_tried_again(
    effects: Effects, mailbox: Mailbox[ev.Event], monkeypatch: pytest.MonkeyPatch, patient: bool
) -> None:
    """No Join is sent in its place: an empty one made this node a stranger to the directory, for ever."""
    real = threading.Thread.start

    def start(thread: threading.Thread) -> None:
        if thread.name == "storage-look":
            raise RuntimeError("can't start new thread")
        real(thread)

    order = ev.PrepareJoin(2, control_pb2.CheckpointRef(name="step-1.e1.1", digest=""), patient=patient)
    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", start)
        assert effects.perform(order)
        event = mailbox.get(10.0)
    assert isinstance(event, ev.JoinFailed)
    assert (event.round, event.resume_digest) == (2, "")
    assert effects.perform(order)
    assert isinstance(mailbox.get(20.0), ev.JoinPrepared)


@pytest.mark.parametrize("previous", ["", "before"])
@pytest.mark.parametrize("read", [True, False])
def test_who_cannot_register_says_so(
    effects: Effects, mailbox: Mailbox[ev.Event], monkeypatch: pytest.MonkeyPatch, previous: str, read: bool
) -> None:
    """A first agent was told that the directory cannot be read; one that registered again stayed at it for ever."""

    def fails() -> Any:
        raise OSError(errno.EMFILE, "Too many open files")

    monkeypatch.setattr("dalsegno.agent.shell.effects.own_process", fails)
    if not read:
        monkeypatch.setattr(survey, "FAILING_PAUSES_SECONDS", (0.01,))
        monkeypatch.setattr(JobDirectory, "survey", lambda directory, **_: fails())
    assert effects.perform(ev.Register(previous, "me"))
    event = mailbox.get(10.0)
    if not read and not previous:
        assert isinstance(event, ev.Refused)
        return
    assert isinstance(event, ev.Broken)
    assert event.detail.startswith("this node cannot register: this process may have no more files open")


def test_who_waits_for_a_file_system_says_so_before_it_registers(
    effects: Effects, mailbox: Mailbox[ev.Event], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The time for an answer passed meanwhile, though nobody had been asked."""

    def fails(*_: Any, **__: Any) -> Any:
        raise OSError(errno.ESTALE, "Stale file handle")

    monkeypatch.setattr(survey, "FAILING_PAUSES_SECONDS", (0.01, 0.02))
    monkeypatch.setattr(JobDirectory, "survey", fails)
    assert effects.perform(ev.Register("", "me"))
    heard = [mailbox.get(10.0) for _ in range(3)]
    reason = "the checkpoint directory cannot be read: [Errno 116] Stale file handle"
    assert heard[:2] == [ev.LooksAgain(reason), ev.LooksAgain(reason)]
    assert isinstance(heard[2], ev.Refused)


def test_who_registers_again_does_so_at_once(effects: Effects, monkeypatch: pytest.MonkeyPatch) -> None:
    """A master without a record listens for `--node-timeout`, 15 s: 20 s of looks at a stale handle came too late."""

    def fails(*_: Any, **__: Any) -> Any:
        raise OSError(errno.ESTALE, "Stale file handle")

    registered: queue.SimpleQueue[control_pb2.RegisterRequest] = queue.SimpleQueue()
    monkeypatch.setattr(effects.client, "register", registered.put)
    monkeypatch.setattr(JobDirectory, "survey", fails)
    assert effects.perform(ev.Register("before", "me"))
    assert registered.get(timeout=2.0).probe == ""


def test_a_new_incarnation_begins_when_the_decision_falls(effects: Effects, monkeypatch: pytest.MonkeyPatch) -> None:
    """Not when the directory has been read: what is called meanwhile is the new incarnation's."""
    order: list[str] = []
    monkeypatch.setattr(effects.client, "new_session", lambda: order.append("session"))
    monkeypatch.setattr(effects.storage, "survey", lambda *_: order.append("survey"))
    assert effects.perform(ev.Register("before", "me"))
    assert order == ["session", "survey"]


def remarks(effects: Effects) -> list[ev.Remark]:
    """Those in the mailbox, which is empty then."""
    found = []
    while (event := effects._mailbox.get(0.0)) is not None:
        found += [event] if isinstance(event, ev.Remark) else []
    return found


def test_a_master_without_memory_is_told_what_the_one_before_said(
    effects: Effects, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The highest epoch seen, a spare's too, and the settings in force; what they change later is said once, and new
    workers write it into manifests."""
    registered: list[control_pb2.RegisterRequest] = []
    monkeypatch.setattr(effects.client, "register", registered.append)
    monkeypatch.setattr(effects.storage, "survey", lambda ready, *_: ready(Survey("probe", (), ())))
    effects.perform(ev.Register())
    assert not registered[0].HasField("known_settings")
    effects._registered("first", control_pb2.RegisterReply(settings=control_pb2.Settings(min_nodes=1, max_nodes=1)))
    assert remarks(effects) == []
    # A node leaves by its own --drain-timeout, so of that nothing is said.
    in_force = control_pb2.Settings(min_nodes=2, max_nodes=4, drain_timeout=60)
    for _ in range(2):
        effects._directed(control_pb2.Directive(epoch=7, settings=in_force))
    effects._registered("second", control_pb2.RegisterReply(settings=in_force))
    effects._directed(control_pb2.Directive(epoch=0))
    assert remarks(effects) == [ev.Remark(f"the job's settings count: --nnodes=2:4, not 1:1{CHANGED_BY}")]
    assert effects.settings == in_force
    effects.perform(ev.Register("first", "me"))
    assert (registered[1].epoch, registered[1].known_settings) == (7, in_force)
    assert registered[1].settings.max_nodes == 1


@pytest.fixture
def registered(
    effects: Effects, mailbox: Mailbox[ev.Event], monkeypatch: pytest.MonkeyPatch
) -> list[control_pb2.RegisterRequest]:
    """What an agent without `--memory-replicas` says to the master as it registers, each time."""
    requests: list[control_pb2.RegisterRequest] = []

    def register(request: control_pb2.RegisterRequest) -> None:
        copied = control_pb2.RegisterRequest()
        copied.CopyFrom(request)
        requests.append(copied)

    monkeypatch.setattr(effects.client, "register", register)
    monkeypatch.setattr(effects.storage, "survey", lambda ready, *_: ready(Survey("probe", (), ())))
    effects.perform(ev.Register())
    assert mailbox.get(0.0) == ev.Asked()
    return requests


IN_MEMORY = control_pb2.Settings(min_nodes=1, max_nodes=1, memory_replicas=1)


def test_an_agent_without_the_flag_has_memory_where_the_job_does(
    effects: Effects, mailbox: Mailbox[ev.Event], registered: list[control_pb2.RegisterRequest]
) -> None:
    """It tells the master where that is before it does anything else, as the same incarnation."""
    own = registered[0].incarnation
    effects._registered(own, control_pb2.RegisterReply(settings=IN_MEMORY, node="b"))
    assert effects.memory is not None
    assert mailbox.get(0.0) is None
    assert [said.peer_address for said in registered] == ["", effects.memory.address]
    assert registered[1].incarnation == own
    effects._registered(own, control_pb2.RegisterReply(settings=IN_MEMORY, node="b"))
    assert isinstance(mailbox.get(0.0), ev.Remark)
    assert isinstance(mailbox.get(0.0), ev.Registered)
    assert len(registered) == 2
    effects.perform(ev.Register(own, "b"))
    assert registered[2].peer_address == effects.memory.address


def test_memory_is_made_when_the_settings_become_such(
    effects: Effects, mailbox: Mailbox[ev.Event], registered: list[control_pb2.RegisterRequest]
) -> None:
    """A new master took this agent's settings for the job's, until others told it better."""
    own = registered[0].incarnation
    reply = control_pb2.RegisterReply(settings=control_pb2.Settings(min_nodes=1, max_nodes=1), node="b")
    effects._registered(own, reply)
    assert effects.memory is None
    assert isinstance(mailbox.get(0.0), ev.Registered)
    effects._directed(control_pb2.Directive(epoch=1, settings=IN_MEMORY))
    assert effects.memory is not None
    assert registered[1].peer_address == effects.memory.address
    assert registered[1].known_settings == IN_MEMORY


@pytest.mark.parametrize("torchrun", [False, True])
def test_a_node_that_can_have_no_memory_says_so_once(
    effects: Effects,
    registered: list[control_pb2.RegisterRequest],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    torchrun: bool,
) -> None:
    """It is in the job all the same, and the master is told of no address."""
    if torchrun:
        own_memory = effects._own_memory
        monkeypatch.setattr(own_memory, "_config", replace(own_memory._config, keeps_memory=False))
    else:
        monkeypatch.setattr("dalsegno.agent.memory.place.SHARED_MEMORY", tmp_path / "none")
    for incarnation in ("first", "second"):
        effects._registered(incarnation, control_pb2.RegisterReply(settings=IN_MEMORY, node="b"))
    assert effects.memory is None
    assert len(registered) == 1
    lines = [remark.text for remark in remarks(effects) if "no memory checkpoints on this node" in remark.text]
    assert len(lines) == 1
    assert ("torchrun" if torchrun else "there is no") in lines[0]


def test_a_node_without_memory_says_at_once_that_it_lacks_what_is_there_alone(
    effects: Effects, mailbox: Mailbox[ev.Event]
) -> None:
    """It looked for it on the disk for ten seconds, in which nobody made a step."""
    parts = (control_pb2.HeldPart(group_rank=0, addresses=["10.0.0.1:7"]),)
    effects.perform(ev.PrepareJoin(2, control_pb2.CheckpointRef(name="step-1.e1.1", digest="1" * 64), parts=parts))
    event = mailbox.get(5.0)
    assert isinstance(event, ev.JoinPrepared)
    assert event.lacks


def test_a_gathering_that_ends_late_ends_no_look(
    effects: Effects, mailbox: Mailbox[ev.Event], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The order has changed meanwhile: who waits for that Join would never hear of this node, and go on without it."""
    gathered: list[Callable[[str], None]] = []

    class Memory:
        def gather(
            self,
            run_id: str,
            ref: control_pb2.CheckpointRef,
            parts: object,
            then: Callable[[str], None],
            *,
            partly: bool = False,
        ) -> None:
            gathered.append(then)

    looks = threading.Event()
    plain = effects.storage.directory.look

    def look(*arguments: Any) -> Survey:
        looks.wait(30)
        return plain(*arguments)

    monkeypatch.setattr(effects, "memory", Memory())
    monkeypatch.setattr(effects.storage.directory, "look", look)
    lost = control_pb2.CheckpointRef(name="step-1.e1.1", digest="1" * 64)
    effects.perform(ev.PrepareJoin(4, lost, parts=(control_pb2.HeldPart(),), anyway=True))
    effects.perform(ev.PrepareJoin(4, None))
    gathered[0]("nobody has part 1")
    looks.set()
    event = mailbox.get(20.0)
    assert isinstance(event, ev.JoinPrepared)
    assert event.resume_digest == ""
    monkeypatch.undo()


def test_what_a_leaver_holds_is_written_without_the_rest(
    effects: Effects, mailbox: Mailbox[ev.Event], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nobody has said where that is, so there is nothing to gather: what is here goes to the disk, and that is told."""
    files = {0: {"weights": b"a"}, 1: {"other": b"b"}}
    manifest = manifest_of("step-7.e1.1", files)
    with nodes(tmp_path / "memory", 1) as (node,):
        node.tier.open_epoch(RUN, 1, 0, [])
        node.writes(manifest, 0, files[0])
        node.holds(manifest.name, 0)
        monkeypatch.setattr(effects, "memory", node.tier)
        monkeypatch.setattr(effects, "run_id", RUN)
        assert effects.perform(ev.MakeDurable(manifest.ref.to_proto()))
        made = mailbox.get(60.0)
    assert isinstance(made, ev.MadeDurable)
    assert made.written == (0,)
    assert "is not in this node's memory" in made.failure
    assert (effects.run_dir() / manifest.name / "weights").read_bytes() == b"a"


@pytest.mark.parametrize("answered", [False, True])
def test_an_end_waits_for_answers_of_a_master_that_has_answered(
    effects: Effects, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, answered: bool
) -> None:
    """Before, what waits is the registration alone: a signal took 3 s longer, and the log told of a call."""
    waits: list[float] = []
    monkeypatch.setattr(effects.client, "flush", lambda seconds: waits.append(seconds))
    effects.run_id = "run-0001" if answered else ""
    effects.close(3.0)
    assert waits == ([3.0] if answered else [])
    assert ("calls were not answered" in caplog.text) is answered
