"""Saves in the background: what is copied is the state of the step, however soon the next one changes it."""

from __future__ import annotations

import contextlib
from typing import Any

import pytest
import torch

from dalsegno.elastic.saving.staging import HostBuffers
from tests.gpu.scenes import DEVICE, needs_card

pytestmark = pytest.mark.timeout(120)

# Large enough for a copy that takes longer than what is done to the original meanwhile.
ELEMENTS, TENSORS = (1 << 24, 4) if DEVICE == "cuda" else (1 << 12, 4)
# Of the kernel before the copy; tens of milliseconds.
CYCLES = 50_000_000
REPEATS = 30


def be_busy() -> None:
    """The card has a long kernel to do before anything else."""
    if DEVICE == "cuda":
        torch.cuda._sleep(CYCLES)  # type: ignore[no-untyped-call]


def aside() -> Any:
    """The training's stream is one of its own."""
    return torch.cuda.stream(torch.cuda.Stream())  # type: ignore[no-untyped-call]


def state(value: float) -> dict[str, Any]:
    model = {f"layer-{n}": torch.full((ELEMENTS,), value + n, device=DEVICE) for n in range(TENSORS)}
    return {"model": model, "tied": model["layer-0"][: ELEMENTS // 2], "step": int(value)}


def spoil(given: dict[str, Any]) -> None:
    """What an optimizer and a running statistic do, at once."""
    for tensor in given["model"].values():
        tensor.mul_(-3)
        tensor.add_(1)
    torch._foreach_zero_(list(given["model"].values()))


@pytest.mark.parametrize("own_stream", [False, pytest.param(True, marks=needs_card)])
def test_what_is_copied_is_the_state_of_that_step(own_stream: bool) -> None:
    """A long kernel before, in-place changes right after, many times: not a value of another step."""
    buffers = HostBuffers()
    with aside() if own_stream else contextlib.nullcontext():
        given = state(0)
        for repeat in range(REPEATS):
            for n, tensor in enumerate(given["model"].values()):
                tensor.fill_(repeat + n)
            be_busy()
            copied = buffers.copy(given)
            spoil(given)
            buffers.wait()
            for n, tensor in enumerate(copied["model"].values()):
                assert tensor.device.type == "cpu"
                assert bool((tensor == repeat + n).all()), f"repeat {repeat}, layer {n}"
            assert copied["tied"].data_ptr() == copied["model"]["layer-0"].data_ptr()
            buffers.release()


def test_what_is_let_go_of_is_copied_first() -> None:
    """Memory that is given back while it is copied, and taken again at once, belongs to the copy until that is done."""
    buffers = HostBuffers()
    for repeat in range(REPEATS):
        be_busy()
        copied = buffers.copy([torch.full((ELEMENTS,), float(repeat), device=DEVICE)])
        others = [torch.full((ELEMENTS,), -1.0, device=DEVICE) for _ in range(2)]
        buffers.wait()
        assert bool((copied[0] == repeat).all()), f"repeat {repeat}"
        buffers.release()
        del others


@needs_card
def test_the_host_does_not_wait_for_the_copy() -> None:
    """`copy` returns while the card is still busy with what was asked before; the memory it copies to is pinned."""
    buffers, given = HostBuffers(), state(1)
    buffers.copy(given)
    buffers.wait()
    buffers.release()
    for _ in range(10):
        be_busy()
    buffers.copy(given)
    assert not any(end.query() for end in buffers._ends), "the copy cannot be there yet"
    assert all(buffer.is_pinned() for _, buffer in buffers._used)
    buffers.wait()
    assert all(end.query() for end in buffers._ends)


@needs_card
def test_what_is_no_plain_tensor_leaves_the_card_too() -> None:
    """A sparse matrix, a conjugate view, one without memory: all on the CPU, and what they were."""
    dense = torch.eye(4, device=DEVICE)
    wanted = {"sparse": dense.to_sparse(), "conjugate": (dense + 1j).conj(), "nothing": torch.empty(0, device=DEVICE)}
    buffers = HostBuffers()
    copied = buffers.copy(wanted)
    buffers.wait()
    assert {tensor.device.type for tensor in copied.values()} == {"cpu"}
    assert torch.equal(copied["sparse"].to_dense(), dense.cpu())
    assert torch.equal(copied["conjugate"].resolve_conj(), wanted["conjugate"].cpu().resolve_conj())


def test_state_on_both_sides_is_copied_alike() -> None:
    """An optimizer's count of steps on the CPU beside its moments on the card, of the same size in bytes."""
    buffers = HostBuffers()
    here, there = torch.arange(8, dtype=torch.float32), torch.arange(8, dtype=torch.float32, device=DEVICE)
    for _ in range(3):
        copied = buffers.copy({"here": here, "there": there})
        buffers.wait()
        assert torch.equal(copied["here"], here)
        assert torch.equal(copied["there"], there.cpu())
        buffers.release()
        here, there = here + 1, there * 2
