"""A DeepSpeed engine in a loop of one's own: its configuration for the present world, and what the loop is given."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from .. import deepspeed as ours
from ..data.batches import Batches
from ..data.plan import BatchPlan
from ..deepspeed.beside import BesideEngine
from ..deepspeed.making import send_nothing
from ..deepspeed.others import EngineWatch
from ..deepspeed.saving import Save
from ..rank.remarks import remark
from ..saving.background_save import background
from ..training.left_schedules import LeftSchedules, optimizers_of
from ..training.parts import Stateful
from ..training.session import BareSession
from .micros import Micros
from .state import Write

LEFT_OUT = "dalsegno_left_out"
"""Key of the client's state: where schedules stood that nobody saves."""
_OPTIMIZER = "the engine's optimizer"
_SIZES = {"train_batch_size": "global_batch", "train_micro_batch_size_per_gpu": "micro_batch"}


def config_for(session: BareSession, config: Mapping[str, Any] | str | Path, data: Batches[Any]) -> dict[str, Any]:
    """DeepSpeed's configuration for the present world, see ``Session.deepspeed_config``."""
    base = _read(config) if isinstance(config, str | Path) else config
    if not isinstance(base, Mapping):
        raise ValueError(f"a DeepSpeed config is a dictionary or the path of a JSON file, not a {type(base).__name__}")
    plan = data.plan
    for key, value in zip(_SIZES, (plan.global_batch_size, plan.max_micro_batch_size), strict=True):
        if base.get(key, "auto") not in ("auto", value):
            raise ValueError(
                f"the DeepSpeed config has {key} {base[key]}, and s.data has {_SIZES[key]}={value}: leave {key} out"
            )
    ours.prepare()
    made = ours.config(base, plan, session.resume)
    if session.resume is not None:
        send_nothing(made)  # s.engine loads it.
    return made


def _read(path: str | Path) -> Any:
    try:
        return json.loads(Path(path).read_text(encoding="utf-8"))
    except json.JSONDecodeError as error:
        raise ValueError(f"the DeepSpeed config {path} is no JSON: {error}") from error


class Engine:
    """An engine, loaded. Made by ``Session.engine``.

    Args:
        session: This process's session.
        engine: From ``deepspeed.initialize(..., config=s.deepspeed_config(...))``.
        other_schedule, weights_only: See ``Session.engine``.
        parts: What else is trained, by name; see ``beside.BesideEngine``.

    Raises:
        ValueError, TypeError, RuntimeError, OSError: See ``elastic.deepspeed.restore``.

    Attributes:
        engine: The engine.
        scale: What the factors of micro-batches are made for.
    """

    scale = "deepspeed"

    def __init__(
        self,
        session: BareSession,
        engine: Any,
        *,
        other_schedule: bool = False,
        weights_only: bool = False,
        **parts: Stateful | None,
    ) -> None:
        with session.meetings.telling():
            beside = BesideEngine(engine, parts)
        resumed = None
        if session.resume is None:
            ours.restore(engine, None)
        else:
            with session.resume.loading() as resume:
                if beside.begins_anew(resume, weights_only=weights_only):
                    ours.restore_weights(engine, resume)
                else:
                    resumed = ours.restore(engine, resume, other_schedule=other_schedule)
                    beside.load(resume)
                beside.load_unlisted()
        self.engine = engine
        self._save = EngineSave(session, engine, beside)
        if resumed is not None:
            self._save.resumes(resumed)
        self._micros: Micros | None = None
        if session.rank == 0:
            EngineWatch(self, engine)

    def begin(self, data: Batches[Any]) -> Micros:
        """See ``state.Trained``."""
        check_sizes(self.engine, data.plan)
        self._micros = self._micros or Micros(self.engine)
        return self._micros

    def saving(self, *, beside: bool) -> Write:
        """See ``state.Trained``."""
        return background(self._save) if beside else self._save


class EngineSave(Save):
    """Saves an engine and what a script has given beside it: all that is saved, so schedules can be missing there.

    Args:
        session: This process's session.
        engine: From ``deepspeed.initialize``.
        beside: The parts.
    """

    def __init__(self, session: BareSession, engine: Any, beside: BesideEngine) -> None:
        super().__init__(engine, self._state)
        self._beside = beside
        self._schedules = LeftSchedules(
            session.examination,
            "was given neither to deepspeed.initialize nor to s.engine",
            "give it to deepspeed.initialize(..., lr_scheduler=...), whose engine steps it, or to s.engine(engine, "
            "schedule=...)",
            remark if session.rank == 0 else _unsaid,
        )

    def resumes(self, state: Mapping[str, Any]) -> None:
        """Notes what was saved of such schedules, as the engine has just been loaded.

        Args:
            state: The ``client_state`` that was saved.
        """
        if hasattr(self.engine.optimizer, "param_groups"):
            self._schedules.resumes(_OPTIMIZER, self.engine.optimizer, state.get(LEFT_OUT))

    def rehearse(self) -> None:
        """See ``rehearsal.rehearse``."""
        known = [self.engine.lr_scheduler, *self._beside.parts.values()]
        self._schedules.look(_OPTIMIZER, optimizers_of(self.engine), known)

    def _state(self) -> dict[str, Any]:
        places = self._schedules.places().get(_OPTIMIZER)
        return {**self._beside.state(), **({} if places is None else {LEFT_OUT: places})}


def _unsaid(text: str, *values: object) -> None:
    """Rank 0 says it."""


def check_sizes(engine: Any, plan: BatchPlan) -> None:
    """Checks that the engine was made for this plan.

    Raises:
        ValueError: It divides or counts otherwise.
    """
    has = (int(engine.train_micro_batch_size_per_gpu()), int(engine.gradient_accumulation_steps()))
    if has != (plan.micro_batch_size, plan.accumulation):
        raise ValueError(
            f"the engine was made for {has[1]} micro-batches of {has[0]} in a step, and these data have "
            f"{plan.accumulation} of {plan.micro_batch_size}: deepspeed.initialize(config=s.deepspeed_config(config, "
            "data)) with the data that the loop gets"
        )
