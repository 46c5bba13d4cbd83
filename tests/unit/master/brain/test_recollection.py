"""A lost store: what the job had decided is read back from agents and manifests, whoever comes first."""

from __future__ import annotations

from typing import Any

import pytest

from dalsegno.master.brain import brain
from dalsegno.master.brain.events import StreamOpened
from dalsegno.master.brain.state import Phase, Run
from dalsegno.protos import control_pb2
from tests.support.jobs.masters import Driven, Node, all_join, settings, stored

TWO_TO_FOUR = settings(min_nodes=2, max_nodes=4)


def nnodes(job: Driven) -> tuple[int, int]:
    return job.job.settings.min_nodes, job.job.settings.max_nodes


def told(node: Node) -> tuple[int, int]:
    """--nnodes as this node's present directive has it."""
    return node.directive.settings.min_nodes, node.directive.settings.max_nodes


def sealed(epoch: int, minimum: int, maximum: int, run: int = 1) -> control_pb2.Checkpoint:
    """A checkpoint that a world of `epoch` wrote."""
    name = f"step-{10 * epoch}.e{epoch}.1"
    return control_pb2.Checkpoint(
        ref=control_pb2.CheckpointRef(name=name, digest=f"digest of {name} of run {run}"),
        run_id=f"run-{run:04d}",
        step=10 * epoch,
        epoch=epoch,
        form=control_pb2.FORM_SHARDED,
        shape=control_pb2.Shape(world_size=1, any_world_size=True),
        min_nodes=minimum,
        max_nodes=maximum,
    )


def test_min_and_max_come_from_the_newest_manifest_not_from_the_first_agent() -> None:
    """A node that was told another --nnodes registers first: alone it is still below min, and both are told so."""
    job = Driven(TWO_TO_FOUR)
    a, b = job.start(2)
    a.save(3)
    everything = list(job.sealed)
    job.restart(keep_store=False)
    first = Node(job, "first")
    job.nodes.append(first)
    reply = first.register(settings=settings(min_nodes=1, max_nodes=3), inventory=everything)
    assert isinstance(reply.message, control_pb2.RegisterReply)
    assert (reply.message.settings.min_nodes, reply.message.settings.max_nodes) == (2, 4)
    assert told(first) == (2, 4)
    first.join()
    job.wait(12)
    assert job.phase is Phase.WAITING
    assert "2 needed" in first.directive.gather.missing
    assert "--nnodes=2:4" in job.notices
    second = job.node(inventory=everything)
    all_join([first, second])
    job.wait(2)
    assert len(job.members) == 2
    assert not b.is_known


def test_who_sees_the_manifest_may_come_later() -> None:
    """The first agent does not see it yet (NFS): its directive tells it afterwards what counts."""
    job = Driven()
    first = job.node(settings=settings(min_nodes=1, max_nodes=3), generation=5)
    assert told(first) == (1, 3)
    job.node(inventory=[sealed(2, 2, 4)])
    assert told(first) == nnodes(job) == (2, 4)


def test_a_manifest_heard_of_with_a_join_counts_too() -> None:
    """Sealed after the agents had registered."""
    job = Driven()
    late = job.node(settings=settings(min_nodes=1, max_nodes=1))
    late.join(sees=[sealed(2, 2, 4)])
    assert nnodes(job) == (2, 4)


def test_where_nothing_was_saved_agents_remember() -> None:
    """All that the job's settings said, not only --nnodes; a newcomer's own flags do not count."""
    job = Driven()
    in_force = settings(min_nodes=2, max_nodes=3, drain_timeout=77.0)
    job.node(settings=settings(min_nodes=1, max_nodes=9), epoch=1, generation=5, known_settings=in_force)
    job.node(settings=settings(min_nodes=1, max_nodes=8), generation=5)
    assert nnodes(job) == (2, 3)
    assert job.job.settings.drain_timeout == 77.0


@pytest.mark.parametrize(
    ("remembered", "saved", "counts"),
    [(3, 4, (2, 2)), (4, 4, (3, 3)), (5, 4, (3, 3))],
    ids=["the manifest is newer", "the agent was told later", "the agent saw more"],
)
@pytest.mark.parametrize("agent_first", [True, False])
def test_the_newest_memory_counts(remembered: int, saved: int, counts: tuple[int, int], agent_first: bool) -> None:
    """Whoever brings it first. Of one epoch, an agent may have heard of other settings after the checkpoint."""
    job = Driven()
    news: list[dict[str, Any]] = [
        {"epoch": remembered, "known_settings": settings(min_nodes=3, max_nodes=3)},
        {"inventory": [sealed(2, 1, 1), sealed(saved, 2, 2)]},
    ]
    for fields in news if agent_first else reversed(news):
        job.node(generation=5, **fields)
    assert nnodes(job) == counts


