"""Tries before the first step whether the training's state could be saved and loaded again. Nothing is written.

``TrainingState`` and a `Trainer` know what they save: everything except the tensors' values is put together as at a
save, and read again. The files of a script's own ``save=`` are first seen at the first save, and a mistake there ends
the run.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from ..rank.agreement import Refusal, Trouble
from ..rank.meetings import is_mistake
from ..saving.background_save import Background
from ..saving.outcomes import SaveError
from ..saving.save_errors import describe
from .session import BareSession


def rehearse(session: BareSession, save: Callable[[Path], None] | Background | None) -> None:
    """Lets the owner of ``save``, an object with a method ``rehearse()``, check itself. Collective.

    Raises:
        SaveError: The check failed on some rank. Raised on all ranks.
    """
    asked = _owners(save)
    if asked is None:
        return
    problem, final = "", True
    try:
        asked()
    # The other ranks must hear of every error before this one does anything else.
    except Exception as error:
        problem, final = f"this training could not be saved: {describe(error)}", is_mistake(error)
    try:
        session.meetings.compare({}, problem, final=final)
    except (Refusal, Trouble) as error:
        raise SaveError(str(error)) from error


def knows_itself(save: Any) -> bool:
    """Whether the owner of ``save`` checks itself, see `rehearse`."""
    return _owners(save) is not None


def what_is_saved(save: Any) -> str:
    """What all ranks must have alike.

    What checks itself meets the other ranks' before the first step, and a function that does nothing would not come.
    """
    if save is None:
        return "nothing"
    owner = _owner(save)
    if isinstance(save, Background):
        return "a state in the background" + (f", a {type(owner).__name__}'s" if owner is not None else "")
    return f"what {type(owner).__name__} writes" if owner is not None else "what save() writes"


def _owner(save: Any) -> Any:
    """What checks itself; None: ``save`` is a function of the script's own."""
    called = save.state if isinstance(save, Background) else save
    owner = getattr(called, "__self__", called)
    return owner if hasattr(owner, "rehearse") else None


def _owners(save: Any) -> Callable[[], None] | None:
    asked: Callable[[], None] | None = getattr(_owner(save), "rehearse", None)
    return asked
