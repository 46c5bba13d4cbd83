"""``--resume-step``: the run goes back to an earlier checkpoint. What came after it is kept aside, and never chosen.

Step 0 is the beginning: then all of it is kept aside. A start of the run asks for it once. The record remembers what
was asked for, so that a later start with the same command line goes on from where the run stands by then.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from dalsegno.protos import control_pb2

from . import membership
from .checkpoints import has_gone_back, resume_point, set_aside
from .described import from_proto
from .events import Reply
from .state import Budget, Checkpoint, GoneBack, Job, Phase
from .turn import Turn, names

# The most steps that a refusal names, the last ones, and the most requests that are remembered.
STEPS_NAMED, REMEMBERED = 8, 256


def refused(job: Job, message: control_pb2.RegisterRequest) -> Reply | None:
    """A refusal if the run is finished, and nothing of it would be trained again; or is to be left for a new one."""
    if not message.HasField("resume_step") or message.previous_incarnation:
        return None
    if message.new_run:
        why = "--new-run starts over, and --resume-step goes back in the run that is there: give one of them"
        return Reply("INVALID_ARGUMENT", why)
    if job.phase is not Phase.SUCCEEDED or _known(job, _wish(job, message)) is not None:
        return None
    return Reply(
        "FAILED_PRECONDITION",
        f"{job.run_id} is finished, and --resume-step={_flag(message)} goes back in a run that is not: leave it out "
        "(--new-run starts over)",
    )


def go_back(turn: Turn, message: control_pb2.RegisterRequest, is_there: Callable[[str], bool]) -> Reply | str:
    """Does what a new agent asks for. Returns a refusal, or what the agent should tell its user; mostly "".

    Args:
        turn: The turn.
        message: The agent's registration.
        is_there: Whether the node of this name is still in the job.
    """
    job = turn.job
    if not message.HasField("resume_step") or message.previous_incarnation or job.phase.is_terminal:
        return ""
    wish = _wish(job, message)
    known = _known(job, wish)
    if known is not None:
        return _known_already(job, wish, known)
    there = [name for name in job.nodes if is_there(name)]
    if there:
        return _not_now(turn, wish, there)
    restored = take_back(job, message)
    target = max((one for one in _on_disk(job) if one.step == wish.step), key=lambda one: one.age, default=None)
    if target is None and wish.step:
        return Reply("FAILED_PRECONDITION", _no_such_step(job, wish))
    # They could still save something newer; when they are heard again they register anew.
    membership.lose(turn, [(node, "the run went back to an earlier step") for node in job.nodes.values()])
    if restored or target is None:
        # It may be another directory, which is the job's from now on.
        job.probe = message.probe
    behind = [record for record in job.checkpoints.usable if target is None or record.age > target.age]
    later = sum(set_aside(job, record) for record in behind)
    turn.update_run(gone_back=(*job.run.gone_back, wish)[-REMEMBERED:], budget=Budget(), left_step=wish.step)
    what = f"{later} later checkpoint{'s are' if later != 1 else ' is'} kept aside, and not deleted"
    where = "its beginning" if target is None else f"step {target.step} ({target.name})"
    text = f"{job.run_id} goes back to {where}, as --resume-step says: {what}"
    turn.notice(text, True)
    return text


def stands_at(job: Job, made: int) -> int:
    """The step that the run stands at: the last one that was `made`, or the one that it went back to since."""
    return job.run.left_step if has_gone_back(job) else made


def take_back(job: Job, message: control_pb2.RegisterRequest) -> bool:
    """What was committed, and was then deleted, is there again: a restored milestone, or a copy.

    What is damaged, aside or about to be deleted is taken back only as a milestone: a node that is not heard may still
    delete it. Returns whether there is one.
    """
    found = False
    published = {one.digest for one in job.run.milestones}
    pruned = {one.digest for one in job.pruned}
    for entry in message.inventory:
        if entry.step != message.resume_step or entry.run_id != job.run_id:
            continue
        known = job.checkpoint(entry.ref.digest)
        if entry.ref.digest not in published and not (known is None and entry.ref.digest in pruned):
            continue
        found = True
        job.late = tuple(record for record in job.late if record.digest != entry.ref.digest)
        if known is None:
            job.checkpoints.put(from_proto(entry))
        elif known.retired:
            job.checkpoints.put(replace(known, retired=False, damaged=False, aside=False))
    return found


def _wish(job: Job, message: control_pb2.RegisterRequest) -> GoneBack:
    return GoneBack(message.resume_step, max(1, message.resume_time), job.epoch)


def _known(job: Job, wish: GoneBack) -> GoneBack | None:
    """The same wish, if it was followed."""
    return next((one for one in job.run.gone_back if (one.step, one.time) == (wish.step, wish.time)), None)


def _flag(message: control_pb2.RegisterRequest) -> str:
    return f"{message.resume_step}:{message.resume_time}" if message.resume_time > 1 else str(message.resume_step)


def _on_disk(job: Job) -> list[Checkpoint]:
    return [record for record in job.checkpoints.usable if not record.parts]


def _known_already(job: Job, wish: GoneBack, known: GoneBack) -> str:
    """One line once the run has got on: nobody shall believe that it went back again."""
    head = resume_point(job)
    if head is None or head.epoch <= known.epoch:
        return ""
    return (
        f"--resume-step has been followed: {job.run_id} went back to step {wish.step} before epoch {known.epoch + 1}, "
        f"and goes on from step {head.step}; --resume-step={wish.step}:{wish.time + 1} goes back there once more"
    )


def _not_now(turn: Turn, wish: GoneBack, there: list[str]) -> Reply:
    """A refusal; or "not yet", while a new master does not know whether the nodes of its record are gone."""
    job = turn.job
    spoke = [name for name in there if turn.presence(job.nodes[name]).spoke]
    if not spoke:
        return Reply("UNAVAILABLE", f"--resume-step waits until {names(there)}, which may be gone, is given up")
    return Reply(
        "FAILED_PRECONDITION",
        f"--resume-step={wish.step} is for a start, and {names(spoke)} takes part in {job.run_id} already: stop all "
        "nodes first, or leave it out",
    )


def _no_such_step(job: Job, wish: GoneBack) -> str:
    steps = sorted({record.step for record in _on_disk(job)})
    why = _given_up(job, wish.step)
    if not steps:
        return f"--resume-step={wish.step}: {job.run_id} has no checkpoint to go back to{why}: leave it out"
    more = "..., " if len(steps) > STEPS_NAMED else ""
    there = ", ".join(map(str, steps[-STEPS_NAMED:]))
    return f"--resume-step={wish.step}: {job.run_id} has no checkpoint of that step{why}; it has those of {more}{there}"


def _given_up(job: Job, step: int) -> str:
    """What has become of one of that step whose files a person may still see; empty if there is none."""
    known = [record for record in job.checkpoints.retired if record.step == step and not record.parts]
    if not known:
        return ""
    one = max(known, key=lambda record: record.age)
    if one.aside:
        return f" ({one.name} is kept aside, since the run went back)"
    return f" ({one.name} is {'damaged' if one.damaged else 'about to be deleted, --keep-checkpoints'})"
