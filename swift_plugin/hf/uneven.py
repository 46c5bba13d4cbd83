"""Values that a Trainer gathers from all ranks during a step, for its logs: slices differ by a sample.

Accelerate expects tensors of one shape on all ranks. Gloo ends a process that sends another size; NCCL mixes the values
up, or hangs. trl's trainers gather one value for each sample.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

Gather = Callable[[Tensor], Tensor]


@contextmanager
def gathered(accelerator: Any) -> Iterator[None]:
    """Inside, ``accelerator.gather`` takes tensors whose first dimensions differ between the ranks."""
    if accelerator.num_processes == 1:
        yield
        return
    plain, own = accelerator.gather, vars(accelerator).get("gather")

    def gather(data: Any) -> Any:
        if isinstance(data, Tensor):
            return rows(data, plain)
        if isinstance(data, list | tuple) and not hasattr(data, "_fields"):
            return type(data)(gather(one) for one in data)
        return {name: gather(one) for name, one in data.items()} if isinstance(data, dict) else plain(data)

    accelerator.gather = gather
    try:
        yield
    finally:
        if own is None:
            del accelerator.gather
        else:
            accelerator.gather = own


def rows(tensor: Tensor, gather: Gather) -> Tensor:
    """The rows of all ranks, in the order of ranks. Collective.

    Args:
        tensor: This rank's, shape ``(n, ...)``, where ``n`` may differ between the ranks; or a scalar.
        gather: Concatenates tensors of one shape.
    """
    if tensor.dim() == 0:
        return gather(tensor)
    counts = [int(count) for count in gather(torch.tensor([len(tensor)], device=tensor.device))]
    most = max(counts)
    if most == min(counts):
        return gather(tensor)
    padded = tensor.new_zeros(most, *tensor.shape[1:])
    padded[: len(tensor)] = tensor
    whole = gather(padded)
    return torch.cat([whole[rank * most :][:count] for rank, count in enumerate(counts)])
