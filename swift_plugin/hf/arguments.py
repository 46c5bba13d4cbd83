"""Arguments of the Trainer that determine a training: alike on all ranks, and named where a run resumes with others."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict
from enum import Enum
from typing import Any

from dalsegno.elastic.data.evaluated_alike import known_length
from dalsegno.elastic.rank.remarks import remark

from .options import Options

# Arguments that change the training or its collectives if a rank has another value.
_COMPARED = (
    *("per_device_train_batch_size", "per_device_eval_batch_size", "seed", "data_seed", "dataloader_drop_last"),
    *("train_sampling_strategy", "train_dataloader_shuffle", "max_steps", "num_train_epochs"),
    *("learning_rate", "weight_decay", "max_grad_norm", "warmup_steps"),
    *("save_strategy", "save_steps", "eval_strategy", "eval_steps", "logging_strategy", "logging_steps"),
    *("metric_for_best_model", "greater_is_better", "load_best_model_at_end"),
)
# What determines the curve: the schedule; what an optimizer's saved state says itself; what nobody saves.
_OF_SCHEDULE = ("lr_scheduler_type", "lr_scheduler_kwargs", "warmup_steps")
_OF_OPTIMIZER = ("learning_rate", "weight_decay", "adam_beta1", "adam_beta2", "adam_epsilon")
_OF_A_STEP = ("max_grad_norm", "label_smoothing_factor", "neftune_noise_alpha")
_HYPERPARAMETERS = (*_OF_SCHEDULE, *_OF_OPTIMIZER, *_OF_A_STEP, "optim", "seed")
# Schedules that keep all they know in their state, and those that do not know how many steps there are.
_BY_METRIC = frozenset({"reduce_lr_on_plateau", "greedy"})
_WITHOUT_END = _BY_METRIC | {"constant", "constant_with_warmup", "inverse_sqrt"}
# Whose schedule it is, beside transformers' own.
_SCRIPTS, _DEEPSPEEDS = "the script's", "DeepSpeed's"

# What becomes of another value.
_NEW_SCHEDULE = "behind the next step the learning rate follows the new schedule, from the saved base rate"
_TAKEN_BY_DEEPSPEED = "DeepSpeed's scheduler takes the new value"
_NO_EFFECT = "no effect: the optimizer and its scheduler go on with what was saved"
_AT_ONCE = "the new value counts from the next step on"
_MAY_NOT_FIT = "the new one is given what the other had saved, which may not fit"
_GENERATORS = "random generators go on as saved; if the number of ranks changes, the new seed counts"
_ENDS_THERE = "the run ends there"
_IS_OVER = "the run has made them, and ends"
_WAS_STOPPED = "no effect: the training was stopped at this step"


def alike(trainer: Any, options: Options, strategy: str, *, begins: bool) -> dict[str, Any]:
    """What must be alike on all ranks, by name, see ``Session.compare``.

    Args:
        trainer, options: The Trainer, and what the user asked for.
        strategy: The name that checkpoints give to how it is trained.
        begins: The run has no resume point.
    """
    args, dataset = trainer.args, trainer.train_dataset
    found = {name: getattr(args, name) for name in _COMPARED if hasattr(args, name)}
    if options.global_batch_size is None and begins:
        found["gradient_accumulation_steps"] = args.gradient_accumulation_steps
    return {
        # Enumerations as people write them.
        **{name: str(value.value) if isinstance(value, Enum) else value for name, value in found.items()},
        **asdict(options),
        "strategy": strategy,
        "length of the data set": known_length(dataset),
    }


def hyperparameters(trainer: Any) -> dict[str, Any]:
    """What determines the curve of its training and does not depend on the world: plain values, by argument.

    ``max_steps`` are all steps of the run; ``num_train_epochs`` is None where it does not say how many these are.
    """
    args = trainer.args
    found = {name: _plain(getattr(args, name)) for name in _HYPERPARAMETERS if hasattr(args, name)}
    epochs = None if args.max_steps > 0 else _plain(args.num_train_epochs)
    return {**found, "max_steps": int(trainer.state.max_steps), "num_train_epochs": epochs}


def _plain(value: Any) -> Any:
    """The value as JSON brings it back; what JSON does not know counts by its class alone."""
    if isinstance(value, Enum):
        return str(value.value)
    if value == {}:  # as much as none
        return None
    return json.loads(json.dumps(value, default=lambda one: type(one).__name__))


def say_what_changed(trainer: Any, saved: Mapping[str, Any]) -> None:
    """Remarks on hyperparameters that are not those which the resume point was saved with, before they are used.

    Args:
        trainer: It stands where the run goes on, and has not loaded its optimizer.
        saved: Its `hyperparameters` then; empty: nobody has noted them.
    """
    effects: dict[str, list[str]] = {}
    for text, effect in _changes(trainer, saved, hyperparameters(trainer)):
        effects.setdefault(effect, []).append(text)
    if effects:
        remark(
            "step %d was saved with other arguments of the Trainer: %s",
            trainer.state.global_step,
            "; ".join(f"{', '.join(texts)} ({effect})" for effect, texts in effects.items()),
        )


def _changes(trainer: Any, saved: Mapping[str, Any], now: Mapping[str, Any]) -> list[tuple[str, str]]:
    """Each value that has changed, and what becomes of it."""
    whose, found = _whose_schedule(trainer), []
    if saved.get("max_steps") not in (None, now["max_steps"]):
        by_epochs = None not in (saved["num_train_epochs"], now["num_train_epochs"])
        name = "num_train_epochs" if by_epochs and _differs("num_train_epochs", saved, now) else "max_steps"
        found.append((_was_and_is(name, saved, now), _of_other_steps(trainer, now, whose)))
    if trainer.elastic_run.stopped or trainer.state.global_step >= now["max_steps"]:
        return found  # no step comes that anything else could change
    of_schedule = _effects_on_schedule(whose, saved, now)
    # An optimizer that the script has made does not ask the arguments.
    others = (
        {} if trainer.optimizer is not None else {"optim": _MAY_NOT_FIT, **dict.fromkeys(_OF_OPTIMIZER, _NO_EFFECT)}
    )
    others |= {"seed": _GENERATORS, **dict.fromkeys(_OF_A_STEP, _AT_ONCE)}
    effects = {**others, **of_schedule}
    found += [(_was_and_is(name, saved, now), effects[name]) for name in effects if _differs(name, saved, now)]
    return found


def _whose_schedule(trainer: Any) -> str:
    """Who makes the learning rate's schedule; nothing: the Trainer, of its arguments."""
    if trainer.lr_scheduler is not None and not trainer._created_lr_scheduler:
        return _SCRIPTS
    if trainer.is_deepspeed_enabled:
        config = trainer.accelerator.state.deepspeed_plugin.hf_ds_config.config
        return _DEEPSPEEDS if config.get("scheduler") else ""
    return ""


