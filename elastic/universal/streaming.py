"""Writes DeepSpeed's universal files straight from the shards: every value is read once and written once.

Values go through a few buffers, in pieces, so that memory depends on neither the model's size nor that of its largest
parameter. The files are those that ``ds_to_universal`` makes, tensor by tensor (``zero/<name>/<state>.pt``,
``step.pt``, ``zero/optimizer_state.pt``, model states), and load with a stock DeepSpeed. Their sizes differ in two
points: stage 3's ``optimizer_state.pt`` leaves out rank 0's own partition, which DeepSpeed's converter copies and its
loader never reads; and model states are linked, not copied.
"""

from __future__ import annotations

import io
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ..checkpoint import FileEntry
from .effort import Effort
from .errors import Disagrees
from .forms import PARAM, ZERO, Form
from .output import ConversionOutput
from .pieces import Parameter
from .recording import dense
from .records import Extent, frame
from .shards import FP32
from .source import COMMON_STATE, ShardedSource


class _Buffers(threading.local):
    """One thread's buffers: for values, for converted values, and for values to compare with.

    They are made once, because tensors of these sizes that come and go fragment the heap to several times what they
    need.
    """

    def __init__(self, size: int) -> None:
        self.values, self.converted, self.others = (memoryview(bytearray(size)) for _ in range(3))


def write(
    source: ShardedSource,
    directory: Path,
    entries: Mapping[str, FileEntry],
    output: ConversionOutput,
    form: Form,
    effort: Effort,
) -> None:
    """Writes everything that the universal form of ``source`` needs and ``output`` does not have yet.

    Args:
        source: The opened checkpoint.
        directory: Its directory.
        entries: The entries of its model-state files that are known, by name.
        output: Where the files are written.
        form: What the files are to be.
        effort: Threads and memory.

    Raises:
        Disagrees: fp32 weights and model states disagree.
        OSError: The file system says no.
    """
    buffers = _Buffers(effort.piece)
    tasks: list[tuple[int, Callable[[], None]]] = []
    for parameter in source.parameters.values():
        for state in source.states:
            tasks.append((parameter.numel, _task(_write_state, source, parameter, state, output, form, buffers)))
    for name, value in form.unpartitioned.items():
        tasks.append((value.numel(), _task(_write_unpartitioned, source, name, value, output, buffers)))
    tasks.sort(key=lambda task: -task[0])  # large ones first, so that no thread is left with a large one at the end
    with _one_thread_each():
        _run([task for _, task in tasks], effort.threads)
        _write_steps(output, form)
        output.put(f"{ZERO}/{COMMON_STATE}", _saved(form.common_state()))
    for path, name in form.model_files.items():
        output.link(path, directory / name, entries[name])


def _task(function: Callable[..., None], *arguments: object) -> Callable[[], None]:
    return lambda: function(*arguments)


def _run(tasks: Sequence[Callable[[], None]], threads: int) -> None:
    with ThreadPoolExecutor(threads, thread_name_prefix="dalsegno-convert") as pool:
        futures = [pool.submit(task) for task in tasks]
        finished, _ = wait(futures, return_when=FIRST_EXCEPTION)
        for future in futures:
            future.cancel()
        for future in finished:
            future.result()


def _write_steps(output: ConversionOutput, form: Form) -> None:
    """Writes a file for each parameter. Contents repeat, because all parameters of a group have made the same steps."""
    saved: dict[int, bytes] = {}
    for name, step in form.steps.items():
        if id(step) not in saved:
            saved[id(step)] = _saved(step)
        output.put(f"{ZERO}/{name}/step.pt", saved[id(step)])


def _saved(content: Any) -> bytes:
    """The bytes that ``torch.save`` makes of ``content``, which is small."""
    file = io.BytesIO()
    torch.save(content, file)
    return file.getvalue()


