"""Reading what a training has saved: tensors mapped from files, put where the training's own are."""

from __future__ import annotations

import contextlib
import zipfile
from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from pickle import UnpicklingError
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from dalsegno.protos.text import few

from ..rank.threads import shared_out
from ..saving.bundles import unpacked
from ..saving.resuming import ResumePoint
from ..saving.unfit import is_of_the_state
from ..universal.archive import Packed, refuse_packed
from ..universal.mapping import NotPlainError, open_mapped
from .digest import is_plain
from .parts import Stateful

Item = TypeVar("Item")


def load_part(part: Stateful, state: Any, *, cast: bool = False) -> None:
    """Loads what ``read_tensors`` returned, and keeps no reference into the file.

    Args:
        part: The part; an optimizer's state is copied once, to where it is used.
        state: Its state, whose tensors may be mapped from a file.
        cast: An optimizer's tensors take its parameters' dtype, as torch does it; otherwise they keep their own.
    """
    if not _is_optimizer(part) or not _is_of(part, state):
        part.load_state_dict(owned(state))
        return
    if not cast and _loads_as_torch_does(part) and _only_tensors(state):
        # The same without torch's way through each value, which converts what is to stay as it was saved.
        part.load_state_dict({**state, "state": {}})
        _fill(part, state)
        return
    part.load_state_dict(state)
    groups, held = part.param_groups, part.state  # type: ignore[attr-defined]  # torch makes new ones
    numbers = [number for group in state["param_groups"] for number in group["params"]]
    converts = not _is_plain_load(part)
    for number, parameter in zip(numbers, (p for group in groups for p in group["params"]), strict=True):
        saved, loaded = state["state"].get(number, {}), held.get(parameter)
        if loaded is not None:
            only_from = parameter.dtype if converts else None
            held[parameter] = {key: _as_saved(one, saved.get(key), cast, only_from) for key, one in loaded.items()}


def load_kept(part: Stateful, kept: Mapping[str, Any], name: str, checkpoint: str, *, cast: bool = False) -> None:
    """The same from what `parts.kept_of` has of a part.

    Args:
        name, checkpoint: The part's and the checkpoint's, for the message.

    Raises:
        ValueError: It does not fit.
    """
    try:
        load_part(part, kept["state"], cast=cast)
    except (ValueError, KeyError, RuntimeError) as error:
        if not is_of_the_state(error):
            raise
        raise ValueError(f"the {name} in {checkpoint} does not fit this one: {error}") from error


def _is_optimizer(part: Stateful) -> bool:
    return hasattr(part, "param_groups") and isinstance(getattr(part, "state", None), Mapping)


def _is_of(part: Any, state: Any) -> bool:
    """Whether a state has the form that torch's optimizers save. One that holds other optimizers may have its own."""
    if _is_plain_load(part):
        return True  # or torch says what is wrong
    if not isinstance(state, Mapping) or not {"state", "param_groups"} <= state.keys():
        return False
    saved, own = ([len(group["params"]) for group in groups] for groups in (state["param_groups"], part.param_groups))
    return saved == own


def _is_plain_load(part: Any) -> bool:
    """Whether its state is loaded by nothing else than ``torch.optim.Optimizer.load_state_dict``."""
    hooks = ("_optimizer_load_state_dict_pre_hooks", "_optimizer_load_state_dict_post_hooks")
    return (
        getattr(type(part), "load_state_dict", None) is Optimizer.load_state_dict
        and "load_state_dict" not in vars(part)
        and not any(getattr(part, name, True) for name in hooks)
    )


def _loads_as_torch_does(part: Any) -> bool:
    """One of torch's own optimizers, of which nothing is changed."""
    return type(part).__module__.startswith("torch.optim.") and _is_plain_load(part)


def _only_tensors(state: Mapping[str, Any]) -> bool:
    """Nothing that an optimizer would make over as it loads: numbers that earlier versions of torch saved."""
    numbers = {number for group in state["param_groups"] for number in group["params"]}
    return state["state"].keys() <= numbers and all(
        type(value) is Tensor for values in state["state"].values() for value in values.values()
    )


def _fill(part: Any, state: Mapping[str, Any]) -> None:
    """Puts each parameter's state where torch would put it, with the dtype that was saved, and copied once."""
    moved: list[tuple[dict[str, Any], str, torch.device]] = []
    for saved, group in zip(state["param_groups"], part.param_groups, strict=True):
        on_device = group.get("capturable") or group.get("fused")
        for number, parameter in zip(saved["params"], group["params"], strict=True):
            if number in state["state"]:
                own = part.state[parameter] = dict(state["state"][number])
                if "step" in own:
                    step = own["step"]
                    own["step"] = step.to(parameter.device, torch.float32, copy=True) if on_device else step.clone()
                moved += [(own, key, parameter.device) for key in own if key != "step"]
    _each(_copied_there, moved, all(device.type == "cpu" for _, _, device in moved))


