"""Callers that lie: who may commit what, who may speak for whom, and what nobody's word alone may delete."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from google.protobuf.message import Message

from dalsegno.master.brain.door import ShapeError, admit
from dalsegno.master.brain.events import Reply
from dalsegno.master.brain.state import Phase
from dalsegno.protos import control_pb2
from tests.support.jobs.masters import Driven, Node, all_join, settings

LAST = 2**64 - 1
DIGEST = "0123456789abcdef" * 4


def at_the_door(job: Driven, message: Message) -> Reply:
    """As the service takes a call: its shape is looked at before the brain hears of it."""
    try:
        admit(message)
    except ShapeError as error:
        return Reply("INVALID_ARGUMENT", str(error))
    return job.call(message)


def trained(count: int = 2, keep: int = 1) -> tuple[Driven, list[Node], control_pb2.Checkpoint]:
    """A world with one commit that another node has seen."""
    job = Driven(settings(keep_checkpoints=keep))
    nodes = job.start(count)
    nodes[0].step(1)
    made = nodes[0].save(2)
    if count > 1:
        nodes[1].sights()
    return job, nodes, made


def real(job: Driven, step: int) -> control_pb2.Checkpoint:
    """What a member might commit next, with a digest as a manifest's is."""
    made = job.seal(step)
    job.sealed.remove(made)
    made.ref.digest = DIGEST
    made.ClearField("resumed_from")
    return made


def untouched(job: Driven, made: control_pb2.Checkpoint) -> None:
    """The one commit is still all that the record has, and nobody is told to delete anything."""
    assert [record.digest for record in job.job.checkpoints.usable] == [made.ref.digest]
    assert len(job.job.checkpoints) == 1
    assert not any(node.directive.prune for node in job.nodes if node.is_known)


# ---- commits ---------------------------------------------------------------------------------------------------------


def test_who_is_no_member_of_the_epoch_commits_nothing() -> None:
    """A newcomer, a spare, and a node that was a member of the epoch before: refused, nothing retired."""
    job = Driven(settings(max_nodes=2, keep_checkpoints=1))
    a, b = job.start(2)
    a.step(1)
    made = a.save(2)
    b.sights()
    spare = job.node()
    spare.join()
    for caller in (spare, job.node()):
        reply = at_the_door(job, control_pb2.CommitRequest(caller=caller.caller(), checkpoint=real(job, 250)))
        assert reply.code == "FAILED_PRECONDITION"
        assert "no member of epoch 1" in reply.detail
    untouched(job, made)
    b.failed()
    all_join([a])
    job.wait(job.settings.join_timeout + 2.0)
    spare.join()
    all_join([a])
    job.wait(2.0)
    assert job.epoch == 2
    assert b.name not in job.members
    assert b.is_known
    for epoch in (1, 2, 3, 0):
        late = real(job, 250)
        late.epoch, late.ref.name = epoch, f"step-250.e{epoch}.1"
        reply = at_the_door(job, control_pb2.CommitRequest(caller=b.caller(epoch), checkpoint=late))
        assert reply.code == "FAILED_PRECONDITION", reply
    untouched(job, made)


def test_a_member_of_an_older_epoch_commits_nothing_of_it() -> None:
    """Also one that is a member of the present one."""
    job, (a, b), made = trained()
    late = real(job, 9)
    b.failed()
    all_join([a, b])
    assert job.epoch == 2
    reply = at_the_door(job, control_pb2.CommitRequest(caller=a.caller(1), checkpoint=late))
    assert (reply.code, "epoch 1 is closed" in reply.detail) == ("FAILED_PRECONDITION", True)
    untouched(job, made)


def lied(**changes: object) -> Callable[[control_pb2.Checkpoint], None]:
    def change(made: control_pb2.Checkpoint) -> None:
        for name, value in changes.items():
            if name in ("name", "digest"):
                setattr(made.ref, name, value)
            else:
                setattr(made, name, value)

    return change


