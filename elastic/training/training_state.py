"""What a training without a framework saves and loads: model, optimizer, learning rate schedule, loss scale.

    state = TrainingState(s, model=model, optimizer=optimizer, scheduler=scheduler, scaler=scaler)
    state.load()                             # before DistributedDataParallel(model)
    for batch in s.steps(batches, save=background(state.files), save_every=100): ...

The session itself keeps random generators and position, and ``Batches`` the order of samples. A state that would give
another training is refused before anything is changed.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from dalsegno.protos.collector import paused
from dalsegno.protos.reads import Reads
from dalsegno.protos.text import few
from dalsegno.protos.trace import mark

from ..checkpoint import SHARDED
from ..rank.remarks import remark
from ..saving.bundles import Bundle
from ..saving.optimizers import check_kept, check_parameters, say_added
from ..saving.replicas import (
    MODELS_STATE,
    check_whole,
    loadable,
    loadable_weights,
    plainly,
    tensors,
    unwrapped,
    without_prefixes,
)
from ..saving.resuming import ResumePoint
from ..saving.schedules import check_factors, factors, unchanged
from ..saving.unfit import is_of_the_state
from ..saving.writing import write_files
from . import digest
from .first_weights import FirstWeights, check_places
from .in_forward import is_compiled
from .left_out import OptimizerWatch
from .left_scalers import ScalerWatch
from .left_schedules import LeftSchedules
from .parts import Stateful, check_initialised, check_same, kept_of
from .reading_state import check_same_dtypes, check_same_names, load_kept, load_part, load_weights, owned, read_saved
from .sending import send_what_differs
from .session import BareSession
from .unlisted import Unlisted, has_extra_state
from .wrappers import frozen, tell_frozen

MODEL_FILE, TRAINING_FILE = "model.pt", "training.pt"
EXTRA_STATE = "_extra_state"  # as torch names it
UNLISTED_FILE = "unlisted.pt"
"""Name of the file for what no ``state_dict()`` contains but has changed; written only if something has."""


class TrainingState:
    """The state of a replicated training: every rank has the same, rank 0 saves it, and it loads at any world size.

    If ``session.steps`` saves with ``write`` or ``background(files)``, it checks before the first step that the state
    can be saved and loaded again.

    Args:
        session: This process's session.
        model: If it is wrapped or compiled, the model inside is saved, because names must not depend on the number of
            ranks.
        parts: The other parts by name, in the order in which they are loaded: optimizer, its scheduler, scaler. None:
            this training has none.

    Raises:
        ValueError: An optimizer's class does not call its base's ``__init__``.
    """

    def __init__(self, session: BareSession, *, model: nn.Module, **parts: Stateful | None) -> None:
        # Of a wrapper nothing else is kept: it belongs to one world.
        self._session, self._model, self._compiled = session, unwrapped(model), is_compiled(model)
        self._parts = {name: part for name, part in parts.items() if part is not None}
        check_initialised(self._parts.values())
        self._loaded = False
        # Whether this rank has given what is saved, and goes on in another world with what it has.
        self._gave = self._stays = False
        self._had_frozen: list[str] | None = None
        self._first: dict[str, list[str]] = {}
        self._make_known()
        self._unlisted = Unlisted(self._model)
        self._factors = {name: factors(part) for name, part in self._parts.items()}
        self._schedules = LeftSchedules(
            session.examination, "is not in TrainingState", "give TrainingState(..., scheduler=...)"
        )
        # The checkpoint of which this run once took the weights only; "": there is none.
        self._weights_from = ""
        self._first_weights = FirstWeights()
        if session.rank == 0:
            OptimizerWatch(self, self._model)
            ScalerWatch(self, self._model)

    @property
    def by_place(self) -> bool:
        """See ``Shape``: all of it is rank 0's. What a class of the script's own does beside is not known."""
        return type(self).files is TrainingState.files and type(self).write is TrainingState.write

    @property
    def reads(self) -> Reads | None:
        """See ``Shape``."""
        return Reads() if self.by_place else None

    @property
    def parts(self) -> Mapping[str, Stateful]:
        """The parts beside the model, by name."""
        return self._parts

    def files(self) -> dict[str, Any]:
        """What this rank saves, for ``background``: rank 0 saves it all. Tensors are the training's own.

        Raises:
            TypeError: A part gives no state, or one that could not be loaded again. (Of the tensors of the optimizer
                and of the model that is only checked before the first step.)
            ValueError: A state is sharded, not the same on every rank.
        """
        found = self._given()
        if found:
            self._first_weights.tell(self._model, found[MODEL_FILE])
        return found

    def _given(self) -> dict[str, Any]:
        if self._session.rank != 0:
            check_whole(self._model)
            return {}
        found = self.copy()
        self._gave = True
        return found

    def copy(self) -> dict[str, Any]:
        """What this rank holds of what rank 0 saves, see `files`, on whichever rank it is asked."""
        check_whole(self._model)
        kept = kept_of(self._parts)
        if self._weights_from:
            for said in kept.values():
                said["weights_from"] = self._weights_from
        for name, names in self._trained().items():
            kept[name]["parameters"], kept[name]["frozen"] = names, frozen(self._model)
            self._say_added(name, names)
        for name, places in self._schedules.places().items():
            kept[name]["left_out"] = places
        for name, before in self._factors.items():
            if before:
                kept[name]["factors"] = unchanged(before, factors(self._parts[name]))
        for name, part in self._parts.items():
            checked = plainly if hasattr(part, "param_groups") else loadable
            kept[name] = checked(kept[name], f"the state of {name}")
        if self._session.rank == 0:
            self._unlisted.tell()
        found = {MODEL_FILE: loadable_weights(self._model.state_dict()), TRAINING_FILE: Bundle(kept)}
        changed = self._unlisted.changed_buffers()
        return {**found, UNLISTED_FILE: {"buffers": changed}} if changed else found

    def _say_added(self, name: str, names: Sequence[str]) -> None:
        """Says once that an optimizer now trains other parameters than when it was first saved or looked at."""
        before = self._first.setdefault(name, list(names))
        if before != list(names):
            self._first[name] = list(names)
            if self._session.rank == 0:
                say_added(name, before, names)

    def _trained(self) -> dict[str, list[str]]:
        """Names of each optimizer's parameters, in the order of its groups; nameless ones are left out."""
        names = {parameter: name for name, parameter in self._model.named_parameters()}
        return {
            name: [names[p] for group in groups for p in group["params"] if p in names]
            for name, part in self._parts.items()
            if (groups := getattr(part, "param_groups", None)) is not None
        }

    def rehearse(self) -> None:
        """Asks for all that would be saved, without writing it.

        Raises:
            TypeError, ValueError: As with ``files``, and for the model and the optimizer, too.
        """
        resume = self._session.resume
        if resume is not None and self._session.step == resume.step and not self._loaded:
            raise ValueError(f"the run goes on from {resume.ref.name}: call TrainingState.load() before the first step")
        if self._stays and self._gave:
            return  # The run goes on from what this very process has saved.
        self._look_for_schedules()
        files = self._given()
        if self._session.rank == 0 and resume is not None and self._session.step == resume.step:
            tell_frozen(resume.ref.name, self._had_frozen, frozen(self._model))
        if files:
            self._first_weights.refuse(self._model, files[MODEL_FILE])
            check_places(files[MODEL_FILE])
            loadable(files[MODEL_FILE], MODELS_STATE)
            for name, part in files[TRAINING_FILE].items():
                if hasattr(self._parts[name], "param_groups"):
                    loadable(part, f"the state of {name}")
                    check_kept(self._parts[name], self._model, self._beside(files[TRAINING_FILE]))

    def _beside(self, kept: Mapping[str, Any]) -> Iterator[Tensor]:
        """Tensors that are saved beside those of the model and of optimizers."""
        for name, part in kept.items():
            if not hasattr(self._parts[name], "param_groups"):
                yield from (tensor for _, tensor in tensors(part))

    def _look_for_schedules(self) -> None:
        """Looks for schedules that act on the optimizers but are no part of this state. A remark names them.

        Raises:
            ValueError: The run resumes, and such a schedule stands at its beginning.
        """
        for name, part in self._parts.items():
            if hasattr(part, "param_groups"):
                self._schedules.look(name, [part], self._parts.values())

    def write(self, path: Path) -> None:
        """The same while the training waits, for ``save=``."""
        files = self.files()
        try:
            write_files(path, files)
        except (OSError, RuntimeError):
            raise
        except Exception:  # pickle has many ways to say no
            self.rehearse()  # Says which part it is.
            raise

    def _make_known(self) -> None:
        optimizers = [part for part in self._parts.values() if hasattr(part, "param_groups")]
        self._session.examination.learn_parts(self._model, *optimizers, compiled=self._compiled)
        scheduler = next((part for part in self._parts.values() if hasattr(part, "get_last_lr")), None)
        self._session.copies.know(self._model, *optimizers, scheduler=scheduler, saved=True)

    def go_on(self) -> None:
        """In another world, which resumes from what is here: what all ranks have alike is not loaded again.

        Collective with those that `load`. Buffers (BatchNorm's), extra states and parts other than optimizers may be
        each rank's own until rank 0 saves its for all, so these are loaded.

        Raises:
            ValueError: On all ranks: something cannot be loaded.
        """
        mark("built")
        self._make_known()
        self._loaded = self._stays = True
        # As after a load: gradients of the step before are nobody's.
        for parameter in self._model.parameters():
            parameter.grad = None
        with self._session.meetings.together(), paused():
            if self._session.resume is not None:
                with self._session.resume.loading() as resume:
                    self._load_own(resume)
        send_what_differs(self._model)
        mark("loaded")

    def unloaded(self) -> str:
        """A checksum of what `go_on` does not load: parameters, and what optimizers keep."""
        values: list[Tensor] = list(self._model.parameters())
        plain = []
        for part in self._parts.values():
            if hasattr(part, "param_groups"):
                kept = part.state_dict()
                values += [value for _, value in tensors(kept)]
                plain.append(repr(kept["param_groups"]))
        return digest.short([*digest.digests([value for value in values if digest.is_plain(value)]), *plain])

    def unread(self) -> list[str]:
        """Names of files that `go_on` does not read: what is in them this process has."""
        own = any(not hasattr(part, "param_groups") for part in self._parts.values())
        model = next(self._model.buffers(), None) is not None or next(_with_extra_state(self._model), None) is not None
        return [name for name, read in ((MODEL_FILE, model), (TRAINING_FILE, own)) if not read]

    def _load_own(self, resume: ResumePoint) -> None:
        buffers, extra = dict(self._model.named_buffers()), dict(_with_extra_state(self._model))
        if buffers or extra:
            weights = without_prefixes(read_saved(resume, MODEL_FILE), self._model.state_dict())
            with torch.no_grad():
                for name, buffer in buffers.items():
                    if name in weights:
                        buffer.copy_(weights[name])
            for name, module in extra.items():
                if name in weights:
                    module.set_extra_state(owned(weights[name]))
        self._load_unlisted(resume)
        own = {name: part for name, part in self._parts.items() if not hasattr(part, "param_groups")}
        kept = read_saved(resume, TRAINING_FILE) if own else {}
        for name, part in own.items():
            load_part(part, kept[name]["state"])

    def _load_unlisted(self, resume: ResumePoint) -> None:
        if resume.lists(UNLISTED_FILE):
            self._unlisted.load(read_saved(resume, UNLISTED_FILE)["buffers"])

    def load(self, *, cast: bool = False, other_schedule: bool = False, weights_only: bool = False) -> bool:
        """Loads the session's resume point: weights, then the parts in their order. False: there is none.

        Collective if there is one: if something does not fit on some rank, no rank goes on.

        Args:
            cast: Convert weights that were saved with another dtype.
            other_schedule: Accept a schedule (``LambdaLR``) whose functions have changed.
            weights_only: Load the model, and let the other parts begin anew (another optimizer). Step and data go on.
                Once in a run: what is saved from then on says so, and is loaded whole.

        Raises:
            ValueError: On all ranks: the model is sharded; or the checkpoint is of another model, or of a training with
                other parts, which the message names. Nothing was changed, unless only shapes or parameter groups
                differ.
        """
        self._loaded = True
        resume = self._session.resume
        if resume is None:
            check_whole(self._model)
            return False
        mark("built")
        with self._session.meetings.together(), paused(), resume.loading() as resume:
            self._load(resume, cast, other_schedule, weights_only)
        send_what_differs(self._model)
        mark("loaded")
        return True

    def _load(self, resume: ResumePoint, cast: bool, other_schedule: bool, weights_only: bool) -> None:
        check_whole(self._model)
        if resume.form != SHARDED:
            raise ValueError(f"{resume.ref.name} is handed out as {resume.form}: it was not saved by TrainingState")
        weights, kept = read_saved(resume, MODEL_FILE), read_saved(resume, TRAINING_FILE)
        wanted = self._model.state_dict()
        weights = without_prefixes(weights, wanted)
        check_same_names(weights, wanted)
        if not cast:
            check_same_dtypes(weights, wanted)
        self._weights_from = next((str(part["weights_from"]) for part in kept.values() if "weights_from" in part), "")
        if weights_only and not self._weights_from:
            self._weights_from, kept = resume.ref.name, {}
        else:
            self._check_parts(resume.ref.name, kept)
        try:
            load_weights(self._model, weights, wanted)
        except RuntimeError as error:
            if not is_of_the_state(error):
                raise
            raise ValueError(f"{resume.ref.name} is of another model: {error}") from error
        self._load_unlisted(resume)
        if not kept and self._parts and self._session.rank == 0:
            remark("of %s only the weights are loaded: %s begin anew", resume.ref.name, few(self._parts))
        for name, part in self._parts.items() if kept else ():
            load_kept(part, kept[name], name, resume.ref.name, cast=cast)
            if not other_schedule:
                check_factors(kept[name].get("factors", {}), factors(part))
            # An earlier version did not ask for schedules: nothing is known of them.
            if hasattr(part, "param_groups") and "left_out" in kept[name]:
                self._schedules.resumes(name, part, kept[name]["left_out"])

    def _check_parts(self, checkpoint: str, kept: Mapping[str, Any]) -> None:
        """Compares the parts with those of a checkpoint.

        Raises:
            ValueError: They are others, or train other parameters.
        """
        check_same(checkpoint, kept, self._parts)
        for name, names in self._trained().items():
            # Earlier versions did not say.
            self._had_frozen = kept[name].get("frozen")
            if "parameters" in kept[name]:
                _same_parameters(checkpoint, kept[name]["parameters"], names)


def _with_extra_state(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Modules that save more than parameters and buffers, by the name of that in the model's ``state_dict()``."""
    for name, module in model.named_modules():
        if has_extra_state(module):
            yield f"{name}.{EXTRA_STATE}" if name else EXTRA_STATE, module


def _same_parameters(checkpoint: str, saved: Sequence[str], here: Sequence[str]) -> None:
    try:
        check_parameters(saved, here)
    except ValueError as error:
        raise ValueError(f"{checkpoint}: {error}") from error
