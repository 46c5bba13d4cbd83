"""Which nodes see the resume point while they gather: it may be damaged, or gone."""

from __future__ import annotations

from . import conversion, durable, memory, unfetched
from .checkpoints import resume_point, retire
from .holders import is_there
from .membership import answers, are_enough, expected, has_answered, is_candidate, sees_resume
from .state import Checkpoint, Node
from .turn import Turn, names

__all__ = ("look", "lost")

# Seconds for which nobody has seen the newest checkpoint, although all read the same directory, before the run goes
# back by one. Longer than file systems cache a directory.
UNSEEN_LIMIT_SECONDS = 60.0


def look(turn: Turn) -> bool:
    """Handles a resume point that the nodes that joined cannot use. Returns whether anything changed."""
    job, gathering = turn.job, turn.live.gathering
    resume, verification = resume_point(job), job.verification
    if resume is not None and verification is None and suspect_damage(turn, resume):
        return True
    if resume is not None and resume.parts:
        gathering.unseen = None
        return lacks_memory(turn, resume)
    before = one_before(turn, resume) if resume is not None else None
    # A verifier of a directory that is gone has no verdict; then it counts that nobody sees it.
    open_question = verification is not None and not conversion.is_unable(verification)
    if resume is None or before is None or open_question or not seen_by_nobody(turn, resume):
        gathering.unseen = None
        return False
    if gathering.unseen is None:
        gathering.unseen = turn.heard
    if not turn.overdue(gathering.unseen + UNSEEN_LIMIT_SECONDS):
        return False
    gathering.unseen = None
    turn.update_next(verification=None)
    retire(job, resume, damaged=True)
    turn.notice(
        f"nobody has had {resume.name} in sight for {UNSEEN_LIMIT_SECONDS:.0f} s, although all nodes see the checkpoint"
        f" directory: going back to {before.name}",
        True,
    )
    return True


def lacks_memory(turn: Turn, resume: Checkpoint) -> bool:
    """A resume point in memory that nodes cannot fetch from each other, so that no world can open: they all see a disk.

    Returns whether anything changed. What nobody can write there either is tried again: it is not lost.
    """
    job = turn.job
    here = [node for node in job.nodes.values() if is_candidate(turn, node) and has_answered(turn, node)]
    without = [node for node in here if not sees_resume(turn, node)]
    if not without:
        return False
    coming = [node for node in expected(turn) if not has_answered(turn, node)]
    if len(here) - len(without) + len(coming) >= job.settings.least_nodes:
        return False
    if not is_there(job, turn.live.held.step(resume)):
        return False  # Its holders are gone, or have not been heard yet: it is lost, or waited for (`memory.lost`).
    if durable.want_in_parts(turn, resume):
        unfetched.could_not_fetch(turn, without)
        who = names([node.name for node in without])
        turn.notice(
            f"{who} cannot fetch {resume.name} from the memory of other nodes: each node writes its part to"
            " the disk, and the run goes on from there",
            True,
        )
        return True
    return False


def lost(turn: Turn, resume: Checkpoint | None) -> bool:
    """A part of the resume point is in no memory any more: the run goes back, see `memory.lost`. True: it did.

    While too few nodes are here for a world that would help nobody, and who held the part may come back with it.
    """
    if resume is None or not resume.parts:
        return False
    gathering, step = turn.live.gathering, turn.live.held.step(resume)
    before, gathering.too_few = gathering.too_few, not turn.job.stopping and not are_enough(turn)
    if gathering.too_few:
        memory.is_gone(turn, resume)  # whoever has another part looks on the disk meanwhile
        return False
    if before:
        # Who has come may be the one that holds it.
        step.missing_since = step.sought_since = None
    return memory.lost(turn, resume)


def suspect_damage(turn: Turn, resume: Checkpoint) -> bool:
    """Has the resume point verified if a node sees the directory, but not the recorded manifest."""
    for node in turn.job.nodes.values():
        joined = node.joined
        if joined is None or not joined.unusable or not answers(turn, node) or node.leaving:
            continue
        if node.unreadable == resume.digest:
            continue
        if resume.name in joined.unusable and resume.digest not in joined.seen:
            conversion.suspect(turn, resume, False, node.name, "its manifest is not the one that was sealed")
            return True
        if resume.universal_name and resume.universal_name in joined.unusable:
            conversion.suspect(turn, resume, True, node.name, "its manifest is not the one that was sealed")
            return True
    return False


def seen_by_nobody(turn: Turn, resume: Checkpoint) -> bool:
    """Whether all nodes here, enough for a world, have looked in the job's directory, and none has found it.

    Like gathering, this does not wait for ever for an agent that does not answer.
    """
    found = 0
    for node in turn.job.nodes.values():
        if node.leaving or is_stranger(turn, node):
            continue
        if not has_answered(turn, node):
            if turn.presence(node).spoke and turn.is_fresh(node) and conversion.nobody_waits_for(turn, node):
                continue
            return False
        if not node.sees_directory or node.joined is None or resume.digest in node.joined.seen:
            return False
        found += 1
    return found >= turn.job.settings.least_nodes


def is_stranger(turn: Turn, node: Node) -> bool:
    """Whether the node reads another directory and did not train with the others, so that its view does not count."""
    world = turn.job.world
    return not node.sees_directory and (world is None or world.member(node.incarnation) is None)


def one_before(turn: Turn, resume: Checkpoint) -> Checkpoint | None:
    """The checkpoint that the run would go back to."""
    others = [record for record in turn.job.checkpoints.usable if record.digest != resume.digest]
    return max(others, key=lambda record: record.age, default=None)
