"""The order of samples and the batch plan, in the form that Hugging Face's training loop expects."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from transformers.loss.loss_utils import LOSS_MAPPING, ForCausalLMLoss

from dalsegno.elastic import Batch, Batches, BatchPlan, ElasticSampler, Order, Position
from dalsegno.elastic.checkpoint import Cut
from dalsegno.elastic.data.evaluated_alike import known_length
from dalsegno.elastic.data.fetching import is_iterable
from dalsegno.elastic.rank.agreement import Refusal

IGNORED = -100
"""The label that no loss counts."""
_LABELS = ("labels", "shift_labels")
# In the names of models that generate and whose loss is of their own, and shifts nothing.
_UNSHIFTED = ("XLNet", "XLM", "Flaubert", "ForCTC", "ForRNNT")


class StepLoader:
    """Takes the place of the Trainer's DataLoader: yields the steps of one data epoch, from the run's position.

    One iteration of the data goes on from one data epoch to the next, so nothing that was fetched ahead is lost.

    Args:
        batches: The run's data.
        dataset: The data set in which the Trainer counts examples.
        accumulation: Micro-batches per step, the unit in which the Trainer counts lengths.
        per_data_epoch: Number of steps in a data epoch; None: not known.
    """

    def __init__(self, batches: Batches[Any], dataset: Any, accumulation: int, per_data_epoch: int | None) -> None:
        self.dataset = dataset
        self._batches, self._accumulation, self._per_data_epoch = batches, accumulation, per_data_epoch
        self._steps: Iterator[Batch[Any]] | None = None

    @property
    def position(self) -> Position:
        """The training's position in the data."""
        return self._batches.position

    @property
    def order(self) -> Order:
        """The order of samples, for the manifests of checkpoints."""
        return self._batches.order

    @property
    def cut(self) -> Cut:
        """How batches become gradients, for the manifests of checkpoints."""
        return self._batches.cut

    @property
    def alike(self) -> dict[str, Any]:
        """What must be alike on all ranks, by name, for ``Session.compare``."""
        return self._batches.alike

    @property
    def endless(self) -> bool:
        """Whether the data set has no length, and so no end that the Trainer would see."""
        return self._per_data_epoch is None

    @property
    def epoch_is_over(self) -> bool:
        """Whether the last computed step is a data epoch's last one."""
        return not self.endless and self.position.samples == 0

    def __len__(self) -> int:
        if self._per_data_epoch is None:
            raise TypeError("a data set without a length")
        return self._per_data_epoch * self._accumulation

    def set_epoch(self, epoch: int) -> None:
        """Called when the Trainer begins a data epoch.

        Raises:
            RuntimeError: The run is in another data epoch.
        """
        position = self.position
        if self._per_data_epoch is not None and epoch != position.data_epoch:
            raise RuntimeError(
                f"the Trainer begins data epoch {epoch}, and the run stands at sample {position.samples} of data epoch "
                f"{position.data_epoch}"
            )

    def __iter__(self) -> Iterator[Batch[Any]]:
        if self._steps is None:
            self._steps = iter(self._batches)
        for batch in self._steps:
            yield batch
            if self._per_data_epoch is not None and batch.position_after.samples == 0:
                return

    def close(self) -> None:
        """Ends the processes that fetch data."""
        self._steps = None


def make(trainer: Any, plan: BatchPlan, session: Any, *, by_samples: bool) -> StepLoader:
    """The loader of a Trainer in this world, at the session's resume point.

    Args:
        trainer: The constructed Trainer.
        plan: Which rank computes what.
        session: This process's session.
        by_samples: Weigh a slice by its samples; otherwise by its labels.

    Raises:
        ValueError: The resume point is of another order of samples, or the data set has no whole batch.
    """
    args, dataset = trainer.args, repeatable(trainer.train_dataset)
    length = known_length(dataset)
    sampler = ElasticSampler(
        length,
        plan.global_batch_size,
        seed=args.seed if args.data_seed is None else args.data_seed,
        shuffle=not is_iterable(dataset) and _shuffled(args),
        drop_last=args.dataloader_drop_last,
    )
    collate = trainer.data_collator
    table = sys.modules.get("datasets")  # not everybody has this package
    if table is not None and isinstance(dataset, table.Dataset):
        dataset = trainer._remove_unused_columns(dataset, description="training")
    else:
        collate = trainer._get_collator_with_removed_columns(collate, description="training")
    batches = Batches(
        dataset,
        sampler,
        plan,
        session.rank,
        collate=collate,
        resume=session.resume,
        seed=args.seed,
        count_tokens=None if by_samples else _counting(trainer),
        reduce=None if by_samples else session.sum,
        loader_options=_loader_options(args),
    )
    return StepLoader(
        batches, trainer.train_dataset, plan.accumulation, None if length is None else sampler.batches_per_data_epoch
    )


