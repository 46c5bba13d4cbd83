"""A state that lies on cards: what they have done of what they were asked, and a copy past what hangs there.

The host asks a card for work and goes on. So it may be in an optimizer's step before the gradients of that step have
come, and a collective over NCCL whose peer is gone never ends, or ends with whatever is there. Hence before a step the
host waits until the card is done, and asks whether a peer is lost. While it waits there, another thread can read what
lies on the card, through a stream of its own.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterable, Iterator
from typing import Any

import torch

from ..saving.staging import HostBuffers

__all__ = ["Cards", "cards_of", "lost_over_cards"]


class Cards:
    """The cards on which the watched tensors of one rank lie.

    Args:
        devices: They.
    """

    def __init__(self, devices: Iterable[torch.device]) -> None:
        self._devices = sorted(devices, key=str)
        # Made now: where a card hangs, who knows what can still be made. torch deals 32 streams of each priority in
        # turn, and one of the usual priority may be that in which NCCL hangs.
        self._own = [torch.cuda.Stream(device, priority=-1) for device in self._devices]  # type: ignore[no-untyped-call]

    def are(self, devices: Iterable[torch.device]) -> bool:
        """Whether these are all of them."""
        return self._devices == sorted(devices, key=str)

    def asked(self, *, waits: bool = False) -> list[Any]:
        """Events behind all that the training has asked of the cards so far. ``waits``: they can be waited for."""
        events = []
        for device in self._devices:
            event = torch.cuda.Event(blocking=waits)  # type: ignore[no-untyped-call]
            event.record(torch.cuda.current_stream(device))
            events.append(event)
        return events

    @property
    def can_wait(self) -> bool:
        """Not while work is being recorded (a CUDA graph), nor traced by a compiler."""
        return not (torch.compiler.is_compiling() or torch.cuda.is_current_stream_capturing())

    def wait(self) -> None:
        """Waits until they have done all of it; gives up the interpreter meanwhile.

        Raises:
            torch.distributed.DistBackendError: A peer is lost: what a collective has left may be anything.
        """
        for event in self.asked(waits=True):
            event.synchronize()
        # A collective may have ended without its result.
        if why := lost_over_cards():
            raise torch.distributed.DistBackendError(
                f"a peer is lost ({why}): the optimizer does not step with what its collective has left"
            )

    @staticmethod
    def have_done(events: Iterable[Any]) -> bool:
        """Whether all that was asked before these events is done."""
        return all(event.query() for event in events)

    def fetch(self, content: Any) -> Any:
        """The same with its tensors in the host's memory. Any thread; waits for nothing but the copy."""
        buffers = HostBuffers(dict(zip(self._devices, self._own, strict=True)))
        with self.aside():
            copied = buffers.copy(content)
            buffers.wait()
            for stream in self._own:
                stream.synchronize()
        return copied

    @contextlib.contextmanager
    def aside(self) -> Iterator[None]:
        """Within this, what this thread asks of the cards waits for nothing that the training has asked of them.

        So only what they are done with may be read.
        """
        with contextlib.ExitStack() as streams:
            # A new thread's card is the first one, and going back to that would make a context there: half a gigabyte.
            streams.enter_context(torch.cuda.device(self._devices[0]))
            for stream in self._own:
                streams.enter_context(torch.cuda.stream(stream))
            yield


def cards_of(tensors: Iterable[torch.Tensor], known: Cards | None = None) -> Cards | None:
    """The cards on which these lie; None: all are in the host's memory.

    Args:
        known: Those of an earlier call, which stay if they still are these.

    Raises:
        ValueError: Some lie elsewhere, or it cannot be asked whether a peer is lost.
    """
    devices = {tensor.device for tensor in tensors if tensor.device.type != "cpu"}
    if not devices:
        return None
    if other := sorted(device.type for device in devices if device.type != "cuda"):
        raise ValueError(f"what lies on a device of type {other[0]} cannot be read past what hangs there")
    lost_over_cards()
    return known if known is not None and known.are(devices) else Cards(devices)


def lost_over_cards() -> str:
    """What a communicator over cards has found of its peers; empty: nothing.

    gloo, which is taken where ranks share a card, raises what it finds.

    Raises:
        ValueError: A backend for cards cannot be asked (NCCL before PyTorch 2.7).
    """
    distributed = sys.modules.get("torch.distributed.distributed_c10d")
    if distributed is None or not distributed.is_initialized():
        return ""
    for group in list(distributed._world.pg_map):
        try:
            backend = group._get_backend(torch.device("cuda"))
        except RuntimeError:
            continue  # It has none for cards.
        name = backend.name()
        if name == "gloo":
            continue
        if not hasattr(backend, "get_error"):
            raise ValueError(f"{name} of this version of PyTorch does not say whether a peer is lost")
        error = backend.get_error()
        if error.name != "SUCCESS":
            return f"{name} says {error.name}"
    return ""
