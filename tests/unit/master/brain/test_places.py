"""Which parts of a step in memory each node is told to fetch, and which place it takes."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from dalsegno.master.brain.memory import LOST_AFTER_SECONDS
from dalsegno.master.brain.places import MOST_PLANS, SLOW_SECONDS
from dalsegno.master.brain.state import Phase
from dalsegno.protos import control_pb2 as pb
from dalsegno.protos.reads import Reads
from tests.support.jobs.masters import Driven, Node, settings
from tests.unit.master.brain.test_memory import held, in_memory, joins, newcomer, parts, started
from tests.unit.master.brain.test_refusals import refuses


def trained(
    count: int = 4, shape: dict[str, Any] | None = None, **fields: Any
) -> tuple[Driven, list[Node], pb.Checkpoint]:
    """A world of so many nodes, which have step 20: each its own part and that of the node before."""
    job, nodes = started(count, **({"min_nodes": count, "max_nodes": count} | fields))
    made = held(job, nodes, 20, **({"by_place": True} | (shape or {})))
    nodes[0].step(23)
    return job, nodes, made


def crashed(**fields: Any) -> tuple[Driven, list[Node], pb.Checkpoint]:
    """The same, and the ranks of one node have failed."""
    job, nodes, made = trained(**fields)
    nodes[2].failed(step=23)
    return job, nodes, made


def one_gone() -> tuple[Driven, list[Node], pb.Checkpoint]:
    """The second of four nodes is gone, and four are needed; those that are left."""
    job, nodes, made = trained()
    nodes[1].hang_up()
    job.wait(1.5)
    return job, [nodes[0], nodes[2], nodes[3]], made


def restarted() -> tuple[Driven, list[Node], pb.Checkpoint]:
    """A world that goes on from parts of the step has opened, and another master knows that from its record alone."""
    job, nodes, made = crashed()
    joins(job, *nodes, sees=made)
    job.restart()
    for rank, node in enumerate(nodes):
        node.holds(made, *{0, rank, (rank - 1) % 4})
        node.has_told_all()
    return job, nodes, made


def wanted(*nodes: Node) -> list[set[int]]:
    """The parts that each of them is told to fetch; all of them are told, whether there are more."""
    assert all(node.order == "gather" for node in nodes)
    return [set(parts(node)) for node in nodes]


def places(job: Driven) -> list[str]:
    """Names of the world's nodes by group rank."""
    assert job.job.world is not None
    return [member.node for member in job.job.world.members]


def names(*nodes: Node) -> list[str]:
    return [node.name for node in nodes]


def test_all_nodes_stay() -> None:
    """Each is told of its own part, of the first, and of the one that it holds for the node before."""
    job, nodes, made = crashed()
    assert wanted(*nodes) == [{0, 3}, {0, 1}, {0, 1, 2}, {0, 2, 3}]
    assert all(node.directive.gather.partly for node in nodes)
    joins(job, *nodes, sees=made)
    assert job.phase is Phase.RUNNING
    assert places(job) == names(*nodes)


def test_a_spare_takes_the_place_of_who_is_gone() -> None:
    """And nobody else another one. A spare besides is told of the first part only."""
    job, nodes, made = trained()
    spares = [newcomer(job), newcomer(job)]
    joins(job, *spares)
    nodes[1].hang_up()
    job.wait(1.5)
    left = [nodes[0], nodes[2], nodes[3]]
    assert wanted(*left, *spares) == [{0, 3}, {0, 1, 2}, {0, 2, 3}, {0, 1}, {0}]
    joins(job, *left, *spares, sees=made)
    assert places(job) == names(nodes[0], spares[0], nodes[2], nodes[3])


def test_the_first_place_is_an_old_nodes() -> None:
    """The first of who stays takes it, and the newcomer comes to that one's place."""
    job, nodes, made = trained()
    spare = newcomer(job)
    spare.join()
    nodes[0].hang_up()
    job.wait(1.5)
    assert wanted(*nodes[1:], spare) == [{0, 3}, {0, 1, 2}, {0, 2, 3}, {0, 1}]
    joins(job, *nodes[1:], spare, sees=made)
    assert places(job) == names(nodes[1], spare, nodes[2], nodes[3])


def test_without_such_a_step_newcomers_come_last() -> None:
    job, nodes = started(4, min_nodes=4, max_nodes=4)
    spare = newcomer(job)
    spare.join()
    nodes[1].hang_up()
    job.wait(1.5)
    joins(job, nodes[0], nodes[2], nodes[3], spare)
    assert places(job) == names(nodes[0], nodes[2], nodes[3], spare)


