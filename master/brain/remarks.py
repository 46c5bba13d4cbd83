"""What agents say about their own nodes becomes events of the job, few however many say the same.

The first who says a line is quoted at once. Who says the same in the seconds that follow is quoted in one event
together: when a thousand agents lose a file system, people read two lines.
"""

from __future__ import annotations

from dalsegno.protos import control_pb2

from .live import SharedLine
from .presences import Presence
from .state import Node
from .turn import Turn

__all__ = ("remark", "tend")

# Seconds in which the same line counts as the same event.
TOGETHER_SECONDS = 5.0
# The most lines of one node in a minute, and the most different lines that are looked out for.
LINES_OF_NODE, MINUTE_SECONDS = 20, 60.0
MOST_LINES = 256
LEFT_OUT = "it says more than a person could read; the rest of this minute is in its console and its log"


def remark(turn: Turn, node: Node, message: control_pb2.RemarkRequest) -> tuple[str, str]:
    """Quotes a line; or notes who has said it, too."""
    if not message.text or not admitted(turn, turn.presence(node), node.name):
        return "OK", ""
    lines, said = turn.live.lines, (message.text, message.warning)
    if said in lines:
        lines[said].nodes[node.name] = None
        return "OK", ""
    if len(lines) >= MOST_LINES:
        close(turn, next(iter(lines)))
    lines[said] = SharedLine(turn.now + TOGETHER_SECONDS)
    turn.quote(*said, [node.name])
    return "OK", ""


def admitted(turn: Turn, presence: Presence, name: str) -> bool:
    """Whether a node has not said too much of late; that is said once a minute."""
    if turn.now >= presence.lines_until:
        presence.lines, presence.lines_until = 0, turn.now + MINUTE_SECONDS
    presence.lines += 1
    if presence.lines == LINES_OF_NODE + 1:
        turn.quote(LEFT_OUT, False, [name])
    return presence.lines <= LINES_OF_NODE


def tend(turn: Turn) -> None:
    """Quotes those who said the same, once their time is over."""
    lines = turn.live.lines
    for said in [said for said, line in lines.items() if turn.due(line.until)]:
        close(turn, said)


def close(turn: Turn, said: tuple[str, bool]) -> None:
    line = turn.live.lines.pop(said)
    if line.nodes:
        turn.quote(*said, line.nodes)
