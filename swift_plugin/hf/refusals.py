"""Refuses what cannot be made elastic, before anything is loaded, and says why and what to do."""

from __future__ import annotations

import sys
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from typing import Any

import transformers
from transformers.trainer_utils import get_last_checkpoint

from dalsegno.elastic.rank.remarks import remark

from .checkpoints import TRAINER_STATE, is_foreign
from .options import Options

# Older versions have one function for the whole training loop, which cannot be entered at its boundaries.
OLDEST = (5, 6)
# Older versions number a process's CPU when they load an optimizer, but torch knows only one CPU.
OLDEST_ON_CPUS = (5, 18)
# Of trl's DPOTrainer.
_OF_A_MICRO_BATCH = frozenset({"aot", "aot_unpaired", "sft"})
# Of trl: a part of their loss is a mean over the tokens of a micro-batch, and what they are given has no labels.
_MEANS_OVER_TOKENS = frozenset({"CPOTrainer", "ORPOTrainer"})
# Callbacks of trl, imported where somebody has one, and the weights that they change at each step and nobody saves.
# (The second one's the reference model may follow.)
_WEIGHTS_ASIDE = {"SyncRefModelCallback": "reference model", "BEMACallback": "average of the weights"}
# Of PEFT's encoders of prompts: what makes prompts of their embedding while they are trained.
_LAYERS_OF_PROMPTS = frozenset({"transform", "mlp_head", "lstm_head"})
# PEFT's beginnings of LoRA that take something off the base weights which another start would not draw or measure
# alike. (PiSSA's and OLoRA's own decompositions come out the same each time.)
_TAKEN_OFF = ("pissa_niter", "lora_ga", "corda")
ADALORA = "what it has learned of how much ranks matter is in no checkpoint; use lora"
_KNOWN = ("dalsegno", "swift", "transformers")
# Optimizers whose steps are those of micro-batches.
_STEP_WITHIN = frozenset({"lomo", "adalomo"})
# What gives out samples.
_SAMPLES = ("get_train_dataloader", "_get_train_sampler", "get_batch_samples")


def refuse(trainer: Any) -> None:
    """Refuses what no change of the world would survive.

    Raises:
        ValueError: The Trainer has such a thing.
        RuntimeError: This version of transformers cannot be used.
    """
    if _version() < OLDEST or not hasattr(trainer, "_run_epoch"):
        raise RuntimeError(
            f"transformers {transformers.__version__} has a training loop that cannot be entered at its steps: "
            f"install transformers>={'.'.join(map(str, OLDEST))}"
        )
    _refuse_first([*_found(trainer), *_unsaved(trainer)])


def refuse_unsaved(trainer: Any) -> None:
    """Refuses what trains and is in no checkpoint: again before the training, because the script may add some.

    Raises:
        ValueError: The Trainer has such a thing.
    """
    _refuse_first(_unsaved(trainer))


def _refuse_first(found: list[tuple[str, str]]) -> None:
    for problem, cure in found:
        raise ValueError(f"{problem}: this cannot be trained elastically; {cure}")


def refuse_losses(trainer: Any, *, fixed_micro_batch: bool) -> None:
    """Refuses losses of trl that depend on which pairs are in a micro-batch together, if that depends on the world.

    Raises:
        ValueError: The Trainer has one.
    """
    classes = _MEANS_OVER_TOKENS.intersection(cls.__name__ for cls in type(trainer).__mro__)
    share = float(getattr(trainer.args, "cpo_alpha", 1.0))
    if classes and share and not fixed_micro_batch:
        raise ValueError(
            f"a part of the loss of {min(classes)} is a mean over the tokens of a micro-batch: give hf.elastic(..., "
            "fixed_micro_batch=True), so that every world has the same micro-batches"
        )
    for name in sorted(_OF_A_MICRO_BATCH.intersection(getattr(trainer, "loss_types", None) or ())):
        if not fixed_micro_batch:
            raise ValueError(
                f"the loss {name} compares the pairs of a micro-batch, or is a mean over its tokens: give hf.elastic("
                "..., fixed_micro_batch=True), so that every world has the same micro-batches"
            )