def _write_state(
    source: ShardedSource, parameter: Parameter, state: str, output: ConversionOutput, form: Form, buffers: _Buffers
) -> None:
    path = f"{ZERO}/{parameter.name}/{state}.pt"
    if output.has(path):
        return
    extents = source.extents(parameter, state)
    like = source.first.flat[parameter.group][state if extents is not None else FP32]
    around = form.frame(parameter, like.dtype)
    model: Tensor | None = source.model["module"].get(parameter.name) if state == FP32 and source.stage < 3 else None
    room = buffers.values
    if model is not None:  # its values may be wider, and as many must fit
        room = room[: len(room) // max(1, model.element_size() // like.element_size())]
    pieces = zeros(around.nbytes, room) if extents is None else read(extents, room)
    if model is not None:
        pieces = _compared(pieces, source, parameter, model, like.dtype, buffers)
    output.stream(path, around, pieces)


def _write_unpartitioned(
    source: ShardedSource, name: str, value: Tensor, output: ConversionOutput, buffers: _Buffers
) -> None:
    """Writes what no optimizer owns as fp32, as DeepSpeed's converter does: frozen parameters, buffers, tied names."""
    path = f"{ZERO}/{name}/{FP32}.pt"
    if output.has(path):
        return
    if not dense(value) or value.is_complex():
        # A view with gaps, or one element shown many times: rare, and never a large parameter.
        output.put(path, _saved({PARAM: value.float()}))
        return
    # The storage order is kept, as ``value.float()`` keeps it.
    around = frame(tuple(value.shape), torch.float32, stride=tuple(value.stride()), key=PARAM)
    wide = max(1, 4 // value.element_size())
    pieces = read([source.model_extent(value)], buffers.values[: len(buffers.values) // wide])
    if value.dtype != torch.float32:
        pieces = (converted(piece, value.dtype, torch.float32, buffers.converted) for piece in pieces)
    output.stream(path, around, pieces)


def read(extents: Iterable[Extent], buffer: memoryview) -> Iterator[memoryview]:
    """The bytes of all ``extents``, one after the other, in pieces that fill ``buffer`` (except perhaps the last)."""
    filled = 0
    for extent in extents:
        done = 0
        while done < extent.nbytes:
            count = min(extent.nbytes - done, len(buffer) - filled)
            extent.read_into(buffer[filled : filled + count], done)
            done, filled = done + count, filled + count
            if filled == len(buffer):
                yield buffer
                filled = 0
    if filled:
        yield buffer[:filled]


def zeros(nbytes: int, buffer: memoryview) -> Iterator[memoryview]:
    """``nbytes`` zero bytes, in pieces: a state that an optimizer does not have yet."""
    buffer[:] = bytes(len(buffer))
    for start in range(0, nbytes, len(buffer)):
        yield buffer[: min(len(buffer), nbytes - start)]


def converted(piece: memoryview, dtype: torch.dtype, other: torch.dtype, buffer: memoryview) -> memoryview:
    """The values of ``piece``, which have ``dtype``, converted to ``other``, in ``buffer``."""
    values = torch.frombuffer(piece, dtype=dtype)
    result = buffer[: values.numel() * other.itemsize]
    torch.frombuffer(result, dtype=other).copy_(values)
    return result


def _compared(
    pieces: Iterable[memoryview],
    source: ShardedSource,
    parameter: Parameter,
    model: Tensor,
    dtype: torch.dtype,
    buffers: _Buffers,
) -> Iterator[memoryview]:
    """Passes fp32 weights on after each piece was compared with the model states: both are copies of the same values.

    Raises:
        Disagrees: They differ, so the optimizer's partitions do not belong to this model.
    """
    extent = source.model_extent(model) if model.is_contiguous() else None
    start = 0
    for piece in pieces:
        ours = piece if dtype == model.dtype else converted(piece, dtype, model.dtype, buffers.converted)
        values = torch.frombuffer(ours, dtype=model.dtype)
        if extent is None:
            theirs = model.reshape(-1)[start : start + values.numel()]
        else:
            other = buffers.others[: values.numel() * model.element_size()]
            extent.read_into(other, start * model.element_size())
            theirs = torch.frombuffer(other, dtype=model.dtype)
        if not torch.equal(values, theirs) and not _equal_with_nan(values, theirs):
            raise Disagrees(f"{parameter.name}: the optimizer's fp32 weights differ from the model states")
        start += values.numel()
        yield piece
    if start != model.numel():
        raise Disagrees(f"{parameter.name}: the optimizer has {start} values, the model states {model.numel()}")


def _equal_with_nan(one: Tensor, two: Tensor) -> bool:
    return bool(((one == two) | (one.isnan() & two.isnan())).all())


@contextmanager
def _one_thread_each() -> Iterator[None]:
    """Runs torch with one thread: our own threads already share the cores."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


__all__ = ("converted", "read", "write", "zeros")
