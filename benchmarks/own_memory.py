"""Keeps this machine's memory its own while something is measured.

A virtual machine may give memory that it does not use back to its host, some seconds after it was freed, in blocks of
2 MiB or more (free page reporting). Each page of it that is touched again then costs 5 to 25 µs instead of 2 to 3. So a
pause of 0.5 GB has seconds in it that are neither the program's nor the hardware's. So has memory that the machine has
never touched. A process that touches so much memory, and then holds a page in every 64, leaves no free blocks of that
size, and nothing is given back. No setting is changed.
"""

from __future__ import annotations

import contextlib
import mmap
import subprocess
import sys
from collections.abc import Iterator

__all__ = ["own_memory"]

PAGE = mmap.PAGESIZE
# Of so many pages one is held: 256 KiB stay in one piece, an eighth of what would be given back.
PIECE = 64


@contextlib.contextmanager
def own_memory(gibibytes: float) -> Iterator[None]:
    """Within this, so much memory stays this machine's while it is free; 1/64 of it is taken."""
    if gibibytes <= 0:
        yield
        return
    command = [sys.executable, "-m", "benchmarks.own_memory", str(gibibytes)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stdin=subprocess.PIPE, text=True) as holder:
        assert holder.stdout is not None
        if not holder.stdout.readline():
            raise RuntimeError(f"{gibibytes} GiB cannot be held: there is less memory")
        try:
            yield
        finally:
            holder.kill()


def main() -> int:
    """Takes the memory, says so in a line, and holds it until its standard input ends."""
    size = int(float(sys.argv[1]) * 2**30) // PAGE * PAGE
    with mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS) as held:
        # Large pages would be given back whole.
        held.madvise(mmap.MADV_NOHUGEPAGE)
        for at in range(0, size, PAGE):
            held[at] = 1
        for at in range(0, size - PIECE * PAGE + 1, PIECE * PAGE):
            held.madvise(mmap.MADV_DONTNEED, at, (PIECE - 1) * PAGE)
        print("held", flush=True)
        sys.stdin.read()
    return 0


if __name__ == "__main__":
    sys.exit(main())
