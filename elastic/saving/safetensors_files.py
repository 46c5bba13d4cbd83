"""Files of safetensors, written piece by piece: the library's own function writes to a path by itself.

Such a file is the length of its header (8 bytes, the lowest first), the header in JSON, which says of each tensor where
behind the header it lies, and the tensors' bytes (https://github.com/huggingface/safetensors, "Format").
"""

from __future__ import annotations

import itertools
import json
from collections import OrderedDict
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from .bundles import values
from .packed import PackedFile

DTYPES = {
    torch.int64: "I64",
    torch.float64: "F64",
    torch.float32: "F32",
    torch.int32: "I32",
    torch.bfloat16: "BF16",
    torch.float16: "F16",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}
"""How safetensors names the dtypes that are written here, in its order: the largest come first, so all are aligned."""

_ORDER = {dtype: number for number, dtype in enumerate(DTYPES)}

# The header is filled up with spaces, so that every tensor begins where its dtype may.
ALIGNED_BYTES = 8


class Safetensors(PackedFile):
    """Tensors by name, which `is_plain` finds to be plain.

    Args:
        tensors: By name.
        metadata: What else the header says.
    """

    def __init__(self, tensors: Mapping[str, Tensor], metadata: Mapping[str, str] | None = None) -> None:
        super().__init__(tensors)
        self.metadata = metadata

    def alike(self, items: Mapping[str, Any]) -> Safetensors:
        return Safetensors(items, self.metadata)

    def pieces(self) -> Iterator[bytes | memoryview]:
        names = sorted(self, key=lambda name: (_ORDER[self[name].dtype], name))
        header: dict[str, Any] = {} if self.metadata is None else {"__metadata__": dict(self.metadata)}
        begin = 0
        for name in names:
            tensor = self[name]
            end = begin + tensor.nbytes
            header[name] = {
                "dtype": DTYPES[tensor.dtype],
                "shape": list(tensor.shape),
                "data_offsets": [begin, end],
            }
            begin = end
        text = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
        text += b" " * (-len(text) % ALIGNED_BYTES)
        yield len(text).to_bytes(8, "little") + text
        for _, group in itertools.groupby((self[name] for name in names), key=lambda tensor: tensor.dtype):
            yield from values(list(group))


def is_plain(tensors: Any, metadata: Any = None) -> bool:
    """Whether `Safetensors` writes them as the library would; of others the library knows what to say."""
    if metadata is not None and not (isinstance(metadata, dict) and all(map(_is_text, metadata.items()))):
        return False
    if type(tensors) not in (dict, OrderedDict) or not all(type(name) is str for name in tensors):
        return False
    if not all(_is_plain(tensor) for tensor in tensors.values()):
        return False
    places = sorted((tensor.data_ptr(), tensor.nbytes) for tensor in tensors.values() if tensor.nbytes)
    return all(begin + count <= following for (begin, count), (following, _) in itertools.pairwise(places))


def _is_text(item: tuple[Any, Any]) -> bool:
    return all(type(text) is str for text in item)


def _is_plain(tensor: Any) -> bool:
    if type(tensor) not in (Tensor, torch.nn.Parameter) or tensor.layout is not torch.strided:
        return False
    known = tensor.dtype in DTYPES and tensor.device.type in ("cpu", "cuda")
    return known and tensor.is_contiguous() and not tensor.is_neg()
