"""What the ranks want on the disk: which step is written, who writes which part, who seals it, and when it counts."""

from __future__ import annotations

import errno
import os
import re
from pathlib import Path
from typing import Any

import pytest

from dalsegno.agent.memory.durable import what_it_says
from dalsegno.master.brain.durable import ASKED_AGAIN_SECONDS
from dalsegno.master.brain.events import StreamOpened
from dalsegno.master.brain.memory import MOST_STEPS
from dalsegno.master.brain.state import Phase
from dalsegno.protos import control_pb2 as pb
from tests.support.jobs.masters import PROBE, Driven, Node

from .test_memory import in_memory, joins, newcomer, started


def wanted(job: Driven, nodes: list[Node], step: int, **shape: Any) -> pb.Checkpoint:
    """Each node has its own part, and that of the node before; the ranks want the step on the disk."""
    made = in_memory(job, step, **shape)
    for rank, node in enumerate(nodes):
        node.holds(made, rank, (rank - 1) % len(nodes), wanted=True)
    return made


def orders(nodes: list[Node]) -> list[tuple[str, list[int], bool]]:
    """What each node is to write: the step, the parts, and whether it is only the seal."""
    told = (node.directive.make_durable for node in nodes)
    return [(one.ref.name.partition(".")[0], list(one.write), one.seal) for one in told]


NOTHING: tuple[str, list[int], bool] = ("", [], False)


def steps(job: Driven) -> list[int]:
    """Steps of all commits that are on the disk."""
    return [record.step for record in job.job.checkpoints.usable if not record.parts]


def test_each_node_writes_its_own_part_and_one_seals() -> None:
    job, nodes = started(3)
    nodes[0].step(12)
    made = wanted(job, nodes, 10)
    assert orders(nodes) == [("step-10", [0], False), ("step-10", [1], False), ("step-10", [2], False)]
    nodes[1].durable()
    nodes[0].durable()
    assert orders(nodes) == [NOTHING, NOTHING, ("step-10", [2], False)]
    assert steps(job) == []
    nodes[2].durable()
    assert orders(nodes) == [("step-10", [], True), NOTHING, NOTHING]
    assert steps(job) == []
    nodes[0].durable()
    assert orders(nodes) == [NOTHING] * 3
    assert steps(job) == [10]
    head = nodes[1].directive.head
    assert (head.ref.name, head.in_memory) == (made.ref.name, False)
    assert nodes[1].directive.sight.name == made.ref.name  # Only who sealed it has seen it.


def test_what_nobody_wants_on_the_disk_stays_in_memory() -> None:
    job, nodes = started(2)
    nodes[0].step(12)
    made = in_memory(job, 10)
    for rank, node in enumerate(nodes):
        node.holds(made, rank)
    assert orders(nodes) == [NOTHING] * 2


def test_it_begins_when_every_part_is_somewhere() -> None:
    job, nodes = started(2)
    nodes[0].step(12)
    made = in_memory(job, 10)
    nodes[0].holds(made, 0, wanted=True)
    assert orders(nodes) == [NOTHING] * 2
    nodes[1].holds(made, 1)  # One node's word is enough.
    assert orders(nodes) == [("step-10", [0], False), ("step-10", [1], False)]


def test_who_has_a_copy_does_not_write_what_its_owner_has_not_told_of_yet() -> None:
    """A buddy may be heard first: the disk work would be one node's."""
    job, nodes = started(2)
    nodes[0].step(12)
    made = in_memory(job, 10)
    nodes[0].holds(made, 0, 1, wanted=True)
    assert orders(nodes) == [NOTHING] * 2
    nodes[1].holds(made, 0, wanted=True)
    assert orders(nodes) == [NOTHING] * 2
    nodes[1].holds(made, 0, 1, wanted=True)
    assert orders(nodes) == [("step-10", [0], False), ("step-10", [1], False)]


def test_a_newer_one_takes_the_place_of_one_that_has_not_begun() -> None:
    job, nodes = started(2)
    nodes[0].step(42)
    wanted(job, nodes, 10)
    for step in (20, 30):
        wanted(job, nodes, step)
        assert [name for name, *_ in orders(nodes)] == ["step-10"] * 2
    for node in (*nodes, nodes[0]):
        node.durable()
    assert steps(job) == [10]
    assert orders(nodes) == [("step-30", [0], False), ("step-30", [1], False)]


