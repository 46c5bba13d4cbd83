"""What goes wrong, on order: which request, how often, and how."""

from __future__ import annotations

import re
import threading
from dataclasses import dataclass


@dataclass
class Fault:
    """One order.

    Attributes:
        match: regular expression that is searched in `METHOD PATH`.
        kind: `status` (it is answered with `status`, nothing happens), `cut` (the connection ends after `after` bytes
            of the body, request's or answer's), `lose` (all is done, and the answer never arrives), `slow` (it takes
            `seconds` more), `hold` (no answer until the client is gone), `damage` (a byte of the answer is another).
        times: how often; -1: always.
        skip: matches that pass before.
        status, retry_after, after, seconds: see `kind`.
    """

    match: str
    kind: str
    times: int = 1
    skip: int = 0
    status: int = 500
    retry_after: int | None = None
    after: int = 0
    seconds: float = 1.0


class Faults:
    """The orders that are open."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._open: list[Fault] = []

    def order(self, fault: Fault) -> None:
        with self._lock:
            self._open.append(fault)

    def clear(self) -> None:
        with self._lock:
            self._open.clear()

    def take(self, line: str) -> Fault | None:
        """The fault that this request meets, which counts it."""
        with self._lock:
            for fault in self._open:
                if fault.times != 0 and re.search(fault.match, line):
                    if fault.skip > 0:
                        fault.skip -= 1
                        continue
                    fault.times -= 1
                    return fault
        return None
