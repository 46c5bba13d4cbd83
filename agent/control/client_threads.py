"""What the threads of the agent's client share: whom they tell, how they pause, and what ends them."""

from __future__ import annotations

import logging
import random
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

import grpc
from google.protobuf.message import Message

from dalsegno.protos import control_pb2

from ..decisions.contact import AWAY_AFTER_SECONDS, NEWER_CALLS, is_stranger
from .connection import RETRIED

__all__ = [
    "FIRST_BACKOFF_SECONDS",
    "LAST_BACKOFF_SECONDS",
    "Backoff",
    "ClientCallbacks",
    "Hearing",
    "Outbox",
    "OutboxFull",
    "WaitingCall",
    "kept_up",
]

# Seconds.
FIRST_BACKOFF_SECONDS, LAST_BACKOFF_SECONDS = 0.05, 1.0
# A loop that fails so many times, each time within so many seconds, will never do its work.
_MOST_FAILURES = 5
# A call that came after protocol 2 is unknown so many times while the master is heard in between: it is an older one.
_MOST_UNKNOWN = 5
_SOON_SECONDS = 30.0

logger = logging.getLogger(__name__)


class OutboxFull(RuntimeError):
    """More calls wait for an absent master than anything sensible could make."""


@dataclass(frozen=True)
class ClientCallbacks:
    """Callbacks of the client. One is called at a time, on a thread of the client's.

    Attributes:
        registered: (incarnation, reply) after `register`.
        refused: (code, detail): `register` was answered with an error that repeating does not cure, or can never be
            answered, because master and agent do not agree on TLS (code "TLS").
        directed: a directive of at least the highest generation seen.
        failed: (method, code, detail): a call was answered with an error. Also for the stream ("Watch").
        link: (up, refused): whether the master is heard (again), or no longer; and if not, whether it answers, but does
            not take the token.
        postponed: (detail): `register` was answered "not yet"; it is repeated.
        replication: (digest, generation, what is said of sending parts, if anything): the answer to what is held of a
            step, or, with no digest, to a sign of life.
        records: (whether the master can record what it decides): with each answer to a sign of life.
        broken: (detail): a bug of ours keeps one of the client's threads from its work for good.
    """

    registered: Callable[[str, control_pb2.RegisterReply], None]
    refused: Callable[[str, str], None]
    directed: Callable[[control_pb2.Directive], None]
    failed: Callable[[str, str, str], None]
    link: Callable[[bool, bool], None]
    postponed: Callable[[str], None] = lambda detail: None
    replication: Callable[[str, int, control_pb2.Replication | None], None] = lambda *said: None
    records: Callable[[bool], None] = lambda records: None
    broken: Callable[[str], None] = lambda detail: None


@dataclass
class WaitingCall:
    """A call that waits for its answer."""

    method: str
    request: Message
    session: int
    internal_errors: int = 0
    # It may have come to the master, also without an answer: what it says stays as it is.
    tried: bool = False
    # Of what is held of a step no master has heard before.
    is_first: bool = False
    # When the master was last heard, at each answer that this call is unknown.
    unknown_at: set[float] = field(default_factory=set)


class Outbox(deque[WaitingCall]):
    """Calls that wait for their answers, the oldest first. Not thread-safe."""

    def __init__(self) -> None:
        super().__init__()
        # Digests of the steps of which something is held, as far as was said, or will be.
        self._held: set[str] = set()

    def forget(self) -> None:
        """Drops all. The next session's master has heard of nothing."""
        self.clear()
        self._held.clear()

    def renew(self, request: Message) -> bool:
        """Brings what waits up to date with a request. True: that need not wait itself.

        What is held of a step takes the place of what waits and says that, too. Where nothing is any more, and no
        master has heard that something was, neither is said. Of shortages the newest is.
        """
        if isinstance(request, control_pb2.ShortageRequest):
            for waiting in [one for one in self if not one.tried and isinstance(one.request, type(request))]:
                self.remove(waiting)
            return False
        if not isinstance(request, control_pb2.HeldRequest) or not request.HasField("checkpoint"):
            return False
        for waiting in self:
            older, ref = waiting.request, request.checkpoint.ref
            if not waiting.tried and isinstance(older, control_pb2.HeldRequest) and older.checkpoint.ref == ref:
                if waiting.is_first and not request.parts:
                    self.remove(waiting)
                request.caller.request = older.caller.request
                waiting.request = request
                self._note(request)
                return True
        return False

    def put(self, method: str, request: Message, session: int) -> None:
        """Lets a call wait behind all others."""
        self.append(WaitingCall(method, request, session, is_first=self._note(request)))

    def _note(self, request: Message) -> bool:
        """Whether it says for the first time that something is held of a step, and that was said to nobody."""
        if not isinstance(request, control_pb2.HeldRequest) or not request.HasField("checkpoint"):
            return False
        digest = request.checkpoint.ref.digest
        known = digest in self._held
        (self._held.add if request.parts else self._held.discard)(digest)
        return bool(request.parts) and not known


