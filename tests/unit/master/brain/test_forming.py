"""How worlds form: names, settings, gathering, quiet time, membership, the resume point."""

from __future__ import annotations

import random
import time
from itertools import product
from operator import mul

import pytest

from dalsegno.master.brain import membership
from dalsegno.master.brain import state as job_state
from dalsegno.master.brain.checkpoints import LATE_KEPT, resume_point
from dalsegno.master.brain.state import Phase
from dalsegno.protos import control_pb2
from tests.support.jobs.masters import PROBE, Driven, Node, all_join, settings

# ---- the door -------------------------------------------------------------------------------------------------------


def test_default_name_is_the_lowest_free_number_of_its_host() -> None:
    """A second terminal is a second node, and a number is used again once its node is gone."""
    job = Driven()
    first, second = job.node(), job.node()
    assert (first.name, second.name) == ("host-0", "host-1")
    first.hang_up()
    job.wait(8)
    assert job.node().name == "host-0"


def test_a_name_whose_agent_died_before_it_opened_its_stream_is_soon_free() -> None:
    """Nothing is closed then. One that is heard, and only slow to open it, keeps its name."""
    job = Driven(settings(node_timeout=15.0))
    job.start(1)
    early = Node(job, "early")
    request = control_pb2.RegisterRequest(
        job_id="job", incarnation="early", protocol=1, host="host", nproc=1, probe=PROBE, node="n"
    )
    request.settings.CopyFrom(job.settings)
    assert job.call(request).code == "OK"
    early.name = "n"
    late = Node(job, "late", probe=PROBE)
    for _ in range(4):
        job.wait(0.9)
        early.beat()
        assert late.register(node="n").code == "ALREADY_EXISTS"
    job.wait(2.1)
    assert late.register(node="n").code == "OK"
    assert not early.is_known


def test_a_live_nodes_name_is_refused_until_its_stream_closes() -> None:
    """ALREADY_EXISTS for a live name; free as soon as its stream is closed."""
    job = Driven()
    holder = job.node(node="a")
    late = Node(job, "late")
    assert late.register(node="a").code == "ALREADY_EXISTS"
    holder.hang_up()
    assert late.register(node="a").code == "OK"
    assert holder.beat().code == "NOT_FOUND"


def test_a_silent_nodes_name_is_free_after_the_node_timeout() -> None:
    """Without a closed stream, silence past the node-timeout frees the name."""
    job = Driven()
    holder, _other = job.node(node="a"), job.node()
    job.silent.add(holder.incarnation)
    job.wait(7)
    assert Node(job, "late").register(node="a").code == "OK"


def test_register_is_idempotent() -> None:
    """The same incarnation again gives the same name and no second node."""
    job = Driven()
    node = job.node()
    assert node.register().code == "OK"
    assert [n.incarnation for n in job.job.nodes.values()] == [node.incarnation]


def test_an_agent_that_starts_anew_replaces_its_former_self() -> None:
    """`previous_incarnation` ends the old one at once, under the same name."""
    job = Driven()
    old = job.node(node="a")
    new = Node(job, "new", secret=old.secret)
    assert new.register(node="a", previous_incarnation=old.incarnation).code == "OK"
    assert not old.is_known
    assert new.is_known


@pytest.mark.parametrize(
    ("changes", "word"),
    [({"min_nodes": 4, "max_nodes": 1}, "--nnodes"), ({"min_nodes": 0}, "--nnodes"), ({"node_unit": 9}, "--node-unit")],
)
def test_impossible_settings_are_refused(changes: dict[str, int], word: str) -> None:
    """One line that names the flag."""
    job = Driven()
    reply = Node(job, "a").register(settings=settings(**changes))
    assert reply.code == "INVALID_ARGUMENT"
    assert word in reply.detail


def test_the_first_agents_settings_are_the_jobs() -> None:
    """A later agent is told the settings in force."""
    job = Driven()
    job.node(settings=settings(max_nodes=3))
    reply = Node(job, "late").register(settings=settings(max_nodes=7))
    assert isinstance(reply.message, control_pb2.RegisterReply)
    assert reply.message.settings.max_nodes == 3


