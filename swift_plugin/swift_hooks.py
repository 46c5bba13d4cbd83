"""Makes ms-swift elastic where it can be extended: the class of its trainer, its output directory, its callbacks.

Nothing changes outside ``dlrover-run``, or if ``--callbacks dalsegno`` was not given.
"""

from __future__ import annotations

import functools
import os
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any, ClassVar

import torch
from swift.arguments import SftArguments
from swift.callbacks import callbacks_map
from swift.callbacks.base import TrainerCallback
from swift.pipelines import SwiftSft
from swift.trainers import TrainerFactory

from dalsegno.elastic.training.entry import tell_of_refusals
from dalsegno.protos.contract import Variable

from .hf.checkpoints import is_foreign, trainers
from .hf.data import silenced
from .hf.deepspeed_engine import SIZES
from .hf.options import Options, from_environment, memory_every
from .hf.plain import under_dlrover_run
from .hf.refusals import ADALORA
from .hf.trainer import ElasticTrainer

NAME = "dalsegno"
"""The name for ``--callbacks``."""
# Samples per step that ms-swift aims at if it is not told how many steps to accumulate. (It uses more if one
# micro-batch of all ranks is larger, which would depend on the world.)
_USUAL_BATCH = 16
# Losses that are means over the tokens of answers, or over samples with one label. Others compare within a micro-batch.
_TASKS = ("causal_lm", "seq_cls")
# Losses with one value for each pair of answers; then those with a term that is a mean over the micro-batch's tokens.
_PAIRS, _PAIRS_AND_TOKENS = ("dpo", "rm"), ("orpo", "cpo", "simpo")
_DPO_LOSSES = ("sigmoid", "hinge", "ipo", "robust", "nca_pair", "sppo_hard", "exo_pair", "apo_zero", "apo_down")
_INSTEAD = {"deepspeed_elastic": "changing the world", "graceful_exit": "saving before a node goes"}
# Methods that begin with a decomposition of the base weights, which every start would make anew.
_DECOMPOSED = ("pissa", "olora", "lora-ga")
# Tuners of ms-swift's own, whose checkpoints the Trainer of transformers does not load, with plain ms-swift either.
_NEVER_LOADED = ("adapter", "llamapro", "reft")
# What ms-swift has added to the Trainer's state.
_LAST = "last_model_checkpoint"


class Marker(TrainerCallback):  # type: ignore[misc]  # ms-swift is not typed
    """The callback that ``--callbacks dalsegno`` names. It does nothing: our trainer's class does what it asks for."""


def install() -> None:
    """Installs the hooks; a second call does nothing."""
    if NAME in callbacks_map:
        return
    callbacks_map[NAME] = Marker
    if under_dlrover_run():
        tell_of_refusals()
        _replace(SftArguments, "_init_deepspeed", _init_deepspeed)
        _replace(SftArguments, "_add_version", _add_version)
        _replace(SwiftSft, "_save_trainer_state", _save_trainer_state)
        chosen = TrainerFactory.get_trainer_cls
        TrainerFactory.get_trainer_cls = staticmethod(lambda args: _made_elastic(chosen(args), args))


def _replace(owner: Any, name: str, ours: Any) -> None:
    """Replaces a method by ``ours(original, self, ...)``."""
    original = getattr(owner, name)
    setattr(owner, name, functools.wraps(original)(lambda self, *args, **kwargs: ours(original, self, *args, **kwargs)))


def wanted(args: Any) -> bool:
    """Whether these arguments ask for an elastic run."""
    return NAME in (getattr(args, "callbacks", None) or ())


def _init_deepspeed(original: Any, args: Any) -> None:
    if wanted(args):
        _refuse(args, options_of(args))  # before anything is loaded
        for name, purpose in _INSTEAD.items():
            if name in args.callbacks:
                raise ValueError(f"--callbacks {name}: dalsegno does the {purpose} itself; leave {name} out")
    original(args)
    if wanted(args) and args.deepspeed:
        from dalsegno.elastic import deepspeed

        # Sizes of this world. If the configuration gave them itself, it would be compared with arguments of another
        # world.
        args.deepspeed.update(dict.fromkeys(SIZES, "auto"))
        deepspeed.prepare(args.ddp_backend, timeout=timedelta(seconds=args.ddp_timeout))


