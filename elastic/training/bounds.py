"""Where the script lets the run end, compared with where the run stands.

A run at its end is finished, and stays so: under a master no other start goes on with it. So one that is beyond the end
that the script names is refused. Mostly the number is a mistake, and nothing was made that would be worth that.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ..rank.agreement import Refusal

if TYPE_CHECKING:
    from .session import BareSession


def check_steps(session: BareSession, max_steps: int | None) -> None:
    """Refuses a run that has made more steps than the script wants. To be called on all ranks, with the same number.

    Args:
        session: The process's.
        max_steps: Steps of the whole run; None: the script does not say it.

    Raises:
        Refusal: There are more. As many are the end: perhaps the run has just not been called finished yet.
    """
    if max_steps is None or session.step <= max_steps:
        return
    # Nobody means to train with 0 steps: it is a way to evaluate, and where no master is the run goes on behind it.
    if not (max_steps == 0 and session.alone):
        plural = "" if max_steps == 1 else "s"
        wants = f"the run is at step {session.step}, and the script wants {max_steps} step{plural}"
        _refuse(session, f"{wants}: give at least {session.step}")


def check_data_epochs(session: BareSession, data: Any) -> None:
    """The same for the passes over the data. To be called on all ranks, whose `data` are at the same place.

    Args:
        session: The process's.
        data: `Batches`, which stand where the run goes on.

    Raises:
        Refusal: The run has begun a pass behind the last one that the script wants.
    """
    wanted, place = data.data_epochs, data.position
    begun = place.data_epoch + (place.samples > 0)
    if wanted is not None and begun > wanted:
        stands = f"the run is at step {session.step}, in data epoch {begun}, and data_epochs is {wanted}"
        _refuse(session, f"{stands}: give at least {begun}")


def ends_behind(session: BareSession, data: Any, step: int, max_steps: int | None) -> bool:
    """Whether the run ends behind a step, alike on all ranks. Collective where ``data`` end and have no known length.

    Args:
        session: The process's.
        data: `Batches`, which have handed out the step's.
        step: Its number.
        max_steps: Steps of the whole run; None: the script does not say it.
    """
    last = step == max_steps or data.left == 0
    if data.left is None or data.order.length:
        return last
    # Each rank reads a stream to its own end, and where one is shorter the loop ends for all.
    return session.saves.largest(int(last)) > 0


def _refuse(session: BareSession, line: str) -> None:
    other = "another checkpoint_dir" if session.alone else "another --job-id / --new-run"
    line = f"{line}, or {other}"
    # All ranks know it by themselves.
    session.meetings.refused(line)
    raise Refusal(line)