def test_who_stays_waits_with_its_own() -> None:
    """As long as there are too few nodes for a world; who comes at last is told what its place needs."""
    job, left, made = one_gone()
    assert wanted(*left) == [{0, 3}, {0, 1, 2}, {0, 1, 2, 3}]  # Of part 1 there is one copy left, which is not enough.
    joins(job, *left, sees=made)
    assert job.phase is Phase.WAITING
    late = newcomer(job)
    job.wait(0.1)
    assert wanted(late) == [{0, 1}]
    late.join(sees=[made])
    assert job.phase is Phase.RUNNING
    assert places(job) == names(left[0], late, *left[1:])


@pytest.mark.parametrize("case", ["smaller", "not by place", "other ranks"])
def test_all_parts_for_all(case: str) -> None:
    """In a smaller world, in one whose nodes have other numbers of ranks, and where ranks may load everything."""
    job, nodes = started(3, min_nodes=2, max_nodes=3)
    made = held(job, nodes, 20, by_place=case != "not by place")
    others = nodes[:2]
    if case == "other ranks":
        others.append(job.node(host="other", peer_address="10.0.0.9:7", nproc=2))
        others[-1].join()
    nodes[0].step(23)
    (nodes[2].failed if case == "not by place" else nodes[2].hang_up)()
    job.wait(1.5)
    assert wanted(*others) == [{0, 1, 2}] * len(others)
    assert not any(node.directive.gather.partly for node in others)
    assert made.step == 20


def test_parts_that_are_not_enough_any_more() -> None:
    """A node that had joined is lost, and the world will be smaller: the others are asked for all parts."""
    job, nodes, made = crashed(min_nodes=2)
    joins(job, *nodes[:3], sees=made)
    nodes[3].hang_up()
    job.wait(1.5)
    assert wanted(*nodes[:3]) == [{0, 1, 2, 3}] * 3
    assert job.phase is Phase.FORMING
    joins(job, *nodes[:3], sees=made)
    job.wait(1.5)
    assert job.phase is Phase.RUNNING


# One axis of 12 elements is cut, as each rank says.
CUT = {"reads": Reads((12,))}


def test_a_smaller_world_whose_ranks_say_what_they_load() -> None:
    """Each node needs the parts in which its ranks' ranges lie, and the first one."""
    job, nodes, made = trained(shape=CUT, min_nodes=2)
    nodes[1].hang_up()
    job.wait(1.5)
    left = [nodes[0], nodes[2], nodes[3]]
    assert wanted(*left) == [{0, 1, 3}, {0, 1, 2}, {0, 2, 3}]  # Part 3 is read by one alone, and two are to have it.
    joins(job, *left, sees=made)
    job.wait(2)
    assert job.phase is Phase.RUNNING
    assert places(job) == names(*left)


def test_a_larger_world_whose_ranks_say_what_they_load() -> None:
    """Who comes fetches its own parts, and no others."""
    job, nodes = started(3, min_nodes=3, max_nodes=4, grow_interval=0.0)
    made = held(job, nodes, 20, by_place=True, **CUT)
    nodes[0].step(23)
    nodes[2].failed(step=23)
    more = newcomer(job)
    job.wait(0.1)
    assert wanted(*nodes, more) == [{0}, {0, 1}, {0, 1, 2}, {0, 2}]
    joins(job, *nodes, more, sees=made)
    job.wait(2)
    assert places(job) == names(*nodes, more)


def test_parts_that_nobody_loads_have_copies() -> None:
    """Where each rank loads what the first one has saved: on as many nodes as before, other ones for each part."""
    job, nodes, _ = trained(6, {"reads": Reads()}, min_nodes=2)
    nodes[5].hang_up()
    job.wait(1.5)
    told = wanted(*nodes[:5])
    assert [sum(part in own for own in told) for part in range(6)] == [5, 2, 2, 2, 2, 2]
    assert max(map(len, told)) <= 3


def test_as_many_ranks_on_other_nodes_load_their_own() -> None:
    """Whatever is cut: a rank loads what the rank of its number has saved."""
    job, nodes, _ = trained(shape={"reads": Reads((1,))}, min_nodes=2)
    both = job.node(host="both", peer_address="10.0.1.1:7", nproc=2)
    for node in (nodes[1], nodes[3]):
        node.hang_up()
    job.wait(1.5)
    assert wanted(nodes[0], nodes[2], both) == [{0, 1, 3}, {0, 1, 2}, {0, 2, 3}]


