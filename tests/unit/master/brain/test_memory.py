"""Memory checkpoints: which step the run goes on from, who stays for it, and who writes it to the disk."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from dalsegno.agent.commands.status import status_lines
from dalsegno.master.brain import brain, shown
from dalsegno.master.brain.doubts import LOOKED_AT_SECONDS, MOST_DOUBTS
from dalsegno.master.brain.durable import ASKED_AGAIN_SECONDS
from dalsegno.master.brain.events import Called, StreamOpened
from dalsegno.master.brain.memory import (
    LOOK_WITHIN_SECONDS,
    LOST_AFTER_SECONDS,
    TOLD_WITHIN_SECONDS,
    to_memory,
)
from dalsegno.master.brain.state import Phase
from dalsegno.master.brain.views import Common
from dalsegno.protos import control_pb2 as pb
from tests.support.jobs.masters import Driven, Node, settings


def started(count: int = 2, **fields: Any) -> tuple[Driven, list[Node]]:
    """A world whose nodes can be reached; each on a host of its own, unless `fields` say otherwise."""
    job = Driven(settings(**({"memory_replicas": 1, "universal_checkpoint": False} | fields)))
    nodes = [newcomer(job) for _ in range(count)]
    for node in nodes:
        node.join()
    job.wait(1.1)
    assert job.phase is Phase.RUNNING
    return job, nodes


def newcomer(job: Driven, host: str = "") -> Node:
    number = len(job.nodes)
    return job.node(host=host or f"host-{number}", peer_address=f"10.0.0.{number}:7")


def in_memory(job: Driven, step: int, **shape: Any) -> pb.Checkpoint:
    """Saved by the open world's ranks, each node's part on that node."""
    made = job.seal(step, **({"any_size": True} | shape))
    job.sealed.remove(made)
    made.in_memory = True
    return made


def joins(job: Driven, *nodes: Node, sees: pb.Checkpoint | None = None) -> None:
    for node in nodes:
        node.join(sees=[*job.sealed, *([sees] if sees is not None else [])])


def status(job: Driven) -> pb.StatusReply:
    return shown.status(job.state, job.now)


def held(job: Driven, nodes: list[Node], step: int, **shape: Any) -> pb.Checkpoint:
    """Each node has its own part, and that of the node before."""
    made = in_memory(job, step, **shape)
    for rank, node in enumerate(nodes):
        node.holds(made, rank, (rank - 1) % len(nodes))
    return made


def drained_alone(job: Driven, nodes: list[Node]) -> pb.Checkpoint:
    """All ranks have drained behind step 7, each node's part on that node alone."""
    made = in_memory(job, 7)
    for rank, node in enumerate(nodes):
        node.holds(made, rank)
        node.drained(7, digest=made.ref.digest)
    return made


def half_written() -> tuple[Driven, list[Node]]:
    """Of two nodes one has left and written its part of step 7 to the disk, where a commit of step 5 is."""
    job, nodes = started(2)
    nodes[0].save(5, any_size=True)
    nodes[0].step(6)
    nodes[1].leave()
    made = drained_alone(job, nodes)
    nodes[1].wrote(made, 1)
    nodes[1].goodbye()
    return job, nodes


def forgotten() -> tuple[Driven, list[Node]]:
    """The same, and another master has never heard of what was written."""
    job, nodes = half_written()
    job.restart()
    nodes[0].holds(in_memory_again(job), 0)
    nodes[0].has_told_all()
    return job, nodes


def parts(node: Node) -> dict[int, list[str]]:
    """Where a node is told that the parts of the resume point are."""
    directive = node.directive
    told = directive.gather.parts if node.order == "gather" else directive.wait.parts
    return {part.group_rank: list(part.addresses) for part in told}


def test_a_lost_node_costs_the_steps_behind_the_last_held_one() -> None:
    job, nodes = started(3)
    nodes[0].save(10, any_size=True)
    made = held(job, nodes, 20)
    nodes[0].step(27)
    nodes[1].hang_up()
    job.wait(1.5)
    assert nodes[0].directive.gather.resume.name == made.ref.name
    assert parts(nodes[2]) == {0: ["10.0.0.0:7"], 1: ["10.0.0.2:7"], 2: ["10.0.0.2:7", "10.0.0.0:7"]} or parts(
        nodes[2]
    ) == {0: ["10.0.0.0:7"], 1: ["10.0.0.2:7"], 2: ["10.0.0.0:7", "10.0.0.2:7"]}
    joins(job, nodes[0], sees=made)
    job.wait(2)
    assert job.phase is Phase.FORMING  # The other one has not got all parts yet.
    joins(job, nodes[2], sees=made)
    job.wait(2)
    assert job.phase is Phase.RUNNING
    world = nodes[0].directive.run
    assert world.resume.source.in_memory
    assert world.resume.source.step == 20


def test_people_see_what_is_in_memory_alone() -> None:
    """What a crash would go on from; what a run went on from, until it is on the disk; and that it has come there."""
    job, nodes = started(2)
    assert not status(job).HasField("held")
    nodes[0].save(10, any_size=True)
    alone = in_memory(job, 15)
    nodes[0].holds(alone, 0)
    assert not status(job).HasField("held")  # Some part of it is nowhere yet.
    made = held(job, nodes, 20)
    nodes[0].step(27)
    assert (status(job).head.step, status(job).held.step) == (10, 20)
    assert f"  held in memory: {made.ref.name}, 0.0 MB, each part on 2 nodes" in status_lines(status(job))
    nodes[1].holds(made, 0, 1)
    nodes[0].holds(made, 0)
    assert f"  held in memory: {made.ref.name}, 0.0 MB, some part on one node only" in status_lines(status(job))
    nodes[0].holds(made, 0, 1)
    nodes[1].hang_up()
    job.wait(1.5)
    joins(job, nodes[0], sees=made)
    nodes[0].holds(made, 0, 1)
    job.wait(2)
    nodes[0].step(21)
    assert f"  newest commit: {made.ref.name}, 0.0 MB, in memory and not yet on the disk" in status_lines(status(job))
    nodes[0].durable()
    assert f"  newest commit: {made.ref.name}, 0.0 MB" in status_lines(status(job))
    assert not status(job).HasField("held")
    told = [event.text for event in job.job.events if event.checkpoint == made.ref.name]
    assert told == [f"{made.ref.name} is committed in memory", f"{made.ref.name} is on the disk"]


@pytest.mark.parametrize(
    ("saves", "lines"),
    [
        ("before", ["{}: boom", "{}: boom", "{}: boom"]),
        ("survivors", ["{}: boom", "{}: failed as before", "{}: failed as before"]),
        ("nothing", ["{}: boom", "{}: failed as before, attempt 2 of 2"]),
    ],
)
def test_steps_that_are_held_are_progress(saves: str, lines: list[str]) -> None:
    """Failures count as those without progress if none was made; the disk has nothing new all the while.

    What survivors save is not known yet when people are told of the failure.
    """
    job, nodes = started(2, max_restarts=1)
    step, kept, told = 3, held(job, nodes, 3), list[str]()
    nodes[0].step(step)
    for _ in lines:
        for node in nodes:
            node.failed("boom")
        if saves == "survivors" and step > 3:
            kept = held(job, nodes, step)
        joins(job, *nodes, sees=kept)
        told += [line for line in job.notices.splitlines() if line.startswith(f"{nodes[0].name}: ")][len(told) :]
        job.wait(5)
        if job.has_failed:
            break
        step += 10 * (saves != "nothing")
        nodes[0].step(step)
        if saves == "before":
            kept = held(job, nodes, step - 1)
    assert [line.split("; ")[0] for line in told] == [line.format(nodes[0].name) for line in lines]
    assert job.has_failed is (saves == "nothing")


@pytest.mark.parametrize("then", ["finishes", "steps", "leaves", "was saved before"])
def test_a_failure_in_the_last_step_that_nobody_does_again_is_told(then: str) -> None:
    """Who survived has saved that step, so the next world has nothing to do; with a step behind it that is old news.

    What failed behind the loop, where that step is saved as ever, the script does again.
    """
    job, nodes = started(2)
    nodes[0].step(30)
    for node in nodes:
        node.failed("boom")
    kept = in_memory(job, 30)
    if then != "was saved before":
        kept.ref.name = "step-30.e1.1000"
    for rank, node in enumerate(nodes):
        node.holds(kept, rank, 1 - rank)
    joins(job, *nodes, sees=kept)
    last = 30
    if then in ("steps", "leaves"):
        nodes[0].step(last := 31)
    if then == "leaves":
        kept = held(job, nodes, 31)
        nodes[1].hang_up()
        job.wait(2)
        joins(job, nodes[0], sees=kept)
    stay = nodes[: 1 if then == "leaves" else 2]
    for node in stay:
        node.finished(last)
    for node in (*stay, stay[0]):
        if node.directive.make_durable.ref.digest:
            node.durable()
    assert job.phase is Phase.SUCCEEDED
    assert nodes[0].directive.finish.message == f"the run finished at step {last}"
    told = [line for line in job.notices.splitlines() if "was not done again" in line]
    assert [line.split(": ", 1)[1] for line in told] == (["boom"] if then == "finishes" else []), told


