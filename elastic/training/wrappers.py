"""Remarks about wrappers of models (on rank 0): what no checkpoint has, or what another world computes differently."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from dalsegno.protos.text import few

from ..rank.agreement import Refusal
from ..rank.remarks import remark
from ..saving.optimizers import is_elementwise

# Communication hooks that approximate each rank's gradients, recognised by their modules or by what they gather.
_APPROXIMATE = ("powerSGD_hook", "post_localSGD_hook", "quantization_hooks")


class Frozen:
    """The parameters that are not trained when a wrapped model is first seen, so that a change is noticed.

    Args:
        model: What the training calls. (FSDP2 trains what is unfrozen later.)
    """

    def __init__(self, model: nn.Module) -> None:
        inner = getattr(model, "_orig_mod", model)
        self._who, self._asks = "", not any(hasattr(module, "set_requires_gradient_sync") for module in model.modules())
        ignored: set[str] = set()
        if isinstance(inner, DistributedDataParallel):
            self._who, ignored = "DistributedDataParallel averages", set(inner.parameters_to_ignore)
            inner = inner.module
        elif getattr(model, "zero_optimization", bool)():
            self._who = "DeepSpeed averages, and steps with,"
        self._parameters = {n: p for n, p in inner.named_parameters() if not p.requires_grad and n not in ignored}

    def check(self, step: int) -> None:
        """Checks before a step that nothing was unfrozen that the wrapper would not train.

        Raises:
            Refusal: Parameters were unfrozen, and the model's wrapper would not handle them.
        """
        if not self._asks:
            return
        thawed = [name for name, parameter in self._parameters.items() if parameter.requires_grad]
        if not thawed:
            return
        if self._who:
            raise Refusal(
                f"{few(thawed)} became trainable by step {step}: {self._who} the gradients of those parameters only "
                "that were trainable when it was made, and each rank would train the rest by itself, or not at all. "
                "Leave requires_grad=True from the start, with a learning rate of 0 until they are to be trained"
            )
        self._asks = False
        remark(
            "%s became trainable by step %d: with more than one rank DistributedDataParallel would not average their "
            "gradients, which is refused, and a run that resumes must unfreeze them again. A learning rate of 0 until "
            "then is the same in every world",
            few(thawed),
            step,
        )


def frozen(model: nn.Module) -> list[str]:
    """Names of the parameters that are not trained at present, for checkpoints."""
    return [name for name, parameter in model.named_parameters() if not parameter.requires_grad]


def tell_frozen(checkpoint: str, saved: Sequence[str] | None, here: Sequence[str]) -> None:
    """Remarks that other parameters are frozen than when the run was saved, which is right if the script intends it.

    Args:
        checkpoint: Its name.
        saved: Names of those frozen then; None: an earlier version did not save them.
        here: Names of those frozen before the first step after the resume point.
    """
    if saved is None or set(saved) == set(here):
        return
    now, then = [n for n in here if n not in set(saved)], [n for n in saved if n not in set(here)]
    parts = [f"{few(now)}, trained when it was saved, frozen"] * bool(now)
    parts += [f"{few(then)}, frozen then, trained"] * bool(then)
    remark(
        "%s is resumed with %s: another curve than that of a run that was not interrupted, unless the script has done "
        "so before at this step; requires_grad is in no checkpoint, so set it by the step at each start",
        checkpoint,
        " and ".join(parts),
    )


def tell(model: nn.Module, optimizers: Sequence[Optimizer]) -> None:
    """Logs the lines of `remarks`."""
    if not dist.is_available() or not dist.is_initialized() or dist.get_rank() == 0:
        for line in remarks(model, optimizers):
            remark("%s", line)


def remarks(model: nn.Module, optimizers: Sequence[Optimizer]) -> Iterator[str]:
    """One line for each thing that makes the curve differ between worlds. None of them shows in the model itself.

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
