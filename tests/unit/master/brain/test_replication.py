"""Which memory checkpoint nodes send to their buddies, and which one outlives the loss of a node."""

from __future__ import annotations

import pytest

from dalsegno.agent.commands.status import status_lines
from dalsegno.master.brain.state import Phase
from dalsegno.protos import control_pb2 as pb
from tests.support.jobs.masters import Driven, Node

from .test_memory import held, in_memory, joins, newcomer, parts, started, status


def told(node: Node, made: pb.Checkpoint, *of: int, unsent: bool = False) -> tuple[str, str, str]:
    """Says which parts it holds. The digests that it hears: what it sends, what was sent, what outlives a node."""
    request = pb.HeldRequest(caller=node.caller(), checkpoint=made, parts=of, unsent=unsent)
    reply = node.job.call(request)
    assert reply.code == "OK"
    assert isinstance(reply.message, pb.Ack)
    said = reply.message.replication
    assert said.epoch == node.job.epoch
    return said.sending, said.sent, said.replicated


def digests(*made: pb.Checkpoint | None) -> tuple[str, ...]:
    return tuple("" if one is None else one.ref.digest for one in made)


def test_all_nodes_send_the_same_step_and_then_the_newest() -> None:
    job, (one, two) = started(2)
    first = in_memory(job, 10)
    assert told(one, first, 0) == digests(first, None, None)
    assert told(two, first, 1) == digests(first, None, None)
    assert told(two, first, 0, 1) == digests(first, None, None)  # The other one's part is here; its own not there yet.
    second, third = in_memory(job, 20), in_memory(job, 30)
    for made in (second, third):
        assert told(one, made, 0) == told(two, made, 1) == digests(first, None, None)
    assert told(one, first, 0, 1) == digests(third, first, first)
    assert told(two, third, 0, 1) == digests(third, first, first)
    assert told(one, third, 0, 1) == digests(None, third, third)


def sent_by_chance(one: Node, two: Node, first: pb.Checkpoint, by_chance: pb.Checkpoint) -> None:
    """Each has both parts of both steps; only the first node has heard that the second step is chosen."""
    told(one, first, 0)
    told(two, first, 1)
    told(one, by_chance, 0, 1)
    told(two, by_chance, 0, 1)
    told(two, first, 0, 1)
    assert told(one, first, 0, 1) == digests(by_chance, first, first)


def test_nobody_is_told_that_a_step_outlives_a_node_before_each_has_heard_of_it() -> None:
    """While the master was away two nodes may have sent the same step by chance. Who has not heard may drop it."""
    job, (one, two) = started(2)
    first, by_chance = in_memory(job, 10), in_memory(job, 20)
    sent_by_chance(one, two, first, by_chance)
    assert told(two, by_chance) == digests(None, by_chance, first)  # Its own part is gone.


def test_a_part_that_cannot_be_sent_keeps_nobody_from_the_next_step() -> None:
    """What each node has a copy of stays known: it is older, and whole if any node is lost."""
    job, nodes = started(2)
    one, two = nodes
    whole = held(job, nodes, 10)
    assert told(one, whole, 0, 1) == digests(None, whole, whole)
    failed, following = in_memory(job, 20), in_memory(job, 30)
    told(one, failed, 0)
    told(two, failed, 0, 1)
    assert told(two, failed, 0, 1, unsent=True) == digests(None, failed, whole)
    assert told(one, following, 0) == digests(following, failed, whole)


def test_who_has_saved_a_later_step_only_is_not_waited_for() -> None:
    job, (one, two) = started(2)
    first, second = in_memory(job, 10), in_memory(job, 20)
    told(one, first, 0)
    assert told(two, second, 1) == digests(first, None, None)
    assert told(two, first, 0) == digests(second, first, None)


