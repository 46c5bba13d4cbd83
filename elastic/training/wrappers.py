"""What a wrapped model brings that no checkpoint has, or that another world computes otherwise: said on rank 0."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch.distributed as dist
from torch import nn
from torch.optim import Optimizer

from ..rank.remarks import remark
from ..saving.optimizers import is_elementwise

# What approximates the gradients of each rank by itself: by the modules that bring it, or by what it gathers.
_APPROXIMATE = ("powerSGD_hook", "post_localSGD_hook", "quantization_hooks")


def tell(model: nn.Module, optimizers: Sequence[Optimizer]) -> None:
    """Warns of what `remarks` finds."""
    if not dist.is_available() or not dist.is_initialized() or dist.get_rank() == 0:
        for line in remarks(model, optimizers):
            remark("%s", line)


def remarks(model: nn.Module, optimizers: Sequence[Optimizer]) -> Iterator[str]:
    """One line for each thing that makes another curve in every world. Nothing of it shows in the model.

    Args:
        model: What the training calls.
        optimizers: Those that step.
    """
    for hook, state in getattr(model, "_comm_hooks", ()):
        name = getattr(hook, "__qualname__", type(hook).__name__)
        if str(getattr(hook, "__module__", "")).endswith(_APPROXIMATE) or type(state).__module__.endswith(_APPROXIMATE):
            yield (
                f"the communication hook {name} approximates each rank's gradients: the loss curve is another one at "
                "every world size, and what it has gathered is in no checkpoint. Leave it out to have the same curve"
            )
    flat = any(type(module).__name__ == "FullyShardedDataParallel" for module in model.modules())
    for optimizer in optimizers if flat else ():
        if not is_elementwise(optimizer):
            yield (
                f"FullyShardedDataParallel gives {type(optimizer).__name__} flat parts of the model, cut where the "
                "number of ranks says, and nobody knows that it treats every weight by itself (Adafactor, LAMB and "
                "Muon do not). If it does not, the loss curve is another one at every world size: take fully_shard "
                "(FSDP2), or AdamW"
            )