def test_a_step_of_which_a_part_is_nowhere_is_none_to_go_on_from() -> None:
    job, nodes = started(3)
    nodes[0].save(10, any_size=True)
    old = held(job, nodes, 20)
    new = in_memory(job, 30)
    nodes[0].holds(new, 0)
    nodes[1].holds(new, 1)  # It has not sent it to anybody yet.
    nodes[2].holds(new, 2)
    nodes[1].hang_up()
    job.wait(1.5)
    assert nodes[0].directive.gather.resume.name == old.ref.name


def test_a_part_that_is_lost_while_nodes_gather_takes_the_run_back_to_the_disk() -> None:
    job, nodes = started(3)
    durable = nodes[0].save(10, any_size=True)
    made = held(job, nodes, 20)
    nodes[1].hang_up()
    job.wait(1.5)
    nodes[2].hang_up()  # It had parts 1 and 2, and the last node has not fetched them yet.
    job.wait(8)
    joins(job, nodes[0])
    nodes[0].durable(absent=True)
    job.wait(2)
    assert nodes[0].directive.run.resume.source.ref.name == durable.ref.name
    assert f"{made.ref.name} was in memory only, and the nodes that held a part of it are gone" in job.notices
    assert f"going back to {durable.ref.name}" in job.notices


def test_an_older_step_in_memory_is_named_where_the_run_goes_back_to_it() -> None:
    """And not the one on the disk, from which nobody goes on."""
    job, nodes = started(3)
    nodes[0].save(10, any_size=True)
    older = held(job, nodes, 20)
    newer = in_memory(job, 30)
    for rank, node in enumerate(nodes):
        node.holds(newer, rank)
    nodes[1].failed()
    job.wait(1.5)
    assert nodes[0].directive.gather.resume.name == newer.ref.name
    nodes[1].hang_up()
    job.wait(1.5)
    for _ in range(2):
        joins(job, nodes[0], nodes[2])
        job.wait(4)
        for node in (nodes[0], nodes[2]):
            if node.directive.HasField("make_durable"):
                node.durable(absent=True)
    assert f"{newer.ref.name} was in memory only, and the nodes that held a part of it are gone" in job.notices
    assert f"going back to {older.ref.name}" in job.notices
    assert "going back to step-10" not in job.notices


def test_nobody_writes_what_is_lost_with_its_holders() -> None:
    """A node that could not fetch it just then is walled off from nobody, and the others' parts are of no use."""
    job, nodes = started(3)
    durable = nodes[0].save(10, any_size=True)
    made = held(job, nodes, 20)
    nodes[1].hang_up()
    job.wait(1.5)
    nodes[2].hang_up()
    job.wait(1.5)
    joins(job, nodes[0])
    job.wait(1.0)
    assert not nodes[0].directive.HasField("make_durable")
    joins(job, nodes[0])
    job.wait(4)
    nodes[0].durable(absent=True)
    joins(job, nodes[0])
    job.wait(2)
    assert nodes[0].directive.run.resume.source.ref.name == durable.ref.name
    assert "cannot fetch" not in job.notices
    assert f"{made.ref.name} was in memory only, and the nodes that held a part of it are gone" in job.notices


def test_what_older_epochs_held_counts_no_more() -> None:
    job, nodes = started(2)
    late = in_memory(job, 20)
    nodes[0].holds(late, 0)
    nodes[1].failed()
    nodes[0].step(21)
    job.wait(1)
    joins(job, *nodes)
    job.wait(1)
    assert job.epoch == 2
    nodes[1].holds(late, 1)
    nodes[0].holds(late, 0, 1)
    nodes[1].failed()
    job.wait(1)
    assert not nodes[0].directive.gather.HasField("resume")


def test_only_a_member_brings_a_step_up() -> None:
    job, nodes = started(2)
    made = in_memory(job, 20)
    stranger = newcomer(job)
    stranger.holds(made, 0, 1)
    nodes[1].failed()
    job.wait(0.5)
    assert not nodes[0].directive.gather.HasField("resume")


def test_nothing_older_than_a_commit_counts() -> None:
    job, nodes = started(2)
    made = held(job, nodes, 20)
    durable = nodes[0].save(25)
    nodes[1].failed()
    job.wait(0.5)
    assert nodes[0].directive.gather.resume.name == durable.ref.name
    assert job.job.checkpoint(made.ref.digest) is None


def drained_into_memory(job: Driven, nodes: list[Node], step: int, **shape: Any) -> pb.Checkpoint:
    made = held(job, nodes, step, **shape)
    for node in nodes:
        node.drained(step, digest=made.ref.digest)
    return made


def test_a_planned_change_goes_through_memory_and_is_made_durable_behind() -> None:
    job, nodes = started(2)
    before = nodes[0].save(5)
    for node in nodes:
        node.step(6)
    new = newcomer(job)
    new.join()
    new.warm()
    assert job.phase is Phase.DRAINING
    assert nodes[0].directive.drain.to_memory
    for node in nodes:
        node.step(7, draining=True)
    made = drained_into_memory(job, nodes, 7)
    assert job.phase is Phase.FORMING
    joins(job, *nodes, new, sees=made)
    assert job.phase is Phase.RUNNING
    assert new.directive.run.resume.source.step == 7
    for node in (*nodes, new):
        node.holds(made, 0, 1)
        assert not node.directive.make_durable.ref.digest  # The first step comes first.
    nodes[0].step(8)
    assert [node.directive.make_durable.ref.name for node in (*nodes, new)] == [made.ref.name, "", ""]
    nodes[0].durable("no space left on the device")
    assert [node.directive.make_durable.ref.name for node in (*nodes, new)] == ["", made.ref.name, ""]
    nodes[1].durable()
    assert not nodes[1].directive.make_durable.ref.digest
    assert not job.job.checkpoint(made.ref.digest).parts  # type: ignore[union-attr]
    assert nodes[0].directive.head.ref.name == made.ref.name
    assert not nodes[0].directive.head.in_memory
    assert job.job.checkpoint(before.ref.digest) is not None


def grows_without(job: Driven, nodes: list[Node], new: Node) -> pb.Checkpoint:
    """A growth whose newcomer cannot fetch the step in memory: the world opens without it. The step is on the disk."""
    new.join(sees=job.sealed)
    new.warm()
    assert nodes[0].directive.drain.to_memory
    made = drained_into_memory(job, nodes, 7)
    joins(job, *nodes, sees=made)
    joins(job, new)
    job.wait(2)
    assert job.phase is Phase.RUNNING
    for node in nodes:
        node.holds(made, 0)
    nodes[0].step(8)
    nodes[0].durable()
    job.sealed.append(made)
    return made


def until_draining(job: Driven, trains: Node, new: Node) -> None:
    """The next growth begins when the last one is long enough ago."""
    step = trains.directive.head.step + 1
    joins(job, new)
    new.warm()
    for passed in range(200):
        if job.phase is Phase.DRAINING:
            return
        trains.step(step + 1 + passed)
        job.wait(1)
    raise AssertionError(job.notices)


def test_a_node_that_could_not_fetch_from_memory_is_taken_in_by_way_of_the_disk() -> None:
    """It has no room, or a firewall: into memory each growth would end without it, and the next begin at once."""
    job, nodes = started(1)
    nodes[0].save(5)
    nodes[0].step(6)
    new = newcomer(job)
    grows_without(job, nodes, new)
    assert job.notices.count("could not fetch step-7.e1.1 from the memory of other nodes: changes in the next 10") == 1
    until_draining(job, nodes[0], new)
    assert not nodes[0].directive.drain.to_memory
    saved = nodes[0].save(10, any_size=True)
    nodes[0].drained(10, digest=saved.ref.digest)
    joins(job, nodes[0], new)
    job.wait(2)
    assert job.phase is Phase.RUNNING
    assert job.epoch == 3
    assert new.order == "run"
    # Much later it may have room.
    job.wait(600)
    nodes[0].step(11)
    new.failed()
    job.wait(1)
    joins(job, nodes[0], new)
    job.wait(1)
    until_draining(job, nodes[0], newcomer(job))
    assert nodes[0].directive.drain.to_memory


def test_a_growth_goes_on_when_its_start_comes_to_the_disk() -> None:
    """The newcomer has not looked there yet. What it has to see is what the drain saves."""
    job, nodes = started(2)
    nodes[0].step(6)
    nodes[1].leave()
    made = drained_into_memory(job, nodes, 7)
    joins(job, nodes[0], sees=made)
    nodes[0].holds(made, 0, 1)
    job.wait(1)
    nodes[0].step(8)
    new = newcomer(job)
    joins(job, new)
    new.warm()
    until_draining(job, nodes[0], new)
    nodes[0].durable()
    assert not job.job.checkpoint(made.ref.digest).parts  # type: ignore[union-attr]
    job.wait(1)
    assert job.phase is Phase.DRAINING, job.notices


def test_a_growth_that_ended_without_its_newcomer_is_called_that() -> None:
    """Nobody has restarted anything, and nobody has gone."""
    job, nodes = started(1)
    nodes[0].save(5)
    nodes[0].step(6)
    grows_without(job, nodes, newcomer(job))
    assert "epoch 2: no newcomer joined after all, 1 node, resumed at step 7" in job.notices


def test_drains_go_to_memory_again_when_the_node_is_gone_that_could_not_fetch() -> None:
    job, nodes = started(1)
    nodes[0].save(5)
    nodes[0].step(6)
    new = newcomer(job)
    grows_without(job, nodes, new)
    new.hang_up()
    job.wait(20)
    nodes[0].save(9)
    until_draining(job, nodes[0], newcomer(job))
    assert nodes[0].directive.drain.to_memory


