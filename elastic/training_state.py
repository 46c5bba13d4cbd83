"""What a training without a framework saves and loads: model, optimizer, learning rate schedule, loss scale.

    state = TrainingState(s, model=model, optimizer=optimizer, scheduler=scheduler, scaler=scaler)
    state.load()                             # before DistributedDataParallel(model)
    for batch in s.steps(batches, save=background(state.files), save_every=100): ...

The session itself keeps random generators and position, ``Batches`` the order of samples. What cannot be the same
training is refused before anything is changed.
"""

from __future__ import annotations

import io
from collections.abc import Mapping
from pathlib import Path
from pickle import UnpicklingError
from typing import Any, Protocol

import torch
from torch import nn

from .checkpoint import SHARDED
from .worker_session import Session

MODEL_FILE, TRAINING_FILE = "model.pt", "training.pt"


class Stateful(Protocol):
    """An optimizer, a schedule, a gradient scaler, or anything else that is part of the training."""

    def state_dict(self) -> Any: ...
    def load_state_dict(self, state: Any, /) -> Any: ...


class TrainingState:
    """The state of a replicated training: every rank has the same, rank 0 saves it, and it loads at any world size.

    Args:
        session: The process's.
        model: Not wrapped: its names must not depend on whether there is more than one rank.
        parts: The rest by name, in the order in which it is loaded: optimizer, its scheduler, scaler. None: this
            training has none.
    """

    def __init__(self, session: Session, *, model: nn.Module, **parts: Stateful | None) -> None:
        self._session, self._model = session, model
        self._parts = {name: part for name, part in parts.items() if part is not None}
        self._checked = False

    def files(self) -> dict[str, Any]:
        """What this rank saves, for ``background``. Tensors are the training's own.

        Raises:
            TypeError: A part's state could not be loaded again. (Optimizers are taken at their word.)
        """
        if self._session.rank != 0:
            return {}
        kept = {name: {"type": _kind(part), "state": part.state_dict()} for name, part in self._parts.items()}
        if not self._checked:  # once: a part may be large
            others = [name for name, part in self._parts.items() if not hasattr(part, "param_groups")]
            loadable([kept[name] for name in others], f"the state of {' and '.join(others)}")
            self._checked = True
        return {MODEL_FILE: self._model.state_dict(), TRAINING_FILE: kept}

    def write(self, path: Path) -> None:
        """The same while the training waits, for ``save=``."""
        for name, value in self.files().items():
            torch.save(value, path / name)

    def load(self) -> bool:
        """Loads the session's resume point: weights, then the parts in their order. False: there is none.

        Raises:
            ValueError: It is of another model, or of a training with other parts; says which. Nothing was changed,
                unless only shapes or parameter groups differ.
        """
        resume = self._session.resume
        if resume is None:
            return False
        if resume.form != SHARDED:
            raise ValueError(f"{resume.ref.name} is handed out as {resume.form}: it was not saved by TrainingState")
        weights, kept = read_tensors(resume.path / MODEL_FILE), read_tensors(resume.path / TRAINING_FILE)
        check_same_names(weights, self._model.state_dict())
        had = {name: str(part["type"]) for name, part in kept.items()}
        have = {name: _kind(part) for name, part in self._parts.items()}
        if had != have:
            raise ValueError(
                f"{resume.ref.name} was saved with {_named(had)}, this training has {_named(have)}: it would go on"
                " otherwise than it began; make the same ones, or start a new run"
            )
        try:
            self._model.load_state_dict(weights)
        except RuntimeError as error:
            raise ValueError(f"{resume.ref.name} is of another model: {error}") from error
        for name, part in self._parts.items():
            try:
                part.load_state_dict(kept[name]["state"])
            except (ValueError, KeyError, RuntimeError) as error:
                raise ValueError(f"the {name} in {resume.ref.name} does not fit this one: {error}") from error
        return True


def read_tensors(path: Path) -> Any:
    """What ``torch.save`` wrote, on the CPU; plain values and tensors only.

    Raises:
        ValueError: It is not there, or has something else in it.
    """
    try:
        return torch.load(path, weights_only=True, map_location="cpu")
    except FileNotFoundError as error:
        raise ValueError(f"{path.parent.name} has no {path.name}: it was not saved by TrainingState") from error
    except UnpicklingError as error:
        raise ValueError(f"{path} has more than plain values and tensors: {str(error).splitlines()[0]}") from error


def check_same_names(saved: Mapping[str, Any], wanted: Mapping[str, Any]) -> None:
    """Compares a checkpoint's names with a model's.

    Raises:
        ValueError: They differ.
    """
    there, here = set(saved), set(wanted)
    if there == here:
        return
    if not there & here:
        raise ValueError(
            f"the checkpoint is of another model: none of its {len(there)} names ({_few(there)}) is in this one's"
            f" {len(here)} ({_few(here)})"
        )
    only = [
        f"{_few(names)} only in the {where}"
        for names, where in ((there - here, "checkpoint"), (here - there, "model"))
        if names
    ]
    raise ValueError(f"the checkpoint is of another model: {'; '.join(only)}")


def _kind(part: Stateful) -> str:
    # A scaler that is switched off has no state, and takes any without a word.
    on = getattr(part, "is_enabled", None)
    return type(part).__name__ + (" (disabled)" if callable(on) and not on() else "")


def _named(parts: Mapping[str, str]) -> str:
    return ", ".join(f"{name} {kind}" for name, kind in parts.items()) or "nothing beside the model"


def _few(names: set[str]) -> str:
    listed = sorted(names)
    return ", ".join(listed[:3]) + (f" and {len(listed) - 3} more" if len(listed) > 3 else "")


def loadable(content: Any, what: str) -> bytes:
    """``torch.save`` of something small, once it is sure that it can be read again.

    Args:
        content: What is saved.
        what: What to call it.

    Raises:
        TypeError: It is more than plain values and tensors.
    """
    held = io.BytesIO()
    try:
        torch.save(content, held)
        torch.load(io.BytesIO(held.getvalue()), weights_only=True, map_location="cpu")
    except Exception as error:  # pickle has many ways to say no
        raise TypeError(
            f"{what} has more than plain values and tensors, and could not be loaded again: "
            f"{str(error).splitlines()[0]}"
        ) from error
    return held.getvalue()
