"""Finds what a model's own ``forward`` changes: codebooks, hidden states, encoders that follow another one.

Each rank's forward passes change it once for each micro-batch, and how many of them a rank has follows from the number
of ranks. So the curve is another one in each world, also with ``fixed_micro_batch``, and no class name tells it.

A forward pass of each of the first few steps is watched, from inside `DistributedDataParallel`, whose own broadcast of
buffers is over by then. What is updated between two passes (averages of weights) is not seen, as it is the same in
every world. The first step is left out: tables and masks are filled there once and for all.
"""

from __future__ import annotations

import copyreg
import logging
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from dalsegno.protos.text import few

from ..rank.remarks import remark
from ..saving.replicas import unwrapped
from . import digest

log = logging.getLogger(__name__)

# So many steps behind the first are looked at. (What only follows other weights may be equal to them for a while.)
LOOKS = 3
# Numbers of all buffers that are compared as a whole; of what is beyond, and of parameters, only the first few are.
_WHOLE, _FEW = 1 << 24, 1 << 12
# The device cannot compute this, or lacks memory.
_ODD = (RuntimeError, TypeError, NotImplementedError)
# Of rotary embeddings, some of which make them anew for each batch's length: they carry nothing on.
_FREQUENCIES = "inv_freq"
_STATISTICS = frozenset({"running_mean", "running_var", "num_batches_tracked"})
PARAMETERS, BUFFERS = "parameters that no optimizer trains", "buffers"


def watch_forward(model: nn.Module, optimizers: Iterable[Any], step: Callable[[], int]) -> list[ForwardWatch]:
    """Watches the next few steps of a model, which tell in one line what their forward passes change.

    Args:
        model: With or without wrappers. What is compiled is left alone.
        optimizers: All that train it.
        step: The number of steps that are done.
    """
    trained = frozenset(
        id(p) for one in optimizers for group in getattr(one, "param_groups", ()) for p in group["params"]
    )
    if is_compiled(model):
        return []
    return [ForwardWatch(root, prefix, trained, step) for prefix, root in _called(unwrapped(model))]


class ForwardWatch:
    """Hooks at one module that is called as a whole; they remove themselves.

    Args:
        root: The module.
        prefix: Its name in the model, with a dot.
        trained: ``id`` of each parameter that an optimizer has.
        step: See `watch_forward`.
    """

    _root: nn.Module | None = None
    _noted: Mapping[str, Tensor] = {}

    def __init__(self, root: nn.Module, prefix: str, trained: frozenset[int], step: Callable[[], int]) -> None:
        self._root = root
        self._prefix, self._trained, self._step = prefix, trained, step
        self._begin = self._looked = step()
        # Before and behind the script's own hooks at this module: what they change counts, too.
        before = root.register_forward_pre_hook(self._before, prepend=True)
        self._handles = [before, root.register_forward_hook(self._behind)]

    def __reduce__(self) -> tuple[Any, ...]:
        # Copies of the model, and pickles, take its hooks along: one without a model does nothing.
        return copyreg.__newobj__, (ForwardWatch,)  # type: ignore[attr-defined]

    def end(self) -> None:
        """Removes the hooks, and lets the model go."""
        for handle in self._handles:
            handle.remove()
        self._handles, self._root, self._noted = [], None, {}

    def _before(self, module: nn.Module, _args: Any) -> None:
        # A hook that torch.compile traces must leave nothing behind in what it makes.
        if torch.compiler.is_compiling() or self._root is None:
            return
        step = self._step()
        if step - self._begin > LOOKS:
            self.end()
        elif step > self._looked and module.training and not _captures():
            try:
                self._noted = {name: value.clone() for name, _, value in self._values()}
            except _ODD as error:
                self._give_up(error)
            if not self._noted:
                self.end()

    def _behind(self, _module: nn.Module, _args: Any, _result: Any) -> None:
        if not self._noted:  # as always while torch.compile traces
            return
        self._looked, noted, self._noted = self._step(), self._noted, {}
        found: dict[str, list[str]] = {BUFFERS: [], PARAMETERS: []}
        try:
            for name, kind, value in self._values():
                if name in noted and _differ(noted[name], value):
                    found[kind].append(f"{self._prefix}{name}")
        except _ODD as error:
            self._give_up(error)
            return
        if any(found.values()):
            remark("the same only in distribution: %s", said(found[BUFFERS], found[PARAMETERS]))
        if any(found.values()) or self._looked - self._begin >= LOOKS:
            self.end()

    def _give_up(self, error: Exception) -> None:
        """No training ends because of a line that it does not get."""
        log.warning("it is not seen what the forward pass changes: %s", error)
        self.end()

    @torch.no_grad()
    def _values(self) -> Iterator[tuple[str, str, Tensor]]:
        """Name, kind and numbers of all that only the forward pass, or nobody, changes meanwhile."""
        left = _WHOLE
        assert self._root is not None
        for prefix, module in self._root.named_modules():
            kept = _STATISTICS if "BatchNorm" in type(module).__name__ else frozenset()
            for name, buffer in module._buffers.items():
                if buffer is None or name in kept or name.endswith(_FREQUENCIES) or not _can_be_read(buffer):
                    continue
                left -= buffer.numel()
                yield f"{prefix}.{name}".lstrip("."), BUFFERS, buffer.detach() if left >= 0 else _some(buffer)
            for name, parameter in module._parameters.items():
                if parameter is not None and id(parameter) not in self._trained and _can_be_read(parameter):
                    yield f"{prefix}.{name}".lstrip("."), PARAMETERS, _some(parameter)


