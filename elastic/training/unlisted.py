"""Parts of a model that no ``state_dict()`` lists: buffers that are not persistent, and plain attributes.

Most of them are made anew with the model: masks, tables of angles. Those that change while the model trains are part of
the training. Buffers that have changed are saved with the rest. Changed attributes can only be named, because nobody
knows what they are for.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Mapping
from itertools import chain
from typing import Any

import torch
import xxhash
from torch import Tensor, nn

from dalsegno.protos.text import few

from ..rank.remarks import remark
from ..rank.tensor_bytes import bytes_of

_PLAIN = (bool, int, float, str, type(None))
# Attributes that torch and libraries set as they go along, and make anew.
_PASSING = frozenset({"training", "is_compiled", "gradient_checkpointing"})
# The most numbers of a tensor attribute that is looked at, and how many times all attributes are looked at.
_NUMBERS, _LOOKS = 64, 4


class Unlisted:
    """The unlisted parts of one model, compared with their state when the training began.

    Args:
        model: The model that is trained, without wrappers.
    """

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        # Not compared by `id`: another tensor may have it once the first one is gone.
        found = buffers(model).items()
        self._buffers = {name: (weakref.ref(b), b._version, _digest(b), _made(b)) for name, b in found}
        self._attributes, self._looks, self._named = _attributes(model), _LOOKS, False

    def changed_buffers(self) -> dict[str, Any]:
        """The model's own buffers that have changed.

        Of those that came later, or have another dtype or shape by now: ``value``, and ``first``, dtype and shape at
        the beginning.
        """
        found: dict[str, Any] = {}
        for name, buffer in buffers(self._model).items():
            was = self._buffers.get(name)
            # Few buffers change, and comparing all of them at each save would take too long.
            same = was is not None and was[0]() is buffer and was[1] == buffer._version
            if was is None or _made(buffer) != was[3]:
                found[name] = {"value": buffer, "first": None if was is None else was[3]}
            elif not same and _digest(buffer) != was[2]:
                found[name] = buffer
        return found

    def changed_attributes(self) -> tuple[str, ...]:
        """Names of plain attributes that have changed, without those that the module itself saves."""
        now = _attributes(self._model)
        return tuple(
            name for name, value in now.items() if name in self._attributes and self._attributes[name] != value
        )

    def tell(self) -> None:
        """Says once, when a save is prepared or made, which attributes have changed."""
        if self._looks:
            self._looks -= 1
            if changed := self.changed_attributes():
                self._looks = 0
                remark("%s", said(changed))

    def tell_unsaved(self) -> None:
        """The same where somebody saves no more than a ``state_dict()``: buffers that have changed are named, too."""
        if not self._named and (changed := tuple(self.changed_buffers())):
            self._named = True
            remark("%s", said(changed, "leave persistent=False out where it is registered"))
        self.tell()

    def load(self, saved: Mapping[str, Any]) -> None:
        """Restores buffers of a model that is made as it was: also where they grew, or came in the first step."""
        modules = dict(self._model.named_modules())
        for name, entry in saved.items():
            prefix, _, own = name.rpartition(".")
            if prefix not in modules:
                continue
            was = self._buffers.get(name)
            grown = not isinstance(entry, Tensor) and entry["first"] == (None if was is None else was[3])
            self._restore(modules[prefix], own, entry if isinstance(entry, Tensor) else entry["value"], grown=grown)

    @torch.no_grad()
    def _restore(self, module: nn.Module, name: str, value: Tensor, *, grown: bool) -> None:
        buffer = module._buffers.get(name)
        if name not in module._non_persistent_buffers_set and hasattr(module, name):
            return  # It is something else by now.
        same = buffer is not None and buffer.shape == value.shape
        if buffer is not None and same and (buffer.dtype == value.dtype or not grown):
            buffer.copy_(value)
            return
        if not grown:
            return
        near = chain((buffer,), module.parameters(), module.buffers(), self._model.parameters())
        device = next((one.device for one in near if one is not None), value.device)
        module.register_buffer(name, value.to(device, copy=True), persistent=False)


def buffers(model: nn.Module) -> dict[str, Tensor]:
    """Buffers that are not persistent, by name; without those whose changes nobody can see."""
    # Of those of inference mode torch counts no changes.
    return {
        name: buffer
        for name, buffer, listed in each_buffer(model)
        if not listed and _can_be_read(buffer) and not buffer.is_inference()
    }


def each_buffer(model: nn.Module) -> Iterator[tuple[str, Tensor, bool]]:
    """All buffers, with their names, and whether ``state_dict()`` lists them."""
    for prefix, module in model.named_modules():
        for name, buffer in module._buffers.items():
            if buffer is not None:
                yield f"{prefix}.{name}" if prefix else name, buffer, name not in module._non_persistent_buffers_set


_AS_BUFFER = "make it a buffer (register_buffer), or give it out in get_extra_state"


def said(names: tuple[str, ...], cure: str = _AS_BUFFER) -> str:
    """The message about attributes, or buffers, that have changed."""
    return (
        f"{few(names)} changed while the model trained, and {'is' if len(names) == 1 else 'are'} in no "
        f"checkpoint: a resumed run has the first value again. Where the training depends on it, {cure}"
    )


def has_extra_state(module: nn.Module) -> bool:
    """Whether it saves more than its parameters and buffers."""
    return type(module).get_extra_state is not nn.Module.get_extra_state


def _attributes(model: nn.Module) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for prefix, module in model.named_modules():
        if has_extra_state(module):
            continue
        for name, value in vars(module).items():
            number = type(value) in (int, float)
            if name in _PASSING or (name.startswith("_") and not number):
                continue
            if type(value) is Tensor and _can_be_read(value) and value.numel() <= _NUMBERS:
                value = _digest(value)
            if isinstance(value, _PLAIN):
                found[f"{prefix or type(module).__name__}.{name}"] = value
    return found


def _can_be_read(value: Tensor) -> bool:
    """Whether its values lie in memory as they are; not of sparse ones, and their like."""
    odd = value.is_nested or value.is_conj() or value.is_neg()
    return value.layout is torch.strided and value.device.type != "meta" and not odd


def _made(value: Tensor) -> list[Any]:
    """What a new one of its kind has: dtype and shape."""
    return [str(value.dtype), *value.shape]


def _digest(value: Tensor) -> str:
    return f"{value.dtype} {list(value.shape)} {xxhash.xxh3_64_hexdigest(bytes_of(value.cpu()))}"
