"""Compares over the ranks what each of them has a copy of: before the first step, and right after it.

A script that forgets DistributedDataParallel, or gives one rank another optimizer, fails nowhere: each rank trains a
model of its own, and rank 0's is saved for all. So the ranks compare a few letters (`digest`) for each tensor of which
all have a copy: the parameters and optimizer states of a replicated model, the unsharded tensors of a sharded one. They
also compare the hyperparameters. Buffers may differ (BatchNorm's), and so may tensors that the session does not know.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from operator import itemgetter
from typing import Any, NamedTuple

from torch import Tensor, nn, tensor
from torch.nn.parallel import DistributedDataParallel

from dalsegno.protos.text import few

from ..rank.agreement import Unlike, agree
from ..rank.collective import Collective
from ..rank.remarks import remark
from ..saving.declared import is_engine
from ..saving.optimizers import source_of_step
from ..saving.replicas import unwrapped
from . import digest
from .hyperparameters import told_of

log = logging.getLogger(__name__)

# Names are grouped into so many heaps. Only for heaps that differ is each tensor's number sent, for at most so many
# tensors.
HEAPS, TOLD = 64, 256
# Steps after which this is given up if nothing moves: a learning rate of 0, or a loss scale that is still too large.
LAST = 1024
# torch's communication hooks that let the ranks differ for a while or for ever, as their users know.
_LOCAL = ("post_localSGD_hook", "noop_hook")


class CopiedValue(NamedTuple):
    """Something that all ranks have a copy of.

    Attributes:
        name: For people.
        tensor: On any device.
        of: ``id`` of the parameter that it is, or whose state it is.
        trained: Whether it is an optimizer's parameter.
        surely: Whether a difference is surely a mistake.
    """

    name: str
    tensor: Tensor
    of: int
    trained: bool
    surely: bool


class Apart(NamedTuple):
    """A value that differs between the ranks, and by how much relative to its size."""

    value: CopiedValue
    far: float


@dataclass
class Copy:
    """A model and what trains it, as known on this rank.

    Attributes:
        model: The model without wrappers.
        wrapper: What the training calls, if it is known.
        optimizers, scheduler: Those that are known.
        saved: Whether rank 0 saves it for all.
    """

    model: nn.Module
    wrapper: nn.Module | None = None
    optimizers: list[Any] = field(default_factory=list)
    scheduler: Any = None
    saved: bool = False


class Copies:
    """Compares the copies of one session.

    Args:
        collective: The session's group.
    """

    def __init__(self, collective: Collective) -> None:
        self._collective = collective
        self._known: dict[int, Copy] = {}
        self._first: list[Any] = []
        self._steps, self._due = 0, 1

    @property
    def asked(self) -> bool:
        """Whether something is still to be compared."""
        return self._collective.world_size > 1 and self._due > 0

    def know(self, model: nn.Module, *optimizers: Any, scheduler: Any = None, saved: bool = False) -> None:
        """Registers a model, wrapped or not, and what trains it. The same one may be registered again.

        Args:
            saved: Rank 0 saves its copy for all.
        """
        if not self.asked:
            return
        inner = unwrapped(getattr(model, "module", model) if is_engine(model) else model)
        copy = self._known.setdefault(id(inner), Copy(inner))
        if inner is not model:
            copy.wrapper = model
        copy.optimizers += [one for one in optimizers if all(one is not other for other in copy.optimizers)]
        copy.scheduler = copy.scheduler or scheduler
        copy.saved = copy.saved or saved

    def forget(self) -> None:
        """Lets all models go: there is nothing more to compare in this world."""
        self._known.clear()

    def before(self) -> None:
        """Compares before the first step. Collective.

        Raises:
            Unlike: The ranks have different hyperparameters or weights, or train different ones.
        """
        if not self.asked or self._steps:
            return
        told = [told_of(copy.model, copy.optimizers, copy.scheduler) for copy in self._copies() if copy.saved]
        alike = {f"{name} ({n})" if n else name: said for n, one in enumerate(told) for name, said in one.items()}
        agree(self._collective, alike)
        self._first = self._compare(0)[:1]

    def behind(self, step: int) -> None:
        """Compares after the first step, or after the first few while nothing moves; later calls do nothing.

        Raises:
            Unlike: The ranks have different weights, or different states of an optimizer.
        """
        if not self.asked:
            return
        self._steps += 1
        if self._steps < self._due:
            return
        now = self._compare(step)
        still = bool(now) and now[:1] == self._first and self._due < LAST
        self._due = 2 * self._due if still else 0
        if not self._due:
            self._known.clear()

    def _compare(self, step: int) -> list[Any]:
        """A short description of what all ranks have alike; empty: they have nothing in common, or nothing alike."""
        groups = self._values(states=step > 0)
        own = [_told(values) for values in groups]
        answers = self._collective.gather(own)
        apart: list[Apart] = []
        for values, told in zip(groups, zip(*answers, strict=True), strict=True):
            apart += self._apart(values, told)
        if any(answer != answers[0] for answer in answers):
            self._judge(apart, groups[0], step)
            return []
        return answers[0] if own[0] is not None else []

    def _apart(self, values: Sequence[CopiedValue], told: Sequence[Any]) -> list[Apart]:
        """Those of the values that differ between the ranks. Collective if some do."""
        if any(one is None for one in told) or any(one["names"] != told[0]["names"] for one in told):
            return []
        heaps = [n for n in range(HEAPS) if any(one["heaps"][n] != told[0]["heaps"][n] for one in told)]
        if not heaps:
            return []
        chosen = [value for n, value in enumerate(values) if n % HEAPS in heaps][:TOLD]
        tensors = [value.tensor for value in chosen]
        answers = self._collective.gather([digest.numbers(tensors), digest.norms(tensors)])
        found = []
        for n, value in enumerate(chosen):
            far = _far([answer[0][n] for answer in answers], [answer[1][n] for answer in answers])
            if far > 0:
                found.append(Apart(value, far))
        return found

    def _judge(self, apart: Sequence[Apart], weights: Sequence[CopiedValue], step: int) -> None:
        """Refuses differences that cannot be right, and warns of those that may be.

        Raises:
            Unlike: See `behind`.
        """
        more = [one for one in apart if one.far > digest.rounding(one.value.tensor.dtype)]
        trained = {value.of for value in weights if value.trained}
        # If only a gradient's sign counts, the first step may move a weight by the same amount on all ranks.
        moved = trained & {one.value.of for one in more}
        alone = bool(trained) and len(moved) >= 0.9 * min(len(trained), TOLD)
        if (alone and step) or any(one.value.surely for one in more):
            raise Unlike(refusal(more, step))
        if self._collective.rank == 0 and apart:
            remark("%s", saying(more, apart, step))

    def _copies(self) -> Iterator[Copy]:
        """The copies that should be alike on all ranks."""
        for copy in self._known.values():
            if _of_all_ranks(copy, self._collective.world_size):
                yield copy

    def _values(self, *, states: bool) -> tuple[list[CopiedValue], list[CopiedValue]]:
        """Weights, and states of optimizers if ``states`` is true."""
        weights: list[CopiedValue] = []
        held: list[CopiedValue] = []
        for copy in self._copies():
            weights += _weights(copy)
            held += _states(copy) if states else ()
        return weights, held


def refusal(apart: Sequence[Apart], step: int) -> str:
    """The message that says why the ranks cannot go on."""
    if not step:
        return (
            f"the ranks begin with different weights ({_named(apart)}), and rank 0's would be saved for all: make the "
            "model from one seed or load one file on all ranks, or wrap it in DistributedDataParallel before"
        )
    return (
        f"after step {step} the ranks have different weights or states of the optimizer ({_named(apart)}): nothing "
        "averages these gradients, so each rank trains a model of its own. Call what DistributedDataParallel has "
        "wrapped, not the model inside, and give the optimizer parameters of that model only"
    )


def saying(more: Sequence[Apart], apart: Sequence[Apart], step: int) -> str:
    """The message about differences that are not refused, because they may be meant or cannot be helped."""
    when = f"after step {step}" if step else "before the first step"
    if more:
        return (
            f"{when} the ranks have different values of {_named(more)}: right if the script means each rank to have "
            "its own and saves all of them; else nothing averages these gradients"
        )
    return (
        f"{when} the ranks differ by rounding in {_named(apart)}: devices or libraries of different kinds, or numbers "
        "of threads. Rank 0's are saved for all"
    )


def _named(apart: Sequence[Apart]) -> str:
    return f"{few(one.value.name for one in apart)}; by {max(one.far for one in apart):.1g} of their size"


def _far(numbers: Sequence[float], norms: Sequence[float]) -> float:
    """By how much of its size a tensor differs. A tensor with NaN equals any other with NaN."""
    if len({repr(number) for number in numbers}) == 1:
        return 0.0
    largest = max((norm for norm in norms if norm == norm), default=0.0)
    apart = max(abs(number - numbers[0]) for number in numbers)
    far = apart / largest if largest else apart
    # The rounding in double precision that devices of different kinds do differently.
    return 0.0 if far < 1e-13 else far if far == far else float("inf")


def _told(values: Sequence[CopiedValue]) -> Any:
    """A short description of all values; None: there are none, or they cannot be read."""
    if not values:
        return None
    try:
        found = digest.digests([value.tensor for value in values])
    except (RuntimeError, TypeError, NotImplementedError) as error:  # the device cannot compute this, or lacks memory
        log.warning("the ranks' weights are not compared: %s", error)
        return None
    return {
        "names": digest.short(f"{value.name} {tuple(value.tensor.shape)} {value.tensor.dtype}" for value in values),
        "heaps": [digest.short(found[n::HEAPS]) for n in range(HEAPS)],
    }


def _of_all_ranks(copy: Copy, world_size: int) -> bool:
    """Whether each rank has this very model, and trains it together with all others."""
    wrapper = getattr(copy.wrapper, "_orig_mod", copy.wrapper)
    if any(kind.__name__ == "FullyShardedDataParallel" for m in copy.model.modules() for kind in type(m).__mro__):
        return False
    if any(hasattr(parameter, "_fsdp_flattened") for parameter in copy.model.parameters()):
        return False
    if isinstance(wrapper, DistributedDataParallel):
        hooks = [getattr(hook, "__qualname__", "") for hook, _ in wrapper._comm_hooks]
        local = any(name.startswith(_LOCAL) for name in hooks)
        return not local and wrapper.process_group.size() == world_size
    if wrapper is not None and is_engine(wrapper):
        return bool(getattr(wrapper, "dp_world_size", 0) == world_size)
    return True


def _weights(copy: Copy) -> Iterator[CopiedValue]:
    wrapper = getattr(copy.wrapper, "_orig_mod", copy.wrapper)
    together = isinstance(wrapper, DistributedDataParallel) or (wrapper is not None and is_engine(wrapper))
    ignored = getattr(wrapper, "parameters_to_ignore", ())
    trained = {id(p) for optimizer in copy.optimizers for p in _parameters(optimizer) if p.requires_grad}
    named = {id(parameter): name for name, parameter in copy.model.named_parameters()}
    sharded = any(not digest.is_plain(p) for p in copy.model.parameters())
    for name, parameter in copy.model.named_parameters():
        # ZeRO-3's parameters are elsewhere; experts are each rank's own.
        elsewhere = hasattr(parameter, "ds_id") or not getattr(parameter, "allreduce", True)
        if digest.is_plain(parameter) and name not in ignored and not elsewhere and (copy.saved or not sharded):
            yield CopiedValue(name, parameter, id(parameter), id(parameter) in trained, copy.saved or together)
    for optimizer in () if wrapper is not None and is_engine(wrapper) else copy.optimizers:
        others = [p for p in _parameters(optimizer) if id(p) not in named and p.requires_grad and digest.is_plain(p)]
        for number, other in enumerate(others):
            name = f"parameter {number} of {type(optimizer).__name__}, not the model's"
            yield CopiedValue(name, other, id(other), True, copy.saved)


def _states(copy: Copy) -> Iterator[CopiedValue]:
    if copy.wrapper is not None and is_engine(copy.wrapper):
        return
    names = {id(parameter): name for name, parameter in copy.model.named_parameters()}
    sharded = any(not digest.is_plain(p) for p in copy.model.parameters())
    sure = {id(value.tensor) for value in _weights(copy) if value.surely}
    for optimizer in copy.optimizers:
        state, kind = getattr(optimizer, "state", None), type(optimizer).__name__
        # Other state may be each rank's own, for instance the errors of what it sends.
        known = source_of_step(optimizer).startswith("torch.optim.")
        for parameter in _parameters(optimizer) if isinstance(state, Mapping) else ():
            held = state.get(parameter, {})  # type: ignore[union-attr]
            for key, value in _by_name(held):
                if isinstance(value, int | float) and not isinstance(value, bool):
                    value = tensor(float(value))
                if digest.is_plain(value) and (value.numel() == 1 or not sharded):
                    name = f"{kind}'s {key} of {names.get(id(parameter), 'another parameter')}"
                    yield CopiedValue(name, value, id(parameter), False, known and (sharded or id(parameter) in sure))


def _by_name(held: Any) -> list[tuple[str, Any]]:
    return sorted(((str(key), held[key]) for key in held), key=itemgetter(0)) if isinstance(held, Mapping) else []


def _parameters(optimizer: Any) -> Iterator[Tensor]:
    for group in getattr(optimizer, "param_groups", ()):
        yield from group["params"]