class Hearing:
    """Whether the master is heard, and whether it takes our token. Not thread-safe.

    Attributes:
        heard_at: seconds at which it answered last; None: it never has.
        contact: (up, refused), as found.
        told: the same, as somebody was last told.
    """

    def __init__(self) -> None:
        self.heard_at: float | None = None
        self.contact = self.told = (True, False)
        self._refused_on: object = None

    def heard(self, now: float) -> bool:
        """Notes an answer. True: somebody has to be told that it is heard, before all else that it said.

        So it stays until that was told: another thread may have heard it first, and not yet come to tell.
        """
        before, self.contact, self.heard_at, self._refused_on = self.contact, (True, False), now, None
        return before != self.contact or self.told != self.contact

    def unheard(self, now: float, link: object, *, refused: bool) -> bool:
        """Notes a call without an answer, or one with our token refused. True: that is news.

        It is refused once a second link has met that, too: each reads the token anew, which may have been changed here.
        """
        before, (up, known) = self.contact, self.contact
        if refused:
            known = known or self._refused_on not in (None, id(link))
            self._refused_on = self._refused_on or id(link)
        away = self.heard_at is not None and now - self.heard_at > AWAY_AFTER_SECONDS
        self.contact = (up and not (away or known), known)
        return before != self.contact

    def is_silence(self, code: grpc.StatusCode, detail: str, waiting: WaitingCall | None = None) -> bool:
        """Whether a status says nothing about the call: nobody has answered, or another program where our master was.

        That one may have taken its port while it is away, or a proxy answers for it. Only newer calls are unknown to
        a master of ours, to an older one, which is heard all the while. A remark is not worth the tries.

        Args:
            code, detail: The answer.
            waiting: The call; None: one that each master of ours knows.
        """
        method = waiting.method if waiting is not None else ""
        if code is not grpc.StatusCode.UNIMPLEMENTED or method == "ReportRemark":
            return code in RETRIED
        if self.heard_at is None or not is_stranger(detail):
            return False
        if waiting is not None and method in NEWER_CALLS:
            waiting.unknown_at.add(self.heard_at)
            return len(waiting.unknown_at) < _MOST_UNKNOWN
        return True


class Backoff:
    """Growing pauses with jitter, cut short by `event`.

    A try that took longer than the longest pause is followed by the shortest: a standby has had it wait already.
    """

    def __init__(self, event: threading.Event) -> None:
        self._event = event
        self._next = FIRST_BACKOFF_SECONDS
        # When the last pause was over.
        self._since = time.monotonic()

    def reset(self) -> None:
        self._next = FIRST_BACKOFF_SECONDS

    def led(self, leader: str) -> str:
        """The same address; where there is one, the next pause is the shortest."""
        if leader:
            self.reset()
        return leader

    def wait(self) -> None:
        if time.monotonic() - self._since > LAST_BACKOFF_SECONDS:
            self.reset()
        self._event.wait(self._next * random.uniform(0.7, 1.3))
        self._next = min(self._next * 2, LAST_BACKOFF_SECONDS)
        self._since = time.monotonic()


def kept_up(name: str, loop: Callable[[], None], closing: threading.Event, broken: Callable[[str], None]) -> None:
    """Runs `loop` until it returns, and again after an error: without its thread the agent would be deaf.

    Args:
        name: of the thread, for the log.
        loop: returns once `closing` is set; can be started again at any point of its work.
        closing: once it is set, nothing is started again.
        broken: called once if the loop failed again and again; it is then given up.
    """
    failures = 0
    while not closing.is_set():
        began = time.monotonic()
        try:
            loop()
        except Exception as error:
            failures = failures + 1 if time.monotonic() - began < _SOON_SECONDS else 1
            logger.exception("the thread %r failed", name)
            if failures >= _MOST_FAILURES:
                broken(f"the agent's thread {name!r} fails again and again ({type(error).__name__}: {error})")
                return
        closing.wait(LAST_BACKOFF_SECONDS)
