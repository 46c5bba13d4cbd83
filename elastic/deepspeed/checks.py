"""What can be seen of an engine before its first step: whether its optimizer fits ZeRO, and how its world can change.

`why_not_reshard` and `check_optimizer` give the reasons in words; `tell` tells them to the user, once, on rank 0.
"""

from __future__ import annotations

import math
from itertools import chain
from typing import Any

import deepspeed
import torch
import torch.distributed as dist
from deepspeed.runtime.zero.utils import ZERO_SUPPORTED_OPTIMIZERS
from torch import Tensor

from dalsegno.protos.reads import Reads, reads_of

from ..rank.remarks import remark
from ..saving.optimizers import is_elementwise
from ..universal.pieces import GROUP_ALIGNMENT
from ..universal.source import ADAM_STATES
from .loading import knows_universal_files, loads_any_state, torch_optimizer, whole_parameters

# Versions of DeepSpeed with which re-sharding was tried.
TRIED = ((0, 19),)
ALLOW = "zero_allow_untested_optimizer"
"""DeepSpeed's own switch that turns its guard off."""
_TOLD = "_dalsegno_told"
# What `what_ranks_read` has found.
_CUT = "_dalsegno_cut"
_PARTS = (
    "ZeRO gives it flat parts of the model, cut where the number of ranks says, and nobody knows that it treats every "
    "weight by itself (Adafactor, LAMB, Muon and optimizers in 8 bits do not)"
)


def check_optimizer(optimizer: Any, stage: int, *, allowed: bool, scheduled: bool = False) -> None:
    """Refuses an optimizer that would make another curve in every world, or that DeepSpeed would replace.

    Args:
        optimizer: The optimizer that DeepSpeed gets.
        stage: The ZeRO stage.
        allowed: The user's own config has `ALLOW`.
        scheduled: A scheduler sets its learning rate.

    Raises:
        ValueError: It is not known to treat every weight by itself; or DeepSpeed would put another one in its place.
    """
    if stage > 0 and isinstance(optimizer, torch.optim.Adagrad) and (scheduled or _has_its_own(optimizer)):
        raise ValueError(
            f"{type(optimizer).__name__} with ZeRO-{stage}: DeepSpeed makes another Adagrad in its place, with one "
            "parameter group, the default values of this one, and a learning rate that no scheduler reaches. Take "
            "another optimizer, or one group and no scheduler"
        )
    if stage == 0 or allowed or is_elementwise(optimizer) or type(optimizer) in ZERO_SUPPORTED_OPTIMIZERS:
        return
    raise ValueError(
        f"{type(optimizer).__name__} with ZeRO-{stage}: {_PARTS}, so the loss curve would be another one at every "
        f"world size. Take one that does (AdamW, SGD, Lion, ...), or DDP; or set {ALLOW} in DeepSpeed's config, if you "
        "know that it does, or want it all the same"
    )


def _has_its_own(optimizer: torch.optim.Optimizer) -> bool:
    """Whether its groups have values that are not its defaults."""
    groups, defaults = optimizer.param_groups, optimizer.defaults
    return len(groups) > 1 or any(groups[0].get(key, value) != value for key, value in defaults.items())


def strategy(engine: Any) -> str:
    """The engine's strategy for a manifest's shape: ``"deepspeed-zero-<stage>"``."""
    return f"deepspeed-zero-{int(engine.zero_optimization_stage())}"


def can_reshard(engine: Any) -> bool:
    """Whether `restore` can load what the engine saves now at another number of ranks without a conversion.

    Stage 0 partitions nothing: its checkpoints load anywhere as they are.
    """
    return 1 <= int(engine.zero_optimization_stage()) <= 3 and why_not_reshard(engine) is None


def loads_by_place(engine: Any) -> bool:
    """Whether as many ranks load only their own files, and the first rank's.

    Of experts only some ranks write what others load, too; of pipelines and split tensors that was not tried. What
    stage 3 has cut and no optimizer trains is put together of all ranks' files.
    """
    if int(engine.zero_optimization_stage()) == 3 and not all(p.requires_grad for p in engine.module.parameters()):
        return False
    if getattr(engine, "has_moe_layers", False) or getattr(engine, "pipeline_parallelism", False):
        return False
    return int(getattr(engine, "mp_world_size", 1)) == 1


