"""Orders of people and tools: a node goes, the job stops and starts again, the ranks save now."""

from __future__ import annotations

import pytest

from dalsegno.master.brain import shown
from dalsegno.master.brain.chronicle import Kind
from dalsegno.master.brain.state import Phase
from dalsegno.protos import control_pb2 as pb
from dalsegno.protos.limits import MOST
from tests.support.jobs.masters import Driven, Node, all_join, settings


def drain(job: Driven, name: str) -> tuple[str, str]:
    reply = job.call(pb.DrainNodeRequest(job_id="job", node=name))
    return reply.code, reply.detail or reply.message.text  # type: ignore[union-attr]


def stop(job: Driven) -> tuple[str, str]:
    reply = job.call(pb.StopRequest(job_id="job"))
    return reply.code, reply.detail or reply.message.text  # type: ignore[union-attr]


def start(job: Driven) -> tuple[str, str]:
    reply = job.call(pb.StartRequest(job_id="job"))
    return reply.code, reply.detail or reply.message.text  # type: ignore[union-attr]


def save_now(job: Driven) -> tuple[str, str]:
    reply = job.call(pb.SaveNowRequest(job_id="job"))
    return reply.code, reply.detail or reply.message.text  # type: ignore[union-attr]


def saved(job: Driven, nodes: list[Node], step: int) -> None:
    """All ranks save at this boundary and stop."""
    nodes[0].step(step, draining=True)
    nodes[0].save(step)
    for node in nodes:
        node.drained(step)


def trained(count: int = 2, *, embedded: bool = False, **fields: int) -> tuple[Driven, list[Node]]:
    job = Driven(settings(**fields), embedded=embedded)
    nodes = job.start(count)
    nodes[0].step(1)
    return job, nodes


def test_a_node_that_is_told_to_go_leaves_like_one_with_a_notice() -> None:
    """All save at one boundary; it is released, the others go on without having lost a step."""
    job, nodes = trained(3)
    code, text = drain(job, nodes[1].name)
    assert (code, nodes[1].name in text, "waits for nodes" in text) == ("OK", True, False)
    assert [node.order for node in nodes] == ["drain"] * 3
    assert nodes[1].directive.HasField("leave")
    assert not nodes[1].directive.leave.stop
    assert not nodes[0].directive.HasField("leave")
    saved(job, nodes, 4)
    assert nodes[1].order == "release"
    nodes[1].hang_up()
    job.wait(2)
    all_join([nodes[0], nodes[2]])
    next((node for node in (nodes[0], nodes[2]) if node.lease), nodes[0]).convert()
    assert (job.phase, job.members) == (Phase.RUNNING, [nodes[0].name, nodes[2].name])
    nodes[0].step(5)
    assert "lost 0 steps" in job.notices


def test_a_node_that_goes_does_not_outstay_its_notice() -> None:
    """Ranks that never agree are not waited for beyond --drain-timeout."""
    job, nodes = trained(2, drain_timeout=7)
    drain(job, nodes[1].name)
    job.wait(8)
    assert job.phase is not Phase.DRAINING
    assert "did not end in time" in job.notices


def test_an_order_in_a_longer_notice_ends_that_drain_in_time() -> None:
    """As a leaver's own shorter notice does: nobody waits for a node that has gone."""
    job, nodes = trained(3, drain_timeout=7)
    nodes[2].leave(notice=60.0)
    assert job.phase is Phase.DRAINING
    drain(job, nodes[1].name)
    job.wait(8)
    assert job.phase is not Phase.DRAINING


def test_a_drain_is_repeated_and_refused_in_one_line() -> None:
    """Twice is once; a name that nobody has is answered with those that there are."""
    job, nodes = trained(2, min_nodes=2)
    code, text = drain(job, nodes[1].name)
    assert (code, "then the run waits for nodes: 1 node left, at least 2 needed" in text) == ("OK", True)
    before = job.job.sequence
    assert drain(job, nodes[1].name) == ("OK", f"{nodes[1].name} is leaving already")
    assert job.job.sequence == before
    code, text = drain(job, "nobody")
    assert (code, nodes[0].name in text) == ("NOT_FOUND", True)


