"""Damages by the hundred, in a process that may hang, crash or fill its memory: another one watches it."""

from __future__ import annotations

import logging
import os
import resource
import selectors
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import IO

from tests.conftest import ROOT

from .damage_checks import check_one
from .damages import Template

__all__ = ["fuzz_damages", "run_damages"]

# Seconds that one damage may take, with all that is looked at. A hang is far longer, and other tests share the cores.
HANG = 15.0
# Bytes of address space of the process that looks; torch alone maps several GB.
_MEMORY = 16 << 30
_MOST_FAILURES = 5
_START_TIMEOUT = 120.0
_NOTHING = "nothing came back"


def run_damages(kind: str, seed: int, first: int, count: int) -> int:
    """Tries damages in this process; one line for each: its number, and what did not hold."""
    resource.setrlimit(resource.RLIMIT_AS, (_MEMORY, _MEMORY))
    logging.disable(logging.CRITICAL)
    # Nothing here is meant to last: memory instead of a disk, where there is one.
    shared = "/dev/shm" if os.access("/dev/shm", os.W_OK) else None
    failed = 0
    with tempfile.TemporaryDirectory(dir=shared) as place:
        template = Template.make(Path(place) / "template")
        for number in range(first, first + count):
            wrong = check_one(Path(place), template, kind, seed, number)
            print(number, wrong.encode("unicode_escape").decode()[:1000], flush=True)
            failed += bool(wrong)
    return failed


def fuzz_damages(kind: str, seed: int, count: int) -> list[str]:
    """What did not hold, the first few, each with the command that repeats it."""
    failures: list[str] = []
    first = 0
    while first < count and len(failures) < _MOST_FAILURES:
        begun = first
        for number, wrong in _watched(kind, seed, first, count - first):
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


def _watched(kind: str, seed: int, first: int, count: int) -> Iterator[tuple[int, str]]:
    """Runs damages in a child; a number that it does not come back from is one that hangs or kills it."""
    command = [sys.executable, "-m", "tests.fuzz", "damages", "--kind", kind, "--seed", str(seed), "--lines"]
    command += ["--first", str(first), "--count", str(count)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=ROOT) as child:
        assert child.stdout is not None
        assert child.stderr is not None
        try:
            number, patience = first, _START_TIMEOUT
            while number < first + count:
                line = _next_line(child.stdout, patience)
                if line is None:
                    yield number, f"{_NOTHING} for {patience:g} s"
                    return
                if not line:
                    child.wait(10)
                    yield number, f"the process ended with {child.returncode}: {child.stderr.read()[-500:]}"
                    return
                said, _, wrong = line.rstrip("\n").partition(" ")
                yield int(said), wrong
                number, patience = int(said) + 1, HANG
        finally:
            child.kill()


def _next_line(stream: IO[str], patience: float) -> str | None:
    # Each line is flushed by itself and read at once, so that nothing waits in the buffer of this side.
    with selectors.DefaultSelector() as selector:
        selector.register(stream, selectors.EVENT_READ)
        return stream.readline() if selector.select(patience) else None