def test_nnodes_given_to_the_master_stand() -> None:
    """Agents set everything else."""
    job = Driven()
    job.fixed(2, 3)
    job.node(settings=settings(max_nodes=9, drain_timeout=77.0))
    assert (job.job.settings.min_nodes, job.job.settings.max_nodes, job.job.settings.drain_timeout) == (2, 3, 77.0)


def test_another_job_id_is_refused() -> None:
    """Register and every other call."""
    job = Driven()
    node = job.node()
    assert job.call(control_pb2.RegisterRequest(job_id="other", incarnation="x")).code == "INVALID_ARGUMENT"
    caller = node.caller()
    caller.job_id = "other"
    assert job.call(control_pb2.WarmRequest(caller=caller)).code == "INVALID_ARGUMENT"


# ---- repeats --------------------------------------------------------------------------------------------------------


def test_a_repeated_call_gets_its_first_answer_and_has_no_second_effect() -> None:
    """Also when the state has moved on and the call would be refused by now."""
    job = Driven()
    (node,) = job.start(1)
    made = job.seal(5)
    request = control_pb2.CommitRequest(caller=node.caller(1), checkpoint=made)
    assert job.call(request).code == "OK"
    assert job.call(request).code == "OK"
    assert len(job.job.checkpoints) == 1


def test_an_overtaken_call_has_no_effect() -> None:
    """A copy that comes after a newer call of the same incarnation does nothing."""
    job = Driven()
    (node,) = job.start(1)
    old = control_pb2.LeaveRequest(caller=node.caller(), notice=5)
    node.warm()
    assert job.call(old).code == "OK"
    assert not job.job.nodes[node.name].leaving


# ---- gathering ------------------------------------------------------------------------------------------------------


def test_where_all_were_gone_at_once_it_is_a_start() -> None:
    """A power cut, or a restart of all containers: the first one that is back does not begin alone."""
    job = Driven(settings(quiet_time=3.0))
    old = job.start(2)
    for node in old:
        node.step(1)
    job.seal(1)
    for node in old:
        node.hang_up()
    first = job.node(node=old[0].name)
    job.wait(1)
    first.join()
    job.wait(2)
    second = job.node(node=old[1].name)
    all_join([first, second])
    job.wait(2.5)
    assert job.phase is Phase.FORMING
    job.wait(1)
    assert (job.phase, job.members) == (Phase.RUNNING, [old[0].name, old[1].name])


def test_a_start_waits_for_a_quiet_time_after_the_last_arrival() -> None:
    """Agents that nobody has heard of may be on their way."""
    job = Driven()
    job.node().join()
    job.wait(0.8)
    job.node().join()
    job.wait(0.8)
    assert job.phase is Phase.FORMING
    job.wait(0.3)
    assert job.phase is Phase.RUNNING
    assert len(job.members) == 2


def test_max_nodes_open_at_once() -> None:
    """Nobody waits for a timer when the world cannot grow."""
    job = Driven(settings(max_nodes=2))
    for node in [job.node(), job.node()]:
        node.join()
    assert job.phase is Phase.RUNNING


def test_what_is_left_over_is_a_spare_and_told_so() -> None:
    """Never more than max."""
    job = Driven(settings(max_nodes=2))
    nodes = [job.node() for _ in range(3)]
    all_join(nodes)
    assert len(job.members) == 2
    assert nodes[2].order == "wait"
    assert "spare" in nodes[2].directive.wait.reason


def test_a_world_is_a_multiple_of_the_node_unit() -> None:
    """Three of unit two are two and a spare."""
    job = Driven(settings(min_nodes=2, node_unit=2))
    nodes = [job.node() for _ in range(3)]
    all_join(nodes)
    job.wait(1.5)
    assert len(job.members) == 2
    (spare,) = [node for node in nodes if node.name not in job.members]
    assert spare.directive.wait.reason == f"{spare.name} is a spare: worlds have a multiple of 2 nodes (--node-unit)"


