"""Whether ranks that compute a sample together are dealt the same samples: tensor parallelism.

Where a model is split for the computation, the ranks of a group compute one sample together, and samples of their own
make it wrong from the first step, without an error.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import nn

from ..rank.agreement import Refusal
from ..rank.remarks import remark
from ..rank.together import together
from ..saving.declared import is_engine

__all__ = ["check_dealt"]


def check_dealt(model: nn.Module, of: int, part: int) -> None:
    """Checks that ranks that compute together get the same samples. Collective among those that do.

    Args:
        model: What the training calls: a wrapper, or a DeepSpeed engine.
        of: Parts into which the plan cuts global batches.
        part: Which of them is this rank's.

    Raises:
        Refusal: They get others. On all of them.
    """
    groups = getattr(model, "dp_world_size", None) if is_engine(model) else None
    if isinstance(groups, int) and groups < of:
        raise Refusal(
            f"the engine's ranks compute each sample together (tensor, sequence or pipeline parallelism): of {of} "
            f"ranks there are {groups} groups, and each rank would get samples of its own. That is not supported: "
            "leave tensor_parallel and sequence_parallel_size out of the config, and take no PipelineModule"
        )
    for one in together(model):
        ends = torch.tensor([part, -part], device=one.device)
        dist.all_reduce(ends, dist.ReduceOp.MAX, group=one.group)
        if int(ends[0]) == -int(ends[1]):
            continue
        if one.split:
            raise Refusal(
                f"tensor parallelism: {one.what}, which compute each sample together, and the batch plan deals each of "
                "them samples of its own. Cut batches for the groups, not for the ranks: with mesh['dp'] of "
                "data-parallel ranks, BatchPlan(G, mesh['dp'].size(), m) and Batches(..., plan, "
                "mesh['dp'].get_local_rank()); see docs/dcp.md"
            )
        if dist.get_rank() == one.ranks[0]:
            remark(
                "%s, not by fully_shard, and each of them gets samples of its own: right only if each gathers them "
                "before it computes; if they compute together (tensor parallelism), cut batches for such groups: "
                "docs/dcp.md",
                one.what,
            )