def test_what_is_being_written_is_known_however_many_come_after_it() -> None:
    job, nodes = started(2)
    nodes[0].step(100)
    wanted(job, nodes, 1)
    for step in range(2, 30):
        wanted(job, nodes, step)
    for node in (*nodes, nodes[0]):
        node.durable()
    assert steps(job) == [1]


def kept_in_memory(job: Driven, nodes: list[Node], first: int, count: int) -> None:
    """So many steps that nobody wants on the disk."""
    for step in range(first, first + count):
        made = in_memory(job, step)
        for rank, node in enumerate(nodes):
            node.holds(made, rank, (rank - 1) % len(nodes))


@pytest.mark.parametrize("waiting", [(200,), (200, 300)])
def test_what_waits_for_the_disk_is_known_however_many_come_after_it(waiting: tuple[int, ...]) -> None:
    """The disk takes longer than many steps that stay in memory. Of two that wait the newer one comes."""
    job, nodes = started(2)
    nodes[0].step(12)
    wanted(job, nodes, 100)
    nodes[0].durable()
    for step in waiting:
        wanted(job, nodes, step)
        kept_in_memory(job, nodes, step + 1, 9)
    for node in (nodes[1], nodes[0]):
        node.durable()
    assert steps(job) == [100]
    written(job, nodes, waiting[-1])
    kept_in_memory(job, nodes, 400, 9)
    assert orders(nodes) == [NOTHING] * 2
    known = sorted(step.record.step for step in job.state.live.held.steps.values())
    assert known[:-MOST_STEPS] == [100, waiting[-1]], "nothing else that is old is remembered"


def test_a_full_disk_is_not_said_of_all_steps() -> None:
    """While none reaches the disk, of the first one, the second, the fourth, and so on."""
    full = what_it_says(OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), "/ck/step-10/x"), Path("/ck"))
    assert full == "no space left on device in /ck: make room there, it is tried again"
    job, nodes = started(2)
    nodes[0].step(100)
    tried: set[str] = set()
    for step in range(10, 100, 10):
        wanted(job, nodes, step)
        for node in nodes:
            if (name := node.directive.make_durable.ref.name) and node is nodes[0]:
                tried.add(name)
            if name:
                node.durable(full)
        job.wait(ASKED_AGAIN_SECONDS + 1)
    said = re.findall(r"(\S+) could not write step-", job.notices)
    expected = sum(1 for power in range(10) if 2**power <= len(tried))
    assert len(tried) > 3
    assert [said.count(node.name) for node in nodes] == [expected] * 2
    wanted(job, nodes, 100)
    nodes[0].durable("another reason")
    assert "another reason" in job.notices


def test_one_full_disk_of_many_nodes_is_two_lines() -> None:
    """The first node is named at once, the others together: a console keeps 40 lines, and others count, too."""
    job, nodes = started(50, max_nodes=50)
    nodes[0].step(12)
    wanted(job, nodes, 10)
    for node in nodes:
        node.durable("no space left on device")
    assert job.notices.count("could not write step-10") == 1
    job.wait(6.0)
    assert job.notices.count("could not write step-10") == 2
    assert "and 46 more could not write step-10" in job.notices


def test_what_a_node_could_not_write_is_forgotten_with_it() -> None:
    """Whoever comes under its name has another disk perhaps, and any number of names may come."""
    job, nodes = started(3)
    nodes[0].step(12)
    wanted(job, nodes, 10)
    nodes[1].durable("no space left on the device")
    assert nodes[1].name in job.state.live.held.complaints
    nodes[1].hang_up()
    job.wait(2)
    assert not job.state.live.held.complaints


def test_a_node_that_cannot_write_is_replaced_by_who_has_its_part() -> None:
    job, nodes = started(3)
    nodes[0].step(12)
    wanted(job, nodes, 10)
    for _ in range(2):
        nodes[1].durable("no space left on the device")
        assert orders(nodes) == [("step-10", [0], False), NOTHING, ("step-10", [1, 2], False)]
        job.wait(ASKED_AGAIN_SECONDS + 1)
        assert orders(nodes)[1] == ("step-10", [1], False)
    assert job.notices.count("could not write step-10") == 1
    nodes[1].durable("no space left on the device")
    nodes[2].durable()
    nodes[0].durable()
    nodes[0].durable("the manifest cannot be written")
    # What others have said that they wrote is looked at again.
    assert orders(nodes) == [NOTHING, NOTHING, ("step-10", [1, 2], False)]
    nodes[2].durable()
    assert steps(job) == []
    job.wait(ASKED_AGAIN_SECONDS + 1)
    nodes[0].durable()
    nodes[0].durable()
    assert steps(job) == [10]