def _add_version(original: Any, args: Any) -> None:
    """Uses one directory for all of a run's epochs, not one for each start."""
    if not wanted(args):
        original(args)
        return
    versioned = args.add_version
    if versioned:
        args.output_dir = os.path.join(args.output_dir, f"{os.environ[Variable.JOB_ID]}-{os.environ[Variable.RUN_ID]}")
    args.add_version = False
    original(args)
    args.add_version = versioned


def _save_trainer_state(original: Any, pipeline: Any, trainer: Any) -> Any:
    """Reports the end of the training as ms-swift does, but not if it was drained or a peer died."""
    run = getattr(trainer, "elastic_run", None)
    return original(pipeline, trainer) if run is None or run.finished else {}


def _made_elastic(base: type[Any], args: Any) -> type[Any]:
    if not wanted(args):
        return base
    options = options_of(args)
    _refuse(args, options)
    return type(base.__name__, (_SwiftTrainer, base), {"options": options})


def _refuse(args: Any, options: Options) -> None:
    """Refuses options of ms-swift's own, see `refusals`."""
    rlhf, task = getattr(args, "rlhf_type", None), getattr(args, "task_type", "causal_lm")
    if rlhf is not None and options.stay:
        raise ValueError(f"--stay true (DALSEGNO_STAY=1) with --rlhf_type {rlhf} was never tried: leave it out")
    if str(getattr(args, "init_weights", "")).startswith(_DECOMPOSED):
        raise ValueError(f"--init_weights {args.init_weights} cannot be trained elastically: use another one")
    if getattr(args, "tuner_type", "") == "adalora":
        raise ValueError(f"--tuner_type adalora cannot be trained elastically: {ADALORA}")
    if (tuner := getattr(args, "tuner_type", "")) in _NEVER_LOADED:
        raise ValueError(
            f"--tuner_type {tuner} cannot be trained elastically: ms-swift loads no checkpoint of it; use lora"
        )
    if getattr(args, "use_swift_lora", False):
        raise ValueError(
            "--use_swift_lora cannot be trained elastically: ms-swift loads no checkpoint of it; leave it out"
        )
    if getattr(args, "sequence_parallel_size", 1) > 1:
        raise ValueError("sequence parallelism cannot be trained elastically: leave out --sequence_parallel_size")
    if getattr(args, "tuner_backend", "") == "unsloth":
        raise ValueError("--tuner_backend unsloth, which replaces the training step, was never tried: use peft")
    if getattr(args, "use_ray", False):
        raise ValueError("--use_ray starts the training elsewhere: leave it out, dlrover-run starts it")
    if getattr(args, "lisa_activated_layers", 0):
        raise ValueError(
            "--lisa_activated_layers cannot be trained elastically: each start draws other layers; leave it out"
        )
    if rlhf is None:
        if task not in _TASKS:
            raise ValueError(f"--task_type {task} cannot be trained elastically; what can: {', '.join(_TASKS)}")
        return
    if rlhf not in (*_PAIRS, *_PAIRS_AND_TOKENS):
        can = ", ".join((*_PAIRS, *_PAIRS_AND_TOKENS))
        raise ValueError(f"--rlhf_type {rlhf} cannot be trained elastically; what can: {can}")
    if args.packing:
        raise ValueError(f"--rlhf_type {rlhf} with --packing true cannot be trained elastically: leave out --packing")
    given = getattr(args, "loss_type", None) or ()
    losses = set([given] if isinstance(given, str) else given) if rlhf == "dpo" else set()
    whole = rlhf in _PAIRS_AND_TOKENS or bool(rlhf == "dpo" and getattr(args, "rpo_alpha", None))
    if other := sorted(losses - set(_DPO_LOSSES)):
        raise ValueError(f"--loss_type {other[0]} cannot be trained elastically; what can: {', '.join(_DPO_LOSSES)}")
    if whole and not options.fixed_micro_batch:
        raise ValueError(
            f"--rlhf_type {rlhf} has a term that is a mean over the micro-batch's tokens: add --fixed_micro_batch true "
            "(DALSEGNO_FIXED_MICRO_BATCH=1), so that every world has the same micro-batches"
        )


def options_of(args: Any) -> Options:
    """What the user asked for: by our entry's flags, else by the environment."""
    found = from_environment()
    size = getattr(args, "global_batch_size", None) or found.global_batch_size
    usual = _USUAL_BATCH if size is None and args.gradient_accumulation_steps is None else None
    fixed = bool(getattr(args, "fixed_micro_batch", False)) or found.fixed_micro_batch
    pairs = getattr(args, "rlhf_type", None) is not None
    said = getattr(args, "memory_every", "")
    every = memory_every(said) if said else found.memory_every
    stay = bool(getattr(args, "stay", False)) or found.stay
    return Options(size, fixed, mean_over_samples=pairs, memory_every=every, stay=stay, usual_batch_size=usual)


