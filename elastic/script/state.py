"""What is trained, saved and loaded, as a loop of one's own gives it: a model with its optimizer, or an engine."""

from __future__ import annotations

import inspect
import weakref
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import nn
from torch.nn.modules.module import register_module_module_registration_hook
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from ..data.batches import Batches
from ..rank.hooks import until_gone
from ..rank.process_group import init_process_group
from ..rank.way_in import STATE, way_in
from ..saving.background_save import Background, background
from ..saving.declared import is_engine
from ..training.parts import Stateful
from ..training.session import BareSession
from ..training.staying import Wrappers
from ..training.training_state import TrainingState
from .micros import Micros

Write = Callable[[Path], None] | Background
Wrap = Callable[[nn.Module], nn.Module]


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


class ScriptState(TrainingState):
    """A replicated training, loaded. Made by ``Session.state``.

    It follows its model into wrappers that are made later (DistributedDataParallel, ``torch.compile``), so that a step
    of several micro-batches is synchronised once.

    Args:
        session: This process's session.
        model: Wrapped or not.
        wrap: Wraps the model for the present world, anew in each.
        parts: See `TrainingState`.

    Attributes:
        model: What the training calls, see `Session.state`.
    """

    scale = "ddp"

    def __init__(
        self, session: BareSession, model: nn.Module, wrap: Wrap | None = None, **parts: Stateful | None
    ) -> None:
        super().__init__(session, model=model, **parts)
        self.model = model
        self._wrap, self._bare = wrap, model
        # Before anything here is collective.
        way_in.at(STATE)
        self._wrappers = Wrappers(
            model, "the script has a reference of its own to what wrap= made. Call state.model each time instead"
        )
        self._called = _Wrapped(model, self._model)
        self._micros: Micros | None = None
        self._where = self._places()

    @property
    def wraps(self) -> bool:
        """Whether the model is wrapped for each world."""
        return self._wrap is not None

    def wrapped(self, *, alike: bool = False) -> None:
        """Wraps the model, if `wrap` says how, in the default process group. Collective.

        Args:
            alike: All ranks have loaded the same weights, or kept what the others have loaded.
        """
        if self._wrap is None:
            return
        init_process_group(next((p.device for p in self._bare.parameters()), torch.device("cpu")))
        self.model = (_sending_nothing(self._wrap, self._bare) if alike else self._wrap)(self._bare)
        if not isinstance(self.model, nn.Module):
            raise ValueError(f"s.state(wrap=...) made a {type(self.model).__name__} of the model, which is no module")
        self._wrappers.note(self.model)
        way_in.ours()

    def may_stay(self) -> bool:
        """Whether nothing but the wrapper belongs to the present world. Removes it if so."""
        if self._wrap is None or not self._wrappers.alone:
            return False
        self.model = self._bare
        if self._micros is not None:
            self._micros.close()
        self._micros = None
        self._session.copies.forget()
        self._session.examination.forget()
        self._called = _Wrapped(self._bare, self._model)
        return self._wrappers.are_gone()

    def begin(self, data: Batches[Any]) -> Micros:
        """See `Trained`."""
        self._check_unmoved()
        called = self._called.found() if self._wrap is None else self.model
        if is_engine(called):
            raise ValueError("this model is trained by a DeepSpeed engine: give s.engine(engine), not s.state(model)")
        if self._micros is None or self._micros.model is not called:
            parts = list(self.parts.values())
            self._micros = Micros(called, *(part for part in parts if isinstance(part, Optimizer)), schedules=parts)
        return self._micros

    def saving(self, *, beside: bool) -> Write:
        """See `Trained`."""
        return background(self) if beside else self.write

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
        until_gone(self, self._handle)

    def found(self) -> nn.Module:
        """What the training calls, as far as it is known: the last wrapper that defers synchronisation."""
        self._handle.remove()
        for parent in (one for ref in reversed(self._around) if (one := ref()) is not None):
            if callable(getattr(parent, "no_sync", None)):
                return parent
        return self._given


def _sending_nothing(wrap: Wrap, model: nn.Module) -> Wrap:
    """The same without rank 0's weights being sent to all, where that is known of ``wrap``.

    Before the first step the ranks compare what they have, and which parameters they train (`Copies`).
    """
    called, given = (wrap.func, wrap.keywords) if isinstance(wrap, partial) and not wrap.args else (wrap, {})
    known = "init_sync" in inspect.signature(DistributedDataParallel.__init__).parameters  # not in older versions
    if called is not DistributedDataParallel or not known or "init_sync" in given:
        return wrap
    # Buffers that are in no checkpoint are sent here once, or else with each step.
    ours = any(module._non_persistent_buffers_set for module in model.modules())
    unsent = ours and not given.get("broadcast_buffers", True)
    return wrap if unsent else partial(wrap, **{"init_sync": False})


def checked_parts(model: Any, parts: Mapping[str, Any], wrap: Any) -> None:
    """Checks what a script gives ``Session.state``.

    Raises:
        ValueError: They are no model, no optimizer, or nothing with a state; or the model is wrapped already.
    """
    if wrap is not None and not callable(wrap):
        raise ValueError(
            f"s.state(wrap=...): a {type(wrap).__name__} cannot be called; give what wraps the model, such as "
            "DistributedDataParallel or lambda model: DistributedDataParallel(model, device_ids=[0])"
        )
    if wrap is not None and hasattr(model, "no_sync"):
        raise ValueError(
            f"s.state(model, optimizer, wrap=...): the model is a {type(model).__name__} already; give the plain one, "
            "which is wrapped anew in each world"
        )
    if is_engine(model):
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
        # One without an optimizer, of a model that only computes, has nothing but weights.
        engine = isinstance(part, nn.Module) and is_engine(part)
        if engine and getattr(part, "optimizer", None) is not None:
            raise ValueError(
                f"{call}({name}=...): a DeepSpeed engine is no part: its state_dict() has no optimizer. "
                "A run saves one engine: make one module of both models, and one engine of that"
            )
        methods = ("state_dict", "load_state_dict")
        if part is not None and not all(callable(getattr(part, method, None)) for method in methods):
            raise ValueError(
                f"{call}({name}=...): a {type(part).__name__} has no state_dict() and load_state_dict(), so it can be "
                "neither saved nor loaded"
            )