def test_a_disk_that_hangs_is_said_once_and_not_of_each_step() -> None:
    """Until the node can write: then it is news again. Others write its part meanwhile."""
    job, nodes = started(2)
    nodes[0].step(52)
    for step in (10, 20):
        wanted(job, nodes, step)
        nodes[1].durable("the disk hangs")
        assert orders(nodes) == [(f"step-{step}", [0, 1], False), NOTHING]
        nodes[0].durable()
        nodes[0].durable()
        assert step in steps(job)
        assert job.notices.count("the disk hangs") == 1
    job.wait(ASKED_AGAIN_SECONDS + 1)
    wanted(job, nodes, 30)
    written(job, nodes, 30)
    wanted(job, nodes, 40)
    nodes[1].durable("the disk hangs")
    assert job.notices.count("the disk hangs") == 2


def test_a_part_that_is_lost_makes_it_no_commit() -> None:
    """The run goes on from what is held, and that is written behind the next world's first step."""
    job, nodes = started(3)
    nodes[0].step(12)
    made = wanted(job, nodes, 10)
    nodes[0].durable()
    nodes[1].hang_up()
    job.wait(1.5)
    assert steps(job) == []
    assert orders([nodes[0], nodes[2]]) == [NOTHING] * 2
    assert nodes[0].directive.gather.resume.name == made.ref.name
    for node in (nodes[0], nodes[2]):
        node.holds(made, 0, 1, 2)
    joins(job, nodes[0], nodes[2], sees=made)
    job.wait(1.5)
    assert job.phase is Phase.RUNNING
    nodes[0].step(11)
    assert orders([nodes[0], nodes[2]]) == [("step-10", [], False), NOTHING]
    nodes[0].durable()
    assert steps(job) == [10]


def test_a_new_master_has_everybody_look_again() -> None:
    job, nodes = started(2)
    nodes[0].step(12)
    made = wanted(job, nodes, 10)
    nodes[0].durable()
    job.restart()
    assert orders(nodes) == [NOTHING] * 2
    for rank, node in enumerate(nodes):
        node.holds(made, rank, 1 - rank, wanted=True)
    assert orders(nodes) == [("step-10", [0], False), ("step-10", [1], False)]
    for node in (*nodes, nodes[0]):
        node.durable()
    assert steps(job) == [10]


def test_a_newer_commit_overtakes_it() -> None:
    """It is no commit any more, whatever is said of it later, and its files may go."""
    job, nodes = started(2)
    nodes[0].step(12)
    made = wanted(job, nodes, 10)
    nodes[0].durable()
    nodes[0].save(11, any_size=True)
    assert orders(nodes) == [NOTHING] * 2
    for node in nodes:
        job.call(pb.DurableRequest(caller=node.caller(), ref=made.ref))
    assert steps(job) == [11]
    assert [ref.name for ref in nodes[0].directive.prune] == [made.ref.name]


@pytest.mark.parametrize("parts", [(), (0,)])
def test_who_is_no_member_commits_nothing(parts: tuple[int, ...]) -> None:
    job, nodes = started(2, max_nodes=2)
    nodes[0].step(12)
    made = wanted(job, nodes, 10)
    spare = newcomer(job)
    job.call(pb.DurableRequest(caller=spare.caller(), ref=made.ref, parts=parts))
    job.call(pb.DurableRequest(caller=nodes[0].caller(), ref=pb.CheckpointRef(name="step-9.e1.1", digest="0" * 64)))
    assert steps(job) == []


def test_what_the_run_began_from_goes_first() -> None:
    """Of what is wanted meanwhile the newest comes next: none has begun."""
    job, nodes = started(2)
    nodes[0].step(12)
    made = in_memory(job, 10)
    for rank, node in enumerate(nodes):
        node.holds(made, rank, 1 - rank)
    nodes[1].hang_up()
    job.wait(1.5)
    joins(job, nodes[0], sees=made)
    job.wait(1.5)
    nodes[0].step(11)
    for step in (11, 12):
        nodes[0].holds(in_memory(job, step), 0, wanted=True)
        assert orders(nodes[:1]) == [("step-10", [], False)]
    nodes[0].durable()
    assert orders(nodes[:1]) == [("step-12", [0], False)]