def test_drains_go_to_memory_again_after_a_while() -> None:
    """The node is still here, and no other world was opened meanwhile."""
    job, nodes = started(1)
    nodes[0].save(5)
    nodes[0].step(6)
    new = newcomer(job)
    grows_without(job, nodes, new)
    assert not to_memory(job.state, somebody_stays=True)
    for passed in range(61):
        nodes[0].step(9 + passed)
        job.wait(10)
    assert new.is_known
    assert job.epoch == 2
    assert to_memory(job.state, somebody_stays=True)


def test_a_new_run_knows_nothing_of_what_the_last_one_had_in_memory() -> None:
    """A master that stays has heard of a step that was never on the disk: no line of it when the next run begins."""
    job, nodes = started(2)
    nodes[0].save(8, any_size=True)
    nodes[0].step(9)
    held(job, nodes, 9)
    nodes[0].save(10, any_size=True)
    for node in nodes:
        node.finished(10)
    assert job.phase is Phase.SUCCEEDED
    for node in nodes:
        node.hang_up()
    job.wait(10)
    before = len(job.notices)
    new = [job.node(new_run=True, peer_address=f"10.0.0.{host}:7", host=f"host-{host}") for host in (8, 9)]
    for node in new:
        node.join(sees=[])
    job.wait(2)
    assert (job.phase, job.job.run_id) == (Phase.RUNNING, "run-0002")
    assert "in memory" not in job.notices[before:]
    assert not job.state.live.held.steps


def test_a_save_by_order_stands_until_memory_is_on_the_disk() -> None:
    """The ranks save to memory, and agents write it to the disk: only then is it what somebody wanted."""
    job, nodes = started(2)
    nodes[0].save(5)
    for node in nodes:
        node.step(6)
    code = job.call(pb.SaveNowRequest(job_id="job"))
    assert (code.code, code.message.before) == ("OK", job.sealed[-1].ref.name)  # type: ignore[union-attr]
    new = newcomer(job)
    new.join()
    new.warm()
    made = drained_into_memory(job, nodes, 7)
    joins(job, *nodes, new, sees=made)
    for node in (*nodes, new):
        node.holds(made, 0, 1)
    nodes[0].step(8)
    assert job.job.save_order is not None
    nodes[0].durable()
    assert job.job.save_order is None


def test_a_newer_commit_makes_it_durable_no_more() -> None:
    job, nodes = started(2)
    nodes[0].step(6)
    nodes[1].leave()
    made = drained_into_memory(job, nodes, 7)
    joins(job, nodes[0], sees=made)
    nodes[0].holds(made, 0, 1)
    job.wait(1)
    nodes[0].step(8)
    assert nodes[0].directive.make_durable.ref.digest
    nodes[0].save(9)
    assert not nodes[0].directive.make_durable.ref.digest
    assert job.job.checkpoint(made.ref.digest).retired  # type: ignore[union-attr]


def test_a_leaver_stays_until_another_node_has_its_part() -> None:
    job, nodes = started(2)
    nodes[0].step(6)
    nodes[1].leave()
    assert nodes[1].directive.drain.to_memory
    made = drained_alone(job, nodes)
    assert nodes[1].order == "wait"
    assert "stays until another node has what it alone holds" in nodes[1].directive.wait.reason
    assert parts(nodes[0]) == {0: ["10.0.0.0:7"], 1: ["10.0.0.1:7"]}
    nodes[0].holds(made, 0, 1)
    assert nodes[1].order == "release"
    joins(job, nodes[0], sees=made)
    job.wait(1)
    assert nodes[0].directive.run.resume.source.step == 7


@pytest.mark.parametrize("anew", [False, True])
def test_what_leavers_have_written_is_not_lost_with_them(anew: bool) -> None:
    """Who stays could not fetch it in time: it writes its own part, and seals what is there of all.

    `anew`: a new master hears of it first.
    """
    job, nodes = started(3)
    nodes[0].save(5, any_size=True)
    nodes[0].step(6)
    for node in nodes[1:]:
        node.leave()
    made = drained_alone(job, nodes)
    if anew:
        job.restart()
        for rank, node in enumerate(nodes):
            node.holds(made, rank)
            node.has_told_all()
    for rank, node in enumerate(nodes[1:], 1):
        node.wrote(made, rank)
        node.goodbye()
    job.wait(10)
    assert nodes[0].directive.head.ref == made.ref
    joins(job, nodes[0])
    assert list(nodes[0].directive.make_durable.write) == [0]
    nodes[0].durable()
    assert nodes[0].directive.make_durable.seal
    nodes[0].durable()
    made.in_memory = False
    joins(job, nodes[0], sees=made)
    job.wait(2)
    assert nodes[0].directive.run.resume.source.step == 7


def writes_what_is_there(job: Driven, node: Node, made: pb.Checkpoint) -> None:
    """The node that is left is told to look, finds what the other one has written, and brings it up with its own."""
    joins(job, node)
    job.wait(5)
    assert list(node.directive.make_durable.write) == [1], "it is looked for on the disk"
    node.durable()
    joins(job, node)
    assert list(node.directive.make_durable.write) == [0]
    node.durable()
    assert node.directive.make_durable.seal
    node.durable()
    made.in_memory = False
    joins(job, node, sees=made)
    job.wait(2)
    assert node.directive.run.resume.source.step == 7


def test_what_leavers_have_written_outlives_a_seal_that_fails() -> None:
    job, nodes = half_written()
    joins(job, nodes[0])
    nodes[0].durable()
    assert nodes[0].directive.make_durable.seal
    nodes[0].durable("stale file handle")
    job.wait(ASKED_AGAIN_SECONDS)
    writes_what_is_there(job, nodes[0], in_memory_again(job))


def test_what_leavers_have_written_outlives_the_master() -> None:
    job, nodes = forgotten()
    writes_what_is_there(job, nodes[0], in_memory_again(job))


def test_what_a_leaver_has_sealed_unasked_is_a_commit() -> None:
    """It had one part and found the other on the disk. Who comes is a stranger, whose word on that does not count."""
    job, nodes = started(2, min_nodes=1)
    nodes[0].step(6)
    nodes[1].leave()
    made = in_memory(job, 7)
    nodes[1].holds(made, 1)
    nodes[1].drained(7, digest=made.ref.digest)
    nodes[1].wrote(made)
    head = job.job.checkpoints.head
    assert (head.step, head.parts) == (7, 0) if head is not None else False


def test_what_leavers_have_written_outlives_an_order_to_write_all_of_it() -> None:
    """That fails late, when all parts have been written."""
    job, nodes = half_written()
    joins(job, nodes[0])
    nodes[0].durable()
    made = in_memory_again(job)
    job.call(pb.DurableRequest(caller=nodes[0].caller(), ref=made.ref, failure="it cannot be fetched"))
    job.wait(ASKED_AGAIN_SECONDS)
    writes_what_is_there(job, nodes[0], made)


@pytest.mark.parametrize("anew", [False, True])
def test_what_leavers_have_written_of_a_step_that_was_never_whole_counts(anew: bool) -> None:
    """Who stays tells of its part when they are gone. `anew`: to another master."""
    job, nodes = started(2)
    nodes[0].save(5, any_size=True)
    nodes[0].step(6)
    nodes[1].leave()
    made = in_memory(job, 7)
    nodes[1].holds(made, 1)
    nodes[1].drained(7, digest=made.ref.digest)
    nodes[1].wrote(made, 1)
    nodes[1].goodbye()
    if anew:
        job.restart()
        nodes[0].has_told_all()
    nodes[0].drained(7, digest=made.ref.digest)
    nodes[0].holds(made, 0)
    joins(job, nodes[0])
    if anew:
        job.wait(0.1)
        assert list(nodes[0].directive.make_durable.write) == [1]
        nodes[0].durable()
    assert nodes[0].directive.head.ref == made.ref
    joins(job, nodes[0])
    assert list(nodes[0].directive.make_durable.write) == [0]
    nodes[0].durable()
    nodes[0].durable()
    made.in_memory = False
    joins(job, nodes[0], sees=made)
    job.wait(2)
    assert nodes[0].directive.run.resume.source.step == 7


@pytest.mark.parametrize("answer", ["absent", "fails"])
def test_a_step_that_was_never_whole_is_looked_for_in_vain(answer: str) -> None:
    job, nodes, made = never_whole(2)
    joins(job, nodes[0])
    job.wait(0.1)
    for _ in range(3):
        joins(job, nodes[0])
        if nodes[0].directive.HasField("make_durable"):
            assert list(nodes[0].directive.make_durable.write) == [1]
            nodes[0].durable("input/output error" if answer == "fails" else "", absent=answer == "absent")
            job.wait(ASKED_AGAIN_SECONDS if answer == "fails" else 0.1)
    joins(job, nodes[0])
    job.wait(1)
    assert nodes[0].directive.run.resume.source.step == 5
    assert f"{made.ref.name} was in memory, and nobody who is here has the part of" in job.notices


def test_nobody_looks_for_what_went_with_a_killed_node() -> None:
    """Nothing of that was written, and a crash waits for nothing."""
    job, nodes = started(2)
    nodes[0].save(5, any_size=True)
    nodes[0].step(7)
    nodes[0].holds(in_memory(job, 7), 0)
    nodes[1].hang_up()
    job.wait(1.5)
    joins(job, nodes[0])
    job.wait(1)
    assert nodes[0].directive.run.resume.source.step == 5


