"""A rank that wraps models with DistributedDataParallel behind `send_what_differs`.

It prints ``sent {case: [how often torch sent its tensors, whether rank 0's are here then]}``.
"""

from __future__ import annotations

import json
from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel, distributed

from dalsegno.elastic.training.sending import send_what_differs

_sent: list[nn.Module] = []


def model() -> nn.Module:
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4))


def another_bit(made: nn.Module) -> None:
    weight = next(made.parameters())
    weight.detach().view(torch.int32)[0, 0] ^= 1


def another_buffer(made: nn.Module) -> None:
    next(made.buffers()).add_(1)


CASES: dict[str, Callable[[nn.Module], None]] = {
    "alike": lambda made: None,
    "a bit": another_bit,
    "a buffer": another_buffer,
}


def sent(made: nn.Module) -> tuple[int, bool]:
    before = len(_sent)
    DistributedDataParallel(made)
    values = zip(made.state_dict().values(), model().state_dict().values(), strict=True)
    here = all(torch.equal(value, wanted) for value, wanted in values)
    return len(_sent) - before, here


def main() -> None:
    dist.init_process_group("gloo")
    known = distributed._sync_module_states

    def counted(module: nn.Module, *arguments: object, **options: object) -> None:
        _sent.append(module)
        known(module, *arguments, **options)

    distributed._sync_module_states = counted
    found = {"never told": sent(model())}
    for name, change in CASES.items():
        made = model()
        if dist.get_rank() == dist.get_world_size() - 1 > 0:
            change(made)
        send_what_differs(made)
        found[name] = sent(made)
        if name == "alike":
            found["wrapped again"] = sent(made)
    inner = model()
    send_what_differs(inner)
    found["within another"] = sent(nn.Sequential(inner))
    print("sent", json.dumps(found), flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
