"""Which ranks compute each sample together, as far as a model's parameters show it: tensor parallelism.

FSDP shards what each rank gathers again before it computes: its ranks have samples of their own. Where a model is split
for the computation, the ranks of a group compute one sample together.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch.distributed as dist
from torch import nn

from dalsegno.protos.text import few

__all__ = ["Together", "together"]


class Together(NamedTuple):
    """Ranks over which a parameter is sharded, and over which nothing known averages gradients.

    Attributes:
        ranks: Of the whole world.
        group: Theirs.
        device: Kind of device of the mesh.
        names: The parameters.
        split: ``parallelize_module`` has split a module over them, so they surely compute together.
    """

    ranks: tuple[int, ...]
    group: Any
    device: str
    names: list[str]
    split: bool

    @property
    def what(self) -> str:
        """What is sharded over whom, for people."""
        return (
            f"{few(self.names)} {'are' if len(self.names) > 1 else 'is'} sharded over ranks {few(map(str, self.ranks))}"
        )


def together(model: nn.Module) -> list[Together]:
    """Groups of ranks over which parameters are sharded, apart from those that FSDP or DDP average over."""
    if not dist.is_available() or not dist.is_initialized():
        return []
    averaged = list(_averaged(model))
    if not averaged and any(hasattr(module, "set_requires_gradient_sync") for module in model.modules()):
        return []  # of another version, whose groups are not known
    found: dict[tuple[int, ...], Together] = {}
    for path, module in model.named_modules():
        split = bool(getattr(module, "_distribute_module_applied", False))
        for name, parameter in module.named_parameters(path, recurse=False):
            for ranks, group, device in _sharded_over(parameter):
                if any(set(ranks) <= all_ for all_ in averaged):
                    continue
                known = found.get(ranks, Together(ranks, group, device, [], split))
                known.names.append(name)
                found[ranks] = known._replace(split=known.split or split)
    return list(found.values())


def _sharded_over(parameter: Any) -> Iterator[tuple[tuple[int, ...], Any, str]]:
    """Of a ``DTensor``: the ranks, among them this one, of each dimension of its mesh that shards it."""
    mesh = getattr(parameter, "device_mesh", None)
    if mesh is None or not hasattr(parameter, "to_local") or mesh.get_coordinate() is None:
        return
    for dimension, placement in enumerate(parameter.placements):
        if mesh.size(dimension) > 1 and not placement.is_replicate():
            group = mesh.get_group(dimension)
            yield tuple(sorted(dist.get_process_group_ranks(group))), group, mesh.device_type


def _averaged(model: nn.Module) -> Iterator[set[int]]:
    """Ranks whose gradients a wrapper averages: each of them has samples of its own.

    Experts are sharded over some of the ranks that average the rest (expert parallelism), and have their samples, too.
    """
    for module in model.modules():
        ddps: Any = getattr(module, "process_group", None) if hasattr(module, "parameters_to_ignore") else None
        if ddps is not None:
            yield set(dist.get_process_group_ranks(ddps))
        if not hasattr(module, "set_requires_gradient_sync"):
            continue
        state = getattr(module, "_get_fsdp_state", lambda: None)()
        # Torch before 2.12 has one group of parameters for each module.
        one = getattr(state, "_fsdp_param_group", None) if not hasattr(state, "_fsdp_param_groups") else None
        for group in getattr(state, "_fsdp_param_groups", [one]):
            mesh = getattr(getattr(group, "mesh_info", None), "mesh", None)
            if mesh is not None:
                yield set(mesh.mesh.flatten().tolist())
