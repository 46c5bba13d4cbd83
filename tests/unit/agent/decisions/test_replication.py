"""What a node sends to its buddies, and which steps in memory it keeps for the loss of another node."""

from __future__ import annotations

import pytest

from dalsegno.agent.decisions import events as ev
from dalsegno.protos import control_pb2

from .test_decisions import Agent
from .test_memory import kept, step_of


def running() -> Agent:
    return Agent().registered().running()


def held(agent: Agent, *steps: int, parts: tuple[int, ...] = (0,), epoch: int = 1) -> None:
    for step in steps:
        agent.hear(ev.HeldChanged(step_of(step, epoch), parts))


def answered(
    agent: Agent,
    answers: int,
    sending: int = 0,
    sent: int = 0,
    replicated: int = 0,
    epoch: int = 1,
    generation: int = 1,
) -> None:
    """The master answers; a 0 names no step."""
    digests = [f"d{step}" if step else "" for step in (sending, sent, replicated)]
    said = control_pb2.Replication(epoch=epoch, sending=digests[0], sent=digests[1], replicated=digests[2])
    agent.hear(ev.Replication(f"d{answers}", generation, said))


def sent(agent: Agent) -> list[str]:
    return [action.digest for action in agent.did(ev.SendPart)]


def test_the_part_is_sent_that_the_master_names() -> None:
    agent = running()
    held(agent, 10)
    assert not sent(agent)
    answered(agent, 10, sending=10)
    held(agent, 20, 30)
    answered(agent, 20, sending=10)
    answered(agent, 30, sending=10)
    assert sent(agent) == ["d10"]
    answered(agent, 10, sending=30, sent=10, replicated=10)
    assert sent(agent) == ["d10", "d30"]


def test_a_part_that_comes_late_is_sent_as_it_comes() -> None:
    """A buddy's part of the step was here first."""
    agent = running()
    held(agent, 10, parts=(1,))
    answered(agent, 10, sending=10)
    assert not sent(agent)
    held(agent, 10, parts=(0, 1))
    answered(agent, 10, sending=10)
    assert sent(agent) == ["d10"]


def test_a_master_that_names_none_leaves_it_to_the_node() -> None:
    agent = running()
    held(agent, 10)
    agent.hear(ev.Replication("d10", 1, None))
    assert sent(agent) == ["d10"]


def test_what_was_said_of_an_older_epoch_counts_no_more() -> None:
    agent = running()
    held(agent, 10)
    answered(agent, 10, sending=10, replicated=10, epoch=0)
    assert not sent(agent)
    assert kept(agent) == set()


def test_without_the_master_the_newest_part_is_sent() -> None:
    agent = running()
    held(agent, 10, 20)
    agent.hear(ev.LinkChanged(False))
    assert sent(agent) == ["d20"]
    held(agent, 30)
    assert sent(agent) == ["d20", "d30"]
    held(agent, 30, parts=(0, 1))
    agent.hear(ev.LinkChanged(True))
    held(agent, 40)
    assert set(sent(agent)) == {"d20", "d30"}


def test_what_outlives_a_node_is_kept_until_something_newer_does() -> None:
    agent = running()
    held(agent, 10)
    answered(agent, 10, sending=10)
    held(agent, 20, 30)
    answered(agent, 20, sending=10)
    answered(agent, 30, sending=10)
    assert kept(agent) == {"d10"}
    answered(agent, 10, sending=30, sent=10, replicated=10)
    assert kept(agent) == {"d10", "d30"}
    answered(agent, 30, sending=0, sent=30, replicated=30)
    assert kept(agent) == {"d30"}


def test_what_could_not_be_sent_to_all_does_not_take_its_place() -> None:
    agent = running()
    held(agent, 10, 20, 30)
    for step in (10, 20, 30):
        answered(agent, step, sending=30, sent=20, replicated=10)
    assert kept(agent) == {"d10", "d20", "d30"}
    answered(agent, 30, sent=30, replicated=10)
    assert kept(agent) == {"d10", "d30"}


