"""The parts of a training beside its model: what each is called, is, and has to be saved."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, Protocol

from torch.optim import Optimizer

from ..saving.unfit import is_of_the_state


class Stateful(Protocol):
    """An optimizer, a schedule, a gradient scaler, or anything else that is part of the training."""

    def state_dict(self) -> Any: ...
    def load_state_dict(self, state: Any, /) -> Any: ...


def takes_hooks(part: Any) -> bool:
    """Whether it is one of torch's optimizers whose steps can be seen. Classes around another one often are not."""
    if not isinstance(part, Optimizer):
        return False
    try:
        part.register_step_pre_hook(lambda *_: None).remove()
    except AttributeError:
        return False
    return True


def check_initialised(parts: Iterable[Any]) -> None:
    """Checks that torch's optimizers among parts take hooks.

    Raises:
        ValueError: One does not.
    """
    for part in parts:
        if isinstance(part, Optimizer) and not takes_hooks(part):
            name = type(part).__name__
            raise ValueError(
                f"{name} does not call super().__init__(): call it, in a class around another optimizer with "
                "super().__init__(base.param_groups, base.defaults), so that its steps are seen; or give the optimizer "
                f"inside, if {name} keeps nothing that has to be saved"
            )


def kept_of(parts: Mapping[str, Stateful]) -> dict[str, dict[str, Any]]:
    """What is saved of parts, by name: ``type`` and ``state``. Tensors are the parts' own.

    Raises:
        TypeError: A part gives no state.
    """
    return {name: {"type": kind(part), "state": state_of(name, part)} for name, part in parts.items()}


def check_same(checkpoint: str, kept: Mapping[str, Any], parts: Mapping[str, Stateful]) -> None:
    """Compares parts with those of a checkpoint, see `kept_of`.

    Raises:
        ValueError: They are others.
    """
    had = {name: str(part["type"]) for name, part in kept.items()}
    have = {name: kind(part) for name, part in parts.items()}
    if had != have:
        raise ValueError(
            f"{checkpoint} was saved with {_named(had)}, this training has {_named(have)}: it would go on"
            " in another way than it began; make the same ones, or start a new run"
        )


def state_of(name: str, part: Stateful) -> Any:
    """A part's state.

    Raises:
        TypeError: It gives none.
    """
    try:
        return part.state_dict()
    except Exception as error:
        if not is_of_the_state(error):
            raise
        raise TypeError(f"{name} ({kind(part)}) gives no state to save: {error}") from error


def kind(part: Stateful) -> str:
    """The name of a part's class."""
    # A scaler that is switched off has no state, and accepts any.
    on = getattr(part, "is_enabled", None)
    return type(part).__name__ + (" (disabled)" if callable(on) and not on() else "")


def _named(parts: Mapping[str, str]) -> str:
    return ", ".join(f"{name} {what}" for name, what in parts.items()) or "nothing beside the model"
