"""The agent's client of the control plane: one object, three threads, and no call that blocks.

- the outbox sends what changes the job, in order, one at a time, each until it is answered;
- the pulse sends heartbeats, and the newest progress as soon as there is one;
- the watch keeps the stream of directives open.

Callbacks of `ClientCallbacks` get the results, each on one of these threads.
"""

from __future__ import annotations

import logging
import random
import secrets
import threading
import time
from collections.abc import Callable
from functools import partial

import grpc
from google.protobuf.message import Message

from dalsegno.protos import control_pb2
from dalsegno.protos.contract import CONTROL_PROTOCOL, HEARTBEAT_SECONDS
from dalsegno.protos.limits import MESSAGE_BYTES
from dalsegno.protos.trace import mark

from .client_threads import Backoff, ClientCallbacks, Hearing, Outbox, OutboxFull, WaitingCall, kept_up
from .connection import Connector, MasterLink, code_of, detail_of, leader_of
from .master_checks import MOST
from .pace import ReportPace

__all__ = ["CALL_TIMEOUT_SECONDS", "HEARTBEAT_SECONDS", "ClientCallbacks", "MasterClient", "OutboxFull"]

# Seconds.
CALL_TIMEOUT_SECONDS = 10.0
_HEARTBEAT_TIMEOUT_SECONDS = 3.0
# The most calls that may wait for an absent master; a run makes a few per epoch and one per checkpoint.
_MOST_WAITING = 10_000
# How often a call is repeated after an error inside the master, which a restart may cure.
_MOST_INTERNAL_ERRORS = 5
_NO_LINK = "no address is known, or no token"
_INTERNAL = frozenset({grpc.StatusCode.INTERNAL, grpc.StatusCode.UNKNOWN})

logger = logging.getLogger(__name__)