def opened_from_memory(*, is_best: bool = False) -> tuple[Driven, list[Node], pb.Checkpoint]:
    """Of three nodes one is lost: the two that are left go on from step 10, which is nowhere but in their memories."""
    job, nodes = started(3)
    nodes[0].step(12)
    made = in_memory(job, 10)
    made.best = made.ref.name if is_best else ""
    for rank, node in enumerate(nodes):
        node.holds(made, rank, (rank - 1) % 3)
    nodes[1].hang_up()
    job.wait(1.5)
    left = [nodes[0], nodes[2]]
    for node in left:
        node.holds(made, 0, 1, 2)
    joins(job, *left, sees=made)
    job.wait(1.5)
    left[0].step(11)
    assert orders(left) == [("step-10", [], False), NOTHING]
    return job, left, made


def time_passes(job: Driven, nodes: list[Node], seconds: float) -> None:
    """The nodes train meanwhile, and look in vain for what they are to look for."""
    for _ in range(round(seconds)):
        job.wait(1)
        step = job.state.live.epoch.top_step + 1
        for node in nodes:
            node.step(step)
            if node.directive.make_durable.look:
                node.durable(absent=True)
    assert job.phase is Phase.RUNNING


LOST = "a part of step-10.e1.1 is in no memory any more"


@pytest.mark.parametrize("restarted", [False, True])
def test_what_the_run_began_from_is_not_waited_for_once_a_part_of_it_is_nowhere(restarted: bool) -> None:
    """As where somebody has deleted it at all nodes: what is saved since comes to the disk instead."""
    job, nodes, made = opened_from_memory()
    for node in nodes:
        node.holds(made, 0, 2)
    wanted(job, nodes, 12)
    nodes[0].durable("cannot be gathered: nobody has part 1")
    assert orders(nodes) == [NOTHING, ("step-10", [], False)], "the other one may have it after all"
    if restarted:
        job.restart()
        for rank, node in enumerate(nodes):
            job.event(StreamOpened(node.name, node.incarnation))
            node.holds(made, 0, 2)
            node.holds(in_memory(job, 12), rank, 1 - rank, wanted=True)
    time_passes(job, nodes, 12)
    assert job.notices.count(LOST) == 1
    written(job, nodes, 12)
    assert (nodes[0].directive.head.step, nodes[0].directive.head.in_memory) == (12, False)
    wanted(job, nodes, 13)
    written(job, nodes, 13)
    assert steps(job) == [12, 13]


def test_what_is_lost_holds_nothing_up_where_the_disk_is_full_for_a_while() -> None:
    job, nodes, made = opened_from_memory()
    for node in nodes:
        node.holds(made, 0, 2)
    wanted(job, nodes, 12)
    for _ in range(4):
        time_passes(job, nodes, ASKED_AGAIN_SECONDS + 1)
        for node in nodes:
            if node.directive.make_durable.ref.name:
                node.durable("no space left on device")
    assert steps(job) == []
    time_passes(job, nodes, ASKED_AGAIN_SECONDS + 1)
    written(job, nodes, 12)


def test_what_is_somewhere_is_not_said_to_be_lost_where_the_disk_is_full_for_a_while() -> None:
    """One part is on the disk alone, and who has the others cannot write just now. Others wait no longer for it."""
    job, nodes, made = opened_from_memory()
    for node in nodes:
        node.holds(made, 0, 2)
    job.wait(4)
    next(node for node in nodes if node.directive.make_durable.look).durable()
    wanted(job, nodes, 12)
    for _ in range(6):
        for node in (*nodes, *nodes):
            if node.directive.make_durable.ref.name:
                node.durable("no space left on device")
        time_passes(job, nodes, ASKED_AGAIN_SECONDS + 1)
    assert LOST not in job.notices
    fail(nodes, 10, "no space left on device")
    written(job, nodes, 12)


def test_what_is_lost_stays_lost_when_a_node_comes() -> None:
    """It may hold a part, and says so if it does: until then nobody tries in vain to write what lacks that."""
    job, nodes, made = opened_from_memory()
    for node in nodes:
        node.holds(made, 0, 2)
    time_passes(job, nodes, 6)
    assert job.notices.count(LOST) == 1
    other = Node(job, "incarnation-9", probe=PROBE)
    job.nodes.append(other)
    assert other.register(host="host-9", peer_address="10.0.0.9:7").code == "OK"
    job.wait(0.5)
    assert orders([*nodes, other]) == [NOTHING] * 3
    wanted(job, nodes, 12)
    for _ in range(6):
        assert orders(nodes) == [("step-12", [0], False), ("step-12", [1], False)]
        time_passes(job, nodes, 2)
    assert job.notices.count(LOST) == 1
    other.holds(made, 1)
    written(job, nodes, 12)