def test_fewer_than_min_wait_without_a_deadline_and_say_why() -> None:
    """WAITING says what is missing."""
    job = Driven(settings(min_nodes=2))
    node = job.node()
    node.join()
    job.wait(500)
    assert job.phase is Phase.WAITING
    assert "2 needed" in node.directive.wait.reason + node.directive.gather.missing


def test_wait_for_nodes_ends_the_job() -> None:
    """The only deadline of WAITING. It counts from the first agent's arrival, not from the master's beginning."""
    job = Driven(settings(min_nodes=2, wait_for_nodes=30))
    node = job.node()
    node.join()
    job.wait(29)
    assert job.phase is Phase.WAITING
    job.wait(2)
    assert job.phase is Phase.FAILED
    assert "--wait-for-nodes" in node.directive.finish.message


def test_an_agent_that_does_not_join_in_time_is_no_longer_expected() -> None:
    """The others go on without it after the join-timeout."""
    job = Driven(settings(join_timeout=5))
    slow, quick = job.node(), job.node()
    quick.join()
    job.wait(3)
    assert job.phase is Phase.FORMING
    job.wait(3)
    assert job.members == [quick.name]
    assert f"{slow.name} has not joined" in job.notices


def test_after_a_crash_nobody_waits_for_a_timer() -> None:
    """When every survivor has joined, the world opens in the same event."""
    job = Driven()
    nodes = job.start(3)
    nodes[0].step(1)
    nodes[2].failed()
    for node in nodes:
        assert job.phase is Phase.FORMING
        node.join()
    assert job.phase is Phase.RUNNING
    assert job.epoch == 2


def test_survivors_keep_their_order_and_newcomers_come_after() -> None:
    """Group ranks are stable."""
    job = Driven()
    a, b, c = job.start(3)
    a.step(1)
    late = job.node()
    a.hang_up()
    job.wait(2)
    late.join()
    c.join()
    b.join()
    assert job.members == [b.name, c.name, late.name]


def test_everybody_gets_the_same_world() -> None:
    """Members, epoch, store and resume point."""
    job = Driven()
    nodes = job.start(3)
    worlds = [node.directive.run for node in nodes]
    places = [(world.place.incarnation, world.place.group_rank, world.place.first_rank) for world in worlds]
    assert places == [(node.incarnation, rank, rank) for rank, node in enumerate(nodes)]
    for world in worlds:
        world.ClearField("place")
    assert all(world == worlds[0] for world in worlds)
    assert (worlds[0].nodes, worlds[0].world_size) == (3, 3)


# ---- the directory and the resume point -----------------------------------------------------------------------------


def test_a_node_with_another_directory_stays_a_spare() -> None:
    """The probe decides; it is told so in one line."""
    job = Driven()
    job.start(1)
    stranger = job.node(probe="another directory's")
    stranger.join()
    stranger.warm()
    job.nodes[0].step(1)
    job.wait(5)
    assert job.phase is Phase.RUNNING
    assert "directory" in stranger.directive.wait.reason


def test_a_late_mount_is_noticed() -> None:
    """A spare without the directory looks for the resume point, and joins when it is there."""
    job = Driven()
    (a,) = job.start(1)
    a.step(5)
    made = a.save(5)
    late = job.node(probe="")
    assert late.directive.wait.look_for.digest == made.ref.digest
    late.probe = a.probe
    late.join()
    late.warm()
    assert job.phase is Phase.DRAINING


def test_who_has_read_nothing_begins_nothing() -> None:
    """Its directory could not be read (no memory, no file), and the store is lost: the run began from step 0 again."""
    job = Driven()
    (a,) = job.start(1)
    a.step(5)
    made = a.save(5)
    epoch, probe = job.epoch, a.probe
    job.restart(keep_store=False)
    a.probe = ""
    assert a.register(previous_incarnation=a.incarnation, epoch=epoch, generation=1).code == "OK"
    for _ in range(10):
        a.join([])
        job.wait(5)
    assert job.epoch == epoch
    assert a.order == "wait"
    a.probe = probe
    for _ in range(3):
        if a.order in ("wait", "gather"):
            a.join([made])
        job.wait(5)
    assert job.epoch > epoch
    assert a.directive.run.resume.source.ref == made.ref


