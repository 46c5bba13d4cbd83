"""A process that writes to a store until it is killed, and what its record must be then."""

from __future__ import annotations

import subprocess
import sys

from dalsegno.master.record.store import Store

WRITER = """
import sys
from dalsegno.master.record.store import open_store
store = open_store(sys.argv[1], sys.argv[2])
generation = store.raise_generation()
number = 0
while True:
    number += 1
    store.save({"a": b"%d " % number * 5000, "b": b"%d " % number, f"{number}": b"%d " % number}, generation)
    print(number, flush=True)
"""


def store_writer(url: str, job: str) -> subprocess.Popen[str]:
    """Starts it; it prints the number of each save that was acknowledged."""
    return subprocess.Popen([sys.executable, "-c", WRITER, url, job], stdout=subprocess.PIPE, text=True)


def killed_after(process: subprocess.Popen[str], saves: int) -> int:
    """Kills it after so many saves. Returns the number of the last one that was acknowledged."""
    assert process.stdout is not None
    with process:
        lines = [process.stdout.readline() for _ in range(saves)]
        process.kill()
        lines += process.stdout.readlines()
    return int([line for line in lines if line.endswith("\n")][-1])


def check_whole(store: Store, acknowledged: int) -> None:
    """The record is whole: the last one acknowledged, or the one after."""
    rows = store.load()
    numbers = set((rows["a"] + rows["b"]).split())
    assert len(numbers) == 1
    last = int(numbers.pop())
    assert last in (acknowledged, acknowledged + 1)
    assert all(str(number) in rows for number in range(1, last + 1))