def test_a_stop_saves_and_lets_everybody_go() -> None:
    """The job is stopped when all have gone; what it committed is where it goes on."""
    job, nodes = trained(2)
    code, text = stop(job)
    assert (code, "2 nodes save" in text, "dalsegno start" in text) == ("OK", True, True)
    assert stop(job)[0] == "OK"
    assert [node.directive.leave.stop for node in nodes] == [True, True]
    assert nodes[0].directive.drain.all_leave
    saved(job, nodes, 6)
    assert [node.order for node in nodes] == ["release", "release"]
    late = Node(job, "late")
    assert late.register().code == "UNAVAILABLE"
    for node in nodes:
        node.hang_up()
    job.wait(2)
    assert job.phase is Phase.STOPPED
    assert "run-0001 goes on from step 6" in job.job.message
    assert stop(job) == ("OK", job.job.message)


def test_a_stopped_job_lets_nobody_in_before_it_is_started() -> None:
    """A supervisor may start agents again at once: they are told that somebody has stopped it, and go."""
    job, nodes = trained(1)
    assert start(job)[0] == "FAILED_PRECONDITION"
    stop(job)
    assert "still being stopped" in start(job)[1]
    saved(job, nodes, 3)
    nodes[0].hang_up()
    job.wait(2)
    again = job.node()
    assert again.order == "finish"
    assert not again.directive.finish.success
    assert "the job was stopped by order" in again.directive.finish.message
    assert Node(job, "a new run").register(new_run=True).code == "OK"
    assert job.phase is Phase.STOPPED
    # Others are restarted again and again, and keep nobody from starting it.
    assert start(job)[0] == "OK"
    assert job.phase is Phase.WAITING
    new = job.node()
    new.join()
    job.wait(job.settings.quiet_time + 1)
    assert (job.phase, new.directive.run.resume.source.step) == (Phase.RUNNING, 3)


def test_an_ended_job_does_not_collect_those_who_come_in_vain() -> None:
    """A supervisor may start agents for days: of each that has gone nothing stays on the record."""
    job, nodes = trained(1)
    stop(job)
    saved(job, nodes, 3)
    nodes[0].hang_up()
    job.wait(2)
    finished = Driven(settings())
    (last,) = finished.start(1)
    last.step(1)
    last.save(1)
    last.finished(1)
    last.hang_up()
    for ended, phase in ((job, Phase.STOPPED), (finished, Phase.SUCCEEDED)):
        assert ended.phase is phase
        for _ in range(20):
            again = ended.node()
            assert again.order == "finish"
            again.hang_up()
            ended.wait(3)
        assert len(ended.job.nodes) == 1
        there = ended.node()
        assert {there.name} == {node.name for node in ended.job.nodes.values()}


def test_an_embedded_masters_job_goes_on_with_the_same_command() -> None:
    """Nobody could tell its master to start: it has ended with the job."""
    job, nodes = trained(1, embedded=True)
    assert "the same command goes on with it" in stop(job)[1]
    saved(job, nodes, 3)
    nodes[0].hang_up()
    job.wait(2)
    assert job.phase is Phase.STOPPED
    job.restart()
    assert job.phase is Phase.STOPPED
    again = job.node()
    assert job.phase is not Phase.STOPPED
    assert f"was stopped: {again.name} takes it up again from step 3" in job.notices
    assert "failed" not in job.notices


def test_a_stop_that_came_too_late_keeps_nobody_out() -> None:
    """The ranks had finished before they heard of it: the job has succeeded, and late agents are told so."""
    job, nodes = trained(2)
    stop(job)
    for node in nodes:
        node.finished(5)
    assert job.phase is Phase.SUCCEEDED
    assert [node.order for node in nodes] == ["finish", "finish"]
    assert "not stopped (succeeded)" in start(job)[1]
    for node in nodes:
        node.hang_up()
    late = job.node()
    assert late.directive.finish.success
    late.hang_up()
    assert Node(job, "anew").register(new_run=True).code == "OK"
    assert (job.phase.is_terminal, job.job.run_id) == (False, "run-0002")


def test_a_stop_holds_over_a_new_master() -> None:
    """It is on the record, like everything that was decided."""
    job, nodes = trained(2)
    stop(job)
    job.restart()
    for node in nodes:
        node.beat()
    assert job.job.stopping
    saved(job, nodes, 6)
    for node in nodes:
        node.hang_up()
    job.wait(job.settings.node_timeout + 2)
    assert job.phase is Phase.STOPPED


