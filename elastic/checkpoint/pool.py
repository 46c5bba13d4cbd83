"""Threads that share work, as many of them as this machine allows."""

from __future__ import annotations

import logging
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from threading import Lock
from typing import Any, TypeVar

__all__ = ["Pool"]

T = TypeVar("T")
log = logging.getLogger(__name__)

# Python's words, by which one knows it from an executor that is shut down.
NO_THREAD = "can't start new thread"


class Pool(ThreadPoolExecutor):
    """A ThreadPoolExecutor whose caller does what no thread can be started for: a limit makes work slow, not fail."""

    def submit(self, fn: Callable[..., T], /, *args: Any, **kwargs: Any) -> Future[T]:
        """See ThreadPoolExecutor. Where no more threads are allowed, the call is made before this returns."""
        future: Future[T] = Future()
        once = Lock()

        def work() -> None:
            if not once.acquire(blocking=False) or not future.set_running_or_notify_cancel():
                return
            try:
                future.set_result(fn(*args, **kwargs))
            except BaseException as error:  # raised where its result is asked for
                future.set_exception(error)

        try:
            super().submit(work)
        except RuntimeError as error:
            if NO_THREAD not in str(error):
                raise
            log.debug("work is done without a further thread: %s", error)
            work()
        return future
