"""What an elastic Trainer saves: in which directory, and with which of its errors kept."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar

from dalsegno.elastic.training.unlisted import Unlisted

from . import held
from .run import ElasticRun

if TYPE_CHECKING:
    _Base = Any
else:
    _Base = object


# What Trainers count in themselves: trl's the tokens of a training, for its logs.
_COUNTS = ("_total_train_tokens",)


class SavingTrainer(_Base):  # type: ignore[misc]  # transformers is not typed
    """The part of `trainer.ElasticTrainer` that saves.

    Attributes:
        elastic_run: The run that it belongs to; None until it is elastic.
        unlisted: On rank 0 what the Trainer saves nothing of, from the beginning of the training on.
    """

    elastic_run: ElasticRun | None = None
    unlisted: Unlisted | None = None
    # Callbacks that count something and do not save it: names of their classes, and of the attributes.
    counting: ClassVar[Mapping[str, tuple[str, ...]]] = {}
    # Callbacks, each with the arguments that the script gave it.
    given: Sequence[tuple[Any, Mapping[str, Any]]] = ()

    @property
    def _run(self) -> ElasticRun:
        assert self.elastic_run is not None
        return self.elastic_run

    def remembered(self) -> dict[str, dict[str, Any]]:
        """What the `counting` callbacks have counted."""
        callbacks = {type(callback).__name__: callback for callback in self.callback_handler.callbacks}
        return {
            name: {attribute: getattr(callbacks[name], attribute) for attribute in attributes}
            for name, attributes in self.counting.items()
            if name in callbacks
        }

    def counts(self) -> dict[str, float]:
        """What the Trainer itself has counted, by attribute."""
        found = {name: vars(self)[name] for name in _COUNTS if name in vars(self)}
        return {name: value for name, value in found.items() if type(value) in (int, float)}

    def _save_checkpoint(self, model: Any, trial: Any) -> None:
        if self.unlisted is not None:
            self.unlisted.tell_unsaved()
        if not (self._run.in_memory or self._run.draining):
            self._run.mark(self, save=True)

        def theirs() -> None:
            write = self.state.save_to_json

            def kept(path: str) -> None:
                with self._kept_errors():
                    self.state.stateful_callbacks.update(held.states(self))
                    write(path)

            self.state.save_to_json = kept
            if self.args.should_save:
                held.make_room(self)
            try:
                super(SavingTrainer, self)._save_checkpoint(model, trial)
            finally:
                del self.state.save_to_json

        self._run.save(self, theirs)

    def linked(self, step: int) -> None:
        """What the agents have brought to the disk stands in the output directory."""

    def save_model(self, output_dir: Any = None, _internal_call: bool = False) -> None:
        if self._run.writing is None or not self.is_deepspeed_enabled:
            # Also what a class of the script's own does there, beside `_save`.
            with self._kept_errors():
                super().save_model(output_dir, _internal_call)
            return
        # If the weights cannot be gathered here, it makes the engine save, which comes next in any case.
        engine = self.model_wrapped
        engine.save_checkpoint = functools.wraps(engine.save_checkpoint)(lambda *args, **kwargs: None)
        try:
            with self._kept_errors():
                super().save_model(output_dir, _internal_call)
        finally:
            del engine.save_checkpoint

    def _get_output_dir(self, trial: Any = None) -> str:
        writing = self._run.writing if self.elastic_run is not None else None
        if writing is not None and writing.directory is not None:
            return str(writing.directory)
        return str(super()._get_output_dir(trial))

    def _kept_errors(self) -> Any:
        """Keeps errors in the part of a save that one rank does alone until the others no longer wait for it."""
        writing = self._run.writing
        return contextlib.nullcontext() if writing is None else writing.errors.kept()

    def _save(self, output_dir: Any = None, state_dict: Any = None) -> None:
        with self._kept_errors():
            super()._save(output_dir, state_dict=state_dict)

    def _save_rng_state(self, output_dir: Any) -> None:
        with self._kept_errors():
            super()._save_rng_state(output_dir)

    def _save_scaler(self, output_dir: Any) -> None:
        with self._kept_errors():
            super()._save_scaler(output_dir)

    def _push_from_checkpoint(self, checkpoint_folder: Any) -> None:
        # Behind a leave's save the process ends, and with it what it would upload.
        if self._run.in_memory or self._run.draining:
            return
        with self._kept_errors():
            super()._push_from_checkpoint(checkpoint_folder)

    def _save_optimizer_and_scheduler(self, output_dir: Any) -> None:
        with self._kept_errors():
            if not self.is_deepspeed_enabled:
                super()._save_optimizer_and_scheduler(output_dir)
                return
            from dalsegno.elastic.deepspeed import saved_by_trainer

            kept = None if self._run.writing is None else self._run.writing.kept
            with saved_by_trainer(self.model_wrapped, None if kept is None else kept.put_file):
                super()._save_optimizer_and_scheduler(output_dir)
