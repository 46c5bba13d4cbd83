"""Checks that what one rank saves for all is really alike on every rank.

A sharded tensor that rank 0 saves holds only rank 0's rows, but it loads without complaint as those of every rank.
"""

from __future__ import annotations

import io
from collections import OrderedDict
from collections.abc import Iterator, Mapping
from operator import is_ as _is
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from .bundles import Bundle, refused_of
from .declared import is_engine
from .unfit import is_of_the_state

# A model's state in messages.
MODELS_STATE = "the model's state_dict() (get_extra_state?)"
# Wrappers put these prefixes before the names of what they wrap.
_PREFIXES = ("module.", "_orig_mod.")


def unwrapped(model: nn.Module, *, compiled: bool = False) -> nn.Module:
    """The script's own model inside ``DistributedDataParallel`` and ``DataParallel``.

    The names in it depend neither on the number of ranks nor on whether it is compiled.

    Args:
        compiled: Leave the wrapper of ``torch.compile`` in place.
    """
    while True:
        inner = None if compiled else getattr(model, "_orig_mod", None)
        if isinstance(model, nn.parallel.DistributedDataParallel | nn.DataParallel):
            inner = model.module
        if not isinstance(inner, nn.Module):
            return model
        model = inner


def without_prefixes(saved: Mapping[str, Any], wanted: Mapping[str, Any]) -> Mapping[str, Any]:
    """A checkpoint's names as if the model had been saved `unwrapped`. Earlier versions saved it wrapped."""
    names = dict(saved)
    while names and not names.keys() & wanted.keys():
        prefix = next((p for p in _PREFIXES if all(name.startswith(p) for name in names)), None)
        if prefix is None:
            break
        names = {name.removeprefix(prefix): value for name, value in names.items()}
    return names if names.keys() == wanted.keys() else saved


def check_whole(model: nn.Module, *, meta: bool = False) -> None:
    """Checks that this rank has all of the model. Calls none of the model's code.

    Args:
        meta: The model may be on the meta device.

    Raises:
        ValueError: It is sharded, or has no values or shapes yet.
    """
    if is_engine(model):
        raise ValueError("a DeepSpeed engine saves by itself: use dalsegno.elastic.deepspeed, save and restore")
    for name, module in model.named_modules():
        # Compared by name: importing the class takes torch a second, and a script that uses it has imported it.
        if any(kind.__name__ == "FullyShardedDataParallel" for kind in type(module).__mro__):
            raise ValueError(f"{name or 'the model'} is wrapped in FullyShardedDataParallel, {_INSTEAD}")
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        check_shape(name, tensor)
        # FSDP1 and ZeRO-3 mark the tensors of a model that they wrap.
        if _is_sharded(tensor) or hasattr(tensor, "_fsdp_flattened") or hasattr(tensor, "ds_tensor"):
            raise ValueError(f"the model's {name} is sharded, {_INSTEAD}")
        if tensor.device.type == "meta" and not meta:
            raise ValueError(
                f"the model's {name} is on the meta device and has no values: make the model on a real device, or use"
                " Trainer(strategy='fsdp'), which gives each rank its own rows"
            )


def is_repeated(tensor: Tensor) -> bool:
    """Whether several of its values have one place in memory, as `expand` makes them."""
    return any(size > 1 and step == 0 for size, step in zip(tensor.shape, tensor.stride(), strict=True))


def check_shape(name: str, tensor: Tensor) -> None:
    """Refuses a tensor that has no shape before a first batch: the optimizer and other ranks could do nothing with it.

    Raises:
        ValueError: It belongs to a lazy module.
    """
    if is_lazy(tensor):
        raise ValueError(
            f"the model's {name} has no shape yet (it is of a lazy module): show the model one batch before this, or"
            " give the module its sizes"
        )


def check_unsharded(content: Any, what: str) -> None:
    """Looks for sharded tensors in containers.

    Raises:
        ValueError: There is one.
    """
    for path, tensor in tensors(content):
        if _is_sharded(tensor):
            raise ValueError(
                f"{what} has a sharded tensor{path and f' ({path})'}: rank 0's rows would be saved for all ranks;"
                " keep its full_tensor() there, or save it by torch.distributed.checkpoint (docs/dcp.md)"
            )


