"""What DLRover's universal-checkpoint flow was seen to get wrong, each asked of ours.

The cases are from reading and running DLRover 0.6.1 and its main branch; the code is ours. What needs real processes
(a dead store host, orphans, fixed waits) is in `tests/integration`; these ask the brain, the sampler and the plan.
"""

from __future__ import annotations

import pytest

from dalsegno.elastic import BatchPlan, ElasticSampler
from dalsegno.master.brain.state import Phase
from dalsegno.protos import control_pb2
from tests.support.jobs.masters import Driven, Node, all_join, settings

READY = control_pb2.CONVERSION_STATE_READY
ENVIRONMENT = control_pb2.CONVERSION_STATE_ENVIRONMENT


def crashed(**changes: int) -> tuple[Driven, list[Node]]:
    """A world of three with a sharded checkpoint; the last node dies, the others have joined the next round."""
    job = Driven(settings(**changes))
    nodes = job.start(3)
    nodes[0].step(5)
    nodes[0].save(5)
    nodes[2].hang_up()
    job.wait(2)
    all_join(nodes[:2])
    assert job.phase is Phase.FORMING
    return job, nodes[:2]


def test_a_crash_converts_too() -> None:
    """There, only a planned change does: after a crash the new world cannot load what the old one wrote."""
    job, nodes = crashed()
    form = nodes[0].convert()
    assert job.phase is Phase.RUNNING
    assert nodes[1].directive.run.resume.universal.digest == form.ref.digest


def test_node_0_is_nothing_special() -> None:
    """There, nobody takes over from it: it dies while it converts, and the others wait for ever."""
    job, nodes = crashed()
    nodes[0].hang_up()
    job.wait(2)
    nodes[1].convert()
    assert job.members == [nodes[1].name]


def test_only_the_owner_speaks_for_its_conversion() -> None:
    """There, the block is a bare flag that any client sets or clears, without owner, round or deadline."""
    job, nodes = crashed()
    lease = nodes[0].lease
    stranger = control_pb2.ConversionReport(caller=nodes[1].caller(), lease=lease, state=READY)
    job.call(stranger)
    assert job.phase is Phase.FORMING
    late = control_pb2.ConversionReport(caller=nodes[0].caller(), lease=lease + 7, state=READY)
    job.call(late)
    assert job.phase is Phase.FORMING
    assert nodes[0].lease == lease


def test_ready_without_files_opens_nothing() -> None:
    """What counts is the committed form, not the word."""
    job, nodes = crashed()
    assert job.call(control_pb2.ClaimRequest(caller=nodes[0].caller(), lease=nodes[0].lease)).code == "OK"
    nodes[0].converts(READY)
    assert job.phase is Phase.FORMING


def test_a_conversion_that_raises_blocks_nobody_for_ever() -> None:
    """There, the block stays set when the converter raises."""
    job, nodes = crashed()
    for node in nodes:
        assert job.call(control_pb2.ClaimRequest(caller=node.caller(), lease=node.lease)).code == "OK"
        node.converts(ENVIRONMENT, "no space left on device")
    assert job.phase is Phase.WAITING
    assert "no space left on device" in job.notices
    job.wait(61)
    owner = next(node for node in nodes if node.lease)
    owner.convert()
    assert job.phase is Phase.RUNNING


def test_a_conversion_that_hangs_has_a_limit() -> None:
    """There, a conversion may take for ever."""
    job, nodes = crashed()
    job.wait(121)
    assert not nodes[0].lease
    assert nodes[1].lease


def test_a_newcomer_forms_no_world_of_its_own() -> None:
    """There, the block comes late: a newcomer can form a world alone beside the running one."""
    job = Driven()
    a, b = job.start(2)
    late = job.node()
    late.join()
    for step in range(1, 60):
        job.wait(1)
        a.step(step)
        if job.phase is Phase.DRAINING:
            break
        assert late.order == "wait"
    assert late.order == "wait", "until the others have drained"
    assert job.epoch == 1
    assert job.members == [a.name, b.name]


def test_no_world_without_who_converts() -> None:
    """There, unblocking before node 0 has joined again forms a world without it."""
    job, nodes = crashed()
    nodes[0].convert()
    assert job.members == [node.name for node in nodes]


def test_everybody_stops_before_the_conversion() -> None:
    """There, workers go on while their checkpoint is converted: steps that nobody keeps."""
    job = Driven()
    a, b = job.start(2)
    a.step(1)
    late = job.node()
    late.join()
    late.warm()
    a.save(2)
    a.drained(2)
    assert not any(node.lease for node in (a, b, late)), "b still trains"
    b.drained(2)
    all_join([a, b, late])
    assert a.lease


def test_min_nodes_outlives_the_master() -> None:
    """There, min_nodes is lost when the master restarts."""
    job = Driven(settings(min_nodes=2))
    a, b = job.start(2)
    job.restart()
    for node in (a, b):
        node.beat()
    b.hang_up()
    job.wait(10)
    all_join([a])
    job.wait(30)
    assert job.phase is Phase.WAITING


def test_every_rank_makes_as_many_micro_steps() -> None:
    """There, a world that doesn't divide the global batch gives its ranks different numbers of them: a deadlock."""
    for world in range(1, 65):
        plan = BatchPlan(16, world, 4)
        assert len({len(plan.slices(rank)) for rank in range(world)}) == 1


@pytest.mark.parametrize("resumes", [1, 2, 3, 5])
def test_the_second_resume_replays_nothing(resumes: int) -> None:
    """There, the second resume within a data epoch sees samples again."""
    seen: list[int] = []
    state = ElasticSampler(97, 8, seed=3).state_dict()
    for _ in range(resumes + 1):
        sampler = ElasticSampler(97, 8, seed=3)
        sampler.load_state_dict(state)
        for batch in sampler:
            seen += batch.sample_ids
            sampler.position = batch.position_after
            if len(seen) % 16 == 0:
                break
        state = sampler.state_dict()
    assert len(seen) == len(set(seen))
