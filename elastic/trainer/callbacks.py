"""What a `Trainer` calls: callbacks on every rank, loggers on rank 0, and the console output."""

from __future__ import annotations

import math
import sys
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, TextIO

from ..saving.replicas import loadable

if TYPE_CHECKING:
    from ..data.batch import Batch
    from .trainer import Trainer


class Logger(Protocol):
    """Called on rank 0 with named numbers of a step.

    If it has ``close()``, that is called when `Trainer.fit` ends. With ``stay`` also when this process is rank 0 no
    more; it may become rank 0 once again, and then calls it again.
    """

    def __call__(self, step: int, values: Mapping[str, float]) -> None: ...


class Callback:
    """A callback: override what you need. Every method is called on all ranks at the same steps.

    An exception ends the training. To end it early, call ``trainer.stop()``.

    Attributes:
        key: Tells callbacks of one class apart in checkpoints if their constructor arguments do not.
    """

    key: str = ""

    def on_fit_begin(self, trainer: Trainer) -> None:
        """The run is loaded; ``trainer.step`` is where it resumes."""

    def on_step(self, trainer: Trainer, batch: Batch[Any]) -> None:
        """An optimizer step is done."""

    def on_log(self, trainer: Trainer, values: Mapping[str, float]) -> None:
        """Called every ``log_every`` steps with ``loss``, ``lr`` and what else is known."""

    def on_evaluation(self, trainer: Trainer, metrics: Mapping[str, float]) -> None:
        """An evaluation is done."""

    def on_fit_end(self, trainer: Trainer) -> None:
        """`Trainer.fit` is left, because the training ended, the run was drained, or something failed.

        Behind an error this rank may be alone, so this method should not wait for the others (a collective).
        """

    def state_dict(self) -> dict[str, Any]:
        """What is saved in checkpoints: plain values and tensors, alike on all ranks.

        Rank 0's state is saved. Under DDP only rank 0 is asked, so this method must not call a collective; with
        ``memory_every`` each rank is asked at each step, and one that fails saves nothing after a crash. Under FSDP and
        DeepSpeed all ranks are asked, at the same step, and may gather sharded values. It is also called once before
        the first step.
        """
        return {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """The inverse, called on a resume; not called if the checkpoint has no state of this class."""


def forgetful(callbacks: Iterable[Callback]) -> tuple[str, ...]:
    """Classes of the callbacks that have state but save none of it."""
    kept = Callback.state_dict
    return tuple(type(one).__name__ for one in callbacks if vars(one) and type(one).state_dict is kept)


def states_of(callbacks: Mapping[str, Callback]) -> dict[str, Any]:
    """The callbacks' states by name.

    Raises:
        TypeError, ValueError: A callback has no state, or one that could not be loaded again. The message names it.
        RuntimeError: A callback failed for a reason that may not be a mistake.
    """
    return {name: _state_of(name, one) for name, one in callbacks.items()}


def _state_of(name: str, callback: Callback) -> dict[str, Any]:
    what = f"the state of the callback {name}"
    try:
        state = callback.state_dict()
    except (OSError, MemoryError):
        raise
    except Exception as error:
        kind = RuntimeError if isinstance(error, RuntimeError) else TypeError
        raise kind(f"{what} cannot be had: {type(error).__name__}: {error}") from error
    return loadable(state, what) if state else state


class EarlyStopping(Callback):
    """Ends the training when a metric has not become better for some evaluations.

    Args:
        metric: Its name among the evaluation's.
        patience: The number of evaluations in a row without an improvement that ends the training. A value that is
            not finite is none.
        mode: ``"min"`` or ``"max"``: what is better.
        min_delta: How much better a value must be at least.

    Raises:
        ValueError: ``mode`` is something else, or ``patience`` is below 1.
    """

    def __init__(self, metric: str, *, patience: int = 3, mode: str = "min", min_delta: float = 0.0) -> None:
        if mode not in ("min", "max") or patience < 1:
            raise ValueError(f"mode is 'min' or 'max' and patience at least 1, not {mode!r} and {patience}")
        self._metric, self._patience, self._min_delta = metric, patience, min_delta
        self._sign = 1.0 if mode == "min" else -1.0
        self._best: float | None = None
        self._worse = 0

    def on_fit_begin(self, trainer: Trainer) -> None:
        if self._worse >= self._patience:  # the run was started again after this had ended it
            trainer.stop()

    def on_evaluation(self, trainer: Trainer, metrics: Mapping[str, float]) -> None:
        if self._metric not in metrics:
            raise ValueError(f"the evaluation has no {self._metric!r}, only {', '.join(sorted(metrics)) or 'nothing'}")
        value = self._sign * metrics[self._metric]
        # Nothing compares with a NaN: it would stay the best.
        if math.isfinite(value) and (self._best is None or value < self._best - self._min_delta):
            self._best, self._worse = value, 0
            return
        self._worse += 1
        if self._worse >= self._patience:
            trainer.stop()

    def state_dict(self) -> dict[str, Any]:
        return {"best": self._best, "worse": self._worse}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        best, self._worse = state["best"], state["worse"]
        self._best = best if best is not None and math.isfinite(best) else None  # earlier versions kept it


class Console(Callback):
    """A progress bar on a terminal, a line for each log elsewhere; on rank 0 only.

    Args:
        stream: Default: standard output, which ``dlrover-run`` shows.
    """

    def __init__(self, stream: TextIO | None = None) -> None:
        self._stream = stream
        self._bar: Any = None
        self._task: Any = None

    def on_fit_begin(self, trainer: Trainer) -> None:
        stream = self._stream or sys.stdout
        if trainer.rank != 0 or not stream.isatty():
            return
        from rich.console import Console as Terminal
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

        text = TextColumn("{task.description}", markup=False)
        terminal = Terminal(file=stream, highlight=False)
        self._bar = Progress(BarColumn(), MofNCompleteColumn(), TimeRemainingColumn(), text, console=terminal)
        self._bar.start()
        self._task = self._bar.add_task("", total=trainer.max_steps, completed=trainer.step)

    def on_step(self, trainer: Trainer, batch: Batch[Any]) -> None:
        if self._bar is not None:
            self._bar.update(self._task, completed=trainer.step)

    def on_log(self, trainer: Trainer, values: Mapping[str, float]) -> None:
        self._say(trainer, values)

    def on_evaluation(self, trainer: Trainer, metrics: Mapping[str, float]) -> None:
        self._say(trainer, metrics, line=True)

    def on_fit_end(self, trainer: Trainer) -> None:
        if self._bar is not None:
            self._bar.stop()
            self._bar = None

    def _say(self, trainer: Trainer, values: Mapping[str, float], *, line: bool = False) -> None:
        if trainer.rank != 0:
            return
        text = "  ".join(f"{name} {value:.4g}" for name, value in values.items())
        of = "" if trainer.max_steps is None else f"/{trainer.max_steps}"
        if self._bar is None:
            print(f"step {trainer.step}{of}: {text}", file=self._stream or sys.stdout, flush=True)
        elif line:
            self._bar.print(f"step {trainer.step}: {text}", markup=False)
        else:
            self._bar.update(self._task, description=text)


class TensorBoard:
    """A logger that writes event files. Needs the package ``tensorboard`` (extra ``log``).

    Args:
        directory: The directory for the files.
    """

    def __init__(self, directory: str | Path) -> None:
        self._directory = directory
        self._writer: Any = None
        _require("torch.utils.tensorboard", "tensorboard")

    def __call__(self, step: int, values: Mapping[str, float]) -> None:
        if self._writer is None:
            from torch.utils.tensorboard import SummaryWriter

            # After a crash the run goes back, and what was logged from here on is no longer part of it.
            self._writer = SummaryWriter(str(self._directory), purge_step=step)
        for name, value in values.items():
            self._writer.add_scalar(name, value, step)

    def close(self) -> None:
        """Writes out what is buffered."""
        if self._writer is not None:
            self._writer.close()
            self._writer = None


class WeightsAndBiases:
    """A logger for Weights & Biases. Needs the package ``wandb`` (extra ``log``).

    Args:
        options: For ``wandb.init``. Give ``id`` as well, so that a resumed run continues the same one.
    """

    def __init__(self, **options: Any) -> None:
        self._options = {"resume": "allow", **options}
        self._run: Any = None
        _require("wandb", "wandb")

    def __call__(self, step: int, values: Mapping[str, float]) -> None:
        if self._run is None:
            import wandb

            self._run = wandb.init(**self._options)
        self._run.log(dict(values), step=step)

    def close(self) -> None:
        """Ends the run at Weights & Biases."""
        if self._run is not None:
            self._run.finish()
            self._run = None


def _require(module: str, package: str) -> None:
    """Fails when the script starts, not at the first log."""
    import importlib

    try:
        importlib.import_module(module)
    except ImportError as error:
        raise ImportError(f"the package {package} is missing: pip install 'dalsegno[log]'") from error
