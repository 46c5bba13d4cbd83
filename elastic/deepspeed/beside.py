"""What a script trains beside a DeepSpeed engine, in the model states that rank 0 writes; and weights that go on alone.

Rank 0's file is the same at every number of ranks, and universal files do not replace it.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch.distributed as dist

from dalsegno.protos.text import few

from ..rank.remarks import remark
from ..saving.replicas import loadable, tensors
from ..saving.resuming import ResumePoint
from ..training.entry import refused_together
from ..training.parts import Stateful, check_same, kept_of
from ..training.reading_state import load_kept
from ..training.unlisted import Unlisted
from ..universal.layout import engine_directory
from ..universal.loading import load
from .view import model_states_file

PARTS, WEIGHTS_FROM, UNLISTED = "dalsegno_parts", "dalsegno_weights_from", "dalsegno_unlisted"
"""Keys of the client's state: the parts; the checkpoint of which this run once took the weights only; the model's
buffers that are not persistent and have changed."""


class BesideEngine:
    """The parts of one training beside its engine: the same on every rank, saved by rank 0.

    With them what no ``state_dict()`` of the engine's model has.

    Args:
        engine: DeepSpeed's, before anything is loaded.
        parts: By name, in the order in which they are loaded. None: this training has none.

    Raises:
        TypeError, ValueError: A part could not be saved and loaded again.
    """

    def __init__(self, engine: Any, parts: Mapping[str, Stateful | None]) -> None:
        self._engine = engine
        self._parts = {name: part for name, part in parts.items() if part is not None}
        self._weights_from = ""
        self._unlisted, self._saved_unlisted = Unlisted(engine.module), dict[str, Any]()
        self._checked()

    @property
    def parts(self) -> Mapping[str, Stateful]:
        """Those that there are, by name."""
        return self._parts

    def state(self) -> dict[str, Any]:
        """What this rank adds to the client's state. Tensors are the parts' own.

        Raises:
            TypeError, ValueError: A part cannot be saved.
        """
        found: dict[str, Any] = {WEIGHTS_FROM: self._weights_from} if self._weights_from else {}
        if dist.get_rank() != 0:
            return found
        self._unlisted.tell()
        if changed := self._unlisted.changed_buffers():
            found[UNLISTED] = changed
        return {**found, PARTS: self._checked()} if self._parts else found

    def begins_anew(self, resume: ResumePoint, *, weights_only: bool) -> bool:
        """Whether only the weights of a checkpoint count, because that is asked for, and for the first time in the run.

        Args:
            resume: As ``ResumePoint.loading`` gives it.

        Raises:
            ValueError: It was saved with other parts. On all ranks.
            OSError, RuntimeError: It cannot be read.
        """
        path = resume.path
        with refused_together(), resume.unless_damaged():
            saved = _saved(path)
            self._saved_unlisted = saved.get(UNLISTED) or {}
            self._weights_from = str(saved.get(WEIGHTS_FROM, ""))
            if weights_only and not self._weights_from:
                self._weights_from = path.name
                if dist.get_rank() == 0:
                    anew = few(["the engine's optimizer and scheduler", *self._parts])
                    remark("of %s only the weights are loaded: %s begin anew", path.name, anew)
                return True
            check_same(path.name, saved.get(PARTS) or {}, self._parts)
        return False

    def load(self, resume: ResumePoint) -> None:
        """Loads the parts from a checkpoint that has them.

        Args:
            resume: As ``ResumePoint.loading`` gives it.

        Raises:
            ValueError: A part does not fit. On all ranks.
            OSError, RuntimeError: It cannot be read.
        """
        if not self._parts:
            return
        path = resume.path
        with refused_together(), resume.unless_damaged():
            kept = _saved(path)[PARTS]
            for name, part in self._parts.items():
                load_kept(part, kept[name], name, path.name)

    def load_unlisted(self) -> None:
        """Loads what `begins_anew` has read of the model's own, behind its weights."""
        saved, self._saved_unlisted = self._saved_unlisted, {}
        self._unlisted.load(saved)

    def _checked(self) -> dict[str, dict[str, Any]]:
        kept = kept_of(self._parts)
        for name, part in kept.items():
            kept[name] = loadable(part, f"the state of {name}")
            empty = [path for path, tensor in tensors(part["state"]) if tensor.numel() == 0]
            if empty and int(self._engine.zero_optimization_stage()) == 3:
                raise ValueError(
                    f"the state of {name} has empty tensors ({few(empty)}): of a model that ZeRO-3 has partitioned a "
                    "rank has only its own part; make what you keep of it before deepspeed.initialize, or gather it"
                )
        return kept


def _saved(path: Path) -> Mapping[str, Any]:
    states: Mapping[str, Any] = load(model_states_file(engine_directory(path)), mmap=True)
    return states