def test_the_directory_of_a_first_agent_that_left_does_not_count() -> None:
    """Before anything was opened, the next one's directory becomes the job's."""
    job = Driven()
    lost, good = job.node(probe="nowhere"), job.node()
    good.join()
    assert good.order == "wait"
    lost.hang_up()
    job.wait(8)
    good.join()
    job.wait(2)
    assert job.members == [good.name]


def test_most_nodes_decide_where_the_directory_is_until_something_was_opened() -> None:
    """One node with another directory neither keeps a job from starting nor takes it along."""
    job = Driven(settings(min_nodes=2))
    lost, a, b = job.node(probe="nowhere"), job.node(), job.node()
    all_join([lost, a, b])
    all_join([a, b])
    job.wait(2)
    assert job.members == [a.name, b.name]
    assert "directory" in lost.directive.wait.reason


def test_the_resume_point_is_the_newest_commit_by_epoch_then_step() -> None:
    """Handed out with Gather and with the world."""
    job = Driven()
    (a,) = job.start(1)
    a.save(5)
    newest = a.save(7)
    a.failed()
    assert a.directive.gather.resume.digest == newest.ref.digest
    a.join()
    assert a.directive.run.resume.source.ref.digest == newest.ref.digest
    assert a.directive.run.resume.source.step == 7


def test_not_seeing_the_resume_point_never_changes_the_choice() -> None:
    """With fewer than min nodes that see it the job waits, and says so; it does not start from an older one."""
    job = Driven()
    (a,) = job.start(1)
    older = a.save(5)
    newest = a.save(7)
    a.failed()
    a.join(sees=[older])
    job.wait(30)
    assert job.phase is Phase.WAITING
    assert a.directive.wait.look_for.digest == newest.ref.digest
    a.join()
    job.wait(2)
    assert job.phase is Phase.RUNNING
    assert a.directive.run.resume.source.step == 7


def test_a_member_that_does_not_see_it_becomes_a_spare() -> None:
    """The others go on."""
    job = Driven()
    a, b = job.start(2)
    made = a.save(5)
    made_form = control_pb2.Checkpoint()
    made_form.CopyFrom(made)
    a.step(6)
    b.failed()
    a.join()
    b.join(sees=[])
    assert a.lease, "one node cannot load what two wrote"
    a.convert()
    assert job.members == [a.name]
    assert "does not see" in b.directive.wait.reason or b.directive.wait.look_for.digest


def test_what_the_last_epoch_sealed_is_recorded_before_the_choice() -> None:
    """An inventory brings what nobody could commit any more; older epochs' leftovers never count."""
    job = Driven()
    (a,) = job.start(1)
    a.save(5)
    a.failed()
    a.join()
    job.seal(6, epoch=1)
    unrecorded = job.seal(8)
    a.failed()
    a.join()
    head = resume_point(job.job)
    assert head is not None
    assert head.digest == unrecorded.ref.digest
    assert all(record.step != 6 for record in job.job.checkpoints)
    assert a.directive.run.resume.source.step == 8


def test_what_was_sealed_after_a_newcomer_joined_counts_too() -> None:
    """Its Join while the world ran is not an answer to the next round: it is asked again, and sees more."""
    job = Driven()
    (a,) = job.start(1)
    a.step(1)
    late = job.node()
    late.join()
    job.seal(3)
    a.hang_up()
    job.wait(8)
    assert late.order == "gather"
    late.join()
    job.wait(2)
    assert late.directive.run.resume.source.step == 3


def test_a_commit_for_a_closed_epoch_is_refused() -> None:
    """FAILED_PRECONDITION, and nothing is recorded."""
    job = Driven()
    a, b = job.start(2)
    late = job.seal(4)
    b.failed()
    a.join(sees=[])
    b.join(sees=[])
    assert job.epoch == 2
    assert a.commit(late).code == "FAILED_PRECONDITION"
    assert job.job.checkpoints == []


