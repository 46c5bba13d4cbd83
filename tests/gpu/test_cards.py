"""What a rank can do beside a kernel that does not end: see that it has not, and read the state past it."""

from __future__ import annotations

import threading
import time

import pytest
import torch

from dalsegno.elastic.training.cards import Cards, cards_of
from tests.gpu.scenes import DEVICE, needs_card

pytestmark = [pytest.mark.timeout(120), needs_card]

# Of the kernel that stands for a hanging one: some seconds.
CYCLES = 8_000_000_000
ELEMENTS = 1 << 24


@pytest.fixture
def busy() -> Cards:
    """The training's stream has that kernel to do first."""
    state = torch.arange(ELEMENTS, device=DEVICE, dtype=torch.float32)
    cards = cards_of([state])
    assert cards is not None
    cards.fetch({"a": state})
    torch.cuda.synchronize()
    torch.cuda._sleep(CYCLES)  # type: ignore[no-untyped-call]
    return cards


def test_the_state_is_read_while_a_kernel_hangs(busy: Cards) -> None:
    state = torch.arange(ELEMENTS, dtype=torch.float32)
    with torch.cuda.stream(torch.cuda.Stream()):  # type: ignore[no-untyped-call]
        there = state.to(DEVICE)
        torch.cuda.current_stream().synchronize()
    asked = busy.asked()
    found = []
    thread = threading.Thread(target=lambda: found.append(busy.fetch({"a": there, "tied": there[:10], "step": 3})))
    thread.start()
    thread.join(60)
    assert not busy.have_done(asked)
    assert torch.equal(found[0]["a"], state)
    assert found[0]["tied"].untyped_storage().data_ptr() == found[0]["a"].untyped_storage().data_ptr()
    assert (found[0]["a"].device.type, found[0]["step"]) == ("cpu", 3)
    torch.cuda.synchronize()
    assert busy.have_done(asked)


def test_a_loss_scale_is_read_while_a_kernel_hangs() -> None:
    """Its state is a number, for which the reading thread waits in its own current stream."""
    scaler, state = torch.amp.GradScaler("cuda", init_scale=8.0), torch.ones(1, device=DEVICE)
    # Before the kernel: to load others may wait for it.
    scaler.scale(state)
    cards = cards_of([state])
    assert cards is not None
    torch.cuda.synchronize()
    torch.cuda._sleep(CYCLES)  # type: ignore[no-untyped-call]
    asked, found = cards.asked(), list[float]()

    def read() -> None:
        with cards.aside():
            found.append(scaler.state_dict()["scale"])

    thread = threading.Thread(target=read)
    thread.start()
    thread.join(60)
    assert not cards.have_done(asked)
    assert found == [8.0]
    torch.cuda.synchronize()


def test_its_stream_is_none_that_torch_deals_to_others() -> None:
    """NCCL takes its own from the same 32 as whoever names no priority."""
    state = torch.ones(8, device=DEVICE)
    cards = cards_of([state])
    assert cards is not None
    dealt = {torch.cuda.Stream().cuda_stream for _ in range(64)}  # type: ignore[no-untyped-call]
    assert not dealt & {stream.cuda_stream for stream in cards._own}
    assert cards_of([state], cards) is cards


def test_other_threads_go_on_while_one_waits(busy: Cards) -> None:
    asked = busy.asked()
    waits = threading.Thread(target=busy.wait)
    waits.start()
    counted, until = 0, time.monotonic() + 0.5
    while time.monotonic() < until:
        counted += 1
        time.sleep(0.001)
    assert counted > 50
    assert waits.is_alive()
    waits.join(60)
    assert busy.have_done(asked)


def test_work_that_is_recorded_for_later_is_not_waited_for() -> None:
    state = torch.ones(8, device=DEVICE)
    cards = cards_of([state])
    assert cards is not None
    assert cards.can_wait
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        assert not cards.can_wait
        state.add_(1)
    assert cards.can_wait
