"""What a Trainer's checkpoint has, known well enough to be made without the Trainer's own save.

The Trainer writes it on rank 0 alone. So it is made to save its model once, into nothing: that says which files there
are, which tensors are in them, and all small contents. The other files are made here.
"""

from __future__ import annotations

import copy
import json
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
import transformers.trainer as upstream
import transformers.utils as library
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler
from transformers.trainer_callback import ExportableState

from dalsegno.elastic.saving.resuming import ResumePoint
from dalsegno.elastic.saving.safetensors_files import Safetensors
from dalsegno.elastic.training.training_state import TRAINING_FILE
from dalsegno.elastic.training.unchanged import UnclearError

from .checkpoints import PROGRESS, TRAINER_STATE, Unfinished, trainers
from .forgetting import COUNTED_ALIKE
from .refusals import overrides
from .written import kept_here, pickled

# Files that each save has anew.
_OWN = frozenset({upstream.OPTIMIZER_NAME, upstream.SCHEDULER_NAME, TRAINER_STATE})
# Has what is of no account, such as the number of its rank.
_ARGUMENTS = "training_args.bin"
# Names of files below the Trainer's directory that each rank loads, of those that rank 0 saves.
_READ_BY_ALL = _OWN | {
    *(upstream.SCALER_NAME, library.ADAPTER_WEIGHTS_NAME, library.ADAPTER_SAFE_WEIGHTS_NAME),
    *(library.WEIGHTS_NAME, library.WEIGHTS_INDEX_NAME, library.SAFE_WEIGHTS_NAME, library.SAFE_WEIGHTS_INDEX_NAME),
}


def check_seen(resume: ResumePoint) -> None:
    """Checks that this rank sees what all ranks read of the Trainer's files, as far as they were saved.

    The Trainer passes over an optimizer's, a scheduler's or a loss scale's that is not there, without a word: this
    rank would go on with a new one, and the others with theirs.

    Raises:
        BadResumePoint: See ``ResumePoint.wait``.
        OSError: It does not see one. Another start may.
    """
    place = f"{trainers(Path(), resume.step)}/"
    for entry in resume.manifest.files:
        # Adapters may lie in directories of their own.
        if entry.path == PROGRESS or (entry.path.startswith(place) and Path(entry.path).name in _READ_BY_ALL):
            resume.sees(entry.path)


@dataclass(frozen=True)
class Noted:
    """What a boundary has beside the watched state.

    Attributes:
        unfinished: What the next world has to do first.
        scalars: The plain attributes of the Trainer's state.
    """

    unfinished: Unfinished
    scalars: Mapping[str, Any]


class SavedModel(NamedTuple):
    """What the Trainer saves of its model.

    Attributes:
        small: Contents of files, by path.
        tensors: For each other file its tensors, by their name in the file: the names that the model has for them.
        metadata: What the headers of these files say.
    """

    small: Mapping[str, bytes]
    tensors: Mapping[str, Mapping[str, str]]
    metadata: Mapping[str, Mapping[str, str] | None]


class _Trainers:
    """The Trainer's own state as a part of what is watched. What is in it changes at boundaries alone."""

    def __init__(self, trainer: Any) -> None:
        self._trainer = trainer

    @property
    def stepped_alike(self) -> bool:
        """See ``HeldState``."""
        return all(type(one).__module__.partition(".")[0] in COUNTED_ALIKE for one in self._callbacks())

    def state_dict(self) -> dict[str, Any]:
        state = self._trainer.state
        return {
            "step": state.global_step,
            "logs": len(state.log_history),
            "logged": self._trainer._globalstep_last_logged,
            "best": (state.best_metric, state.best_global_step),
            "stopped": self._trainer.control.should_training_stop,
            "callbacks": [one.state() for one in self._callbacks()],
            "counting": self._trainer.remembered(),
        }

    def _callbacks(self) -> list[Any]:
        """What a step counts; the control's flags are set anew in each."""
        return [one for one in exportable(self._trainer) if one is not self._trainer.control]