@pytest.mark.parametrize("case", ["", "not by place", "by universal files", "with nonsense"])
def test_what_ranks_say_does_not_count(case: str) -> None:
    """Where a world of another size loads something else, or where it makes no sense."""
    shape: dict[str, Any] = {**CUT, "by_place": case != "not by place", "any_size": case != "by universal files"}
    job, nodes = started(6, min_nodes=2, max_nodes=6)
    made = in_memory(job, 20, **shape)
    if case == "with nonsense":
        made.shape.reads.alignment = 0
    for rank, node in enumerate(nodes):
        node.holds(made, rank, (rank - 1) % 6)
    nodes[0].step(23)
    nodes[5].hang_up()
    job.wait(1.5)
    assert all(own == set(range(6)) for own in wanted(*nodes[:5])) == bool(case)


def test_a_leaver_among_those_that_wait() -> None:
    """What it has counts as nobody's: more of those that stay fetch it."""
    job, left, made = one_gone()
    assert wanted(*left) == [{0, 3}, {0, 1, 2}, {0, 1, 2, 3}]
    joins(job, *left, sees=made)
    left[2].leave()
    job.wait(0.1)
    assert wanted(*left[:2]) == [{0, 1, 2, 3}] * 2


def test_a_step_that_comes_to_the_disk_while_ranks_train() -> None:
    """What concerned its parts is forgotten."""
    job, nodes = started(2)
    made = in_memory(job, 20, by_place=True)
    for rank, node in enumerate(nodes):
        node.holds(made, rank, wanted=True)
    nodes[0].step(21)
    for node in (*nodes, *nodes):
        if node.directive.make_durable.ref.digest:
            node.wrote(made, *node.directive.make_durable.write)
    head = job.job.checkpoints.head
    assert (head.step, head.parts, head.layout) == (20, 0, ()) if head is not None else False


def test_who_stays_in_a_smaller_world_keeps_its_place() -> None:
    """Before that has saved anything: a spare takes the place of who is lost, and has to fetch what is needed there."""
    job, nodes, made = trained(6, {"reads": Reads((60,))}, min_nodes=5)
    nodes[5].hang_up()
    job.wait(1.5)
    told = wanted(*nodes[:5])
    joins(job, *nodes[:5], sees=made)
    job.wait(2)
    assert job.phase is Phase.RUNNING
    for node, own in zip(nodes[:5], told, strict=True):
        node.holds(made, *own)
    nodes[2].hang_up()
    job.wait(1.5)
    left = [*nodes[:2], *nodes[3:5]]
    kept = wanted(*left)
    assert all(before <= now for before, now in zip([*told[:2], *told[3:]], kept, strict=True))
    assert max(map(len, kept)) < 6
    spare = newcomer(job)
    job.wait(0.1)
    assert wanted(*left, spare) == [*told[:2], *told[3:], told[2]]
    joins(job, *left, spare, sees=made)
    job.wait(2)
    assert places(job) == names(*nodes[:2], spare, *nodes[3:5])


@pytest.mark.parametrize("reads", [Reads(), Reads((12,))])
def test_a_newcomer_that_refuses(reads: Reads) -> None:
    """Nothing can have been missed where all is in the first part: it is put aside at once, and nobody fetches more."""
    job, nodes = started(3, min_nodes=2, max_nodes=4, grow_interval=0.0)
    made = held(job, nodes, 20, by_place=True, reads=reads)
    nodes[0].step(23)
    nodes[2].failed(step=23)
    more = newcomer(job)
    job.wait(0.1)
    joins(job, *nodes, more, sees=made)
    job.wait(2)
    assert len(places(job)) == 4
    for node in (*nodes, more):
        refuses(node, "the resume point is another optimizer's")
    joins(job, *nodes, more, sees=made)
    job.wait(2)
    if reads.lengths:
        assert wanted(*nodes, more) == [{0, 1, 2}] * 4
    else:
        assert places(job) == names(*nodes)


# By host, and what each has of a step of five nodes, as buddies are on other hosts.
HOSTS = ("A", "A", "B", "B", "C")
ON_HOSTS = ({0, 4}, {1}, {0, 1, 2}, {3}, {2, 3, 4})