def test_what_a_closed_epoch_sealed_too_late_is_deleted_once_a_newer_one_is_committed() -> None:
    """It never counts, not even when it is committed again; before the newer commit it is left alone."""
    job = Driven()
    a, b = job.start(2)
    a.save(2)
    late = [job.seal(5), job.seal(4)]
    b.failed()
    for node in (a, b):
        node.join(sees=job.sealed[:1])
    assert job.epoch == 2
    b.failed()
    all_join([a, b])
    job.wait(1)
    assert job.epoch == 3
    assert not job.job.late
    a.save(3)
    b.failed()
    all_join([a, b])
    assert {record.name for record in job.job.late} == {message.ref.name for message in late}
    assert [record.step for record in job.job.checkpoints] == [2, 3]
    assert a.commit(late[0]).code == "FAILED_PRECONDITION"
    assert a.drained(5, epoch=1, digest=late[0].ref.digest).code == "FAILED_PRECONDITION"
    assert {ref.name for ref in a.directive.prune} == {message.ref.name for message in late}
    assert a.directive.run.resume.source.step == 3
    a.job.call(control_pb2.PrunedRequest(caller=a.caller(), refs=[message.ref for message in late]))
    assert not job.job.late


def test_the_best_is_not_taken_for_late_by_a_master_that_lost_its_store() -> None:
    """What led from it to the newest checkpoint was pruned, so it is not read back as part of the run; it stays."""
    job = Driven(settings(node_timeout=5))
    (a,) = job.start(1)
    best, other = job.seal(2), job.seal(3)
    job.restart(keep_store=False)
    newest = control_pb2.Checkpoint()
    newest.CopyFrom(best)
    newest.ref.name, newest.ref.digest = "step-9.e3.1", "digest of step-9.e3.1"
    newest.epoch, newest.step, newest.best = 3, 9, best.ref.name
    newest.resumed_from.digest = "digest of what was pruned"
    job.sealed.append(newest)
    again = job.node(epoch=3, generation=1, inventory=job.sealed, previous_incarnation=a.incarnation)
    again.join()
    job.wait(6)
    again.join()
    job.wait(2)
    assert again.directive.run.resume.source.step == 9
    assert [record.name for record in job.job.late] == [other.ref.name]


def test_a_drain_reported_too_late_is_refused_unless_it_is_recorded() -> None:
    """A leaver must know whether what it saved is part of the run."""
    job = Driven()
    a, b = job.start(2)
    kept = a.save(2)
    b.failed()
    all_join([a, b])
    assert job.epoch == 2
    late = job.seal(4, epoch=1)
    assert a.drained(4, epoch=1, digest=late.ref.digest).code == "FAILED_PRECONDITION"
    assert a.drained(2, epoch=1, digest=kept.ref.digest).code == "OK"


def test_a_commit_must_be_newer_than_the_epochs_last() -> None:
    """Steps only grow within a lineage."""
    job = Driven()
    (a,) = job.start(1)
    a.save(5)
    assert a.commit(job.seal(4)).code == "FAILED_PRECONDITION"


# ---- nodes with different numbers of workers ------------------------------------------------------------------------


def blocked(job: Driven, gone: Node, stay: list[Node]) -> None:
    """A node dies, and nobody can convert for the rest."""
    gone.hang_up()
    job.wait(2)
    all_join(stay)
    for _ in range(2):
        owner = next((node for node in stay if node.lease), None)
        if owner is not None:
            owner.converts(control_pb2.CONVERSION_STATE_ENVIRONMENT, "no space")


def test_where_nobody_can_convert_any_nodes_whose_workers_fit_go_on() -> None:
    """Not only the first ones: three workers saved it, and of the nodes with 2, 2 and 1 the first and the last fit."""
    job = Driven(settings(max_nodes=4))
    a, b = job.node(nproc=2), job.node(nproc=1)
    all_join([a, b])
    job.wait(2)
    a.save(3)
    c, d = job.node(nproc=2), job.node(nproc=1)
    all_join([c, d])
    b.hang_up()
    a.failed()
    job.wait(2)
    blocked(job, b, [a, c, d])
    assert job.phase is Phase.RUNNING
    assert job.members == [a.name, d.name]
    assert not a.directive.run.resume.HasField("universal")


