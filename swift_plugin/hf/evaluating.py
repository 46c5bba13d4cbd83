"""A Trainer's evaluation: whether ranks have the same data, its signs of life, and what it changes before its end.

The run that goes on from there does all of it again.
"""

from __future__ import annotations

import copy
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any

import transformers.trainer as upstream
from torch.utils.data import IterableDataset

from dalsegno.elastic.data.evaluated_alike import LENGTH, compare
from dalsegno.elastic.rank import rng

from .held import counted, exportable, same
from .refusals import overrides

__all__ = ["Alive", "Compared", "Evaluation", "check_alike", "check_held_out"]

# Packages whose evaluations deal one data set to all ranks.
_DEALERS = ("dalsegno", "swift", "transformers", "trl")

# Between two signs of life, and the most that they come for where nothing is heard of the evaluation itself: a rank
# that hangs in one is found to be stuck then. Collectives mostly end by themselves before (`ddp_timeout`).
SIGN_SECONDS, MOST_SECONDS = 2.0, 3600.0


def check_alike(trainer: Any, loader: Any) -> None:
    """Compares what the ranks are about to evaluate. Collective over the default group; nothing where it is one rank.

    Each rank's loader deals the samples by itself, and each batch is followed by collectives. What is compared is what
    such loaders are made of; rank 0 may also read for all, or a script make a loader of its own for each rank.

    Args:
        trainer: It is about to evaluate.
        loader: This rank's loader.

    Raises:
        Unlike, Refusal: ValueErrors: other lengths, or one cannot be had. On all ranks.
        Trouble: A RuntimeError: the latter, where another start may succeed. On all ranks.
    """

    def tell() -> dict[str, Any]:
        dealt = getattr(loader, "batch_sampler", None)
        # Accelerate's, or ms-swift's.
        if type(dealt).__name__ != "BatchSamplerShard":
            return {}
        return {LENGTH: len(loader.dataset), "batch_size": getattr(dealt, "batch_size", None)}

    compare(tell, trainer.args.device)


class Compared(upstream.Trainer):  # type: ignore[misc]  # transformers is not typed
    """Right before transformers' own Trainer: a class of a script's that never comes here may meet nobody."""

    def evaluation_loop(self, dataloader: Any, *args: Any, **kwargs: Any) -> Any:
        check_alike(self, dataloader)
        return super().evaluation_loop(dataloader, *args, **kwargs)


def check_held_out(trainer: Any) -> None:
    """Compares what is known of the evaluations before a training, which would be for nothing. Collective.

    Args:
        trainer: It is about to train.

    Raises:
        Unlike, Refusal, Trouble: See `check_alike`. On all ranks.
    """
    if trainer.args.world_size > 1:
        compare(lambda: _known_before(trainer), trainer.args.device)


def _known_before(trainer: Any) -> dict[str, Any]:
    args, given = trainer.args, trainer.eval_dataset
    config = getattr(trainer.accelerator, "dataloader_config", None)
    by_rank_0 = getattr(config, "dispatch_batches", None)
    own = any(overrides(trainer, name, _DEALERS) for name in ("evaluate", "evaluation_loop", "get_eval_dataloader"))
    if args.eval_strategy == "no" or by_rank_0 or own:
        return {}
    told: dict[str, Any] = {"batch size of evaluations": args.eval_batch_size}
    for name, dataset in given.items() if isinstance(given, dict) else [("", given)]:
        if not isinstance(dataset, str | IterableDataset) and hasattr(dataset, "__len__"):
            told[f"{LENGTH} {name}".strip()] = len(dataset)
    return told


class Alive:
    """Signs of life of a rank that is busy with something of the Trainer's or the script's, which calls nobody.

    Metrics of an evaluation, what callbacks do behind it, or a model that is sent to a hub, may take longer than steps.

    Args:
        busy: Tells the agent; thread-safe, and never waits.
    """

    def __init__(self, busy: Callable[[], None]) -> None:
        self._busy = busy
        self._heard_at = 0.0

    def sign(self) -> None:
        """It gets on."""
        self._heard_at = time.monotonic()
        self._busy()

    @contextmanager
    def under_way(self) -> Iterator[None]:
        """Inside, it is busy."""
        over = threading.Event()
        self._heard_at = time.monotonic()
        try:
            with suppress(RuntimeError):  # The system gives no more threads: there are no signs, and nothing else.
                threading.Thread(target=self._say, args=(over,), name="dalsegno-alive", daemon=True).start()
            yield
        finally:
            over.set()

    def _say(self, over: threading.Event) -> None:
        while not over.wait(SIGN_SECONDS) and time.monotonic() < self._heard_at + MOST_SECONDS:
            self._busy()


class Evaluation:
    """One that is under way. Of several sets one may be done and told of, or a callback predicts behind the last one.

    Args:
        trainer: It is about to evaluate.
    """

    def __init__(self, trainer: Any) -> None:
        self._trainer = trainer
        self._logs, self._stops = len(trainer.state.log_history), trainer.control.should_training_stop
        self._counted = list[tuple[Any, dict[str, Any]]]()
        for one in exportable(trainer):
            # Somebody's own may fail when it is asked, or hold what cannot be copied: it is left as it is then.
            with suppress(Exception):
                if one is trainer.control:
                    continue
                self._counted.append((one, copy.deepcopy(counted(one))))
        self._others = copy.deepcopy(trainer.remembered())
        # Each pass over a loader draws its seed from torch's: what is drawn behind the evaluation would be another one.
        self._generators = rng.taken()

    def undo(self) -> None:
        """It is to be made as a whole: what was logged, counted and drawn of it is taken back."""
        rng.restore(rng.encoded(self._generators))
        state, control = self._trainer.state, self._trainer.control
        del state.log_history[self._logs :]
        control.should_training_stop, control.should_evaluate = self._stops, True
        for callback, attributes in self._counted:
            now = dict[str, Any]()
            with suppress(Exception):
                now = counted(callback)
            for name, value in attributes.items():
                # What cannot be set stays: the save that comes next is worth more.
                with suppress(Exception):
                    if name not in now or not same(now[name], value):
                        setattr(callback, name, value)
        for callback in self._trainer.callback_handler.callbacks:
            vars(callback).update(self._others.get(type(callback).__name__, {}))
