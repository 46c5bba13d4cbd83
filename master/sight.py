"""What nodes have in sight of the resume point: it may be damaged, or gone, while they gather."""

from __future__ import annotations

from . import conversion
from .checkpoints import resume_point, retire
from .membership import answers
from .state import Checkpoint, Node
from .turn import Turn

__all__ = ("look", "seen_by_nobody")

# So long nobody has had the newest checkpoint in sight, although all read the same directory, before the run goes back
# by one: longer than file systems keep what they remember of a directory (seconds).
UNSEEN_LIMIT = 60.0


def look(turn: Turn, ready: list[Node], waited_for: list[Node]) -> bool:
    """See to a resume point that those who joined cannot use. Returns whether anything moved."""
    resume = resume_point(turn.job)
    gathering = turn.live.gathering
    if resume is None or turn.job.verification is not None:
        gathering.unseen = None
        return False
    if suspect_damage(turn, resume):
        return True
    before = one_before(turn, resume)
    if ready or waited_for or before is None or not seen_by_nobody(turn, resume):
        gathering.unseen = None
        return False
    if gathering.unseen is None:
        gathering.unseen = turn.heard
    if not turn.overdue(gathering.unseen + UNSEEN_LIMIT):
        return False
    gathering.unseen = None
    retire(turn.job, resume, damaged=True)
    turn.notice(
        f"nobody has had {resume.name} in sight for {UNSEEN_LIMIT:.0f} s, although all nodes see the checkpoint"
        f" directory: going back to {before.name}",
        True,
    )
    return True


def suspect_damage(turn: Turn, resume: Checkpoint) -> bool:
    """A node has the directory in sight, but not the manifest that was recorded: another one has a look."""
    for node in turn.job.nodes.values():
        joined = node.joined
        if joined is None or not joined.unusable or not answers(turn, node) or node.leaving:
            continue
        if resume.name in joined.unusable and resume.digest not in joined.seen and node.unreadable != resume.digest:
            conversion.suspect(turn, resume, False, node.name, "its manifest is not the one that was sealed")
            return True
        if resume.universal_name and resume.universal_name in joined.unusable:
            conversion.suspect(turn, resume, True, node.name, "its manifest is not the one that was sealed")
            return True
    return False


def seen_by_nobody(turn: Turn, resume: Checkpoint) -> bool:
    """All who are here have looked, enough of them, in the job's directory, and not one has found it."""
    nodes = [node for node in turn.job.nodes.values() if not node.leaving]
    enough = len(nodes) >= turn.job.settings.min_nodes
    return enough and all(
        node.sees_directory
        and turn.presence(node).spoke
        and answers(turn, node)
        and node.joined is not None
        and resume.digest not in node.joined.seen
        for node in nodes
    )


def one_before(turn: Turn, resume: Checkpoint) -> Checkpoint | None:
    """The checkpoint that the run would go back to."""
    others = [record for record in turn.job.checkpoints.usable if record.digest != resume.digest]
    return max(others, key=lambda record: record.age, default=None)