def refuse_shared_batch(args: Any, options: Options) -> None:
    """Refuses a per-device batch that all ranks share, where the global batch would be made of it and of their number.

    Raises:
        ValueError: It is one, and nobody says how large the global batch is.
    """
    shared = bool(getattr(getattr(args, "accelerator_config", None), "split_batches", False))
    if shared and options.global_batch_size is None and options.usual_batch_size is None:
        raise ValueError(
            "split_batches of accelerator_config: here per_device_train_batch_size is the batch of one rank, so that "
            "the global batch would be that of all ranks together; give hf.elastic(..., global_batch_size=N)"
        )


def refuse_unweighed(micro: Any) -> None:
    """Refuses a step's last micro-batch if nobody has asked for the weight of any loss of the step.

    Raises:
        ValueError: Nobody has.
    """
    if micro.batch is not None and not micro.batch.scaled:
        raise ValueError(
            "training_step computes its loss by itself, so that nothing weighs it, and the gradients would depend on "
            "the number of ranks: call self.compute_loss(model, inputs) in it, or its super()'s"
        )


def refuse_world(trainer: Any, ranks: int) -> None:
    """Refuses what a world of so many ranks would not survive.

    Raises:
        RuntimeError: This version of transformers cannot be used there.
    """
    alone = ranks == 1 or trainer.is_deepspeed_enabled or trainer.args.device.type != "cpu"
    if not alone and _version() < OLDEST_ON_CPUS:
        raise RuntimeError(
            f"transformers {transformers.__version__} cannot load an optimizer on a CPU in several processes: "
            f"install transformers>={'.'.join(map(str, OLDEST_ON_CPUS))}, or use DeepSpeed"
        )


def _version() -> tuple[int, ...]:
    return tuple(int(part) for part in transformers.__version__.split(".")[:2])


def _found(trainer: Any) -> list[tuple[str, str]]:
    args = trainer.args
    found = [(problem, cure) for there, problem, cure in _of_arguments(args) if there]
    if args.n_gpu > 1:
        found.append((f"{args.n_gpu} GPUs in one process", "start one process for each: --nproc-per-node=gpu"))
    if trainer.is_fsdp_enabled:
        found.append(("FSDP", "use DeepSpeed ZeRO or DDP, or write the loop with dalsegno.elastic.Trainer"))
    if trainer.get_tp_size() * trainer.get_cp_size() * trainer.get_sp_size() > 1:
        found.append(("tensor, context or sequence parallelism", "set their sizes to 1"))
    if getattr(getattr(trainer, "template", None), "sequence_parallel_size", 1) > 1:
        found.append(("sequence parallelism", "leave out --sequence_parallel_size"))
    found += [_of_samples(trainer, name, owner) for name in _SAMPLES if (owner := overrides(trainer, name))]
    found += _of_adapters(trainer)
    if trainer.train_dataset is None:
        found.append(("no train_dataset", "give the Trainer one"))
    return found


def _of_adapters(trainer: Any) -> Iterator[tuple[str, str]]:
    """Adapters that are trained, and that no start would make again as the first one has made them."""
    configs: Mapping[str, Any] = getattr(getattr(trainer, "model", None), "peft_config", None) or {}
    # What belongs to an adapter has the adapter's name in its own.
    trained = {part for name, _ in _trained(trainer) for part in name.split(".")} if configs else set()
    for config in (config for name, config in configs.items() if name in trained):
        if str(getattr(config.peft_type, "value", config.peft_type)) == "ADALORA":
            yield "AdaLoRA", ADALORA
        begins = getattr(config, "init_lora_weights", None)
        if str(getattr(begins, "value", begins)).lower().replace("-", "_").startswith(_TAKEN_OFF):
            yield (
                f"init_lora_weights={begins}, for which each start changes the base model in another way",
                "take another one, or save the base model as it is changed and begin with that",
            )


