"""What is waited for is said where it lasts, and when it ends at the latest: no wait is silent for long."""

from __future__ import annotations

from collections.abc import Callable

from .live import Waiting
from .turn import Turn, heartbeat_of, names, world_of

__all__ = ("SAID_AFTER_SECONDS", "begin_look", "end_look", "say", "unheard")

# Seconds after which people are told of a wait; told again each time it has doubled.
SAID_AFTER_SECONDS = 5.0
# After so many heartbeats without a word a line says that a node is silent, as far as it waits for it.
SILENT_BEATS = 2.5


def say(
    turn: Turn,
    subject: str,
    text: str | Callable[[], str],
    left: float | None = None,
    flag: str = "",
    *,
    now: bool = False,
) -> None:
    """Notes that something is waited for, at each look while it is; says so if it lasts.

    Args:
        subject: names the wait. One that is not noted in a look is over, and begins anew the next time.
        text: what is waited for, in a line; or what makes it, if that looks at every node.
        left: seconds until it ends at the latest; None: nobody knows.
        flag: the flag that sets this limit.
        now: it is known to last, so it is said at once.
    """
    waits = turn.live.waits
    waits.noted.add(subject)
    wait = waits.known.get(subject)
    if wait is None:
        wait = waits.known[subject] = Waiting(turn.now, 0.0 if now else SAID_AFTER_SECONDS)
    if not turn.due(wait.since + wait.said_after):
        return
    seconds = turn.now - wait.since
    wait.said_after = max(2 * seconds, SAID_AFTER_SECONDS)
    turn.due(wait.since + wait.said_after)
    limit = "" if left is None else f"; at most {max(1.0, left):.0f} s{' more' if seconds >= 1 else ''}"
    line = text if isinstance(text, str) else text()
    turn.notice(f"{line}{limit}{f' ({flag})' if flag else ''}")


def begin_look(turn: Turn) -> None:
    """The state is looked at: what it waits for is noted anew."""
    turn.live.waits.noted.clear()


def end_look(turn: Turn) -> None:
    """It has come to rest: what was not noted is not waited for."""
    waits = turn.live.waits
    for subject in [subject for subject in waits.known if subject not in waits.noted]:
        del waits.known[subject]


def unheard(turn: Turn) -> str:
    """Which of the open world's nodes are silent just now, for a line that waits for all of them; empty: none."""
    nodes = [turn.job.nodes.get(member.node) for member in world_of(turn).members]
    since = {node.name: turn.heard - turn.presence(node).heard for node in nodes if node is not None}
    limit = SILENT_BEATS * heartbeat_of(turn.job)
    silent = sorted(name for name, seconds in since.items() if seconds > limit)
    return f"nothing was heard of {names(silent)} for {max(since[name] for name in silent):.0f} s" if silent else ""