@pytest.mark.parametrize(
    "change",
    [
        lied(name="../../etc"),
        lied(name="/etc"),
        lied(name="step-3.e1.1/.."),
        lied(name=""),
        lied(name="step-3.e1.1.universal.1"),
        lied(name="step-4.e1.1"),
        lied(name="step-3.e2.1"),
        lied(digest=""),
        lied(digest=DIGEST[:-1]),
        lied(digest=DIGEST.upper()),
        lied(digest="g" * 64),
        lied(step=LAST),
        lied(step=LAST, name=f"step-{LAST}.e1.1"),
        lied(epoch=LAST),
        lied(run_id="run-0002"),
        lied(step=2, name="step-2.e1.2"),
        lied(step=0, name="step-0.e1.1"),
        lied(form=control_pb2.FORM_WEIGHTS),
        lied(form=control_pb2.FORM_UNSPECIFIED),
    ],
)
def test_a_member_commits_nothing_that_cannot_be(change: Callable[[control_pb2.Checkpoint], None]) -> None:
    """A name that is no checkpoint's or another's, no digest, a step out of reach or not beyond the last."""
    job, (a, _), made = trained()
    lie = real(job, 3)
    change(lie)
    reply = at_the_door(job, control_pb2.CommitRequest(caller=a.caller(), checkpoint=lie))
    assert reply.code in ("INVALID_ARGUMENT", "FAILED_PRECONDITION"), reply
    untouched(job, made)
    assert at_the_door(job, control_pb2.CommitRequest(caller=a.caller(), checkpoint=real(job, 3))).code == "OK"


def converting() -> tuple[Driven, Node, Node, control_pb2.Checkpoint]:
    """The survivor of a world of two holds the lease, a newcomer watches."""
    job, (a, b), made = trained()
    b.hang_up()
    job.wait(2.0)
    a.join()
    assert a.lease
    late = job.node(probe="somewhere else")
    return job, a, late, made


def form_of(made: control_pb2.Checkpoint, lease: int) -> control_pb2.Checkpoint:
    form = control_pb2.Checkpoint()
    form.CopyFrom(made)
    form.ref.name, form.ref.digest = f"{made.ref.name}.universal.{lease}", DIGEST
    form.form = control_pb2.FORM_UNIVERSAL
    form.source.CopyFrom(made.ref)
    return form


def test_a_form_is_committed_by_the_owner_of_its_lease_under_the_leases_name() -> None:
    """Whoever else says that it is made would have a world load what is not there."""
    job, a, late, made = converting()
    lease = a.lease
    forged = [
        (late, form_of(made, lease)),
        (a, form_of(made, lease + 1)),
        (a, form_of(made, 0)),
    ]
    for caller, form in forged:
        request = control_pb2.CommitRequest(caller=caller.caller(), checkpoint=form, lease=lease)
        assert job.call(request).code == "FAILED_PRECONDITION"
    for message in (
        control_pb2.ClaimRequest(caller=late.caller(), lease=lease),
        control_pb2.ClaimRequest(caller=a.caller(), lease=lease + 1),
        control_pb2.ClaimRequest(caller=a.caller(), lease=0),
        control_pb2.ConversionReport(caller=late.caller(), lease=lease, state=control_pb2.CONVERSION_STATE_SOURCE_BAD),
        control_pb2.ConversionReport(caller=late.caller(), lease=0, state=control_pb2.CONVERSION_STATE_SOURCE_BAD),
    ):
        assert job.call(message).code == "FAILED_PRECONDITION"
    assert job.phase is Phase.FORMING
    assert job.job.verification is None
    untouched(job, made)
    a.convert()
    assert job.phase is Phase.RUNNING


# ---- nobody's word alone ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("keep", [1, 2])
def test_what_only_its_committer_has_seen_deletes_nothing(keep: int) -> None:
    """A member that commits what is not there, again and again: the last that another has seen stays."""
    job, (a, b), made = trained(keep=keep)
    for step in range(3, 30):
        a.save(step)
        untold = [record for record in job.job.checkpoints if record.retired]
        assert not untold
        assert not a.directive.prune
    assert made.ref.digest in {record.digest for record in job.job.checkpoints.usable}
    assert a.sights().code == "OK", "its own word for its own commit"
    assert not a.directive.prune
    for step in range(30, 30 + keep):
        b.sights()
        assert len(a.directive.prune) == (27 if step == 29 + keep else 0)
        a.save(step)


