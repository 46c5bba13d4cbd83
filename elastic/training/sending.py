"""DistributedDataParallel sends rank 0's weights to all ranks as it is made; behind a load they have them already."""

from __future__ import annotations

import hashlib
import weakref
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import distributed

from . import digest

__all__ = ["send_what_differs"]

_SEND = "_sync_module_states"
# By id: somebody's module may compare itself with others in its own way.
_loaded: weakref.WeakValueDictionary[int, nn.Module] = weakref.WeakValueDictionary()


def send_what_differs(model: nn.Module) -> None:
    """Has torch send this model's tensors only if they differ, the next time that it is wrapped. On all ranks.

    That is compared where all of them are on CPUs: two ranks with 160 MB take 0.03 s for it, and 0.2 to send them. One
    rank alone sends nothing, wherever they are.
    """
    known = getattr(distributed, _SEND, None)
    if known is None:
        return
    _loaded[id(model)] = model
    if known.__module__ == __name__:
        return

    def send(module: nn.Module, process_group: Any, *arguments: Any, **options: Any) -> None:
        if _loaded.pop(id(module), None) is not module or not _alike(module, process_group):
            known(module, process_group, *arguments, **options)

    setattr(distributed, _SEND, send)


def _alike(module: nn.Module, process_group: Any) -> bool:
    ranks = dist.get_world_size(process_group)
    if ranks == 1:
        return True
    tensors: list[Tensor] = [*module.parameters(), *module.buffers()]
    if not all(digest.is_plain(tensor) and tensor.device.type == "cpu" for tensor in tensors):
        return False
    own = hashlib.blake2b("\n".join(digest.digests(tensors)).encode(), digest_size=16).digest()
    mine = torch.frombuffer(bytearray(own), dtype=torch.uint8)
    told = [torch.empty_like(mine) for _ in range(ranks)]
    dist.all_gather(told, mine, group=process_group)
    return all(torch.equal(one, mine) for one in told)
