"""Which optimizers treat every weight by itself, so that a part of a parameter is trained as the whole would be.

ZeRO hands an optimizer flat parts of the model, cut according to the number of ranks. An optimizer that looks at a
whole parameter (its norm, its rows and columns, its blocks) then gives another curve in every world. Nothing shows from
outside which ones do. So those that do not are listed, by the class that defines their ``step``: a subclass with its
own ``step`` is another optimizer.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Sequence
from itertools import zip_longest
from typing import TYPE_CHECKING, Any

from dalsegno.protos.text import few

if TYPE_CHECKING:
    from torch import Tensor, nn

from ..rank.remarks import remark

_TORCH = {
    "adadelta": "Adadelta",
    "adagrad": "Adagrad",
    "adam": "Adam",
    "adamax": "Adamax",
    "adamw": "AdamW",
    "asgd": "ASGD",
    "nadam": "NAdam",
    "radam": "RAdam",
    "rmsprop": "RMSprop",
    "rprop": "Rprop",
    "sgd": "SGD",
}

ELEMENTWISE = frozenset(
    {
        *(f"torch.optim.{module}.{name}" for module, name in _TORCH.items()),
        "apex.optimizers.fused_adagrad.FusedAdagrad",
        "apex.optimizers.fused_adam.FusedAdam",
        "apex.optimizers.fused_sgd.FusedSGD",
        "deepspeed.ops.adagrad.cpu_adagrad.DeepSpeedCPUAdagrad",
        "deepspeed.ops.adam.cpu_adam.DeepSpeedCPUAdam",
        "deepspeed.ops.adam.fused_adam.FusedAdam",
        "deepspeed.ops.lion.cpu_lion.DeepSpeedCPULion",
        "deepspeed.ops.lion.fused_lion.FusedLion",
        "lion_pytorch.lion_pytorch.Lion",
        "transformers.optimization.AdamW",
    }
)
"""Optimizers whose update of a weight depends on that weight, its gradients and the step alone."""


_NOT_SHARDED = frozenset({"torch.optim._adafactor.Adafactor", "transformers.optimization.Adafactor"})
"""Optimizers whose `step` fails on FSDP2's sharded parameters, in torch's dispatch of some operation."""


def check_sharded(optimizer: Any) -> None:
    """Refuses an optimizer that cannot train FSDP2's sharded parameters, before it fails at its first step.

    Other optimizers see whole parameters: norms and products are over all ranks' rows together.

    Raises:
        ValueError: The optimizer is known to fail there.
    """
    if source_of_step(optimizer) in _NOT_SHARDED:
        raise ValueError(
            f"{source_of_step(optimizer)} cannot train the sharded parameters of FSDP (torch fails at its first step): "
            "take another optimizer (AdamW, SGD, Muon, ...), or DDP"
        )


def check_kept(optimizer: Any, model: nn.Module, kept: Iterable[Tensor] = ()) -> None:
    """Refuses an optimizer of parameters that are in no checkpoint, and whose gradients nothing averages.

    Args:
        optimizer: An optimizer of plain or sharded parameters.
        model: The model whose parameters are saved.
        kept: What is saved beside the model: a part with such parameters (a loss with weights of its own) saves them.

    Raises:
        ValueError: There are such parameters.
    """
    own = {id(parameter) for parameter in model.parameters()}
    groups = getattr(optimizer, "param_groups", ())
    others = [p for group in groups for p in group["params"] if p.requires_grad and id(p) not in own]
    held = list(kept) if others else []
    # Some optimizers work on their own copies of the model's parameters, for instance in host memory.
    held += model.parameters() if others else []
    lost = [p for p in others if not any(_is_same(p, tensor) for tensor in held)]
    if lost:
        shapes = ", ".join(str(tuple(parameter.shape)) for parameter in lost[:3])
        raise ValueError(
            f"{type(optimizer).__name__} trains parameters that are not the model's, {len(lost)} of them (shape "
            f"{shapes}): they are in no checkpoint, and nothing averages their gradients. Make them part of the model"
        )


def _is_same(parameter: Tensor, kept: Tensor) -> bool:
    if kept.shape != parameter.shape or kept.dtype != parameter.dtype or kept.device.type == "meta":
        return False
    return kept.data_ptr() == parameter.data_ptr() or bool((kept.to(parameter) == parameter).all())


def source_of_step(optimizer: Any) -> str:
    """``"module.Class"`` that defines the optimizer's ``step``, whatever torch has wrapped around it."""
    step: Any = getattr(type(optimizer), "step", None)
    if step is None:  # a stand-in, as DeepSpeed uses when there is nothing to train
        return f"{type(optimizer).__module__}.{type(optimizer).__qualname__}"
    step = inspect.unwrap(step)
    return f"{step.__module__}.{step.__qualname__.rpartition('.')[0]}"


def is_elementwise(optimizer: Any) -> bool:
    """Whether the optimizer is known to treat every weight by itself."""
    return source_of_step(optimizer) in ELEMENTWISE


def say_added(optimizer: str, before: Sequence[str], now: Sequence[str]) -> None:
    """Remarks that parameters came to the optimizer, or left it, during the run."""
    changed = sorted(set(before) ^ set(now)) or list(now)
    remark(
        "the optimizer (%s) trains other parameters than at the start (%s): a run that resumes from what is saved now "
        "has to make all these groups before it loads, or is refused. Make them at the start, with lr=0 until they are "
        "wanted",
        optimizer,
        few(changed),
    )


def check_parameters(saved: Sequence[str], here: Sequence[str]) -> None:
    """Compares an optimizer's parameters by name, in the order of its groups, because states are assigned by place.

    Raises:
        ValueError: They differ from the checkpoint's, or are in another order: each would get another one's momentum.
    """
    place = next((n for n, (one, other) in enumerate(zip_longest(saved, here)) if one != other), None)
    if place is None:
        return
    if set(saved) == set(here):
        raise ValueError(
            f"the optimizer's parameters were saved in another order: number {place} was {saved[place]} and is"
            f" {here[place]}. Make its groups as they were, from lists in a fixed order (not from sets)"
        )
    gone, new = sorted(set(saved) - set(here)), sorted(set(here) - set(saved))
    parts = [f"without {', '.join(gone[:3])}"] * bool(gone) + [f"with {', '.join(new[:3])}"] * bool(new)
    raise ValueError(
        f"the optimizer trains other parameters than it did when it was saved: now {' and '.join(parts)}. Freeze and"
        " group them as they were, or start a new run"
    )
