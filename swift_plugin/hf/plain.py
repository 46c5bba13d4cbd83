"""A plain Hugging Face ``Trainer`` made elastic: one line before ``train()``.

    trainer = Trainer(model=model, args=args, train_dataset=dataset)
    elastic(trainer)
    trainer.train()

Under ``dlrover-run`` its world may change size between any two steps: the global batch, the order of samples and the
loss curve stay those of an undisturbed run. Elsewhere the Trainer stays as it is. See ``docs/ms-swift.md``.
"""

from __future__ import annotations

import os
from datetime import timedelta
from typing import Any, TypeVar

from dalsegno.elastic.rank.gloo_threads import settle_at_exit
from dalsegno.elastic.rank.way_in import watch
from dalsegno.elastic.training.examination import is_examined
from dalsegno.protos.contract import Variable

from .options import Options

T = TypeVar("T")
# From here on, because ranks may meet before elastic() is called.
watch()


def under_dlrover_run() -> bool:
    """Whether an agent started this process, or ``dalsegno doctor``, which examines it as if one had."""
    return bool(os.environ.get(Variable.SOCKET)) or is_examined()


def prepare(backend: str | None = None, *, timeout: timedelta | None = None) -> None:
    """For DeepSpeed on a CPU, before ``TrainingArguments``: starts ``torch.distributed`` without a compiler.

    Args:
        backend: As ``ddp_backend``; None: the accelerator's.
        timeout: As ``ddp_timeout``, for collectives; None: DeepSpeed's default.
    """
    if under_dlrover_run():
        from dalsegno.elastic import deepspeed

        deepspeed.prepare(backend, timeout=timeout)


def elastic(
    trainer: T,
    *,
    global_batch_size: int | None = None,
    fixed_micro_batch: bool = False,
    mean_over_samples: bool = False,
    memory_every: int | str = 0,
    stay: bool = False,
) -> T:
    """Makes a Trainer elastic, in place. Call it once the Trainer is constructed.

    Args:
        trainer: A ``transformers.Trainer``, or one of a class derived from it.
        global_batch_size: Samples per optimizer step over all ranks. Default: what the Trainer's own arguments give in
            the largest world that the job may have. ``per_device_train_batch_size`` is the most samples of one forward
            pass.
        fixed_micro_batch: Cut every global batch into the same micro-batches at every world size. Then the curve also
            stays the same with dropout, and with losses that depend on the micro-batch as a whole.
        mean_over_samples: The loss that the model or ``compute_loss`` returns is a mean over the samples. Default: over
            the labels that count (not -100), which is the same if each sample has one label.
        memory_every: Steps between saves to the nodes' memory, beside the Trainer's own (``docs/memory.md``);
            ``"auto"``: as often as slows the training by less than 2 %; 0: none. Nobody is told of them.
        stay: At a change of the world, and where it can behind a crash, this process stays, with its model and its
            optimizer. With DDP only; ``docs/ms-swift.md`` says what the script promises then.

    Returns:
        The same Trainer.

    Raises:
        ValueError: It cannot be trained elastically. The message says why and what to do.
    """
    options = Options(global_batch_size, fixed_micro_batch, mean_over_samples, memory_every, stay)
    if under_dlrover_run():
        from dalsegno.elastic.training.entry import tell_of_refusals

        from .trainer import ElasticTrainer, elastic_class

        tell_of_refusals()
        if isinstance(trainer, ElasticTrainer):
            raise ValueError("this Trainer is elastic already: call elastic() once")
        changed: Any = trainer
        changed.__class__ = elastic_class(type(trainer))
        changed.become_elastic(options)
    else:
        settle_at_exit()
    return trainer
