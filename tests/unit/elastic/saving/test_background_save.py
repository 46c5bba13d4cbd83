"""What can be written in the background, although nobody has said so."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from dalsegno.elastic import TrainingState, background
from dalsegno.elastic.saving.background_save import Background, in_background


class _More(TrainingState):
    """Saves one file more than ours."""

    def write(self, path: Path) -> None:
        super().write(path)


class _Own:
    """A script's: the names of its files, and what writes them."""

    files = ("model.pt",)

    def write(self, path: Path) -> None:
        pass

    def __call__(self, path: Path) -> None:
        pass


@pytest.mark.parametrize("write", [object.__new__(_More).write, _Own().write, _Own()], ids=["more", "own", "object"])
def test_what_a_script_writes_by_itself_is_written_as_it_says(write: Any) -> None:
    """`files` beside it are other ones: not all of them, or no function at all."""
    assert in_background(write) is write


def test_what_we_write_can_be_copied_first() -> None:
    state = object.__new__(TrainingState)
    assert isinstance(in_background(state.write), Background)
    # It tries before the first step whether it can be saved.
    assert background(state.files).state.__self__ is state  # type: ignore[attr-defined]


def test_sharded_tensors_are_refused_at_the_first_save() -> None:
    """Rank 0's rows would be saved for all ranks."""
    from torch.distributed.tensor import distribute_tensor

    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        mesh = dist.init_device_mesh("cpu", (1,))
        state = background(lambda: {"model.pt": {"w": distribute_tensor(torch.ones(4), mesh)}})
        with pytest.raises(ValueError, match=r"model\.pt has a sharded tensor \(w\)"):
            state.staged(lambda given: given, Path())
    finally:
        dist.destroy_process_group()
