"""If one rank refuses to train, all ranks refuse together, and the agent is told.

A rank that refused alone would leave the others waiting in the next collective until somebody kills them. So it brings
its finding to the others' next collective, and all end with the same line (`agreement`). The agent is told that they
have agreed, because another start would end in the same way.
"""

from __future__ import annotations

import logging
import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from types import TracebackType
from typing import Any

from dalsegno.protos import worker_pb2
from dalsegno.protos.exiting import when_it_exits

from .agreement import Refusal, Trouble, agree
from .collective import Collective, OtherThread, PeerLost, check_main_thread
from .exits import insist, is_decided, let_no_thread_delay, let_threads_go_on
from .link import Link
from .remarks import remarked_after

log = logging.getLogger(__name__)

# Seconds that a rank that refuses waits for the others. They may still be loading, or wait for this rank in a
# collective of another group, where nobody can tell them.
PATIENCE_SECONDS = 60.0
# Seconds after which a rank says what it waits with.
SAY_SECONDS = 10.0


class SessionOver(RuntimeError):
    """The script goes on with a session that has ended. It would do so after another start as well."""


class Meetings:
    """The meetings of one session.

    Args:
        collective: The group of all ranks.
        link: The connection to the agent, if there is one.
        apart: Returns why no rank may go on, where ranks have gone apart beside the meetings.

    Attributes:
        over: The session has ended, and meets no more.
    """

    def __init__(self, collective: Collective, link: Link | None, apart: Callable[[], str] = str) -> None:
        self._collective, self._link, self.over = collective, link, False
        # In a block of `telling`: how many these are, one in another, and what this rank has told of in them.
        self._blocks = 0
        self._told: Exception | None = None
        self.apart = apart

    def check_open(self, step: int) -> None:
        """Raises SessionOver if the session has ended, and names the step at which it did."""
        if self.over:
            another = (
                "Train the next run with a checkpoint_dir of its own, and put `with session(checkpoint_dir):` around "
                "each, or use two processes"
                if self._link is None
                else "Under dlrover-run a process trains one run: start each with a dlrover-run of its own"
            )
            raise SessionOver(f"this session is over: its run was drained or finished, at step {step}. {another}")

    def finished(self) -> None:
        """Ends the session. An error that was shown by hand before (`sys.excepthook`) was not the process's end."""
        self.over = True
        let_threads_go_on()

    @property
    def waited_for(self) -> bool:
        """Whether others wait for what this process does, and for its end: other ranks, or an agent."""
        return self._link is not None or self._collective.world_size > 1

    def check_thread(self) -> None:
        """Checks that the main thread is the one that calls. One rank that stays alone may have any thread call.

        Under ``dlrover-run`` a world of one rank may grow, and would end then. The agent is told here: an exception in
        a thread ends neither the process nor its success.

        Raises:
            OtherThread: It is another one.
        """
        if not self.waited_for:
            return
        try:
            check_main_thread()
        except OtherThread as error:
            self.refused(str(error))
            raise

    def compare(self, alike: Mapping[str, Any], problem: str = "", *, final: bool = True) -> None:
        """See ``agreement.agree``. Collective.

        Raises:
            OtherThread: See `check_thread`.
        """
        self.check_thread()
        # The others may be in a collective of the script's, and nobody would say what for this rank does not come.
        line = (
            f"rank {self._collective.rank} cannot go on, and the other ranks have not come yet: {problem}. They may be"
            " loading, or wait for it in a barrier"
        )
        late = remarked_after(SAY_SECONDS, line) if problem else nullcontext()
        try:
            with late:
                agree(self._collective, alike, problem, final=final)
        except Refusal as ended:
            self.refused(str(ended))
            raise

    @contextmanager
    def together(self) -> Iterator[None]:
        """If one rank refuses something in this block, all do before they go on. Collective: ends with a meeting.

        For code that is followed by collectives of other groups, to which a rank that refuses would not come.

        Raises:
            Refusal: Another rank has made a mistake.
        """
        with self.telling():
            yield
        self.compare({})

    @contextmanager
    def telling(self) -> Iterator[None]:
        """If this rank refuses something in this block, the others hear it in their next collective, where it waits.

        That is any collective of messages, see `Collective`: what the others would exchange there does not matter.

        A rank's own mistake (`is_mistake`) keeps its type here; the others get a `Refusal` with its text. An error that
        may come from the surroundings leaves the block as it is, because another start may succeed.
        """
        self._blocks += 1
        try:
            yield
        except Exception as error:
            if is_mistake(error) and not _all_know(error, self._told):
                self._told = error
                self._tell(error)
            raise
        finally:
            self._blocks -= 1
            if not self._blocks:
                self._told = None  # It holds what the script has in its hands.

    def refused(self, line: str) -> None:
        """Tells the agent that all ranks have agreed to end with this line."""
        if self._link is not None:
            self._link.send(worker_pb2.ToAgent(refused=worker_pb2.Refused(message=" ".join(line.split())[:4096])))

    def say_if_a_peer_is_lost(self) -> bool:
        """Tells the agent, when this rank ends with an error, if a closed connection to a peer may be the cause.

        The rank that fails first, by itself, still finds all connections open. Returns whether one is closed.
        """
        lost = self._link is not None and self._collective.has_lost_a_peer()
        if self._link is not None and lost:
            self._link.send(worker_pb2.ToAgent(peer_lost=worker_pb2.PeerLost()))
        return lost

    def _tell(self, error: Exception) -> None:
        text = " ".join(str(error).split()) or type(error).__name__
        try:
            agree(self._collective, {}, text, patience_seconds=PATIENCE_SECONDS)
        except Refusal as refusal:
            self.refused(str(refusal))
        except Trouble:
            return
        except RuntimeError as alone:
            # The group's threads would delay the end of this process for as long as they wait.
            insist(1)
            log.warning("the other ranks could not be told of it (%s)", alone)


