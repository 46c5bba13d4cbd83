"""Memory checkpoints between agents: real connections, real files, processes that are killed and stopped."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import socket
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import grpc
import pytest
from google.protobuf.message import Message

from dalsegno.agent.memory import buddies, durable, gathering, search, service, tier, turnstile, wire
from dalsegno.agent.memory import connection as connections
from dalsegno.agent.memory.calls import PeerError, SendPace
from dalsegno.agent.memory.connection import PIECE_BYTES, BrokenOff, Connection
from dalsegno.agent.memory.durable import NothingThere, PartlyWritten
from dalsegno.agent.memory.frames import Garbled
from dalsegno.agent.memory.holdings import Holdings
from dalsegno.agent.memory.pieces import header_of, read_manifest, read_part
from dalsegno.agent.memory.service import PeerServer
from dalsegno.agent.memory.watch import STALL_SECONDS
from dalsegno.agent.memory.wire import Wire
from dalsegno.elastic.checkpoint import FileEntry, Manifest, read_sealed, verify, verify_files
from dalsegno.elastic.checkpoint.mounts import mount_point
from dalsegno.elastic.checkpoint.spares import FOLDER
from dalsegno.protos import control_pb2, peer_pb2
from tests.support.checkpoints.memory import JOB, RUN, SMALL, TOKEN, Node, called, links, manifest_of, nodes, write_own
from tests.support.checkpoints.power import Power, only_whole_checkpoints, sealed
from tests.support.jobs.memory_node import SENT, Process, durable_step, sent_step
from tests.support.jobs.unreachable import unreachable

pytestmark = pytest.mark.timeout(120)
STEP = "step-10.e1.1"


def complete(node: Node, manifest: Manifest) -> None:
    """What an agent has gathered is an ordinary checkpoint."""
    directory = node.memory() / manifest.name
    verify(directory, read_sealed(directory, manifest.digest))


def world(nodes: list[Node], epoch: int = 1, step: str = STEP) -> Manifest:
    """All of a world have written a step, and sent it to the next one."""
    manifest = manifest_of(step, {rank: SMALL[rank] for rank in range(len(nodes))})
    for rank, node in enumerate(nodes):
        node.tier.open_epoch(RUN, epoch, rank, [nodes[(rank + 1) % len(nodes)].tier.address])
    for rank, node in enumerate(nodes):
        node.writes(manifest, rank, SMALL[rank])
    for rank, node in enumerate(nodes):
        node.holds(step, *sorted({rank, (rank - 1) % len(nodes)}))
    return manifest


def addresses(nodes: list[Node], manifest: Manifest) -> dict[int, list[str]]:
    """As a master tells them."""
    found: dict[int, list[str]] = {}
    for node in nodes:
        for part in node.parts(manifest.name):
            found.setdefault(part, []).append(node.tier.address)
    return found


# ---- how it should go ------------------------------------------------------------------------------------------------


def test_parts_go_to_buddies_and_come_back(tmp_path: Path) -> None:
    """Three nodes, each holds its own part and one other; each can gather all, also when any one of them is gone."""
    with nodes(tmp_path, 3) as three:
        manifest = world(three)
        for rank, node in enumerate(three):
            node.wait_for(lambda node=node: node.tier.held()[0].copies)  # type: ignore[misc]
            (held,) = node.tier.held()
            assert held.copies == (three[(rank + 1) % 3].tier.address,)
            assert held.checkpoint.in_memory
            own, other = {rank}, {(rank - 1) % 3}
            assert set(node.changes[0].parts) in (own, other, own | other)  # both may have come before it was told
        where = addresses(three, manifest)
        three[1].tier.close()
        assert [three[1].tier.held(), three[1].tier.directory(RUN)] == [[], None]
        for node in (three[0], three[2]):
            description = node.gathers(manifest, where)
            assert isinstance(description, control_pb2.Checkpoint), description
            assert description.in_memory
            assert description.ref.digest == manifest.digest
            complete(node, manifest)
            node.holds(STEP, 0, 1, 2)
            assert node.gathers(manifest, {}) == description
        assert not any(node.said for node in three)


def test_a_node_that_is_reached_elsewhere(tmp_path: Path) -> None:
    """What it holds is fetched at its new address, what it is sent comes there, and nobody answers at the old one."""
    with nodes(tmp_path, 2) as (one, two):
        manifest = world([one, two])
        old = two.tier.address
        two.tier.listen("127.0.0.2")
        assert two.tier.address.startswith("127.0.0.2:")
        assert isinstance(one.gathers(manifest, {0: [one.tier.address], 1: [two.tier.address]}), control_pb2.Checkpoint)
        later = "step-20.e2.1"
        own = manifest_of(later, {0: SMALL[0], 1: SMALL[1]})
        one.tier.open_epoch(RUN, 2, 0, [two.tier.address])
        two.tier.open_epoch(RUN, 2, 1, [one.tier.address])
        one.writes(own, 0, SMALL[0])
        two.holds(later, 0)
        refused = one.gathers(own, {0: [one.tier.address], 1: [old]}, seconds=100.0)
        assert isinstance(refused, str)


def test_ranks_and_peers_write_the_same_step_at_the_same_time(tmp_path: Path) -> None:
    """Whoever's manifest comes first, it is the same one. A part that is here already is not taken once more."""
    manifest = manifest_of(STEP, {rank: SMALL[rank] for rank in range(2)})
    with nodes(tmp_path, 2) as (one, two):
        one.tier.open_epoch(RUN, 1, 0, [two.tier.address])
        two.tier.open_epoch(RUN, 1, 1, [])
        one.writes(manifest, 0, SMALL[0])
        two.holds(STEP, 0)
        assert Manifest.read(two.memory() / STEP) == manifest
        two.writes(manifest, 1, SMALL[1])
        two.holds(STEP, 0, 1)
        complete(two, manifest)
        taken = (two.memory() / STEP / "rank0.pt").stat()
        part = one.tier._holdings.part(RUN, STEP, manifest.digest, 0)
        assert part is not None
        with ThreadPoolExecutor(4) as pool:
            sent = [pool.submit(one.tier._peers.send, two.tier.address, part, SendPace(None)) for _ in range(4)]
            assert [one.result(60) for one in sent] == [None] * 4
        assert (two.memory() / STEP / "rank0.pt").stat() == taken


def test_a_newer_step_takes_the_place_of_one_that_waits(tmp_path: Path) -> None:
    """What is under way is finished, what has not begun is not sent: memory would not keep up for ever."""
    contents = [os.urandom(2_000_000) for _ in range(3)]
    manifests = [
        manifest_of(f"step-{step}.e1.1", {0: {"x": content}}) for step, content in enumerate(contents, start=1)
    ]
    with nodes(tmp_path, 1, bytes_per_second=4e6) as (slow,), nodes(tmp_path / "more", 1) as (buddy,):
        slow.tier.open_epoch(RUN, 1, 0, [buddy.tier.address])
        slow.writes(manifests[0], 0, {"x": contents[0]})
        buddy.wait_for(lambda: list(buddy.memory().glob("*.parts/.in-*")))
        slow.writes(manifests[1], 0, {"x": contents[1]})
        slow.writes(manifests[2], 0, {"x": contents[2]})
        slow.holds("step-3.e1.1", 0)
        buddy.holds("step-3.e1.1", 0)
        assert [held.checkpoint.step for held in buddy.tier.held()] == [1, 3]
        assert [(held.checkpoint.step, held.unsent) for held in slow.tier.held()] == [(1, False), (2, True), (3, False)]


def test_a_part_is_sent_when_it_is_asked_for_and_none_behind_a_newer_one(tmp_path: Path) -> None:
    """What is not sent any more is told, so that nobody waits for it."""
    manifests = [manifest_of(f"step-{step}.e1.1", {0: SMALL[0]}) for step in (1, 2)]
    with nodes(tmp_path, 2) as (one, two):
        one.tier.open_epoch(RUN, 1, 0, [two.tier.address])
        for manifest in manifests:
            write_own(one.memory(), manifest, 0, SMALL[0])
            one.tier.sealed(RUN, manifest.name, manifest.digest)
        one.holds("step-2.e1.1", 0)
        for manifest in reversed(manifests):
            one.tier.send(RUN, manifest.name, manifest.digest)
        one.tier.send(RUN, "step-3.e1.1", "not here")
        two.holds("step-2.e1.1", 0)
        one.wait_for(lambda: [held.copies for held in one.tier.held()] == [(), (two.tier.address,)])
        assert [held.unsent for held in one.tier.held()] == [True, False]
        assert not two.parts("step-1.e1.1")