def test_what_is_stopped_need_not_be_running() -> None:
    """No node, or a job that has failed, whose supervisors would start it again; a finished one stays finished."""
    job = Driven()
    assert stop(job)[0] == "OK"
    assert job.phase is Phase.STOPPED
    failed, nodes = trained(1)
    for _ in range(20):
        nodes[0].failed(step=1)
        failed.wait(60)
        if failed.phase is Phase.FAILED:
            break
        all_join(nodes)
        failed.wait(3)
    assert failed.phase is Phase.FAILED
    assert stop(failed)[0] == "OK"
    assert failed.phase is Phase.STOPPED
    finished, nodes = trained(1)
    nodes[0].finished(5)
    assert finished.phase is Phase.SUCCEEDED
    assert stop(finished)[0] == "FAILED_PRECONDITION"
    assert drain(finished, nodes[0].name)[0] == "FAILED_PRECONDITION"
    assert save_now(finished)[0] == "FAILED_PRECONDITION"


def test_a_save_by_order_stands_until_a_commit_follows_it() -> None:
    """Every node is told, also one that comes late to hear; a repeat is the same order; the commit ends it."""
    job, nodes = trained(2)
    nodes[0].save(1)
    nodes[0].step(5)
    code, text = save_now(job)
    assert (code, "behind step 5" in text) == ("OK", True)
    orders = {node.directive.save_order for node in nodes}
    assert len(orders) == 1
    assert orders != {0}
    assert save_now(job)[0] == "OK"
    assert {node.directive.save_order for node in nodes} == orders
    assert job.phase is Phase.RUNNING
    nodes[0].save(6)
    assert {node.directive.save_order for node in nodes} == {0}
    nodes[0].step(7)
    save_now(job)
    assert nodes[0].directive.save_order > max(orders)


def test_a_save_by_order_is_refused_where_no_rank_could() -> None:
    """Nobody trains, the script has no session, or its loop saves nothing: one line says which."""
    job = Driven()
    assert "no ranks are at work" in save_now(job)[1]
    silent = Driven()
    silent.start(1)
    assert "has not called session()" in save_now(silent)[1]
    job, nodes = trained(1)
    nodes[0].step(2, saves_nothing=True)
    assert "saves nothing" in save_now(job)[1]
    assert not job.job.save_order


def test_the_end_of_the_job_ends_a_save_by_order() -> None:
    """A job that is taken up again is not asked for what somebody wanted before."""
    job, nodes = trained(1)
    save_now(job)
    nodes[0].finished(5)
    assert job.job.save_order is None


def test_a_stop_needs_no_goodbye() -> None:
    """Agents of a script without a session report nothing when they go, and then nobody at all is heard."""
    job = Driven()
    nodes = job.start(2)
    assert stop(job)[0] == "OK"
    for node in nodes:
        node.hang_up()
    job.wait(3)
    late = Node(job, "late")
    for _ in range(12):
        assert late.register().code == ("UNAVAILABLE" if job.job.stopping else "OK")
        job.wait(1)
    assert job.phase is Phase.STOPPED


def test_a_stop_ends_under_a_new_master_that_hears_nobody() -> None:
    """All nodes were gone before it came; an agent that comes later is told, and does not keep it from ending."""
    job, _ = trained(2)
    stop(job)
    job.restart()
    job.silent.update(node.incarnation for node in job.nodes)
    job.wait(3)
    assert job.phase is not Phase.STOPPED
    job.wait(30)
    assert job.phase is Phase.STOPPED


def test_a_leaver_that_says_goodbye_is_gone_at_once() -> None:
    """Nobody waits for its node-timeout, although nobody else is there whose word would prove it silent."""
    job, nodes = trained(1)
    nodes[0].leave()
    saved(job, nodes, 4)
    assert list(job.job.nodes) == [nodes[0].name]
    assert nodes[0].goodbye().code == "OK"
    assert not job.job.nodes
    assert f"{nodes[0].name} was lost" not in job.notices
    late = job.node()
    assert late.register().code == "OK"


def test_a_goodbye_of_a_member_lets_the_others_go_on() -> None:
    """Of a script without a session there is nothing to wait for: the world forms anew, and no loss is counted."""
    job = Driven()
    nodes = job.start(2)
    nodes[1].leave()
    assert nodes[1].goodbye().code == "OK"
    assert [node.name for node in job.job.nodes.values()] == [nodes[0].name]
    assert job.phase is Phase.FORMING
    assert not job.job.losses


