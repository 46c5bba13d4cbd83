"""Writes DeepSpeed's universal files straight from memory-mapped shards.

Every value is read once and written once; memory is one parameter's state per thread. The files are those that
``ds_to_universal`` makes, tensor by tensor (``zero/<name>/<state>.pt``, ``step.pt``, ``zero/optimizer_state.pt``,
model states), and load with a stock DeepSpeed. Two differences in what they weigh: stage 3's ``optimizer_state.pt``
leaves out rank 0's own partition, which DeepSpeed's converter copies and its loader never reads; and model states are
linked, not copied.
"""

from __future__ import annotations

import io
import os
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import FIRST_EXCEPTION, Future, ThreadPoolExecutor, wait
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType
from typing import Any, BinaryIO, cast

import torch
import xxhash
from torch import Tensor

from dalsegno.elastic.checkpoint import FileEntry

from .check import OPTIMIZER_STATE, ZERO, check_weights, unpartitioned
from .journal import Journal, place
from .source import FP32, Parameter, Source

THREADS = 2
SYNC_THREADS = 4
# What one write takes at most: torch hands over a whole tensor, and each write is a sign of progress.
WRITE_BYTES = 16 << 20


class Output:
    """The target directory: creates files exclusively, hashes them on the way, makes them durable, journals them.

    Making a file durable is another pool's work, so that writing the next one need not wait for the disk. Use it as a
    context manager: leaving it waits until every file is durable and journalled. ``done`` is called after every file,
    ``moved`` with the bytes that were written or synced just now, both on any thread.
    """

    def __init__(
        self,
        target: Path,
        journal: Journal,
        done: Callable[[], None],
        moved: Callable[[int], None] = lambda count: None,
    ) -> None:
        self._target, self._journal, self._done, self._moved = target, journal, done, moved
        self._finished = set(journal.entries)
        self._syncing = ThreadPoolExecutor(SYNC_THREADS, thread_name_prefix="dalsegno-sync")
        self._pending: list[Future[None]] = []  # as many as there are files, at most

    def __enter__(self) -> Output:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self._syncing.shutdown(wait=True, cancel_futures=error is not None)
        if error is None:
            for pending in self._pending:
                pending.result()

    def has(self, path: str) -> bool:
        """Whether ``path`` was taken over from an earlier lease."""
        return path in self._finished

    def save(self, path: str, content: Any) -> None:
        """``torch.save`` of ``content``.

        Raises:
            OSError: The file system says no.
        """
        if self.has(path):
            return
        (self._target / path).parent.mkdir(parents=True, exist_ok=True)
        with open(self._target / path, "xb", buffering=0) as file:
            hashing = _Hashing(file, self._moved)
            try:
                torch.save(content, cast(BinaryIO, hashing))
            except RuntimeError as error:
                # Torch's writer says only that its position is not what it should be.
                raise (hashing.error or error) from error
        entry = FileEntry(path, hashing.size, hashing.digest)
        self._pending.append(self._syncing.submit(self._finish, entry))

    def link(self, path: str, source: Path, entry: FileEntry) -> None:
        """Takes a file of the sealed source as it is."""
        if self.has(path):
            return
        place(source, self._target / path)
        self._pending.append(self._syncing.submit(self._finish, FileEntry(path, entry.size, entry.xxh3_128)))

    def _finish(self, entry: FileEntry) -> None:
        with open(self._target / entry.path, "rb") as file:
            os.fsync(file.fileno())
        self._moved(entry.size)
        self._journal.add(entry)
        self._done()


class _Hashing(io.RawIOBase):
    """A file that is only ever appended to, with the checksum of what went by."""

    def __init__(self, file: BinaryIO | io.FileIO, moved: Callable[[int], None]) -> None:
        super().__init__()
        self._file, self._hash, self.size = file, xxhash.xxh3_128(), 0
        self._moved = moved
        self.error: OSError | None = None

    @property
    def digest(self) -> str:
        return self._hash.hexdigest()

    def writable(self) -> bool:
        return True

    def write(self, data: Any, /) -> int:
        view = memoryview(data).cast("B")
        self._hash.update(view)
        self.size += len(view)
        rest = view
        try:
            while rest:  # an unbuffered file may take less than it was given
                count = self._file.write(rest[:WRITE_BYTES])
                rest = rest[count:]
                self._moved(count)
        except OSError as error:
            self.error = self.error or error
            raise
        return len(view)


