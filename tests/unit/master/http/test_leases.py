"""Leases as they are told: tokens, who holds a run, and how it stands."""

from __future__ import annotations

import asyncio
import base64

import pytest

pytest.importorskip("fastapi", reason="needs the extra relay")

from dalsegno.master.brain.events import Reply
from dalsegno.master.http import leases
from dalsegno.master.http.lease import LeaseRefused, Lessor, RelayedRun
from dalsegno.master.http.leases import RANDOM_BYTES, Token
from dalsegno.protos import control_pb2 as pb
from dalsegno.protos.commander_api import RunState
from dalsegno.protos.run_file import RunFile

FILE = RunFile.model_validate(
    {
        "run_id": "my-run",
        "commander": "https://relay.example:8443",
        "l1_root": "/volume",
        "command": ["train", "${save_dir}"],
        "lease_seconds": 3,
    }
)


def node(name: str, role: str, incarnation: str = "", silent: float = 0.0) -> pb.NodeStatus:
    return pb.NodeStatus(node=name, role=role, incarnation=incarnation or name, silent_seconds=silent)


def status(phase: pb.Phase, *nodes: pb.NodeStatus, epoch: int = 1) -> pb.StatusReply:
    return pb.StatusReply(phase=phase, epoch=epoch, nodes=nodes)


def test_a_token_comes_back() -> None:
    """It names the run and the incarnation, and what proves it is not in the incarnation's name."""
    random = bytes(range(RANDOM_BYTES))
    token = Token.drawn("my-run", random)
    assert Token.parse(token.text) == token
    assert token.incarnation == "lease-" + random[:16].hex()
    assert random[16:].hex() not in token.incarnation
    caller = token.caller("w1", 3, 2)
    assert (caller.job_id, caller.node, caller.epoch, caller.secret) == ("my-run", "w1", 3, random[16:])


@pytest.mark.parametrize(
    "text",
    [
        *("", "x", "é", "AAAA", "A" * 600, " " * 80, "\ud800"),
        base64.urlsafe_b64encode(b"\x01" + b"x" * RANDOM_BYTES).decode(),
        base64.urlsafe_b64encode(b"\x02" + b"x" * RANDOM_BYTES + b"run").decode(),
        base64.urlsafe_b64encode(b"\x01" + b"x" * RANDOM_BYTES + b"\xff").decode(),
        base64.urlsafe_b64encode(b"\x01" + b"x" * RANDOM_BYTES + b"run").decode() + "!",
    ],
)
def test_what_is_no_token_is_refused(text: str) -> None:
    """Without looking at any run."""
    with pytest.raises(ValueError, match="no token of a lease"):
        Token.parse(text)


@pytest.mark.parametrize(
    ("said", "holder", "state"),
    [
        (status(pb.PHASE_WAITING, epoch=0), "", RunState.WAITING),
        (status(pb.PHASE_WAITING), "", RunState.PREEMPTED),
        (status(pb.PHASE_WAITING, node("spare", "spare")), "", RunState.PREEMPTED),
        (status(pb.PHASE_RUNNING, node("a", "member"), node("b", "spare")), "a", RunState.RUNNING),
        (status(pb.PHASE_DRAINING, node("b", "spare"), node("a", "leaving")), "a", RunState.RUNNING),
        # Between two epochs whoever was in the last one has it, apart from an agent that goes.
        (status(pb.PHASE_FORMING, node("a", "member")), "a", RunState.RUNNING),
        (status(pb.PHASE_FORMING, node("a", "leaving")), "", RunState.PREEMPTED),
        (status(pb.PHASE_FORMING, node("a", "leaving", "lease-1")), "a", RunState.RUNNING),
        (status(pb.PHASE_SUCCEEDED, node("a", "member")), "", RunState.COMPLETED),
        (status(pb.PHASE_FAILED, node("a", "member")), "", RunState.FAILED),
        (status(pb.PHASE_STOPPED, node("a", "leaving")), "", RunState.PREEMPTED),
    ],
)
def test_who_holds_a_run(said: pb.StatusReply, holder: str, state: RunState) -> None:
    """And what people are told of it, in each phase of its job."""
    found = leases.holder_of(said)
    assert ("" if found is None else found.node, leases.state_of(said)) == (holder, state)


