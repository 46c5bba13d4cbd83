"""A process that stays: at a planned change it keeps what it has built, and only the ranks meet anew.

It saves as ever. The next world then resumes from exactly what it holds, so it loads nothing; otherwise the agent gives
it no place, and starts another process. Its session is opened anew in the same object.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from dalsegno.protos.contract import Variable
from dalsegno.protos.staying import offered

from ..checkpoint import Ref
from ..rank.exits import EXIT_DRAINED, Drained, insist
from ..rank.link import Link

__all__ = ["wait_for_a_place", "way_out"]


def way_out(link: Link | None, saved: Ref, stays: Callable[[], bool]) -> Mapping[str, str] | None:
    """What a rank that has drained into ``saved`` holds if it stays; None: it ends, and its exit code is certain.

    Args:
        stays: Whether its state outlives this world; asked last.
    """
    may = link is not None and link.may_stay and offered() is not None and saved.name and saved.digest
    if may and stays():
        return {Variable.RESUME_NAME: saved.name, Variable.RESUME_DIGEST: saved.digest}
    insist(EXIT_DRAINED)
    return None


def wait_for_a_place(holds: Mapping[str, str]) -> None:
    """Waits for the place in the next world, to which this process's variables are set then.

    Raises:
        Drained: There is none: this process ends, as any that has drained.
    """
    wait = offered()
    if wait is None or not wait(holds):
        insist(EXIT_DRAINED)
        raise Drained