class MasterClient:
    """Speaks for one agent, in sessions: one for each incarnation.

    Args:
        connector: provides the link to the master.
        job_id: the job id for every caller.
        listener: gets the results.
        clock: returns monotonic seconds.
    """

    def __init__(
        self, connector: Connector, job_id: str, listener: ClientCallbacks, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._connector = connector
        self._job_id = job_id
        self._listener = listener
        self._clock = clock
        # Other nodes may learn an incarnation, but never this secret.
        self._secret = secrets.token_bytes(16)
        self._pace = ReportPace(clock(), clock())
        self._changed = threading.Condition()
        # Held while the listener is called: see `_tell`. Taken before `_changed`, never inside it.
        self._telling = threading.Lock()
        self._closing = threading.Event()
        self._queue = Outbox()
        self._progress: control_pb2.ProgressRequest | None = None
        # Grows with every `register`; calls, streams and answers of an older session are dropped.
        self._session = 0
        self._node = ""
        self._incarnation = ""
        self._registered = False
        self._request = 0
        self._epoch = 0
        self._generation = 0
        self._hearing = Hearing()
        self._stream: grpc.Call | None = None
        self._threads = [
            threading.Thread(
                target=kept_up, args=(name, target, self._closing, listener.broken), name=name, daemon=True
            )
            for target, name in ((self._send_loop, "outbox"), (self._pulse_loop, "pulse"), (self._watch_loop, "watch"))
        ]
        for thread in self._threads:
            thread.start()

    # ---- for the agent ----------------------------------------------------------------------------------------------

    @property
    def generation(self) -> int:
        """The highest generation of a master that was heard."""
        with self._changed:
            return self._generation

    def saw_generation(self, generation: int) -> None:
        """Takes a generation that others know (a claim): masters of lower ones are then ignored."""
        with self._changed:
            self._generation = max(self._generation, generation)

    def new_session(self) -> None:
        """From now on calls belong to the incarnation that `register` names next, and wait for its answer.

        Unanswered calls of the previous incarnation are dropped. A session that was never registered goes on.
        """
        with self._changed:
            if not self._registered:
                return
            self._session += 1
            self._registered = False
            self._request = 0
            self._progress = None
            self._queue.forget()
            self._cancel_stream()
            self._changed.notify_all()

    def register(self, request: control_pb2.RegisterRequest) -> None:
        """Registers `request.incarnation` before all calls of the session; repeated until answered.

        The present incarnation may say more of itself: its unanswered calls are sent behind that.
        """
        with self._changed:
            if request.incarnation == self._incarnation:
                self._registered = False
                self._cancel_stream()
            self.new_session()
            # An answer to an earlier attempt does not count for this one.
            self._session += 1
            self._incarnation = request.incarnation
            (copied := control_pb2.RegisterRequest()).CopyFrom(request)
            copied.job_id, copied.protocol, copied.secret = self._job_id, CONTROL_PROTOCOL, self._secret
            copied.generation = max(copied.generation, self._generation)
            later = [waiting for waiting in self._queue if waiting.method != "Register"]
            for waiting in later:
                waiting.session = self._session
            self._queue.clear()
            self._queue += [WaitingCall("Register", copied, self._session), *later]
            self._changed.notify_all()

    def call(self, method: str, request: Message) -> None:
        """Sends a changing call after all earlier ones. Fills in its caller, except for `caller.epoch`.

        `ReportProgress` and `Heartbeat` change nothing: only the newest progress is sent, and an unsent older one is
        forgotten. What is said to be held of a step takes the place of what waits and says that of the same step: a
        master that comes back must not take for held what has gone meanwhile.

        Raises:
            OutboxFull: the master has been away for very long.
        """
        with self._changed:
            copied = type(request)()
            copied.CopyFrom(request)
            self._epoch = max(self._epoch, self._caller(copied).epoch)
            if isinstance(copied, control_pb2.ProgressRequest):
                self._progress = copied
            elif not self._queue.renew(copied):
                if len(self._queue) >= _MOST_WAITING:
                    raise OutboxFull(f"{_MOST_WAITING} calls wait for a master that cannot be reached")
                self._request += 1
                self._caller(copied).request = self._request
                self._queue.put(method, copied, self._session)
            self._changed.notify_all()

    def waiting(self) -> int:
        """Number of calls that were not answered yet."""
        with self._changed:
            return len(self._queue)

    def flush(self, timeout_seconds: float) -> bool:
        """Waits until every call was answered. False: not within `timeout_seconds`."""
        with self._changed:
            return self._changed.wait_for(lambda: not self._queue, timeout_seconds)

    def close(self) -> None:
        """Ends the threads; what was not sent is lost. Bounded."""
        with self._changed:
            self._closing.set()
            self._session += 1
            self._cancel_stream()
            self._changed.notify_all()
        self._connector.close()
        deadline = self._clock() + CALL_TIMEOUT_SECONDS + 1
        for thread in self._threads:
            thread.join(max(0.0, deadline - self._clock()))

    # ---- shared -----------------------------------------------------------------------------------------------------

    @staticmethod
    def _caller(request: Message) -> control_pb2.Caller:
        caller = getattr(request, "caller", None)
        if not isinstance(caller, control_pb2.Caller):
            raise TypeError(f"{type(request).__name__} has no caller")
        return caller

    def _fill(self, caller: control_pb2.Caller, number: int) -> None:
        caller.job_id, caller.node, caller.incarnation = self._job_id, self._node, self._incarnation
        caller.request, caller.protocol, caller.secret = number, CONTROL_PROTOCOL, self._secret

    def _cancel_stream(self) -> None:
        if self._stream is not None:
            self._stream.cancel()
            self._stream = None

    def _tell(self, session: int, tell: Callable[[], None]) -> bool:
        """Tells the listener something about a session. False: that session is over, and nothing was told.

        Only one thread tells at a time. So nothing of a session is told before the answer to its registration, nor
        after the answer to the next one. (A directive that came too early would be lost, because the master does not
        repeat it.)
        """
        with self._telling:
            with self._changed:
                if session != self._session:
                    return False
            tell()
            return True

    def _tell_link(self) -> None:
        """Tells the listener whether the master is heard, if that is news; the last call is the present state."""
        with self._telling:
            with self._changed:
                contact, told = self._hearing.contact, self._hearing.told
                self._hearing.told = contact
            if contact != told:
                self._listener.link(*contact)

    def _heard(self, generation: int) -> bool:
        """Notes an answer; False if it comes from a superseded master, or from something that is no master."""
        if generation > MOST:
            # If it were believed once, no master would ever be heard again.
            logger.warning("what answers as the master says that it is generation %d: refused", generation)
            return False
        with self._changed:
            if generation < self._generation:
                logger.warning("a master of generation %d answers, %d is known: refused", generation, self._generation)
                return False
            self._generation = generation
            changed = self._hearing.heard(self._clock())
        if changed:
            self._tell_link()
        return True

    def _unheard(self, link: MasterLink | None, why: str, leader: str = "", *, refused: bool = False) -> None:
        """Notes a call or stream without an answer, or with the leader's address, or `refused` for our token."""
        self._connector.failed(link, leader)
        with self._changed:
            if self._closing.is_set():
                return
            changed = self._hearing.unheard(self._clock(), link, refused=refused)
        if changed:
            logger.warning("the master is not heard any more: %s", why)
            self._tell_link()

    # ---- the outbox -------------------------------------------------------------------------------------------------

    def _send_loop(self) -> None:
        backoff = Backoff(self._closing)
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._sendable() or self._closing.is_set())
                if self._closing.is_set():
                    return
                waiting = self._queue[0]
                waiting.tried = True
                if waiting.method != "Register":
                    # Only now, because the answer to the registration brings the node's name.
                    caller = self._caller(waiting.request)
                    self._fill(caller, caller.request)
            if self._send(waiting, backoff):
                backoff.reset()
                with self._changed:
                    # `register` may have emptied the queue meanwhile.
                    if self._queue and self._queue[0] is waiting:
                        self._queue.popleft()
                        self._changed.notify_all()
            else:
                backoff.wait()

    def _sendable(self) -> bool:
        """Whether the first call may go out now; the caller holds the lock."""
        return bool(self._queue) and (self._registered or self._queue[0].method == "Register")

    def _send(self, waiting: WaitingCall, backoff: Backoff) -> bool:
        """Makes one attempt. True if the call is settled, one way or another."""
        link = self._connector.get()
        if link is None:
            self._unheard(None, _NO_LINK)
            return False
        try:
            reply = getattr(link.stub, waiting.method)(
                waiting.request, timeout=CALL_TIMEOUT_SECONDS, metadata=self._connector.metadata
            )
        except (grpc.RpcError, ValueError) as error:
            return self._send_failed(waiting, link, error, backoff)
        if not self._heard(reply.generation):
            self._connector.failed(link)
            return False
        if isinstance(reply, control_pb2.RegisterReply):
            self._opened(waiting, reply)
        if isinstance(request := waiting.request, control_pb2.CommitRequest) and not request.lease:
            mark("committed", run=request.checkpoint.run_id, node=self._node, epoch=request.caller.epoch)
        if isinstance(waiting.request, control_pb2.HeldRequest):
            said = reply.replication if reply.HasField("replication") else None
            digest = waiting.request.checkpoint.ref.digest
            self._tell(waiting.session, partial(self._listener.replication, digest, reply.generation, said))
        return True

    def _send_failed(self, waiting: WaitingCall, link: MasterLink, error: Exception, backoff: Backoff) -> bool:
        if not isinstance(error, grpc.RpcError):
            # gRPC raises ValueError for a channel that another thread closed.
            return False
        code, detail = code_of(error), detail_of(error)
        too_large = code is grpc.StatusCode.RESOURCE_EXHAUSTED and waiting.request.ByteSize() > MESSAGE_BYTES
        refused = self._is_refusal(code)
        silent = self._hearing.is_silence(code, detail, waiting)
        if not too_large and (refused or silent or self._is_one_alone(link, code)):
            logger.info("%s: %s: %s; it is repeated", waiting.method, code.name, detail)
            if waiting.method == "Register" and code is grpc.StatusCode.ABORTED:
                self._tell(waiting.session, partial(self._listener.postponed, detail))
                return False
            self._unheard(link, detail, backoff.led(leader_of(error)), refused=refused)
            return self._can_never_register(waiting)
        if code in _INTERNAL and waiting.internal_errors < _MOST_INTERNAL_ERRORS:
            waiting.internal_errors += 1
            logger.warning("%s: the master has an error (%s); the call is repeated", waiting.method, detail)
            return False
        logger.warning("%s was answered %s: %s", waiting.method, code.name, detail)
        if waiting.method == "Register":
            self._tell(waiting.session, partial(self._listener.refused, code.name, detail))
        else:
            self._tell(waiting.session, partial(self._listener.failed, waiting.method, code.name, detail))
        return True

    def _is_refusal(self, code: grpc.StatusCode) -> bool:
        """Whether a master that took our token before takes it no more: somebody may give the old one back."""
        return code is grpc.StatusCode.UNAUTHENTICATED and self._hearing.heard_at is not None

    def _is_one_alone(self, link: MasterLink, code: grpc.StatusCode) -> bool:
        """Whether this master refuses our token, and there are others that were not asked yet."""
        return code is grpc.StatusCode.UNAUTHENTICATED and not self._connector.all_refuse(link)

    def _can_never_register(self, waiting: WaitingCall) -> bool:
        """Whether the first registration is hopeless. A master that was heard once is waited for: it may be mended."""
        if waiting.method != "Register" or self._hearing.heard_at is not None:
            return False
        why = self._connector.hopeless()
        if why:
            self._tell(waiting.session, partial(self._listener.refused, "TLS", why))
        return bool(why)

    def _opened(self, waiting: WaitingCall, reply: control_pb2.RegisterReply) -> None:
        with self._telling:
            with self._changed:
                if waiting.session != self._session:
                    return
                self._node = reply.node
                self._registered = True
                self._pace.told(reply.pace, self._clock())
                incarnation = self._incarnation
                # The stream opens now; its first directive is told in its turn.
                self._changed.notify_all()
            self._listener.registered(incarnation, reply)

    # ---- the pulse --------------------------------------------------------------------------------------------------

    def _pulse_loop(self) -> None:
        while True:
            with self._changed:
                now = self._clock()
                if self._closing.is_set():
                    return
                if not self._registered:
                    self._changed.wait()
                    self._pace.begin(self._clock())
                    continue
                due = self._pace.due(self._progress)
                if now < due:
                    self._changed.wait(due - now)
                    continue
                session = self._session
                progress, self._progress = self._progress, None
                request: Message = progress or control_pb2.HeartbeatRequest(
                    caller=control_pb2.Caller(epoch=self._epoch)
                )
                self._pace.spoke(now, progress, random.random())
                self._fill(self._caller(request), 0)
            self._beat(request, session)

    def _beat(self, request: Message, session: int) -> None:
        progress = request if isinstance(request, control_pb2.ProgressRequest) else None
        link = self._connector.get()
        if link is None:
            self._unheard(None, _NO_LINK)
            self._again(progress, session)
            return
        try:
            ack: control_pb2.Ack = getattr(link.stub, "Heartbeat" if progress is None else "ReportProgress")(
                request, timeout=_HEARTBEAT_TIMEOUT_SECONDS, metadata=self._connector.metadata
            )
        except (grpc.RpcError, ValueError) as error:
            self._beat_failed(progress, link, session, error)
            return
        if not self._heard(ack.generation):
            self._connector.failed(link)
            return
        with self._changed:
            self._pace.told(ack.pace, self._clock())
        self._tell(session, partial(self._listener.records, not ack.unrecorded))
        if ack.HasField("replication"):
            self._tell(session, partial(self._listener.replication, "", ack.generation, ack.replication))

    def _beat_failed(
        self, progress: control_pb2.ProgressRequest | None, link: MasterLink, session: int, error: Exception
    ) -> None:
        code = code_of(error) if isinstance(error, grpc.RpcError) else grpc.StatusCode.CANCELLED
        refused = self._is_refusal(code)
        detail = detail_of(error) if isinstance(error, grpc.RpcError) else str(error)
        if refused or self._hearing.is_silence(code, detail) or code in _INTERNAL:
            leader = leader_of(error) if isinstance(error, grpc.RpcError) else ""
            self._unheard(link, detail, leader, refused=refused)
            self._again(progress, session)
            return
        if isinstance(error, grpc.RpcError):
            method = "Heartbeat" if progress is None else "ReportProgress"
            self._tell(session, partial(self._listener.failed, method, code.name, detail))

    def _again(self, progress: control_pb2.ProgressRequest | None, session: int) -> None:
        """Sends an unheard report again, unless a newer one comes first."""
        with self._changed:
            self._pace.unanswered(self._clock())
            if progress is not None and self._progress is None and session == self._session:
                self._progress = progress

    # ---- the watch --------------------------------------------------------------------------------------------------

    def _watch_loop(self) -> None:
        backoff = Backoff(self._closing)
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._registered or self._closing.is_set())
                if self._closing.is_set():
                    return
                session = self._session
                caller = control_pb2.Caller(epoch=self._epoch)
                self._fill(caller, 0)
            if self._watch(session, caller, backoff):
                # The answer was an error that repeating does not cure: nothing to watch until the next `register`.
                with self._changed:
                    self._changed.wait_for(
                        lambda session=session: self._session != session or self._closing.is_set()  # type: ignore[misc]
                    )
                continue
            backoff.wait()

    def _watch(self, session: int, caller: control_pb2.Caller, backoff: Backoff) -> bool:
        """Reads one stream to its end. True if it must not be opened again for this session."""
        link = self._connector.get()
        if link is None:
            self._unheard(None, _NO_LINK)
            return False
        try:
            stream = link.stub.Watch(control_pb2.WatchRequest(caller=caller), metadata=self._connector.metadata)
            with self._changed:
                if session != self._session:
                    stream.cancel()
                    return False
                self._stream = stream
            for directive in stream:
                if not self._heard(directive.generation):
                    stream.cancel()
                    self._connector.failed(link)
                    return False
                backoff.reset()
                if not self._tell(session, partial(self._listener.directed, directive)):
                    return False
        except (grpc.RpcError, ValueError) as error:
            return self._watch_failed(session, link, error, backoff)
        # The master ended it in good order: this node is fenced, or the master is about to close.
        return False

    def _watch_failed(self, session: int, link: MasterLink, error: Exception, backoff: Backoff) -> bool:
        with self._changed:
            if session != self._session:
                return False
        if not isinstance(error, grpc.RpcError):
            return False
        code, detail = code_of(error), detail_of(error)
        refused = self._is_refusal(code)
        if refused or self._hearing.is_silence(code, detail) or code in _INTERNAL:
            logger.info("the stream of directives broke: %s: %s", code.name, detail)
            self._unheard(link, detail, backoff.led(leader_of(error)), refused=refused)
            return False
        self._tell(session, partial(self._listener.failed, "Watch", code.name, detail))
        return True
