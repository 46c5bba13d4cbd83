"""Many tensors in one file, side by side in few flat ones: for what only we read.

``torch.save`` writes a record for each tensor, and ``torch.load`` with ``weights_only`` goes through each tensor's
description in Python: 5,000 parameters of Adam's are 15,000 tensors, and cost more than their bytes. A `Bundle` is
written as a plain file of ``torch.save`` all the same, with a text in it that says where each tensor lies::

    {"dalsegno_bundle": 2, "tree": <JSON>, "pools": [flat tensor, ...], "rest": <number of a pool, or None>}

In the text a list is a node, everything else is itself: ``["l", ...]`` and ``["t", ...]`` are a list and a tuple,
``["d", keys, values]`` a dictionary, ``["o", keys, values]`` an ordered one, ``["p", pool, first, shape, stride]`` a
tensor, ``["r", number]`` something of the rest: whatever else there is. ``["m", keys, values, metadata]`` is a module's
state, an ordered dictionary with an attribute. The pool of the rest has the bytes of another file. In form 1 the rest
was a text, with a letter for each byte, and modules' states were part of it.
"""

from __future__ import annotations

import io
import json
import re
from collections import OrderedDict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pickle import UnpicklingError
from typing import Any

import torch
from torch import Tensor

from ..rank.tensor_bytes import as_it_lies, bytes_of
from ..universal.recording import dense, recorded, storage_order
from .packed import PackedFile
from .unfit import is_of_the_state

MARK, VERSION = "dalsegno_bundle", 2
# A flat tensor is full with so many bytes; small tensors are put together up to so many for each write.
POOL_BYTES, STAGE_BYTES = 64 << 20, 2 << 20
# What JSON gives back as it was; of whole numbers it reads no very long ones.
_PLAIN = (bool, int, float, str, type(None))


class Bundle(PackedFile):
    """A file's content that is to be written in this way. Where it is not it is an ordinary ``OrderedDict``."""

    def alike(self, items: Mapping[str, Any]) -> Bundle:
        return Bundle(items)

    def pieces(self) -> Iterator[bytes | memoryview]:
        """See `PackedFile`.

        Raises:
            RuntimeError: Torch lays such a file out in another way than it did, or cannot write the rest.
        """
        packer = _Packer()
        tree = json.dumps(packer.node(self))
        rest = packer.packed_rest()
        # Never touched: they cost addresses and no memory.
        flat = [torch.empty(pool.numel, dtype=pool.dtype, device="cpu") for pool in packer.pools]
        file = {MARK: VERSION, "tree": tree, "pools": flat, "rest": rest}
        left = iter([(packer.pools[number], flat[number]) for number in storage_order(len(flat))])
        for part in recorded(file):
            if isinstance(part, bytes):
                yield part
                continue
            pool, like = next(left)
            if part != like.nbytes:
                raise RuntimeError(f"torch.save leaves {part} bytes for {like.nbytes}")
            yield from values(pool.tensors)

    def __reduce__(self) -> tuple[Any, ...]:
        return OrderedDict, (), None, None, iter(self.items())


@dataclass
class _Pool:
    """Tensors that lie side by side: of one dtype and device."""

    dtype: torch.dtype
    tensors: list[Tensor] = field(default_factory=list)
    numel: int = 0


class _Packer:
    def __init__(self) -> None:
        self.pools: list[_Pool] = []
        self.rest: list[Any] = []
        # The one that is being filled, by dtype and device.
        self._open: dict[tuple[torch.dtype, torch.device], int] = {}
        # Of tensors that come several times. They are alive meanwhile, so an `id` is one tensor's.
        self._known: dict[int, list[Any]] = {}

    def node(self, value: Any) -> Any:
        kind = type(value)
        if kind in _PLAIN and not (kind is int and abs(value) >> 63):
            return value
        if kind is Tensor and _lies_plainly(value):
            return self._tensor(value)
        if kind is dict or kind is Bundle:
            return ["d", *self._items(value)]
        if kind is OrderedDict and not vars(value):
            return ["o", *self._items(value)]
        if kind is OrderedDict and vars(value).keys() == {"_metadata"}:
            return ["m", *self._items(value), self.node(value._metadata)]
        if kind is list or kind is tuple:
            return ["l" if kind is list else "t", *map(self.node, value)]
        self.rest.append(value)
        return ["r", len(self.rest) - 1]

    def packed_rest(self) -> int | None:
        """The number of the pool that has the rest; None: there is none."""
        if not self.rest:
            return None
        held = io.BytesIO()
        torch.save(self.rest, held)
        content = torch.frombuffer(held.getbuffer(), dtype=torch.uint8)
        self.pools.append(_Pool(torch.uint8, [content], content.numel()))
        return len(self.pools) - 1

    def _items(self, value: Any) -> tuple[list[Any], list[Any]]:
        return [self.node(key) for key in value], [self.node(item) for item in value.values()]

    def _tensor(self, tensor: Tensor) -> list[Any]:
        if id(tensor) not in self._known:
            self._known[id(tensor)] = self._place(tensor)
        return self._known[id(tensor)]

    def _place(self, tensor: Tensor) -> list[Any]:
        key, numel = (tensor.dtype, tensor.device), tensor.numel()
        number = self._open.get(key)
        if number is None or (self.pools[number].numel + numel) * tensor.element_size() > POOL_BYTES:
            number = self._open[key] = len(self.pools)
            self.pools.append(_Pool(tensor.dtype))
        pool = self.pools[number]
        first, pool.numel = pool.numel, pool.numel + numel
        pool.tensors.append(tensor)
        return ["p", number, first, list(tensor.shape), list(tensor.stride())]