def test_a_restarted_master_still_knows_what_nobody_else_has_seen() -> None:
    """Who committed it, until another has seen it, is in the record."""
    job, (a, b), _ = trained()
    a.save(3)
    job.restart()
    for node in (a, b):
        node.beat()
    assert not a.directive.prune
    b.sights()
    assert [ref.name for ref in a.directive.prune] == ["step-2.e1.1"]


def test_a_node_without_the_directory_is_no_witness_and_none_is_waited_for() -> None:
    """A spare with another mount sees nothing of it: else a run of one would never delete anything."""
    job, (a,), _ = trained(count=1)
    blind = job.node(probe="somewhere else")
    blind.join(sees=[])
    assert blind.directive.sight.digest == ""
    a.save(3)
    assert [ref.name for ref in a.directive.prune] == ["step-2.e1.1"]


def test_a_run_of_one_node_keeps_as_many_as_it_was_told() -> None:
    """Nobody else will ever see its commits: their number is bounded all the same."""
    job, (a,), _ = trained(count=1)
    for step in range(3, 6):
        a.save(step)
        assert [record.step for record in job.job.checkpoints.usable] == [step]


def test_the_last_of_several_nodes_keeps_what_its_world_started_from() -> None:
    """Left alone it prunes its own commits, of which there is no second witness; what was loaded was there."""
    job, (a, b), made = trained()
    b.hang_up()
    job.wait(2.0)
    a.join()
    a.convert()
    for step in range(3, 8):
        a.save(step)
    assert [record.step for record in job.job.checkpoints.usable] == [2, 7]
    assert made.ref.name not in {ref.name for ref in a.directive.prune}
    job.node()
    a.save(8)
    assert [record.step for record in job.job.checkpoints.usable] == [2, 7, 8], "now somebody could look"


def test_only_who_was_asked_is_a_witness() -> None:
    """A stranger's word for a checkpoint counts no more than its committer's, where others are there."""
    job, (a, b, c), _ = trained(count=3)
    stranger = job.node()
    stranger.join(sees=[])
    made = a.save(3)
    assert stranger.directive.sight.digest == ""
    stranger.job.call(control_pb2.SightedRequest(caller=stranger.caller(), ref=made.ref))
    assert not a.directive.prune
    assert c.directive.sight == b.directive.sight == made.ref
    c.sights()
    assert [ref.name for ref in a.directive.prune] == ["step-2.e1.1"]


def test_only_who_was_told_to_delete_says_that_it_is_done() -> None:
    """What another says is told again; nothing that is not retired can be talked away."""
    job, (a, b), _ = trained()
    made = a.save(3)
    b.sights()
    (old,) = a.directive.prune
    job.call(control_pb2.PrunedRequest(caller=b.caller(), refs=[old]))
    assert [ref.name for ref in a.directive.prune] == [old.name]
    job.call(control_pb2.PrunedRequest(caller=a.caller(), refs=[old, made.ref]))
    assert not a.directive.prune
    assert [record.step for record in job.job.checkpoints] == [3]


# ---- in another's name -----------------------------------------------------------------------------------------------


def forgeries(node: Node, secret: bytes) -> list[Message]:
    """Calls in this node's name, with a request number beyond all that it will ever use."""
    caller = node.caller(number=LAST)
    caller.secret = secret
    commit = control_pb2.CommitRequest(caller=caller, checkpoint=real(node.job, 99))
    return [
        control_pb2.LeaveRequest(caller=caller),
        control_pb2.WarmRequest(caller=caller),
        control_pb2.FailureRequest(caller=caller, message="it broke"),
        control_pb2.FinishedRequest(caller=caller, step=99),
        control_pb2.ProgressRequest(caller=caller, step=99, has_session=True),
        control_pb2.HeartbeatRequest(caller=caller),
        commit,
    ]