def test_one_of_two_buddies_that_takes_nothing_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whichever comes first: nobody waits for the copy that does not come."""
    monkeypatch.setattr(buddies, "_PAUSES_SECONDS", (0.1, 0.1))
    manifest = manifest_of("step-1.e1.1", {0: SMALL[0]})
    with nodes(tmp_path, 2) as (one, two):
        one.tier.open_epoch(RUN, 1, 0, [two.tier.address, "127.0.0.1:1"])
        one.writes(manifest, 0, SMALL[0])
        one.wait_for(lambda: [(held.copies, held.unsent) for held in one.tier.held()] == [((two.tier.address,), True)])


def test_what_is_not_sent_any_more_is_told_although_it_was_copied_once(tmp_path: Path) -> None:
    """A new master may name a step that others have dropped meanwhile."""
    manifests = [manifest_of(f"step-{step}.e1.1", {0: SMALL[0]}) for step in (1, 2)]
    with nodes(tmp_path, 2) as (one, two):
        one.tier.open_epoch(RUN, 1, 0, [two.tier.address])
        for manifest in manifests:
            one.writes(manifest, 0, SMALL[0])
            two.holds(manifest.name, 0)
        one.wait_for(lambda: all(held.copies for held in one.tier.held()))
        two.tier.keep(RUN, 1, [manifests[1].digest], newest=1)
        one.tier.send(RUN, manifests[0].name, manifests[0].digest)
        one.wait_for(lambda: [held.unsent for held in one.tier.held()] == [True, False])


def test_the_last_word_of_what_is_held_is_the_present_state(tmp_path: Path) -> None:
    """Its own part is copied while another node's comes in: two threads tell of it."""
    manifest = manifest_of("step-10.e1.1", {0: SMALL[0], 1: SMALL[1]})
    looked, go_on = threading.Event(), threading.Event()
    with nodes(tmp_path, 2) as (one, two):
        one.tier.open_epoch(RUN, 1, 0, [two.tier.address])
        two.tier.open_epoch(RUN, 1, 1, [one.tier.address])
        there = two.tier._holdings.held

        def held(run_id: str, name: str) -> Any:
            found = there(run_id, name)
            if threading.current_thread().name == "memory-buddy" and not looked.is_set():
                looked.set()
                assert go_on.wait(30)
            return found

        two.tier._holdings.held = held  # type: ignore[method-assign]
        two.writes(manifest, 1, SMALL[1])
        assert looked.wait(30)
        one.writes(manifest, 0, SMALL[0])
        two.wait_for(lambda: two.parts(manifest.name) == (0, 1) or there(RUN, manifest.name).parts == (0, 1))
        go_on.set()
        two.wait_for(lambda: two.changes[-1].copies)
        two.wait_for(lambda: two.changes[-1].parts == (0, 1), 10)


class OnlyAge:
    """A part of which only the age is looked at."""

    def __init__(self, step: int) -> None:
        self.key = (RUN, f"step-{step}", 0)
        self.manifest = SimpleNamespace(epoch=1, parsed_name=SimpleNamespace(age=(1, step, 1)))


def test_what_waits_is_sent_behind_what_a_drain_waits_for() -> None:
    """It may be the best: who leaves takes it along otherwise."""
    sent: list[Any] = []
    began, go_on, done = threading.Event(), threading.Event(), threading.Event()

    def send(address: str, part: Any, pace: Any) -> None:
        sent.append(part)
        began.set()
        assert go_on.wait(30)
        if len(sent) == 3:
            done.set()

    peers, nothing = SimpleNamespace(send=send), lambda *_: None
    first, second, third = (OnlyAge(step) for step in (1, 2, 3))
    buddy = buddies.Buddy("10.0.0.1:7", peers, SendPace(None), nothing, nothing, nothing, nothing)  # type: ignore[arg-type]
    buddy.offer(first)  # type: ignore[arg-type]
    assert began.wait(30)
    buddy.offer(second)  # type: ignore[arg-type]
    buddy.offer(third, urgent=True)  # type: ignore[arg-type]
    go_on.set()
    assert done.wait(30)
    assert sent == [first, third, second]
    buddy.close()


def test_a_newer_part_stays_where_an_older_one_comes_behind_it() -> None:
    """The main thread and the one that sums may cross."""
    sent: list[Any] = []
    began, go_on, unsent = threading.Event(), threading.Event(), list[Any]()

    def send(address: str, part: Any, pace: Any) -> None:
        sent.append(part)
        began.set()
        assert go_on.wait(30)
        if part is third:
            raise ValueError("a bug of ours")

    peers, nothing = SimpleNamespace(send=send), lambda *_: None
    first, second, third = (OnlyAge(step) for step in (1, 2, 3))
    told = threading.Condition()

    def tell(part: Any, address: str) -> None:
        with told:
            unsent.append(part)
            told.notify_all()

    buddy = buddies.Buddy("10.0.0.1:7", peers, SendPace(None), nothing, tell, nothing, nothing)  # type: ignore[arg-type]
    for part in (first, third, second):
        buddy.offer(part)  # type: ignore[arg-type]
        assert began.wait(30)
    go_on.set()
    with told:
        assert told.wait_for(lambda: unsent == [second, third], 30)
    assert sent == [first, third]
    buddy.close()


def test_a_part_that_a_buddy_does_not_take_is_told(tmp_path: Path) -> None:
    manifest = manifest_of("step-1.e1.1", {0: SMALL[0]})
    with nodes(tmp_path, 1) as (one,), nodes(tmp_path / "more", 1, job_id="another") as (two,):
        one.tier.open_epoch(RUN, 1, 0, [two.tier.address])
        one.writes(manifest, 0, SMALL[0])
        one.wait_for(lambda: [held.unsent for held in one.tier.held()] == [True])


def test_a_limit_is_for_all_buddies_and_not_for_a_drain(tmp_path: Path) -> None:
    """What is under way is hurried, too: the drain's part comes behind it. The next save has the limit again."""
    content, rate = os.urandom(1_000_000), 1e5
    steps = [manifest_of(f"step-{step}.e1.1", {0: {"x": content}}) for step in (1, 2)]
    with nodes(tmp_path, 1, bytes_per_second=rate) as (slow,), nodes(tmp_path / "more", 2) as two:
        slow.tier.open_epoch(RUN, 1, 0, [buddy.tier.address for buddy in two])
        began = time.monotonic()
        slow.writes(steps[0], 0, {"x": content})
        for buddy in two:
            buddy.wait_for(lambda buddy=buddy: list(buddy.memory().glob("*.parts/.in-*")))  # type: ignore[misc]
        time.sleep(2.0)
        assert not any(buddy.parts("step-1.e1.1") for buddy in two)
        slow.writes(steps[1], 0, {"x": content}, urgent=True)
        for buddy in two:
            buddy.holds("step-2.e1.1", 0)
            assert buddy.parts("step-1.e1.1") == (0,)
        # Four parts, of which all but a fraction were not held back.
        assert time.monotonic() - began < 4 * len(content) / rate / 2
        slow.tier.open_epoch(RUN, 2, 0, [two[0].tier.address])
        two[0].tier.open_epoch(RUN, 2, 1, [])
        last = manifest_of("step-3.e2.1", {0: {"x": content[:300_000]}})
        began = time.monotonic()
        slow.writes(last, 0, {"x": content[:300_000]})
        two[0].holds(last.name, 0)
        assert time.monotonic() - began > 0.8 * 300_000 / rate


def test_new_buddies_get_what_is_newest(tmp_path: Path) -> None:
    """Told again of the same epoch with others, as when a spare takes the place of one that is gone."""
    with nodes(tmp_path, 3) as three:
        manifest = manifest_of(STEP, SMALL)
        three[0].tier.open_epoch(RUN, 1, 0, [three[1].tier.address])
        three[0].writes(manifest, 0, SMALL[0])
        three[1].holds(STEP, 0)
        three[0].tier.open_epoch(RUN, 1, 0, [three[2].tier.address])
        three[2].holds(STEP, 0)
        three[0].tier.open_epoch(RUN, 2, 0, [three[1].tier.address])
        three[0].wait_for(lambda: len(three[0].tier.held()[0].copies) == 0)


def test_another_step_of_the_same_name_is_left_alone(tmp_path: Path) -> None:
    """Whoever sends it made a mistake: what is here stays as it is."""
    with nodes(tmp_path, 2) as (one, two):
        mine, other = manifest_of(STEP, {0: SMALL[0]}), manifest_of(STEP, {0: {"rank0.pt": b"other"}, 1: SMALL[1]})
        two.tier.open_epoch(RUN, 1, 1, [])
        write_own(two.memory(), mine, 0, SMALL[0])  # its ranks have not told of it yet
        one.tier.open_epoch(RUN, 1, 0, [two.tier.address])
        one.writes(other, 0, {"rank0.pt": b"other"})
        one.wait_for(lambda: one.said)
        assert "another one is there" in one.said[0]
        verify(two.memory() / STEP, read_sealed(two.memory() / STEP, mine.digest))


def test_what_an_old_world_sealed_counts_as_its_own(tmp_path: Path) -> None:
    """With the rank that the node had there, although the next world opens at once."""
    with nodes(tmp_path, 2) as (one, two):
        one.tier.open_epoch(RUN, 1, 2, [two.tier.address])
        manifest = manifest_of(STEP, SMALL)
        one.writes(manifest, 2, SMALL[2])
        one.tier.open_epoch(RUN, 2, 0, [])
        one.holds(STEP, 2)
        assert not one.said