@contextmanager
def _unchanged(metrics: dict[str, Any]) -> Iterator[None]:
    """What is added to ms-swift's metrics inside is taken back."""
    before = {name: dict(vars(one)) for name, one in metrics.items()}
    yield
    for name in [*metrics]:
        if name in before:
            vars(metrics[name]).update(before[name])
        else:
            del metrics[name]


class _SwiftTrainer(ElasticTrainer):
    """Mixed in before ms-swift's trainers."""

    options: Options
    counting: ClassVar[Mapping[str, tuple[str, ...]]] = {"EarlyStopCallback": ("best_metric", "interval")}

    # No rank had a pair for the micro-batch whose metrics were gathered last.
    _nobodys = False

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        if self.options.mean_over_samples:
            self.accelerator.gather_for_metrics = self._gathered
        self.become_elastic(self.options)

    def renewed(self) -> None:
        super().renewed()
        # As the constructor does.
        self.accelerator.gradient_state.plugin_kwargs["num_steps"] = 1
        self.template.remove_post_encode_hook()
        for metrics in self.custom_metrics.values():
            metrics.clear()

    def _silenced(self, given: Any) -> Any:
        # ms-swift's losses know labels that do not count. A pair has no mean without them.
        return given if self.options.mean_over_samples else silenced(given)

    def _gathered(self, values: torch.Tensor) -> torch.Tensor:
        """What all ranks have of a step's metric, without pairs that are computed once more for want of others.

        From slices whose sizes differ by a pair, which tensors of one shape cannot hold. Collective.
        """
        from swift.rlhf_trainers.dpo_trainer import new_gather_function

        micro = self._run.micro
        own = values if values.ndim else values[None]
        found: torch.Tensor = new_gather_function(own[:0] if micro is not None and micro.filler else own)
        self._nobodys = not len(found)
        return own if self._nobodys else found

    def compute_loss(self, *args: Any, **kwargs: Any) -> Any:
        micro = self._run.micro
        if not (self.options.mean_over_samples and micro is not None and micro.filler):
            return super().compute_loss(*args, **kwargs)
        with _unchanged(self.custom_metrics["train"]):  # a reward model's
            return super().compute_loss(*args, **kwargs)

    def store_metrics(self, metrics: Any, train_eval: str = "train") -> None:
        if not self._nobodys:
            super().store_metrics(metrics, train_eval)

    def _save(self, output_dir: Any = None, state_dict: Any = None) -> None:
        super()._save(output_dir, state_dict)
        with self._kept_errors():
            own = Path(self.args.output_dir) / "args.json"  # ms-swift looks for it beside the checkpoint
            if output_dir is not None and own.is_file() and not (Path(output_dir) / own.name).exists():
                shutil.copyfile(own, Path(output_dir) / own.name)

    def _save_checkpoint(self, *args: Any, **kwargs: Any) -> None:
        told = {name: value for name, value in self.state.__dict__.items() if name == _LAST}
        super()._save_checkpoint(*args, **kwargs)
        if self._run.save_failed:
            self.state.__dict__.pop(_LAST, None)
            self.state.__dict__.update(told)
            return
        # If this step was saved before, ms-swift's own part was not called.
        place = trainers(Path(self.args.output_dir), self.state.global_step)
        self.state.last_model_checkpoint = str(place)
        self.linked(self.state.global_step)

    def linked(self, step: int) -> None:
        place = trainers(Path(self.args.output_dir), step)
        before = self.state.__dict__.get(_LAST)
        # Of what worlds before have saved, the newest comes last.
        if before not in (None, str(place)) or is_foreign(place):
            return
        self.state.last_model_checkpoint = str(place)
        self._update_last_checkpoint_symlink(barrier=False)
        if before is None:
            self.state.__dict__.pop(_LAST)

    def _update_last_checkpoint_symlink(self, barrier: bool = True) -> None:
        # Not during the save: the target does not exist yet, and perhaps not all ranks come to a barrier.
        if self._run.writing is None:
            super()._update_last_checkpoint_symlink(barrier=barrier)