def loadable(content: Any, what: str) -> Any:
    """What a file is to contain, if it can be read again, with Python's numbers in place of NumPy's. Copies no tensor.

    Args:
        content: The argument of ``torch.save``.
        what: Its name in messages.

    Raises:
        TypeError: It is more than plain values and tensors.
        ValueError: There is a sharded tensor in it.
    """
    if not _plain(content):
        check_unsharded(content, what)
        content = pythons_numbers(content)
        if not _plain(content):
            _try_out(content, what)
    return content


def loadable_weights(weights: dict[str, Any]) -> dict[str, Any]:
    """A model's state, changed in place so that all that is no tensor in it can be read again, see `loadable`.

    Raises:
        TypeError, ValueError: As with `loadable`.
    """
    if odd := {name: value for name, value in weights.items() if not isinstance(value, Tensor)}:
        weights.update(loadable(odd, MODELS_STATE))
    return weights


def plainly(content: Any, what: str) -> Any:
    """The same as `loadable`, where tensors are known to be such as can be read: they are not tried out.

    NumPy's ``float64`` is as good as a ``float``, and what ``np.cos`` gives; ``torch.load`` refuses it.

    Raises:
        TypeError, ValueError: As with `loadable`.
    """
    if _plain(content):
        return content  # Nearly always.
    check_unsharded(content, what)
    odd: list[Any] = []
    content = _pythons(content, odd)
    if odd:
        _try_out(odd, what)
    return content


def pythons_numbers(content: Any) -> Any:
    """The same with Python's numbers in place of NumPy's, and nothing is said about what else is in it."""
    return _pythons(content, [])


def _pythons(value: Any, odd: list[Any]) -> Any:
    """With Python's own numbers; ``odd`` gets what is neither these nor tensors."""
    kind = type(value)
    if kind in (dict, Bundle, OrderedDict):
        found = {_pythons(key, odd): _pythons(item, odd) for key, item in value.items()}
        if all(map(_is, found, value)) and all(map(_is, found.values(), value.values())):
            return value
        copy = kind(found)
        if kind is OrderedDict:
            vars(copy).update(vars(value))  # the metadata of a module's state
        return copy
    if kind in (list, tuple):
        items = [_pythons(item, odd) for item in value]
        return value if all(map(_is, items, value)) else kind(items)
    if isinstance(value, Tensor) or _plain(value):
        return value
    if kind.__module__ == "numpy" and kind.__name__ in ("float64", "int64", "bool", "bool_", "str_"):
        return value.item()
    odd.append(value)
    return value


def _try_out(content: Any, what: str) -> None:
    held = io.BytesIO()
    try:
        torch.save(_skeleton(content, {}), held)
        held.seek(0)
        torch.load(held, weights_only=True, map_location="cpu")
    except Exception as error:  # pickle fails in many ways
        if not is_of_the_state(error):
            raise
        why = refused_of(error) or (str(error).splitlines() or [type(error).__name__])[0]
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
    """The tensors in mappings and lists, each with its path."""
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
    if kind in (dict, Bundle) or (kind is OrderedDict and set(vars(value)) <= {"_metadata"}):
        return all(map(_plain, value)) and all(map(_plain, value.values()))
    return kind in (list, tuple) and all(map(_plain, value))


def _skeleton(value: Any, empty: dict[torch.dtype, Tensor]) -> Any:
    """The same with empty tensors in place of plain ones; objects that it does not know are kept."""
    if type(value) in (Tensor, nn.Parameter) and value.layout is torch.strided and not value.is_quantized:
        if value.dtype not in empty:
            empty[value.dtype] = torch.empty(0, dtype=value.dtype)
        return empty[value.dtype]
    if type(value) in (dict, OrderedDict, Bundle):
        kind = type(value)
        return kind((key, _skeleton(item, empty)) for key, item in value.items())
    if type(value) in (list, tuple):
        return type(value)(_skeleton(item, empty) for item in value)
    return value