class TrainersState:
    """The state of a Trainer that is watched, see ``held_state.Watched``: what a checkpoint has of it.

    Args:
        trainer: The Trainer.

    Attributes:
        model: What it saves of its model; None: that is not known.
    """

    def __init__(self, trainer: Any) -> None:
        self._trainer = trainer
        self.model: SavedModel | None = None
        self._configured: tuple[str, ...] = ()
        optimizer = getattr(trainer.optimizer, "optimizer", trainer.optimizer)
        self.parts: dict[str, Any] = {
            "optimizer": optimizer,
            "scheduler": trainer.lr_scheduler,
            "trainer": _Trainers(trainer),
        }

    def watched(self) -> TrainersState:
        """See ``held_state.held_by``."""
        return self

    @property
    def can_be_watched(self) -> bool:
        """Whether it has nothing but what this knows of."""
        trainer, optimizer = self._trainer, self.parts["optimizer"]
        plain = isinstance(optimizer, Optimizer) and isinstance(self.parts["scheduler"], LRScheduler)
        own = overrides(trainer, "_save_optimizer_and_scheduler", ("transformers", "dalsegno"))
        return plain and not own and trainer.accelerator.scaler is None

    def now_has(self, model: SavedModel | None) -> None:
        """From now on the Trainer's model is saved so."""
        self.model, self._configured = model, _configurations(self._trainer.model)

    @property
    def has_changed(self) -> bool:
        """A configuration is not what it was when that was said."""
        return self._configured != _configurations(self._trainer.model)

    def learn(self) -> SavedModel:
        """Has the Trainer save its model into nothing, on rank 0.

        Raises:
            UnclearError: Something in it is not a tensor of the model as it is.
        """
        model = self._trainer.model
        with tempfile.TemporaryDirectory() as directory:
            # As deep as a checkpoint: ms-swift looks for files beside it.
            place = trainers(Path(directory), self._trainer.state.global_step)
            place.mkdir()
            with kept_here(place, lambda content: content) as kept:
                self._trainer.save_model(str(place), _internal_call=True)
                files = kept.files()
        paths = {_place(tensor): path for path, tensor in _named(model)}
        tensors, metadata = dict[str, dict[str, str]](), dict[str, Any]()
        for file, content in files.items():
            if isinstance(content, Safetensors):
                if not all(_place(tensor) in paths for tensor in content.values()):
                    raise UnclearError(f"{file} has tensors that are made for it")
                tensors[file] = {name: paths[_place(tensor)] for name, tensor in content.items()}
                metadata[file] = content.metadata
            elif not isinstance(content, bytes):
                raise UnclearError(f"{file} is no file of safetensors")
        if not tensors or files.keys() & _OWN:
            raise UnclearError("the model is not saved as it is known")
        small = {file: content for file, content in files.items() if isinstance(content, bytes)}
        return SavedModel(small, tensors, metadata)

    def is_as(self, saved: Mapping[str, Any], step: int) -> bool:
        """Whether a checkpoint that the Trainer has just saved has the same files as one from here would."""
        if self.model is None:
            return True
        model, place = self.model, str(trainers(Path(), step))
        found = {path.removeprefix(f"{place}/"): content for path, content in saved.items() if path != PROGRESS}
        found = {path: content for path, content in found.items() if not path.startswith("rng_state")}
        small = {path: content for path, content in model.small.items() if path != _ARGUMENTS}
        if found.keys() != model.small.keys() | model.tensors.keys() | _OWN:
            return False
        weights = {path: found[path] for path in model.tensors}
        return all(found[path] == content for path, content in small.items()) and all(
            isinstance(content, Safetensors)
            and content.keys() == model.tensors[path].keys()
            and content.metadata == model.metadata[path]
            for path, content in weights.items()
        )

    def copy(self) -> dict[str, Any]:
        """See ``held_state.Watched``.

        Raises:
            UnclearError: It is not known what a checkpoint has, or the model has lost a tensor.
        """
        if self.has_changed:
            raise UnclearError("a configuration has changed")
        parts = {name: {"state": part.state_dict()} for name, part in self.parts.items()}
        # What the model has must be what it had, also where it is not saved.
        names = [name for name, _ in _named(self._trainer.model)]
        return {**self._weights(), "names": names, TRAINING_FILE: parts}

    def files(self, step: int, noted: Noted | None) -> dict[str, Any]:
        """The checkpoint of a boundary, as rank 0 would save it, by path.

        Raises:
            UnclearError: As with `copy`.
            OSError: There is no room for a small file.
        """
        weights, trainer = self._weights(), self._trainer
        if noted is None or self.model is None:
            raise UnclearError("the loss since the last log is not known")
        for file, metadata in self.model.metadata.items():
            weights[file] = Safetensors(weights[file], metadata)
        own = {
            upstream.OPTIMIZER_NAME: trainer.optimizer.state_dict(),
            upstream.SCHEDULER_NAME: pickled(trainer.lr_scheduler.state_dict()),
            TRAINER_STATE: _state_file(trainer, noted),
        }
        place = trainers(Path(), step)
        found = {str(place / file): content for file, content in {**self.model.small, **weights, **own}.items()}
        return {**found, PROGRESS: noted.unfinished.encoded()}

    def _weights(self) -> dict[str, Any]:
        if self.model is None:
            raise UnclearError("it is not known what a checkpoint has")
        there = dict(_named(self._trainer.model))
        try:
            return {
                file: {name: there[path].detach() for name, path in tensors.items()}
                for file, tensors in self.model.tensors.items()
            }
        except KeyError as error:
            raise UnclearError(f"the model has no {error} any more") from error


def exportable(trainer: Any) -> list[Any]:
    """What a Trainer saves of its callbacks, and its control."""
    return [one for one in [*trainer.callback_handler.callbacks, trainer.control] if isinstance(one, ExportableState)]


def _by_class(trainer: Any) -> dict[str, list[Any]]:
    found: dict[str, list[Any]] = {}
    for one in exportable(trainer):
        found.setdefault(type(one).__name__, []).append(one)
    return found