@pytest.mark.parametrize(
    ("workers", "size", "unit", "chosen"),
    [
        ([2, 2, 2], 4, 1, [0, 1]),
        ([4, 2, 2, 1, 1], 4, 1, [1, 3, 4]),
        ([1, 2, 1, 2], 2, 1, [0, 2]),
        ([2, 1, 1], 2, 1, [1, 2]),
        ([2, 1, 1], 2, 2, [1, 2]),
        ([2, 2, 1], 3, 2, [0, 2]),
        ([4, 1, 1], 6, 2, []),
        ([3, 3], 4, 1, []),
        ([1] * 5, 5, 1, []),
        ([8, 4] * 32, 32, 1, [0, 2, 4, 6]),
        ([16, 8] * 32, 32, 1, [1, 3, 5, 7]),
    ],
)
def test_the_largest_world_of_a_given_size(workers: list[int], size: int, unit: int, chosen: list[int]) -> None:
    """Most nodes, at most four, a multiple of the unit, the first of each kind, in their order."""
    limits = job_state.Settings(min_nodes=2, max_nodes=4, node_unit=unit)
    assert [node.order for node in membership.of_size(nodes_of(workers), size, limits, 4)] == chosen


def nodes_of(workers: list[int]) -> list[job_state.Node]:
    return [job_state.Node(f"n{i}", f"i{i}", "host", nproc, i) for i, nproc in enumerate(workers)]


def tried_out(workers: list[int], size: int, settings: job_state.Settings, most: int) -> list[int]:
    """The same answer, from all worlds that there are: of those with most nodes the one with most of the first kind."""
    kinds = list(dict.fromkeys(workers))
    counts = [workers.count(kind) for kind in kinds]
    unit = max(1, settings.node_unit)
    fitting = [
        (sum(taken), taken)
        for taken in product(*(range(count + 1) for count in counts))
        if settings.min_nodes <= sum(taken) <= most and sum(taken) % unit == 0 and sum(map(mul, taken, kinds)) == size
    ]
    if not fitting:
        return []
    left = dict(zip(kinds, max(fitting)[1], strict=True))
    chosen = []
    for order, kind in enumerate(workers):
        if left[kind]:
            left[kind] -= 1
            chosen.append(order)
    return chosen


def test_the_largest_world_of_a_given_size_is_that_of_all_worlds() -> None:
    """Whatever nodes there are."""
    draw = random.Random(7)
    for _ in range(400):
        workers = draw.choices(draw.sample([1, 2, 3, 4, 6, 8], 3), k=draw.randint(1, 9))
        limits = job_state.Settings(min_nodes=draw.randint(1, 3), max_nodes=9, node_unit=draw.randint(1, 3))
        size, most = draw.randint(1, 24), draw.randint(1, 9)
        chosen = [node.order for node in membership.of_size(nodes_of(workers), size, limits, most)]
        assert chosen == tried_out(workers, size, limits, most), (workers, size, limits, most)


def test_many_nodes_of_several_kinds_are_soon_chosen_from() -> None:
    """That is done in each turn while nobody can convert. A thousand nodes of three kinds took ten seconds and more."""
    nodes = nodes_of([1, 2, 4, 8] * 250)
    limits = job_state.Settings(min_nodes=1, max_nodes=1000)
    since = time.process_time()
    chosen = membership.of_size(nodes, 2001, limits, 1000)
    assert time.process_time() - since < 0.5
    assert sum(node.nproc for node in chosen) == 2001


def drained_without_rank_0() -> tuple[Driven, Node, list[Node], control_pb2.Checkpoint]:
    """Rank 0 has sealed step 2 and left while the master was away; the other one of two, and two spares, are there."""
    job = Driven(settings(max_nodes=2))
    a, b = job.start(2)
    spares = [job.node(), job.node()]
    for node in spares:
        node.join()
    a.step(1)
    made = job.seal(2, any_size=True)
    b.drained(2)
    a.hang_up()
    while job.phase is not Phase.FORMING:
        job.wait(0.5)
    for node in spares:
        node.join([])
    return job, b, spares, made