@pytest.mark.parametrize("reads", [Reads(), Reads((1200,)), None])
def test_a_host_that_is_lost_before_the_next_save(reads: Reads | None) -> None:
    """No part is on one host alone where there is another: also of those that are read twice there, and by nobody."""
    job = Driven(settings(memory_replicas=1, universal_checkpoint=False, min_nodes=2, max_nodes=5))
    nodes = [newcomer(job, host) for host in HOSTS]
    joins(job, *nodes)
    job.wait(1.1)
    made = in_memory(job, 20, by_place=True, reads=reads)
    for node, own in zip(nodes, ON_HOSTS, strict=True):
        node.holds(made, *own)
    nodes[0].step(23)
    nodes[4].hang_up()
    job.wait(1.5)
    left = nodes[:4]
    told = wanted(*left)
    for part in range(5):
        assert {host for host, own in zip(HOSTS, told, strict=False) if part in own} == {"A", "B"}
    for node, own, before in zip(left, told, ON_HOSTS, strict=False):
        node.holds(made, *own, *before)
    joins(job, *left, sees=made)
    job.wait(2)
    assert job.phase is Phase.RUNNING
    for node in nodes[2:4]:
        node.hang_up()
    job.wait(LOST_AFTER_SECONDS + 120)
    assert job.job.checkpoints.head is not None
    assert job.job.checkpoints.head.step == 20


@pytest.mark.parametrize("restarts", [False, True])
def test_ranks_of_a_smaller_world_that_load_more_than_they_say(restarts: bool) -> None:
    """Before their first step: all nodes fetch all parts, and it is not taken for a step that does not re-shard."""
    job, nodes, made = trained(shape={**CUT, "any_size": False, "reshards": True}, min_nodes=2)
    nodes[3].hang_up()
    job.wait(1.5)
    left = nodes[:3]
    told = wanted(*left)
    assert told == [{0, 1, 3}, {0, 1, 2}, {0, 2, 3}]
    joins(job, *left, sees=made)
    job.wait(2)
    assert job.phase is Phase.RUNNING
    if restarts:
        job.restart()
    for node, own in zip(left, told, strict=True):
        node.holds(made, *own)
        node.has_told_all()
    for node in left:
        node.failed("there is no such file")
    joins(job, *left, sees=made)
    assert wanted(*left) == [{0, 1, 2, 3}] * 3
    joins(job, *left, sees=made)
    job.wait(2)
    assert job.phase is Phase.RUNNING
    assert job.job.world is not None
    assert job.job.world.resharded
    for node in left:
        node.failed("there is no such file")
    joins(job, *left, sees=made)
    job.wait(2)
    assert "is converted instead" in job.notices


@pytest.mark.parametrize("refused", [False, True])
def test_ranks_that_fail_with_parts_of_a_step(refused: bool) -> None:
    """Before their first step: each node is asked for all of it once, and that was no failure of the script's."""
    job, nodes, made = crashed()
    joins(job, *nodes, sees=made)
    assert all(node.directive.run.resume.source.in_memory for node in nodes)
    fails = refuses if refused else Node.failed
    for node in nodes:
        fails(node, "there is no such file")
    joins(job, *nodes, sees=made)
    assert wanted(*nodes) == [{0, 1, 2, 3}] * 4
    assert "each node had only its parts of step-20" in job.notices
    joins(job, *nodes, sees=made)
    assert job.phase is Phase.RUNNING
    assert job.job.run.budget.failures == 1  # That is the crash.
    for node in nodes:
        fails(node, "there is no such file")
    joins(job, *nodes, sees=made)
    job.wait(2)
    assert job.has_failed is refused
    assert refused or job.phase is Phase.RUNNING


def test_another_one_is_lost_while_nodes_are_missing() -> None:
    """Of each part there are as many copies by then as the job wants."""
    job, left, made = one_gone()
    told = wanted(*left)
    joins(job, *left, sees=made)
    for node, has in zip(left, told, strict=True):
        node.holds(made, *has)
    job.wait(600)
    assert job.phase is Phase.WAITING
    left[1].hang_up()
    job.wait(LOST_AFTER_SECONDS + 60)
    assert job.job.checkpoints.head is not None
    assert job.job.checkpoints.head.step == 20


