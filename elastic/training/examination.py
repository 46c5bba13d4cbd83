"""Collects what a session learns of its training before the first step, for the user (once) or for `dalsegno doctor`.

Under the doctor (`Variable.DOCTOR` names a file) the findings are written to that file, and the process ends before its
first step. Otherwise they are printed at the beginning of the run.
"""

from __future__ import annotations

import gc
import os
import sys
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dalsegno.protos.contract import Variable

from ..rank.exits import insist
from ..rank.remarks import show
from ..saving.declared import is_engine
from .findings import Facts, findings, kinds_of, loads_anywhere
from .in_forward import ForwardWatch, watch_forward

if TYPE_CHECKING:
    from ..saving.background_save import Background
    from .session import BareSession


class Examined(SystemExit):
    """The doctor has what it wanted. The exit code is 0, whatever the script does with this exception."""

    def __init__(self) -> None:
        super().__init__(0)


def is_examined() -> bool:
    """Whether this process runs only for the doctor."""
    return bool(os.environ.get(Variable.DOCTOR))


def refuse_to_go_on() -> None:
    """Ends the process under the doctor: nothing is trained or written, however often a script tries again.

    Raises:
        Examined: This is the doctor.
    """
    if is_examined():
        insist(0)
        raise Examined


class Examination:
    """What one session has learned of its training.

    Args:
        rank: The session's rank; rank 0 speaks.
        begins: The run begins here, and may go on for more than a few steps: findings are printed.
        world_size, max_world_size, directory: See `Facts`. The doctor examines as for ``dlrover-run``, which has a
            directory and where the world may change.
    """

    def __init__(self, rank: int, begins: bool, world_size: int, max_world_size: int, directory: bool) -> None:
        if is_examined():
            max_world_size, directory = max(world_size + 1, max_world_size), True
        self._speaks, self._begins = rank == 0, begins
        self._facts = Facts(
            world_size=world_size, max_world_size=max_world_size, directory=directory, examined=is_examined()
        )
        self._done = False
        self._model: Any = None
        self._compiled = False
        self._optimizers: list[Any] = []
        self._watches: list[ForwardWatch] = []

    def learn(self, **facts: Any) -> None:
        """Adds facts: fields of `Facts`."""
        self._facts = replace(self._facts, **facts)

    def learn_parts(self, model: Any = None, *optimizers: Any, compiled: bool = False) -> None:
        """A model and its optimizers; None: not known.

        Args:
            model, optimizers: What is trained.
            compiled: The script calls the model through ``torch.compile``, so that its ``forward`` is not looked at.
        """
        self._compiled = self._compiled or compiled
        self._learn_scale(model)
        if model is not None and hasattr(model, "modules"):
            self._model = model
            self.learn(layers=kinds_of(model))
        self._optimizers += [optimizer for optimizer in optimizers if optimizer is not None]
        names = [type(_inner(optimizer)).__name__ for optimizer in optimizers if optimizer is not None]
        self.learn(optimizers=(*self._facts.optimizers, *(n for n in names if n not in self._facts.optimizers)))

    def learn_engine(self, engine: Any) -> None:
        """A DeepSpeed engine that a loop of the script's own trains."""
        self.learn_parts(engine.module, engine.basic_optimizer)
        self._learn_scale(engine)

    def _learn_scale(self, model: Any) -> None:
        asked = [getattr(model, name, None) for name in ("fp16_enabled", "dynamic_loss_scale")]
        if is_engine(model) and all(callable(one) and one() for one in asked):
            self.learn(dynamic_scale=True)

    def learn_left_out(self, schedule: str, lacks: str, cure: str, *, refused: bool) -> None:
        """Adds a schedule that nobody saves: see `Facts`."""
        schedules = tuple(dict.fromkeys((*self._facts.left_out, schedule)))
        self.learn(left_out=schedules, lacks=lacks, belongs=cure, left_out_refused=refused)

    def end(self, step: Callable[[], int] | None = None) -> None:
        """Ends the examination when the ranks have met and the first step would begin.

        Args:
            step: The number of steps that are done; with it what the model's ``forward`` changes is told later.

        Raises:
            Examined: The doctor examines this process, so no step begins.
        """
        if not self._done:
            self._done = True
            if is_examined() and self._facts.strategy == "ddp" and self._facts.world_size > 1:
                self.learn(unwrapped=_is_unwrapped(self._model))
            self._tell([f"{about}: {text}" for about, text in findings(self._facts)])
            # Nothing more is asked of it, and a wrapper belongs to this world alone.
            model, optimizers, self._model, self._optimizers = self._model, self._optimizers, None, []
            changes = max(self._facts.world_size, self._facts.max_world_size) > 1
            if step is not None and model is not None and changes and self._is_told and not self._compiled:
                self._watches = watch_forward(model, optimizers, step)
        refuse_to_go_on()

    def forget(self) -> None:
        """Lets the model go, in whose first steps something was still looked for."""
        for watch in self._watches:
            watch.end()
        self._watches = []

    @property
    def _is_told(self) -> bool:
        """Whether somebody is told at the beginning of a run, and here."""
        return self._speaks and self._begins and not is_examined()

    def _tell(self, lines: list[str]) -> None:
        if not self._speaks:
            return
        if is_examined():
            text = "".join(f"{line}\n" for line in lines)
            Path(os.environ[Variable.DOCTOR]).write_text(text, encoding="utf-8", errors="backslashreplace")
        elif self._begins:
            for line in lines:
                show(line)  # the agent shows what is printed, not what is logged


def learn_loop(
    session: BareSession,
    save: Callable[[Path], None] | Background | None,
    save_every: int,
    options: Mapping[str, Any],
    data: str,
) -> None:
    """Collects what people should know of a loop of `steps` before its first step.

    Args:
        session: The process's.
        save, save_every, options: What it saves with, as ``BareSession.save`` takes it, and how often in steps.
        data: What is known of the data's position.
    """
    strategy, anywhere, cut = options["strategy"], options["any_world_size"], options["cut"]
    session.examination.learn(
        strategy=strategy,
        saves=save is not None,
        save_every=save_every,
        any_world_size=loads_anywhere(strategy) if anywhere is None else anywhere,
        reshards=bool(getattr(save, "reshards", False)),
        data=data,
        fixed_micro_batch=cut is not None and cut.micro_batch_size is not None,
        seeded=cut is not None and cut.seed is not None,
    )
    engine = getattr(save, "engine", None)
    if engine is not None:
        session.examination.learn_engine(engine)
        session.copies.know(engine)


def _is_unwrapped(model: Any) -> bool:
    """Whether nothing in this process is seen to average the model's gradients; False: the model is not known."""
    sharded = ("to_local", "_fsdp_flattened", "ds_tensor")
    if model is None or any(hasattr(parameter, mark) for parameter in model.parameters() for mark in sharded):
        return False
    parallel = sys.modules.get("torch.nn.parallel.distributed")
    kind: Any = None if parallel is None else parallel.DistributedDataParallel
    wrappers = [one for one in gc.get_objects() if kind is not None and issubclass(type(one), kind)]
    inside = {id(parameter) for wrapper in wrappers for parameter in wrapper.parameters()}
    return not any(id(parameter) in inside for parameter in model.parameters())


def _inner(optimizer: Any) -> Any:
    """The user's own optimizer inside a framework's."""
    inner = getattr(optimizer, "optimizer", None)
    return optimizer if inner is None else inner