def _copied_there(share: Sequence[tuple[dict[str, Any], str, torch.device]]) -> None:
    for own, key, device in share:
        own[key] = own[key].to(device, copy=True)


def _as_saved(loaded: Any, saved: Any, cast: bool, only_from: torch.dtype | None) -> Any:
    """A tensor of an optimizer's state, copied out of the file and as exact as it was saved.

    Args:
        only_from: Where a script may have converted it as well: the dtype to which torch does, and then it counts only
            if that is the shorter one. Of whole numbers, such as codes of 8 bits, none can be what a script wanted.
    """
    if not isinstance(loaded, Tensor) or not isinstance(saved, Tensor):
        return owned(loaded)
    shorter = loaded.element_size() < saved.element_size() or not (saved.is_floating_point() or saved.is_complex())
    by_torch = only_from is None or (loaded.dtype == only_from and shorter)
    if loaded.dtype != saved.dtype and not cast and by_torch:
        # torch has converted fp32 moments of bf16 parameters to bf16.
        return saved.to(loaded.device, copy=True)
    if type(loaded) is not Tensor or type(saved) is not Tensor:
        return loaded
    shared = loaded.untyped_storage().data_ptr() == saved.untyped_storage().data_ptr()
    return loaded.clone() if shared else loaded


def load_weights(model: nn.Module, weights: Mapping[str, Any], wanted: Mapping[str, Any]) -> None:
    """Loads a model's weights, each copied once to where it is used.

    Args:
        model: See `copied_by_name`.
        weights: What ``read_tensors`` returned, of the same names.
        wanted: The model's ``state_dict()``.

    Raises:
        RuntimeError: Something does not fit, in torch's words.
    """
    if not copied_by_name(model, weights, wanted):
        # What is no tensor of the model's is kept as it comes.
        model.load_state_dict(
            {name: value if isinstance(wanted[name], Tensor) else owned(value) for name, value in weights.items()}
        )


def copied_by_name(model: nn.Module, weights: Mapping[str, Any], wanted: Mapping[str, Any] | None = None) -> bool:
    """Copies values to their places by their names: torch goes through each module in Python, which costs more.

    Args:
        model: Where a module of it has a way of its own, or something does not fit, nothing is done.
        weights: Tensors by name.
        wanted: The model's ``state_dict()``, if it is known.

    Returns:
        Whether it was done.
    """
    shown = model.state_dict() if wanted is None else wanted
    places = _places(model, weights, shown) if weights.keys() == shown.keys() else None
    if places is None:
        return False
    pairs = list(zip(places, (weights[name] for name in shown), strict=True))
    _each(_copied, pairs, all(place.device.type == "cpu" for place in places))
    return True


def _copied(share: Sequence[tuple[Tensor, Tensor]]) -> None:
    with torch.no_grad():  # of this thread
        torch._foreach_copy_([place for place, _ in share], [value for _, value in share])


def _each(work: Callable[[Sequence[Item]], None], items: Sequence[Item], on_cpu: bool) -> None:
    """Copies to a card are one thread's, whose current card and stream they use."""
    if on_cpu:
        shared_out(work, items)
    else:
        work(items)


def _places(model: nn.Module, weights: Mapping[str, Any], wanted: Mapping[str, Any]) -> list[Tensor] | None:
    """The model's tensors in the order of ``wanted``; None: torch's own way may do something else than to copy."""
    if not wanted or not all(map(_loads_plainly, model.modules())):
        return None
    own = {
        **dict(model.named_parameters(remove_duplicate=False)),
        **dict(model.named_buffers(remove_duplicate=False)),
    }
    places = []
    for name, value in wanted.items():
        place, saved = own.get(name), weights.get(name)
        if not _is_for(place, value, saved):
            return None
        places.append(place)
    return places  # type: ignore[return-value]  # each is a tensor


def _is_for(place: Any, value: Any, saved: Any) -> bool:
    """Whether ``value`` shows what lies in ``place``, and ``saved`` can be copied there without being changed."""
    if not all(map(is_plain, (place, value, saved))):
        return False
    if any(one.is_conj() or one.is_neg() for one in (place, value, saved)):
        return False  # many at once are not copied to what has yet to be computed
    return bool(
        place.data_ptr() == value.data_ptr()
        and place.shape == value.shape == saved.shape
        and place.dtype == saved.dtype
    )