def test_a_leaver_that_is_gone_before_the_others_have_saved_is_named() -> None:
    """As the cause of the next world, once."""
    for early in (True, False):
        job, nodes = trained(2)
        nodes[1].leave()
        nodes[0].step(4, draining=True)
        nodes[0].save(4)
        nodes[1].drained(4)
        if early:
            nodes[1].goodbye()
        nodes[0].drained(4)
        if not early:
            nodes[1].goodbye()
        all_join([nodes[0]])
        if nodes[0].lease:
            nodes[0].convert()
        assert job.phase is Phase.RUNNING
        assert job.job.world is not None
        assert job.job.world.causes == (f"{nodes[1].name} left",)


def test_what_a_stop_has_cost_is_told_as_exactly_as_it_is_known() -> None:
    """Behind a save nothing; where nothing was saved, nobody knows the last steps of ranks that were killed."""
    for saves in (True, False):
        job, nodes = trained(1, drain_timeout=5)
        stop(job)
        if saves:
            saved(job, nodes, 3)
        job.wait(6)
        nodes[0].goodbye()
        job.wait(2)
        assert job.phase is Phase.STOPPED
        assert start(job)[0] == "OK"
        new = job.start(1)
        new[0].step(4)
        assert job.job.history[-1].lost_more is not saves


def test_a_world_of_which_no_master_heard_may_have_made_steps() -> None:
    """Its master died before the first report, its nodes before the next one: what a stop cost is unknown."""
    job = Driven(settings())
    nodes = job.start(2)
    job.restart()
    job.silent.update(node.incarnation for node in nodes)
    stop(job)
    job.wait(30)
    assert job.phase is Phase.STOPPED
    start(job)
    (new,) = job.start(1)
    new.step(1)
    assert job.job.history[-1].lost_more


def test_a_stop_waits_for_nodes_that_are_connected() -> None:
    """One that is still saving is not given up because the other one has gone."""
    job, nodes = trained(2, drain_timeout=60)
    stop(job)
    nodes[0].step(2, draining=True)
    nodes[1].hang_up()
    job.wait(20)
    assert job.phase is not Phase.STOPPED
    assert job.job.stopping


def test_a_limit_outlives_a_stop() -> None:
    """Whoever scaled the job down wants it so when it is started again; other bounds of --nnodes void it."""
    job, nodes = trained(1)
    assert job.scale(2).code == "OK"
    stop(job)
    saved(job, nodes, 3)
    nodes[0].hang_up()
    job.wait(2)
    assert start(job)[0] == "OK"
    job.node()
    assert job.job.most_nodes == 2


def test_a_save_is_ordered_again_if_the_first_one_failed() -> None:
    """The ranks follow each order once, so the order of a person who asks again is another one."""
    job, nodes = trained(2)
    save_now(job)
    first = nodes[0].directive.save_order
    assert save_now(job)[0] == "OK"
    assert nodes[0].directive.save_order == first  # no step was made meanwhile
    nodes[0].step(9)  # and nothing was committed
    assert save_now(job)[0] == "OK"
    assert nodes[0].directive.save_order > first
    assert job.job.save_order.after == 9
    nodes[0].save(10)
    assert job.job.save_order is None


def test_a_save_by_order_is_new_to_ranks_that_know_one_of_a_lost_store() -> None:
    """They follow only numbers above those that they know; a master that lost its store counts from 1 again."""
    job, nodes = trained(1)
    for step in range(2, 40, 2):
        nodes[0].step(step)
        save_now(job)
    known, generation = nodes[0].directive.save_order, job.job.generation
    job.restart(keep_store=False)
    again = job.node(epoch=1, generation=generation)
    job.wait(job.settings.node_timeout + 1)
    again.join()
    job.wait(job.settings.quiet_time + 1)
    again.step(1)
    assert save_now(job)[0] == "OK"
    assert again.directive.save_order > known
    job.job.generation = 1 << 60
    again.step(2)
    assert save_now(job)[0] == "OK"
    assert known < again.directive.save_order <= MOST


def test_why_a_save_by_order_failed_is_among_the_events() -> None:
    """The command that waits for it points there. Once for each reason, and consoles have heard it already."""
    job, nodes = trained(2)
    nodes[0].step(5)
    save_now(job)
    before = len(job.job.events)
    for node, step, reason in ((0, 6, "disk full"), (1, 6, "disk full"), (0, 8, "disk full"), (0, 9, "no such place")):
        request = pb.SaveFailedRequest(caller=nodes[node].caller(), name=f"step-{step}", reason=reason, step=step)
        request.regular = True
        assert job.call(request).code == "OK"
    told = job.job.events[before:]
    assert [(event.warning, event.said, event.step) for event in told] == [(True, False, 6), (True, False, 9)]
    assert "saving step-6 failed (disk full)" in told[0].text
    assert told[0].text.endswith("the order to save still stands")
    assert (job.phase, job.job.save_order is None) == (Phase.RUNNING, False)
    nodes[0].save(10)
    nodes[0].step(11)
    request = pb.SaveFailedRequest(caller=nodes[0].caller(), name="step-12", reason="no such place", step=12)
    request.regular = True
    job.call(request)
    assert job.job.events[-1].text == "saving step-12 failed (no such place): the next save tries again, commits stand"