def what_ranks_read(engine: Any) -> Reads | None:
    """What each rank of a world of another size loads of what the engine saves now; None: perhaps everything.

    Not known of pads between parameters, and of groups of ranks that each have a whole model (MiCS).
    """
    if _CUT in vars(engine):  # Asked at each save, and DeepSpeed does not cut otherwise later.
        known: Reads | None = getattr(engine, _CUT)
        return known
    stage, config = int(engine.zero_optimization_stage()), engine._config.zero_config
    if not loads_by_place(engine) or (stage > 0 and not can_reshard(engine)):
        return None
    if stage == 0:
        return Reads()
    if getattr(config, "parameter_alignment", False) or getattr(config, "mics_shard_size", -1) > 0:
        return None
    groups = [[math.prod(shape) for shape in group.values()] for group in engine._get_zero_param_shapes()]
    # Of a whole group in a row, or each parameter by itself: see `pieces`.
    found = reads_of(chain(*groups)) if stage == 3 else reads_of(map(sum, groups), GROUP_ALIGNMENT)
    setattr(engine, _CUT, found)
    return found


def why_not_reshard(engine: Any) -> str | None:
    """Why another number of ranks cannot load what the engine saves now without a conversion; None: it can.

    Re-sharding uses private names of DeepSpeed, so it is done only in versions that were tried; otherwise universal
    files are made. The optimizer's state exists after its first step; before, what is known of the optimizer decides.
    """
    if not is_tried():
        known = " or ".join(".".join(map(str, version)) for version in TRIED)
        return f"DeepSpeed {deepspeed.__version__}, where it was never tried ({known} was)"
    if getattr(engine, "has_moe_layers", False):
        return "a mixture of experts"
    if engine.zero_nvme_offload_optimizer():
        return "optimizer states on NVMe, which no checkpoint has (offload them to the cpu)"
    if not knows_universal_files(engine):
        return "an optimizer of DeepSpeed's that loads no universal files"
    if not whole_parameters(engine):
        return "tensor parallelism"
    return _why_not_dealt_out(engine)


def is_tried() -> bool:
    """Whether re-sharding was tried with this version of DeepSpeed."""
    return tuple(int(part) for part in deepspeed.__version__.split(".")[:2]) in TRIED


def _why_not_dealt_out(engine: Any) -> str | None:
    """Why the optimizer's state cannot be dealt out to other ranks; None: as far as is known, it can."""
    if (unknown := _unknown(engine)) is not None:
        return f"{unknown}, which is not known to treat every weight by itself"
    optimizer = torch_optimizer(engine)
    name = type(optimizer).__name__
    kinds = set()
    for flat, state in optimizer.state.items():
        gathered = {key: value for key, value in state.items() if isinstance(value, Tensor) and value.dim() > 0}
        kinds.add(frozenset(gathered))
        # SuperOffload identifies its flat parts by their numbers.
        if isinstance(flat, Tensor) and any(value.numel() != flat.numel() for value in gathered.values()):
            return f"{name}, which gathers something else than one value for each weight"
    if len(kinds) > 1:
        return f"{name}, which gathers other things for one parameter group than for another"
    others = {key for kind in kinds for key in kind} - set(ADAM_STATES)
    if others and int(engine.zero_optimization_stage()) == 3 and not loads_any_state(engine):
        return f"{name}: DeepSpeed loads only Adam's moments here"
    return None


def _unknown(engine: Any) -> str | None:
    """Name of the first optimizer, the script's or one inside it, that is not known to be element-wise; None: none."""
    inner = torch_optimizer(engine)
    for optimizer in (getattr(engine, "basic_optimizer", None) or inner, inner):
        if not is_elementwise(optimizer):
            return type(optimizer).__name__
    return None


def tell(engine: Any) -> None:
    """Says once, on rank 0, what will not work as usual at a change of the world."""
    if getattr(engine, _TOLD, False) or int(engine.zero_optimization_stage()) == 0:
        return
    setattr(engine, _TOLD, True)
    rank, world = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
    if rank != 0:
        return
    changes = (
        "When the world changes, its checkpoints are converted to universal files first; where that cannot be done, "
        f"the run stays at {world} ranks"
    )
    if (unknown := _unknown(engine)) is not None:
        remark(
            "%s: %s. If it does not, the loss curve is another one at every world size. %s", unknown, _PARTS, changes
        )
    elif (reason := why_not_reshard(engine)) is not None:
        remark("no re-sharding with %s. %s", reason, changes)
