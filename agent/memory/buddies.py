"""This node's own parts on their way to the agents that hold them for it."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Sequence

import grpc

from dalsegno.elastic.checkpoint import CheckpointDamaged
from dalsegno.protos.peer_address import shown

from .calls import OPEN_PORTS, PeerError, Peers, SendPace
from .holdings import StepPart

__all__ = ["Buddies", "Buddy"]

# Between the tries of one part, seconds. A newer one ends them.
_PAUSES_SECONDS = (0.5, 2.0, 5.0, 5.0)
# What has failed for so long is said (seconds), also if newer parts take the place of what failed.
_SAY_AFTER_SECONDS = 10.0
# What answers, but takes nothing, is said after so many tries.
_TRIES = 4
# What another try may mend: room is made when older steps are deleted, and a buddy may serve many others just now.
_MAY_PASS = (
    grpc.StatusCode.UNAVAILABLE,
    grpc.StatusCode.DATA_LOSS,
    grpc.StatusCode.CANCELLED,
    grpc.StatusCode.RESOURCE_EXHAUSTED,
)

logger = logging.getLogger(__name__)


class Buddy:
    """One agent that holds our parts. Sends one at a time; of those that wait only the newest is sent.

    Args:
        address: as the master tells it (`PeerAddress`).
        pace: of all buddies.
        on_held: called with the address when it holds a part.
        on_unsent: called with the address when a part cannot be brought there, or is not waited for any more.
        on_bad: called when a part of ours is not what was sealed.
    """

    def __init__(
        self,
        address: str,
        peers: Peers,
        pace: SendPace,
        on_held: Callable[[StepPart, str], None],
        on_unsent: Callable[[StepPart, str], None],
        on_bad: Callable[[StepPart, CheckpointDamaged], None],
        say: Callable[[str, bool], None],
    ) -> None:
        self.address = address
        self._peers, self._pace = peers, pace
        self._on_held, self._on_unsent, self._on_bad, self._say = on_held, on_unsent, on_bad, say
        self._stop = threading.Event()
        self._changed = threading.Condition()
        self._next: StepPart | None = None
        self._behind: StepPart | None = None
        # Nothing of earlier epochs is wanted any more.
        self._least_epoch = 0
        # It has been said that it does not take our parts.
        self._said = False
        # Since when no part has come there; and since when nobody has answered there.
        self._failing_since: float | None = None
        self._silent_since: float | None = None
        # Why the last part did not come there; None: it did.
        self._failure: PeerError | None = None
        self._thread = threading.Thread(target=self._run, name="memory-buddy", daemon=True)
        self._thread.start()

    def offer(self, part: StepPart, urgent: bool = False) -> None:
        """To be sent as soon as may be; of this and what waits only the newer one is.

        What waits is sent behind an `urgent` one: a drain is the last chance of what may be the best.
        """
        with self._changed:
            older, newer = self._next, part
            if older is not None and _age(older) > _age(part):
                older, newer = part, older
            if urgent and older is not None:
                older, self._behind = self._behind, older
            self._next = newer
            self._changed.notify_all()
        if older is not None:
            self._on_unsent(older, self.address)

    def forget(self, before_epoch: int) -> None:
        """Parts of earlier epochs that wait are not sent any more: they may be deleted here by now."""
        with self._changed:
            self._least_epoch = before_epoch
            waiting = (self._next, self._behind)
            wanted = [part for part in waiting if part is not None and part.manifest.epoch >= before_epoch]
            self._next, self._behind = (*wanted, None, None)[:2]
            self._changed.notify_all()

    def close(self) -> None:
        """What is under way may finish, as long as the agent lives; nothing else begins."""
        with self._changed:
            self._stop.set()
            self._next = self._behind = None
            self._changed.notify_all()

    def _run(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._next is not None or self._stop.is_set())
                if self._stop.is_set():
                    return
                part, self._next, self._behind = self._next, self._behind, None
            assert part is not None
            try:
                self._send(part)
            except Exception:
                logger.exception("%s was not sent to %s", part, shown(self.address))
                self._on_unsent(part, self.address)

    def _send(self, part: StepPart) -> None:
        """Tries it until it is there, a newer one is next, or it cannot be.

        All nodes send one step at a time. So where the part before did not come there this one is not waited for: it is
        told as unsent when its first try fails, or at once where nobody answers, which takes seconds.
        """
        before = self._failure
        if told := before is not None and before.unreachable:
            self._on_unsent(part, self.address)
        for tries, pause in enumerate((*_PAUSES_SECONDS, None), 1):
            try:
                self._peers.send(self.address, part, self._pace)
            except CheckpointDamaged as damaged:
                self._on_bad(part, damaged)
                return
            except PeerError as error:
                logger.info("%s was not sent to %s: %s %s", part, shown(self.address), error.code.name, error)
                if error.closed or self._is_over(part):
                    return
                for_good = error.ours or error.code not in _MAY_PASS
                if for_good or self._is_worth_a_word(error, tries >= _TRIES or pause is None):
                    self._complain(part, error)
                if before is not None and not told:
                    told = True
                    self._on_unsent(part, self.address)
                if for_good or pause is None or self._overtaken(part, pause):
                    if self._is_over(part):
                        return
                    self._failure = error
                    if not told:
                        self._on_unsent(part, self.address)
                    return
            else:
                self._said, self._failure, self._failing_since, self._silent_since = False, None, None, None
                self._on_held(part, self.address)
                return

    def _is_worth_a_word(self, error: PeerError, settled: bool) -> bool:
        """Whether people hear of what may pass. Where nobody answers, the next world may soon be without that node."""
        now = time.monotonic()
        self._failing_since = self._failing_since or now
        if error.unreachable:
            self._silent_since = self._silent_since or now
            return now - self._silent_since >= _SAY_AFTER_SECONDS
        self._silent_since = None
        return settled or now - self._failing_since >= _SAY_AFTER_SECONDS

    def _overtaken(self, part: StepPart, pause: float) -> bool:
        """Waits; whether something newer is to be sent, or nothing any more."""
        with self._changed:
            return self._changed.wait_for(lambda: self._next is not None or self._is_over(part), pause)

    def _is_over(self, part: StepPart) -> bool:
        """Nobody wants this part there any more, and so nothing that failed with it is worth a word."""
        return self._stop.is_set() or part.manifest.epoch < self._least_epoch

    def _complain(self, part: StepPart, error: PeerError) -> None:
        if self._said:
            return
        self._said = True
        text = (
            f"{shown(self.address)} does not hold {part}: {error}; training goes on, and newer steps are tried: until"
            " one is held there, the loss of this node may cost the steps since the last that was"
        )
        if error.ours:
            text = f"{part} was not sent to {shown(self.address)}: {error}; training goes on"
        if error.unreachable:
            text = (
                f"no replica of this node's memory checkpoints comes to {shown(self.address)}: {error}; until one does,"
                f" the loss of this node may cost the steps since the last commit on the disk: {OPEN_PORTS}"
            )
        self._say(text, True)


def _age(part: StepPart) -> tuple[int, int, int]:
    return part.manifest.parsed_name.age


class Buddies:
    """Those of this moment. Thread-safe.

    Args:
        make: a buddy at an address.
    """

    def __init__(self, make: Callable[[str], Buddy]) -> None:
        self._make = make
        self._lock = threading.Lock()
        self._buddies: dict[str, Buddy] = {}
        self._last: StepPart | None = None
        self._closed = False

    def set(self, addresses: Sequence[str], epoch: int) -> None:
        """A world has opened: these hold our parts from now on. New ones are sent what was sent last in it."""
        with self._lock:
            if self._closed:
                return
            for address in [address for address in self._buddies if address not in addresses]:
                self._buddies.pop(address).close()
            for buddy in self._buddies.values():
                buddy.forget(epoch)
            for address in dict.fromkeys(addresses):
                if address not in self._buddies:
                    self._buddies[address] = self._make(address)
                    if self._last is not None and self._last.manifest.epoch == epoch:
                        self._buddies[address].offer(self._last)

    def offer(self, part: StepPart, urgent: bool = False) -> bool:
        """To be sent to all, unless it was the last that was to be. False: it is not, since that was a newer one."""
        with self._lock:
            if self._last is not None and self._last.key == part.key:
                return True
            if self._last is not None and _age(self._last) >= _age(part):
                return False
            self._last, buddies = part, list(self._buddies.values())
        for buddy in buddies:
            buddy.offer(part, urgent)  # It tells what this part takes the place of.
        return True

    def close(self) -> None:
        with self._lock:
            self._closed = True
            for buddy in self._buddies.values():
                buddy.close()
            self._buddies.clear()
