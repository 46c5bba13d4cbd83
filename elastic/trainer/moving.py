"""How a `Trainer`'s process leaves a world if it may stay for the next one."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING

from ..rank.exits import EXIT_DRAINED, Drained, end_at_once, insist
from ..rank.remarks import remark
from ..saving.survivor import Survivor
from .hooks import Hooks
from .strategies import Strategy

if TYPE_CHECKING:
    from .trainer import Trainer


def end_drained(trainer: Trainer, hooks: Hooks, strategy: Strategy) -> None:
    """Tells callbacks that the training ends in this world. All is saved, and the agent knows it.

    Raises:
        Drained: A callback has changed what this process would go on with.
    """
    try:
        if _ends_as_it_is(trainer, hooks, strategy):
            return
    except BaseException:
        insist(EXIT_DRAINED)
        raise
    insist(EXIT_DRAINED)
    raise Drained


def end_broken(
    trainer: Trainer,
    hooks: Hooks,
    strategy: Strategy,
    held: Mapping[str, str],
    outlives: Callable[[], bool],
    survivor: Survivor,
) -> None:
    """The same behind a crash. Returns if this process still holds what it has saved, and may stay; else that ends.

    Args:
        held: What it has saved.
        outlives: Lets go of what belongs to this world; whether nothing else does.
        survivor: The session's; knows whether it still holds that.
    """
    if not (outlives() and _ends_as_it_is(trainer, hooks, strategy) and survivor.peer_lost(True) == held):
        # Whoever waits for threads of the script's here keeps all others waiting.
        end_at_once(1)


def _ends_as_it_is(trainer: Trainer, hooks: Hooks, strategy: Strategy) -> bool:
    """Calls callbacks. Whether they leave model and optimizer as they are; if not, one line says so."""
    before = strategy.unloaded() if hooks.do_something_at_the_end else ""
    hooks.end(trainer)
    if not before or strategy.unloaded() == before:
        return True
    remark(
        "this process cannot stay for the next world: a callback has changed the model or its optimizer in on_fit_end, "
        "which is called where a world ends"
    )
    return False
