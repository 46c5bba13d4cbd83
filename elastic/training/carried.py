"""Gradients that a script carries over the end of a step: no checkpoint has them, so saves come where none are."""

from __future__ import annotations

import time
import weakref
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook

from ..rank.hooks import until_gone, weakly
from ..rank.remarks import remark
from .session import BareSession

__all__ = ["CarriedGradients", "WholeSteps"]

# So many boundaries without an optimizer's step are looked at, each of which may wait for a card; and so many before
# the first step of all: of a script that steps in a way that nobody sees nothing is to be put off for long.
_LOOKS, _LOOKS_BEFORE = 64, 8
# In the first boundaries the ranks ask each other although none of them has seen anything: what one sees the others
# hear with the next exchange only.
_FIRST = 2 * _LOOKS
# A drain waits so long for an optimizer's step at most, and within half of its notice; another save so long (seconds).
DRAIN_SECONDS, SAVE_SECONDS = 20.0, 300.0
# More than any rank's wish to wait.
_HURRIES = 2


class CarriedGradients:
    """Sees gradients that are there at a boundary and that an optimizer uses behind it; remarks once on that.

    A step that was left out (a loss scale that was too large, a loss that stands out) is none of it: what it had is
    dropped.

    Args:
        optimizers: Those that are known before their first step.
        say: What says so, once.

    Attributes:
        known: This has been seen.
    """

    def __init__(self, optimizers: Iterable[Optimizer] = (), say: Callable[..., None] = remark) -> None:
        self._say, self._looks, self._steps = say, _LOOKS_BEFORE, False
        self._optimizers: weakref.WeakSet[Optimizer] = weakref.WeakSet(optimizers)
        # Those that have begun a step since the last boundary.
        self._stepped: weakref.WeakSet[Optimizer] = weakref.WeakSet()
        # By optimizer a boundary, a parameter and its gradient then; and whether one may be carried over the last one.
        self._there: weakref.WeakKeyDictionary[Optimizer, _There] = weakref.WeakKeyDictionary()
        self.known, self._open = False, False
        until_gone(self, register_optimizer_step_pre_hook(weakly(self._begins)))

    @property
    def here(self) -> bool:
        """Whether there were gradients at the last boundary that an optimizer may use behind it."""
        return self._open

    def boundary(self, step: int) -> None:
        """Step ``step`` is done."""
        idle = [one for one in self._optimizers if one not in self._stepped]
        self._stepped.clear()
        # Once this is known no values are asked for, which would wait for a card in each step.
        self._open = self.known and any(map(_has_gradients, idle))
        if not idle or not self._looks:
            return
        self._looks -= 1
        for one in idle:
            self._there.pop(one, None)
            if (found := _used(one)) is not None:
                self._open, self._there[one] = True, _There(step, *found)

    def _begins(self, optimizer: Optimizer, *_: Any) -> None:
        self._stepped.add(optimizer)
        if not self._steps:
            self._steps, self._looks = True, _LOOKS
        if self._looks:
            self._optimizers.add(optimizer)
        noted = self._there.pop(optimizer, None)
        if noted is None:
            return
        owner, there = noted.parameter(), noted.gradient()
        if owner is None or there is None or owner.grad is not there:
            return
        self._looks, self.known = 0, True
        self._there.clear()
        self._say(
            "gradients were carried over the end of step %d, and no checkpoint has them: saves and drains come behind"
            " an optimizer's step from now on, as far as a leaver's notice allows. Better give each of its steps a"
            " batch: a larger global batch, in micro-batches",
            noted.step,
        )


def _has_gradients(optimizer: Optimizer) -> bool:
    return any(parameter.grad is not None for group in optimizer.param_groups for parameter in group["params"])


class _There(NamedTuple):
    """A gradient that was there at a boundary."""

    step: int
    parameter: weakref.ref[Tensor]
    gradient: weakref.ref[Tensor]


def _used(optimizer: Optimizer) -> tuple[weakref.ref[Tensor], weakref.ref[Tensor]] | None:
    """A parameter that has a gradient, and that; None: there is none, or a step with it was left out.

    Gradients of zeros say nothing: of what a loss has only so that each parameter is used, or a LoRA's first matrix.
    """
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            if (gradient := parameter.grad) is not None:
                here = getattr(gradient, "_local_tensor", gradient).detach()  # of a DTensor: nothing is exchanged
                if here.layout is torch.strided:
                    if not bool(torch.isfinite(here).all()):
                        return None
                    if not bool(here.any()):
                        continue
                return weakref.ref(parameter), weakref.ref(gradient)
    return None


class WholeSteps:
    """Puts off what is due at a boundary that gradients are carried over. Collective: all ranks make it alike.

    Args:
        session: The process's.
        save: What the loop saves with.
    """

    def __init__(self, session: BareSession, save: Any) -> None:
        self._session, self._boundaries = session, 0
        self._seen = CarriedGradients(_optimizers_of(save), remark if session.rank == 0 else _nothing)
        self._since: float | None = None
        # When the last step ended, and how long it took.
        self._at, self._seconds = time.monotonic(), 0.0
        self._said = False

    def boundary(self, step: int) -> bool:
        """Step ``step`` is done. Returns whether an optimizer goes on behind it with what it has by now."""
        self._boundaries += 1
        now = time.monotonic()
        self._seconds, self._at = now - self._at, now
        self._seen.boundary(step)
        self._session.saves.carries = self._seen.known
        return self._seen.known and self._seen.here

    def put_off(self, told: bool, *, drain: bool) -> bool:
        """Whether what is due here comes behind a later step. Collective, and the same on all ranks.

        Args:
            told: Some rank has said that it carries gradients. On all ranks alike.
            drain: All ranks are to leave.
        """
        if not told and self._boundaries > _FIRST:
            return False
        now, here, saves = time.monotonic(), self._seen.here, self._session.saves
        since = now if self._since is None else self._since
        # Of a leaver there may be no time for another step; it knows its notice, and the others do not.
        hurries = drain and now + self._seconds > saves.drain_by(since, DRAIN_SECONDS)
        waits = here and (drain or now - since < SAVE_SECONDS)
        later = saves.largest(_HURRIES if hurries else int(waits)) == 1
        self._since = since if later else None
        if here and not later:
            self._saved_within()
        return later

    def _saved_within(self) -> None:
        if not self._said and self._session.rank == 0:
            self._said = True
            remark(
                "step %d is saved between two steps of an optimizer: what it has accumulated is in no checkpoint, and"
                " lost if the run goes on from there",
                self._session.step,
            )


def _nothing(*_: Any) -> None:
    """Rank 0 speaks for all."""


def _optimizers_of(save: Any) -> list[Optimizer]:
    """Those in what a loop saves, as far as that shows."""
    called = getattr(save, "state", save)
    parts = getattr(getattr(called, "__self__", called), "parts", None)
    return [part for part in parts.values() if isinstance(part, Optimizer)] if isinstance(parts, dict) else []