def test_a_failed_save_that_is_no_drains_leaves_the_drain_alone() -> None:
    """It may have begun before."""
    job, nodes = trained(2)
    drain(job, nodes[1].name)
    nodes[0].step(5, draining=True)
    request = pb.SaveFailedRequest(caller=nodes[0].caller(), name="step-4", reason="disk full", step=4, regular=True)
    assert job.call(request).code == "OK"
    assert job.job.drain is not None
    assert job.job.drain.agreed


def test_a_run_that_went_back_fulfils_an_order_by_its_next_save() -> None:
    """What it saves then is newer than the order, although its step is a lower one."""
    job, nodes = trained(2)
    nodes[0].save(5)
    nodes[0].step(40)
    save_now(job)
    for node in nodes:
        node.failed("boom", 41)
    job.wait(2)
    all_join(nodes)
    assert (job.phase, job.epoch) == (Phase.RUNNING, 2)
    assert nodes[0].directive.save_order
    nodes[0].step(6)
    assert shown.status(job.state, job.now).save_order == job.job.save_order.number
    nodes[0].save(6)
    assert not nodes[0].directive.save_order
    assert shown.status(job.state, job.now).save_order == 0


@pytest.mark.parametrize("limit", [0.0, 2.0, 60.0])
def test_a_job_that_is_being_stopped_waits_for_no_nodes(limit: float) -> None:
    """However long a node takes to go: --wait-for-nodes is for nodes that are to come."""
    job, nodes = trained(2, wait_for_nodes=limit)
    stop(job)
    saved(job, nodes, 3)
    nodes[0].hang_up()
    job.wait(limit + 5)
    assert (job.phase.is_terminal, job.job.stopping) == (False, True)
    nodes[1].hang_up()
    job.wait(5)
    assert (job.phase, "goes on from step 3" in job.job.message) == (Phase.STOPPED, True)


def test_what_fails_while_a_job_is_being_stopped_leaves_it_stopped() -> None:
    """A failed job would go on with the agents that a supervisor starts again, which somebody did not want."""
    job, (first,) = trained(1)
    first.save(1)
    stop(job)
    refused = pb.FAILURE_KIND_REFUSED
    job.call(pb.FailureRequest(caller=first.caller(), kind=refused, exit_code=1, message="other data", step=1))
    job.wait(2)
    assert job.phase is Phase.STOPPED
    assert "(it failed meanwhile: the training was refused: other data)" in job.job.message
    assert "goes on from step 1" in job.job.message
    again = job.node()
    assert (again.order, job.phase) == ("finish", Phase.STOPPED)


def test_a_job_that_is_being_stopped_says_so_and_for_whom_it_waits() -> None:
    """It said that it waits for nodes, or that enough are here."""
    job, nodes = trained(2, wait_for_nodes=60)
    stop(job)
    waits = f"the job stops by order: waiting for {nodes[0].name}, {nodes[1].name} to go"
    assert shown.status(job.state, job.now).reason == waits
    saved(job, nodes, 3)
    nodes[0].hang_up()
    job.wait(2)
    assert shown.status(job.state, job.now).reason == f"the job stops by order: waiting for {nodes[1].name} to go"
    assert "--wait-for-nodes" not in nodes[1].directive.wait.reason


def test_the_answer_to_a_stop_tells_behind_which_event_it_is_carried_out() -> None:
    """Somebody may start the job again before whoever has stopped it looks."""
    job, nodes = trained(1)
    for _ in range(2):
        reply = job.call(pb.StopRequest(job_id="job")).message
        assert isinstance(reply, pb.OrderReply)
        assert not [event for event in job.job.events if event.kind is Kind.STOPPED]
    saved(job, nodes, 3)
    nodes[0].hang_up()
    job.wait(3)
    start(job)
    (stopped,) = [event for event in job.job.events if event.kind is Kind.STOPPED]
    assert 0 < reply.event < stopped.sequence
