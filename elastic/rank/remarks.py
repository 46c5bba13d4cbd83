"""Remarks: lines about a training that people should know and that are not errors."""

from __future__ import annotations

import contextlib
import logging
import os
import threading
from collections.abc import Iterator

from dalsegno.protos.contract import Variable

log = logging.getLogger(__name__)


def remark(text: str, *values: object) -> None:
    """Writes one line to the log and, under ``dlrover-run``, to the console, which shows only what workers print.

    Args:
        text, values: As for ``logging``.
    """
    log.warning(text, *values)
    if os.environ.get(Variable.SOCKET):
        show(text % values if values else text)


@contextlib.contextmanager
def remarked_after(seconds: float, line: str) -> Iterator[None]:
    """Remarks this where what is inside takes longer than so many seconds."""
    timer = threading.Timer(seconds, remark, (line,))
    timer.daemon = True
    # Where the system gives no more threads the line is not said, and nothing else changes.
    with contextlib.suppress(RuntimeError):
        timer.start()
    try:
        yield
    finally:
        timer.cancel()


def show(text: str) -> None:
    """Prints one line of ours. A script's output may be closed, or on a full disk: that ends no training."""
    with contextlib.suppress(OSError, ValueError):
        print(f"dalsegno: {text}", flush=True)