def test_what_is_not_needed_goes(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """And whoever listens is told; a new world refuses what the old one sends too late, which is nobody's trouble."""
    caplog.set_level("INFO")
    with nodes(tmp_path, 2) as (one, two):
        old = world([one, two])
        manifest = world([one, two], step="step-20.e1.1")
        two.tier.keep(RUN, 1, [], 1)
        two.wait_for(lambda: two.changes[-1].parts == ())
        assert two.changes[-1].checkpoint.ref == old.ref.to_proto()
        two.holds("step-20.e1.1", 0, 1)
        two.tier.keep(RUN, 2, [manifest.digest], 1)
        two.tier.open_epoch(RUN, 2, 0, [])
        late = manifest_of("step-30.e1.1", {0: SMALL[0]})
        one.writes(late, 0, SMALL[0])
        one.wait_for(lambda: "epoch 1 is closed: epoch 2 has opened" in caplog.text)
        # Wanted for the next world it is taken, and so is what this node wrote itself in that epoch.
        description = two.gathers(late, {0: [one.tier.address]})
        assert isinstance(description, control_pb2.Checkpoint), description
        two.tier.keep(RUN, 2, [], 0)
        two.wait_for(lambda: not two.tier.held())
        assert os.listdir(two.memory()) == []
        assert not one.said


def test_a_replica_is_written_over_an_older_one(tmp_path: Path) -> None:
    """Step after step; each is whole, and what is being sent at the moment is another file."""
    with nodes(tmp_path, 2) as (one, two):
        folder = one.memory() / FOLDER
        for number in range(1, 7):
            manifest = world([one, two], step=f"step-{number}0.e1.1")
            for node in (one, two):
                verify_files(node.memory() / manifest.name, manifest.files)
                node.tier.keep(RUN, 1, [], 2)
                node.wait_for(lambda node=node: len(node.tier.held()) <= 2)  # type: ignore[misc]
            if number >= 3:
                one.wait_for(lambda: "=rank1.pt" in os.listdir(folder))
            if number == 3:
                os.chmod(folder / "=rank1.pt", 0o604)
        kept = [one.memory() / f"step-{number}0.e1.1" / "rank1.pt" for number in (5, 6)]
        modes = [os.stat(path).st_mode & 0o777 for path in (*kept, folder / "=rank1.pt")]
        assert modes.count(0o604) == 1


# ---- who is let in ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("token", [None, "", "f" * 32, "0123456789abcdef"])
def test_only_the_jobs_token_lets_in(tmp_path: Path, token: str | None) -> None:
    """Of a call without it no message is read; a token that cannot be read for a while is the last one."""
    with nodes(tmp_path, 1) as (one,), nodes(tmp_path / "stranger", 1, token=lambda: token) as (stranger,):
        manifest = manifest_of(STEP, {0: SMALL[0], 1: SMALL[1]})
        stranger.tier.open_epoch(RUN, 1, 0, [one.tier.address])
        stranger.writes(manifest, 0, SMALL[0])
        stranger.wait_for(lambda: stranger.said)
        assert "not an agent of this job" in stranger.said[0]
        assert one.tier.held() == []
        one.tier.open_epoch(RUN, 1, 1, [])
        one.writes(manifest, 1, SMALL[1])
        one.holds(STEP, 1)
        assert "not an agent of this job" in str(stranger.gathers(manifest, {1: [one.tier.address]}))


def test_a_token_that_cannot_be_read_just_now(tmp_path: Path) -> None:
    """A file system that is away must not cut agents off from each other."""
    state: dict[str, str | None] = {"token": "0123456789abcdef" * 2}

    def token() -> str | None:
        if state["token"] is None:
            raise OSError(5, "Input/output error")
        return state["token"]

    with nodes(tmp_path, 2, token=token) as two:
        world(two)
        state["token"] = None
        world(two, 2, "step-20.e2.1")


def test_another_job_is_another_job(tmp_path: Path) -> None:
    with nodes(tmp_path, 1) as (one,), nodes(tmp_path / "other", 1, job_id="another") as (other,):
        manifest = manifest_of(STEP, {0: SMALL[0]}, job_id="another")
        other.tier.open_epoch(RUN, 1, 0, [one.tier.address])
        other.writes(manifest, 0, SMALL[0])
        other.wait_for(lambda: other.said)
        assert "this agent is of job job, not of another" in other.said[0]
        assert "of job job" in str(other.gathers(manifest_of(STEP, SMALL), {1: [one.tier.address]}))


HELLO = peer_pb2.Hello(credential=TOKEN)
NONSENSE = {
    "silence": b"",
    "no word": b"\0\0\0\0",
    "gRPC": b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + b"\0" * 100,
    "HTTP": b"GET / HTTP/1.1\r\n\r\n",
    "no hello": b"DSMEM/1?",
    "half a length": b"DSMEM/1?\0\0",
    "half a hello": b"DSMEM/1?\0\0\0\x09abc",
    "no message": b"DSMEM/1?\0\0\0\x01\xff",
    "endless hello": b"DSMEM/1?\xff\xff\xff\xff" + b"x" * 100_000,
}


@pytest.mark.parametrize("what", NONSENSE)
def test_hostile_words(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, what: str) -> None:
    """Whoever does not say the right words is hung up on soon, and hears eight bytes at most; the agent goes on."""
    monkeypatch.setattr(wire, "PATIENCE_SECONDS", 0.5)
    with nodes(tmp_path, 2) as two:
        host, port = two[0].tier.address.split(":")
        with socket.create_connection((host, int(port)), 10) as stranger:
            stranger.sendall(NONSENSE[what])
            assert heard(stranger) in (b"DSMEM/1!", b"")
        world(two)


def heard(stranger: socket.socket) -> bytes:
    """All that is said until the other side hangs up."""
    said = b""
    with contextlib.suppress(ConnectionResetError):
        while more := stranger.recv(1000):
            said += more
    return said


CALLS = {
    "no call": peer_pb2.Call(),
    "no call at all": peer_pb2.Hello(credential="\x01" * 3),
    "empty hold": peer_pb2.Call(hold=peer_pb2.Header()),
    "empty fetch": peer_pb2.Call(fetch=peer_pb2.FetchRequest()),
    "nowhere": peer_pb2.Call(fetch=peer_pb2.FetchRequest(job_id=JOB, run_id="../..", name="../x", digest="d")),
}


@pytest.mark.parametrize("kind", [peer_pb2.Call, peer_pb2.Answer])
def test_a_message_that_is_garbled_on_its_way_is_sent_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: type[Message]
) -> None:
    """Each node has told of its parts, and of no other, when `world` is over."""
    pack, parse = connections.packed, connections.parsed
    spoilt, seen = [], []

    def packed(message: Message) -> bytes:
        frame = bytearray(pack(message))
        if isinstance(message, kind) and not spoilt:
            spoilt.append(message)
            frame[-1] ^= 1
        return bytes(frame)

    def parsed(wanted: type[Message], data: bytes) -> Message:
        try:
            return parse(wanted, data)
        except Garbled as error:
            seen.append(error)
            raise

    monkeypatch.setattr(connections, "packed", packed)
    monkeypatch.setattr(connections, "parsed", parsed)
    with nodes(tmp_path, 3) as three:
        world(three)
    assert len(seen) == 1


@pytest.mark.parametrize("what", CALLS)
def test_hostile_calls(tmp_path: Path, what: str) -> None:
    """Nonsense of somebody with the token is answered with a status; the agent goes on."""
    with nodes(tmp_path, 2) as two:
        with called(two[0]) as connection:
            connection.send(HELLO, CALLS[what])
            answer = connection.receive_answer()
            assert answer.code in (grpc.StatusCode.INVALID_ARGUMENT.value[0], grpc.StatusCode.NOT_FOUND.value[0])
            with pytest.raises(BrokenOff):
                connection.receive_answer()
        world(two)


def test_pieces_that_are_too_large(tmp_path: Path) -> None:
    """An agent keeps one piece in memory, however long the caller says that it is."""
    with nodes(tmp_path, 2) as two:
        manifest = manifest_of(STEP, {0: SMALL[0]})
        header = peer_pb2.Header(job_id=JOB, run_id=RUN, epoch=1, name=STEP, digest=manifest.digest, manifest_bytes=9)
        with called(two[0]) as connection:
            connection.send(HELLO, peer_pb2.Call(hold=header))
            assert connection.receive_answer().code == 0
            connection.send_piece(bytes(PIECE_BYTES + 1))
            answer = connection.receive_answer()
            assert answer.code == grpc.StatusCode.INVALID_ARGUMENT.value[0]
            assert "a piece of" in answer.detail
        world(two)


def test_many_strangers_who_say_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """They are hung up on before long, beyond a number of them at once; agents call again."""
    monkeypatch.setattr(service, "MOST_CONNECTIONS", 8)
    monkeypatch.setattr(wire, "PATIENCE_SECONDS", 3.0)
    with nodes(tmp_path, 2) as two, contextlib.ExitStack() as strangers:
        host, port = two[0].tier.address.split(":")
        for _ in range(20):
            strangers.enter_context(socket.create_connection((host, int(port)), 10))
        world(two)


# ---- what goes wrong on the way --------------------------------------------------------------------------------------


_OVER = threading.Event()


