"""The conversion gate, damaged checkpoints, lost stores and restarts."""

from __future__ import annotations

import pytest

from dalsegno.master.brain import brain
from dalsegno.master.brain.state import Phase
from dalsegno.protos import control_pb2
from tests.support.jobs.masters import Driven, Node, all_join, settings, stored

READY = control_pb2.CONVERSION_STATE_READY
WORKING = control_pb2.CONVERSION_STATE_WORKING
SOURCE_BAD = control_pb2.CONVERSION_STATE_SOURCE_BAD
ENVIRONMENT = control_pb2.CONVERSION_STATE_ENVIRONMENT


GB = 10**9


def at_the_gate(count: int = 2, newcomers: int = 1, **sizes: int) -> tuple[Driven, list[Node]]:
    """A world of `count` has drained at step 2 for newcomers; everybody has joined the next round.

    `sizes`: of the checkpoint, as for `Driven.seal`.
    """
    job = Driven()
    members = job.start(count)
    members[0].step(1)
    late = []
    for _ in range(newcomers):
        late.append(job.node())
        late[-1].join()
    for node in late:
        node.warm()
    assert job.phase is Phase.DRAINING
    members[0].save(2, **sizes)
    for node in members:
        node.drained(2)
    all_join([*members, *late])
    assert job.phase is Phase.FORMING
    return job, [*members, *late]


# ---- the lease ------------------------------------------------------------------------------------------------------


def test_the_owner_is_the_first_in_the_old_rank_order() -> None:
    """The world opens in the event that makes the form known, and loads it."""
    job, nodes = at_the_gate()
    assert [bool(node.lease) for node in nodes] == [True, False, False]
    form = nodes[0].convert()
    assert job.phase is Phase.RUNNING
    resume = nodes[2].directive.run.resume
    assert (resume.form, resume.universal.digest) == (control_pb2.FORM_UNIVERSAL, form.ref.digest)


def test_what_was_seen_while_it_was_being_written_is_not_damaged() -> None:
    """A node that looked before the seal found no manifest there: that says nothing about the one that is there now."""
    job, nodes = at_the_gate()
    order = nodes[0].directive.convert
    nodes[2].join(unusable=[f"{order.source.ref.name}.universal.{order.lease}"])
    nodes[0].convert()
    assert job.phase is Phase.RUNNING
    assert "cannot read" not in job.notices
    assert nodes[2].order == "run"


def test_a_shape_that_loads_as_it_is_needs_no_conversion() -> None:
    """The same world size, or a checkpoint for any world size."""
    job = Driven()
    (a,) = job.start(1)
    a.save(3)
    a.failed()
    a.join()
    assert a.directive.run.resume.form == control_pb2.FORM_SHARDED
    any_size = Driven()
    a, b = any_size.start(2)
    assert a.commit(any_size.seal(3, any_size=True)).code == "OK"
    b.hang_up()
    any_size.wait(2)
    a.join()
    assert a.directive.run.resume.form == control_pb2.FORM_SHARDED


def test_a_dead_owner_is_replaced_and_its_directory_named() -> None:
    """The successor has a lease of its own and may take over verified files."""
    job, nodes = at_the_gate(2, 2)
    lease = nodes[0].lease
    assert job.call(control_pb2.ClaimRequest(caller=nodes[0].caller(), lease=lease)).code == "OK"
    nodes[0].hang_up()
    job.wait(2)
    assert nodes[1].lease > lease
    assert list(nodes[1].directive.convert.earlier) == [f"step-2.e1.1.universal.{lease}"]


def test_a_leaving_owner_is_replaced() -> None:
    """A node that was told to go converts nothing."""
    _job, nodes = at_the_gate(2, 2)
    nodes[0].leave()
    assert nodes[1].lease


def test_a_stalled_owner_is_replaced() -> None:
    """No further file for two minutes; every file counts as progress."""
    job, nodes = at_the_gate()
    job.wait(100)
    nodes[0].converts(WORKING, files=1)
    job.wait(100)
    assert nodes[0].lease
    job.wait(25)
    assert not nodes[0].lease
    assert nodes[1].lease


@pytest.mark.slow
def test_bytes_are_progress_too() -> None:
    """One file that takes an hour is no stall while its bytes move; saying the same again is one."""
    job, nodes = at_the_gate()
    lease = nodes[0].lease
    for minute in range(1, 61):
        job.wait(60)
        nodes[0].converts(WORKING, files=1, moved=minute * GB)
    assert nodes[0].lease == lease
    job.wait(100)
    nodes[0].converts(WORKING, files=1, moved=60 * GB)
    job.wait(25)
    assert not nodes[0].lease
    assert nodes[1].lease