@pytest.mark.parametrize("secret", [b"", b"the secret of incarnation-1", bytes(16)], ids=["none", "another's", "zeros"])
def test_nobody_acts_for_a_node_without_its_secret(secret: bytes) -> None:
    """The world hands out incarnations: they prove nothing. The node's own later commit counts."""
    job, (a, _), made = trained()
    for message in forgeries(a, secret):
        assert job.call(message).code == "PERMISSION_DENIED", type(message).__name__
    assert (job.phase, job.epoch) == (Phase.RUNNING, 1)
    assert job.state.live.epoch.top_step == 1
    untouched(job, made)
    after = a.save(3)
    assert job.job.checkpoints.head is not None
    assert job.job.checkpoints.head.digest == after.ref.digest


def test_forged_words_keep_no_silent_node_alive() -> None:
    """A heartbeat in its name without its secret is no sign of life."""
    job, (_, b), _ = trained()
    job.silent.add(b.incarnation)
    for _ in range(20):
        caller = b.caller(number=0)
        caller.secret = b"guessed"
        assert job.note(control_pb2.HeartbeatRequest(caller=caller)).code == "PERMISSION_DENIED"
        job.wait(1.0)
        if not b.is_known:
            break
    assert not b.is_known


def test_the_secret_is_asked_for_after_a_restart_too() -> None:
    """Its digest is in the record, the secret itself is not."""
    job, (a, _), _ = trained()
    job.restart()
    for message in forgeries(a, b"guessed"):
        assert job.call(message).code == "PERMISSION_DENIED"
    assert a.secret.decode() not in repr(job.job)
    assert a.beat().code == "OK"
    a.save(3)


def test_no_number_of_its_own_locks_a_node_out() -> None:
    """The largest request number that the door lets in leaves room above it."""
    job, (a, _), _ = trained()
    for number in (LAST, 2**63):
        message = control_pb2.WarmRequest(caller=a.caller(number=number))
        assert at_the_door(job, message).code == "INVALID_ARGUMENT"
    a.save(3)


def test_nobody_registers_over_a_node_whose_secret_it_does_not_know() -> None:
    """Neither under its incarnation, nor as its next one."""
    job, (a, b), _ = trained()
    thief = Node(job, a.incarnation)
    thief.name = a.name
    request = control_pb2.RegisterRequest(
        job_id="job", incarnation=a.incarnation, secret=b"guessed" * 3, host="host", nproc=1, settings=job.settings
    )
    assert job.call(request).code == "FAILED_PRECONDITION"
    request.incarnation, request.previous_incarnation = "new", a.incarnation
    assert job.call(request).code == "OK", "as a node of its own"
    assert a.is_known
    assert b.is_known
    assert job.phase is Phase.RUNNING


def test_all_that_a_newcomer_tells_counts_however_much_it_is() -> None:
    """What is recorded at once is told in one line, and nothing of it is deleted later."""
    job = Driven(settings(keep_checkpoints=0))
    a, b = job.start(2)
    a.step(1)
    for step in range(2, 102):
        job.seal(step, any_size=True)
    b.failed()
    new = job.node()
    new.join()
    a.hang_up()
    b.hang_up()
    job.wait(3)
    assert [record.step for record in job.job.checkpoints] == list(range(2, 102))
    assert not job.job.late
    assert job.notices.count("sealed but not yet recorded: they count") == 1


def test_all_that_an_older_epoch_sealed_too_late_is_one_line() -> None:
    """A node that comes back may have a hundred of them, and a console keeps 40 lines."""
    job = Driven()
    a, b = job.start(2)
    a.step(1)
    late = [job.seal(step, any_size=True) for step in range(2, 52)]
    job.sealed.clear()
    b.failed()
    job.wait(1)
    all_join([a, b])
    job.wait(3)
    a.save(60, any_size=True)
    b.failed()
    job.wait(1)
    b.join(sees=[*job.sealed, *late])
    assert len(job.job.late) == 50
    (told,) = [line for line in job.notices.splitlines() if "no part of the run" in line]
    assert "are no part of the run, which went on in epoch 2: they are deleted" in told