def values(tensors: Sequence[Tensor]) -> Iterator[memoryview]:
    """The bytes of tensors of one dtype as they lie in memory; small ones together.

    Args:
        tensors: Each dense: its elements lie side by side, in whatever order of dimensions.
    """
    few: list[Tensor] = []
    count = 0
    for tensor in tensors:
        flat = as_it_lies(tensor)
        if few and count + flat.nbytes > STAGE_BYTES:
            yield _bytes(few)
            few, count = [], 0
        few.append(flat)
        count += flat.nbytes
    yield _bytes(few)


def _bytes(flat: Sequence[Tensor]) -> memoryview:
    together = (flat[0] if len(flat) == 1 else torch.cat(list(flat))).cpu()
    return memoryview(bytes_of(together))


def _lies_plainly(tensor: Tensor) -> bool:
    """Values side by side in memory, in whatever order of dimensions, and nothing else to know of them."""
    if tensor.layout is not torch.strided or tensor.is_quantized or tensor.is_conj() or tensor.is_neg():
        return False
    if tensor.requires_grad or tensor.numel() == 0 or tensor.device.type == "meta":
        return False
    return tensor.is_contiguous() or dense(tensor)


def unpacked(content: Any) -> Any:
    """What was packed, from what ``torch.load`` gave of the file; anything else as it is.

    Tensors are views of the flat ones, which may be mapped: keep none of them.

    Raises:
        ValueError: It is of a later version, or not whole.
    """
    if type(content) is not dict or MARK not in content:
        return content
    if content[MARK] > VERSION:
        raise ValueError(f"it was packed by a later version (form {content[MARK]}, this one reads {VERSION})")
    try:
        rest = _rest_of(content["rest"], content["pools"])
        return _value(json.loads(content["tree"]), content["pools"], rest)
    except (TypeError, KeyError, IndexError, AttributeError, RuntimeError, RecursionError, UnpicklingError) as error:
        if not is_of_the_state(error):
            raise
        if refused := refused_of(error):
            raise ValueError(f"it has more than plain values and tensors: {refused}") from error
        raise ValueError(f"what it packs is not whole: {type(error).__name__} {error}".splitlines()[0]) from error


def refused_of(error: Exception) -> str:
    """What ``torch.load`` does not take with ``weights_only``, for a person; empty: that is not why it failed."""
    found = re.search(r"Unsupported (?:global: GLOBAL|class) (\S+)", str(error))
    if found is None:
        return ""
    if re.fullmatch(r"numpy\.(_core|core)\.multiarray\.scalar", found[1]):
        return "it holds a number of NumPy's: make it float(…) or int(…)"
    if re.fullmatch(r"(builtins\.)?getattr", found[1]):  # so some versions of Python write these
        return "it holds a member of an Enum, or a method: keep its value, or its name"
    return f"it holds a {found[1]}"


def _rest_of(where: Any, pools: Sequence[Tensor]) -> Any:
    if where is None or where == "":
        return []
    data = where.encode("latin-1") if isinstance(where, str) else pools[where].numpy().tobytes()
    return torch.load(io.BytesIO(data), weights_only=True, map_location="cpu")


def _value(node: Any, pools: Sequence[Tensor], rest: Sequence[Any]) -> Any:
    if type(node) is not list:
        return node
    kind = node[0]
    if kind == "p":
        _, pool, first, shape, stride = node
        return pools[pool].as_strided(shape, stride, first)
    if kind == "d" or kind == "o":
        keys = [_value(key, pools, rest) for key in node[1]]
        pairs = zip(keys, [_value(item, pools, rest) for item in node[2]], strict=True)
        return OrderedDict(pairs) if kind == "o" else dict(pairs)
    if kind == "m":
        state = _value(["o", *node[1:3]], pools, rest)
        state._metadata = _value(node[3], pools, rest)
        return state
    if kind == "r":
        return rest[node[1]]
    items = [_value(item, pools, rest) for item in node[1:]]
    return items if kind == "l" else tuple(items)