def test_only_foreign_workers_without_a_place_are_left_over() -> None:
    """Agents of ours wait for a place by themselves."""
    said = status(
        pb.PHASE_RUNNING, node("a", "member", "lease-1"), node("b", "spare", "lease-2"), node("c", "spare", "c#1")
    )
    assert [one.node for one in leases.leftovers(said)] == ["b"]
    said = status(pb.PHASE_FAILED, node("a", "member", "lease-1"), node("c", "member", "c#1"))
    assert [one.node for one in leases.leftovers(said)] == ["a"]


def test_a_lease_lasts_from_the_last_word_on() -> None:
    """It never is less than nothing."""
    assert leases.seconds_left(node("a", "member", silent=1.0), 3.0) == 2.0
    assert leases.seconds_left(node("a", "member", silent=9.0), 3.0) == 0.0


def test_the_settings_of_a_run() -> None:
    """One node, which may be silent as long as its lease, and never shorter than an agent can be."""
    settings = leases.settings_of(FILE)
    assert (settings.min_nodes, settings.max_nodes, settings.node_timeout, settings.keep_checkpoints) == (1, 1, 5.0, 3)
    longer = FILE.model_copy(update={"lease_seconds": 180.0, "keep_last": 7})
    assert (leases.settings_of(longer).node_timeout, leases.settings_of(longer).keep_checkpoints) == (180.0, 7)


def test_milestones_are_shown_newest_first() -> None:
    """A worker is told the newest with its lease."""
    said = status(pb.PHASE_RUNNING)
    for step in (3, 5):
        said.milestones.add(repo="a/b", revision=f"r{step}", step=step)
    assert [made["step"] for made in leases.milestones_of(said)] == [5, 3]
    told = leases.lease_config(FILE, said)
    assert (told["last_hf_repo"], told["last_hf_revision"], told["config"]["hf_repo"]) == ("a/b", "r5", None)


class Master:
    """A master that answers each call in one way."""

    address = "127.0.0.1:1"

    def __init__(self, code: str) -> None:
        self._code = code

    async def call(self, message: object) -> Reply:
        return Reply(self._code, "why", None)

    async def status(self) -> Reply:
        token = Token.drawn("my-run", bytes(RANDOM_BYTES))
        return Reply(message=pb.StatusReply(nodes=[pb.NodeStatus(node="w1", incarnation=token.incarnation)]))


@pytest.mark.parametrize(
    ("code", "answered"),
    [
        ("FAILED_PRECONDITION", 409),
        ("PERMISSION_DENIED", 409),
        ("ALREADY_EXISTS", 409),
        ("UNAVAILABLE", 503),
        ("ABORTED", 503),
        ("INTERNAL", 500),
        ("A_CODE_OF_LATER", 500),
    ],
)
def test_a_masters_failure_is_no_last_word(code: str, answered: int) -> None:
    """409 says that a milestone never counts, and its snapshot is deleted: only a refusal is answered so."""
    lessor = Lessor(RelayedRun(FILE, Master(code)))  # type: ignore[arg-type]
    made = pb.Milestone(repo="me/tune", revision="abc", step=40)
    with pytest.raises(LeaseRefused) as refused:
        asyncio.run(lessor.milestone(made))
    assert (refused.value.answer.code, refused.value.answer.body["detail"]) == (answered, "why")


@pytest.mark.parametrize("what", ["fence", "heard"])
def test_a_masters_failure_ends_no_lease(what: str) -> None:
    """What a worker hears of its lease, and who expires one, may ask again."""
    lessor = Lessor(RelayedRun(FILE, Master("INTERNAL")))  # type: ignore[arg-type]
    token = Token.drawn("my-run", bytes(RANDOM_BYTES))
    node = pb.NodeStatus(node="w1", incarnation=token.incarnation)
    heard = lessor._fence(node, "why") if what == "fence" else lessor._heard(token, "w1", pb.StatusRequest())
    with pytest.raises(LeaseRefused) as refused:
        asyncio.run(heard)
    assert refused.value.answer.code == 500