def test_a_part_that_is_gone_is_not_waited_for() -> None:
    job, (one, two) = started(2)
    first, second = in_memory(job, 10), in_memory(job, 20)
    for node, rank in ((one, 0), (two, 1)):
        told(node, first, rank)
        told(node, second, rank)
    assert told(one, first) == digests(first, None, None)
    assert told(two, first) == digests(second, first, None)


def test_what_is_on_the_disk_is_not_waited_for() -> None:
    job, (one, two) = started(2)
    first = in_memory(job, 10)
    told(one, first, 0)
    told(two, first, 1)
    one.save(15, any_size=True)
    second = in_memory(job, 20)
    assert told(one, second, 0) == digests(second, None, None)


def test_a_step_that_outlives_a_node_is_remembered_and_gone_back_to() -> None:
    """However many newer ones are in memory, of which the lost node had the only copy of its part."""
    job, nodes = started(3)
    nodes[0].save(5, any_size=True)
    safe = held(job, nodes, 10)
    for step in range(11, 40):
        made = in_memory(job, step)
        for rank, node in enumerate(nodes):
            node.holds(made, rank)
    nodes[0].step(40)
    lines = status_lines(status(job))
    assert f"  held on enough nodes for the loss of one: {safe.ref.name}" in lines
    nodes[1].hang_up()
    job.wait(1.5)
    assert nodes[0].directive.gather.resume.name == safe.ref.name
    assert set(parts(nodes[0])) == {0, 1, 2}
    joins(job, nodes[0], nodes[2], sees=safe)
    job.wait(2)
    assert job.phase is Phase.RUNNING
    assert nodes[0].directive.run.resume.source.step == 10


@pytest.mark.parametrize("seconds", [2.0, 0.2])
def test_people_hear_once_that_replicas_do_not_keep_up(seconds: float) -> None:
    """Where it costs anything: steps of milliseconds outrun any network."""
    job, (one, two) = started(2)
    line = "memory checkpoints are made faster than they reach a second node"
    newest = in_memory(job, 10)
    for node, rank in ((one, 0), (two, 1)):
        told(node, newest, rank)
    for step in range(20, 90, 10):
        assert (job.notices.count(line) > 0) == (step > 40 and seconds > 1)
        sent, newest = newest, in_memory(job, step)
        job.now += seconds
        told(one, newest, 0)
        told(two, newest, 1)
        told(one, sent, 0, 1)
        told(two, sent, 0, 1)
    assert job.notices.count(line) == (seconds > 1)
    if seconds > 1:
        assert "(step-30.e1.1 took 2.0 s): the loss of a node costs the steps of up to 4.0 s" in job.notices


def test_a_buddy_that_takes_nothing_makes_no_network_too_slow() -> None:
    """Its own line has the cause, and no bandwidth would help."""
    job, (one, two) = started(2)
    newest = in_memory(job, 10)
    for node, rank in ((one, 0), (two, 1)):
        told(node, newest, rank)
    for step in range(20, 90, 10):
        sent, newest = newest, in_memory(job, step)
        job.now += 2.0
        told(one, newest, 0)
        told(two, newest, 1)
        told(two, sent, 0, 1)
        assert told(two, sent, 0, 1, unsent=True)[0] == newest.ref.digest
    assert "memory checkpoints are made faster" not in job.notices


def test_a_leaver_waits_until_a_new_master_has_heard_all_that_it_holds() -> None:
    """Its drain may be on the record of the old one already, and what it holds is not."""
    job, nodes = started(3)
    nodes[0].save(5, any_size=True)
    made = in_memory(job, 10)
    nodes[2].leave(60)
    for rank, node in enumerate(nodes):
        node.holds(made, rank)
    nodes[2].drained(10, digest=made.ref.digest)
    job.restart()
    nodes[2].beat()
    assert nodes[2].order == "wait"
    nodes[2].has_told_all()
    assert nodes[2].order == "release"


