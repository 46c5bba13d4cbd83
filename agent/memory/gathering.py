"""Bringing a checkpoint here, or what this node needs of it.

Each missing part comes from the first agent that gives it, and is checked on the way.
"""

from __future__ import annotations

import logging
import math
import random
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack

from dalsegno.protos import control_pb2
from dalsegno.protos.peer_address import shown

from .calls import OPEN_PORTS, PeerError, Peers
from .fence import Fence
from .holdings import HeldParts, Holdings
from .line import Line
from .search import Search

__all__ = ["Gatherer"]

# Parts at once. More do not come faster.
_AT_ONCE = 4
# Peers that serve too many others are asked again, for so long; seconds. Large parts take long; what stands still ends.
_PATIENCE_SECONDS, _FIRST_PAUSE_SECONDS, _LAST_PAUSE_SECONDS = 600.0, 0.05, 1.0

# After so long without a byte another one is asked, if there is one (seconds).
_ELSEWHERE_SECONDS = 5.0

logger = logging.getLogger(__name__)
Then = Callable[["control_pb2.Checkpoint | str"], None]


class Gatherer:
    """One gathering after the other; a newer one of another checkpoint ends those before it. Thread-safe.

    Args:
        own_address: of this agent, which is not asked.
        on_held: told what is here of a step, after a part has come.
    """

    def __init__(
        self, own_address: str, peers: Peers, holdings: Holdings, fence: Fence, on_held: Callable[[HeldParts], None]
    ) -> None:
        self.own_address, self._peers, self._holdings, self._fence = own_address, peers, holdings, fence
        self._on_held = on_held
        self._lock = threading.Lock()
        self._stop = threading.Event()
        self._wanted = ("", "")
        self._line = Line("memory-gather")

    def gather(
        self,
        run_id: str,
        ref: control_pb2.CheckpointRef,
        parts: Sequence[control_pb2.HeldPart],
        then: Then,
        *,
        partly: bool = False,
    ) -> None:
        """See `MemoryTier.gather`."""
        wanted = run_id, ref.digest
        with self._lock:
            self._wanted = wanted
        # Taken from now on, also while another one is being gathered.
        fence = ExitStack()
        fence.enter_context(self._fence.wanted(run_id, ref.name, ref.digest))

        def work() -> None:
            with fence:
                try:
                    found = self._gather(run_id, ref, parts, partly)
                except Exception as error:
                    logger.exception("gathering %s", ref.name)
                    found = f"{ref.name} cannot be gathered: {error}"
                then(found)

        if not self._line.put(work):
            fence.close()
            then("too many checkpoints are being gathered")

    def close(self, timeout_seconds: float) -> None:
        """Ends what is under way."""
        self._stop.set()
        self._line.close(timeout_seconds)

    def _gather(
        self, run_id: str, ref: control_pb2.CheckpointRef, parts: Sequence[control_pb2.HeldPart], partly: bool
    ) -> control_pb2.Checkpoint | str:
        def stopped() -> bool:
            with self._lock:
                return self._stop.is_set() or self._wanted != (run_id, ref.digest)

        def bring(part: control_pb2.HeldPart) -> str:
            try:
                return self._bring(run_id, ref, part, stopped)
            except Exception as error:
                logger.exception("part %d of %s", part.group_rank, ref.name)
                return f"part {part.group_rank}: {error}"

        missing = [one for one in parts if not self._holdings.has(run_id, ref.name, ref.digest, one.group_rank)]
        # What only leavers have comes first. Otherwise each node begins elsewhere: so all parts are soon on many nodes,
        # and not all ask the same one.
        missing.sort(key=lambda one: (not one.leaves, random.random()))
        with ThreadPoolExecutor(_AT_ONCE, thread_name_prefix="memory-fetch") as pool:
            problems = [problem for problem in pool.map(bring, missing) if problem]
        if problems:
            return f"{ref.name} cannot be gathered: {problems[0]}"
        held = self._holdings.held(run_id, ref.name)
        if held is None or held.checkpoint.ref.digest != ref.digest:
            return f"{ref.name} cannot be gathered: nobody is known to hold a part of it"
        lacking = [] if partly else self._holdings.missing(run_id, ref.name)
        if lacking:
            return f"{ref.name} cannot be gathered: {len(lacking)} files are in no part of it, {lacking[0]!r} for one"
        return held.checkpoint

    def _bring(
        self,
        run_id: str,
        ref: control_pb2.CheckpointRef,
        part: control_pb2.HeldPart,
        stopped: Callable[[], bool],
    ) -> str:
        """Why a part did not come; empty where it did."""
        search = Search(part.addresses, self.own_address)
        pause, patient, deadline = _FIRST_PAUSE_SECONDS, False, time.monotonic() + _PATIENCE_SECONDS
        while (began := time.monotonic()) <= deadline and search.begins_anew():
            for address in search:
                if time.monotonic() > deadline:
                    break  # Others may be named without an end.
                if stopped():
                    return f"part {part.group_rank} is not wanted any more"
                wanted = run_id, ref.name, ref.digest, part.group_rank
                # Of several one may have been stopped, or cut off, a moment ago: nobody else knows of that yet.
                seconds = _ELSEWHERE_SECONDS if search.knows_others else math.inf
                try:
                    fetched = self._peers.fetch(address, *wanted, stopped, self.own_address, patient, seconds)
                except PeerError as error:
                    if not search.failed(address, error):
                        logger.warning("part %d of %s from %s: %s", part.group_rank, ref.name, shown(address), error)
                    if error.ours:
                        break
                else:
                    self._on_held(fetched)
                    return ""
            if (patient or search.comes_soon) and search.waits and time.monotonic() - began < pause:
                # Too many wait there. Together they would all come at once again.
                self._stop.wait(pause * random.uniform(0.5, 1.0))
                pause = min(2 * pause, _LAST_PAUSE_SECONDS)
            patient = not search.comes_soon
        why = f"part {part.group_rank} ({'; '.join(search.reasons) or 'nobody else holds it'})"
        return f"{why}: {OPEN_PORTS}" if search.unreachable else why
