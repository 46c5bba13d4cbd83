"""Makes a model sharded block by block, so that no device ever holds more than one block beside its own rows.

A model that was made on the meta device also gets its first values block by block. While one block becomes real, every
other tensor of the model is on the meta device, where filling it has no effect. So the function that fills the whole
model can be called once for each block, as in torch's own recipe, and each world gets the same values: those of rank 0.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from ..rank.process_group import send_rank_0s

Init = Callable[[nn.Module], Any]
# Methods, with different arguments, by which models set their first values.
_UNCLEAR = ("init_weights", "_init_weights", "_reset_parameters")


def shard(
    model: nn.Module,
    blocks: tuple[type[nn.Module], ...],
    apply: Callable[[nn.Module, set[Tensor]], Any],
    device: torch.device,
    *,
    init: Init | None,
    same: bool,
    ignored: Iterable[Tensor] = (),
) -> None:
    """Moves and shards each block, then the rest. Collective.

    Args:
        model: On any device, or on meta, wholly or in part.
        blocks: Classes of the blocks.
        apply: Shards one module; gets the replacements of ``ignored``.
        device: This rank's device.
        init: Fills a model that was on meta; None: its ``reset_parameters``, or that of each of its modules.
        same: Give every rank rank 0's values first. Otherwise a model made without a seed would be rows of different
            ones.
        ignored: Parameters that stay whole.

    Raises:
        ValueError: Nothing is known that fills a tensor of the meta device, or ``init`` has left one unfilled; or a
            parameter is in two blocks, or ignored and trained.
    """
    if any(tensor.device.type == "meta" for tensor in _all(model)):
        init = init or _reset(model)
    units = list(_with_modules(model, blocks))
    _check_ties(model, units)
    kept = {tensor: tensor for tensor in ignored}
    _check_ignored(model, kept)
    for unit, modules in units:
        became = _real(modules, device)
        kept.update((tensor, became[tensor]) for tensor in kept.keys() & became.keys())
        # Nothing else may hold the whole of what is sharded.
        fresh = set(became.values())
        del became
        if fresh and init is not None:
            _fill(model, fresh, init)
        del fresh
        if same:
            for tensor in _direct(modules):
                if not hasattr(tensor, "to_local"):
                    send_rank_0s(tensor)
        apply(unit, set(kept.values()))


def _with_modules(model: nn.Module, blocks: tuple[type[nn.Module], ...]) -> Iterator[tuple[nn.Module, list[nn.Module]]]:
    """Each block with the modules that belong to no block inside it."""
    done: set[int] = set()
    for unit in _units(model, blocks):
        modules = [module for module in unit.modules() if id(module) not in done]
        done.update(map(id, modules))
        yield unit, modules


def _check_ties(model: nn.Module, units: Iterable[tuple[nn.Module, list[nn.Module]]]) -> None:
    where: dict[Tensor, int] = {}
    for number, (_, modules) in enumerate(units):
        for tensor in _direct(modules):
            if isinstance(tensor, nn.Parameter) and where.setdefault(tensor, number) != number:
                names = [name for name, one in model.named_parameters(remove_duplicate=False) if one is tensor]
                raise ValueError(
                    f"{' and '.join(names)} are one parameter in several blocks, and sharding would make them several:"
                    " give FSDP(blocks=...) such that one block has all of them"
                )


def _check_ignored(model: nn.Module, ignored: Iterable[Tensor]) -> None:
    trained = {tensor for tensor in ignored if tensor.requires_grad}
    if names := [name for name, one in model.named_parameters() if one in trained]:
        raise ValueError(
            f"ignored_params has {names[0]}{f' and {len(names) - 1} more' if names[1:] else ''}, which is trained: FSDP"
            " does not average the gradients of what it ignores, so each rank would train its own. Freeze it"
            " (requires_grad_(False)), or let FSDP shard it"
        )


def _units(model: nn.Module, blocks: tuple[type[nn.Module], ...]) -> Iterator[nn.Module]:
    """Each block once: inner ones before those around them, the model last."""
    seen: set[int] = set()

    def below(module: nn.Module) -> Iterator[nn.Module]:
        for child in module.children():
            yield from below(child)
        if isinstance(module, blocks) and module is not model and id(module) not in seen:
            seen.add(id(module))
            yield module

    yield from below(model)
    yield model


def _real(modules: Iterable[nn.Module], device: torch.device) -> dict[Tensor, Tensor]:
    """Moves what these modules hold themselves to the device. Returns tensors without values, filled with NaN or 0."""
    became: dict[Tensor, Tensor] = {}
    for module in modules:
        for held in (module._parameters, module._buffers):
            for name, tensor in held.items():
                if tensor is None or hasattr(tensor, "to_local"):
                    continue
                if tensor.device.type != "meta":
                    tensor.data = tensor.data.to(device)
                    continue
                if tensor not in became:
                    became[tensor] = _empty(tensor, device)
                held[name] = became[tensor]  # type: ignore[assignment]  # tied tensors stay tied
    return became


def _empty(tensor: Tensor, device: torch.device) -> Tensor:
    nothing = float("nan") if tensor.is_floating_point() or tensor.is_complex() else 0
    made = torch.full_like(tensor, nothing, device=device, requires_grad=False)
    return nn.Parameter(made, requires_grad=tensor.requires_grad) if isinstance(tensor, nn.Parameter) else made


def _fill(model: nn.Module, fresh: set[Tensor], init: Init) -> None:
    with _only(model, fresh), torch.no_grad():
        init(model)
        for name, tensor in (*model.named_parameters(), *model.named_buffers()):
            if tensor.device.type != "meta" and bool(tensor.isnan().any()):
                raise ValueError(
                    f"{name} was made on the meta device, and nothing has given it a value: give FSDP(init=...), a"
                    " function of the model that fills all of its parameters and buffers"
                )


@contextmanager
def _only(model: nn.Module, shown: set[Tensor]) -> Iterator[None]:
    """Keeps all other tensors of the model on the meta device inside."""
    hidden: list[tuple[Any, str, Tensor]] = []
    stands: dict[Tensor, Tensor] = {}
    for module in model.modules():
        for held in (module._parameters, module._buffers):
            for name, tensor in held.items():
                if tensor is None or tensor in shown:
                    continue
                if tensor not in stands:
                    plain = torch.empty(tensor.shape, dtype=tensor.dtype, device="meta")
                    parameter = isinstance(tensor, nn.Parameter)
                    stands[tensor] = nn.Parameter(plain, requires_grad=tensor.requires_grad) if parameter else plain
                hidden.append((held, name, tensor))
                held[name] = stands[tensor]  # type: ignore[assignment]
    try:
        yield
    finally:
        for place, name, tensor in hidden:
            place[name] = tensor


def _reset(model: nn.Module) -> Init:
    """The function that fills a model if the script gives none.

    Raises:
        ValueError: The model has another way of its own.
    """
    if callable(getattr(model, "reset_parameters", None)):
        return lambda whole: whole.reset_parameters()  # type: ignore[operator]
    for name, module in model.named_modules():
        own = next((method for method in _UNCLEAR if callable(getattr(module, method, None))), None)
        if own is not None:
            raise ValueError(
                f"the model is on the meta device, and {name or type(model).__name__} has {own}(): say how it is"
                f" filled, as in FSDP(init=lambda model: model.{own}())"
            )

    def reset(module: nn.Module) -> None:
        for child in module.children():
            reset(child)
        method = getattr(module, "reset_parameters", None)
        if callable(method):
            method()

    return reset


def _direct(modules: Iterable[nn.Module]) -> list[Tensor]:
    """The tensors that these modules hold themselves, each once."""
    found = (tensor for m in modules for held in (m._parameters, m._buffers) for tensor in held.values())
    return list(dict.fromkeys(tensor for tensor in found if tensor is not None))


def _all(model: nn.Module) -> Iterator[Tensor]:
    yield from model.parameters()
    yield from model.buffers()
