"""Gradients that a script carries over the end of a step: no checkpoint has them, so saves come where none are."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import Module
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from ..rank.clearing import listen
from ..rank.hooks import until_gone, weakly
from ..rank.remarks import remark

__all__ = ["LOOKS", "CarriedGradients"]

# At so many boundaries with gradients that an optimizer has not used it is looked what becomes of them. Each look may
# wait for a card; and what is due is put off until that is known.
LOOKS = 64
# An optimizer that carries gradients is waited for up to so many times what it has taken before.
_PATIENCE = 4
# One that has used such gradients drops them so many times in a row before it is known as one that does.
_DROPS = 3


class CarriedGradients:
    """Sees gradients that are there at a boundary and that an optimizer uses behind it; remarks once on that.

    Gradients that an optimizer has used already, and has not cleared, are none of them. What a script drops (a loss
    that stands out, what another network's loss has left) is taken for one of them until it has been dropped once.

    Args:
        optimizers: Those that are known before their first step.
        say: What says so, once.
    """

    def __init__(self, optimizers: Iterable[Optimizer] = (), say: Callable[..., None] = remark) -> None:
        self._say, self._said, self._vain = say, False, False
        self._habits: weakref.WeakKeyDictionary[Optimizer, _Habit] = weakref.WeakKeyDictionary()
        self._habits.update((one, _Habit()) for one in optimizers)
        # Those that have begun a step since the last boundary.
        self._stepped: weakref.WeakSet[Optimizer] = weakref.WeakSet()
        # Whether there were some at the last boundary, and at how many in a row.
        self._open, self._in_a_row = False, 0
        until_gone(self, register_optimizer_step_pre_hook(weakly(self._begins)))
        until_gone(self, register_optimizer_step_post_hook(weakly(self._ends)))
        listen(self)

    @property
    def here(self) -> bool:
        """Whether there were gradients at the last boundary that an optimizer may use behind it."""
        return self._open

    @property
    def known(self) -> bool:
        """Whether some optimizer uses such ones."""
        return any(habit.carries for habit in self._habits.values())

    def boundary(self, step: int) -> None:
        """Step ``step`` is done."""
        used = _Used(self._stepped, [habit.used for habit in self._habits.values() if habit.used is not None])
        self._open = False
        for one, habit in list(self._habits.items()):
            if one in self._stepped:
                habit.stepped()
            else:
                self._open = habit.idle(one, step, used) or self._open
            self._tell(habit)
        self._stepped.clear()
        self._in_a_row = self._in_a_row + 1 if self._open else 0
        if self._in_a_row >= max((habit.patience for habit in self._habits.values()), default=LOOKS):
            self._give_up()

    def made(self, optimizer: Optimizer) -> None:
        """See `ClearListener`."""
        self._habits.setdefault(optimizer, _Habit())

    def clears(self, owner: Optimizer | Module) -> None:
        """See `ClearListener`."""
        for one, habit in list(self._habits.items()):
            if owner is one or habit.is_of(one, owner):
                habit.clears()

    def cleared(self, owner: Optimizer | Module) -> None:
        """See `ClearListener`."""
        if isinstance(owner, Optimizer) and (habit := self._habits.get(owner)) is not None:
            # Mostly they are taken away: then there is none to look for.
            gone = habit.used is not None and habit.used.is_cleared()
            habit.used = None if gone else _first(owner)

    def _begins(self, optimizer: Optimizer, *_: Any) -> None:
        if optimizer not in self._stepped:
            self._stepped.add(optimizer)
            self._habits.setdefault(optimizer, _Habit()).begins()

    def _ends(self, optimizer: Optimizer, *_: Any) -> None:
        if (habit := self._habits.get(optimizer)) is not None:
            habit.ends(optimizer)
            self._tell(habit)

    def _give_up(self) -> None:
        """Each boundary has some, of one optimizer or another: nothing is gained by waiting."""
        self._open = False
        if not self._vain:
            self._vain = True
            self._say(
                "at each of the last %d steps some optimizer had gradients that it goes on with: saves no longer wait"
                " for a step without, and no checkpoint has those gradients",
                self._in_a_row,
            )

    def _tell(self, habit: _Habit) -> None:
        if habit.carries and not self._said:
            self._said = True
            self._say(
                "gradients were carried over the end of step %d, and no checkpoint has them: saves and drains come"
                " behind an optimizer's step from now on, as far as a leaver's notice allows. Better give each of its"
                " steps a batch: a larger global batch, in micro-batches",
                habit.carried_over,
            )
        if habit.given_up:
            habit.given_up = False
            self._say(
                "an optimizer has made no step for %d batches, although its weights have gradients: saves no longer"
                " wait for one",
                habit.waits,
            )


class _Habit:
    """What one optimizer does with the gradients that are there at a boundary behind which it goes on.

    Attributes:
        carries: It uses such ones; None: nobody knows; False: they are dropped.
        carried_over: The step, of the first ones.
        waits: At so many boundaries in a row there were some.
        given_up: It was waited for in vain just now.
        used: A gradient that it stepped with last, or that was set to zero since.
    """

    def __init__(self) -> None:
        self.carries: bool | None = None
        self.carried_over, self.waits, self.given_up = 0, 0, False
        self.used: _Mark | None = None
        self._looks, self._longest, self._drops = LOOKS, 0, 0
        # What was there at the last boundary; whether it was there as a step began, and if not, what it was.
        self._there: _Mark | None = None
        self._held = False
        self._replaced: _Mark | None = None
        # Its gradients are cleared in a way that is seen.
        self._clears = False

    @property
    def patience(self) -> int:
        """So many boundaries in a row it is waited for."""
        return max(LOOKS, _PATIENCE * self._longest)

    def is_of(self, optimizer: Optimizer, owner: Optimizer | Module) -> bool:
        """Whether somebody has its parameters, too. One stands for all, if possible that whose gradient was there."""
        there = self._there
        if there is None and self._clears:
            return False  # It would be no news.
        parameter = next(iter(_parameters(optimizer)), None) if there is None else there.parameter()
        own = _parameters(owner) if isinstance(owner, Optimizer) else owner.parameters()
        return parameter is not None and any(one is parameter for one in own)

    def clears(self) -> None:
        """Its gradients are dropped now, if it has made no step with them."""
        self._clears = True
        there, self._there = self._there, None
        # A step that was left out because the loss scale was too large says nothing.
        if there is not None and _is_finite(there):
            self._drops += 1
            if self._drops >= (_DROPS if self.carries else 1):
                self.carries = False

    def begins(self) -> None:
        """It begins a step, the first one since the last boundary. It may clear gradients in that, in a closure."""
        self._held = self._there is not None and self._there.is_here()

    def ends(self, optimizer: Optimizer) -> None:
        """It has made a step."""
        self.used = _first(optimizer)
        self._longest, self.waits = max(self._longest, self.waits), 0
        there, self._there = self._there, None
        if there is not None and (self._held or self._clears):
            # Nobody has cleared it. It may have been made anew from that, as by ``p.grad = p.grad / 2``.
            self._uses(there)
        else:
            self._replaced = there

    def stepped(self) -> None:
        """The boundary behind a step of its own."""
        there, self._replaced = self._replaced, None
        if there is None:
            return
        # Nobody knew how it clears gradients. Who does so behind a step does not before it.
        if there.is_cleared():
            self._uses(there)
        elif not self.carries:
            self.carries = False

    def idle(self, optimizer: Optimizer, step: int, used: _Used) -> bool:
        """A boundary behind a step in which it did nothing. Returns whether there are gradients that it may use."""
        before, self._there = self._there, None
        final = self.carries is not True and not self._looks
        found = None if final else self._unused(optimizer, used)
        if found is None:
            self.waits = 0
            return False
        self.waits += 1
        if self.carries is not True:
            self._looks -= 1
        # Where it goes on from the boundary before, the first of them is named.
        self._there = found._replace(step=step if before is None else before.step)
        if self.waits == self.patience and self.carries is not False:
            self.given_up = True
        return self.carries is not False and self.waits < self.patience

    def _unused(self, optimizer: Optimizer, used: _Used) -> _Mark | None:
        """A gradient that no optimizer has used yet."""
        found = _first(optimizer)
        if found is not None and found not in used and not self.carries:
            found = _first(optimizer, with_values=True)
        return None if found is None or found in used else found

    def _uses(self, there: _Mark) -> None:
        if not self.carries:
            self.carries, self.carried_over = True, there.step
        self._drops = 0


class _Mark(NamedTuple):
    """A parameter's gradient at some moment.

    Attributes:
        version: Torch's count of what was written to it.
        step: The one that was done then.
    """

    parameter: weakref.ref[Tensor]
    gradient: weakref.ref[Tensor]
    version: int
    step: int = 0

    def is_here(self) -> bool:
        """Whether the parameter still has this gradient, which may have grown."""
        parameter, gradient = self.parameter(), self.gradient()
        return parameter is not None and gradient is not None and parameter.grad is gradient

    def is_same(self, other: _Mark) -> bool:
        """Whether both are the same gradient, and nothing was added between them."""
        gradient = self.gradient()
        return gradient is not None and gradient is other.gradient() and self.version == other.version

    def is_cleared(self) -> bool:
        """Whether the parameter has no gradient now."""
        parameter = self.parameter()
        return parameter is not None and parameter.grad is None


class _Used:
    """Gradients that some optimizer has stepped with.

    Args:
        stepped: Optimizers that have stepped since the last boundary: all gradients of their parameters are used.
        marks: One of each optimizer's last step, which may be still there.
    """

    def __init__(self, stepped: Iterable[Optimizer], marks: list[_Mark]) -> None:
        self._stepped, self._marks = list(stepped), marks
        # Only looked for where somebody asks.
        self._known: set[int] | None = None

    def __contains__(self, mark: _Mark) -> bool:
        if any(mark.is_same(one) for one in self._marks):
            return True
        if self._known is None:
            self._known = {id(one) for optimizer in self._stepped for one in _parameters(optimizer)}
        parameter = mark.parameter()
        return parameter is not None and id(parameter) in self._known


def _parameters(optimizer: Optimizer) -> Iterable[Tensor]:
    return (parameter for group in optimizer.param_groups for parameter in group["params"])


def _is_finite(mark: _Mark) -> bool:
    """Whether the parameter's gradient of this moment is."""
    parameter = mark.parameter()
    gradient = None if parameter is None else parameter.grad
    here = _local(gradient)
    return here is None or here.layout is not torch.strided or bool(torch.isfinite(here).all())


def _local(gradient: Tensor | None) -> Any:
    """Its own part of a DTensor: nothing is exchanged."""
    return None if gradient is None else getattr(gradient, "_local_tensor", gradient).detach()


def _first(optimizer: Optimizer, *, with_values: bool = False) -> _Mark | None:
    """The first gradient of its parameters, or the first that is not zero everywhere.

    Gradients of zeros say nothing: of what a loss has only so that each parameter is used, or a LoRA's first matrix.
    """
    for parameter in _parameters(optimizer):
        if (gradient := parameter.grad) is None:
            continue
        here = _local(gradient)
        if not with_values or here.layout is not torch.strided or bool(here.any()):
            return _Mark(weakref.ref(parameter), weakref.ref(gradient), here._version)
    return None