def make_room(trainer: Any) -> None:
    """Has the Trainer's next save hold one state for each callback, on the rank that saves.

    The Trainer itself adds to what a list had before, and looks for an entry that a new callback has not.
    """
    states = trainer.state.stateful_callbacks
    for name, callbacks in _by_class(trainer).items():
        if len(callbacks) > 1:
            states[name] = []
        elif not isinstance(states.get(name), dict):
            states[name] = {}


def note_given(trainer: Any) -> None:
    """Notes the arguments of callbacks, before the training changes any."""
    for one in exportable(trainer):
        if all(known is not one for known, _ in trainer.given):
            # Somebody's own may have a state only while it trains.
            with suppress(Exception):
                trainer.given = (*trainer.given, (one, copy.deepcopy(one.state().get("args", {}))))


def same(one: Any, other: Any) -> bool:
    """Whether two values are equal and of one type; not if they cannot be compared, as arrays."""
    try:
        return type(one) is type(other) and bool(one == other)
    except Exception:  # somebody's own values
        return False


def _plain_arguments(one: Any, state: Mapping[str, Any]) -> dict[str, Any]:
    """Its arguments that are attributes of this very value, and the same once they are read again.

    A property cannot be set, and a path that is saved as text is no path again.

    Args:
        one: A callback.
        state: Its present state.
    """
    own = getattr(one, "__dict__", {})
    named = (state.get("args") or {}).items()
    return {name: value for name, value in named if name in own and same(own[name], value) and _is_json(value)}


def _is_json(value: Any) -> bool:
    try:
        return same(json.loads(json.dumps(value)), value)
    except (TypeError, ValueError, RecursionError):
        return False


def counted(callback: Any) -> dict[str, Any]:
    """What it saves of its attributes, and of its arguments where they are attributes."""
    state = callback.state()
    return {**_plain_arguments(callback, state), **state.get("attributes", {})}


def load(callback: Any, saved: Mapping[str, Any]) -> list[str]:
    """Sets what a callback has counted.

    Args:
        callback: It is about to train.
        saved: Its saved state.

    Returns:
        Names of attributes that cannot be set, or would not be what they were.
    """
    wrong: set[str] = set()
    with suppress(Exception):  # somebody's own may have a state only while it trains
        state = callback.state()
        # A version has saved arguments of any form among the attributes.
        wrong = state.get("args", {}).keys() - _plain_arguments(callback, state).keys()
        wrong -= state.get("attributes", {}).keys()
    passed = list[str]()
    for name, value in saved.get("attributes", {}).items():
        try:
            if name in wrong:
                raise AttributeError(name)
            setattr(callback, name, value)
        except Exception:
            passed.append(name)
    return passed


def states(trainer: Any) -> dict[str, Any]:
    """What is saved of callbacks, and of the control, by class: one state, or a list of them."""
    told = {name: [_state(trainer, one) for one in callbacks] for name, callbacks in _by_class(trainer).items()}
    return {name: found if len(found) > 1 else found[0] for name, found in told.items()}


def _state(trainer: Any, one: Any) -> dict[str, Any]:
    """Its own. An argument that is no longer as the script gave it was counted up: it is among the attributes, too.

    The others are the script's: who changes one there, and starts again, means it.
    """
    state: dict[str, Any] = one.state()
    if one is trainer.control:
        return state
    given: Mapping[str, Any] = next((arguments for known, arguments in trainer.given if known is one), {})
    plain = _plain_arguments(one, state).items()
    changed = {name: value for name, value in plain if name in given and not same(given[name], value)}
    return {**state, "attributes": {**changed, **state.get("attributes", {})}} if changed else state


def saved_states(trainer: Any) -> Iterator[tuple[Any, Mapping[str, Any]]]:
    """Callbacks, and the control, each with what the Trainer's state has of it."""
    for name, callbacks in _by_class(trainer).items():
        saved = trainer.state.stateful_callbacks.get(name, [])
        states = saved if isinstance(saved, list) else [saved]
        # Lists of earlier versions had the states of all earlier saves in front of these.
        yield from zip(callbacks, states[-len(callbacks) :], strict=False)


def _state_file(trainer: Any, noted: Noted) -> bytes:
    state = copy.copy(trainer.state)
    for name, value in noted.scalars.items():
        setattr(state, name, value)
    state.is_local_process_zero = state.is_world_process_zero = True
    state.stateful_callbacks = {**state.stateful_callbacks, **states(trainer)}
    with tempfile.TemporaryDirectory() as directory:
        path = Path(directory) / TRAINER_STATE
        state.save_to_json(str(path))
        return path.read_bytes()


def _configurations(model: Any) -> tuple[str, ...]:
    """What is saved beside weights and is no tensor, as text."""
    found: list[Any] = [getattr(model, name, None) for name in ("config", "generation_config", "peft_config")]
    return tuple(str(one.to_dict() if hasattr(one, "to_dict") else one) for one in found)


def _named(model: Any) -> Iterator[tuple[str, torch.Tensor]]:
    yield from model.named_parameters(remove_duplicate=False)
    yield from model.named_buffers(remove_duplicate=False)


def _place(tensor: torch.Tensor) -> tuple[Any, ...]:
    return tensor.data_ptr(), str(tensor.dtype), tuple(tensor.shape), tensor.stride()