# Packages whose errors of values are refusals.
_OURS = ("dalsegno.elastic.", "dalsegno.swift_plugin.")
# What is done at the end of this process: for the session that it has now.
_at_the_end: list[Callable[[BaseException, TracebackType | None], None]] = []


def watch_the_end(meetings: Meetings, when_lost: Callable[[], object]) -> None:
    """Makes sure that the agent learns why this process ends, if we know more than the error's text says.

    Either a peer is lost, or we refuse something, wherever in the script the refusal is raised. Refusals outside a
    meeting (``Batches`` that do not fit the checkpoint, an impossible plan) will be the same at the next start as well.
    So will a second run behind one that has finished, which all ranks come to; not one behind a drain.
    """

    def end(error: BaseException, trace: TracebackType | None) -> None:
        if meetings.waited_for and not meetings.over and not is_decided():
            # The others may be in a collective of the script's, which ends only with this process's connections.
            code = error.code if isinstance(error, SystemExit) else 1
            let_no_thread_delay(code if isinstance(code, int) else 1)
        text = str(error) or type(error).__name__
        if isinstance(error, SessionOver) and not is_decided():
            meetings.refused(text)
        elif meetings.over:
            return
        elif (refusal := is_refusal(error, trace)) and not has_a_peers(error):
            meetings.refused(text)
        elif refusal or may_be_a_peers(error):
            # Asked first: whoever looks for a lost peer cannot use the group any more.
            line = meetings.apart()
            if meetings.say_if_a_peer_is_lost():
                when_lost()
            elif refusal:
                line = text
            if line:
                meetings.refused(line)

    _do_at_the_end(end)


def watch_for_refusals(tell: Callable[[str], object]) -> None:
    """Before this process has a session: ``tell`` is called with the message if it ends by what we refuse."""

    def end(error: BaseException, trace: TracebackType | None) -> None:
        if is_refusal(error, trace):
            tell(str(error) or type(error).__name__)

    if not _at_the_end:
        _do_at_the_end(end)


def _do_at_the_end(end: Callable[[BaseException, TracebackType | None], None]) -> None:
    if not _at_the_end:
        before = sys.excepthook

        def hook(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
            # A script's `threading.excepthook` may bring the error of a helper thread, which ends no process.
            if threading.current_thread() is threading.main_thread():
                _at_the_end[0](error, trace)
            before(kind, error, trace)

        sys.excepthook = hook
        when_it_exits(lambda error: _at_the_end[0](error, error.__traceback__))
    _at_the_end[:] = [end]


def is_refusal(error: BaseException, trace: TracebackType | None) -> bool:
    """Whether we refuse what the script gives us: a `Refusal`, or a ValueError that our own code raises."""
    if isinstance(error, Refusal) or not isinstance(error, ValueError):
        return isinstance(error, Refusal)
    while trace is not None and trace.tb_next is not None:
        trace = trace.tb_next
    module = "" if trace is None else trace.tb_frame.f_globals.get("__name__", "")
    return str(module).startswith(_OURS)


def may_be_a_peers(error: BaseException) -> bool:
    """Whether a collective may raise it because a peer is gone: gloo's errors are plain RuntimeErrors.

    Where we meet one beside a load, it is the cause of an OSError: frameworks that reject a state raise the same.
    """
    if isinstance(error, OSError) and error.__cause__ is not None:
        return may_be_a_peers(error.__cause__)
    distributed = sys.modules.get("torch.distributed")
    known = getattr(distributed, "DistError", PeerLost)
    return type(error) is RuntimeError or isinstance(error, (PeerLost, known))


def has_a_peers(error: BaseException) -> bool:
    """Whether a ValueError was made from an error that may be a peer's end. What all ranks have agreed on was not."""
    cause = error.__cause__
    return not isinstance(error, Refusal) and cause is not None and may_be_a_peers(cause)


def _all_know(error: BaseException, told: Exception | None) -> bool:
    """Whether all ranks have ended with it, or with what it was made from; ``told``: what this one has told of."""
    seen: list[BaseException] = []
    found: BaseException | None = error
    while found is not None and found not in seen:
        if isinstance(found, (Refusal, Trouble)) or found is told:
            return True
        seen.append(found)
        found = found.__context__ if found.__cause__ is None else found.__cause__
    return False


def is_mistake(error: BaseException) -> bool:
    """Whether the error comes from what the script gives us, not from a disk, a device, memory or another rank."""
    return isinstance(error, Exception) and not isinstance(error, (OSError, MemoryError, RuntimeError))
