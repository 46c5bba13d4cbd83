"""After a crash, a rank that is left saves a Trainer's last boundary by itself, where each rank has all of its state.

See ``elastic.training.survival``, which decides whether a rank still holds exactly that. What is special here is what a
checkpoint has (`held`): only rank 0 has the Trainer save, and then that may be gone. So it tells the others before.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import torch.distributed as dist

from dalsegno.elastic import Session
from dalsegno.elastic.training.survival import Survival

from .checkpoints import Unfinished, trainers
from .held import Noted, SavedModel, TrainersState

# Sums are exact, of whole numbers in two parts each: a loss's units, and those of which the lower part has 2**40.
_LOSS_UNIT, _PART, _MOST = 2.0**-72, 2**40, 2**52
# A configuration that is changed in mid-run is learnt anew so often.
_MOST_LEARNT = 8


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
        state: It can be watched on all ranks.
        session: Its process's session.
        loader: Where the data stand.

    Attributes:
        compares: At this boundary the Trainer has saved to memory: all ranks hear whether that is as it was learnt.
    """

    def __init__(self, trainer: Any, state: TrainersState, session: Session, loader: Any) -> None:
        self._trainer, self._state, self._session, self._loader = trainer, state, session, loader
        options = {"strategy": "ddp", "any_world_size": None, "order": loader.order, "cut": loader.cut}
        self._survival = Survival(session, state, options, wanted=True, files=state.files)
        self._learnt = 0
        self.compares = self._differs = False
        self._pending: Any = None
        self._sums = Sums()
        self._note: Noted | None = None

    def stepping(self) -> None:
        """An optimizer step comes next: the losses of all ranks are asked for, so that each has them behind it.

        Collective.
        """
        told = [_parts(float(self._trainer._tr_loss), _LOSS_UNIT), _parts(float(self._trainer.current_flos), 1.0)]
        self._pending = self._session.start_sum(*told[0], *told[1])

    def stepped(self) -> None:
        """The step is over. Collective."""
        if self._pending is not None:
            told = self._pending.wait()
            self._pending = None
            loss, flops = _whole(told[:3], _LOSS_UNIT), _whole(told[3:], 1.0)
            self._sums = Sums(None if loss is None else loss / self._session.world_size, flops or 0.0)

    def mark(self, unfinished: Unfinished) -> None:
        """This boundary is what a rank would save, with what is left to do behind it.

        Args:
            unfinished: Without the loss.
        """
        trainer, state, loss = self._trainer, self._trainer.state, self._sums.loss
        if loss is not None and trainer._globalstep_last_logged == state.global_step:
            loss = 0.0  # Behind a log there is nothing to remember.
        flops = self._sums.flops if trainer.current_flos else 0.0
        plain = {name: value for name, value in vars(state).items() if isinstance(value, bool | int | float | str)}
        note = None
        if loss is not None:
            note = Noted(replace(unfinished, loss=loss), {**plain, "total_flos": state.total_flos + flops})
        if note is None or note != self._note:
            self._note = note
            self._survival.mark(self._session.step, self._loader.position, note)

    def look(self) -> None:
        """Behind all that a boundary has, where the training goes on. Collective."""
        if not self._learnt:
            self._learn()
        elif self.compares or self._survival.looks_next:
            differs, self.compares, self._differs = self._differs or self._state.has_changed, False, False
            if any(self._session.gather(differs)):
                self._learn()
        self._survival.look(self._loader.position, self._note)

    def saved(self, step: int, files: Mapping[str, Any]) -> None:
        """The Trainer has saved these files to memory, by path; rank 0 has them all."""
        self._differs = self._session.rank == 0 and not self._state.is_as(files, step)

    def _learn(self) -> None:
        self._learnt += 1
        found = None
        if self._session.rank == 0 and self._learnt <= _MOST_LEARNT:
            # The training goes on without this, whatever the error is; `TrainersState` says that it is not known.
            with suppress(Exception):
                found = self._state.learn()
        self._state.now_has(self._from_rank_0(found))

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


def _parts(value: float, unit: float) -> tuple[int, int, int]:
    """A number in two parts for an exact sum over ranks; the third is 1 where it has none."""
    if not math.isfinite(value) or abs(value) / unit >= float(_PART) * _MOST:
        return 0, 0, 1
    return *divmod(round(value / unit), _PART), 0


def _whole(told: Sequence[int], unit: float) -> float | None:
    high, low, unknown = told
    return None if unknown else (high * _PART + low) * unit


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
