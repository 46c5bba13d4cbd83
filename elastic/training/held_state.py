"""The state of a replicated training, watched while it trains: what `unchanged` decides on."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Protocol

import torch
import xxhash
from torch import Tensor
from torch.amp.grad_scaler import GradScaler
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from ..rank.hooks import until_gone, weakly
from ..rank.tensor_bytes import bytes_of
from ..saving.replicas import tensors
from .cards import Cards, cards_of
from .digest import is_plain
from .parts import takes_hooks
from .samples import Samples
from .training_state import TRAINING_FILE, TrainingState
from .unchanged import SeenState, UnclearError, plain


class Watched(Protocol):
    """A replicated state, of which every rank has all."""

    @property
    def parts(self) -> Mapping[str, Any]:
        """What is in it beside the model, by name."""
        ...

    def copy(self) -> dict[str, Any]:
        """Its tensors by file; those of the parts, and what else they keep, by name in ``training.pt``."""
        ...


class HeldState:
    """What one rank holds of what rank 0 saves.

    Args:
        state: The training's.
        stepping, stepped: Methods that are called when one of its optimizers begins a step, and when it has made it (a
            card may not have), as long as this and their owner live: a process may go through many loops with the same
            optimizers.
    """

    def __init__(self, state: Watched, stepping: Callable[[], None], stepped: Callable[[], None]) -> None:
        self._state, self.parts = state, state.parts
        self._optimizers = [part for part in self.parts.values() if takes_hooks(part)]
        begins, ends = weakly(stepping), weakly(stepped)
        for optimizer in self._optimizers:
            for handle in (
                optimizer.register_step_pre_hook(lambda *_: begins()),
                optimizer.register_step_post_hook(lambda *_: ends()),
            ):
                until_gone(self, handle)
        self._tensors: list[Tensor] = []
        self.samples = Samples(())

    def files(self) -> dict[str, Any]:
        """What a checkpoint would have."""
        return self._state.copy()

    def look(self) -> SeenState:
        """Looks at all of it anew, and watches the tensors that are there.

        Raises:
            UnclearError: Its changes could not be seen.
        """
        first, second = self.files(), self.files()
        seen = self.seen(first)
        # Both are alive: tensors that are made anew for each save lie elsewhere.
        if seen != self.seen(second):
            raise UnclearError("each look at the state shows another one")
        if not self._optimizers or any(_is_other_optimizer(part) for part in self.parts.values()):
            raise UnclearError("an optimizer that torch does not know of steps unseen")
        # Held, so that no other tensor can come to lie where one of these lay.
        self._tensors = [tensor for _, tensor in tensors(first)]
        # What optimizers keep nobody else writes to.
        kept = self._kept()
        self.samples = Samples([tensor for tensor in self._tensors if tensor.data_ptr() not in kept])
        return seen

    def seen(self, files: Mapping[str, Any]) -> SeenState:
        """What can be compared of a checkpoint's content.

        Raises:
            UnclearError: There is something in it that cannot be.
        """
        places = tuple((path, _place(path, tensor)) for path, tensor in tensors(files))
        rest = {path: content for path, content in files.items() if path != TRAINING_FILE}
        rest[TRAINING_FILE] = {name: self._still(name, part) for name, part in files[TRAINING_FILE].items()}
        return SeenState(places, plain(rest, where=False))

    def _still(self, name: str, saved: Mapping[str, Any]) -> dict[str, Any]:
        """What is saved of a part without what `plain` has of it."""
        if not isinstance(self.parts[name], Optimizer):
            return {**saved, "state": None}
        state = saved["state"]
        groups = [group["params"] for group in state["param_groups"]]
        return {**saved, "state": {**state, "param_groups": groups}}

    def versions(self) -> tuple[int, ...]:
        """How often torch has counted a change of each tensor that is watched."""
        return tuple([tensor._version for tensor in self._tensors])

    def plain(self, *, where: bool = True) -> Any:
        """What changes with each step and is small.

        Raises:
            UnclearError: There is something in it that cannot be compared.
        """
        return tuple(plain(_small(part), where=where) for part in self.parts.values())

    def cards(self, known: Cards | None) -> Cards | None:
        """The cards on which what is watched lies; None: all of it is in the host's memory.

        Args:
            known: What this gave last.

        Raises:
            ValueError: See `cards_of`.
        """
        return cards_of(self._tensors, known)

    def content(self) -> str:
        """A checksum of all values that are watched."""
        summed = xxhash.xxh3_128()
        for tensor in self._tensors:
            summed.update(_bytes(tensor))
        return summed.hexdigest()

    def same_everywhere(self, seen: SeenState, content: str) -> str:
        """A text that is the same on two ranks that hold the same state; ``content``: its `content`."""
        summed = xxhash.xxh3_128(repr((seen.rest, self.plain(where=False))).encode())
        return f"{summed.hexdigest()} {content}"

    def lone(self) -> dict[int, int]:
        """Tensors that no optimizer steps, by their place, with their versions: of such a rank may have its own."""
        owned = {p.data_ptr() for one in self._optimizers for group in one.param_groups for p in group["params"]}
        owned |= self._kept()
        return {n: one._version for n, one in enumerate(self._tensors) if one.data_ptr() not in owned}

    def _kept(self) -> set[int]:
        """Where the tensors lie that optimizers keep beside the parameters."""
        return {
            value.data_ptr() for one in self._optimizers for held in one.state.values() for _, value in tensors(held)
        }

    @property
    def stepped_alike(self) -> bool:
        """All parts are of kinds that every rank steps, as its model; of others rank 0 may have the only good one."""
        kinds = (Optimizer, LRScheduler, GradScaler)
        return all(isinstance(part, kinds) or getattr(part, "stepped_alike", False) for part in self.parts.values())


def _is_other_optimizer(part: Any) -> bool:
    return hasattr(part, "param_groups") and not takes_hooks(part)


def _small(part: Any) -> Any:
    if isinstance(part, Optimizer):
        return [{key: value for key, value in group.items() if key != "params"} for group in part.param_groups]
    if isinstance(part, GradScaler):
        # Its `state_dict` would wait for the card.
        return {key: value for key, value in vars(part).items() if isinstance(value, bool | int | float | Tensor)}
    return part.state_dict()


def _place(path: str, tensor: Tensor) -> tuple[Any, ...]:
    if not is_plain(tensor):
        raise UnclearError(f"{path} is no plain tensor")
    return tensor.data_ptr(), str(tensor.dtype), tuple(tensor.shape), tensor.stride(), str(tensor.device)


def _bytes(tensor: Tensor) -> Any:
    if tensor.device.type != "cpu":
        return repr(torch.hash_tensor(tensor.detach()).item())
    return bytes_of(tensor)


def held_by(save: Any) -> Watched | None:
    """What each rank has all of, of what a loop saves; None: nobody knows, as it saves in a way of its own.

    Args:
        save: A `TrainingState`'s method, or something that has ``watched()``, or a `Background` of these.
    """
    called = getattr(save, "state", save)
    owner = getattr(called, "__self__", called)
    if isinstance(owner, TrainingState):
        own = type(owner).files is TrainingState.files and type(owner).write is TrainingState.write
        return owner if own and getattr(called, "__name__", "") in ("files", "write") else None
    watched: Callable[[], Watched | None] | None = getattr(owner, "watched", None)
    return watched() if callable(watched) else None
