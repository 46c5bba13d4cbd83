"""What is trained, saved and loaded, as a loop of one's own gives it: a model with its optimizer, or an engine."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import nn
from torch.nn.modules.module import register_module_module_registration_hook
from torch.optim import Optimizer

from ..data.batches import Batches
from ..saving.background_save import Background, background
from ..training.parts import Stateful
from ..training.session import Session
from ..training.training_state import TrainingState
from .micros import Micros

Write = Callable[[Path], None] | Background


class Trained(Protocol):
    """What a loop is given beside its data, see ``Session.steps``."""

    scale: str

    def begin(self, data: Batches[Any]) -> Micros:
        """Checks before a loop that what is trained is still what was given. Returns its accumulation.

        Raises:
            ValueError: It is not.
        """
        ...

    def saving(self, *, beside: bool) -> Write:
        """What the loop saves with; ``beside``: while the training goes on."""
        ...


class State(TrainingState):
    """A replicated training, loaded. Made by ``Session.state``.

    It follows its model into wrappers that are made later (DistributedDataParallel, ``torch.compile``), so that a step
    of several micro-batches is synchronised once.

    Args:
        session: This process's session.
        model: Wrapped or not.
        parts: See `TrainingState`.
    """

    scale = "ddp"

    def __init__(self, session: Session, model: nn.Module, **parts: Stateful | None) -> None:
        super().__init__(session, model=model, **parts)
        self._called = _Wrapped(model, self._model)
        self._micros: Micros | None = None
        self._where = self._places()

    def begin(self, data: Batches[Any]) -> Micros:
        """See `Trained`."""
        self._check_unmoved()
        called = self._called.found()
        if hasattr(called, "zero_optimization_stage"):
            raise ValueError("this model is trained by a DeepSpeed engine: give s.engine(engine), not s.state(model)")
        if self._micros is None or self._micros.model is not called:
            self._micros = Micros(called, *(part for part in self.parts.values() if isinstance(part, Optimizer)))
        return self._micros

    def saving(self, *, beside: bool) -> Write:
        """See `Trained`."""
        return background(self.files) if beside else self.write

    def _places(self) -> dict[str, tuple[torch.device, torch.dtype]]:
        return {name: (p.device, p.dtype) for name, p in self._model.named_parameters()}

    def _check_unmoved(self) -> None:
        """Refuses a model that was moved after its state was loaded: the optimizer's state would stay behind."""
        now = self._places()
        for name, before in self._where.items():
            if name in now and now[name] != before:
                was, became = (f"{device}, {dtype}" for device, dtype in (before, now[name]))
                raise ValueError(
                    f"the model was moved after s.state(model, optimizer) ({name}: from {was} to {became}), and the "
                    "optimizer's state was not: move the model first, then make its optimizer and call s.state"
                )


class _Wrapped:
    """Knows what was wrapped around a model since it was given.

    Args:
        model: As given.
        inner: The model without wrappers.
    """

    def __init__(self, model: nn.Module, inner: nn.Module) -> None:
        self._given = model
        self._around: list[weakref.ref[nn.Module]] = []
        known = {id(model), id(inner)}
        around = self._around

        def registered(parent: nn.Module, name: str, child: nn.Module | None) -> None:
            if id(child) in known:
                known.add(id(parent))
                around.append(weakref.ref(parent))

        self._handle = register_module_module_registration_hook(registered)
        weakref.finalize(self, self._handle.remove)

    def found(self) -> nn.Module:
        """What the training calls, as far as it is known: the last wrapper that defers synchronisation."""
        self._handle.remove()
        for parent in (one for ref in reversed(self._around) if (one := ref()) is not None):
            if callable(getattr(parent, "no_sync", None)):
                return parent
        return self._given


def checked_parts(model: Any, parts: Mapping[str, Any]) -> None:
    """Checks what a script gives ``Session.state``.

    Raises:
        ValueError: They are no model, no optimizer, or nothing with a state.
    """
    if hasattr(model, "zero_optimization_stage"):
        raise ValueError("this is a DeepSpeed engine: s.engine(engine)")
    if not isinstance(model, nn.Module):
        raise ValueError(f"s.state(model, optimizer): the model comes first, not a {type(model).__name__}")
    _check_stateful("s.state", parts)
    for name, part in parts.items():
        if isinstance(part, nn.Module) and name in ("optimizer", "scheduler", "scaler"):
            raise ValueError(
                f"s.state(model, optimizer): {name} is a {type(part).__name__}; of two models make one, "
                "nn.ModuleList([a, b]), and give what else has a state by name: s.state(model, optimizer, ema=ema)"
            )
    optimizer = parts.get("optimizer")
    if optimizer is not None and not hasattr(optimizer, "param_groups"):
        raise ValueError(f"s.state(model, optimizer): a {type(optimizer).__name__} is no optimizer")


def checked_beside(parts: Mapping[str, Any]) -> None:
    """Checks what a script gives ``Session.engine`` beside the engine.

    Raises:
        ValueError: The engine has it already, or it has no state.
    """
    _check_stateful("s.engine", parts)
    for name in ("model", "optimizer", "scheduler", "scaler"):
        if parts.get(name) is not None:
            raise ValueError(
                f"s.engine(engine, {name}=...): the engine has its own, from deepspeed.initialize, and saves it; what "
                "else is trained gets a name of its own: s.engine(engine, ema=ema)"
            )


def _check_stateful(call: str, parts: Mapping[str, Any]) -> None:
    for name, part in parts.items():
        methods = ("state_dict", "load_state_dict")
        if part is not None and not all(callable(getattr(part, method, None)) for method in methods):
            raise ValueError(
                f"{call}({name}=...): a {type(part).__name__} has no state_dict() and load_state_dict(), so it can be "
                "neither saved nor loaded"
            )
