"""DeepSpeed's workers need a card each: what ranks without one hear, as far as that can be shown without a card."""

from __future__ import annotations

import threading
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist

from dalsegno.elastic.deepspeed import own_cards
from tests.support.workers.zero_runs import run_world

CURE = "(CUDA_VISIBLE_DEVICES), and start as many workers as it has (--nproc-per-node=gpu); or train on CPUs (DS_ACCEL"


@pytest.mark.parametrize(
    ("local_ranks", "nodes", "said"),
    [
        ([0, 1], "aa", ""),
        ([0, 0], "ab", ""),
        ([0, 0], "aa", "2 ranks have 1 card, and DeepSpeed wants one for each worker"),
        ([0, 1, 2], "aaa", "3 ranks have 2 cards, and DeepSpeed wants one"),
        ([2, 3], "aa", "2 ranks have 0 cards, and DeepSpeed wants one"),
    ],
    ids=["each its own", "two machines", "two nodes of one machine", "too many workers", "none"],
)
def test_all_ranks_hear_who_lacks_a_card(
    monkeypatch: pytest.MonkeyPatch, local_ranks: list[int], nodes: str, said: str
) -> None:
    """Two cards on each machine."""
    monkeypatch.setattr(own_cards, "get_accelerator", lambda: SimpleNamespace(device_count=lambda: 2))
    names = threading.local()

    def named(device: torch.device) -> str:
        return f"{names.machine}/{device.index}"

    monkeypatch.setattr(own_cards, "name_of_card", named)
    store = dist.HashStore()  # type: ignore[attr-defined]
    found: list[str] = []

    def ask(rank: int) -> None:
        names.machine = nodes[rank]
        try:
            own_cards.check_own_cards(store, rank, len(local_ranks), local_ranks[rank])
            found.append("")
        except ValueError as error:
            found.append(str(error))

    threads = [threading.Thread(target=ask, args=(rank,)) for rank in range(len(local_ranks))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert len(found) == len(local_ranks)
    assert all(one.startswith(said) and (CURE in one) == bool(said) for one in found), found


PREPARES = """
import os, sys
import deepspeed
from dalsegno.elastic import deepspeed as ours
from dalsegno.elastic import session
from dalsegno.elastic.deepspeed import engine, own_cards
class Cards:
    def device_name(self): return "cuda"
    def device_count(self): return 1
    def communication_backend_name(self): return "nccl"
engine.get_accelerator = own_cards.get_accelerator = Cards
own_cards.name_of_card = lambda device: sys.argv[1].split(",")[int(os.environ["RANK"])]
os.environ["LOCAL_RANK"] = "0"
deepspeed.init_distributed = lambda **options: print("makes a group", options["dist_backend"])
s = session()
ours.prepare()
s.sum(0.0)
"""


@pytest.mark.parametrize(("cards", "code"), [("one,one", 1), ("one,other", 0)])
def test_a_loop_of_ones_own_is_refused_before_the_group(tmp_path: Path, cards: str, code: int) -> None:
    """As with two nodes on one machine, whose ranks both take its first card."""
    script = tmp_path / "train.py"
    script.write_text(PREPARES)
    ended = run_world(2, [str(script), cards], seconds=60)
    outputs = "\n".join(output for _, output in ended)
    assert [one for one, _ in ended] == [code, code], outputs
    assert all(("makes a group nccl" in output) == (code == 0) for _, output in ended), outputs
    line = "ValueError: 2 ranks have 1 card, and DeepSpeed wants one for each worker"
    assert all((line in output) == (code == 1) for _, output in ended), outputs