def test_spares_do_not_open_a_world_before_a_witness_of_the_last_one_has_joined() -> None:
    """They are enough; but only the survivor may tell of what its world sealed."""
    job, witness, spares, made = drained_without_rank_0()
    assert job.phase is Phase.FORMING
    witness.join([made])
    all_join(spares)
    assert job.phase is Phase.RUNNING
    assert job.job.world is not None
    assert job.job.world.resumed_step == 2
    assert witness.name in job.members


def test_a_witness_that_does_not_join_holds_nobody_up_for_long() -> None:
    """Not longer than any node that is asked."""
    job, witness, spares, _ = drained_without_rank_0()
    job.wait(job.settings.join_timeout + 1)
    assert (job.phase, job.members) == (Phase.RUNNING, [node.name for node in spares])
    assert witness.is_known


@pytest.mark.parametrize("end", ["lost", "leaves", "late"])
def test_what_a_stranger_told_counts_once_no_member_is_left_to_tell(end: str) -> None:
    """A member had sealed it without a master, and is gone, or does not join, before it could say so."""
    job = Driven(settings(join_timeout=5.0))
    (a,) = job.start(1)
    b = job.node()
    b.join()
    made = job.seal(3, any_size=True)
    a.failed()
    b.join()
    assert len(job.job.checkpoints) == 0, "the member is there, and may tell"
    if end == "lost":
        a.hang_up()
    elif end == "leaves":
        a.leave()
    for _ in range(20):
        job.wait(0.5)
        b.beat()
        if end == "late":
            a.beat()
    head = resume_point(job.job)
    assert head is not None, job.notices
    assert head.digest == made.ref.digest
    b.join()
    job.wait(2)
    assert b.directive.run.resume.source.step == 3


def test_what_a_stranger_told_counts_although_that_one_is_gone_too() -> None:
    """Others have told the same."""
    job = Driven(settings(join_timeout=5.0))
    (a,) = job.start(1)
    b, c = job.node(), job.node()
    all_join([b, c])
    made = job.seal(3, any_size=True)
    a.failed()
    all_join([b, c])
    b.goodbye()
    a.leave()
    job.wait(1)
    head = resume_point(job.job)
    assert head is not None, job.notices
    assert head.digest == made.ref.digest


def test_what_strangers_tell_is_kept_within_bounds() -> None:
    job = Driven()
    (a,) = job.start(1)
    b = job.node()
    b.join()
    for step in range(1, LATE_KEPT + 20):
        job.seal(step)
    a.failed()
    b.join()
    assert len(job.state.live.gathering.told_by_strangers) == LATE_KEPT


def test_a_node_unit_that_does_not_fit_the_masters_nnodes_is_refused() -> None:
    """Both make sense by themselves; no world could ever open with both, and nobody would have said why."""
    job = Driven()
    job.fixed(3, 3)
    odd = Node(job, "odd")
    refused = odd.register(settings=settings(max_nodes=4, node_unit=2))
    assert refused.code == "INVALID_ARGUMENT"
    assert "--node-unit=2 does not fit --nnodes=3:3" in refused.detail
    assert "dlrover-master was given this --nnodes" in refused.detail
    assert not len(job.job.nodes)
    fits = Node(job, "fits")
    assert fits.register(settings=settings(max_nodes=4)).code == "OK"
    # What others say is not the job's any more.
    assert odd.register(settings=settings(max_nodes=4, node_unit=2)).code == "OK"


def test_a_limit_does_not_outlive_the_node_unit_that_it_was_for() -> None:
    """A world of at most 3 nodes in a multiple of 4 never opens."""
    job = Driven(settings(max_nodes=8))
    (first,) = job.start(1)
    assert job.scale(3).code == "OK"
    job.call(control_pb2.StopRequest(job_id="job"))
    first.goodbye()
    job.wait(20)
    assert job.phase is Phase.STOPPED
    job.call(control_pb2.StartRequest(job_id="job"))
    assert Node(job, "anew").register(settings=settings(max_nodes=8, node_unit=4)).code == "OK"
    assert job.job.most_nodes == 8
