"""What every rank has alike, so that one rank's copy is the checkpoint: refuses what only looks like it.

A sharded tensor saved by rank 0 is rank 0's rows, and loads without a word as those of every rank.
"""

from __future__ import annotations

import io
import re
from collections import OrderedDict
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

# Wrappers put these before the names of what they wrap.
_PREFIXES = ("module.", "_orig_mod.")


def unwrapped(model: nn.Module, *, compiled: bool = False) -> nn.Module:
    """The script's own model behind ``DistributedDataParallel`` and ``DataParallel``.

    Its names depend neither on the number of ranks nor, behind ``torch.compile``, on whether it is compiled.

    Args:
        compiled: Leave what ``torch.compile`` made as it is.
    """
    while True:
        inner = None if compiled else getattr(model, "_orig_mod", None)
        if isinstance(model, nn.parallel.DistributedDataParallel | nn.DataParallel):
            inner = model.module
        if not isinstance(inner, nn.Module):
            return model
        model = inner


def without_prefixes(saved: Mapping[str, Any], wanted: Mapping[str, Any]) -> Mapping[str, Any]:
    """A checkpoint's names as they would be had the model been saved `unwrapped`, as earlier versions did not."""
    names = dict(saved)
    while names and not names.keys() & wanted.keys():
        prefix = next((p for p in _PREFIXES if all(name.startswith(p) for name in names)), None)
        if prefix is None:
            break
        names = {name.removeprefix(prefix): value for name, value in names.items()}
    return names if names.keys() == wanted.keys() else saved


def check_whole(model: nn.Module, *, meta: bool = False) -> None:
    """Asks every rank's model whether that rank has all of it. Calls nothing of it.

    Args:
        meta: It may be on the meta device.

    Raises:
        ValueError: It is sharded, or has no values or shapes yet.
    """
    if hasattr(model, "is_gradient_accumulation_boundary"):
        raise ValueError("a DeepSpeed engine saves by itself: use dalsegno.elastic.deepspeed, save and restore")
    for name, module in model.named_modules():
        # By its name: torch loads a second of modules with the class, and a script that has one has loaded them.
        if any(kind.__name__ == "FullyShardedDataParallel" for kind in type(module).__mro__):
            raise ValueError(f"{name or 'the model'} is wrapped in FullyShardedDataParallel, {_INSTEAD}")
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        check_shape(name, tensor)
        # The marks of FSDP1 and of ZeRO-3 on tensors of a model that they wrap.
        if _is_sharded(tensor) or hasattr(tensor, "_fsdp_flattened") or hasattr(tensor, "ds_tensor"):
            raise ValueError(f"the model's {name} is sharded, {_INSTEAD}")
        if tensor.device.type == "meta" and not meta:
            raise ValueError(
                f"the model's {name} is on the meta device and has no values: make the model on a real device, or use"
                " Trainer(strategy='fsdp'), which gives each rank its own rows"
            )


def check_shape(name: str, tensor: Tensor) -> None:
    """Refuses what has no shape before a first batch: the optimizer, and other ranks, have nothing of it.

    Raises:
        ValueError: It is of a lazy module.
    """
    if is_lazy(tensor):
        raise ValueError(
            f"the model's {name} has no shape yet (it is of a lazy module): show the model one batch before this, or"
            " give the module its sizes"
        )


def check_unsharded(content: Any, what: str) -> None:
    """Looks through containers.

    Raises:
        ValueError: There is a sharded tensor in it.
    """
    for path, tensor in tensors(content):
        if _is_sharded(tensor):
            raise ValueError(
                f"{what} has a sharded tensor{path and f' ({path})'}, of which rank 0's rows would be saved for all:"
                " keep its full_tensor() there, or save it by torch.distributed.checkpoint (docs/dcp.md)"
            )


def loadable(content: Any, what: str) -> None:
    """Makes sure of what a file is to have in it: nothing that could not be read again. Copies no tensor.

    Args:
        content: What ``torch.save`` gets.
        what: What to call it.

    Raises:
        TypeError: It is more than plain values and tensors.
        ValueError: There is a sharded tensor in it.
    """
    check_unsharded(content, what)
    if _plain(content):
        return
    held = io.BytesIO()
    try:
        torch.save(_skeleton(content, {}), held)
        held.seek(0)
        torch.load(held, weights_only=True, map_location="cpu")
    except Exception as error:  # pickle has many ways to say no
        found = re.search(r"Unsupported (?:global: GLOBAL|class) (\S+)", str(error))
        why = f"it holds a {found[1]}" if found else (str(error).splitlines() or [type(error).__name__])[0]
        raise TypeError(
            f"{what} has more than plain values and tensors, and could not be loaded again: {why}"
        ) from error


_INSTEAD = (
    "and a checkpoint of one rank would have that rank's part for all: give the plain model to"
    " Trainer(strategy='fsdp'), or save it by torch.distributed.checkpoint, with strategy= and any_world_size="
    " (docs/dcp.md)"
)


def _is_sharded(value: Tensor) -> bool:
    # DTensor, ShardedTensor
    plain = type(value) in (Tensor, nn.Parameter)
    return not plain and (hasattr(value, "to_local") or hasattr(value, "local_shards"))


def tensors(value: Any, path: str = "") -> Iterator[tuple[str, Tensor]]:
    """Those in mappings and lists, with the way to each."""
    if isinstance(value, Tensor):
        yield path, value
    elif isinstance(value, Mapping):
        for key, item in value.items():
            yield from tensors(item, f"{path}.{key}" if path else str(key))
    elif isinstance(value, list | tuple):
        for index, item in enumerate(value):
            yield from tensors(item, f"{path}[{index}]")


def _plain(value: Any) -> bool:
    """What ``torch.load`` surely takes. It is asked about everything else, which takes a while."""
    kind = type(value)
    if kind in (bool, float, str, type(None), Tensor, nn.Parameter):
        return kind not in (Tensor, nn.Parameter) or (value.layout is torch.strided and not value.is_quantized)
    if kind is int:
        return not abs(value) >> 63
    if kind is dict or (kind is OrderedDict and set(vars(value)) <= {"_metadata"}):
        return all(map(_plain, value)) and all(map(_plain, value.values()))
    return kind in (list, tuple) and all(map(_plain, value))


def _skeleton(value: Any, empty: dict[torch.dtype, Tensor]) -> Any:
    """The same with empty tensors in the place of plain ones; what it does not know stays as it is."""
    if type(value) in (Tensor, nn.Parameter) and value.layout is torch.strided and not value.is_quantized:
        if value.dtype not in empty:
            empty[value.dtype] = torch.empty(0, dtype=value.dtype)
        return empty[value.dtype]
    if type(value) in (dict, OrderedDict):
        kind = type(value)
        return kind((key, _skeleton(item, empty)) for key, item in value.items())
    if type(value) in (list, tuple):
        return type(value)(_skeleton(item, empty) for item in value)
    return value