def fail(nodes: list[Node], step: int, why: str) -> None:
    """Whoever is to write this step cannot, one after the other."""
    for node in (*nodes, *nodes):
        if node.directive.make_durable.ref.name.startswith(f"step-{step}."):
            node.durable(why)


def test_what_the_run_began_from_is_not_waited_for_where_nobody_can_write_it() -> None:
    """As where something else has its name on the disk. It is tried again, but not while another step is written."""
    job, nodes, _ = opened_from_memory()
    wanted(job, nodes, 12)
    fail(nodes, 10, "step-10.e1.1 is no directory")
    its_parts = [("step-12", [0], False), ("step-12", [1], False)]
    assert orders(nodes) == its_parts
    time_passes(job, nodes, ASKED_AGAIN_SECONDS + 1)
    wanted(job, nodes, 13)
    assert orders(nodes) == its_parts
    fail(nodes, 12, "no space left on device")
    assert orders(nodes) == [("step-10", [], False), NOTHING]
    fail(nodes, 10, "step-10.e1.1 is no directory")
    written(job, nodes, 13)
    assert steps(job) == [13]


def test_what_was_lost_and_is_there_again_is_written() -> None:
    """A node that was not heard for a while has it, or it lies on the disk."""
    job, nodes, made = opened_from_memory()
    for node in nodes:
        node.holds(made, 0, 2)
    time_passes(job, nodes, 12)
    assert job.notices.count(LOST) == 1
    assert orders(nodes) == [NOTHING] * 2
    nodes[1].holds(made, 0, 1, 2)
    assert orders(nodes) == [NOTHING, ("step-10", [], False)]
    nodes[1].durable()
    assert steps(job) == [10]


def test_a_part_that_is_nowhere_is_looked_for_on_the_disk_first() -> None:
    job, nodes, made = opened_from_memory()
    for node in nodes:
        node.holds(made, 0, 2)
    job.wait(4)
    looks = [node for node in nodes if node.directive.make_durable.look]
    assert [list(node.directive.make_durable.write) for node in looks] == [[1]]
    looks[0].durable()
    assert LOST not in job.notices
    assert ("step-10", [0, 2], False) in orders(nodes)


def test_the_best_that_is_lost_holds_nothing_up_either() -> None:
    """The run went on from it, and has a newer commit since, which calls it the best."""
    job, nodes, made = opened_from_memory(is_best=True)
    newer = job.seal(12, any_size=True)
    newer.best = made.ref.name
    job.call(pb.CommitRequest(caller=nodes[0].caller(), checkpoint=newer))
    for node in nodes:
        node.holds(made, 0, 2)
    wanted(job, nodes, 13)
    assert orders(nodes) == [("step-10", [], False), NOTHING]
    time_passes(job, nodes, 12)
    assert job.notices.count(LOST) == 1
    written(job, nodes, 13)


def best(job: Driven, nodes: list[Node], step: int) -> pb.Checkpoint:
    """As `wanted`, and the best so far when it was saved."""
    made = in_memory(job, step, any_size=True)
    made.best = made.ref.name
    for rank, node in enumerate(nodes):
        node.holds(made, rank, (rank - 1) % len(nodes), wanted=True)
    return made


def written(job: Driven, nodes: list[Node], step: int) -> None:
    """The nodes bring to the disk what they are told to, which is this step."""
    assert {name for name, *_ in orders(nodes)} == {f"step-{step}"}
    for node in nodes:
        node.durable()
    sealing = [node for node, order in zip(nodes, orders(nodes), strict=True) if order[2]]
    for node in sealing:
        node.durable()
    assert step in steps(job)


def test_a_new_master_hears_of_the_best_behind_a_newer_commit() -> None:
    """It is older than the newest one, which names it."""
    job, nodes = started(2)
    nodes[0].step(22)
    made = best(job, nodes, 10)
    later = job.seal(20, any_size=True)
    later.candidate = made.ref.name
    job.call(pb.CommitRequest(caller=nodes[0].caller(), checkpoint=later))
    job.restart()
    for rank, node in enumerate(nodes):
        job.event(StreamOpened(node.name, node.incarnation))
        for step in (in_memory(job, 9), made):
            node.holds(step, rank, 1 - rank)
    written(job, nodes, 10)
    assert sorted(steps(job)) == [10, 20]