class FakePeer:
    """Hands out a good part, as `spoil` makes it: a header, and pieces."""

    def __init__(self, root: Path, manifest: Manifest, rank: int, spoil: Callable[[list[Any]], Iterator[Any]]) -> None:
        (root / RUN).mkdir(parents=True)
        write_own(root / RUN, manifest, rank, SMALL[rank])
        self._part = Holdings(root).add_own(RUN, manifest.name, manifest.digest, rank)
        self._spoil = spoil
        self.asked = 0
        self.server = PeerServer("127.0.0.1", Wire(lambda: TOKEN), self)  # type: ignore[arg-type]
        self.address = self.server.address

    def serve(self, connection: Connection) -> None:
        connection.receive(peer_pb2.Call)
        self.asked += 1
        data = read_manifest(self._part)
        pieces = [bytes(piece) for piece in read_part(self._part, data)]
        spoilt = self._spoil([header_of(self._part, JOB, len(data)), *pieces])
        connection.send(peer_pb2.Answer(header=next(spoilt)))
        for piece in spoilt:
            connection.send_piece(piece)
        connection.send_piece(b"")
        connection.send(peer_pb2.Answer(complete=True))


@contextmanager
def fake_peer(*arguments: object) -> Iterator[FakePeer]:
    peer = FakePeer(*arguments)  # type: ignore[arg-type]
    _OVER.clear()
    try:
        yield peer
    finally:
        _OVER.set()
        peer.server.close()


