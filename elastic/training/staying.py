"""A process that stays: at a change of the world it keeps what it has built, and only the ranks meet anew.

It saves as ever. The next world then resumes from exactly what it holds, so it loads nothing; otherwise the agent gives
it no place, and starts another process. Its session is opened anew in the same object.
"""

from __future__ import annotations

import gc
import logging
import os
import weakref
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager

import torch.distributed as dist
from torch import nn

from dalsegno.protos.contract import Variable
from dalsegno.protos.staying import offered

from ..checkpoint import Ref
from ..rank.exits import EXIT_DRAINED, Drained, Stays, insist
from ..rank.link import Link
from ..rank.meetings import Meetings, may_be_a_peers
from ..rank.process_group import is_the_only_group
from ..rank.remarks import remark
from ..rank.way_in import way_in
from ..saving.survivor import Survivor
from .wrappers import frozen

log = logging.getLogger(__name__)

__all__ = ["Wrappers", "holding", "none_stays", "until_lost", "wait_for_a_place", "way_out"]


def none_stays(before: str, *, made_anew: bool = False) -> bool:
    """Whether new processes would wait for those that stay, where these never come again. A line says so.

    Args:
        before: The call behind which a process stays, for people.
        made_anew: See ``WayIn.problem``.
    """
    problem = way_in.problem(made_anew=made_anew)
    if problem and os.environ.get("RANK", "0") == "0":
        remark("stay=True has no effect: before %s the ranks of this script %s", before, problem)
    return bool(problem)


class Wrappers:
    """What was made around a replicated model, for one world after another.

    Args:
        model: The model inside.
        cause: For people: who holds a wrapper of an earlier world, and what to do.
    """

    def __init__(self, model: nn.Module, cause: str) -> None:
        self._model, self._cause = model, cause
        self._made: list[weakref.ref[nn.Module]] = []
        self._frozen = frozen(model)

    def note(self, wrapper: nn.Module) -> None:
        """It was made for the present world."""
        if wrapper is not self._model:
            self._made.append(weakref.ref(wrapper))

    @property
    def alone(self) -> bool:
        """Whether nothing but the default group, and a wrapper in it, belongs to the present world."""
        sharded = any(hasattr(parameter, "device_mesh") for parameter in self._model.parameters())
        return not sharded and (not dist.is_initialized() or is_the_only_group())

    def are_gone(self) -> bool:
        """Whether nobody holds one of them, and a new process would make the same; else one line says why not.

        A wrapper averages the gradients of those parameters that are trained when it is made.
        """
        gc.collect()
        held = any(made() is not None for made in self._made)
        if held or frozen(self._model) != self._frozen:
            why = self._cause if held else "the script has frozen or unfrozen parameters since it began"
            remark("this process cannot stay for the next world: %s", why)
            return False
        return True


def way_out(link: Link | None, saved: Ref, stays: Callable[[], bool]) -> Mapping[str, str] | None:
    """What a rank that has drained into ``saved`` holds if it stays; None: it ends, and its exit code is certain.

    Args:
        stays: Whether its state outlives this world; asked last.
    """
    if link is not None and link.may_stay and saved.name and saved.digest and stays():
        return holding(saved.name, saved.digest)
    insist(EXIT_DRAINED)
    return None


def _outlived(meetings: Meetings, survivor: Survivor, error: Exception) -> Mapping[str, str] | None:
    """After an error in the loop: what this process holds, if a lost peer is the cause, and that is saved.

    Then nothing more can be done in this world. None: the error has to end this process.

    Raises:
        Stays: The agent was first to say so.
    """
    if meetings.over or not survivor.may_stay or not may_be_a_peers(error):
        survivor.anywhere = False
        return None
    survivor.anywhere = True
    try:
        return survivor.peer_lost(True) if meetings.say_if_a_peer_is_lost() else None
    finally:
        survivor.anywhere = False


@contextmanager
def until_lost(meetings: Meetings, survivor: Survivor) -> Iterator[None]:
    """Inside, an error that a lost peer has caused becomes a ``Stays``, if this process holds what it has saved."""
    try:
        yield
    except Exception as error:
        held = _outlived(meetings, survivor, error)
        if held is None:
            raise
        log.info("a peer was lost, and this process stays: %s", error)
        raise Stays(held, broken=True) from None


def holding(name: str, digest: str) -> Mapping[str, str]:
    """What a process holds whose state is equal to this checkpoint, see ``protos.staying.Wait``."""
    return {Variable.RESUME_NAME: name, Variable.RESUME_DIGEST: digest}


def wait_for_a_place(holds: Mapping[str, str], *, broken: bool = False) -> None:
    """Waits for the place in the next world, to which this process's variables are set then.

    Raises:
        Drained: There is none: this process ends, as any that has drained.
    """
    wait = offered()
    if wait is None or not wait(holds, broken=broken):
        insist(EXIT_DRAINED)
        raise Drained