def test_the_best_is_not_displaced_by_a_newer_one_that_is_not() -> None:
    """What is written is ended; then the best, then the newest."""
    job, nodes = started(2)
    nodes[0].step(52)
    wanted(job, nodes, 10)
    best(job, nodes, 20)
    for step in (30, 40):
        wanted(job, nodes, step)
    for step in (10, 20, 40):
        written(job, nodes, step)
    assert orders(nodes) == [NOTHING] * 2


def test_a_better_one_takes_the_place_of_a_best_that_has_not_begun() -> None:
    job, nodes = started(2)
    nodes[0].step(42)
    wanted(job, nodes, 10)
    best(job, nodes, 20)
    best(job, nodes, 30)
    for step in (10, 30):
        written(job, nodes, step)
    assert orders(nodes) == [NOTHING] * 2


def test_the_best_comes_to_the_disk_although_a_newer_commit_is_there() -> None:
    """The ranks may have saved one themselves. The run goes on from the newest all the same, and the best stays."""
    job, nodes = started(2, keep_checkpoints=1)
    nodes[0].step(12)
    made = best(job, nodes, 10)
    for step in (11, 12):
        newer = job.seal(step, any_size=True)
        newer.candidate = made.ref.name
        job.call(pb.CommitRequest(caller=nodes[0].caller(), checkpoint=newer))
    written(job, nodes, 10)
    assert nodes[0].directive.head.ref.name == newer.ref.name
    for node in nodes:
        node.join(sees=job.sealed)  # The newest is certain: what is older may be retired.
    job.wait(1)
    assert {10, 12} <= set(steps(job))


@pytest.mark.parametrize("restarted", [False, True])
def test_the_best_comes_to_the_disk_behind_a_change(restarted: bool) -> None:
    """What the run goes on from goes first; then what that calls its candidate, from whoever holds it.

    A new master has it from the record that this is the candidate, and from the nodes who holds it.
    """
    job, nodes = started(2)
    nodes[0].step(12)
    made = best(job, nodes, 10)
    later = in_memory(job, 12, any_size=True)
    later.candidate = made.ref.name
    for rank, node in enumerate(nodes):
        node.holds(later, rank, 1 - rank)
    nodes[0].durable()
    nodes[1].hang_up()
    job.wait(1.5)
    joins(job, nodes[0], sees=later)
    job.wait(1.5)
    assert nodes[0].directive.run.resume.source.step == 12
    assert nodes[0].directive.head.candidate == made.ref.name
    if restarted:
        job.restart()
        job.event(StreamOpened(nodes[0].name, nodes[0].incarnation))
        for step in (later, made, in_memory(job, 9)):
            nodes[0].holds(step, 0, 1)
    nodes[0].step(13)
    assert orders(nodes[:1]) == [("step-12", [], False)]
    nodes[0].durable()
    wanted(job, nodes[:1], 13)
    # What was written of it was not sealed, and may have been deleted since.
    assert orders(nodes[:1]) == [("step-10", [0, 1], False)]
    nodes[0].durable()
    nodes[0].durable()
    assert steps(job) == [10, 12]
    assert nodes[0].directive.head.step == 12
    written(job, nodes[:1], 13)


def test_a_best_that_went_with_its_node_holds_nothing_up() -> None:
    job, nodes = started(2)
    nodes[0].step(12)
    made = best(job, nodes, 10)
    later = in_memory(job, 12, any_size=True)
    later.candidate = made.ref.name
    for rank, node in enumerate(nodes):
        node.holds(later, rank, 1 - rank)
    nodes[0].holds(made, 0, wanted=True)  # It has lost the copy of the other part.
    nodes[1].hang_up()
    job.wait(1.5)
    joins(job, nodes[0], sees=later)
    job.wait(1.5)
    nodes[0].step(13)
    nodes[0].durable()
    wanted(job, nodes[:1], 13)
    written(job, nodes[:1], 13)
    assert steps(job) == [12, 13]