@pytest.mark.parametrize("case", ["held", "flapping"])
def test_a_node_that_is_no_prospect_before_it_answers(case: str) -> None:
    """It was lost too often, or just now: its answer with some parts changes the plan once, and not to and fro."""
    job, left, made = one_gone()
    joins(job, *left, sees=made)
    for _ in range(2 if case == "flapping" else 0):
        late = job.node(host="new", peer_address="10.0.0.9:7")
        job.wait(0.1)
        late.hang_up()
        job.wait(1.5)
    late = job.node(host="new", peer_address="10.0.0.9:7")
    if case == "held":
        job.job.holds[late.name], job.state.live.held_until[late.name] = 300.0, job.now + 300.0
    job.wait(0.1)
    for _ in range(2):
        late.join(sees=[made])
    assert job.state.live.gathering.plans < 10
    assert job.phase is Phase.RUNNING
    assert places(job) == names(left[0], late, *left[1:])


@pytest.mark.parametrize("slow", [False, True])
def test_a_spare_that_answers_before_who_stays(slow: bool) -> None:
    """The others have what they need; after a while the spare takes the place of who does not come."""
    job, nodes, made = trained()
    spare = newcomer(job)
    spare.join()
    nodes[2].failed(step=23)
    assert wanted(*nodes, spare) == [{0, 3}, {0, 1}, {0, 1, 2}, {0, 2, 3}, {0}]
    joins(job, spare, nodes[0], nodes[2], nodes[3], sees=made)
    job.wait(SLOW_SECONDS - 9.0)
    assert job.phase is Phase.FORMING
    if slow:
        job.wait(10.0)
        joins(job, spare, nodes[0], nodes[2], nodes[3], sees=made)
        assert places(job) == names(nodes[0], spare, nodes[2], nodes[3])
    else:
        joins(job, nodes[1], sees=made)
        assert places(job) == names(*nodes)
    assert job.phase is Phase.RUNNING


def test_two_nodes_that_cannot_write() -> None:
    """They have both copies of a part: another one fetches that and writes all of it."""
    job, nodes, made = crashed()
    joins(job, *nodes, sees=made)
    for rank, node in enumerate(nodes):
        node.holds(made, *{0, rank, (rank - 1) % 4})
    nodes[0].step(21)
    for second in range(30):
        for node in nodes:
            order = node.directive.make_durable
            if order.ref.digest and node in nodes[1:3]:
                node.durable("no room on the disk")
            elif order.ref.digest:
                node.wrote(made, *order.write)
        nodes[0].step(22 + second)
        job.wait(1.0)
    assert job.job.checkpoints.head is not None
    assert job.job.checkpoints.head.parts == 0


def test_many_nodes_that_are_lost_one_by_one() -> None:
    """Each changes whose buddy is whose: that is no reason to fetch all parts."""
    job, nodes, _ = trained(120)
    for node in nodes[1:109:2]:
        node.hang_up()
        job.wait(0.1)
    assert nodes[0].directive.gather.partly


def test_a_refusal_before_another_master() -> None:
    """It does not know with which parts the world was opened: they may be the reason."""
    job, nodes, made = restarted()
    for node in nodes:
        refuses(node, "not all rows are here")
    for _ in range(3):
        joins(job, *nodes, sees=made)
    job.wait(3)
    assert job.phase is Phase.RUNNING
    for node in nodes:
        refuses(node, "not all rows are here")
    assert job.has_failed


def test_who_could_not_fetch_is_asked_for_no_more_than_before() -> None:
    job, left, made = one_gone()
    joins(job, *left, sees=made)
    late = newcomer(job)
    job.wait(0.1)
    late.join()
    assert late.order == "wait"
    assert set(parts(late)) == {0, 1}
    assert late.directive.wait.partly


def test_ranks_decide_who_takes_the_first_place() -> None:
    """Of who stays it is one with as many ranks as were there, if there is one."""
    job = Driven(settings(memory_replicas=1, universal_checkpoint=False, min_nodes=4, max_nodes=4))
    ranks = (2, 1, 2, 1)
    nodes = [job.node(host=f"h{i}", peer_address=f"10.0.0.{i}:7", nproc=count) for i, count in enumerate(ranks)]
    for node in nodes:
        node.join()
    job.wait(1.1)
    made = held(job, nodes, 20, by_place=True)
    nodes[0].step(23)
    nodes[0].hang_up()
    job.wait(1.5)
    late = job.node(host="h9", peer_address="10.0.0.9:7", nproc=2)
    job.wait(0.1)
    assert all(node.directive.gather.partly for node in (*nodes[1:], late))
    joins(job, *nodes[1:], late, sees=made)
    assert places(job) == names(nodes[2], nodes[1], late, nodes[3])