def test_what_leavers_have_not_written_takes_the_run_back_at_once() -> None:
    job, nodes = forgotten()
    joins(job, nodes[0])
    job.wait(5)
    assert nodes[0].order != "run"
    nodes[0].durable(absent=True)
    joins(job, nodes[0])
    job.wait(2)
    assert nodes[0].directive.run.resume.source.step == 5


def never_whole(count: int, *, any_size: bool = True, **fields: Any) -> tuple[Driven, list[Node], pb.Checkpoint]:
    """The last one of some nodes has drained step 7 and left, and nobody has its part; a commit of step 5 is there."""
    job, nodes = started(count, min_nodes=1, **fields)
    nodes[0].save(5, any_size=any_size)
    nodes[0].step(6)
    nodes[-1].leave()
    made = in_memory(job, 7)
    nodes[-1].drained(7, digest=made.ref.digest)
    nodes[-1].goodbye()
    for rank, node in enumerate(nodes[:-1]):
        node.holds(made, rank)
        node.drained(7, digest=made.ref.digest)
    return job, nodes[:-1], made


def looks(node: Node) -> bool:
    return bool(node.directive.make_durable.look)


def goes_on(job: Driven, nodes: list[Node], seconds: float, does: Callable[[Node], None]) -> float:
    """Each node joins when it is to, and does what it is ordered; after how long a world opens (at most `seconds`)."""
    began = job.now
    while job.phase is not Phase.RUNNING and job.now < began + seconds:
        for node in nodes:
            if node.order in ("gather", "wait"):
                joins(job, node)
        for node in nodes:
            if node.directive.HasField("make_durable"):
                does(node)
        job.wait(0.25)
    return job.now - began


def test_what_was_only_seen_on_the_disk_is_tried_once() -> None:
    """Another node has written its own part there, so something is in sight: files lack all the same."""
    job, nodes, _ = never_whole(3)
    seals: list[str] = []

    def do(node: Node) -> None:
        seals.extend([node.name] * node.directive.make_durable.seal)
        node.durable(absent=node.directive.make_durable.seal)

    assert goes_on(job, nodes, 60, do) < 6
    assert nodes[0].directive.run.resume.source.step == 5
    assert len(seals) == 1


def test_each_node_looks_once_and_the_next_one_is_asked() -> None:
    """A node whose disk fails is not asked again while another one looks."""
    job, nodes, made = never_whole(4)
    asked: list[str] = []

    def do(node: Node) -> None:
        if looks(node) and node.name not in asked:
            asked.append(node.name)
            if node is nodes[0]:
                node.durable("input/output error")
        elif not looks(node):
            node.durable()

    goes_on(job, nodes, 25, do)
    assert asked == [node.name for node in nodes[:2]]
    nodes[1].durable()
    goes_on(job, nodes, 1, do)
    assert job.job.checkpoint(made.ref.digest) is not None
    assert "could not write" not in job.notices


def test_a_disk_that_hangs_holds_up_a_world_for_a_while_only() -> None:
    """Nobody answers: it goes on with what is there."""
    job, nodes, _ = never_whole(3)
    assert goes_on(job, nodes, 100, lambda node: None) < LOOK_WITHIN_SECONDS + 2
    assert nodes[0].directive.run.resume.source.step == 5


def test_who_was_not_asked_to_look_says_nothing_of_it() -> None:
    job, nodes = forgotten()
    spare, made = newcomer(job), in_memory_again(job)
    joins(job, nodes[0])
    job.wait(4)
    assert looks(nodes[0])
    job.call(pb.DurableRequest(caller=spare.caller(), ref=made.ref, parts=[1], failure="no", absent=True))
    joins(job, nodes[0], spare)
    job.wait(2)
    assert looks(nodes[0])
    nodes[0].durable()
    assert nodes[0].directive.head.ref == made.ref


def test_it_is_looked_for_before_an_older_step_is_converted() -> None:
    job, nodes, made = never_whole(2, any_size=False, universal_checkpoint=True, universal_gate=True)
    joins(job, nodes[0])
    job.wait(0.1)
    assert not nodes[0].lease
    assert looks(nodes[0])
    nodes[0].durable()
    assert nodes[0].directive.head.ref == made.ref


def test_what_nobody_can_seal_any_more_is_not_waited_for() -> None:
    """All parts are on the disk, and the last node that had the step in memory is gone before it has sealed it."""
    job, nodes = half_written()
    joins(job, nodes[0])
    nodes[0].durable()
    assert nodes[0].directive.make_durable.seal
    nodes[0].hang_up()
    late = newcomer(job)
    job.wait(1.5)
    late.beat()
    joins(job, late)
    job.wait(5)
    joins(job, late)
    job.wait(2)
    assert late.directive.run.resume.source.step == 5


@pytest.mark.parametrize("way", ["blind", "read-only"])
def test_what_nobody_can_write_any_more_is_not_waited_for(way: str) -> None:
    """A leaver's part is on the disk, and the node that has the other one in memory alone cannot write there."""
    job, nodes = half_written()
    if way == "blind":
        request = nodes[0].joining(None, None, ())
        request.probe = "another directory"
        job.call(request)
        late = newcomer(job)
    else:
        late = nodes[0]
    for _ in range(30):
        joins(job, late)
        if way == "read-only" and late.directive.HasField("make_durable"):
            late.durable("read-only file system")
        nodes[0].beat()
        job.wait(3)
        late.beat()
        if job.phase is Phase.RUNNING:
            break
    assert late.directive.run.resume.source.step == 5


def test_who_says_for_ever_that_it_gathers_is_not_waited_for() -> None:
    job, nodes = started(3, join_timeout=20.0)
    made = held(job, nodes, 20)
    nodes[0].failed("boom")
    job.wait(1)
    for node in nodes[1:]:
        if node.order != "gather":
            node.failed("boom")
    nodes[0].holds(made, 0, 1, 2)
    joins(job, nodes[0], sees=made)
    for _ in range(140):
        job.wait(5)
        for node in nodes[1:]:
            node.beat()
            node.gathers(made.ref.digest)
        nodes[0].beat()
    assert job.phase is Phase.RUNNING
    assert job.members == [nodes[0].name]


def test_a_new_master_hears_all_of_a_step_in_one_turn() -> None:
    """Its parts, and that some of them are on the disk."""
    job, nodes = started(2)
    nodes[0].step(6)
    nodes[1].leave()
    made = drained_alone(job, nodes)
    job.restart()
    held_there = pb.HeldRequest(caller=nodes[1].caller(), checkpoint=made, parts=(1,))
    written = pb.DurableRequest(caller=nodes[1].caller(), ref=made.ref, parts=(1,))
    job.state, replies = brain.handle_all(job.state, [Called(held_there), Called(written)], job.now)
    assert [reply.code for reply in replies if reply is not None] == ["OK", "OK"]
    assert job.state.live.held.steps[made.ref.digest].written == {1}


@pytest.mark.parametrize("somebody_comes", [False, True])
def test_a_new_master_that_hears_no_holder_waits_for_it(somebody_comes: bool) -> None:
    """Perhaps it is the one that is cut off. Who stays silent beside another one is lost first."""
    job, nodes = started(2)
    nodes[0].step(6)
    nodes[1].leave()
    made = drained_alone(job, nodes)
    job.restart()
    job.silent.update(node.incarnation for node in nodes)
    if somebody_comes:
        job.node()
    job.wait(4 if somebody_comes else 20)
    assert "in memory only" not in job.notices
    for rank, node in enumerate(nodes):
        node.holds(made, rank)
        node.has_told_all()
    assert nodes[0].directive.head.ref == made.ref


def test_what_only_leavers_have_is_marked() -> None:
    job, nodes = started(3)
    nodes[0].step(6)
    nodes[2].leave()
    made = in_memory(job, 7)
    for rank, node in enumerate(nodes):
        node.holds(made, *((0,) if rank == 0 else (1, 2)) if rank != 1 else (1,))
        node.drained(7, digest=made.ref.digest)
    told = nodes[0].directive.gather.parts
    assert [part.leaves for part in told] == [False, False, True]
    assert list(told[1].addresses) == ["10.0.0.1:7", "10.0.0.2:7"]
    nodes[0].holds(made, 0, 2)
    assert [part.leaves for part in nodes[0].directive.gather.parts] == [False] * 3
    assert list(nodes[0].directive.gather.parts[2].addresses) == ["10.0.0.0:7", "10.0.0.2:7"]


def test_of_many_holders_the_first_are_told() -> None:
    """Who gathers soon has all parts: to tell that to all others takes longer than to gather them."""
    job, nodes = started(4)
    made = held(job, nodes, 20)
    nodes[3].hang_up()
    job.wait(1.5)
    before = parts(nodes[0])
    assert sorted(map(len, before.values())) == [1, 1, 2, 2]
    for node in nodes[:3]:
        node.holds(made, 0, 1, 2, 3)
    assert all(len(addresses) == 2 for addresses in parts(nodes[0]).values())
    assert parts(nodes[0])[1] == before[1]