def test_a_best_that_is_written_and_went_before_its_seal_holds_nothing_up() -> None:
    """All of it was on the disk, and nobody is left who could say what it is."""
    job, (leaver,) = started(1)
    leaver.step(12)
    made = in_memory(job, 10, any_size=True)
    made.best = made.ref.name
    leaver.holds(made, 0, wanted=True)
    other = newcomer(job)
    leaver.leave()
    later = job.seal(12, any_size=True)
    later.candidate = made.ref.name
    leaver.commit(later)
    leaver.drained(12, digest=later.ref.digest)
    joins(job, other)
    job.wait(1.5)
    other.step(13)
    leaver.durable()
    assert orders([leaver]) == [("step-10", [], True)]
    leaver.hang_up()
    job.wait(1.5)
    wanted(job, [other], 13)
    written(job, [other], 13)


def test_a_spare_that_alone_has_the_best_seals_it() -> None:
    """It was asked to, though it is no member of the world any more. Nobody else who is none is believed."""
    job, (spare,) = started(1, max_nodes=2)
    spare.step(12)
    made = in_memory(job, 10, any_size=True)
    made.best = made.ref.name
    spare.holds(made, 0, wanted=True)
    later = job.seal(12, any_size=True)
    later.candidate = made.ref.name
    spare.commit(later)
    others = [newcomer(job) for _ in range(2)]
    job.scale(1)
    spare.leave()
    spare.drained(12, digest=later.ref.digest)
    joins(job, *others)
    job.wait(1.5)
    others[0].step(13)
    assert job.members == [others[0].name]
    spare.durable()
    assert orders([spare]) == [("step-10", [], True)]
    job.call(pb.DurableRequest(caller=others[1].caller(), ref=made.ref))
    assert steps(job) == [12]
    spare.durable()
    assert sorted(steps(job)) == [10, 12]
    wanted(job, others[:1], 13)
    written(job, others[:1], 13)


def test_a_best_that_its_only_holder_cannot_write_holds_nothing_up() -> None:
    """It is tried again behind what others can write."""
    job, nodes = started(2)
    nodes[0].step(32)
    made = in_memory(job, 10, any_size=True)
    made.best = made.ref.name
    for rank, node in enumerate(nodes):
        node.holds(made, rank, wanted=True)  # Nobody has a copy.
    nodes[0].durable()
    assert orders(nodes) == [NOTHING, ("step-10", [1], False)]
    nodes[1].durable("Input/output error")
    wanted(job, nodes, 20)
    assert orders(nodes) == [("step-20", [0], False), ("step-20", [1], False)]
    nodes[0].durable()
    nodes[1].durable("Input/output error")
    assert orders(nodes) == [("step-20", [1], False), NOTHING]
    nodes[0].durable()
    nodes[0].durable()
    assert steps(job) == [20]
    job.wait(ASKED_AGAIN_SECONDS)
    assert orders(nodes) == [NOTHING, ("step-10", [1], False)]
    for node in (nodes[1], nodes[0]):
        node.durable()
    assert sorted(steps(job)) == [10, 20]


def test_a_best_that_the_run_went_on_from_comes_to_the_disk_behind_a_newer_commit() -> None:
    job, nodes = started(2)
    nodes[0].step(12)
    made = in_memory(job, 10, any_size=True)
    made.best = made.ref.name
    for rank, node in enumerate(nodes):
        node.holds(made, rank, 1 - rank)
    nodes[1].hang_up()
    job.wait(1.5)
    joins(job, nodes[0], sees=made)
    job.wait(1.5)
    nodes[0].step(11)
    newer = job.seal(11, any_size=True)
    newer.best = made.ref.name
    job.call(pb.CommitRequest(caller=nodes[0].caller(), checkpoint=newer))
    assert orders(nodes[:1]) == [("step-10", [], False)]
    nodes[0].durable()
    assert sorted(steps(job)) == [10, 11]


def test_a_leaver_stays_until_the_best_is_elsewhere_too() -> None:
    job, nodes = started(2)
    nodes[0].step(12)
    made = in_memory(job, 10, any_size=True)
    made.best = made.ref.name
    for rank, node in enumerate(nodes):
        node.holds(made, rank, wanted=True)  # Nobody has a copy.
    nodes[1].leave()
    later = in_memory(job, 12, any_size=True)
    later.candidate = made.ref.name
    for node in nodes:
        node.holds(later, 0, 1)
    nodes[1].drained(12, digest=later.ref.digest)
    nodes[0].drained(12, digest=later.ref.digest)
    assert nodes[1].order == "wait"
    nodes[0].holds(made, 0, 1)
    assert nodes[1].order == "release"


