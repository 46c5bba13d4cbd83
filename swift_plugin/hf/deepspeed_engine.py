"""DeepSpeed's engine below a Trainer: its configuration for one world, and its optimizer."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .run import ElasticRun

SIZES = ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps")
"""Keys of DeepSpeed's configuration that hold for one world."""


def configure(trainer: Any, run: ElasticRun) -> None:
    """The engine's configuration for this world and resume point, in place of what the arguments had made of it."""
    from dalsegno.elastic import deepspeed
    from dalsegno.elastic.deepspeed.checks import ALLOW

    plugin = trainer.accelerator.state.deepspeed_plugin
    own = plugin.hf_ds_config.config
    run.any_optimizer = bool(own.get(ALLOW))  # the Trainer itself will admit them all
    made = deepspeed.config(own, run.plan, run.session.resume)
    own.clear()
    own.update(made)
    plugin.deepspeed_config = own
    # These were derived when the arguments were those of another world; anything else that is wrong stays wrong.
    config = plugin.hf_ds_config
    config.mismatches = [one for one in config.mismatches if not any(size in one for size in SIZES)]


def check(engine: Any, *, allowed: bool) -> None:
    """Checks the optimizer as DeepSpeed's own guard does, which the Trainer has switched off."""
    from dalsegno.elastic.deepspeed.checks import check_optimizer, tell

    optimizer, scheduled = engine.basic_optimizer, engine.lr_scheduler is not None
    check_optimizer(optimizer, int(engine.zero_optimization_stage()), allowed=allowed, scheduled=scheduled)
    tell(engine)