def _of_samples(trainer: Any, name: str, owner: str) -> tuple[str, str]:
    """What to say of a class that gives out samples in its own way."""
    if any(cls.__qualname__ == owner and cls.__module__.startswith("trl.") for cls in type(trainer).__mro__):
        return (
            f"{owner}, which draws or compares samples in its own way",
            "take another trainer of trl (SFT, DPO, reward)",
        )
    return f"{name} of {owner}, which would not be asked for samples", "leave the order to us, or weigh the losses"


def _unsaved(trainer: Any) -> list[tuple[str, str]]:
    """What trains and is in no checkpoint."""
    callbacks = {cls.__name__ for one in trainer.callback_handler.callbacks for cls in type(one).__mro__}
    found = [
        (f"{name}, whose {weights} is in no checkpoint", "leave it out")
        for name, weights in _WEIGHTS_ASIDE.items()
        if name in callbacks
    ]
    if lost := _beside_adapters(trainer):
        found.append(
            (
                f"parameters of the base model that train beside the adapters ({', '.join(lost[:3])}"
                f"{', …' if len(lost) > 3 else ''}), which PEFT saves nowhere",
                "name their modules in modules_to_save of the PEFT config",
            )
        )
    if lost := _in_prompt_encoders(trainer):
        found.append(
            (
                f"a prompt encoder with layers of its own ({lost[0]}{', …' if len(lost) > 1 else ''}), of which PEFT "
                "saves nothing but what it gives out",
                "take prefix tuning without prefix_projection, or prompt tuning in place of P-tuning",
            )
        )
    return found


def _beside_adapters(trainer: Any) -> list[str]:
    """Names of parameters that train and are in none of the files that PEFT writes."""
    model: Any = getattr(trainer, "model", None)  # nothing has wrapped it yet
    adapters = getattr(model, "peft_config", None)
    # DeepSpeed's checkpoints have all that trains. Where the model itself has adapters, transformers saves as it likes.
    if not adapters or trainer.is_deepspeed_enabled or not hasattr(model, "get_base_model"):
        return []
    # What belongs to an adapter has the adapter's name in its own.
    beside = [(name, one) for name, one in _trained(trainer) if not set(adapters).intersection(name.split("."))]
    if not beside:
        return []
    # Whose model it is has been imported; we do without PEFT otherwise.
    state_of = sys.modules["peft"].get_peft_model_state_dict
    files = [state_of(model, adapter_name=name) for name in adapters]
    saved = {tensor.data_ptr() for file in files for tensor in file.values()}
    saved |= {one.data_ptr() for one in _replaced(model)}
    return [name for name, one in beside if one.data_ptr() not in saved]


def _in_prompt_encoders(trainer: Any) -> list[str]:
    """Names of what trains in the layers behind a prompt's embedding, which no file of PEFT has."""
    if trainer.is_deepspeed_enabled or not getattr(getattr(trainer, "model", None), "peft_config", None):
        return []
    of_prompt = [name for name, _ in _trained(trainer) if name.startswith("prompt_encoder.")]
    return [name for name in of_prompt if set(name.split(".")) & _LAYERS_OF_PROMPTS]


def _trained(trainer: Any) -> list[tuple[str, Any]]:
    """The model's parameters that some optimizer trains, with their names. The Trainer's own takes all it can."""
    trained = [(name, one) for name, one in trainer.model.named_parameters() if one.requires_grad]
    if trainer.optimizer is None:
        return trained
    known = {id(one) for group in trainer.optimizer.param_groups for one in group["params"]}
    return [(name, one) for name, one in trained if id(one) in known]


