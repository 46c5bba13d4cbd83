"""What no optimizer knows is read in as few ranks' model states as have it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

pytest.importorskip("deepspeed")

from dalsegno.elastic.deepspeed.loading import restore_unpartitioned

FROZEN = torch.arange(1.0, 11.0)


class Engine:
    """At any stage: of a model with a trained and a frozen parameter, and a buffer."""

    def __init__(self) -> None:
        self.module = nn.Module()
        self.module.trained = nn.Parameter(torch.zeros(3))
        self.module.frozen = nn.Parameter(torch.zeros(5, 2), requires_grad=False)
        self.module.register_buffer("mean", torch.zeros(2))


def save(directory: Path, ranks: int, *, fragments: bool) -> list[Path]:
    """As stage 3 does, with a slot of ``ceil(10 / ranks)`` values of the frozen parameter on each."""
    slot = -(-len(FROZEN) // ranks)
    padded = nn.functional.pad(FROZEN, (0, slot * ranks - len(FROZEN)), value=-1.0)
    paths = [directory / f"zero_pp_rank_{rank}_mp_rank_00_model_states.pt" for rank in range(ranks)]
    for rank, path in enumerate(paths):
        state: dict[str, Any] = {
            "module": {"mean": torch.ones(2), "trained": torch.empty(0), "frozen": torch.empty(0)},
            "param_shapes": [{"trained": torch.Size([3])}],
            "buffer_names": ["mean"],
            "frozen_param_shapes": {"frozen": torch.Size([5, 2])} if fragments else None,
            "frozen_param_fragments": {"frozen": padded[rank * slot : (rank + 1) * slot].clone()},
        }
        torch.save(state, path)
    return paths


@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
def test_fragments_are_put_together(tmp_path: Path, ranks: int) -> None:
    """Whatever the padding; a gap is not the end of them."""
    paths, engine = save(tmp_path, ranks, fragments=True), Engine()
    restore_unpartitioned(engine, tmp_path)
    assert torch.equal(engine.module.frozen, FROZEN.reshape(5, 2))
    for path in paths[1:]:
        content = path.read_bytes()
        path.unlink()
        with pytest.raises(RuntimeError, match=rf"frozen: \d of 10 values are there, {path.name} is missing"):
            restore_unpartitioned(Engine(), tmp_path)
        path.write_bytes(content)


def test_without_fragments_rank_0s_is_enough(tmp_path: Path) -> None:
    """Others are not even opened."""
    _, *others = save(tmp_path, 3, fragments=False)
    others[0].unlink()
    others[1].write_bytes(b"")
    engine = Engine()
    restore_unpartitioned(engine, tmp_path)
    assert torch.equal(engine.module.mean, torch.ones(2))


def test_a_whole_one_is_no_fragment(tmp_path: Path) -> None:
    """Stages 1 and 2 have all of it in their one file."""
    (path,) = save(tmp_path, 1, fragments=True)
    path.rename(tmp_path / "mp_rank_00_model_states.pt")
    engine = Engine()
    restore_unpartitioned(engine, tmp_path)
    assert torch.equal(engine.module.frozen, FROZEN.reshape(5, 2))


@pytest.mark.parametrize("grown", [True, False])
def test_a_buffer_that_the_model_cannot_take_is_not_passed_over(tmp_path: Path, grown: bool) -> None:
    """It came, or grew, in the training; a model that is made anew has it not, or smaller."""
    save(tmp_path, 1, fragments=True)
    engine = Engine()
    if grown:
        engine.module.mean = torch.zeros(1)
    else:
        del engine.module.mean
    line = (
        r"the buffer mean has the shape \[2\] in the checkpoint, and \[1\]"
        if grown
        else "buffers that this model lacks"
    )
    with pytest.raises(RuntimeError, match=line):
        restore_unpartitioned(engine, tmp_path)


def test_buffers_that_are_one_have_both_names(tmp_path: Path) -> None:
    (path,) = save(tmp_path, 1, fragments=True)
    state = torch.load(path, weights_only=False)
    state["module"]["other"], state["buffer_names"] = torch.ones(2), ["mean", "other"]
    torch.save(state, path)
    engine = Engine()
    engine.module.register_buffer("other", engine.module.mean)
    restore_unpartitioned(engine, tmp_path)
    assert torch.equal(engine.module.other, torch.ones(2))