def _loads_plainly(module: nn.Module) -> bool:
    """A module that gives and takes its tensors by their names, as `nn.Module` does."""
    kind = type(module)
    return not any(getattr(module, hooks, True) for hooks in _STATE_HOOKS) and all(
        _is_torchs(getattr(kind, method, None), method) and method not in vars(module) for method in _STATE_METHODS
    )


_STATE_HOOKS = (
    *("_state_dict_hooks", "_state_dict_pre_hooks"),
    *("_load_state_dict_pre_hooks", "_load_state_dict_post_hooks"),
)
_STATE_METHODS = (
    *("state_dict", "_save_to_state_dict", "load_state_dict", "_load_from_state_dict"),
    *("get_extra_state", "set_extra_state"),
)


def _is_torchs(found: Any, method: str) -> bool:
    # BatchNorm's own way is for checkpoints that lack a buffer, and all names are there.
    own = getattr(nn.modules.batchnorm._NormBase, method)
    return found is getattr(nn.Module, method) or found is own


def owned(value: Any) -> Any:
    """The same with tensors that share nothing with a file, so that they may be kept."""
    if type(value) is Tensor:
        return value.clone()
    if type(value) in (dict, OrderedDict):
        return type(value)((key, owned(item)) for key, item in value.items())
    if type(value) in (list, tuple):
        return type(value)(owned(item) for item in value)
    return value


def read_tensors(path: Path) -> Any:
    """What ``torch.save`` wrote, or a `Bundle`, on the CPU; plain values and tensors only.

    The file is mapped: only what is copied from its tensors is read. Keep none of them.

    Raises:
        ValueError: It has something else in it.
        OSError: It cannot be read, FileNotFoundError where it is not there.
    """
    try:
        content = _opened(path)
    except Packed as error:
        raise ValueError(f"{path} cannot be read: {error}") from error
    except UnpicklingError as error:
        raise ValueError(f"{path} has more than plain values and tensors: {str(error).splitlines()[0]}") from error
    try:
        return unpacked(content)
    except ValueError as error:
        raise ValueError(f"{path} cannot be read: {error}") from error


def read_saved(resume: ResumePoint, name: str, by: str = "TrainingState") -> Any:
    """The same of a file of the resume point.

    Args:
        by: Who saves such a file, for the refusal of a checkpoint that has none.

    Raises:
        ValueError: The checkpoint has no such file, or it has something else in it.
        OSError: It has, and this rank does not see it. Another start may.
    """
    if not resume.sees(name):
        raise ValueError(f"{resume.ref.name} has no {name}: it was not saved by {by}")
    return read_tensors(resume.path / name)


def _opened(path: Path) -> Any:
    with contextlib.suppress(NotPlainError):
        records = refuse_packed(path)
        if records is not None:
            return open_mapped(path, records)[0]
    # What torch wrote in its old format cannot be mapped.
    return torch.load(path, weights_only=True, map_location="cpu", mmap=zipfile.is_zipfile(path))


def check_same_dtypes(saved: Mapping[str, Any], wanted: Mapping[str, Any]) -> None:
    """Compares the dtypes of tensors of the same names, because loading converts silently.

    Args:
        saved: The checkpoint's values; those without a ``dtype`` are ignored.
        wanted: The model's.

    Raises:
        ValueError: Some differ.
    """
    other = {
        name: f"{name} {_short(value.dtype)} and is {_short(wanted[name].dtype)}"
        for name, value in saved.items()
        if isinstance(value, Tensor) and isinstance(wanted[name], Tensor) and value.dtype != wanted[name].dtype
    }
    if other:
        raise ValueError(
            f"the checkpoint was saved with another dtype: {few(sorted(set(other.values())))}; the training would go on"
            " with other numbers: make the model as it was, or ask for the conversion by cast=True (s.state, DDP, FSDP)"
        )


def _short(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def check_same_names(saved: Iterable[str], wanted: Iterable[str]) -> None:
    """Compares a checkpoint's names with a model's.

    Raises:
        ValueError: They differ.
    """
    there, here = set(saved), set(wanted)
    if there == here:
        return
    if not there & here:
        raise ValueError(
            f"the checkpoint is of another model: none of its {len(there)} names ({few(sorted(there))}) is in"
            f" this one's {len(here)} ({few(sorted(here))})"
        )
    only = [
        f"{few(sorted(names))} only in the {where}"
        for names, where in ((there - here, "checkpoint"), (here - there, "model"))
        if names
    ]
    raise ValueError(f"the checkpoint is of another model: {'; '.join(only)}")