def test_what_was_told_of_a_part_is_told_until_it_is_wrong() -> None:
    """With a thousand nodes that gather somebody is new in it all the time."""
    job, nodes = started(4)
    made = held(job, nodes, 20)
    nodes[3].hang_up()
    job.wait(1.5)
    common = Common(job.state)
    alone = common.sources[2]
    assert len(alone.addresses) == 1, "node 3 had the other copy"
    nodes[0].holds(made, 0, 2, 3)
    assert len(Common(job.state).sources[2].addresses) == 2
    again = Common(job.state).after(common)
    assert again.sources == common.sources
    assert again.version is common.version
    nodes[2].hang_up()
    job.wait(1.5)
    later = Common(job.state).after(again)
    assert later.sources[2].addresses == ("10.0.0.0:7",)
    assert later.version is not common.version


def test_who_stays_is_told_as_soon_as_it_has_what_only_leavers_had() -> None:
    job, nodes = started(4)
    made = held(job, nodes, 20)
    nodes[3].hang_up()
    nodes[2].leave()
    job.wait(1.5)
    common = Common(job.state)
    assert common.sources[2].leaves
    nodes[0].holds(made, 0, 2, 3)
    later = Common(job.state).after(common)
    assert not later.sources[2].leaves
    assert later.sources[2].addresses[0] == "10.0.0.0:7"


def test_who_leaves_is_named_no_more_where_somebody_stays_who_has_it() -> None:
    job, nodes = started(4)
    made = held(job, nodes, 20)
    nodes[3].hang_up()
    job.wait(1.5)
    nodes[0].holds(made, 0, 2, 3)
    common = Common(job.state)
    assert common.sources[2].addresses == ("10.0.0.2:7", "10.0.0.0:7")
    nodes[2].leave()
    assert Common(job.state).after(common).sources[2].addresses[0] == "10.0.0.0:7"


def test_who_could_not_reach_the_first_of_many_holders_is_told_of_others() -> None:
    job, nodes = started(5, min_nodes=3, max_nodes=5)
    made = held(job, nodes, 20)
    nodes[4].hang_up()
    job.wait(1.5)
    for node in nodes[1:4]:
        node.holds(made, 0, 1, 2, 3, 4)
    joins(job, nodes[0])
    joins(job, nodes[1], sees=made)
    assert {part: len(found) for part, found in parts(nodes[0]).items()} == {0: 4, 1: 3, 2: 3, 3: 3, 4: 4}
    assert all(len(found) == 2 for found in parts(nodes[2]).values())
    nodes[0].holds(made, 0, 1, 4)
    assert len(parts(nodes[0])[1]) == 4, "it hears of each that has come to have it"


def test_a_node_that_comes_again_has_its_whole_time_to_fetch() -> None:
    """Who had its name had used all of that up."""
    job, nodes = started(3, join_timeout=20.0, max_nodes=8)
    made = held(job, nodes, 20)
    nodes[2].hang_up()
    job.wait(1.5)
    nodes[0].holds(made, 0, 1, 2)
    for _ in range(45):
        job.wait(15)
        nodes[1].gathers(made.ref.digest)
    assert "not joined within 20 s" in job.notices
    nodes[1].hang_up()
    job.wait(2)
    again = job.node(node=nodes[1].name, host="host-1", peer_address="10.0.0.1:7")
    for _ in range(4):
        job.wait(15)
        again.gathers(made.ref.digest)
    assert again.name not in job.state.live.gathering.overdue


def test_who_is_at_it_is_not_late_until_half_of_all_are_done() -> None:
    job, nodes = started(4, join_timeout=20.0, max_nodes=8)
    made = held(job, nodes, 20)
    nodes[3].hang_up()
    job.wait(1.5)
    for _ in range(4):
        job.wait(10)
        for node in nodes[:3]:
            node.gathers(made.ref.digest)
    assert job.phase is Phase.FORMING
    assert "not joined" not in job.notices
    for node in nodes[:2]:
        node.holds(made, 0, 1, 2, 3)
        joins(job, node, sees=made)
    for _ in range(3):
        job.wait(7)
        for node in nodes[:3]:
            node.beat()
        nodes[2].gathers(made.ref.digest)
    assert job.phase is Phase.RUNNING
    assert job.members == [nodes[0].name, nodes[1].name]
    assert f"{nodes[2].name} has not joined within 20 s" in job.notices


def test_strangers_do_not_count_among_those_who_are_waited_for() -> None:
    """Spares that see another directory never join, so they keep nobody's gathering in time."""
    job, nodes = started(3, join_timeout=20.0, max_nodes=20)
    made = held(job, nodes, 20)
    strangers = [job.node(host=f"s{number}", probe="other", peer_address=f"10.0.1.{number}:7") for number in range(5)]
    for node in nodes:
        if node.order != "gather":
            node.failed("boom")
    job.wait(1)
    for node in nodes[:2]:
        node.holds(made, 0, 1, 2)
        joins(job, node, sees=made)
    for _ in range(30):
        job.wait(5)
        for node in (*nodes, *strangers):
            node.beat()
        nodes[2].gathers(made.ref.digest)
    assert job.phase is Phase.RUNNING


def test_who_is_let_go_late_hears_from_where_the_others_went_on() -> None:
    """Its own drain may be that: the newest commit does not tell, once the next world has some."""
    job, nodes = started(2)
    nodes[0].step(6)
    nodes[1].leave()
    made = in_memory(job, 7)
    for node in nodes:
        node.holds(made, 0, 1)
    for node in nodes:
        node.drained(7, digest=made.ref.digest)
    assert (nodes[1].order, nodes[1].directive.release.resumed_epoch) == ("release", 0)
    joins(job, nodes[0], sees=made)
    job.wait(1)
    nodes[0].save(9)
    assert (nodes[1].order, nodes[1].directive.head.step) == ("release", 9)
    told = nodes[1].directive.release
    assert (told.resumed_epoch, told.resumed_step) == (1, 7)


def test_a_leaver_stays_while_parts_of_its_drain_are_on_their_way() -> None:
    """Released before, it would take for saved what another node may still lose."""
    job, nodes = started(3)
    nodes[0].save(5, any_size=True)
    nodes[0].step(6)
    nodes[1].leave()
    made = in_memory(job, 7)
    for rank in (0, 1):
        nodes[rank].holds(made, 0, 1)
        nodes[rank].drained(7, digest=made.ref.digest)
    assert (job.phase, nodes[1].order) == (Phase.DRAINING, "wait")
    nodes[2].holds(made, 2)
    assert nodes[1].order == "release"


@pytest.mark.parametrize("saved", [False, True])
def test_a_node_that_dies_behind_the_save_of_a_drain_is_missed_soon(saved: bool) -> None:
    """It held a part alone, and nobody else would notice: the other ranks meet no more. A save may take long."""
    job, nodes = started(3, node_timeout=15.0)
    nodes[0].save(5, any_size=True)
    nodes[0].step(6)
    nodes[1].leave()
    made = in_memory(job, 7)
    for rank in (0, 1):
        nodes[rank].step(7, draining=True)
        nodes[rank].holds(made, 0, 1)
        if saved:
            nodes[rank].drained(7, digest=made.ref.digest)
    if saved:
        nodes[2].holds(made, 2)
    nodes[2].hang_up()
    job.wait(3)
    assert nodes[2].is_known is not saved
    job.wait(30)
    assert not nodes[2].is_known


def test_nobody_stays_for_what_others_hold_in_a_newer_step() -> None:
    job, nodes = started(2)
    nodes[0].step(6)
    old = in_memory(job, 4)
    nodes[1].holds(old, 1)  # The others have dropped it.
    nodes[1].leave()
    made = in_memory(job, 7)
    for node in nodes:
        node.holds(made, 0, 1)
    nodes[1].drained(7, digest=made.ref.digest)
    assert nodes[1].order == "release"


def test_who_stays_for_another_hears_of_its_leave() -> None:
    """Directives are made anew for those only who may be told something new."""
    job, nodes = started(3)
    common = Common(job.state)
    nodes[2].leave()
    assert not Common(job.state).says_the_same(common)


def test_behind_a_damaged_commit_the_held_step_before_it_counts() -> None:
    job, nodes = started(2)
    nodes[0].save(10)
    made = held(job, nodes, 20, any_size=False)
    damaged = nodes[0].save(25)
    nodes[1].hang_up()
    job.wait(1.5)
    joins(job, nodes[0])
    job.wait(1)
    nodes[0].converts(pb.CONVERSION_STATE_SOURCE_BAD, "part-0.pt: checksum")
    nodes[0].verified(False)
    assert job.job.checkpoint(damaged.ref.digest).damaged  # type: ignore[union-attr]
    nodes[0].holds(made, 0, 1)
    assert nodes[0].directive.gather.resume.name == made.ref.name


def test_what_was_the_best_and_is_gone_is_not_the_best_any_more() -> None:
    job, nodes = started(2, keep_checkpoints=1)
    first = job.seal(10, any_size=True)
    first.best = first.ref.name
    nodes[0].commit(first)
    made = in_memory(job, 30)
    made.best = first.ref.name
    better = job.seal(25, any_size=True)
    better.best = better.ref.name
    nodes[0].commit(better)
    nodes[1].sights()
    assert job.job.checkpoint(first.ref.digest).retired  # type: ignore[union-attr]
    for node in nodes:
        node.holds(made, 0, 1)
    nodes[1].failed()
    assert nodes[0].directive.head.ref.digest == made.ref.digest
    assert nodes[0].directive.head.best == better.ref.name