@pytest.mark.slow
@pytest.mark.parametrize(
    ("sizes", "limit"),
    [
        ({"size": 100 * GB, "largest_file": 10 * GB}, 500),
        ({"size": 100 * GB, "largest_file": GB}, 120),
        ({"size": 100 * GB}, 5000),
        ({"size": 2 * GB}, 120),
    ],
    ids=["one large file", "many small files", "a record of an older version", "an older and small one"],
)
def test_the_limit_follows_the_largest_file(sizes: dict[str, int], limit: int) -> None:
    """A file is synced in one call, in which no byte is seen to move: 20 MB/s is slow, less is stuck."""
    job, nodes = at_the_gate(**sizes)
    job.restart()  # The sizes are part of what is stored.
    for node in nodes:
        node.beat()
    lease = nodes[0].lease
    job.wait(limit - 2)
    assert nodes[0].lease == lease
    job.wait(4)
    assert not nodes[0].lease
    assert nodes[1].lease
    assert f"no progress for {limit} s" in job.notices


def test_a_lease_that_was_taken_away_is_refused() -> None:
    """FAILED_PRECONDITION for claim and report of a former owner."""
    job, nodes = at_the_gate()
    lease = nodes[0].lease
    nodes[0].converts(ENVIRONMENT, "no space")
    report = control_pb2.ConversionReport(caller=nodes[0].caller(), lease=lease, state=READY)
    assert job.call(report).code == "FAILED_PRECONDITION"
    assert job.call(control_pb2.ClaimRequest(caller=nodes[0].caller(), lease=lease)).code == "FAILED_PRECONDITION"


def test_a_form_that_was_sealed_but_not_committed_is_found_in_an_inventory() -> None:
    """The converter died in between: nobody converts again."""
    job, nodes = at_the_gate(2, 2)
    order = nodes[0].directive.convert
    form = control_pb2.Checkpoint()
    form.CopyFrom(order.source)
    form.ref.name, form.ref.digest = f"{order.source.ref.name}.universal.{order.lease}", "the form"
    form.form = control_pb2.FORM_UNIVERSAL
    form.source.CopyFrom(order.source.ref)
    job.sealed.append(form)
    nodes[0].hang_up()
    job.wait(2)
    assert job.phase is Phase.FORMING
    nodes[1].join()
    assert job.phase is Phase.RUNNING
    assert nodes[1].directive.run.resume.universal.digest == "the form"


def test_a_change_of_the_candidate_never_restarts_a_conversion() -> None:
    """Another newcomer comes while it runs: the same lease goes on, and the world has both."""
    job, nodes = at_the_gate(1)
    lease = nodes[0].lease
    late = job.node()
    late.join()
    assert nodes[0].lease == lease
    nodes[0].convert()
    assert len(job.members) == 3


def test_when_the_need_goes_the_world_opens() -> None:
    """The newcomer dies during the conversion: the old shape loads it as it is."""
    job, nodes = at_the_gate(2)
    nodes[2].hang_up()
    job.wait(2)
    assert job.members == [nodes[0].name, nodes[1].name]
    assert not nodes[0].lease


# ---- typed failures -------------------------------------------------------------------------------------------------


def test_environment_lets_one_more_agent_try_then_goes_on_in_the_old_shape() -> None:
    """0 steps lost; the newcomer stays a spare, and growing is not tried again at once."""
    job, nodes = at_the_gate(2)
    nodes[0].converts(ENVIRONMENT, "no space left")
    assert nodes[1].lease
    nodes[1].converts(ENVIRONMENT, "no space left")
    assert job.phase is Phase.RUNNING
    assert job.members == [nodes[0].name, nodes[1].name]
    assert nodes[0].directive.run.resume.source.step == 2
    nodes[0].step(3)
    job.wait(20)
    assert job.phase is Phase.RUNNING
    assert "no space left" in job.notices


def test_after_a_loss_environment_waits_with_the_reason_and_tries_again_after_a_pause() -> None:
    """No world can load it as it is: doubling pauses, at most 60 s."""
    job = Driven()
    a, b = job.start(2)
    a.save(4)
    b.hang_up()
    job.wait(2)
    a.join()
    for pause in (5, 10, 20):
        assert a.lease
        a.converts(ENVIRONMENT, "no space left")
        assert job.phase in (Phase.FORMING, Phase.WAITING)
        assert "no space left" in a.directive.gather.missing + a.directive.wait.reason
        job.wait(pause - 1)
        assert not a.lease
        job.wait(2)
    a.convert()
    assert job.members == [a.name]


