"""What an agent says about its own node becomes an event of the job."""

from __future__ import annotations

import pytest

from dalsegno.agent.decisions import events as ev
from dalsegno.agent.decisions.quotes import QUOTES, QUOTES_SECONDS
from dalsegno.protos import control_pb2

from .test_decisions import ME, Agent


def texts(agent: Agent) -> list[str]:
    return [quote.text for quote in agent.quotes]


def test_a_line_of_its_own_is_told() -> None:
    """With its colour, and who speaks."""
    agent = Agent().registered().running()
    agent.hear(ev.Remark("the script saves nothing"), ev.Remark("it takes long", warning=False))
    assert [(quote.text, quote.warning) for quote in agent.quotes] == [
        ("the script saves nothing", True),
        ("it takes long", False),
    ]
    assert agent.quotes[0].caller.epoch == 1


def test_what_the_master_said_does_not_come_back() -> None:
    """Its notices are events already."""
    agent = Agent().registered().running()
    agent.directed(notices=[control_pb2.Notice(sequence=1, text="before")])
    agent.directed(notices=[control_pb2.Notice(sequence=2, text="epoch 2 is open")])
    assert "epoch 2 is open" in [said.text for said in agent.did(ev.Say)]
    assert agent.quotes == []


def test_the_masters_silence_is_no_event_of_it() -> None:
    """A thousand agents say so at once, and again when it is back."""
    agent = Agent().registered().running()
    agent.hear(ev.LinkChanged(False), ev.LinkChanged(True))
    assert len(agent.did(ev.Say)) == 2
    assert agent.quotes == []


def test_nobody_is_told_before_a_registration_or_after_the_end() -> None:
    """A call needs an incarnation."""
    agent = Agent()
    agent.hear(ev.Started(), ev.Postponed("the job is full"))
    agent.hear(ev.Registered(ME, control_pb2.RegisterReply(generation=1, node="me", run_id="run-0001")))
    assert agent.did(ev.Say)
    assert agent.quotes == []


def test_it_is_told_within_measure() -> None:
    """A line that comes again and again must not fill the queue of calls, above all while the master is away."""
    agent = Agent().registered().running()
    agent.hear(*[ev.Remark(f"line {number}") for number in range(QUOTES + 5)])
    assert len(texts(agent)) == QUOTES
    agent.waits(QUOTES_SECONDS + 1)
    agent.hear(ev.Remark("later"))
    assert texts(agent)[-1] == "later"
    agent.hear(ev.LinkChanged(False))
    for _ in range(5):
        agent.waits(QUOTES_SECONDS + 1)
        agent.hear(*[ev.Remark(f"line {number}") for number in range(QUOTES)])
    assert len(texts(agent)) == 2 * QUOTES


@pytest.mark.parametrize("method", ["ReportRemark", "ReportHeld", "ReportDurable", "ReportShortage"])
def test_an_older_master_does_not_know_the_call(method: str) -> None:
    """Training goes on without what it is for; the line of a remark was said here."""
    agent = Agent().registered().running()
    assert agent.hear(ev.CallFailed(method, "UNIMPLEMENTED", "Method not found!")) == []
    agent.hear(ev.CallFailed(method, "NOT_FOUND", "declared dead"))
    assert agent.state.fenced


def test_what_is_megabytes_long_is_told_cut() -> None:
    """The master takes no such call, and all later ones waited behind it."""
    agent = Agent().registered().running()
    agent.hear(ev.Remark("x" * (2 << 20)), ev.WorkerExited(1, 0, 1, "y" * (2 << 20)))
    (failure,) = agent.calls("ReportFailure")
    assert failure.message.startswith("local rank 0 exited with code 1: yyyy")
    assert failure.ByteSize() < 5000
    assert all(quote.ByteSize() < 5000 for quote in agent.quotes)
