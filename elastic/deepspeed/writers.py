"""What an engine's ``save_checkpoint`` writes with: files whose errors wait for its collectives, or no files at all."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from deepspeed.runtime import engine as deepspeed_engine
from deepspeed.runtime.checkpoint_engine.torch_checkpoint_engine import TorchCheckpointEngine

from ..saving.writing import write_files


@contextmanager
def errors_after_collectives(engine: Any) -> Iterator[None]:
    """Lets a rank whose disk is full finish DeepSpeed's barriers, in which the others wait, before it raises.

    Raises:
        OSError: Something could not be written.
    """
    with _with_writer(engine, _DeferringWriter(engine.checkpoint_engine)) as writer:
        yield
    if writer.error is not None:
        raise writer.error


@contextmanager
def collected(engine: Any) -> Iterator[dict[Path, Any]]:
    """Has ``save_checkpoint`` write nothing inside, and keeps what it would write: by path, the engine's tensors.

    Raises:
        ValueError: This engine writes more than what passes its writer, or with another one than DeepSpeed's own.
    """
    problem = why_not_collected(engine)
    if problem is not None:
        raise ValueError(problem)
    with _with_writer(engine, _Collector(engine.checkpoint_engine)) as collector, _unordered(engine):
        yield collector.files


def why_not_collected(engine: Any) -> str | None:
    """Why nobody but the engine itself can write its checkpoints; None: we can."""
    if not _is_plain(engine.checkpoint_engine):
        return f"the engine saves with {type(engine.checkpoint_engine).__name__}, which writes by itself"
    if engine.zero_nvme_offload_optimizer():
        return "the optimizer's state is offloaded to NVMe, which the engine copies by itself"
    return None


def _is_plain(writer: Any) -> bool:
    """It writes a file with ``torch.save``, and does nothing else."""
    # Older versions of DeepSpeed know no other serialization.
    zipped = getattr(writer, "zipfile_serialization", True)
    return type(writer) is TorchCheckpointEngine and zipped and "save" not in vars(writer)


@contextmanager
def _with_writer(engine: Any, writer: Any) -> Iterator[Any]:
    before, copy_script = engine.checkpoint_engine, engine._copy_recovery_script
    engine.checkpoint_engine = writer
    # DeepSpeed would write zero_to_fp32.py beside the checkpoints, under a name without an epoch.
    engine._copy_recovery_script = lambda save_path: None
    try:
        yield writer
    finally:
        engine.checkpoint_engine, engine._copy_recovery_script = before, copy_script


@contextmanager
def _unordered(engine: Any) -> Iterator[None]:
    """Has ranks not wait for each other where no file is written: a barrier costs as much as the copy of a small state.

    DeepSpeed's barriers let no rank write before the directory is there, and none go on before all files are. What it
    compares is the checkpoint's name, which all ranks have from the session.
    """
    comm, compare = deepspeed_engine.dist, engine._checkpoint_tag_validation
    deepspeed_engine.dist = _WithoutBarriers(comm)
    engine._checkpoint_tag_validation = lambda tag: None
    try:
        yield
    finally:
        deepspeed_engine.dist, engine._checkpoint_tag_validation = comm, compare


class _WithoutBarriers:
    """`deepspeed.comm` for the engine's module alone."""

    def __init__(self, inner: Any) -> None:
        self._inner = inner

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    def barrier(self, *_: Any, **__: Any) -> None:
        """Nobody is waited for."""


class _Writer:
    """A checkpoint engine in front of DeepSpeed's own."""

    def __init__(self, inner: Any) -> None:
        self._inner = inner

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)


class _DeferringWriter(_Writer):
    """Keeps its first error instead of raising it in the middle of DeepSpeed's protocol."""

    def __init__(self, inner: Any) -> None:
        super().__init__(inner)
        self.error: Exception | None = None

    def save(self, state_dict: Any, path: str) -> None:
        try:
            if _is_plain(self._inner):  # the same file, summed as it is written
                write_files(Path(path).parent, {Path(path).name: state_dict})
            else:
                self._inner.save(state_dict, path)
        except Exception as error:
            self.error = self.error or error

    def makedirs(self, path: str, exist_ok: bool = False) -> None:
        try:
            self._inner.makedirs(path, exist_ok=exist_ok)
        except Exception as error:
            self.error = self.error or error


class _Collector(_Writer):
    """Writes nothing, and keeps what it is given."""

    def __init__(self, inner: Any) -> None:
        super().__init__(inner)
        self.files: dict[Path, Any] = {}

    def create(self, info: Any) -> None:
        """Nothing begins."""

    def commit(self, info: Any) -> bool:
        """Nothing is there to commit."""
        return True

    def save(self, state_dict: Any, path: str) -> None:
        self.files[Path(path)] = state_dict

    def makedirs(self, path: str, exist_ok: bool = False) -> None:
        """No file needs a directory."""