def _replaced(model: Any) -> list[Any]:
    """Parameters that compute nothing, and so never get a gradient: an adapter has a copy of their module."""
    wrapper = sys.modules["peft"].utils.ModulesToSaveWrapper
    wrapped = [(name, one) for name, one in model.named_modules() if isinstance(one, wrapper)]
    aside = tuple(
        f"{name}.original_module." for name, one in wrapped if one.active_adapters and not one.disable_adapters
    )
    named = list(model.named_parameters(remove_duplicate=False))
    # A tied one may compute elsewhere.
    used = {id(one) for name, one in named if not name.startswith(aside)}
    return [one for _, one in named if id(one) not in used]


def overrides(one: Any, name: str, known: Collection[str] = _KNOWN) -> str:
    """The class, of no package in ``known``, that has a method of this name, if any: mostly the user's own."""
    for cls in type(one).__mro__:
        if name in vars(cls) and cls.__module__.partition(".")[0] not in known:
            return cls.__qualname__
    return ""


def _of_arguments(args: Any) -> list[tuple[bool, str, str]]:
    sampling = getattr(args, "train_sampling_strategy", "random")
    optim = getattr(args, "optim", "")
    optim = str(getattr(optim, "value", optim))
    return [
        (
            optim in _STEP_WITHIN,
            f"optim={optim}, which steps in each backward pass, so that the curve would depend on the world",
            "take another optimizer",
        ),
        (bool(args.auto_find_batch_size), "auto_find_batch_size", "set per_device_train_batch_size"),
        (
            bool(args.save_only_model),
            "save_only_model, which saves nothing that a run could go on from",
            "leave it out; checkpoint-<n> has the model's files in any case",
        ),
        (
            bool(getattr(args, "group_by_length", False)) or sampling in ("group_by_length", "batch_rebalance"),
            "samples grouped by length, in an order that depends on the world",
            "leave it out (for ms-swift, --packing true has the same purpose)",
        ),
        (
            bool(getattr(args, "enable_jit_checkpoint", False)),
            "enable_jit_checkpoint, which saves and stops by itself",
            "leave it out: a node that is told to leave is saved by the agent",
        ),
        (
            bool(getattr(args, "use_flash_ckpt", False)),
            "use_flash_ckpt, whose checkpoints are another program's",
            "leave it out",
        ),
        (
            bool(getattr(args, "sync_ref_model", False)),
            "sync_ref_model, whose reference model is in no checkpoint",
            "leave it out",
        ),
        (
            bool(getattr(args, "resume_only_model", False)),
            "resume_only_model",
            "begin with the weights instead: --model, or --adapters",
        ),
    ]


def refuse_other_resume(given: Any, output_dir: Path, *, tells: bool = True) -> None:
    """Refuses a script's resume point if the run has none.

    What ``get_last_checkpoint`` finds of an earlier run's links, behind ``--new-run``, is none: as True it asks for
    whatever there is to resume from. An older one was chosen.

    Args:
        given: What the script gives to ``train()``.
        tells: This process says so.

    Raises:
        ValueError: There is one.
    """
    found = given
    if given is True or (given and _is_last_link(Path(given), output_dir)):
        found = next((path for path in sorted(output_dir.glob("checkpoint-*")) if is_foreign(path)), None)
    if found:
        raise ValueError(
            f"resume_from_checkpoint: {found} is not the run's. Under dlrover-run a run resumes by itself from what it "
            "has saved; to begin with weights that are there already, load them as the model"
        )
    if tells and given and given is not True:
        remark("resume_from_checkpoint: %s is an earlier run's, and is not resumed from: this run begins anew", given)


def _is_last_link(place: Path, output_dir: Path) -> bool:
    """Whether a run has linked its checkpoint there, and no newer one."""
    if place.parent.resolve() != output_dir.resolve() or not (place / TRAINER_STATE).is_symlink():
        return False
    return Path(get_last_checkpoint(str(output_dir)) or "").name == place.name