def write(source: Source, directory: Path, files: Mapping[str, FileEntry], output: Output) -> None:
    """Writes everything that the universal form of ``source`` needs and ``output`` does not have yet.

    Args:
        source: The opened checkpoint.
        directory: Its directory.
        files: Its manifest's entries by path.
        output: Where to.

    Raises:
        SourceBad: fp32 weights and model states disagree.
        OSError: The file system says no.
    """
    with _without_crc32(), ThreadPoolExecutor(THREADS, thread_name_prefix="dalsegno-convert") as pool:
        # Large parameters first: the last thread to finish then has little left to do.
        ordered = sorted(source.parameters.values(), key=lambda parameter: -parameter.numel)
        futures = [pool.submit(_write_parameter, source, parameter, output) for parameter in ordered]
        finished, _ = wait(futures, return_when=FIRST_EXCEPTION)
        for future in futures:
            future.cancel()
        for future in finished:
            future.result()
        if source.stage < 3:
            for name, value in unpartitioned(source).items():
                output.save(f"{ZERO}/{name}/{FP32}.pt", {"param": value.float()})
        output.save(f"{ZERO}/{OPTIMIZER_STATE}", _common_state(source))
    for name in source.model_files:
        output.link(name, directory / name, files[name])


def assemble(source: Source, parameter: Parameter, state: str) -> Tensor:
    """One state of one parameter, whole and flat: shape ``(parameter.numel,)``, dtype as saved.

    A state that the source does not have (stage 3 before its first step) is zeros, as an optimizer starts with.
    """
    if state not in source.flat[0][0]:
        return torch.zeros(parameter.numel, dtype=source.flat[0][0][FP32].dtype)
    parts = [source.flat[p.rank][p.group][state].narrow(0, p.start, p.numel) for p in parameter.pieces]
    # Always a copy: torch.save writes the whole storage behind a view, which here would be a rank's partition.
    return torch.cat(parts) if parts else torch.empty(0)


def _write_parameter(source: Source, parameter: Parameter, output: Output) -> None:
    for state in source.states:
        path = f"{ZERO}/{parameter.name}/{state}.pt"
        if output.has(path):
            continue
        value = assemble(source, parameter, state)
        if state == FP32:
            check_weights(parameter, value, source)
        output.save(path, value if source.stage == 3 else {"cat_dim": 0, "param": value.reshape(parameter.shape)})
    step = source.steps[parameter.pieces[0].group] if parameter.pieces else None
    if source.stage < 3 and step is not None:
        output.save(f"{ZERO}/{parameter.name}/step.pt", step)


def _common_state(source: Source) -> dict[str, Any]:
    state = dict(source.optimizer)
    if source.stage < 3:
        groups = state.pop("base_optimizer_state")["param_groups"]
        for sharded in ("param_slice_mappings", "single_partition_of_fp32_groups"):
            state.pop(sharded, None)
        return {**state, "param_groups": groups}
    inner = state["optimizer_state_dict"]
    scalars = {
        group: {key: value for key, value in values.items() if not isinstance(value, Tensor) or value.dim() == 0}
        for group, values in inner["state"].items()
    }
    if not scalars:
        scalars = {group: {"step": torch.tensor(0.0)} for group in range(len(source.flat[0]))}
    state.pop("fp32_flat_groups")
    return {
        **state,
        "optimizer_state_dict": {"state": scalars, "param_groups": inner["param_groups"]},
        "param_groups": inner["param_groups"],
    }


@contextmanager
def _without_crc32() -> Iterator[None]:
    """The zip format's own checksums cost more than ours and are never looked at: the manifest has xxh3."""
    before = torch.serialization.get_crc32_options()
    torch.serialization.set_crc32_options(False)
    try:
        yield
    finally:
        torch.serialization.set_crc32_options(before)


__all__ = ("Output", "assemble", "write")