def said(buffers: Sequence[str], parameters: Sequence[str]) -> str:
    """The message about what the forward pass changes."""
    named = [f"{few(names)} ({kind})" for names, kind in ((buffers, BUFFERS), (parameters, PARAMETERS)) if names]
    they, them = ("they", "them") if len(buffers) + len(parameters) > 1 else ("it", "it")
    return (
        f"{' and '.join(named)}: the forward pass changes {them}, once for each micro-batch of each rank, so {they}, "
        f"and what is computed with {them}, depend on the number of ranks, also with fixed_micro_batch. Only what "
        "changes once a step, behind the optimizer's, with sums over all ranks, is the same in every world"
    )


def is_compiled(model: nn.Module) -> bool:
    """Whether torch.compile is around the model, perhaps within a wrapper: it would be traced with the hooks."""
    inside: nn.Module | None = model
    while inside is not None and "_orig_mod" not in inside._modules:
        inside = inside._modules.get("module")
    return inside is not None


def _called(model: nn.Module, prefix: str = "") -> Iterator[tuple[str, nn.Module]]:
    """The modules that a script calls, with their names; those in a plain list of models are called by themselves."""
    if isinstance(model, nn.ModuleList | nn.ModuleDict):
        for name, child in model.named_children():
            yield from _called(unwrapped(child), f"{prefix}{name}.")
    elif not isinstance(model, torch.jit.ScriptModule) and getattr(model, "_compiled_call_impl", None) is None:
        yield prefix, model


def _captures() -> bool:
    """Whether a card records what it does (CUDA graphs), and could give no answer."""
    return torch.cuda.is_available() and torch.cuda.is_current_stream_capturing()


def _can_be_read(value: Tensor) -> bool:
    """Whether its numbers lie here: not of what is sharded, or is only there during the pass (FSDP, ZeRO-3)."""
    sharded = hasattr(value, "ds_id") or hasattr(value, "_fsdp_flattened") or hasattr(value, "_is_flat_param")
    return digest.is_plain(value) and not sharded and value.untyped_storage().size() > 0


def _some(value: Tensor) -> Tensor:
    """The first few numbers, without a copy."""
    value = value.detach()
    while value.dim() > 1 and len(value):
        value = value[0]
    return value if value.dim() == 0 else value[:_FEW]


def _differ(before: Tensor, now: Tensor) -> bool:
    """Whether numbers have changed; another shape, dtype or device is that of a table made anew, which is no state."""
    if (before.shape, before.dtype, before.device) != (now.shape, now.dtype, now.device):
        return False
    neither = (before != before) & (now != now)  # NaN
    return not bool(((before == now) | neither).all())