def _of_other_steps(trainer: Any, now: Mapping[str, Any], whose: str) -> str:
    if trainer.state.global_step >= now["max_steps"]:
        return _IS_OVER
    if trainer.elastic_run.stopped:
        return _WAS_STOPPED
    if whose == _DEEPSPEEDS:
        return _TAKEN_BY_DEEPSPEED
    return _ENDS_THERE if whose == _SCRIPTS or now["lr_scheduler_type"] in _WITHOUT_END else _NEW_SCHEDULE


def _effects_on_schedule(whose: str, saved: Mapping[str, Any], now: Mapping[str, Any]) -> dict[str, str]:
    """By argument that the schedule is made of. transformers' have their functions in no checkpoint."""
    if whose == _SCRIPTS:
        return {}
    if whose == _DEEPSPEEDS:
        return dict.fromkeys(("learning_rate", "warmup_steps"), _TAKEN_BY_DEEPSPEED)
    kinds = {saved.get("lr_scheduler_type"), now["lr_scheduler_type"]}
    if not kinds & _BY_METRIC:
        return dict.fromkeys(_OF_SCHEDULE, _NEW_SCHEDULE)
    return {"lr_scheduler_type": _MAY_NOT_FIT} if len(kinds) > 1 else {"lr_scheduler_kwargs": _NO_EFFECT}


def _differs(name: str, saved: Mapping[str, Any], now: Mapping[str, Any]) -> bool:
    """Whether it is known from both, and not the same."""
    return name in saved and name in now and saved[name] != now[name]


def _was_and_is(name: str, saved: Mapping[str, Any], now: Mapping[str, Any]) -> str:
    return f"{name} was {saved[name]} and is {now[name]}"