def test_a_new_epoch_begins_anew() -> None:
    job, nodes = started(2)
    made = held(job, nodes, 10)
    newcomer(job).join()
    for node in nodes[:2]:
        node.drained(10, digest=made.ref.digest)
    job.wait(1)
    for node in job.nodes:
        joins(job, node, sees=made)
    job.wait(2)
    assert job.phase is Phase.RUNNING
    assert job.epoch == 2
    following = in_memory(job, 20)
    assert told(job.nodes[0], following, 0) == digests(following, None, None)


def beats(node: Node) -> pb.Replication | None:
    """What a sign of life is answered."""
    message = node.beat().message
    assert isinstance(message, pb.Ack)
    return message.replication if message.HasField("replication") else None


def test_who_says_nothing_of_its_memory_hears_with_its_next_sign_of_life() -> None:
    """In a long evaluation nobody saves: the last steps that were saved before it are sent all the same."""
    job, (one, two) = started(2)
    first, second, third = (in_memory(job, step) for step in (10, 20, 30))
    for made in (first, second, third):
        told(one, made, 0)
        told(two, made, 1)
    assert beats(one) is beats(two) is None
    told(two, first, 0, 1)
    assert told(one, first, 0, 1) == digests(third, first, first)
    said = beats(two)
    assert said is not None
    assert (said.sending, said.epoch) == (third.ref.digest, 1)
    assert beats(two) is beats(one) is None


def test_a_step_that_was_waiting_for_the_last_one_to_hear_of_it_is_followed_by_the_next() -> None:
    job, (one, two) = started(2)
    first, by_chance, third = (in_memory(job, step) for step in (10, 20, 30))
    sent_by_chance(one, two, first, by_chance)
    assert told(one, third, 0) == digests(by_chance, first, first)
    said = beats(two)
    assert said is not None
    assert (said.sending, said.sent, said.replicated) == digests(third, by_chance, by_chance)


def follow(job: Driven, nodes: list[Node], *steps: int) -> int:
    """Each node saves these, and says so. Returns the step that is sent then."""
    for step in steps:
        made = in_memory(job, step)
        for rank, node in enumerate(nodes):
            told(node, made, rank)
    sending = job.state.live.held.replicas.sending
    assert sending is not None
    return sending.step.record.step


def test_a_part_of_which_was_said_before_that_it_cannot_be_sent_is_not_waited_for() -> None:
    """To a new master, or by a node that had sent its newest by itself."""
    job, nodes = started(2)
    made = in_memory(job, 10)
    job.restart()
    for rank, node in enumerate(nodes):
        node.beat()
        told(node, made, rank, unsent=True)
    assert follow(job, nodes, 20, 30) == 20


def test_a_part_that_was_gone_before_its_step_was_chosen_is_not_waited_for() -> None:
    job, nodes = started(3)
    first, damaged = in_memory(job, 10), in_memory(job, 20)
    for made in (first, damaged):
        for rank, node in enumerate(nodes):
            told(node, made, rank)
    told(nodes[0], damaged)
    for rank, node in enumerate(nodes):
        told(node, first, rank, (rank - 1) % 3)
    told(nodes[1], damaged, 1)
    told(nodes[2], damaged, 2, 1)
    told(nodes[2], damaged, 2, 1, unsent=True)
    assert follow(job, nodes, 30, 40) > 20


def test_what_nobody_hears_more_of_holds_up_the_others_for_a_time_only() -> None:
    """For longer each time: a large part over a slow network is not heard of either until it has come."""
    job, nodes = started(2)
    assert follow(job, nodes, 10, 20) == 10
    job.now += 55.0
    assert follow(job, nodes, 30) == 10
    job.now += 10.0
    assert follow(job, nodes, 40) == 40
    job.now += 65.0
    assert follow(job, nodes, 50) == 40
    job.now += 60.0
    assert follow(job, nodes, 60) == 60
    for rank, node in enumerate(nodes):
        told(node, in_memory(job, 60), rank, 1 - rank)
    assert told(nodes[0], in_memory(job, 70), 0)[2] == in_memory(job, 60).ref.digest
