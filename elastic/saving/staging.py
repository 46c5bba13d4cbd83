"""Copies a training state to host memory, so that it can be written while the training changes the original.

From a card the copy runs on a stream of its own while the host goes on: `HostBuffers.wait` waits for it. The copy
begins when the card has finished what the training asked for so far, and later work of the training begins after the
copy. So the copy shows the state of this moment, whatever is done with the tensors next.
"""

from __future__ import annotations

import copy
import logging
from collections import OrderedDict
from collections.abc import Hashable, Mapping
from dataclasses import is_dataclass
from typing import Any

import torch

from ..rank.contexts import cards_in_use
from .copying import copy_all
from .packed import PackedFile
from .replicas import tensors

log = logging.getLogger(__name__)

# What nobody changes needs no copy. (A list of thousands of numbers would take longer than the tensors.)
_UNCHANGING = frozenset({bool, int, float, complex, str, bytes, type(None), torch.Size, torch.dtype})
# Kinds whose memory is laid out as their strides say.
_PLAIN = frozenset({torch.Tensor, torch.nn.Parameter})
# Of these torch copies any tensor bit by bit, and none is quantized or conjugated. Of its rarer dtypes it copies some
# by their bytes alone.
_USUAL = frozenset(
    {torch.float32, torch.bfloat16, torch.float16, torch.float64, torch.int64, torch.int32, torch.uint8, torch.bool}
)
_CPU = torch.device("cpu")


def wait_for_cards(state: Any) -> None:
    """Waits until cards have done what the training asked of them, before another thread reads what lies there.

    That thread has a stream of its own, which waits for nothing that a loop in a stream of the script's has begun.

    Args:
        state: Whose cards are waited for, beside those that this process is known to use.

    Raises:
        RuntimeError: A card has failed.
    """
    if not torch.cuda.is_initialized():  # type: ignore[no-untyped-call]  # to ask more would start CUDA
        return
    there = {tensor.device for _, tensor in tensors(state) if _is_card(tensor.device)}
    there |= {torch.device("cuda", number) for number in cards_in_use()}
    for device in sorted(there, key=str):
        torch.cuda.current_stream(device).synchronize()


def storage_sizes(state: Any) -> list[int]:
    """The bytes of each piece of memory that the tensors in mappings and lists lie in."""
    storages = [tensor.untyped_storage() for _, tensor in tensors(state)]
    return list({(one.data_ptr(), one.device): one.nbytes() for one in storages}.values())


def pinned_bytes(count: int) -> int:
    """What a pinned block of so many bytes takes: torch rounds it up to a power of two."""
    return 1 << (count - 1).bit_length() if count else 0


