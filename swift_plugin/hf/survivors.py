"""After a crash, a rank that is left saves a Trainer's last boundary by itself, where each rank has all of its state.

See ``elastic.training.survival``, which decides whether a rank still holds exactly that. What is special here is what a
checkpoint has (`held`): only rank 0 has the Trainer save, and then that may be gone. So it tells the others before.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import torch.distributed as dist

from dalsegno.elastic import Session
from dalsegno.elastic.training.survival import Survival

from .checkpoints import Unfinished, trainers
from .held import Noted, SavedModel, TrainersState

# Fixed point for sums of losses, which are exact then; FLOPs are whole numbers that may be too large.
_LOSS_UNIT, _FLOPS_UNIT, _MOST = 2**-32, 2**10, 2**52


class Sums(NamedTuple):
    """What the ranks have together at a boundary.

    Attributes:
        loss: The mean over the ranks of their losses since the last log; None: it is not known.
        flops: Of all ranks, since they were last counted.
    """

    loss: float | None = 0.0
    flops: float = 0.0


class Survivors:
    """What the ranks of one Trainer with DDP may save by themselves. All ranks call it alike. Main thread only.

    Args:
        trainer: It is about to train.
        session: Its process's session.
        loader: Where the data stand.

    Attributes:
        differs: The Trainer has saved other files than one of these ranks would. Only rank 0 sees that.
    """

    def __init__(self, trainer: Any, session: Session, loader: Any) -> None:
        self._trainer, self._session, self._loader = trainer, session, loader
        self._state = TrainersState(trainer)
        options = {"strategy": "ddp", "any_world_size": None, "order": loader.order, "cut": loader.cut}
        wanted = self._state.can_be_watched
        self._survival = Survival(session, self._state, options, wanted=wanted, files=self._state.files)
        self._learnt = self._again = False
        self.differs = False
        self._pending: Any = None
        self._sums = Sums()
        self._note: Noted | None = None

    @property
    def on(self) -> bool:
        """Something may be saved."""
        return self._survival.wanted

    def stepping(self) -> None:
        """An optimizer step comes next: the losses of all ranks are asked for, so that each has them behind it.

        Collective.
        """
        if not self.on:
            return
        loss, flops = float(self._trainer._tr_loss), float(self._trainer.current_flos)
        known = math.isfinite(loss) and abs(loss) < _MOST * _LOSS_UNIT and abs(flops) < _MOST * _FLOPS_UNIT
        told = (round(loss / _LOSS_UNIT), round(flops / _FLOPS_UNIT), 0) if known else (0, 0, 1)
        self._pending = self._session.start_sum(*told)

    def stepped(self) -> None:
        """The step is over. Collective."""
        if self._pending is not None:
            loss, flops, unknown = self._pending.wait()
            self._pending = None
            mean = None if unknown else loss * _LOSS_UNIT / self._session.world_size
            self._sums = Sums(mean, float(flops) * _FLOPS_UNIT)

    def mark(self, unfinished: Unfinished) -> None:
        """This boundary is what a rank would save, with what is left to do behind it.

        Args:
            unfinished: Without the loss.
        """
        if not self.on:
            return
        trainer, state = self._trainer, self._trainer.state
        # Behind a log there is nothing to remember.
        loss = 0.0 if trainer._globalstep_last_logged == state.global_step else self._sums.loss
        flops = self._sums.flops if trainer.current_flos else 0.0
        plain = {name: value for name, value in vars(state).items() if isinstance(value, bool | int | float | str)}
        self._note = None
        if loss is not None:
            self._note = Noted(replace(unfinished, loss=loss), {**plain, "total_flos": state.total_flos + flops})
        self._survival.mark(self._session.step, self._loader.position, self._note)

    def look(self) -> None:
        """Behind all that a boundary has, where the training goes on. Collective."""
        if not self.on:
            return
        if not self._learnt:
            self._learn()
        self._survival.look(self._loader.position, self._note)

    def saved(self, step: int, files: Mapping[str, Any]) -> None:
        """The Trainer has saved these files to memory, by path."""
        if self.on and self._session.rank == 0:
            self.differs = not self._state.is_as(files, step)

    def heard(self, differs: bool) -> None:
        """The ranks have agreed on what `differs` says. A configuration that was changed once is learnt anew."""
        if differs and self.on:
            self.differs, self._learnt = False, self._again
            self._again = True
            self._state.model = None

    def _learn(self) -> None:
        self._learnt = True
        found = None
        if self._session.rank == 0:
            # The training goes on without this, whatever the error is; `TrainersState` says that it is not known.
            with suppress(Exception):
                found = self._state.learn()
        self._state.model = self._from_rank_0(found)

    def _from_rank_0(self, found: SavedModel | None) -> SavedModel | None:
        sums = None if found is None else {path: _sum(content) for path, content in found.small.items()}
        told = _broadcast(None if found is None else (sums, found.tensors, found.metadata))
        if told is None:
            return None
        sums, tensors, metadata = told
        resume = self._session.resume
        place = None if resume is None else trainers(resume.path, resume.step)
        # Most of it are tokenizers, which a rank has just read there.
        small = {path: found.small[path] if found else _there(place, path) for path in sums}
        lacks = [path for path, content in small.items() if _sum(content) != sums[path]]
        wanted = sorted(set().union(*self._session.gather(lacks)))
        if wanted:
            small.update(_broadcast(None if found is None else {path: found.small[path] for path in wanted}))
        return SavedModel(small, tensors, metadata)


def _broadcast(content: Any) -> Any:
    """Rank 0's on every rank. Collective."""
    told = [content]
    dist.broadcast_object_list(told, src=0)
    return told[0]


def _there(place: Path | None, path: str) -> bytes:
    """What a file has; nothing if there is none."""
    with suppress(OSError):
        return b"" if place is None else (place / path).read_bytes()
    return b""


def _sum(content: bytes) -> str:
    return hashlib.blake2b(content, digest_size=16).hexdigest()
