"""The random generators of the cards that are in use are saved and put back, and no other."""

from __future__ import annotations

import json

import pytest
import torch

from dalsegno.elastic.rank import rng
from dalsegno.elastic.trainer.strategies import own_device
from tests.gpu.scenes import CARDS, DEVICE, needs_card, needs_two

pytestmark = pytest.mark.timeout(120)


def test_it_goes_on_bit_by_bit() -> None:
    """Draws of the CPU and of this rank's device after `restore` are those after `capture`."""
    device = own_device(0) if DEVICE == "cuda" else torch.device("cpu")
    rng.seed_rank(3, 7, 0)
    torch.rand(5, device=device)
    saved = rng.capture()
    wanted = torch.rand(8).tolist(), torch.rand(8, device=device).tolist()
    torch.manual_seed(99)
    rng.restore(saved)
    assert (torch.rand(8).tolist(), torch.rand(8, device=device).tolist()) == wanted
    assert ("cuda" in json.loads(saved)) == (DEVICE == "cuda")


@needs_card
def test_a_state_of_cpus_leaves_each_ranks_card_its_own_seed() -> None:
    """As `Session.restore_rng` does it: seeded by rank first, so that not all ranks draw the same masks."""
    own_device(0)
    torch.zeros(1, device="cuda")
    state = json.loads(rng.capture())
    del state["cuda"]
    drawn = []
    for rank in (0, 1):
        rng.seed_rank(3, 7, rank)
        rng.restore(json.dumps(state).encode())
        drawn.append(torch.rand(4, device="cuda").tolist())
    assert drawn[0] != drawn[1]


@needs_two
def test_it_goes_on_where_a_script_trains_that_makes_no_card_the_current_one() -> None:
    """As `model.to(rank)` alone does."""
    own_device(0)
    rng.seed_rank(3, 7, 0)
    torch.rand(5, device="cuda:1")
    saved = rng.capture()
    wanted = torch.rand(8, device="cuda:1").tolist()
    rng.seed_rank(3, 8, 0)
    rng.restore(saved)
    assert torch.rand(8, device="cuda:1").tolist() == wanted


@needs_two
def test_other_cards_are_left_alone() -> None:
    """Neither their generators nor a byte of their memory."""
    own_device(1)
    torch.rand(3, device="cuda")
    other = torch.cuda.default_generators[0].get_state()
    saved = rng.capture()
    wanted = torch.rand(4, device="cuda:1").tolist()
    rng.restore(saved)
    assert torch.rand(4, device="cuda:1").tolist() == wanted
    assert torch.equal(torch.cuda.default_generators[0].get_state(), other)
    assert torch.cuda.memory_allocated(0) == 0
    assert CARDS > 1
    own_device(0)
