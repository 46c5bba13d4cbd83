"""The training's process group, on cards of their own and on one that is shared."""

from __future__ import annotations

import json

import pytest

from tests.gpu.scenes import DEVICE, Executed, environment, free_port

pytestmark = pytest.mark.timeout(200)

# Where there is no card, one is made up, as far as it is asked who it is.
SCRIPT = """
import json, sys, types
import torch, torch.distributed as dist
from dalsegno.elastic.process_group import init_process_group
if sys.argv[1] == "cpu":
    torch.cuda.get_device_properties = lambda device: types.SimpleNamespace(uuid="the only card")
else:
    torch.cuda.set_device(0)
init_process_group(torch.device("cuda", 0))
sums = []
for device in ("cpu", sys.argv[1]):
    value = torch.ones(3, device=device)
    dist.all_reduce(value)
    sums.append(value.tolist())
print(json.dumps({"backend": dist.get_backend_config(), "sums": sums}))
dist.destroy_process_group()
"""


def test_two_ranks_on_one_card_find_out_and_take_gloo() -> None:
    """NCCL would refuse it, after a while and in its own words: both ranks are told before, and rank 0 says it."""
    told = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "WORLD_SIZE": "2"}
    made = [
        Executed(["-c", SCRIPT, DEVICE], environment(RANK=str(rank), LOCAL_RANK=str(rank), **told)) for rank in (0, 1)
    ]
    try:
        ended = [rank.wait(150) for rank in made]
    finally:
        for rank in made:
            rank.close()
    assert [code for code, _ in ended] == [0, 0], ended
    said = [json.loads(next(line for line in output.splitlines() if line.startswith("{"))) for _, output in ended]
    assert said[0] == said[1]
    assert said[0]["sums"] == [[2.0] * 3] * 2
    assert "nccl" not in said[0]["backend"]
    assert ["2 ranks share 1 card, up to 2 on one" in output for _, output in ended] == [True, False]