def test_nnodes_of_the_masters_own_command_line_stands() -> None:
    """Whatever was recorded; what else agents remember counts."""
    job = Driven()
    job.fixed(1, 2)
    memory = settings(min_nodes=3, max_nodes=4, drain_timeout=77.0)
    node = job.node(inventory=[sealed(2, 3, 4)], epoch=2, generation=5, known_settings=memory)
    assert told(node) == nnodes(job) == (1, 2)
    assert job.job.settings.drain_timeout == 77.0


def test_what_was_read_back_survives_a_restart_and_the_agent_that_brought_it() -> None:
    """Embedded, while the master listens: all agents go, and the next one was told something else."""
    job = Driven(embedded=True)
    node = job.node(settings=settings(min_nodes=1), inventory=[sealed(2, 2, 4)])
    job.restart()
    node.leave()
    node.hang_up()
    job.wait(2)
    assert not job.job.nodes
    assert job.job.recollection.listening
    late = job.node(settings=settings(min_nodes=1, max_nodes=1))
    assert told(late) == nnodes(job) == (2, 4)


def test_once_it_was_read_back_a_person_may_start_an_embedded_job_with_other_nodes() -> None:
    """All agents have gone: the first of the next ones brings the settings, as ever."""
    job = Driven(embedded=True)
    node = job.node(inventory=[sealed(2, 2, 4)])
    job.wait(8)
    assert not job.job.recollection.listening
    node.leave()
    node.hang_up()
    job.wait(2)
    again = job.node(settings=settings(min_nodes=1, max_nodes=1), inventory=[sealed(2, 2, 4)])
    assert told(again) == nnodes(job) == (1, 1)


def test_a_run_that_is_over_says_nothing_about_the_next() -> None:
    """Its mark came into sight after its checkpoints: neither those nor its --nnodes are the new run's."""
    job = Driven()
    job.node(settings=settings(min_nodes=1, max_nodes=1), inventory=[sealed(2, 2, 4)])
    job.node(settings=settings(min_nodes=1, max_nodes=3), finished_runs=["run-0001"])
    assert job.job.run == Run(2), "nor that it made steps: if no world of the new one does, it has failed"
    assert job.job.run_id == "run-0002"
    assert job.job.checkpoints == []
    assert nnodes(job) == (1, 3)


@pytest.mark.parametrize("recorded", [(0, 0), (3, 2), (1, 1)])
def test_recorded_nodes_that_make_no_sense_do_not_count(recorded: tuple[int, int]) -> None:
    """By themselves, or with this job's --node-unit; it is said."""
    job = Driven()
    job.node(settings=settings(min_nodes=2, node_unit=2), inventory=[sealed(2, *recorded)])
    assert nnodes(job) == (2, 4)
    assert "does not count" in job.notices


def test_without_a_lost_run_the_first_agents_nodes_are_the_jobs() -> None:
    """What agents remember of a job that this store knows changes nothing."""
    job = Driven()
    job.start(1)
    other = settings(min_nodes=3, max_nodes=3)
    job.node(epoch=9, generation=5, known_settings=other, inventory=[sealed(9, 3, 3)])
    assert nnodes(job) == (1, 4)


def cost_of_a_loss(*heard: int, counted: int | None = None) -> str:
    """The line of the next world where the master restarts, a survivor tells of the steps `heard`, and a node is lost.

    `counted`: the last step, as the survivor has it behind the end.
    """
    job = Driven()
    a, b = job.start(2)
    a.step(7)
    job.restart()
    for node in (a, b):
        job.event(StreamOpened(node.name, node.incarnation))
    for step in heard:
        a.step(step)
    b.hang_up()
    job.wait(8)
    a.made = None if counted is None else (1, counted)
    a.join()
    job.wait(8)
    a.step(1)
    (line,) = [line for line in job.notices.splitlines() if "epoch 2" in line]
    return line


def test_what_nobody_can_know_is_not_said() -> None:
    """With the master the last steps' number died, and when they ended: what a change cost is a lower bound."""
    line = cost_of_a_loss()
    assert "paused at least" in line
    assert line.endswith("lost an unknown number of steps (the master was away)")