def test_a_node_that_joins_lets_a_blocked_conversion_try_at_once() -> None:
    """It may have the room that the others lack."""
    job = Driven()
    a, b, c = job.start(3)
    a.save(4)
    for node in (b, c):
        node.hang_up()
    job.wait(2)
    a.join()
    a.converts(ENVIRONMENT, "no space left")
    assert not a.lease
    fresh = job.node()
    fresh.join()
    assert a.lease or fresh.lease


def test_source_bad_is_verified_by_another_before_the_checkpoint_is_retired() -> None:
    """Proven bad: the one before is used, loudly."""
    job = Driven()
    a, b = job.start(2)
    a.save(3)
    a.save(4)
    b.hang_up()
    job.wait(2)
    late = job.node()
    late.join()
    third = job.node()
    third.join()
    a.join()
    a.converts(SOURCE_BAD, "part-0.pt")
    assert not a.directive.verify.number
    verifier = late if late.directive.verify.number else third
    verifier.verified(intact=False)
    assert a.directive.gather.resume.name == "step-3.e1.1"
    assert "is damaged" in job.notices


def test_source_bad_on_a_source_that_verifies_elsewhere_skips_nothing() -> None:
    """The reporter becomes a spare; another converts."""
    job, nodes = at_the_gate(2)
    nodes[0].converts(SOURCE_BAD, "part-0.pt")
    assert nodes[1].directive.verify.number
    nodes[1].verified(intact=True)
    assert job.job.checkpoints[-1].retired is False
    assert "cannot read" in nodes[0].directive.wait.reason
    assert job.members == [nodes[1].name, nodes[2].name] or nodes[1].lease


# ---- bad checkpoints ------------------------------------------------------------------------------------------------


def reloading(count: int = 2) -> tuple[Driven, list[Node], control_pb2.Checkpoint]:
    """A world of the same size that loads step 4 again, after step 3."""
    job = Driven(settings(max_restarts=1))
    nodes = job.start(count)
    nodes[0].step(3)
    nodes[0].save(3)
    made = nodes[0].save(4)
    nodes[0].failed(step=4)
    all_join(nodes)
    assert job.epoch == 2
    return job, nodes, made


def test_a_bad_checkpoint_is_verified_by_another_and_retired_only_if_bad() -> None:
    """Back to the one before; its files stay until a newer one is committed."""
    job, nodes, made = reloading()
    nodes[0].bad(made.ref)
    assert job.phase is Phase.FORMING
    nodes[1].verified(intact=False)
    all_join(nodes)
    assert nodes[0].directive.run.resume.source.step == 3
    assert not nodes[0].directive.prune
    nodes[0].save(5)
    assert [ref.name for ref in nodes[0].directive.prune] == [made.ref.name]


def test_a_checkpoint_that_verifies_elsewhere_makes_the_reporter_a_spare() -> None:
    """No failure of the budget, and nothing is skipped."""
    job, nodes, made = reloading(3)
    nodes[0].bad(made.ref)
    nodes[1].verified(intact=True)
    all_join(nodes)
    assert "cannot read" in nodes[0].directive.wait.reason
    assert job.job.run.budget.failures == 1, "the crash before, not this"
    assert nodes[1].lease
    nodes[1].convert()
    assert job.members == [nodes[1].name, nodes[2].name]


def test_a_reporter_that_is_alone_verifies_itself_and_its_failures_count() -> None:
    """It verifies but does not load: the budget ends that."""
    job, nodes, made = reloading(1)
    (a,) = nodes
    for _ in range(3):
        if job.phase is Phase.FAILED:
            break
        a.bad(made.ref)
        a.verified(intact=True)
        a.join()
    assert job.phase is Phase.FAILED
    assert "does not load" in job.job.message


def test_a_bad_form_is_dropped_and_made_anew() -> None:
    """The source stands."""
    job, nodes = at_the_gate(1)
    form = nodes[0].convert()
    nodes[1].bad(form.ref, control_pb2.FORM_UNIVERSAL)
    verifier = next(node for node in nodes if node.directive.verify.number)
    assert verifier.directive.verify.ref.digest == form.ref.digest
    verifier.verified(intact=False)
    job.sealed.remove(form)
    all_join(nodes)
    assert nodes[0].lease
    again = nodes[0].convert()
    assert again.ref.name != form.ref.name
    assert nodes[0].directive.run.resume.source.step == 2


