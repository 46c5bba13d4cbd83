"""A Hugging Face ``Trainer`` whose world changes size: the class that is put in front of its own, and why.

The Trainer keeps its loop, its losses, its logs, evaluations and callbacks. This class replaces where its data come
from (`data`), what a slice of a step counts, where it saves to and resumes from (`checkpoints`), and what happens
between two steps (`run`).
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
import transformers.trainer as upstream

from dalsegno.elastic import session
from dalsegno.elastic.rank.agreement import Refusal, Trouble
from dalsegno.elastic.rank.remarks import show
from dalsegno.elastic.rank.way_in import TRAINS, way_in
from dalsegno.elastic.saving.optimizers import check_kept
from dalsegno.elastic.trainer.strategies import resume_rates
from dalsegno.elastic.training import wrappers
from dalsegno.elastic.training.accumulation import has_static_graph, synchronised
from dalsegno.elastic.training.bounds import check_steps
from dalsegno.elastic.training.reading_state import load_part, read_tensors
from dalsegno.elastic.training.saves import BEHIND_THE_LAST
from dalsegno.elastic.training.sending import send_what_differs
from dalsegno.elastic.training.staying import none_stays
from dalsegno.elastic.training.unlisted import Unlisted
from dalsegno.protos.trace import mark

from . import data, deepspeed_engine, held, refusals, staying, uneven
from .arguments import hyperparameters, say_what_changed
from .boundaries import Boundaries
from .checkpoints import Unfinished
from .evaluating import Compared, Evaluation
from .options import Options
from .replaced import replaced, undivided
from .run import ElasticRun, Leaving, strategy_of
from .saving import SavingTrainer

# The arguments of `_run_epoch` that `_maybe_log_save_evaluate` needs.
_OF_AN_EPOCH = ("model", "trial", "epoch", "ignore_keys_for_eval", "start_time")


class ElasticTrainer(SavingTrainer):
    """Mixed in before a Trainer's class by `elastic_class`.

    Attributes:
        staying: How its process goes from world to world; None: it ends with each.
    """

    staying: staying.Worlds | None = None
    # The one that is under way, or that somebody's leave has ended.
    _evaluation: Evaluation | None = None
    control: Any  # the Trainer's, as the next one
    optimizer: Any
    lr_scheduler: Any

    def become_elastic(self, options: Options) -> None:
        """Called once, when the Trainer is constructed.

        Raises:
            ValueError: It cannot be trained elastically, or the run's resume point is not its own.
            RuntimeError: This version of transformers cannot do it.
        """
        refusals.refuse(self)
        refusals.refuse_losses(self, fixed_micro_batch=options.fixed_micro_batch)
        if options.stay:
            # Before this process asks for its session, which would then be one of the script's own.
            staying.refuse(self, strategy_of(self))
            self.staying = staying.Worlds(self, functools.partial(self._begin, options))
        if session().resume is None:
            refusals.refuse_shared_batch(self.args, options)
        refusals.refuse_world(self, session().max_world_size)
        self._begin(options)
        self.add_callback(Boundaries(self))

    def _begin(self, options: Options) -> None:
        """Becomes elastic in the world that this process has now. Collective."""
        with way_in.by_us():
            run = ElasticRun(self, session(), options)
        args, plan = self.args, run.plan
        self.elastic_run = run
        run.link_earlier()
        args.gradient_accumulation_steps = plan.accumulation
        args.ignore_data_skip = False
        # A slice's mean is weighed by its part of the step; ms-swift would also multiply it by the number of ranks.
        args.average_tokens_across_devices = False
        # There is one directory for all nodes.
        args.save_on_each_node = False
        if run.session.resume is not None:
            args.eval_on_start = False
        if self.is_deepspeed_enabled:
            deepspeed_engine.configure(self, run)
        if self.staying is not None:
            self.staying.begun(run.session)

    # Resuming.

    def train(self, resume_from_checkpoint: Any = None, trial: Any = None, **kwargs: Any) -> Any:
        run = self._run
        if trial is not None:
            raise ValueError("a hyperparameter search is many runs: this cannot be trained elastically")
        if run.session.resume is None:
            refusals.refuse_other_resume(resume_from_checkpoint, run.output_dir, tells=run.session.rank == 0)
        refusals.refuse_unsaved(self)
        held.note_given(self)
        del run
        way_in.at(TRAINS)
        if self.staying is not None and none_stays("train()", made_anew=True):
            self.staying.end_with_this_world()
            self.staying = None
        found = self._train(kwargs) if self.staying is None else self.staying.train(lambda: self._train(kwargs))
        self._run.finish()
        return found

    def _train(self, options: Mapping[str, Any]) -> Any:
        if self._run.session.resume is not None:
            held.check_seen(self._run.session.resume)
        return super().train(resume_from_checkpoint=self._run.resume_directory, **options)

    def renewed(self) -> None:
        """This process has stayed, and its arguments and accelerate are as if it were new."""

    def _init_training_state(self, *args: Any, **kwargs: Any) -> tuple[int, int]:
        found: tuple[int, int] = super()._init_training_state(*args, **kwargs)
        run = self._run
        run.hyperparameters = hyperparameters(self)
        if run.session.resume is None:
            return found
        run.unfinished = Unfinished.read(run.session.resume.path)
        if self.state.global_step != run.session.step:
            raise ValueError(
                f"{run.session.resume.ref.name} is of step {run.session.step}, and its trainer_state.json of step "
                f"{self.state.global_step}"
            )
        if not run.stopped:  # such a one ends where it stands, whatever the number is
            check_steps(run.session, self.state.max_steps)
        if run.session.rank == 0:
            say_what_changed(self, run.unfinished.hyperparameters)
        return found if run.loader.endless else run.place

    def _load_callback_state(self) -> None:
        """Loads what callbacks have counted, such as early stopping, because a change of the world is no new training.

        It is loaded into the existing callbacks. The Trainer would replace them by new ones if it restored any.
        """
        for one, saved in held.saved_states(self):
            if one is self.control:
                self._run.stopped = bool(saved.get("args", {}).get("should_training_stop"))
                continue
            if (passed := held.load(one, saved)) and self._run.session.rank == 0:
                show(f"{type(one).__name__}: {', '.join(passed)} cannot be set as it was saved, and begins anew")

    def create_optimizer(self, *args: Any, **kwargs: Any) -> Any:
        return self.optimizer if self._keeps(self.optimizer) else super().create_optimizer(*args, **kwargs)

    def create_scheduler(self, *args: Any, **kwargs: Any) -> Any:
        return self.lr_scheduler if self._keeps(self.lr_scheduler) else super().create_scheduler(*args, **kwargs)

    def _keeps(self, made: Any) -> bool:
        return self.staying is not None and self.staying.stayed and made is not None

    def _prepare_for_training(self, *args: Any, **kwargs: Any) -> Any:
        if not self.is_deepspeed_enabled:
            # An evaluation before has it marked as prepared, and accelerate would then train it without a wrapper.
            self.model.__dict__.pop("_is_accelerate_prepared", None)
        with replaced("deepspeed_load_checkpoint", self._load_engine):
            prepared = super()._prepare_for_training(*args, **kwargs)
        if self.is_deepspeed_enabled:
            deepspeed_engine.check(self.model_wrapped, allowed=self._run.any_optimizer)
        else:
            wrappers.tell(self.model_wrapped, ())
            check_kept(getattr(self.optimizer, "optimizer", self.optimizer), self.model)
        if self.staying is not None:
            self.staying.wrapped()
        self.unlisted = Unlisted(self.model) if self._run.session.rank == 0 else None
        scheduler, resumes = self.lr_scheduler, self._run.session.resume is not None
        # Elsewhere the optimizer has loaded its rates, also one that a callback has set behind the scheduler's back.
        if self.is_deepspeed_enabled and resumes and isinstance(scheduler, torch.optim.lr_scheduler.LRScheduler):
            resume_rates(self.optimizer, scheduler)
        return prepared

    def _load_from_checkpoint(self, *args: Any, **kwargs: Any) -> None:
        mark("built")
        if self.staying is None or not self.staying.keeps_weights:
            super()._load_from_checkpoint(*args, **kwargs)
        send_what_differs(self.model)  # all ranks have loaded the same

    def _load_optimizer_and_scheduler(self, checkpoint: Any) -> None:
        files = [Path(checkpoint or "", name) for name in (upstream.OPTIMIZER_NAME, upstream.SCHEDULER_NAME)]
        if self.loads_as_known and checkpoint is not None and all(file.is_file() for file in files):
            optimizer, scheduler = files
            if not self._keeps(self.optimizer):
                # In less than half of the time: nothing is copied more than once.
                load_part(getattr(self.optimizer, "optimizer", self.optimizer), read_tensors(optimizer))
            self.lr_scheduler.load_state_dict(torch.load(scheduler, weights_only=True))
        else:
            super()._load_optimizer_and_scheduler(checkpoint)
        mark("loaded")

    @property
    def loads_as_known(self) -> bool:
        """Whether nobody else has a say in how the optimizer is loaded."""
        return self._run.strategy == "ddp" and not refusals.overrides(self, "_load_optimizer_and_scheduler")

    def _load_engine(self, engine: Any, path: str, load_module_strict: bool = True) -> None:
        from dalsegno.elastic.deepspeed import restore

        restore(engine, self._run.session.resume, strict=load_module_strict)

    def _load_rng_state(self, checkpoint: Any) -> None:
        """Does nothing: the Trainer restores them after the first batch, we do it before anything draws."""

    def _load_best_model(self) -> None:
        if not self.is_deepspeed_enabled:
            super()._load_best_model()
            return
        from dalsegno.elastic.deepspeed import load_weights

        load_weights(self.model_wrapped, Path(self.state.best_model_checkpoint))

    # Data.

    def get_train_dataloader(self, *args: Any, **kwargs: Any) -> Any:
        return self._run.loader

    def get_total_train_batch_size(self, *args: Any, **kwargs: Any) -> int:
        """Samples of one step over all ranks, for the log: the Trainer's own product takes micro-batches for full."""
        return self._run.plan.global_batch_size

    def _run_epoch(self, *args: Any, **kwargs: Any) -> Any:
        run = self._run
        if run.unfinished is not None:
            run.session.restore_rng(self.args.seed)
            self._see_to(run.unfinished, **{name: kwargs[name] for name in _OF_AN_EPOCH})
        if run.stopped or self.control.should_training_stop or self.state.global_step >= self.state.max_steps:
            self.control.should_training_stop = True
            return None
        run.epoch_ended = False
        skip = upstream.skip_first_batches

        def stands_there(loader: Any, count: int = 0) -> Any:
            return loader if loader is run.loader else skip(loader, count)

        with replaced("skip_first_batches", stands_there):
            return super()._run_epoch(*args, **kwargs)

    def get_batch_samples(self, epoch_iterator: Any, num_batches: int, device: Any) -> tuple[list[Any], None]:
        batch = next(epoch_iterator, None)
        if batch is None:
            return [], None
        self._run.take(batch)
        # No number of items is given: each slice returns its own mean, which we weigh. Models use that number
        # differently, and many ignore it.
        return [self._silenced(given) if cut.filler else given for cut, given in batch.cut], None

    def _silenced(self, given: Any) -> Any:
        """A repeated sample as it is. If a loss is a mean over samples, it may need real labels."""
        return given if self._run.by_samples else data.silenced(given)

    # The loss of a slice.

    def training_step(self, model: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
        run = self._run
        micro = run.next_micro()
        # The slice's factor makes it a part of the step's mean, so nothing is left to divide by.
        self.current_gradient_accumulation_steps = 1
        if micro.silent:
            micro.zero_gradients(model.parameters())
        first = run.batch is not None and run.batch.handed_out == 1
        # The Trainer defers all but the last; see `Accumulation`.
        late = first and has_static_graph(model)
        if self.staying is not None:
            # Until the optimizer's step: what follows the last backward pass may be left, too.
            run.session.survivor.anywhere = True
        late_or_not = synchronised(model) if late else contextlib.nullcontext()
        with uneven.gathered(self.accelerator), late_or_not, undivided(self.args):
            loss = super().training_step(model, inputs, *args, **kwargs)
        run.computed()
        return loss

    def compute_loss(
        self, model: Any, inputs: Any, return_outputs: bool = False, num_items_in_batch: Any = None, **kwargs: Any
    ) -> Any:
        micro = self._run.micro
        items = num_items_in_batch if micro is None else None
        found = super().compute_loss(model, inputs, return_outputs=return_outputs, num_items_in_batch=items, **kwargs)
        if micro is None:  # it is an evaluation's
            return found
        loss, *outputs = found if return_outputs else (found,)
        loss = micro.scale(loss)
        return (loss, *outputs) if return_outputs else loss

    # The boundary of a step.

    def _maybe_log_save_evaluate(
        self, tr_loss: Any, grad_norm: Any, model: Any, trial: Any, *args: Any, **kwargs: Any
    ) -> None:
        ours, run, control = (tr_loss, grad_norm, model, trial), self._run, self.control
        said = {"grad_norm": grad_norm, "learning_rate": kwargs.get("learning_rate")}
        run.of_step = {name: value for name, value in said.items() if value is not None}
        self._evaluation = None
        if not (control.should_log and self.state.global_step > self._globalstep_last_logged):
            # A log belongs to this process: callbacks may want what they have noted of its steps.
            run.mark(self, evaluation=control.should_evaluate, save=control.should_save)
        drains, done = run.draining, False
        while not done:
            if run.draining:
                self._drain(*ours, *args, **kwargs)
                # The save failed: the run goes on, and the next boundary tries again, or the evaluation does.
            try:
                with run.interruptible():
                    super()._maybe_log_save_evaluate(*ours, *args, **kwargs)
                done = True
            except (Refusal, Trouble):
                # All ranks have raised it: they evaluate other data. What was trained is worth more.
                if self._evaluation is not None:
                    run.save_to_disk(lambda: self._save_owing(*ours, *args, **kwargs))
                raise
            except Leaving:
                # An evaluation takes longer than a notice. What was to be logged before it is logged, once.
                run.draining = drains = True
        if not drains:
            self._remember(model, trial)
            run.mark(self)
            run.look()

    def _evaluate(self, *args: Any, **kwargs: Any) -> Any:
        if self._run.micro is None and self.state.global_step == self._run.session.step:
            self._run.mark(self, evaluation=True, save=self.control.should_save)
        self._evaluation = Evaluation(self)
        with self._run.alive.under_way():
            found = super()._evaluate(*args, **kwargs)
        self._evaluation = None
        return found

    def _remember(self, model: Any, trial: Any) -> None:
        """To memory, now and then; not what the Trainer has saved, or is about to as its last or its best."""
        state, control = self.state, self.control
        saved = control.should_save or control.should_training_stop or state.best_global_step == state.global_step
        told = {name: value for name, value in state.__dict__.items() if name == "last_model_checkpoint"}  # ms-swift's
        stops, step = control.should_training_stop, state.global_step
        self._run.remember(step, lambda: self._save_checkpoint(model, trial), saved=saved, stops=stops)
        state.__dict__.pop("last_model_checkpoint", None)
        state.__dict__.update(told)

    def _drain(self, tr_loss: Any, grad_norm: Any, model: Any, trial: Any, *args: Any, **kwargs: Any) -> None:
        """Saves and leaves; returns if the save failed."""
        due = self._save_owing(tr_loss, grad_norm, model, trial, *args, **kwargs)
        self._run.leave()
        self.control.should_evaluate, self.control.should_save = due

    def _save_owing(
        self, tr_loss: Any, grad_norm: Any, model: Any, trial: Any, *args: Any, **kwargs: Any
    ) -> tuple[bool, bool]:
        """Saves. The run that resumes here evaluates, and reports a due save; returns whether these were due."""
        run, control = self._run, self.control
        if self._evaluation is not None:
            self._evaluation.undo()
        due = control.should_evaluate, control.should_save
        control.should_evaluate = control.should_save = False
        super()._maybe_log_save_evaluate(tr_loss, grad_norm, model, trial, *args, **kwargs)
        run.unfinished = Unfinished(evaluation=due[0], tell_of_save=due[1], untold=due[1])
        self._save_checkpoint(model, trial)
        run.unfinished = None
        return due

    def _finalize_training(self, trial: Any, num_train_samples: Any, start_time: Any) -> Any:
        self._check_end()
        if self._run.unfinished is not None:  # the run had ended there, and nobody was told
            where = {"epoch": int(self.state.epoch or 0), "trial": trial, "start_time": start_time}
            self._see_to(self._run.unfinished, model=self.model_wrapped, ignore_keys_for_eval=None, **where)
        # Done now, because next the best model's weights may replace those of the last step.
        saves = self.args.save_strategy != "no"
        self._run.save_at_last(lambda: self._save_checkpoint(self.model_wrapped, trial), saves=saves)
        with self._run.alive.under_way():
            return super()._finalize_training(trial, num_train_samples, start_time)

    def _check_end(self) -> None:
        """Whether the training is over on all ranks, and all have trained the same. Collective, as no step follows.

        Raises:
            Refusal: Another rank goes on.
            Unlike: The ranks have not read the same of a stream. On all ranks.
        """
        # A callback behind ours may have decided it on one rank alone, which would not come to the others' step.
        self._run.session.check_ends()
        if self._run.loader.endless and not self._run.session.meetings.over:
            # Saves compare it, too, but not every run saves, and this one would count as finished.
            self._run.session.settle()
            self._run.session.compare({BEHIND_THE_LAST: asdict(self._run.loader.position)})

    def _see_to(self, unfinished: Unfinished, **of_epoch: Any) -> None:
        """Does what the processes that saved the resume point had no time for."""
        run = self._run
        run.unfinished = None
        self._tr_loss += unfinished.loss
        self._total_loss_scalar -= unfinished.loss  # the mean over this start's steps must contain only these
        self._globalstep_last_logged = unfinished.logged
        self.__dict__.update({name: value for name, value in unfinished.counts.items() if name in vars(self)})
        counting = [one for one in self.callback_handler.callbacks if type(one).__name__ in unfinished.callbacks]
        for callback in counting:
            vars(callback).update(unfinished.callbacks[type(callback).__name__])
        best, on_disk, said = self.state.best_global_step, run.is_on_disk, dict(unfinished.of_step)
        norm = said.pop("grad_norm", None)
        self.control.should_evaluate = unfinished.evaluation
        run.evaluates_late = unfinished.evaluation and on_disk
        owes = unfinished.untold and not on_disk
        self.control.should_save = owes
        self._maybe_log_save_evaluate(self._tr_loss, norm, **of_epoch, **said)
        if unfinished.untold and on_disk:
            self.control = self.callback_handler.on_save(self.args, self.state, self.control)
        elif unfinished.tell_of_save and not owes:  # That save has told all.
            for callback in counting:
                callback.on_save(self.args, self.state, self.control)
        if unfinished.epoch_end or (unfinished.may_end and self.control.should_training_stop):
            self.control = self.callback_handler.on_epoch_end(self.args, self.state, self.control)
            run.evaluates_late |= on_disk and self.control.should_evaluate and self.control.should_save
            self._maybe_log_save_evaluate(self._tr_loss, norm, **of_epoch, **said)
        if on_disk and self.state.best_global_step != best and self.state.best_global_step == self.state.global_step:
            run.session.measured(self.state.best_metric)
            self.state.best_model_checkpoint = run.resume_directory


def elastic_class(base: type[Any]) -> type[Any]:
    """``base`` made elastic."""
    # transformers' own has nothing before it where its loop is reached, and cannot stand before its own subclass.
    bases = (ElasticTrainer, Compared) if base is upstream.Trainer else (ElasticTrainer, base, Compared)
    return type(base.__name__, bases, {"__module__": base.__module__})
