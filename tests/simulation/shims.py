"""What the product's modules get in place of `threading`, `time`, `random` and the like while a schedule runs."""

from __future__ import annotations

import contextlib
import functools
import importlib.util
import os
import random
import secrets
import socket
import sys
import threading
import time
import types
from collections.abc import Iterator, Sequence
from random import Random
from typing import Any
from unittest import mock

from dalsegno.agent.control import client_threads, connection, master_client
from dalsegno.agent.processes import signs
from dalsegno.agent.shell import console, effects, elastic_agent, mailbox, stopping
from dalsegno.agent.workers import workers
from dalsegno.protos import outlet

from . import processes, threads
from .threads import Kernel, running

# The shells that a schedule runs as they are.
MODULES = (
    *(client_threads, connection, console, effects, elastic_agent, mailbox, master_client, outlet, stopping, workers),
)


class Shim(types.ModuleType):
    """A module in which some names mean something else."""

    def __init__(self, original: types.ModuleType, **others: Any) -> None:
        super().__init__(original.__name__)
        self._original = original
        self.__dict__.update(others)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._original, name)


def write(fd: int, data: bytes) -> int:
    """To the terminal of whatever process writes: shown nowhere, and blocked while nobody reads (Ctrl-S)."""
    kernel = running()
    while kernel.here().console_blocked:
        # Looked at again and again: it is rare, and a terminal wakes nobody in particular.
        kernel.sleep(0.2)
    return len(data)


class Terminal:
    """Standard error."""

    def write(self, text: str) -> int:
        return write(2, text.encode())

    def flush(self) -> None:
        self.write("")

    def isatty(self) -> bool:
        return True


def monotonic() -> float:
    """The clock of the process that asks; each began at another time."""
    kernel = running()
    return kernel.clock.now + kernel.here().offset


def _sleep(seconds: float) -> None:
    running().sleep(seconds)


def _queue_module() -> types.ModuleType:
    """A second copy of `queue` whose locks are simulated ones."""
    spec = importlib.util.find_spec("queue")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    module.threading, module.time = _THREADING, monotonic  # type: ignore[attr-defined]
    module.SimpleQueue = module._PySimpleQueue  # type: ignore[attr-defined]
    return module


def _current_thread() -> threads.Thread:
    thread = running().current
    assert thread is not None
    return thread


_THREADING = Shim(
    threading,
    Thread=threads.Thread,
    Timer=threads.Timer,
    Lock=threads.Lock,
    RLock=threads.RLock,
    Condition=threads.Condition,
    Event=threads.Event,
    Semaphore=threads.Semaphore,
    BoundedSemaphore=threads.Semaphore,
    current_thread=_current_thread,
)
_TIME = Shim(time, monotonic=monotonic, time=monotonic, perf_counter=monotonic, sleep=_sleep)


@contextlib.contextmanager
def installed(kernel: Kernel, seed: int, modules: Sequence[types.ModuleType] = MODULES) -> Iterator[None]:
    """While it lasts, these modules run on `kernel`'s clock and threads."""
    drawn = Random(f"product {seed}")
    others = {
        "threading": _THREADING,
        "time": _TIME,
        "queue": _queue_module(),
        "random": Shim(random, uniform=drawn.uniform, random=drawn.random),
        "secrets": Shim(
            secrets,
            token_hex=lambda size: f"{drawn.getrandbits(8 * size):0{2 * size}x}",
            token_bytes=lambda size: drawn.getrandbits(8 * size).to_bytes(size, "big"),
        ),
        "os": Shim(os, write=write, waitid=processes.waitid),
        "socket": Shim(socket, gethostname=lambda: running().here().host),
        "sys": Shim(sys, stderr=Terminal()),
    }
    with contextlib.ExitStack() as stack:
        for module in modules:
            for name, other in others.items():
                if isinstance(getattr(module, name, None), types.ModuleType):
                    stack.enter_context(mock.patch.object(module, name, other))
        # Its default was bound before.
        client = functools.partial(master_client.MasterClient, clock=monotonic)
        stack.enter_context(mock.patch.object(effects, "MasterClient", client))
        stack.enter_context(mock.patch.object(workers, "kill_group", processes.kill_group))
        stack.enter_context(mock.patch.object(workers, "start_time", processes.start_time))
        stack.enter_context(mock.patch.object(workers, "descendants", processes.descendants))
        stack.enter_context(mock.patch.object(signs, "written_bytes", processes.written_bytes))
        threads.install(kernel)
        try:
            yield
        finally:
            threads.install(None)