def test_a_verifier_that_dies_is_replaced() -> None:
    """Somebody always looks."""
    job, nodes, made = reloading(3)
    nodes[0].bad(made.ref)
    first = next(node for node in nodes if node.directive.verify.number)
    first.hang_up()
    job.wait(2)
    assert any(node.directive.verify.number for node in nodes if node is not first and node.is_known)


# ---- master restarts ------------------------------------------------------------------------------------------------


def test_the_durable_half_survives_its_encoding() -> None:
    """JSON and back, in the middle of everything."""
    job, _nodes = at_the_gate()
    assert stored(job.job) == job.job


@pytest.mark.parametrize("phase", ["waiting", "forming", "running", "draining", "succeeded"])
def test_a_restart_in_any_phase_forgets_no_decision(phase: str) -> None:
    """Phase, epoch, world, checkpoints and conversion are what they were; the generation is higher."""
    if phase == "forming":
        job, _ = at_the_gate()
    else:
        job = Driven(settings(min_nodes=2) if phase == "waiting" else settings())
        if phase == "waiting":
            job.node().join()
        else:
            a, b = job.start(2)
            a.save(4)
            if phase == "draining":
                b.leave()
            elif phase == "succeeded":
                a.finished(4)
                b.finished(4)
    before = job.job
    generation = before.generation
    job.restart()
    assert job.phase.value == phase == before.phase.value
    assert job.job.generation > generation
    assert job.job.world == before.world
    assert job.job.checkpoints == before.checkpoints
    assert job.job.settings.min_nodes == before.settings.min_nodes


def test_a_restart_during_a_conversion_keeps_the_lease() -> None:
    """The converter does not notice."""
    job, nodes = at_the_gate()
    lease = nodes[0].lease
    job.restart()
    for node in nodes:
        node.beat()
    assert nodes[0].lease == lease
    nodes[0].convert()
    assert job.phase is Phase.RUNNING


def test_workers_of_a_restarted_master_do_not_notice() -> None:
    """The same order, the same world, and the next step counts."""
    job = Driven()
    a, b = job.start(2)
    before = a.directive.run.SerializeToString(deterministic=True)
    job.restart()
    assert a.directive.run.SerializeToString(deterministic=True) == before
    for step in range(1, 20):
        a.step(step)
        b.beat()
        job.wait(1)
    assert job.epoch == 1


# ---- lost stores ----------------------------------------------------------------------------------------------------


def survivors(job: Driven, nodes: list[Node], epoch: int, inventory: list[control_pb2.Checkpoint]) -> list[Node]:
    """The same agents, fenced by a master that knows nothing, as they register anew."""
    new = []
    for node in nodes:
        again = Node(job, node.incarnation + " again")
        job.nodes.append(again)
        reply = again.register(previous_incarnation=node.incarnation, epoch=epoch, generation=5, inventory=inventory)
        assert reply.code == "OK"
        new.append(again)
    return new


def test_an_empty_store_with_agents_that_remember_listens_and_goes_on_above() -> None:
    """Above the highest epoch and generation; the newest lineage is read back from the manifests."""
    job = Driven()
    a, b = job.start(2)
    a.save(3)
    a.failed()
    all_join([a, b])
    newest = a.save(7)
    sealed = list(job.sealed)
    job.restart(keep_store=False)
    new = survivors(job, [a, b], 2, sealed)
    all_join(new)
    assert job.job.generation > 5
    assert job.epoch == 0
    job.wait(7)
    all_join(new)
    job.wait(2)
    assert job.epoch == 3
    assert new[0].directive.run.resume.source.ref.digest == newest.ref.digest


def test_what_is_remembered_survives_another_restart() -> None:
    """The master dies again while it listens."""
    job = Driven()
    (a,) = job.start(1)
    a.save(3)
    sealed = list(job.sealed)
    job.restart(keep_store=False)
    new = survivors(job, [a], 4, sealed)
    job.restart()
    job.wait(10)
    all_join(new)
    job.wait(2)
    assert job.epoch == 5


def test_the_lineage_leaves_out_what_was_fallen_back_from() -> None:
    """Only checkpoints between the newest and its resume points count."""
    job = Driven()
    (a,) = job.start(1)
    base = a.save(3)
    abandoned = job.seal(5)
    job.sealed.remove(abandoned)
    a.failed()
    a.join()
    newest = a.save(4)
    job.restart(keep_store=False)
    new = survivors(job, [a], 2, [base, abandoned, newest])
    job.wait(7)
    assert [record.digest for record in job.job.checkpoints] == [base.ref.digest, newest.ref.digest]
    assert new[0].is_known