def test_a_larger_world_that_has_saved_nothing() -> None:
    """Its last node is replaced before a step: it goes on from what a smaller one has saved, of which all need all."""
    job, nodes = started(3, min_nodes=3, max_nodes=4, grow_interval=0.0)
    made = held(job, nodes, 20, by_place=True)
    nodes[0].step(23)
    nodes[2].failed(step=23)
    more = newcomer(job)
    job.wait(0.1)
    assert wanted(*nodes, more) == [{0, 1, 2}] * 4
    joins(job, *nodes, more, sees=made)
    job.wait(2)
    assert len(places(job)) == 4
    spare = newcomer(job)
    spare.join()
    more.hang_up()
    job.wait(1.5)
    assert wanted(*nodes, spare) == [{0, 1, 2}] * 4
    joins(job, *nodes, spare, sees=made)
    job.wait(2)
    assert places(job) == names(*nodes, spare)


def test_agents_that_come_again_keep_their_places() -> None:
    """Under their names, in another order."""
    job, nodes, made = crashed()
    again = {0: nodes[0]}
    for rank in (2, 3, 1):
        nodes[rank].hang_up()
        job.wait(1.5)
        again[rank] = job.node(host=f"host-{rank}", peer_address=f"10.0.0.{rank}:7")
        assert again[rank].name == nodes[rank].name
        again[rank].holds(made, rank, (rank - 1) % 4)
    job.wait(0.1)
    assert wanted(*(again[rank] for rank in range(4))) == [{0, 3}, {0, 1}, {0, 1, 2}, {0, 2, 3}]


def test_a_step_that_has_come_to_the_disk_meanwhile() -> None:
    """Who has joined with parts of it needs no others."""
    job, nodes, made = crashed()
    joins(job, *nodes[:3], sees=made)
    on_disk = pb.Checkpoint()
    on_disk.CopyFrom(made)
    on_disk.in_memory = False
    nodes[3].join(sees=[on_disk])
    assert job.phase is Phase.RUNNING
    assert not nodes[0].directive.run.resume.source.in_memory


def test_each_writes_what_it_has() -> None:
    """Behind the first step, where no node has all parts: nobody has to fetch them for that."""
    job, nodes, made = crashed()
    joins(job, *nodes, sees=made)
    for rank, node in enumerate(nodes):
        node.holds(made, *{0, rank, (rank - 1) % 4})
    nodes[0].step(21)
    assert [list(node.directive.make_durable.write) for node in nodes] == [[0], [1], [2], [3]]
    for rank, node in enumerate(nodes):
        node.wrote(made, rank)
    sealer = next(node for node in nodes if node.directive.make_durable.seal)
    head = job.job.checkpoints.head
    assert (head.parts, head.layout) == (4, (1, 1, 1, 1)) if head is not None else False
    sealer.wrote(made)
    head = job.job.checkpoints.head
    assert (head.parts, head.layout) == (0, ()) if head is not None else False


def test_another_master_knows_the_places() -> None:
    """How many ranks each node had stands on the record."""
    job, nodes, _ = restarted()
    nodes[1].failed(step=20)
    job.wait(LOST_AFTER_SECONDS)
    assert wanted(*nodes) == [{0, 3}, {0, 1}, {0, 1, 2}, {0, 2, 3}]


def test_an_older_masters_record_does_not_know_the_places() -> None:
    """Then each node fetches all of it."""
    job, nodes, made = crashed()
    record = job.job.checkpoints.head
    assert record is not None
    job.job.checkpoints.put(replace(record, layout=()))
    job.restart()
    for rank, node in enumerate(nodes):
        node.holds(made, rank, (rank - 1) % 4)
    job.wait(LOST_AFTER_SECONDS)
    assert wanted(*nodes) == [{0, 1, 2, 3}] * 4


def test_nodes_that_come_and_go_without_an_end() -> None:
    """Plans are made so often at most; then all parts do, whoever comes."""
    job, nodes, made = crashed(min_nodes=2)
    joins(job, *nodes[:3], sees=made)
    for _ in range(MOST_PLANS + 5):
        nodes[3].hang_up()
        job.wait(1.5)
        nodes[3] = newcomer(job)
        job.wait(0.1)
    assert wanted(*nodes) == [{0, 1, 2, 3}] * 4
    joins(job, *nodes, sees=made)
    assert job.phase is Phase.RUNNING
