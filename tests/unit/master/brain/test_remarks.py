"""What agents say about their own nodes becomes events, few however many say the same."""

from __future__ import annotations

from dalsegno.master.brain.chronicle import EVENTS, REMARKS, JobEvent, in_order
from dalsegno.master.brain.remarks import LINES_OF_NODE, MINUTE_SECONDS, MOST_LINES, TOGETHER_SECONDS
from dalsegno.protos import control_pb2
from tests.support.jobs.masters import Driven, Node, settings


def says(node: Node, text: str, *, warning: bool = True) -> None:
    reply = node.job.call(control_pb2.RemarkRequest(caller=node.caller(), text=text, warning=warning))
    assert reply.code == "OK"


def quoted(job: Driven) -> list[str]:
    return [event.text for event in job.job.remarks]


def test_a_line_is_an_event_at_once_and_for_no_other_console() -> None:
    """Its own console has shown it, and others' need not."""
    job = Driven()
    nodes = job.start(2)
    before, noticed = job.job.sequence, job.notices
    says(nodes[0], "saving step-7 failed (disk full); training goes on")
    (event,) = job.job.remarks
    assert event.text == f"{nodes[0].name}: saving step-7 failed (disk full); training goes on"
    assert (event.sequence, event.nodes, event.warning, event.said) == (before + 1, (nodes[0].name,), True, False)
    assert event.epoch == job.epoch
    assert job.notices == noticed


def test_many_who_say_the_same_are_quoted_together() -> None:
    """The first at once, the others in one event when their time is over; then it begins anew."""
    job = Driven(settings=settings(max_nodes=6))
    nodes = job.start(6)
    for node in nodes:
        says(node, "the file system is slow")
    assert quoted(job) == [f"{nodes[0].name}: the file system is slow"]
    job.wait(TOGETHER_SECONDS + 0.1)
    first, second = job.job.remarks
    assert second.text.endswith(" and 2 more: the file system is slow")
    assert second.nodes == tuple(node.name for node in nodes[1:])
    job.wait(TOGETHER_SECONDS + 0.1)
    assert job.job.remarks == (first, second)
    says(nodes[1], "the file system is slow")
    assert quoted(job)[-1] == f"{nodes[1].name}: the file system is slow"


def test_the_same_words_as_a_warning_are_another_line() -> None:
    job = Driven()
    nodes = job.start(2)
    says(nodes[0], "it waits")
    says(nodes[1], "it waits", warning=False)
    assert [event.warning for event in job.job.remarks] == [True, False]


def test_a_node_that_says_too_much_is_not_quoted_for_the_rest_of_a_minute() -> None:
    """That is said once; others are not affected."""
    job = Driven()
    nodes = job.start(2)
    for number in range(LINES_OF_NODE + 30):
        says(nodes[0], f"line {number}")
    assert len(quoted(job)) == LINES_OF_NODE + 1
    assert quoted(job)[-1] == (
        f"{nodes[0].name}: it says more than a person could read; the rest of this minute is in its console and its log"
    )
    says(nodes[1], "mine")
    assert quoted(job)[-1] == f"{nodes[1].name}: mine"
    job.wait(MINUTE_SECONDS)
    says(nodes[0], "another minute")
    assert quoted(job)[-1] == f"{nodes[0].name}: another minute"


def test_they_push_out_nothing_else() -> None:
    """They have a place of their own, and what waits to be quoted together is bounded, too."""
    job = Driven()
    nodes = job.start(2)
    events = job.job.events
    for number in range(2 * max(REMARKS, MOST_LINES)):
        if not number % LINES_OF_NODE:
            job.state.live.nodes[nodes[0].name].lines_until = 0.0
        says(nodes[0], f"line {number}")
        assert len(job.state.live.lines) <= MOST_LINES
    assert job.job.events == events
    assert len(events) < EVENTS
    assert len(job.job.remarks) == REMARKS


def test_a_stranger_is_not_quoted() -> None:
    """Only who registered speaks."""
    job = Driven()
    (node,) = job.start(1)
    caller = node.caller()
    caller.secret = b"x" * 16
    reply = job.call(control_pb2.RemarkRequest(caller=caller, text="all is lost"))
    assert reply.code == "PERMISSION_DENIED"
    says(node, "")
    assert quoted(job) == []


def test_they_are_on_the_record() -> None:
    """A new master has them; rows of those that were dropped go."""
    job = Driven()
    (node,) = job.start(1)
    for number in range(REMARKS + 3):
        job.state.live.nodes[node.name].lines_until = 0.0
        says(node, f"line {number}")
    assert sum(key.startswith("remark/") for key in job.rows) == REMARKS
    job.restart()
    assert quoted(job) == [f"{node.name}: line {number}" for number in range(3, REMARKS + 3)]


def test_both_kinds_are_shown_in_order() -> None:
    events = tuple(JobEvent(number, "") for number in (1, 3, 4))
    assert [event.sequence for event in in_order(events, (JobEvent(2, ""), JobEvent(5, "")))] == [1, 2, 3, 4, 5]
    assert in_order(events, ()) == events
