"""What an evaluation has changed before it is over. The run that goes on from there does all of it again."""

from __future__ import annotations

import copy
from typing import Any

from .held import counted, exportable

__all__ = ["Evaluation"]


class Evaluation:
    """One that is under way. Of several sets one may be done and told of, or a callback predicts behind the last one.

    Args:
        trainer: It is about to evaluate.
    """

    def __init__(self, trainer: Any) -> None:
        self._trainer = trainer
        self._logs, self._stops = len(trainer.state.log_history), trainer.control.should_training_stop
        callbacks = [one for one in exportable(trainer) if one is not trainer.control]
        self._counted = [(one, copy.deepcopy(counted(one))) for one in callbacks]
        self._others = copy.deepcopy(trainer.remembered())

    def undo(self) -> None:
        """It is to be made as a whole: what was logged and counted of it is taken back."""
        state, control = self._trainer.state, self._trainer.control
        del state.log_history[self._logs :]
        control.should_training_stop, control.should_evaluate = self._stops, True
        for callback, attributes in self._counted:
            for name, value in attributes.items():
                setattr(callback, name, value)
        for callback in self._trainer.callback_handler.callbacks:
            vars(callback).update(self._others.get(type(callback).__name__, {}))
