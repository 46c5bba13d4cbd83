"""Damages by the hundred, in a process that may hang, crash or fill its memory: another one watches it."""

from __future__ import annotations

import logging
import multiprocessing
import os
import resource
import tempfile
from collections.abc import Iterator
from multiprocessing.connection import Connection
from pathlib import Path

from tests.support.forks.forked import Forked

from .damage_checks import check_one
from .damages import Template

__all__ = ["damages_place", "fuzz_damages", "run_damages"]

# Seconds that one damage may take, with all that is looked at. A hang is far longer, and other tests share the cores.
HANG = 15.0
# Bytes of address space of the process that looks; torch alone maps several GB.
_MEMORY = 16 << 30
_MOST_FAILURES = 5
_START_TIMEOUT = 120.0
_NOTHING = "nothing came back"


def damages_place() -> tempfile.TemporaryDirectory[str]:
    """A directory for them. Nothing there is meant to last: it is in memory where that can be."""
    return tempfile.TemporaryDirectory(dir="/dev/shm" if os.access("/dev/shm", os.W_OK) else None)


def run_damages(place: str, kind: str, seed: int, first: int, count: int) -> Iterator[tuple[int, str]]:
    """Tries damages in this process and this directory; the number of each, and what did not hold."""
    resource.setrlimit(resource.RLIMIT_AS, (_MEMORY, _MEMORY))
    logging.disable(logging.CRITICAL)
    template = Template.make(Path(place) / "template")
    for number in range(first, first + count):
        wrong = check_one(Path(place), template, kind, seed, number)
        yield number, wrong.encode("unicode_escape").decode()[:1000]


def fuzz_damages(kind: str, seed: int, count: int) -> list[str]:
    """What did not hold, the first few, each with the command that repeats it."""
    failures: list[str] = []
    first = 0
    while first < count and len(failures) < _MOST_FAILURES:
        begun = first
        # Here, because a child that is killed removes nothing.
        with damages_place() as place:
            for number, wrong in _watched(place, kind, seed, first, count - first):
                first = number + 1
                if wrong:
                    again = f"python -m tests.fuzz damages --kind {kind} --seed {seed} --first {number} --count 1"
                    failures.append(f"{wrong}\n  {again}")
                if wrong.startswith(_NOTHING):
                    return failures
        if first == begun:
            failures.append(f"{kind}: damages cannot be tried at all")
            break
    return failures[:_MOST_FAILURES]


def _watched(place: str, kind: str, seed: int, first: int, count: int) -> Iterator[tuple[int, str]]:
    """Runs damages in a child; a number that it does not come back from is one that hangs or kills it."""
    reader, writer = multiprocessing.Pipe(duplex=False)
    child = Forked(_tell, writer, place, kind, seed, first, count)
    writer.close()
    number, patience = first, _START_TIMEOUT
    try:
        while number < first + count:
            if not reader.poll(patience):
                yield number, f"{_NOTHING} for {patience:g} s"
                return
            said, wrong = reader.recv()
            yield said, wrong
            number, patience = said + 1, HANG
    except EOFError:
        yield number, f"the process ended with {child.wait(10)}"
    finally:
        child.kill()
        child.wait(10)
        reader.close()


def _tell(writer: Connection, place: str, kind: str, seed: int, first: int, count: int) -> None:
    for told in run_damages(place, kind, seed, first, count):
        writer.send(told)