def test_a_survivor_tells_what_it_cost() -> None:
    """It has told of its steps since the master is back. The first of them may have been made long before."""
    line = cost_of_a_loss(8, 9, counted=9)
    assert line.endswith("s, lost 9 steps")
    assert "at least" not in line
    for heard in ((8,), ()):
        line = cost_of_a_loss(*heard, counted=9)
        assert "paused at least" in line
        assert line.endswith("s, lost 9 steps (the master was away)")


@pytest.mark.parametrize(
    ("after", "away"), [([(0, 8), (1, 9)], True), ([(0, 9), (1, 8)], True), ([(0, 8), (1, 9), (0, 10)], False)]
)
def test_another_nodes_first_word_is_as_old(after: list[tuple[int, int]], away: bool) -> None:
    """Survivors of the same loss may have counted one step more or less. Who is heard twice has made it meanwhile."""
    job = Driven()
    nodes = job.start(3)
    nodes[0].step(7)
    job.restart()
    for node in nodes:
        job.event(StreamOpened(node.name, node.incarnation))
    for number, step in after:
        nodes[number].step(step)
    nodes[2].hang_up()
    job.wait(8)
    for node in nodes[:2]:
        node.join()
    job.wait(8)
    nodes[0].step(1)
    (line,) = [line for line in job.notices.splitlines() if "epoch 2" in line]
    assert ("paused at least" in line, line.endswith("(the master was away)")) == (away, away)


@pytest.mark.parametrize("embedded", [False, True], ids=["a service", "embedded"])
def test_a_job_that_is_stopped_while_its_past_is_read_back_forgets_nothing(embedded: bool) -> None:
    """`dalsegno start`, or the next agent, takes it up above the epochs that agents and manifests remember."""
    job = Driven(embedded=embedded)
    node = job.node(epoch=4, generation=5, inventory=[sealed(3, 1, 4)])
    assert job.job.recollection.listening
    assert job.call(control_pb2.StopRequest(job_id="job")).code == "OK"
    node.goodbye()
    job.wait(1)
    assert job.phase is Phase.STOPPED
    if not embedded:
        assert job.call(control_pb2.StartRequest(job_id="job")).code == "OK"
    late = job.node()
    assert job.job.recollection.listening
    job.wait(job.settings.node_timeout + 1)
    late.join(sees=[sealed(3, 1, 4)])
    job.wait(job.settings.quiet_time + 1)
    assert (job.phase, job.epoch, late.directive.run.resume.source.step) == (Phase.RUNNING, 5, 30)


def test_an_old_copy_of_the_record_gives_no_epoch_twice() -> None:
    """Somebody has brought it back: its world is not the one in which its member is, and nobody waits for that one."""
    job = Driven()
    (a,) = job.start(1)
    a.step(1)
    a.save(5)
    old = stored(job.job)
    job.state = brain.recover(old, job.job.generation + 1, job.now)
    job.event(StreamOpened(a.name, a.incarnation))
    # Meanwhile there were epochs 2 and 3. No word of that is answered before it is stored: this master may be stale.
    assert a.step(30, epoch=3).code == "OK"
    assert not a.is_known
    assert f"{a.name} was lost (it is in epoch 3, of which the record knows nothing)" in [
        event.text for event in job.job.events
    ]
    again = job.node(epoch=3)
    assert "host remembers epoch 3, and the record ends with epoch 1: an old copy" in job.notices
    again.join()
    job.wait(job.settings.node_timeout + job.settings.quiet_time + 1)
    assert (job.phase, job.epoch, job.members) == (Phase.RUNNING, 4, [again.name])
    assert again.directive.run.resume.source.step == 5


def test_who_remembers_more_than_the_record_disturbs_no_world() -> None:
    """It may have been cut off while the record was read back without it; the next world's epoch is above its own."""
    job = Driven()
    (a,) = job.start(1)
    a.step(1)
    job.node(epoch=7)
    b = job.node(epoch=7)
    job.node(epoch=9)
    assert job.notices.count("remembers epoch") == 1
    assert b.beat().code == b.step(3, epoch=7).code == "OK"
    assert (job.phase, job.epoch, job.members, b.is_known) == (Phase.RUNNING, 1, [a.name], True)
    job.restart()
    assert job.call(control_pb2.StopRequest(job_id="job")).code == "OK"
    for node in job.nodes:
        node.goodbye()
    job.wait(1)
    assert job.call(control_pb2.StartRequest(job_id="job")).code == "OK"
    job.node().join()
    job.wait(job.settings.quiet_time + 1)
    assert (job.phase, job.epoch) == (Phase.RUNNING, 10)