class HostBuffers:
    """Host memory that each copy uses again, because fresh memory costs more than the copying.

    It stays as large as the last copied state. For tensors on a CUDA device it is pinned if possible.

    Args:
        streams: In which cards copy; without one a stream is taken for each card when it is needed.
    """

    def __init__(self, streams: Mapping[torch.device, Any] | None = None) -> None:
        # Free buffers: of whole tensors by shape and dtype, of storages by bytes and by whether they are a card's.
        self._free: dict[Hashable, list[torch.Tensor]] = {}
        self._used: list[tuple[Hashable, torch.Tensor]] = []
        # What the copy under way is still to copy, in one call: thousands of calls take as long as the bytes.
        self._sources: list[torch.Tensor] = []
        self._targets: list[torch.Tensor] = []
        self._streams: dict[torch.device, Any] = dict(streams or {})
        # The buffers of the copy under way, and the events that are recorded at its end.
        self._busy: set[torch.device] = set()
        self._ends: list[Any] = []
        self._pins = True

    def copy(self, state: Any) -> Any:
        """The same structure of dictionaries, lists and tuples, with tensors on the CPU that share no memory with it.

        Tensors that share memory also share it in the copy: tied weights stay tied. What comes from a card is complete
        once `wait` has returned.

        Args:
            state: Tensors, plain values and containers of them. Other objects are copied with ``copy.deepcopy``.
        """
        result = self.add(state)
        self.trim()
        return result

    def add(self, state: Any) -> Any:
        """`copy` for a state that comes in several parts; behind the last one `trim` is called."""
        self._busy = set()
        self._sources, self._targets = [], []
        try:
            # Buffers are used again elsewhere: a tensor of inference mode could be written to in that alone.
            with torch.inference_mode(False):
                result = self._copy(state, {})
                if self._sources:
                    copy_all(self._targets, self._sources)
        except BaseException:
            # Whoever helps with the copy may write to these yet.
            self._used.clear()
            raise
        finally:
            self._sources, self._targets = [], []
            for device in self._busy:
                torch.cuda.current_stream(device).wait_stream(self._streams[device])
                end = torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]
                end.record(self._streams[device])
                self._ends.append(end)
        return result

    def trim(self) -> None:
        """Gives back the buffers that the previous state needed and this one does not."""
        self._free.clear()

    def wait(self) -> None:
        """Waits until what was copied since the last `release` is complete. Any thread may call it.

        Raises:
            RuntimeError: The card has failed.
        """
        for end in self._ends:
            end.synchronize()

    def release(self) -> None:
        """Allows reuse of the buffers: nobody reads any more what ``copy`` returned."""
        for key, buffer in self._used:
            self._free.setdefault(key, []).append(buffer)
        self._used.clear()
        self._ends = []

    def _copy(self, value: Any, memo: dict[Any, torch.Tensor]) -> Any:
        if type(value) in _UNCHANGING:
            return value
        if isinstance(value, torch.Tensor):
            return self._copy_tensor(value, memo)
        if type(value) is dict:
            return {key: self._copy(item, memo) for key, item in value.items()}
        if isinstance(value, Mapping):
            items = {key: self._copy(item, memo) for key, item in value.items()}
            if not isinstance(value, OrderedDict):
                return value.alike(items) if isinstance(value, PackedFile) else items
            ordered = OrderedDict(items)
            # torch keeps the versions of modules there, and loading asks for them.
            if hasattr(value, "_metadata"):
                ordered._metadata = _versions(value._metadata)  # type: ignore[attr-defined]
            return ordered
        if isinstance(value, tuple) and hasattr(value, "_fields"):
            return type(value)(*(self._copy(item, memo) for item in value))
        if isinstance(value, (list, tuple)):
            return type(value)(self._copy(item, memo) for item in value)
        if is_dataclass(value) and all(
            type(held) in _UNCHANGING for held in getattr(value, "__dict__", {"": ...}).values()
        ):
            # DeepSpeed describes each parameter by one of these; a deep copy of all takes as long as the tensors.
            alike = object.__new__(type(value))
            vars(alike).update(vars(value))
            return alike
        return copy.deepcopy(value)

    def _copy_tensor(self, tensor: torch.Tensor, memo: dict[Any, torch.Tensor]) -> torch.Tensor:
        plain = type(tensor) in _PLAIN and tensor.layout is torch.strided and not tensor.is_neg()
        # Nearly all tensors on a CPU are of this kind, and a large model has thousands.
        if plain and tensor.is_cpu and tensor.dtype in _USUAL and tensor.is_contiguous():
            count = tensor.nbytes
            key = tensor.data_ptr(), count, _CPU
            if key not in memo and tensor.untyped_storage().nbytes() == count:
                memo[key] = whole = self._whole(tensor)
                return whole
        if not plain or tensor.is_quantized or tensor.is_conj() or tensor.device.type == "meta":
            # Rare and small kinds of tensors, whose memory layout is unknown. From a card the caller waits for the
            # copy.
            return tensor.detach().clone() if tensor.device.type in ("cpu", "meta") else tensor.detach().cpu()
        storage = tensor.untyped_storage()
        count, device = storage.nbytes(), storage.device
        key = storage.data_ptr(), count, device
        known = memo.get(key)
        if known is None:
            known = memo[key] = self._copy_storage(storage, count, device)
        view = torch.empty(0, dtype=tensor.dtype, device="cpu")
        return view.set_(known.untyped_storage(), tensor.storage_offset(), tensor.size(), tensor.stride())

    def _whole(self, tensor: torch.Tensor) -> torch.Tensor:
        """A buffer for all of its storage, which is copied at the end."""
        key = tensor.shape, tensor.dtype
        free = self._free.get(key)
        buffer = free.pop() if free else torch.empty(tensor.shape, dtype=tensor.dtype, device="cpu")
        self._used.append((key, buffer))
        self._sources.append(tensor)
        self._targets.append(buffer)
        return buffer

    def _copy_storage(self, storage: torch.UntypedStorage, count: int, device: torch.device) -> torch.Tensor:
        from_card = _is_card(device)
        free = self._free.get((count, from_card))
        buffer = free.pop() if free else self._buffer(count, pinned=from_card)
        self._used.append(((count, from_card), buffer))
        source = torch.empty(0, dtype=torch.uint8, device=device).set_(storage, 0, (count,), (1,))
        if not from_card:
            # By words: byte by byte torch takes a sixth longer.
            word = torch.int64 if count % 8 == 0 and storage.data_ptr() % 8 == 0 else torch.uint8
            if device.type == "cpu":
                self._sources.append(source.view(word))
                self._targets.append(buffer.view(word))
            else:
                buffer.view(word).copy_(source.view(word))
            return buffer
        stream = self._stream(device)
        with torch.cuda.stream(stream):
            buffer.copy_(source, non_blocking=True)
        # The storage may be freed while it is copied, and may belong to another stream than the training's.
        source.record_stream(stream)
        return buffer

    def _stream(self, device: torch.device) -> Any:
        """The stream for copies, which first waits for what the training has asked of the card so far."""
        if device not in self._streams:
            self._streams[device] = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        if device not in self._busy:
            self._busy.add(device)
            self._streams[device].wait_stream(torch.cuda.current_stream(device))
        return self._streams[device]

    def _buffer(self, count: int, *, pinned: bool) -> torch.Tensor:
        if pinned and self._pins:
            try:
                return torch.empty(count, dtype=torch.uint8, device="cpu", pin_memory=True)
            except RuntimeError as error:
                # A save in pageable memory is better than none.
                self._pins = False
                log.warning("saves are copied more slowly: no memory can be pinned (%s)", str(error).split("\n")[0])
        return torch.empty(count, dtype=torch.uint8, device="cpu")


def _is_card(device: torch.device) -> bool:
    return device.type == "cuda"


def _versions(metadata: Any) -> Any:
    """A copy of the versions of modules. Those of torch are a plain dictionary of each, and a model has thousands."""
    if type(metadata) is OrderedDict and all(
        type(held) is dict and all(type(value) in _UNCHANGING for value in held.values()) for held in metadata.values()
    ):
        return OrderedDict((name, dict(held)) for name, held in metadata.items())
    return copy.deepcopy(metadata)
