"""Whether a Trainer's save may be written in the background: nobody may look for its files before they are there."""

from __future__ import annotations

import sys
from typing import Any

from transformers import TrainerCallback

from . import refusals

# What of a Trainer writes its checkpoints, and packages where that is known to be all.
_KNOWN = ("dalsegno", "swift", "transformers", "peft", "trl", "modelscope")
_WRITING = (
    *("_save_checkpoint", "save_model", "_save", "_save_optimizer_and_scheduler", "_save_rng_state", "_save_scaler"),
    *("_save_model", "_save_converted_model"),  # ms-swift's
)


def writes_as_known(trainer: Any) -> bool:
    """Whether nobody reads back what was written in the same save, which somebody else's class might do."""
    args, model = trainer.args, trainer.model
    # Files of torch are written at once, so weights in one would be waited for in any case.
    if not getattr(args, "safe_serialization", True) or getattr(args, "save_safetensors", True) is False:
        return False
    template = getattr(trainer, "template", None)
    beside = [
        *(getattr(trainer, "processing_class", None), getattr(trainer.data_collator, "tokenizer", None)),
        *(
            model,
            getattr(model, "_orig_mod", None),
            getattr(model, "config", None),
            getattr(template, "processor", None),
        ),
    ]
    methods = [(trainer, name) for name in _WRITING] + [(one, "save_pretrained") for one in beside if one is not None]
    if any(refusals.overrides(one, name, _KNOWN) or name in getattr(one, "__dict__", ()) for one, name in methods):
        return False
    tuners = getattr(sys.modules.get("swift.tuner_plugin"), "tuners_map", {})
    if getattr(args, "tuner_type", None) in tuners or hasattr(template, "save_callback"):
        return False
    if not trainer.is_deepspeed_enabled:
        return True
    from dalsegno.elastic.deepspeed.writers import why_not_collected

    return why_not_collected(trainer.model_wrapped) is None


def nobody_looks(trainer: Any) -> bool:
    """Whether no callback is told of a save, which might look for it at once, and no hub gets it."""
    told = [one for one in trainer.callback_handler.callbacks if type(one).__name__ not in trainer.counting]
    return not trainer.args.push_to_hub and all(type(one).on_save is TrainerCallback.on_save for one in told)
