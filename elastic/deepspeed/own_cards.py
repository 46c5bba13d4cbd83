"""DeepSpeed wants a card for each worker, on which NCCL takes one rank, and nothing takes its place.

NCCL itself refuses two ranks on one card late, in a collective, with an error like that of a lost peer: each start
would end so.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

import torch
from deepspeed.accelerator import get_accelerator

from ..rank.process_group import judged_by_rank_0, name_of_card

# What a rank says that has no card.
_NONE = "none"


def check_own_cards(store: Any, rank: int, world_size: int, local_rank: int) -> None:
    """Checks that each rank has a card of its own. Collective, before there is a group. Uses CUDA.

    Args:
        store: A ``torch.distributed`` store that only this world uses.
        rank, world_size: This rank's place in the world.
        local_rank: Which card of those that it sees is its own.

    Raises:
        ValueError: Some rank has none. On all ranks.
    """
    cards = get_accelerator().device_count()
    card = name_of_card(torch.device("cuda", local_rank)) if local_rank < cards else _NONE
    if problem := judged_by_rank_0(store, rank, world_size, card, _problem):
        raise ValueError(problem)


def _problem(cards: Sequence[str]) -> str:
    """Why DeepSpeed cannot train on these, one of each rank; "": it can."""
    count = Counter(cards)
    lacks, most = count.pop(_NONE, 0), max(count.values(), default=0)
    if not lacks and most < 2:
        return ""
    there, plural = len(count), "" if len(count) == 1 else "s"
    return (
        f"{len(cards)} ranks have {there} card{plural}, and DeepSpeed wants one for each worker: give each node cards "
        "of its own (CUDA_VISIBLE_DEVICES), and start as many workers as it has (--nproc-per-node=gpu); or train on "
        "CPUs (DS_ACCELERATOR=cpu)"
    )