def test_nothing_that_was_deleted_is_named_as_the_best() -> None:
    """A step that went through memory names what was the best when it was saved, even if nobody knows that now."""
    job, nodes = started(2, keep_checkpoints=1)
    first = job.seal(10, any_size=True)
    first.best = first.ref.name
    nodes[0].commit(first)
    better = job.seal(25, any_size=True)
    better.best = better.ref.name
    nodes[0].commit(better)
    nodes[1].sights()
    assert nodes[0].job.call(pb.PrunedRequest(caller=nodes[0].caller(), refs=nodes[0].directive.prune)).code == "OK"
    assert job.job.checkpoint(first.ref.digest) is None
    made = job.seal(30, any_size=True)
    made.best = first.ref.name
    nodes[0].commit(made)
    assert nodes[0].directive.head.ref.name == made.ref.name
    assert nodes[0].directive.head.best == better.ref.name


@pytest.mark.parametrize("why", ["all leave", "no replicas", "not to be reached"])
def test_a_drain_that_nobody_could_hold_goes_to_the_disk(why: str) -> None:
    job = Driven(settings(memory_replicas=int(why != "no replicas"), universal_checkpoint=False))
    nodes = [newcomer(job) if why != "not to be reached" else job.node(host=f"host-{number}") for number in range(2)]
    for node in nodes:
        node.join()
    job.wait(1.1)
    nodes[0].step(6)
    for node in nodes[: 2 if why == "all leave" else 1]:
        node.leave()
    assert job.phase is Phase.DRAINING
    assert not nodes[0].directive.drain.to_memory


def test_a_master_that_comes_back_hears_who_holds_what() -> None:
    job, nodes = started(2)
    made = held(job, nodes, 20)
    nodes[1].failed()
    job.wait(0.1)
    assert nodes[0].directive.gather.resume.name == made.ref.name
    job.restart()
    assert nodes[0].directive.gather.resume.name == made.ref.name
    for rank, node in enumerate(nodes):
        node.register()
        node.holds(made, rank)
    joins(job, nodes[1], sees=made)
    assert job.phase is Phase.FORMING
    assert parts(nodes[0]) == {0: ["10.0.0.0:7"], 1: ["10.0.0.1:7"]}
    joins(job, nodes[0], sees=made)
    job.wait(2)
    assert nodes[0].directive.run.resume.source.step == 20


def test_a_step_that_cannot_be_loaded_is_given_up() -> None:
    job, nodes = started(2)
    durable = nodes[0].save(10, any_size=True)
    made = held(job, nodes, 20)
    nodes[1].failed()
    job.wait(0.1)
    joins(job, *nodes, sees=made)
    assert job.phase is Phase.RUNNING
    nodes[1].bad(made.ref)
    assert "other copies of it are tried" in job.notices
    assert parts(nodes[1]) == {0: ["10.0.0.0:7"], 1: ["10.0.0.0:7"]}
    nodes[1].holds(made, 0)  # The other part was damaged there.
    joins(job, *nodes, sees=made)
    assert job.phase is Phase.RUNNING
    nodes[1].bad(made.ref)
    joins(job, *nodes)
    job.wait(1)
    assert nodes[0].directive.run.resume.source.ref.name == durable.ref.name
    assert "cannot load it" in job.notices


def waits_without_a_part() -> tuple[Driven, list[Node], pb.Checkpoint]:
    """Three nodes make a world, and one is here: the others had a part of step 20, which the run is to go on from."""
    job, nodes = started(3, min_nodes=3)
    nodes[0].save(10, any_size=True)
    made = held(job, nodes, 20)
    nodes[0].hang_up()
    job.wait(1.5)
    assert nodes[2].directive.gather.resume.name == made.ref.name
    nodes[1].hang_up()
    job.wait(1.5)
    joins(job, nodes[2])
    job.wait(LOST_AFTER_SECONDS + 1)
    assert nodes[2].directive.make_durable.look, "it may be on the disk"
    nodes[2].durable(absent=True)
    job.wait(60)
    assert job.phase is Phase.WAITING
    return job, nodes, made


def test_what_a_node_holds_that_comes_back_counts_where_nothing_could_go_on_without_it() -> None:
    """Nodes lacked all the while, so to give its step up would have helped nobody."""
    job, nodes, made = waits_without_a_part()
    assert "was in memory only" not in job.notices
    assert f"a part of {made.ref.name}, which is in memory only, is with nobody" in status(job).reason
    again = newcomer(job)
    again.holds(made, 0, 1)
    job.wait(60)
    third = newcomer(job)
    joins(job, nodes[2], again, third, sees=made)
    job.wait(2)
    assert nodes[2].directive.run.resume.source.step == 20


def test_holders_that_are_gone_are_forgotten() -> None:
    """A step that lacks a part may be kept for days, while an agent comes, fetches what is there, and goes again."""
    job, _nodes, made = waits_without_a_part()
    step = job.state.live.held.steps[made.ref.digest]
    for _ in range(10):
        again = newcomer(job)
        again.holds(made, 0, 2)
        step.unable[again.incarnation], step.told[again.incarnation] = job.now + 600, None
        step.looked.add(again.incarnation)
        again.goodbye()
    here = {node.incarnation for node in job.job.nodes.values()}
    assert step.by_node.keys() == here
    for known in (*step.holders.values(), step.unable, step.told, step.looked):
        assert set(known) <= here


@pytest.mark.parametrize("comes", [False, True])
def test_who_makes_the_nodes_enough_is_heard_out_first(comes: bool) -> None:
    """It may be the one that holds the part; if not, the run goes back now, as a world can open."""
    job, _nodes, made = waits_without_a_part()
    newcomer(job)
    job.wait(60)
    third = newcomer(job)
    job.state.live.held.told_all.pop(third.incarnation)
    job.wait(LOST_AFTER_SECONDS + 2)
    assert "was in memory only" not in job.notices
    if comes:
        third.holds(made, 0, 1)
    third.has_told_all()
    job.wait(TOLD_WITHIN_SECONDS)
    for node in job.nodes[2:]:
        if node.directive.make_durable.look:
            node.durable(absent=True)
    assert (f"{made.ref.name} was in memory only" in job.notices) is not comes


def test_a_job_that_ends_without_a_part_gives_its_step_up() -> None:
    """--wait-for-nodes is over: nobody is waited for any more."""
    job, nodes, made = waits_without_a_part()
    job.job.settings = replace(job.job.settings, wait_for_nodes=90.0)
    job.wait(60)
    assert job.phase is Phase.FAILED
    assert f"{made.ref.name} was in memory only" in job.notices
    assert not nodes[2].directive.finish.success


def began_everywhere(count: int) -> tuple[Driven, list[Node], pb.Checkpoint]:
    """A world that goes on from step 20, all of which is in the memory of each node; a commit of step 10 is there."""
    job, nodes = started(count, max_nodes=8)
    nodes[0].save(10, any_size=True)
    made = held(job, nodes, 20)
    nodes[-1].failed()
    job.wait(0.1)
    for node in nodes:
        node.holds(made, *range(count))
    joins(job, *nodes, sees=made)
    assert job.phase is Phase.RUNNING
    return job, nodes, made


def finds_damage(job: Driven, nodes: list[Node], made: pb.Checkpoint, node: Node) -> None:
    """One part is damaged at this node; then all have all parts again, and a world begins."""
    node.bad(made.ref)
    node.holds(made, 0)
    for one in nodes:
        one.holds(made, *range(len(nodes)))
    joins(job, *nodes, sees=made)
    job.wait(1)
    assert job.phase is Phase.RUNNING


def test_damage_at_two_nodes_is_no_reason_to_give_up_what_a_third_holds() -> None:
    """One finds it in one world, the other in the next."""
    job, nodes, made = began_everywhere(3)
    for node in nodes[1:]:
        finds_damage(job, nodes, made, node)
        assert nodes[0].directive.run.resume.source.ref.name == made.ref.name
    assert "going back" not in job.notices


def test_what_node_after_node_cannot_load_is_given_up() -> None:
    """However many there are: so many damaged copies are no accident."""
    job, nodes, made = began_everywhere(8)
    for node in nodes[:MOST_DOUBTS]:
        finds_damage(job, nodes, made, node)
    nodes[7].bad(made.ref)
    assert f"{made.ref.name} was in memory only, and {nodes[7].name} cannot load it" in job.notices


def test_two_nodes_that_find_damage_at_once_are_heard_out() -> None:
    """Each has a part of which the other's copy is damaged."""
    job, nodes, made = began_everywhere(2)
    for node in nodes:
        node.bad(made.ref)
    for rank, node in enumerate(nodes):
        node.holds(made, rank)
    joins(job, *nodes, sees=made)
    job.wait(1)
    assert nodes[0].directive.run.resume.source.ref.name == made.ref.name


@pytest.mark.parametrize("seconds", [LOST_AFTER_SECONDS + 5, LOOKED_AT_SECONDS - 2])
def test_what_nodes_still_look_at_is_not_lost(seconds: float) -> None:
    """Both have found damage, and sum gigabytes before they say what is good: the good parts are nowhere meanwhile."""
    job, nodes, made = began_everywhere(2)
    job.job.settings = replace(job.job.settings, join_timeout=600.0)
    for node in nodes:
        node.bad(made.ref)
    job.wait(seconds)
    assert "a part of" not in status(job).reason
    for rank, node in enumerate(nodes):
        node.holds(made, rank)
    joins(job, *nodes, sees=made)
    job.wait(1)
    assert nodes[0].directive.run.resume.source.ref.name == made.ref.name
    assert "going back" not in job.notices


