"""Copies a training state to host memory, so that it can be written while the training changes the original."""

from __future__ import annotations

import copy
from collections import OrderedDict
from collections.abc import Mapping
from typing import Any

import torch


class HostBuffers:
    """Host memory that one copy after the other uses again: fresh memory costs more than the copying.

    Stays as large as the state that was copied last. For tensors on a CUDA device it is pinned.
    """

    def __init__(self) -> None:
        self._free: dict[int, list[torch.Tensor]] = {}
        self._used: list[torch.Tensor] = []

    def copy(self, state: Any) -> Any:
        """The same structure of dictionaries, lists and tuples, with tensors on the CPU that share nothing with it.

        Tensors that share memory share it in the copy, too: tied weights stay tied.

        Args:
            state: Tensors, plain values and containers of them. Other objects are copied with ``copy.deepcopy``.
        """
        memo: dict[Any, Any] = {}
        result = self._copy(state, memo)
        # What the state before this one had and this one has not.
        self._free.clear()
        for device in {key[2] for key in memo if key[2].type == "cuda"}:
            torch.cuda.current_stream(device).synchronize()
        return result

    def release(self) -> None:
        """What ``copy`` gave out is not read any more."""
        for buffer in self._used:
            self._free.setdefault(buffer.numel(), []).append(buffer)
        self._used.clear()

    def _copy(self, value: Any, memo: dict[Any, Any]) -> Any:
        if isinstance(value, torch.Tensor):
            return self._copy_tensor(value, memo)
        if isinstance(value, Mapping):
            items = {key: self._copy(item, memo) for key, item in value.items()}
            if not isinstance(value, OrderedDict):
                return items
            ordered = OrderedDict(items)
            # torch keeps versions of modules there, which loading asks for.
            if hasattr(value, "_metadata"):
                ordered._metadata = copy.deepcopy(value._metadata)  # type: ignore[attr-defined]
            return ordered
        if isinstance(value, tuple) and hasattr(value, "_fields"):
            return type(value)(*(self._copy(item, memo) for item in value))
        if isinstance(value, (list, tuple)):
            return type(value)(self._copy(item, memo) for item in value)
        return copy.deepcopy(value)

    def _copy_tensor(self, tensor: torch.Tensor, memo: dict[Any, Any]) -> torch.Tensor:
        plain = type(tensor) in (torch.Tensor, torch.nn.Parameter) and tensor.layout is torch.strided
        if not plain or tensor.is_quantized or tensor.is_conj() or tensor.is_neg() or tensor.device.type == "meta":
            return tensor.detach().clone()
        storage = tensor.untyped_storage()
        key = storage.data_ptr(), storage.nbytes(), tensor.device
        if key not in memo:
            memo[key] = self._copy_storage(storage)
        view = torch.empty(0, dtype=tensor.dtype)
        return view.set_(memo[key], tensor.storage_offset(), tensor.size(), tensor.stride())

    def _copy_storage(self, storage: torch.UntypedStorage) -> torch.UntypedStorage:
        count = storage.nbytes()
        free = self._free.get(count)
        pinned = storage.device.type == "cuda"
        buffer = free.pop() if free else torch.empty(count, dtype=torch.uint8, pin_memory=pinned)
        self._used.append(buffer)
        source = torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage, 0, (count,), (1,))
        buffer.copy_(source, non_blocking=pinned)
        return buffer.untyped_storage()
