"""What happens at the boundaries of a Trainer's steps, as the Trainer tells a callback of them."""

from __future__ import annotations

from typing import Any

from transformers import TrainerCallback

from dalsegno.elastic.rank.agreement import Refusal
from dalsegno.elastic.rank.exchange import MAX_STEPS_APART

from .evaluating import check_held_out
from .run import STOPS, ElasticRun


class Boundaries(TrainerCallback):  # type: ignore[misc]  # transformers is not typed
    """Lets all ranks of a run agree at the boundaries of the Trainer's steps.

    Its ``on_epoch_end`` raises Refusal where a callback ends a data epoch before its last step and another follows, or
    the training on some ranks only.

    Args:
        trainer: The Trainer.
    """

    def __init__(self, trainer: Any) -> None:
        self._trainer = trainer

    @property
    def _run(self) -> ElasticRun:
        """The present world's."""
        run: ElasticRun = self._trainer.elastic_run
        return run

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._run.learn(self._trainer, kwargs.get("model"), kwargs.get("optimizer"))
        check_held_out(self._trainer)
        self._run.session.meet(_ahead(state) + 1, self._run.loader.alike)
        self._run.watch(self._trainer)

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._run.session.begin_step(_ahead(state))

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._run.stepping()

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        boundary = self._run.stepped()
        # At the end there is nothing to drain: the remaining work is what a drain would have to do.
        control.should_save = control.should_save or boundary.save
        self._stop_with_the_last_epoch(state, control)
        drain = boundary.drain and not boundary.end
        if drain:
            # A callback may have decided it on one rank alone, which would not come to the others' save.
            self._run.session.compare({STOPS: control.should_training_stop})
        self._run.draining = drain and not control.should_training_stop

    def on_epoch_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._stop_with_the_last_epoch(state, control)
        position, endless = self._run.loader.position, self._run.loader.endless
        if control.should_epoch_stop and not control.should_training_stop and position.samples and not endless:
            raise Refusal(
                f"a callback ends data epoch {position.data_epoch} at its sample {position.samples} "
                "(should_epoch_stop): this cannot be trained elastically; set should_training_stop, or leave it out"
            )
        if control.should_training_stop:
            self._run.session.check_ends()
        self._run.epoch_ended = True

    def _stop_with_the_last_epoch(self, state: Any, control: Any) -> None:
        """Whoever ends the last data epoch ends the training: a checkpoint has to say so, or a resume would go on."""
        if control.should_epoch_stop and self._run.loader.position.samples and not self._run.loader.endless:
            last = self._run.loader.position.data_epoch + 1 >= state.num_train_epochs
            control.should_training_stop = control.should_training_stop or last

    def on_prediction_step(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._run.predicted()

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **kwargs: Any) -> None:
        if logs and "loss" in logs:
            self._run.session.report(float(logs["loss"]))


def _ahead(state: Any) -> int:
    """Number of steps that every rank has after the one that begins."""
    return max(0, min(MAX_STEPS_APART, int(state.max_steps) - int(state.global_step) - 1))