def _counting(trainer: Any) -> Callable[[Any], int]:
    """`count_labels` for this Trainer."""
    names: list[str] = getattr(trainer.args, "label_names", None) or []
    return functools.partial(count_labels, shifted=_shifts_labels(trainer), name=names[0] if len(names) == 1 else "")


def count_labels(inputs: Any, *, shifted: bool, name: str = "") -> int:
    """The number over which the mean loss of a micro-batch is taken: its labels that count, or else its samples.

    Args:
        inputs: What the data collator made.
        shifted: The model predicts each label from earlier positions, so the first position has none.
        name: Of the labels, if the model does not call them so: then it is not the model that shifts them.

    Raises:
        Refusal: There is nothing in them that could be counted.
    """
    if name not in ("", *_LABELS) and isinstance(named := inputs.get(name), torch.Tensor):
        return int(named.ne(IGNORED).sum())
    ready, labels = inputs.get("shift_labels"), inputs.get("labels")
    if isinstance(ready, torch.Tensor):
        return int(ready.ne(IGNORED).sum())
    if isinstance(labels, torch.Tensor):
        return int((labels[..., 1:] if shifted and labels.dim() > 1 else labels).ne(IGNORED).sum())
    lengths = [len(value) for value in inputs.values() if hasattr(value, "__len__")]
    if not lengths:
        raise Refusal(
            "a batch has nothing in it that the model takes, for the Trainer drops what is no argument of the model's "
            "forward(), and those of torch.compile(model) it cannot see: give it the model itself, and torch_compile="
            "True in TrainingArguments; or else compare the columns of the data set with forward()'s arguments"
        )
    return max(lengths)


def _shifts_labels(trainer: Any) -> bool:
    """Whether the model's loss predicts each label from earlier positions: as transformers 5.19 says it of a Trainer.

    Earlier versions do not say it, or say it of encoder-decoders too, whose labels all count. All say it of no model
    whose name tells no loss, as GPT2LMHeadModel: those that generate take that of causal models.
    """
    model = trainer.model.get_base_model() if hasattr(trainer.model, "get_base_model") else trainer.model
    if getattr(getattr(model, "config", None), "is_encoder_decoder", False):
        return False
    kind = getattr(model, "loss_type", None)
    if kind in LOSS_MAPPING:
        return LOSS_MAPPING[kind] is ForCausalLMLoss
    generates = hasattr(model, "can_generate") and bool(model.can_generate())
    return generates and not any(part in type(model).__name__ for part in _UNSHIFTED)


def _shuffled(args: Any) -> bool:
    return bool(getattr(args, "train_dataloader_shuffle", True)) and _strategy(args) != "sequential"


def _strategy(args: Any) -> str:
    return str(getattr(args, "train_sampling_strategy", "random"))


def _loader_options(args: Any) -> dict[str, Any]:
    options: dict[str, Any] = {"num_workers": args.dataloader_num_workers, "pin_memory": args.dataloader_pin_memory}
    if args.dataloader_num_workers:
        options["persistent_workers"] = args.dataloader_persistent_workers
        options["prefetch_factor"] = args.dataloader_prefetch_factor
        options["multiprocessing_context"] = getattr(args, "dataloader_multiprocessing_context", None)
    return options


def silenced(inputs: Any) -> Any:
    """The same inputs without any token that counts, for a slice that repeats another one's sample.

    Raises:
        TypeError: They are no dictionary.
    """
    if not isinstance(inputs, Mapping):
        raise TypeError(f"the data collator made {type(inputs).__name__}, a dictionary was expected")
    return {
        key: torch.full_like(value, IGNORED) if key in _LABELS and isinstance(value, torch.Tensor) else value
        for key, value in inputs.items()
    }


class _Repeatable(torch.utils.data.Dataset[Any]):
    """ms-swift's ``LazyLLMDataset``, changed so that the substitute for a bad sample depends on the sample alone.

    In the original it depends on how many samples this process has substituted before, and so on the world.
    """

    def __init__(self, lazy: Any) -> None:
        self._lazy = lazy

    def __getitem__(self, index: int) -> Any:
        self._lazy._idx = index % len(self._lazy)
        return self._lazy[index]

    def __len__(self) -> int:
        return len(self._lazy)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or name == "_lazy":
            raise AttributeError(name)
        return getattr(self._lazy, name)


def repeatable(dataset: Any) -> Any:
    """``dataset``, or one that always returns the same sample for an index, whatever was asked for before."""
    substitutes = hasattr(dataset, "_idx_list") and hasattr(dataset, "_idx")
    if substitutes:
        return _Repeatable(dataset)
    inner = getattr(dataset, "dataset", None)
    if hasattr(dataset, "packed_idx") and hasattr(inner, "_idx_list"):
        dataset.dataset = _Repeatable(inner)
    return dataset