def test_leavers_that_are_outside_of_the_world_bring_the_best_to_the_disk() -> None:
    """They alone hold it: what they were asked to write counts, and then they go."""
    job, nodes = started(2)
    nodes[0].step(12)
    made = best(job, nodes, 10)
    for node in nodes:
        node.leave(notice=60.0)
    others = [newcomer(job) for _ in range(2)]
    later = in_memory(job, 12, any_size=True)
    later.candidate = made.ref.name
    for node in nodes:
        node.holds(later, 0, 1)
        node.drained(12, digest=later.ref.digest)
    for other in others:
        other.holds(later, 0, 1)
    joins(job, *others, sees=later)
    job.wait(1)
    assert job.members == [other.name for other in others]
    others[0].step(13)
    others[0].durable()
    assert [node.order for node in nodes] == ["wait", "wait"]
    for _ in range(3):
        for node in nodes:
            if node.directive.make_durable.ref.digest == made.ref.digest:
                node.durable()
    assert job.job.checkpoint(made.ref.digest) is not None
    assert [node.order for node in nodes] == ["release", "release"]


# ---- what nodes cannot fetch from each other ----


def walled_off(job: Driven, nodes: list[Node]) -> pb.Checkpoint:
    """The run is to go on from a step in memory, and each node has its own part alone."""
    nodes[0].save(5, any_size=True)
    nodes[0].step(12)
    made = in_memory(job, 10, any_size=True)
    for rank, node in enumerate(nodes):
        node.holds(made, rank)
    nodes[1].failed()
    job.wait(1)
    assert {node.directive.gather.resume.name for node in nodes} == {made.ref.name}
    return made


def test_what_nodes_cannot_fetch_from_each_other_they_write_to_the_disk() -> None:
    job, nodes = started(2)
    made = walled_off(job, nodes)
    joins(job, nodes[0])
    assert orders(nodes) == [NOTHING] * 2, "the other one may be able to"
    joins(job, nodes[1])
    assert orders(nodes) == [("step-10", [0], False), ("step-10", [1], False)]
    assert job.notices.count("cannot fetch step-10.e1.1 from the memory of other nodes: each node writes its part") == 1
    for node in nodes:
        node.durable()
    assert orders(nodes) == [("step-10", [], True), NOTHING]
    nodes[0].durable()
    assert not nodes[1].directive.gather.parts
    for node in nodes:
        node.join(sees=[*job.sealed, made])
    job.wait(1)
    assert job.phase is Phase.RUNNING
    assert nodes[0].directive.run.resume.source.step == 10


def test_enough_nodes_that_have_it_open_a_world_without_the_disk() -> None:
    job, nodes = started(2, min_nodes=1)
    made = walled_off(job, nodes)
    nodes[0].holds(made, 0, 1)
    joins(job, nodes[1])
    joins(job, nodes[0], sees=made)
    job.wait(1.5)
    assert job.phase is Phase.RUNNING
    assert orders(nodes) == [NOTHING] * 2
    assert nodes[0].directive.run.resume.source.step == 10


def test_what_can_neither_be_fetched_nor_written_is_tried_again() -> None:
    """It is not lost, and a person can mend both. What failed before, when all of it was to be fetched, counts not."""
    job, nodes = started(2)
    made = walled_off(job, nodes)
    job.call(pb.DurableRequest(caller=nodes[0].caller(), ref=made.ref, failure="it cannot be fetched"))
    joins(job, *nodes)
    job.call(pb.DurableRequest(caller=nodes[1].caller(), ref=made.ref, failure="it cannot be fetched"))
    assert orders(nodes) == [("step-10", [0], False), ("step-10", [1], False)]
    for node in nodes:
        node.durable("no space left on the device")
    assert orders(nodes) == [NOTHING] * 2
    job.wait(ASKED_AGAIN_SECONDS + 1)
    for node in nodes:
        node.durable()
    nodes[0].durable("the manifest cannot be written")
    assert orders(nodes) == [NOTHING, ("step-10", [1], False)], "what others have written is looked at again"
    nodes[1].durable()
    job.wait(ASKED_AGAIN_SECONDS + 1)
    for _ in range(2):
        nodes[0].durable()
    assert nodes[0].directive.head.ref.name == made.ref.name
    assert not nodes[0].directive.head.in_memory