def _flip(messages: list[Any]) -> Iterator[Any]:
    spoilt = bytearray(messages[-1])
    spoilt[len(spoilt) // 2] ^= 1
    yield from [*messages[:-1], bytes(spoilt)]


def _cut(messages: list[Any]) -> Iterator[Any]:
    yield from messages[:-1]


def _breaks(messages: list[Any]) -> Iterator[Any]:
    yield from messages[:-1]
    raise RuntimeError("the peer breaks")


def _stands_still(messages: list[Any]) -> Iterator[Any]:
    yield from messages[:-1]
    _OVER.wait(20)


def _says_nothing(messages: list[Any]) -> Iterator[Any]:
    yield from ()


def _another(messages: list[Any]) -> Iterator[Any]:
    messages[0].name = "step-11.e1.1"
    yield messages[0]
    yield from messages[1:]


@pytest.fixture
def in_order(monkeypatch: pytest.MonkeyPatch) -> None:
    """Who has a part is asked in the order in which the master tells it."""
    monkeypatch.setattr(search, "shuffled", list)


@pytest.mark.usefixtures("in_order")
@pytest.mark.parametrize("spoil", [_flip, _cut, _breaks, _stands_still, _says_nothing, _another])
def test_the_second_holder_is_asked_when_the_first_is_bad(
    tmp_path: Path, spoil: Callable[[list[Any]], Iterator[Any]]
) -> None:
    """A flipped bit, a stream that ends early, breaks or stands still, another step than was asked for."""
    with nodes(tmp_path, 2, stall_seconds=1.0) as two:
        manifest = world(two)
        newcomer = Node(tmp_path / "newcomer", stall_seconds=1.0)
        with fake_peer(tmp_path / "fake", manifest, 0, spoil) as bad:
            where = addresses(two, manifest)
            where[0] = [bad.address, *where[0]]
            description = newcomer.gathers(manifest, where)
            assert isinstance(description, control_pb2.Checkpoint), description
            complete(newcomer, manifest)
            assert bad.asked == 1
            newcomer.tier.close()
            third = Node(tmp_path / "third", stall_seconds=1.0)
            reason = third.gathers(manifest, {**where, 0: [bad.address]})
            assert isinstance(reason, str)
            assert "part 0" in reason
            assert third.parts(STEP) == (1,)
            third.tier.close()


@pytest.mark.usefixtures("in_order")
def test_who_stands_still_is_left_soon_where_another_has_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A node was stopped a moment ago: the master says so later, and the usual patience is longer still."""
    monkeypatch.setattr(gathering, "_ELSEWHERE_SECONDS", 0.5)
    with nodes(tmp_path, 2) as two, fake_peer(tmp_path / "fake", manifest := world(two), 0, _stands_still) as stopped:
        newcomer = Node(tmp_path / "newcomer")  # with a limit that would outlast the wait for the answer
        where = addresses(two, manifest)
        where[0] = [stopped.address, *where[0]]
        began = time.monotonic()
        assert isinstance(newcomer.gathers(manifest, where), control_pb2.Checkpoint)
        assert time.monotonic() - began < STALL_SECONDS / 2
        complete(newcomer, manifest)
        newcomer.tier.close()


class Hasty:
    """Says that it holds a part before it has read any of it."""

    def serve(self, connection: Connection) -> None:
        connection.receive(peer_pb2.Call)
        connection.send(peer_pb2.Answer(), peer_pb2.Answer(complete=True))
        _OVER.wait(20)


def test_who_says_too_early_that_it_has_all_is_not_believed(tmp_path: Path) -> None:
    """A part counts as copied only if all of it was sent."""
    manifest, files = sent_step(60_000_000)
    _OVER.clear()
    server = PeerServer("127.0.0.1", Wire(lambda: TOKEN), Hasty())  # type: ignore[arg-type]
    with nodes(tmp_path, 1) as (one,):
        one.tier.open_epoch(RUN, 1, 0, [server.address])
        one.writes(manifest, 0, files)
        one.wait_for(lambda: one.said)
        assert "it answers that all is well before it has all" in one.said[0]
        assert [held.copies for held in one.tier.held()] == [()]
    _OVER.set()
    server.close()


def test_another_checkpoint_is_gathered_at_once(tmp_path: Path) -> None:
    """What is under way ends, also where its peer stands still: the master has changed its mind."""
    with nodes(tmp_path, 3) as three:
        manifest = world(three[:2])
        other = manifest_of("step-20.e1.1", SMALL)
        with fake_peer(tmp_path / "fake", other, 0, _stands_still) as stuck:
            part = control_pb2.HeldPart(group_rank=0, addresses=[stuck.address])
            ended: list[control_pb2.Checkpoint | str] = []
            three[2].tier.gather(RUN, other.ref.to_proto(), [part], ended.append)
            three[2].wait_for(lambda: stuck.asked)
            begun = time.monotonic()
            description = three[2].gathers(manifest, addresses(three[:2], manifest))
            assert isinstance(description, control_pb2.Checkpoint), description
            assert time.monotonic() - begun < 15, "it was waited for"  # the peer stands still for 20 s
            assert [type(one) for one in ended] == [str]


def test_who_cannot_be_reached_is_not_waited_for_either(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The master has changed its mind while a machine that is off was being called."""
    monkeypatch.setattr(wire, "PATIENCE_SECONDS", 60.0)
    with nodes(tmp_path, 3) as three, unreachable() as address:
        manifest = world(three[:2])
        other = manifest_of("step-20.e1.1", SMALL)
        part = control_pb2.HeldPart(group_rank=0, addresses=[address])
        ended: list[control_pb2.Checkpoint | str] = []
        three[2].tier.gather(RUN, other.ref.to_proto(), [part], ended.append)
        time.sleep(0.5)
        begun = time.monotonic()
        description = three[2].gathers(manifest, addresses(three[:2], manifest))
        assert isinstance(description, control_pb2.Checkpoint), description
        assert time.monotonic() - begun < 30, "it was waited for"
        assert [type(one) for one in ended] == [str]
        monkeypatch.setattr(wire, "PATIENCE_SECONDS", 0.3)
        reason = three[2].gathers(other, {0: [address]})
        assert "it cannot be reached: it does not answer" in str(reason)
        assert "firewall" in str(reason)


def all_gather(holder: Node, others: list[Node], manifest: Manifest, contents: dict[str, bytes]) -> None:
    """One has written a step alone; all others fetch it, at once."""
    holder.tier.open_epoch(RUN, 1, 0, [])
    holder.writes(manifest, 0, contents)
    holder.holds(STEP, 0)
    where = {0: [holder.tier.address]}
    with ThreadPoolExecutor(len(others)) as pool:
        found = list(pool.map(lambda node: node.gathers(manifest, where), others))
    assert [type(one) for one in found] == [control_pb2.Checkpoint] * len(others), found
    for node in others:
        complete(node, manifest)


def test_a_holder_that_many_ask_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It serves so many at a time; the others ask again until it is their turn."""
    monkeypatch.setattr(service, "MOST_CALLS", 1)
    contents = {f"file-{number}": os.urandom(1_000_000) for number in range(4)}
    manifest = manifest_of(STEP, {0: contents})
    with nodes(tmp_path, 5) as (holder, *others):
        all_gather(holder, others, manifest, contents)


@pytest.fixture
def parts_are_large(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(turnstile, "LARGE_BYTES", 10_000_000)


LARGE = {f"file-{number}": os.urandom(5_000_000) for number in range(4)}


@pytest.mark.usefixtures("parts_are_large")
def test_a_large_part_is_handed_on_while_it_comes(tmp_path: Path) -> None:
    """Of many that want it few ask its holder; the others get it from these, which do not have all of it yet."""
    manifest = manifest_of(STEP, {0: LARGE})
    with links(20e6, 100_000) as handed_on, nodes(tmp_path, 7) as (holder, *others):
        all_gather(holder, others, manifest, LARGE)
    assert sum(handed_on.values()) >= 3, handed_on


@pytest.mark.usefixtures("parts_are_large")
@pytest.mark.parametrize("times", [1, 3])
def test_nodes_that_go_while_they_hand_a_part_on(tmp_path: Path, times: int) -> None:
    """Whoever had it from them asks anew, and nothing of it is left."""
    manifest = manifest_of(STEP, {0: LARGE})
    with links(10e6, 100_000) as handed_on, nodes(tmp_path, 8) as (holder, *others):
        holder.tier.open_epoch(RUN, 1, 0, [])
        holder.writes(manifest, 0, LARGE)
        holder.holds(STEP, 0)
        gone: list[Node] = []
        files = {node.memory() / STEP: node for node in others}
        with ThreadPoolExecutor(len(others)) as pool:
            found = {pool.submit(node.gathers, manifest, {0: [holder.tier.address]}): node for node in others}
            while len(gone) < times:
                at_it = [files[path] for path in [*handed_on] if files[path] not in gone]
                for node in at_it[: times - len(gone)]:
                    node.tier.close()
                    gone.append(node)
                time.sleep(0.01)
            results = {id(node): result.result(60) for result, node in found.items()}
        for node in others:
            if node not in gone:
                assert isinstance(results[id(node)], control_pb2.Checkpoint), results[id(node)]
                complete(node, manifest)
                assert [path.name for path in (node.memory() / f"{STEP}.parts").iterdir()] == ["0.json"]


@pytest.mark.usefixtures("parts_are_large")
def test_a_damaged_part_is_handed_on_to_nobody(tmp_path: Path) -> None:
    """Behind the damaged file all that had it from each other ask anew, and get it from the other holder."""
    manifest = manifest_of(STEP, {0: LARGE})
    with links(20e6, 100_000) as handed_on, nodes(tmp_path, 6) as (holder, buddy, *others):
        holder.tier.open_epoch(RUN, 1, 0, [buddy.tier.address])
        holder.writes(manifest, 0, LARGE)
        buddy.holds(STEP, 0)
        path = holder.memory() / STEP / "file-2"
        data = bytearray(path.read_bytes())
        data[4_999_999] ^= 1
        path.write_bytes(data)
        where = {0: [holder.tier.address, buddy.tier.address]}
        with ThreadPoolExecutor(len(others)) as pool:
            found = list(pool.map(lambda node: node.gathers(manifest, where), others))
        assert [type(one) for one in found] == [control_pb2.Checkpoint] * len(others), found
        for node in others:
            complete(node, manifest)
        assert handed_on


@pytest.mark.parametrize("gathers", [True, False])
def test_the_next_world_has_memory_where_a_cleaner_was(tmp_path: Path, *, gathers: bool) -> None:
    """Its directory is made again as the world begins, or as what it begins with is brought here; one line says so."""
    with nodes(tmp_path, 3) as three:
        manifest = world(three[:2])
        late = three[2]
        path = late.tier.directory(RUN)
        assert path is not None
        shutil.rmtree(path.parents[1])
        if gathers:
            assert isinstance(late.gathers(manifest, addresses(three[:2], manifest)), control_pb2.Checkpoint)
            complete(late, manifest)
        assert late.tier.directory(RUN) == path
        assert path.is_dir()
        assert len([line for line in late.said if "was deleted by somebody" in line]) == 1


@pytest.mark.parametrize("how", ["flipped", "cut", "deleted"])
def test_ranks_hear_of_bytes_that_they_may_have_read_so(tmp_path: Path, how: str) -> None:
    """Who deletes files of a step that was loaded (a cleaner) has changed nothing of what the ranks have."""
    with nodes(tmp_path, 2) as two:
        manifest = world(two)
        path = two[0].memory() / STEP / "rank0.pt"
        data = bytearray(path.read_bytes())
        if how == "deleted":
            path.unlink()
        else:
            data[1000] ^= 1
            path.write_bytes(data[:1001] if how == "cut" else data)
        found: list[str] = []
        two[0].tier.doubt(RUN, manifest.ref.to_proto(), found.append)
        two[0].wait_for(lambda: found)
        assert "rank0.pt" in found[0]
        two[0].wait_for(lambda: two[0].parts(STEP) == (1,))
        assert [held.damaged for held in two[0].changes if held.damaged] == ([] if how == "deleted" else found)


def test_what_nobody_has_cannot_be_gathered(tmp_path: Path) -> None:
    """A dead address, a living agent without it, nobody, and parts that are not all: each has its reason."""
    with nodes(tmp_path, 3) as three:
        manifest = world(three[:2])
        where = addresses(three[:2], manifest)
        dead = Node(tmp_path / "dead")
        dead.tier.close()
        late = three[2]
        reason = late.gathers(manifest, {**where, 1: [dead.tier.address, three[2].tier.address]})
        assert f"{STEP} cannot be gathered: part 1 ({dead.tier.address}: " in str(reason)
        assert "nobody else holds it" in str(late.gathers(manifest, {1: []}))
        assert "in no part of it" in str(late.gathers(manifest, {0: where[0]}))
        other = manifest_of("step-20.e1.1", SMALL)
        assert "nobody is known to hold" in str(late.gathers(other, {}))
        assert f"part 0 of {other.name} is not here" in str(late.gathers(other, {0: where[0]}))
        assert isinstance(late.gathers(manifest, where), control_pb2.Checkpoint)


@pytest.mark.usefixtures("in_order")
def test_a_bit_that_flips_in_memory_is_found_and_the_replica_used(tmp_path: Path) -> None:
    """By the holder when it is asked for the part; by this node when its checkpoint is doubted."""
    with nodes(tmp_path, 3) as three:
        manifest = world(three)
        where = addresses(three, manifest)
        path = three[0].memory() / STEP / "rank0.pt"
        data = bytearray(path.read_bytes())
        data[1000] ^= 1
        path.write_bytes(data)
        where[0] = [three[0].tier.address, three[1].tier.address]
        assert isinstance(three[2].gathers(manifest, where), control_pb2.Checkpoint)
        complete(three[2], manifest)
        three[0].wait_for(lambda: three[0].parts(STEP) == (2,))
        assert "part 0 of step-10.e1.1 was damaged in this node's memory" in three[0].said[0]
        assert isinstance(three[0].gathers(manifest, where), control_pb2.Checkpoint)
        complete(three[0], manifest)
        # The same with a part of another node, found by a look at everything.
        (three[0].memory() / STEP / "rank2.pt").write_bytes(b"owt")
        found: list[str] = []
        three[0].tier.doubt(RUN, manifest.ref.to_proto(), found.append)
        three[0].wait_for(lambda: found)
        assert "rank2.pt" in found[0]
        assert three[0].parts(STEP) == (0, 1)
        assert isinstance(three[0].gathers(manifest, where), control_pb2.Checkpoint)
        complete(three[0], manifest)
        three[0].tier.doubt(RUN, manifest.ref.to_proto(), found.append)
        three[0].wait_for(lambda: len(found) == 2)
        assert found[1] == ""


@pytest.mark.parametrize("harm", ["gone", "garbage", "empty", "others"])
def test_a_note_that_is_damaged_is_written_anew(tmp_path: Path, harm: str) -> None:
    """The part itself is whole: ranks that do not find it have it doubted, and find it then."""
    with nodes(tmp_path, 2) as two:
        manifest = world(two)
        note = two[0].memory() / f"{STEP}.parts" / "1.json"
        before = note.read_bytes()
        if harm == "gone":
            note.unlink()
        else:
            note.write_bytes({"garbage": b"\xff\x00", "empty": b"", "others": b'{"files": ["rank0.pt"]}'}[harm])
        found: list[str] = []
        two[0].tier.doubt(RUN, manifest.ref.to_proto(), found.append)
        two[0].wait_for(lambda: found)
        assert found == [""]
        assert two[0].parts(STEP) == (0, 1)
        complete(two[0], manifest)
        assert note.read_bytes() == before


def test_a_full_memory_is_said_once_and_training_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The sender's line has the holder's reason, with the flag that helps."""
    monkeypatch.setattr(buddies, "_PAUSES_SECONDS", (0.1,))
    with nodes(tmp_path, 1) as (one,), nodes(tmp_path / "full", 1, budget_bytes=100_000) as (full,):
        one.tier.open_epoch(RUN, 1, 0, [full.tier.address])
        for step in (10, 20):
            manifest = manifest_of(f"step-{step}.e1.1", {0: SMALL[0]})
            one.writes(manifest, 0, SMALL[0])
            one.holds(manifest.name, 0)
            one.wait_for(lambda: one.said)
        small = manifest_of("step-30.e1.1", {0: {"x": b"x"}})
        one.writes(small, 0, {"x": b"x"})
        full.holds(small.name, 0)
        assert len(one.said) == 1
        assert "no room for part 0 of step-10.e1.1" in one.said[0]
        assert "--memory-budget" in one.said[0]


def test_room_that_is_made_in_time_is_used(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A buddy may delete an older step only just after the newer one was offered."""
    caplog.set_level("INFO")
    monkeypatch.setattr(buddies, "_PAUSES_SECONDS", (0.2,) * 200)
    size = sum(map(len, SMALL[0].values()))
    with nodes(tmp_path, 1) as (one,), nodes(tmp_path / "tight", 1, budget_bytes=size) as (tight,):
        one.tier.open_epoch(RUN, 1, 0, [tight.tier.address])
        first, second = (manifest_of(f"step-{step}.e1.1", {0: SMALL[0]}) for step in (10, 20))
        one.writes(first, 0, SMALL[0])
        tight.holds(first.name, 0)
        one.writes(second, 0, SMALL[0])
        one.wait_for(lambda: f"part 0 of {second.name} was not sent" in caplog.text)
        tight.tier.keep(RUN, 2, [])
        tight.holds(second.name, 0)
        assert not one.said


def test_a_buddy_that_takes_nothing_holds_up_no_later_part(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """All nodes send parts of one step at a time: they would wait for all tries again, of each step."""
    monkeypatch.setattr(buddies, "_PAUSES_SECONDS", (0.2,) * 1000)
    size = sum(map(len, SMALL[0].values()))
    with nodes(tmp_path, 1) as (one,), nodes(tmp_path / "tight", 1, budget_bytes=size) as (tight,):
        one.tier.open_epoch(RUN, 1, 0, [tight.tier.address])
        first, second, third = (manifest_of(f"step-{step}.e1.1", {0: SMALL[0]}) for step in (10, 20, 30))
        one.writes(first, 0, SMALL[0])
        tight.holds(first.name, 0)
        one.writes(second, 0, SMALL[0])
        one.wait_for(lambda: one.said, 30)
        assert [held.unsent for held in one.tier.held()] == [False, False]
        one.writes(third, 0, SMALL[0])
        one.wait_for(lambda: [held.unsent for held in one.tier.held()] == [False, True, True], 30)
        # It is tried all the same, and comes there as soon as it can.
        tight.tier.keep(RUN, 2, [])
        tight.holds(third.name, 0)
        one.wait_for(lambda: [held.unsent for held in one.tier.held()] == [False, True, False], 30)


def test_nor_does_one_that_does_not_answer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Behind a firewall a try alone takes long: none is waited for, once it is known."""
    monkeypatch.setattr(buddies, "_PAUSES_SECONDS", (0.1,))
    monkeypatch.setattr(wire, "PATIENCE_SECONDS", 0.3)
    with nodes(tmp_path, 1) as (one,), unreachable() as address:
        one.tier.open_epoch(RUN, 1, 0, [address])
        first, second = (manifest_of(f"step-{step}.e1.1", {0: SMALL[0]}) for step in (10, 20))
        one.writes(first, 0, SMALL[0])
        one.wait_for(lambda: [held.unsent for held in one.tier.held()] == [True], 30)
        monkeypatch.setattr(wire, "PATIENCE_SECONDS", 600.0)
        one.writes(second, 0, SMALL[0])
        one.wait_for(lambda: [held.unsent for held in one.tier.held()] == [True, True], 30)


def test_what_waits_to_be_sent_again_may_be_deleted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """By the next world: it is not damaged, its buddy owes nothing, and nobody hears of either."""
    caplog.set_level("INFO")
    monkeypatch.setattr(buddies, "_PAUSES_SECONDS", (0.2,) * 200)
    with nodes(tmp_path, 1) as (one,), nodes(tmp_path / "full", 1, budget_bytes=1000) as (full,):
        one.tier.open_epoch(RUN, 1, 0, [full.tier.address])
        manifest = manifest_of(STEP, {0: SMALL[0]})
        one.writes(manifest, 0, SMALL[0])
        one.wait_for(lambda: caplog.text.count("was not sent") >= 2)
        one.tier.open_epoch(RUN, 2, 0, [full.tier.address])
        one.tier.keep(RUN, 2, [])
        one.wait_for(lambda: not one.tier.held())
        time.sleep(0.6)  # why: that nothing is tried any more has no event
        small = manifest_of("step-20.e2.1", {0: {"x": b"x"}})
        one.writes(small, 0, {"x": b"x"})
        full.holds(small.name, 0)
        assert not one.said


def test_a_buddy_that_ends_is_not_one_that_refuses(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It cancels what is under way: what people hear is that no replica comes there."""
    monkeypatch.setattr(buddies, "_PAUSES_SECONDS", ())
    monkeypatch.setattr(buddies, "_SAY_AFTER_SECONDS", 0.0)
    manifest, files = sent_step(8_000_000)
    with nodes(tmp_path, 1, bytes_per_second=8e6) as (one,), nodes(tmp_path / "other", 1) as (other,):
        one.tier.open_epoch(RUN, 1, 0, [other.tier.address])
        one.writes(manifest, 0, files)
        one.wait_for(lambda: coming(tmp_path / "other"))
        other.tier.close()
        one.wait_for(lambda: one.said)
        assert one.said[0].startswith("no replica of this node's memory checkpoints comes to"), one.said
        assert "CANCELLED" not in one.said[0]


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can mount")
def test_a_tmpfs_that_is_full(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Measured before a part is taken; and nothing of what did not fit is left."""
    monkeypatch.setattr(buddies, "_PAUSES_SECONDS", (0.1,))
    mount = tmp_path / "shm"
    mount.mkdir()
    if subprocess.run(["mount", "-t", "tmpfs", "-o", "size=80m", "tmpfs", str(mount)], check=False).returncode:
        pytest.skip("no mount may be made here")
    try:
        with nodes(tmp_path, 1) as (one,), nodes(mount, 1) as (full,):
            manifest = manifest_of(STEP, {0: SMALL[0]})
            (full.memory() / "fills").write_bytes(bytes(80 << 20)[: full.tier._place.free_bytes() - 200_000])
            one.tier.open_epoch(RUN, 1, 0, [full.tier.address])
            one.writes(manifest, 0, SMALL[0])
            one.wait_for(lambda: one.said)
            assert "left on the file system" in one.said[0]
            # What the measure did not see: the disk says so while it is written.
            full.tier._space._free = lambda: 1 << 40
            one.tier.open_epoch(RUN, 2, 0, [full.tier.address])
            one.tier._buddies.offer(one.tier._holdings.part(RUN, STEP, manifest.digest, 0))  # type: ignore[arg-type]
            part = one.tier._holdings.part(RUN, STEP, manifest.digest, 0)
            assert part is not None
            with pytest.raises(PeerError, match="No space left") as error:
                one.tier._peers.send(full.tier.address, part, SendPace(None))
            assert error.value.code is grpc.StatusCode.RESOURCE_EXHAUSTED
            full.wait_for(lambda: not list(full.memory().rglob(".in-*")))
            (full.memory() / "fills").unlink()
            one.tier._peers.send(full.tier.address, part, SendPace(None))
            full.holds(STEP, 0)
    finally:
        subprocess.run(["umount", "-l", str(mount)], check=True)


# ---- processes that end or stand still -------------------------------------------------------------------------------


@pytest.fixture
def started() -> Iterator[Callable[..., Process]]:
    made: list[Process] = []

    def start(*arguments: object) -> Process:
        made.append(Process(*map(str, arguments)))
        return made[-1]

    yield start
    for process in made:
        process.close()


def coming(root: Path) -> list[Path]:
    """What is being received below a root."""
    return [path for path in root.rglob(".in-*") if any(path.iterdir())]


def test_a_buddy_that_is_killed_in_the_middle(
    tmp_path: Path, started: Callable[..., Process], monkeypatch: pytest.MonkeyPatch
) -> None:
    """One line, the other buddy gets its copy, and what the dead one left is removed by the next agent there."""
    manifest, files = sent_step(8_000_000)
    victim = started("hold", tmp_path / "victim")
    monkeypatch.setattr(buddies, "_PAUSES_SECONDS", (0.1, 0.2))
    monkeypatch.setattr(buddies, "_SAY_AFTER_SECONDS", 0.2)
    with nodes(tmp_path, 1, bytes_per_second=8e6) as (one,), nodes(tmp_path / "other", 1) as (other,):
        one.tier.open_epoch(RUN, 1, 0, [victim.line, other.tier.address])
        one.writes(manifest, 0, files)
        one.wait_for(lambda: coming(tmp_path / "victim"))
        victim.signal(signal.SIGKILL)
        other.holds(SENT, 0)
        one.wait_for(lambda: one.said)
        assert one.said[0].startswith(f"no replica of this node's memory checkpoints comes to {victim.line}: ")
        again = manifest_of("step-20.e1.1", {0: {"x": b"x"}})
        one.writes(again, 0, {"x": b"x"})
        other.holds(again.name, 0)
        assert len(one.said) == 1
    assert coming(tmp_path / "victim")
    successor = Node(tmp_path / "victim")
    assert os.listdir(tmp_path / "victim" / JOB) == [successor.tier.path.name]  # type: ignore[union-attr]
    successor.tier.close()


def test_a_buddy_that_refused_and_then_died(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """That nobody answers there any more is told only if it lasts: mostly the next world is without that node."""
    caplog.set_level("INFO")
    monkeypatch.setattr(buddies, "_PAUSES_SECONDS", (0.1,) * 200)
    monkeypatch.setattr(buddies, "_SAY_AFTER_SECONDS", 3.0)
    monkeypatch.setattr(buddies, "_TRIES", 1000)
    with nodes(tmp_path, 1) as (one,), nodes(tmp_path / "full", 1, budget_bytes=1000) as (full,):
        one.tier.open_epoch(RUN, 1, 0, [full.tier.address])
        manifest = manifest_of(STEP, {0: SMALL[0]})
        one.writes(manifest, 0, SMALL[0])
        one.wait_for(lambda: "RESOURCE_EXHAUSTED" in caplog.text)
        full.tier.close()
        one.wait_for(lambda: caplog.text.count("UNAVAILABLE") >= 3)
        one.wait_for(lambda: one.said)
        assert one.said[0].startswith("no replica of this node's memory checkpoints comes to")
        gone = (" CANCELLED ", " UNAVAILABLE ")  # it closes within a call, or before one
        times = [one.created for one in caplog.records if any(word in one.getMessage() for word in gone)]
        assert times[-1] - times[0] >= 3.0


def test_a_sender_that_is_killed_in_the_middle(tmp_path: Path, started: Callable[..., Process]) -> None:
    """Nothing of its part is left, and another holder's comes as if nothing had been."""
    with nodes(tmp_path, 1) as (one,):
        sender = started("send", tmp_path / "sender", one.tier.address, 8_000_000, 2e6)
        one.wait_for(lambda: coming(tmp_path / "node-0"))
        sender.signal(signal.SIGKILL)
        one.wait_for(lambda: not list((tmp_path / "node-0").rglob(".in-*")))
        assert one.tier.held() == []
        assert not list(one.memory().rglob("MANIFEST.json"))
        with nodes(tmp_path / "other", 1) as (other,):
            manifest, files = sent_step(8_000_000)
            other.tier.open_epoch(RUN, 1, 0, [one.tier.address])
            other.writes(manifest, 0, files)
            one.holds(SENT, 0)


def test_a_buddy_that_stands_still(tmp_path: Path, started: Callable[..., Process]) -> None:
    """It is given up after a time without a byte; once it goes on it gets the next step."""
    manifest, files = sent_step(60_000_000)
    stopped = started("hold", tmp_path / "stopped")
    with nodes(tmp_path, 1, stall_seconds=2.0, bytes_per_second=60e6) as (one,):
        one.tier.open_epoch(RUN, 1, 0, [stopped.line])
        one.writes(manifest, 0, files)
        one.wait_for(lambda: coming(tmp_path / "stopped"))
        stopped.signal(signal.SIGSTOP)
        one.wait_for(lambda: one.said)
        assert "not a byte has moved for too long" in one.said[0]
        stopped.signal(signal.SIGCONT)
        again = manifest_of("step-20.e1.1", {0: {"x": b"x"}})
        one.writes(again, 0, {"x": b"x"})
        one.wait_for(lambda: any(held.copies for held in one.tier.held()))


def test_a_sender_that_stands_still(tmp_path: Path, started: Callable[..., Process]) -> None:
    """What it has sent so far is not kept for ever."""
    with nodes(tmp_path, 1, stall_seconds=1.0) as (one,):
        sender = started("send", tmp_path / "sender", one.tier.address, 8_000_000, 2e6)
        one.wait_for(lambda: coming(tmp_path / "node-0"))
        sender.signal(signal.SIGSTOP)
        one.wait_for(lambda: not list((tmp_path / "node-0").rglob(".in-*")))
        sender.signal(signal.SIGCONT)


def test_the_end_of_an_agent_ends_what_is_under_way(tmp_path: Path) -> None:
    """Within seconds, whatever is being sent, received or gathered; its directory goes."""
    manifest, files = sent_step(8_000_000)
    with nodes(tmp_path, 2, bytes_per_second=1e6) as (one, two):
        one.tier.open_epoch(RUN, 1, 0, [two.tier.address])
        one.writes(manifest, 0, files)
        one.wait_for(lambda: coming(tmp_path / "node-1"))
        with fake_peer(tmp_path / "fake", manifest_of("step-20.e1.1", SMALL), 1, _stands_still) as peer:
            part = control_pb2.HeldPart(group_rank=1, addresses=[peer.address])
            ended: list[object] = []
            ref = manifest_of("step-20.e1.1", SMALL).ref.to_proto()
            one.tier.gather(RUN, ref, [part], ended.append)
            one.wait_for(lambda: peer.asked)
            one.tier.close()
            assert one.tier.path is not None
            assert not one.tier.path.exists()
            one.wait_for(lambda: ended)
        two.wait_for(lambda: not list((tmp_path / "node-1").rglob(".in-*")))
        assert not one.said
        results: list[object] = []
        one.tier.gather(RUN, manifest.ref.to_proto(), [], results.append)
        one.tier.make_durable(RUN, manifest.ref.to_proto(), tmp_path, results.append)
        assert results == ["the agent ends"] * 2


def test_a_deleted_directory_of_the_job_is_made_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Somebody deletes the whole checkpoint directory: the next save reaches the disk, but no bare mount point."""
    disk = tmp_path / "checkpoints" / "job"
    disk.mkdir(parents=True)
    manifest = manifest_of(STEP, {0: SMALL[0]})
    with nodes(tmp_path, 1, disk=disk) as (one,):
        one.tier.open_epoch(RUN, 1, 0, [])
        one.writes(manifest, 0, SMALL[0])
        one.holds(STEP, 0)
        shutil.rmtree(disk.parent)
        with monkeypatch.context() as away:
            away.setattr(tier, "is_away", lambda before, path: before == mount_point(tmp_path) and path == disk)
            assert "No such file" in one.makes_durable(manifest, disk / RUN)
            assert "cannot be looked for" in one.looks(manifest, disk / RUN)
            assert not disk.parent.exists()
        assert isinstance(one.looks(manifest, disk / RUN), NothingThere)
        shutil.rmtree(disk.parent)
        assert one.makes_durable(manifest, disk / RUN) == ""
        assert verify(disk / RUN / STEP, read_sealed(disk / RUN / STEP, manifest.digest)) is None
        assert one.said == [f"{disk} was deleted: it is made again, without what was in it"] * 2


def test_without_shared_memory_nothing_is_done(tmp_path: Path) -> None:
    """One line says why; the agent need not ask before each call."""
    (tmp_path / "root").mkdir()
    (tmp_path / "root").chmod(0o777)
    node = Node(tmp_path / "root")
    assert "is open to others" in node.tier.problem
    assert (node.tier.address, node.tier.path, node.tier.held(), node.tier.directory(RUN)) == ("", None, [], None)
    manifest = manifest_of(STEP, SMALL)
    node.tier.open_epoch(RUN, 1, 0, ["127.0.0.1:1"])
    node.tier.sealed(RUN, STEP, manifest.digest)
    node.tier.keep(RUN, 1, [])
    assert node.gathers(manifest, {}) == node.makes_durable(manifest, tmp_path) == node.tier.problem
    node.tier.close()
    nowhere = Node(tmp_path / "nowhere", host="192.0.2.1")
    assert nowhere.tier.problem
    assert not list((tmp_path / "nowhere").iterdir())


# ---- to the disk -----------------------------------------------------------------------------------------------------


def test_a_complete_step_becomes_durable(tmp_path: Path) -> None:
    """Manifest last, once however often it is ordered; not without all parts, and not over another one."""
    run_dir = tmp_path / "disk" / RUN
    with nodes(tmp_path, 2) as two:
        manifest = world(two)
        assert "No such file" in two[0].makes_durable(manifest, run_dir)  # nothing is mounted there
        run_dir.parent.mkdir()
        assert two[0].makes_durable(manifest, run_dir) == ""
        assert two[1].makes_durable(manifest, run_dir) == ""
        verify(run_dir / STEP, read_sealed(run_dir / STEP, manifest.digest))
        assert sorted(os.listdir(run_dir)) == [".sealed", STEP]
        third = manifest_of("step-30.e1.1", SMALL)
        two[0].writes(third, 0, SMALL[0])
        two[0].holds(third.name, 0)
        unsealed = two[0].makes_durable(third, run_dir)
        assert "is not in this node's memory" in unsealed
        assert isinstance(unsealed, PartlyWritten)
        assert unsealed.parts == (0,)
        assert not (run_dir / third.name / "MANIFEST.json").exists()  # The rest is there for who has it.
        shutil.rmtree(run_dir / third.name)
        other = manifest_of(STEP, {0: {"x": b"y"}})
        (run_dir / "step-40.e1.1").symlink_to(run_dir / STEP)
        fourth = manifest_of("step-40.e1.1", {0: {"x": b"x"}})
        two[0].writes(fourth, 0, {"x": b"x"})
        two[0].holds(fourth.name, 0)
        assert "link" in two[0].makes_durable(fourth, run_dir) or "belongs to" in two[0].makes_durable(fourth, run_dir)
        verify(run_dir / STEP, read_sealed(run_dir / STEP, manifest.digest))
        assert other.digest != manifest.digest


def test_what_nobody_has_is_looked_for_on_the_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By who has another part of it. What comes into sight a moment later is found, and what is sealed."""
    monkeypatch.setattr(durable, "_SIGHT_PAUSES_SECONDS", (0.5,))
    run_dir = tmp_path / RUN
    with nodes(tmp_path, 2) as two:
        files = {rank: SMALL[rank] for rank in range(2)}
        third = manifest_of("step-30.e1.1", files)
        for rank, node in enumerate(two):
            node.tier.open_epoch(RUN, 1, rank, [])
            node.writes(third, rank, SMALL[rank])
            node.holds(third.name, rank)
        assert "cannot be looked for" in two[0].looks(third, tmp_path / "disk" / RUN)  # nothing is mounted there
        for _ in range(2):
            assert isinstance(two[0].looks(third, run_dir), NothingThere)
            assert two[0].makes_durable(third, run_dir, (0,)) == "", "what is here itself is not meant"
        lacking = two[0].makes_durable(third, run_dir, ())
        assert "MISSING_FILE" in lacking
        assert isinstance(lacking, NothingThere)
        assert "in its memory any more" in two[0].makes_durable(third, run_dir, (1,))
        assert two[1].makes_durable(third, run_dir, (1,)) == ""
        os.rename(run_dir / third.name, tmp_path / "unseen")
        threading.Timer(0.1, lambda: os.rename(tmp_path / "unseen", run_dir / third.name)).start()
        assert two[0].looks(third, run_dir) == ""
        assert two[0].makes_durable(third, run_dir, ()) == ""
        assert two[0].looks(third, run_dir) == "", "sealed"
        assert "nothing of" in two[0].looks(manifest_of("step-50.e1.1", files), run_dir)
        fourth = manifest_of("step-40.e1.1", files)
        two[0].writes(fourth, 0, SMALL[0])
        two[0].holds(fourth.name, 0)
        (run_dir / fourth.name).symlink_to(tmp_path)
        why = two[0].looks(fourth, run_dir)
        assert "is a link" in why
        assert not isinstance(why, NothingThere), "nobody knows what is there"


def test_each_node_writes_its_part_and_one_seals(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No part is read back for the seal, and there is none while a file is missing, or not whole."""
    run_dir, read = tmp_path / RUN, list[str]()
    plain = durable.checksum
    monkeypatch.setattr(durable, "checksum", lambda root, path, **rest: read.append(path) or plain(root, path, **rest))
    monkeypatch.setattr(durable, "_SIGHT_PAUSES_SECONDS", (0.0,))
    with nodes(tmp_path / "nodes", 3) as three:
        manifest = world(three)
        assert three[0].makes_durable(manifest, run_dir, (0,)) == ""
        assert three[1].makes_durable(manifest, run_dir, (0, 1)) == ""
        assert set(read) <= {path for part in (0, 1) for path in SMALL[part]}
        read.clear()
        missing = three[0].makes_durable(manifest, run_dir, ())
        assert any(path in missing for path in SMALL[2])
        assert not (run_dir / STEP / "MANIFEST.json").exists()
        assert "not all of what" in three[0].makes_durable(manifest, run_dir, (1, 2))
        assert three[2].makes_durable(manifest, run_dir, (2,)) == ""
        torn = run_dir / STEP / next(iter(SMALL[2]))
        whole = torn.read_bytes()
        torn.write_bytes(whole[:-1])
        assert "cannot be sealed" in three[0].makes_durable(manifest, run_dir, ())
        torn.write_bytes(whole)
        assert three[0].makes_durable(manifest, run_dir, ()) == ""
        assert not read
        for parts in ((), (1,), None):
            assert three[1].makes_durable(manifest, run_dir, parts) == ""  # It is there.
    verify(run_dir / STEP, read_sealed(run_dir / STEP, manifest.digest))
    assert sorted(os.listdir(run_dir)) == [".sealed", STEP]


def test_a_part_comes_into_sight_late(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Who seals looks again: over a network another node's files may be seen later than they are told of."""
    run_dir = tmp_path / RUN
    with nodes(tmp_path / "nodes", 2) as two:
        manifest = world(two)
        assert two[0].makes_durable(manifest, run_dir, (0,)) == ""
        looks, plain = [], durable.verify_listing

        def looked(target: Path, listed: Manifest) -> None:
            looks.append(target)
            if len(looks) == 2:
                assert two[1].makes_durable(manifest, run_dir, (1,)) == ""
            plain(target, listed)

        monkeypatch.setattr(durable, "verify_listing", looked)
        assert two[0].makes_durable(manifest, run_dir, ()) == ""
    verify(run_dir / STEP, read_sealed(run_dir / STEP, manifest.digest))


def test_what_nobody_wants_any_more_is_not_written_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A newer step counts: nothing more of it comes to the disk, and other steps do."""
    with nodes(tmp_path / "nodes", 1) as (one,):
        older, newer = (manifest_of(name, {0: SMALL[0]}) for name in (STEP, "step-20.e1.1"))
        one.tier.open_epoch(RUN, 1, 0, [])
        for manifest in (older, newer):
            one.writes(manifest, 0, SMALL[0])
            one.holds(manifest.name, 0)
        plain = durable.open_sealed

        def overtaken(source: Path, entry: FileEntry) -> int:
            one.tier.stop_writing(older.ref.to_proto())
            return plain(source, entry)

        for parts in ((0,), None):
            monkeypatch.setattr(durable, "open_sealed", overtaken)
            assert one.makes_durable(older, tmp_path / RUN, parts) == "a newer one counts"
            assert not list((tmp_path / RUN / STEP).rglob("*.pt"))
            monkeypatch.setattr(durable, "open_sealed", plain)
        assert one.makes_durable(newer, tmp_path / RUN, (0,)) == ""
        # The run may go back to it.
        assert one.makes_durable(older, tmp_path / RUN) == ""


def test_a_damaged_memory_is_not_made_durable(tmp_path: Path) -> None:
    """The bad part is dropped, and there is no manifest on the disk."""
    with nodes(tmp_path, 2) as two:
        manifest = world(two)
        (two[0].memory() / STEP / "deep/er/rank0.pt").write_bytes(b"1")
        problem = two[0].makes_durable(manifest, tmp_path / RUN)
        assert "damaged in memory" in problem
        assert two[0].parts(STEP) == (1,)
        assert not (tmp_path / RUN / STEP / "MANIFEST.json").exists()
        assert two[1].makes_durable(manifest, tmp_path / RUN) == ""
        verify(tmp_path / RUN / STEP, read_sealed(tmp_path / RUN / STEP, manifest.digest))


@pytest.mark.parametrize("batches", [0, 2])
def test_another_node_goes_on_where_one_was_killed(
    tmp_path: Path, started: Callable[..., Process], batches: int
) -> None:
    """It takes over whole files, replaces torn ones, and leaves nothing of the dead one's."""
    manifest, files = durable_step()
    run_dir = tmp_path / RUN
    killed = started("durable", tmp_path / "killed", run_dir, batches)
    assert killed.line == "halted"
    killed.signal(signal.SIGKILL)
    killed.process.wait(30)
    target = run_dir / manifest.name
    done = {path: path.stat().st_ino for path in target.rglob("*.pt")}
    assert len(done) == 2 * batches
    assert os.listdir(run_dir / ".durable")
    assert not (target / "MANIFEST.json").exists()
    # What a save of the ranks may have left, torn.
    (target / "stray").write_bytes(b"x")
    (target / "folder-2").mkdir(exist_ok=True)
    (target / "folder-2" / "file-8.pt").write_bytes(b"\x08" * 9_999 + b"\x00")
    (target / "folder-1" / "link").symlink_to("/") if (target / "folder-1").is_dir() else None
    with nodes(tmp_path / "successor", 1) as (one,):
        one.tier.open_epoch(RUN, 1, 0, [])
        one.writes(manifest, 0, files)
        one.holds(manifest.name, 0)
        assert one.makes_durable(manifest, run_dir) == ""
    verify(target, read_sealed(target, manifest.digest))
    assert {path: path.stat().st_ino for path in done} == done
    assert sorted(os.listdir(run_dir)) == [".sealed", manifest.name]


def test_two_nodes_may_write_the_same_at_the_same_time(tmp_path: Path) -> None:
    """An order that was given to another one, while the first is still at it."""
    with nodes(tmp_path, 2) as two:
        manifest = world(two)
        with ThreadPoolExecutor(2) as pool:
            problems = [
                one.result(60) for one in [pool.submit(node.makes_durable, manifest, tmp_path / RUN) for node in two]
            ]
        assert "" in problems
        verify(tmp_path / RUN / STEP, read_sealed(tmp_path / RUN / STEP, manifest.digest))
        assert sorted(os.listdir(tmp_path / RUN)) == [".sealed", STEP]


def test_another_node_may_seal_it_at_any_moment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Between our look and our first byte, too: its manifest stays."""
    obstacle, sealed_by_other = durable._obstacle, []
    with nodes(tmp_path, 2) as two:
        manifest = world(two)

        def quick(target: Path) -> str:
            found = obstacle(target)
            if not sealed_by_other:
                sealed_by_other.append(0)
                assert two[1].makes_durable(manifest, tmp_path / RUN) == ""
                sealed_by_other.append((target / "MANIFEST.json").stat().st_ino)
            return found

        monkeypatch.setattr(durable, "_obstacle", quick)
        assert two[0].makes_durable(manifest, tmp_path / RUN) == ""
        assert (tmp_path / RUN / STEP / "MANIFEST.json").stat().st_ino == sealed_by_other[1]
        verify(tmp_path / RUN / STEP, read_sealed(tmp_path / RUN / STEP, manifest.digest))


def test_a_power_cut_while_it_is_made_durable(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whenever it comes: what has a manifest has all its files."""
    (tmp_path / RUN).mkdir()
    with nodes(tmp_path / "nodes", 1) as (one,):
        manifest, files = durable_step()
        one.tier.open_epoch(RUN, 1, 0, [])
        one.writes(manifest, 0, files)
        one.holds(manifest.name, 0)
        power = Power(tmp_path / RUN, monkeypatch, only_whole_checkpoints)
        assert one.makes_durable(manifest, tmp_path / RUN) == ""
        assert sealed(power.image()) == [manifest.name]