def test_a_node_that_had_nothing_left_before_it_told_of_damage_is_not_waited_for() -> None:
    """So it is where the damage is found as the step is written to the disk: what it has is told first."""
    job, nodes, made = began_everywhere(1)
    nodes[0].holds(made)
    nodes[0].bad(made.ref)
    job.wait(LOST_AFTER_SECONDS + 2)
    assert f"{made.ref.name} was in memory only" in job.notices


@pytest.mark.parametrize("then", ["gone", "nothing", "silence"])
def test_what_nobody_looks_at_any_more_is_lost(then: str) -> None:
    """Who looked is gone, or has nothing left, or never says what it found."""
    job, nodes, made = began_everywhere(2)
    for node in nodes:
        node.bad(made.ref)
    nodes[1].holds(made)
    waits = {"gone": 1.5, "nothing": 0.1, "silence": LOOKED_AT_SECONDS}[then]
    if then == "gone":
        nodes[0].hang_up()
    elif then == "nothing":
        nodes[0].holds(made)
    else:
        job.wait(LOST_AFTER_SECONDS + 5)
        assert "was in memory only" not in job.notices
    job.wait(waits + LOST_AFTER_SECONDS + 1)
    assert f"{made.ref.name} was in memory only" in job.notices


def test_a_pair_that_is_lost_at_once_is_named() -> None:
    job, nodes = started(3)
    durable = nodes[0].save(10, any_size=True)
    made = held(job, nodes, 20)
    nodes[1].hang_up()
    nodes[2].hang_up()  # The only one that had the part of the other.
    job.wait(8)
    joins(job, nodes[0])
    job.wait(2)
    assert nodes[0].directive.run.resume.source.ref.name == durable.ref.name
    assert f"{made.ref.name} was in memory, and nobody who is here has the part of host-1-0" in job.notices


def test_what_must_be_converted_is_on_the_disk_first() -> None:
    job, nodes = started(2)
    nodes[0].step(6)
    nodes[1].leave()
    made = drained_into_memory(job, nodes, 7, any_size=False)
    joins(job, nodes[0], sees=made)
    nodes[0].holds(made, 0, 1)
    assert job.phase is Phase.FORMING
    assert not nodes[0].lease
    job.sealed.append(made)
    nodes[0].durable()
    assert nodes[0].lease


def grown_onto_a_full_disk() -> tuple[Driven, list[Node], Node, pb.Checkpoint]:
    """Two nodes have drained for a third, into memory. What they saved loads in their number of ranks only."""
    job, nodes = started(2, max_nodes=3, universal_checkpoint=True, universal_gate=True)
    nodes[0].save(5)
    for node in nodes:
        node.step(6)
    new = newcomer(job)
    new.join()
    new.warm()
    assert nodes[0].directive.drain.to_memory
    made = drained_into_memory(job, nodes, 7, any_size=False)
    for node in (*nodes, new):
        node.holds(made, 0, 1)
    joins(job, *nodes, new, sees=made)
    assert job.phase is Phase.FORMING
    return job, nodes, new, made


def writes_in_vain(job: Driven) -> None:
    """Each node that is to write to the disk says that it cannot."""
    for node in job.nodes:
        if node.is_known and node.directive.make_durable.ref.digest:
            node.durable("No space left on device")


def test_a_growth_that_nobody_can_write_down_is_held() -> None:
    """The two nodes hold all of the step and train on. Nobody writes to the full disk before their first step."""
    job, nodes, new, made = grown_onto_a_full_disk()
    for _ in range(3):
        writes_in_vain(job)
    job.wait(1)
    assert job.phase is Phase.RUNNING
    assert job.members == [node.name for node in nodes]
    assert nodes[0].directive.run.resume.source.ref.name == made.ref.name
    assert "nobody could convert step-7.e1.1 (nobody could write it to the disk): going on in its old" in job.notices
    job.wait(ASKED_AGAIN_SECONDS + 1)
    assert not any(node.directive.make_durable.ref.digest for node in (*nodes, new))
    joins(job, new)
    new.warm()
    for step in range(8, 20):
        nodes[0].step(step)
        job.wait(1)
    assert job.phase is Phase.RUNNING, "the growth is tried again later"


def test_a_growth_is_held_also_where_it_takes_long_to_fill_the_disk() -> None:
    """The second node fails when the first one has been asked again already."""
    job, nodes, _new, made = grown_onto_a_full_disk()
    nodes[0].durable("No space left on device")
    assert nodes[1].directive.make_durable.ref.name == made.ref.name
    job.wait(ASKED_AGAIN_SECONDS + 5)
    assert job.phase is Phase.FORMING
    full = "No space left on device"
    job.call(pb.DurableRequest(caller=nodes[1].caller(), ref=made.ref, failure=full))
    job.wait(1)
    assert job.phase is Phase.RUNNING
    assert job.members == [node.name for node in nodes]


def test_people_see_what_waits_for_a_full_disk() -> None:
    """The node that is left cannot load the step as it is, so no world of the old shape is there."""
    job, nodes = started(2, universal_checkpoint=True)
    nodes[0].step(6)
    nodes[1].leave()
    made = drained_into_memory(job, nodes, 7, any_size=False)
    nodes[0].holds(made, 0, 1)
    nodes[1].goodbye()
    joins(job, nodes[0], sees=made)
    writes_in_vain(job)
    job.wait(1)
    assert job.phase is Phase.FORMING
    reason = "1 here, which is enough: waiting for step-7.e1.1 to be written from memory to the disk"
    assert status(job).reason == reason
    job.wait(ASKED_AGAIN_SECONDS)
    job.sealed.append(made)
    nodes[0].durable()
    assert nodes[0].lease


def test_where_all_leave_one_of_them_writes_it() -> None:
    """Each has been told so behind the other, when the ranks were saving to memory already."""
    job, nodes = started(2)
    nodes[0].step(6)
    nodes[1].leave()
    made = in_memory(job, 7)
    nodes[0].leave()
    for rank, node in enumerate(nodes):
        node.holds(made, rank)
        node.drained(7, digest=made.ref.digest)
    assert [node.order for node in nodes] == ["wait", "wait"]
    order = nodes[0].directive.make_durable
    assert {part.group_rank: list(part.addresses) for part in order.parts} == {0: ["10.0.0.0:7"], 1: ["10.0.0.1:7"]}
    nodes[0].durable()
    assert [node.order for node in nodes] == ["release", "release"]


def test_buddies_are_the_next_on_other_hosts() -> None:
    job = Driven(settings(memory_replicas=1, max_nodes=8, universal_checkpoint=False))
    nodes = [newcomer(job, host) for host in ("a", "a", "b", "b")]
    for node in nodes:
        node.join()
    job.wait(1.1)
    buddies = [list(node.directive.run.place.buddies) for node in nodes]
    assert buddies == [["10.0.0.2:7"], ["10.0.0.2:7"], ["10.0.0.0:7"], ["10.0.0.0:7"]]


def test_on_one_host_there_are_buddies_all_the_same() -> None:
    job = Driven(settings(memory_replicas=2, max_nodes=8, universal_checkpoint=False))
    nodes = [newcomer(job, "a") for _ in range(3)]
    for node in nodes:
        node.join()
    job.wait(1.1)
    assert list(nodes[1].directive.run.place.buddies) == ["10.0.0.2:7", "10.0.0.0:7"]


# ---- universal files of it are owed ----------------------------------------------------------------------------------


def owing() -> tuple[Driven, list[Node], pb.Checkpoint]:
    """Two of three nodes have re-sharded step 4 from memory, and owe its universal files; nothing is written yet."""
    job = Driven(settings(memory_replicas=1, universal_checkpoint=True))
    nodes = [newcomer(job) for _ in range(3)]
    for node in nodes:
        node.join()
    job.wait(1.1)
    made = held(job, nodes, 4, any_size=False, reshards=True)
    nodes[0].step(4)
    nodes[2].hang_up()
    job.wait(1.5)
    joins(job, *nodes[:2], sees=made)
    assert job.phase is Phase.RUNNING
    assert nodes[0].directive.run.resume.source.in_memory
    assert not nodes[0].directive.HasField("make_durable"), "the first step comes first"
    nodes[0].step(5)
    return job, nodes[:2], made


def test_what_is_owed_of_a_step_in_memory_outlives_a_newer_commit() -> None:
    """It is still written to the disk, and converted: there are universal files at each change of shape."""
    job, (a, b), made = owing()
    a.save(6, reshards=True)
    writer = next(node for node in (a, b) if node.directive.HasField("make_durable"))
    assert writer.directive.make_durable.ref == made.ref
    writer.durable()
    assert a.lease
    a.convert()
    assert "the universal files of step-4.e1.1 are there" in job.notices


def test_what_is_owed_of_a_step_that_is_gone_is_given_up() -> None:
    job, (a, b), made = owing()
    for node in (a, b):
        node.holds(made)
    job.wait(4)
    assert job.job.conversion is None
    assert "could not be made (the nodes that held a part of it in memory are gone)" in job.notices


def test_what_nobody_can_write_holds_no_world_up() -> None:
    """While the world trains it is tried again; the next one opens without."""
    job, (a, b), _ = owing()
    for _ in range(2):
        writer = next(node for node in (a, b) if node.directive.HasField("make_durable"))
        writer.durable("no space left on device")
    assert job.job.conversion is not None
    assert job.job.conversion.blocked
    b.hang_up()
    job.wait(1.5)
    joins(job, a, sees=in_memory_again(job))
    job.wait(1)
    assert job.members == [a.name]
    assert "(nobody could write it to the disk): going on without them" in job.notices