def test_a_checkpoint_sealed_after_registration_is_heard_of_with_the_join() -> None:
    """A newcomer registers with an empty inventory while the old world drains unseen."""
    job = Driven()
    (a,) = job.start(1)
    made = job.seal(6)
    job.restart(keep_store=False)
    late = job.node()
    late.join(sees=[made])
    assert job.job.recollection.listening
    job.wait(7)
    late.join(sees=[made])
    job.wait(2)
    assert job.epoch == 2
    assert late.directive.run.resume.source.step == 6
    assert not a.is_known


def test_an_empty_store_with_agents_that_know_nothing_is_a_new_job() -> None:
    """It starts at once, after the quiet time."""
    job = Driven()
    job.restart(keep_store=False)
    job.start(1)
    assert job.epoch == 1


# ---- ended jobs -----------------------------------------------------------------------------------------------------


def ended(embedded: bool) -> tuple[Driven, Node]:
    """A run that has succeeded, with its agent still there."""
    job = Driven(embedded=embedded)
    (a,) = job.start(1)
    a.save(9)
    a.finished(9)
    assert job.phase is Phase.SUCCEEDED
    return job, a


def test_with_a_master_of_its_own_a_finished_job_stays_finished() -> None:
    """A late agent is told so, and exits 0."""
    job, _ = ended(False)
    late = job.node()
    assert late.directive.finish.success


@pytest.mark.parametrize("embedded", [False, True])
def test_new_run_starts_over_on_request(embedded: bool) -> None:
    """Once the agents of the last run have gone; a spare that died without a word does not keep it from that."""
    job, a = ended(embedded)
    late = Node(job, "late")
    assert late.register(new_run=True).code == "UNAVAILABLE"
    job.silent.add(a.incarnation)
    job.wait(8)
    assert late.register(new_run=True).code == "OK"
    late.join()
    job.wait(2)
    assert (job.job.run_id, job.phase) == ("run-0002", Phase.RUNNING)
    assert not late.directive.run.HasField("resume")


def test_embedded_a_failed_run_is_resumed() -> None:
    """The same run, from its last commit, with a fresh budget."""
    job = Driven(settings(max_restarts=0), embedded=True)
    (a,) = job.start(1)
    a.save(4)
    a.failed(step=4)
    a.join()
    assert job.phase is Phase.FAILED
    a.hang_up()
    again = job.node()
    again.join()
    job.wait(2)
    assert job.job.run_id == "run-0001"
    assert again.directive.run.resume.source.step == 4


def test_the_status_names_what_is_missing() -> None:
    """For people and tools."""
    job = Driven(settings(min_nodes=2))
    job.node().join()
    reply = brain.status(job.state, job.now)
    assert reply.phase == control_pb2.PHASE_WAITING
    assert "2 needed" in reply.reason


def test_nobody_waits_for_a_held_spare_to_convert() -> None:
    """It was lost too often and never answers: the job waits with the conversion's reason, and tries again."""
    job = Driven(settings(max_nodes=3))
    a, b = job.start(2)
    a.step(1)
    a.save(1)
    flaky = job.node()
    flaky.join()
    job.job.holds[flaky.name] = 3600.0
    job.state.live.held_until[flaky.name] = job.now + 3600.0
    b.hang_up()
    job.wait(2)
    a.join()
    assert a.lease
    a.converts(control_pb2.CONVERSION_STATE_ENVIRONMENT, "no space")
    assert job.phase is Phase.WAITING
    assert "nobody can convert" in a.directive.gather.missing
    job.wait(6)
    a.convert()
    assert job.members == [a.name]


def test_an_owner_that_comes_back_under_its_name_has_no_lease() -> None:
    """Its files are a dead incarnation's, which may still be writing them: a lease has a directory of its own."""
    job, nodes = at_the_gate()
    lease = nodes[0].lease
    again = Node(job, "again", secret=nodes[0].secret)
    job.nodes.append(again)
    assert again.register(node=nodes[0].name, previous_incarnation=nodes[0].incarnation).code == "OK"
    assert again.name == nodes[0].name
    assert again.lease == 0
    assert nodes[1].lease > lease
    assert f"{again.name} can no longer convert: another node takes over" in job.notices