def test_a_new_master_takes_nothing_away() -> None:
    """It hears of steps one by one. What the old one had sent last may outlive a node, as others were told."""
    agent = running()
    held(agent, 10, 20)
    for step in (10, 20):
        answered(agent, step, sending=20, sent=10, replicated=10)
    held(agent, 30)
    answered(agent, 30, sending=30, generation=2)
    assert kept(agent) == {"d10", "d20", "d30"}
    answered(agent, 30, sending=30, sent=10, replicated=10, generation=2)
    assert kept(agent) == {"d10", "d20", "d30"}
    answered(agent, 30, sent=30, replicated=30, generation=2)
    assert kept(agent) == {"d30"}


@pytest.mark.parametrize(
    "late", [{}, {"sending": 10}, {"sent": 10, "replicated": 10}, {"sending": 30, "generation": 1}]
)
def test_an_answer_that_was_overtaken_takes_nothing_away(late: dict[str, int]) -> None:
    """A node has several calls under way, and drops what is not named. The step that is sent may be whole by then."""
    agent = running()
    held(agent, 10)
    answered(agent, 10, sending=10, generation=2)
    held(agent, 20, 30)
    answered(agent, 20, sending=20, sent=10, replicated=10, generation=2)
    agent.hear(ev.Replication("d30", 2, None))
    answered(agent, 0, **({"generation": 2} | late))
    assert {"d20", "d10"} <= kept(agent)
    assert sent(agent) == ["d10", "d20", "d30"]
    answered(agent, 0, sent=20, replicated=20, generation=2)
    assert kept(agent) >= {"d20"}
    assert "d10" not in kept(agent)


def test_masters_that_come_and_go_do_not_fill_the_memory() -> None:
    agent = running()
    for number in range(1, 50):
        held(agent, 10 * number)
        answered(agent, 10 * number, sending=10 * number, generation=number)
    assert kept(agent) == {f"d{10 * number}" for number in range(45, 50)}


def test_what_the_master_was_told_of_is_kept_until_it_answers() -> None:
    """It may choose that. Behind a long silence only the first of many is: the call that is under way tells of it."""
    agent = running()
    held(agent, 10, 20, 30)
    assert kept(agent) == {"d10"}
    answered(agent, 10)
    assert kept(agent) == {"d20"}


def test_a_step_on_the_disk_needs_no_copies() -> None:
    agent = running()
    held(agent, 10)
    answered(agent, 10, sending=0, sent=10, replicated=10)
    assert kept(agent) == {"d10"}
    on_disk = step_of(10)
    on_disk.in_memory = False
    agent.directed(head=on_disk)
    assert kept(agent) == set()


def test_a_part_that_cannot_be_sent_is_told() -> None:
    agent = running()
    held(agent, 10)
    before = len(agent.calls("ReportHeld"))
    agent.hear(ev.HeldChanged(step_of(10), (0,), unsent=True))
    agent.hear(ev.HeldChanged(step_of(10), (0,), unsent=True))
    told = agent.calls("ReportHeld")[before:]
    assert [(call.checkpoint.ref.digest, call.unsent) for call in told] == [("d10", True)]


def test_an_answer_says_that_what_was_told_before_gets_none() -> None:
    """A call that the master could not carry out is given up in the end."""
    agent = running()
    held(agent, 10, 20)
    answered(agent, 20)
    held(agent, 30)
    assert kept(agent) == {"d30"}


def test_settings_that_come_into_force_later() -> None:
    """A node whose own flags ask for no copies, in a job that wants them, says all that it holds, too."""
    agent = running()
    assert not [call for call in agent.calls("ReportHeld") if call.all]
    agent.directed(settings=control_pb2.Settings(memory_replicas=1))
    agent.directed(settings=control_pb2.Settings(memory_replicas=1))
    assert len([call for call in agent.calls("ReportHeld") if call.all]) == 1