def in_memory_again(job: Driven) -> pb.Checkpoint:
    """What the run goes on from, as a node has it in memory."""
    head = job.job.checkpoints.head
    assert head is not None
    return pb.Checkpoint(ref=pb.CheckpointRef(name=head.name, digest=head.digest), in_memory=True)


TLS = 64 * "a" + "@"


@pytest.mark.parametrize(
    ("there", "comes", "words"),
    [(TLS, "", "speaks TLS with others, this one does not"), ("", TLS, "this one does:")],
)
def test_an_agent_that_speaks_otherwise_is_told_so(there: str, comes: str, words: str) -> None:
    """No other could fetch what it holds. Where nobody is who speaks the one way, all may speak the other."""
    job = Driven(settings(memory_replicas=1, max_nodes=8, universal_checkpoint=False))
    old = [job.node(host=f"host-{number}", peer_address=f"{there}10.0.0.{number}:7") for number in range(2)]
    for node in old:
        node.join()
    job.wait(1.1)
    assert [node.directive.run.place.buddies[0] for node in old] == [f"{there}10.0.0.1:7", f"{there}10.0.0.0:7"]
    late = Node(job, "late")
    reply = late.register(peer_address=f"{comes}10.0.0.9:7")
    assert (reply.code, words in reply.detail) == ("INVALID_ARGUMENT", True)
    assert "--tls-ca" in reply.detail
    assert job.phase is Phase.RUNNING
    # It keeps nothing in memory: nobody needs to reach it.
    assert Node(job, "without").register(peer_address="").code == "OK"
    for node in old:
        node.hang_up()
    assert late.register(peer_address=f"{comes}10.0.0.9:7").code == "OK"


def test_an_agent_may_say_later_where_its_memory_is() -> None:
    """It has made it when it heard that the job has memory checkpoints: its own command line did not say so."""
    job = Driven(settings(memory_replicas=1, universal_checkpoint=False))
    a, b = job.node(host="host-0", peer_address="10.0.0.0:7"), job.node(host="host-1")
    assert b.register(peer_address="10.0.0.1:7").code == "OK"
    assert b.register(peer_address="10.0.0.2:7").code == "OK", "and but once"
    for node in (a, b):
        node.join()
    job.wait(1.1)
    assert [list(node.directive.run.place.buddies) for node in (a, b)] == [["10.0.0.1:7"], ["10.0.0.0:7"]]


def test_a_growth_for_a_node_without_memory_goes_to_the_disk() -> None:
    """It could not fetch what the others have in memory, and they would wait for it without a step."""
    job = Driven(settings(memory_replicas=1, max_nodes=2, universal_checkpoint=False))
    a = job.node(host="host-0", peer_address="10.0.0.0:7")
    a.join()
    job.wait(1.1)
    assert to_memory(job.state, somebody_stays=True)
    b = job.node(host="host-1")
    assert not to_memory(job.state, somebody_stays=True)
    b.register(peer_address="10.0.0.1:7")
    assert to_memory(job.state, somebody_stays=True)


def test_an_agent_that_says_later_that_it_speaks_otherwise_is_told_so() -> None:
    """As one that says it at once."""
    job = Driven(settings(memory_replicas=1, universal_checkpoint=False))
    job.node(host="host-0", peer_address=f"{TLS}10.0.0.0:7")
    b = job.node(host="host-1")
    reply = b.register(peer_address="10.0.0.1:7")
    assert (reply.code, "--tls-ca" in reply.detail) == ("INVALID_ARGUMENT", True)


def test_nodes_that_only_the_record_knows_hold_up_nobody() -> None:
    """All were started anew with TLS while the master was away."""
    job, _ = started()
    job.restart()
    assert Node(job, "new").register(peer_address=f"{TLS}10.0.0.9:7").code == "OK"


def test_spares_do_not_open_a_world_before_all_holders_were_heard() -> None:
    """A new master has heard of one part alone: enough spares are no reason to go back to the disk."""
    job, (a, b) = started(2, max_nodes=2)
    a.save(2, any_size=True)
    spares = [newcomer(job), newcomer(job)]
    for node in spares:
        node.join()
    made = in_memory(job, 4)
    a.step(4)
    a.failed()
    job.restart()
    for node in spares:
        node.join()
    a.holds(made, 0)
    a.join()
    assert job.phase is Phase.FORMING
    b.holds(made, 1)
    b.join()
    joins(job, a, b, *spares, sees=made)
    assert job.phase is Phase.RUNNING
    assert job.members == [a.name, b.name]
    assert a.directive.run.resume.source.step == 4


def began_from_memory() -> tuple[Driven, list[Node], pb.Checkpoint]:
    """Two nodes, whose world goes on from step 20, which is in memory alone."""
    job, nodes = started(2)
    made = held(job, nodes, 20)
    for node in nodes:
        node.failed("boom", step=24)
    joins(job, *nodes, sees=made)
    job.wait(1.2)
    assert nodes[0].directive.run.resume.source.step == 20
    return job, nodes, made


def test_what_a_world_began_from_in_memory_may_be_saved_once_more() -> None:
    """With what was due there, as a Trainer of transformers does; but once."""
    job, nodes, made = began_from_memory()
    assert made.in_memory
    again = job.seal(20, any_size=True)
    assert nodes[0].commit(again).code == "OK"
    assert [record.name for record in job.job.checkpoints.usable] == [again.ref.name]
    another = job.seal(20, any_size=True)
    another.ref.name, another.ref.digest = "step-20.e2.2", "another"
    assert nodes[0].commit(another).detail == "step-20.e2.2 is not newer than step 20"
    nodes[0].step(21)
    assert not any(node.directive.make_durable.ref.digest for node in nodes), "what it began from is written in vain"


def test_a_world_that_has_loaded_damaged_memory_begins_again() -> None:
    """Whatever its ranks have made and saved since does not count; a whole copy does."""
    job, nodes, made = began_from_memory()
    nodes[0].step(23)
    wrong = held(job, nodes, 22)
    nodes[0].bad(made.ref)
    nodes[1].holds(made, 0, 1)
    wrong_too = in_memory(job, 23)
    for rank, node in enumerate(nodes):
        node.holds(wrong, rank, (rank - 1) % 2)
        node.holds(wrong_too, rank, (rank - 1) % 2)
    late = job.seal(24, any_size=True)
    assert nodes[1].commit(late).code == "FAILED_PRECONDITION"
    joins(job, *nodes, sees=made)
    job.wait(1.2)
    assert job.phase is Phase.RUNNING
    assert nodes[1].directive.run.resume.source.ref.name == made.ref.name
    assert "other copies of it are tried" in job.notices
    assert nodes[1].commit(job.seal(25, any_size=True)).code == "OK"


def test_another_master_knows_that_a_world_has_loaded_damaged_memory() -> None:
    """Nodes tell it of what that world's ranks have made, in memory and on the disk: it does not count there either."""
    job, nodes, made = began_from_memory()
    wrong = held(job, nodes, 22)
    late = job.seal(24, any_size=True)
    nodes[0].bad(made.ref)
    job.restart()
    for node in nodes:
        job.event(StreamOpened(node.name, node.incarnation))
    nodes[1].holds(made, 0, 1)
    nodes[0].holds(made, 1)
    for rank, node in enumerate(nodes):
        node.holds(wrong, rank, (rank - 1) % 2)
        node.has_told_all()
    joins(job, *nodes, sees=made)
    job.wait(2)
    assert job.phase is Phase.RUNNING
    assert nodes[1].directive.run.resume.source.ref.name == made.ref.name
    assert late.ref.name not in job.notices


def test_what_began_from_damaged_memory_does_not_count_when_the_job_is_taken_up_again() -> None:
    """The job ends before the next world opens: whoever takes it up again finds what that world sealed."""
    job, nodes, made = began_from_memory()
    job.job.settings = replace(job.job.settings, wait_for_nodes=5.0)
    job.seal(24, any_size=True)
    nodes[0].bad(made.ref)
    for node in nodes:
        node.goodbye()
    job.wait(20)
    assert job.phase is Phase.FAILED
    again = [newcomer(job) for _ in range(2)]
    joins(job, *again)
    job.wait(3)
    assert job.phase is Phase.RUNNING
    assert again[0].directive.run.resume.source.step == 0, "nothing else is left"


def test_a_node_that_has_come_again_is_waited_for_until_it_has_told_what_it_holds() -> None:
    """It was declared dead, and its reports are slow: nothing of the step is lost."""
    job, nodes = started(2)
    made = in_memory(job, 20)
    for rank, node in enumerate(nodes):
        node.holds(made, rank)
        node.has_told_all()
    for node in nodes:
        node.failed("boom", step=24)
    nodes[1].hang_up()
    job.wait(2)
    again = newcomer(job)
    del job.state.live.held.told_all[again.incarnation]  # as if it had not said so yet
    for _ in range(int(LOST_AFTER_SECONDS) + 4):
        job.wait(1)
        for node in (nodes[0], again):
            if node.directive.make_durable.look:
                node.durable(absent=True)
    assert "are gone" not in job.notices
    again.holds(made, 1)
    again.has_told_all()
    joins(job, nodes[0], again, sees=made)
    job.wait(2)
    assert nodes[0].directive.run.resume.source.step == 20
