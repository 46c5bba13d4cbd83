"""What workers' libraries read of the environment while they are loaded, and may have another default for our use.

Whoever has chosen something keeps that. No number that a script computes changes by any of it.
"""

from __future__ import annotations

from collections.abc import MutableMapping
from pathlib import Path

__all__ = ["spin_little", "stream_large_copies", "take_large_pages", "tune"]

# How long a thread of libgomp, PyTorch's threads on Linux, waits for the others on its core before it sleeps.
_SPINS, _WAIT_POLICY = "GOMP_SPINCOUNT", "OMP_WAIT_POLICY"
# What libgomp itself takes where it knows of more threads than cores. It knows those of its own process alone.
_FEW_SPINS = "1000"
# Whether PyTorch asks Linux for large pages for tensors on the CPU of 2 MiB and more; what Linux says of this machine.
_LARGE_PAGES, _OF_LINUX = "THP_MEM_ALLOC_ENABLE", Path("/sys")
# A virtual machine's balloon, and which of its features has it give free memory back to the host (virtio, 5.5).
_BALLOON, _REPORTING = 5, 5
# Where a large page is larger than that (512 MiB on some machines), there is rarely one.
_LARGEST_PAGE_BYTES = 16 << 20
# From which size on glibc copies memory past the caches, on x86; elsewhere nobody reads it. Twice a core's own cache.
_TUNABLES, _STREAMS_FROM = "GLIBC_TUNABLES", "glibc.cpu.x86_non_temporal_threshold"
_STREAMED_BYTES = 4 << 20


def tune(environment: MutableMapping[str, str]) -> None:
    """Sets all that is good for workers, and that nobody has chosen."""
    spin_little(environment)
    take_large_pages(environment)
    stream_large_copies(environment)


def stream_large_copies(environment: MutableMapping[str, str]) -> None:
    """Has ``memcpy`` of workers write large copies past the caches, unless somebody chose another size.

    Else a processor first reads what it is about to write over: a third of all traffic. Two ranks that each copied
    100 MB at the same time took 0.6 of the time so. glibc does it by itself from a part of the processor's last cache
    on, which on virtual machines is taken to be their own alone: 114 MiB on one with two cores.
    """
    given = environment.get(_TUNABLES, "")
    if _STREAMS_FROM not in given:
        environment[_TUNABLES] = ":".join([*filter(None, [given]), f"{_STREAMS_FROM}={_STREAMED_BYTES}"])


def take_large_pages(environment: MutableMapping[str, str], of_linux: Path = _OF_LINUX) -> None:
    """Has PyTorch take new memory of workers for large tensors in large pages, unless somebody chose otherwise.

    A new process touches all that it has for the first time. On Linux that is 2 GB/s in pages of 4 KiB, and 5 to 8 in
    pages of 2 MiB. Not on virtual machines that give free memory back to their host: that is done with pieces as large
    as large pages, and the host then has to find each of them first, at 0.4 GB/s.

    Args:
        of_linux: Where it says whether there are any. PyTorch warns in each process where there are none.
    """
    pages = of_linux / "kernel/mm/transparent_hugepage"
    try:
        given = "[never]" not in (pages / "enabled").read_text(encoding="ascii")
        size = int((pages / "hpage_pmd_size").read_text(encoding="ascii"))
    except (OSError, ValueError):
        return
    if given and size <= _LARGEST_PAGE_BYTES and not _gives_memory_back(of_linux):
        environment.setdefault(_LARGE_PAGES, "1")


def _gives_memory_back(of_linux: Path) -> bool:
    """Whether free memory goes back to this machine's host by itself (free page reporting)."""
    for device in (of_linux / "bus/virtio/devices").glob("*"):
        try:
            kind, features = (device / "device").read_text(encoding="ascii"), (device / "features").read_text("ascii")
            if int(kind, 16) == _BALLOON and features[_REPORTING : _REPORTING + 1] == "1":
                return True
        except (OSError, ValueError):
            continue
    return False


def spin_little(environment: MutableMapping[str, str]) -> None:
    """Has the threads of workers wait asleep, so that nodes that share a machine do not take its cores from each other.

    Two ranks with two threads each on two cores made an engine in 0.4 to 0.5 s, and in 0.6 to 8 s without it. A process
    that has the cores for itself is as fast as before. Whoever has chosen how threads wait keeps that.
    """
    if _WAIT_POLICY not in environment:
        environment.setdefault(_SPINS, _FEW_SPINS)
