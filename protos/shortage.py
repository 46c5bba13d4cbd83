"""Says in one line which limit of the system kept a process or thread from being started, and what to do about it.

The kernel says "Resource temporarily unavailable" when there are too many processes or threads, and Python "can't start
new thread". Neither tells which limit was reached. Standard library only.
"""

from __future__ import annotations

import contextlib
import errno
import os
import resource
import threading
from collections.abc import Iterator
from pathlib import Path

__all__ = [
    "CannotStartError",
    "crowded",
    "file_limit",
    "own_cgroups",
    "prove_descriptors",
    "prove_room",
    "shortage",
    "starting",
    "why_not_started",
]

# What errors say when no thread can be started: Python's, and torch's (in C++).
_NO_THREAD = ("can't start new thread", os.strerror(errno.EAGAIN))
# What the dynamic loader says of a library for which there is no room, and of one that may not be run.
_NO_MAP = ("failed to map segment", os.strerror(errno.ENOMEM))
_NOT_ALLOWED = os.strerror(errno.EPERM)
# If less than this is left of `ulimit -v`, it may be why a thread has no stack, or a library no room.
_TIGHT_BYTES = 1 << 29
# Threads that a process of ours has at least, beside gRPC's, of which there is one for each core up to a limit.
_OURS = 14
_MOST_OF_GRPC = 16
# If fewer processes and threads are left, a process may end in a library that does not say why.
_FEW = 32
_UNKNOWN = "see sysctl kernel.threads-max and kernel.pid_max"
# Of a file of the kernel's: more than one on cgroups has, and than stands before what is looked for in meminfo.
_START_BYTES = 8192
_CGROUPS = Path("/sys/fs/cgroup")


class CannotStartError(OSError):
    """One line: what could not be started, why, and what to do.

    Attributes:
        unfit: another try in this process would end alike.
    """

    unfit = False


@contextlib.contextmanager
def starting(what: str) -> Iterator[None]:
    """Around the start of a process or thread.

    Raises:
        CannotStartError: the system has no room for it. Any other error is passed on.
    """
    try:
        yield
    except (OSError, RuntimeError, MemoryError) as error:
        why = shortage(error)
        if not why or isinstance(error, CannotStartError):
            raise
        raise CannotStartError(f"{what} cannot be started: {why}") from error


def why_not_started(what: str, error: Exception) -> str:
    """One line for an error at the start of something: a `CannotStartError` has it already."""
    return (
        str(error) if isinstance(error, CannotStartError) else f"{what} cannot be started: {shortage(error) or error}"
    )


def prove_room() -> None:
    """Proves that a process of ours can start its threads, by starting as many for a moment.

    gRPC ends the process without a word if its own pool, a thread for each core, cannot be started.

    Raises:
        RuntimeError: they cannot be started; see `shortage`.
    """
    end = threading.Event()
    started = []
    try:
        for _ in range(_OURS + min(os.cpu_count() or 1, _MOST_OF_GRPC)):
            thread = threading.Thread(target=end.wait, daemon=True)
            thread.start()
            started.append(thread)
    finally:
        end.set()
        for thread in started:
            thread.join()


def prove_descriptors(count: int) -> None:
    """Proves that this process may have so many more files open, by opening them for a moment.

    gRPC aborts the process if there is none left for it.

    Raises:
        OSError: it may not; see `shortage`.
    """
    opened: list[int] = []
    try:
        for _ in range(count):
            opened.append(os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC))
    except OSError as error:
        if error.errno != errno.EMFILE:
            raise
        # Descriptors are given out from the lowest: nearly all below the last one are in use.
        needed = max(opened, default=resource.getrlimit(resource.RLIMIT_NOFILE)[0]) + 1 + count - len(opened)
        raise OSError(errno.EMFILE, f"about {needed} are needed") from error
    finally:
        for fd in opened:
            os.close(fd)


def shortage(error: BaseException) -> str:
    """What was used up when this error came, and what to do, for a person; empty if it is another kind of error."""
    if isinstance(error, CannotStartError):
        return str(error)
    if isinstance(error, ImportError):
        text = str(error)
        return _address_space() if any(one in text for one in _NO_MAP) and _NOT_ALLOWED not in text else ""
    number = error.errno if isinstance(error, OSError) else None
    if number == errno.EAGAIN or (isinstance(error, RuntimeError) and any(text in str(error) for text in _NO_THREAD)):
        limits = list(_limits())
        reached = [text for most, used, text in limits if used >= most]
        if not reached and (space := _address_space()):
            return space
        named = "; ".join(reached or [text for _, _, text in limits] or [_UNKNOWN])
        return f"no more processes and threads are allowed here ({named}); raise that limit, or end others"
    if number == errno.ENOMEM or isinstance(error, MemoryError):
        sizes = list(_memory())
        if space := _address_space(min((size for size, _ in sizes), default=_TIGHT_BYTES)):
            return space  # others have nothing that this process lacks
        named = "; ".join(text for _, text in sizes) or "see ulimit -v and /proc/meminfo"
        return f"there is not enough memory ({named}); end other processes, or give this one more"
    if number == errno.EMFILE:
        soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        needed = getattr(error, "strerror", None) or ""
        more = f", and {needed}" if needed.endswith("are needed") else ""
        return f"this process may have no more files open (ulimit -n: {soft}, at most {hard}){more}; raise that limit"
    if number == errno.ENFILE:
        return "this machine may have no more files open (sysctl fs.file-max); raise that limit"
    return ""


def crowded() -> str:
    """Says that hardly any more processes are allowed, a possible cause of an early end; empty if there is room."""
    tight = [text for most, used, text in _limits() if used + _FEW > most]
    return f"hardly any more processes and threads are allowed here ({'; '.join(tight)})" if tight else ""


def file_limit() -> str:
    """How large a file may be, for a person; empty if the system sets no limit."""
    allowed, _ = resource.getrlimit(resource.RLIMIT_FSIZE)
    return "" if allowed == resource.RLIM_INFINITY else f"a file may have at most {allowed // 1024} kB here (ulimit -f)"


def _address_space(least_bytes: int = _TIGHT_BYTES) -> str:
    """Says that `ulimit -v` leaves hardly any room: no more than this. Empty: it does, or there is no such limit."""
    allowed, _ = resource.getrlimit(resource.RLIMIT_AS)
    used = _address_space_bytes()
    if allowed == resource.RLIM_INFINITY or allowed - used > least_bytes:
        return ""
    sizes = f"ulimit -v: {allowed // 1024} kB, in use by this process: {used // 1024} kB"
    return f"there is not enough address space ({sizes}); raise that limit"


def _address_space_bytes() -> int:
    try:
        return int(_start_of("/proc/self/statm").split()[0]) * resource.getpagesize()
    except (OSError, ValueError, IndexError, MemoryError):
        return 0


def _limits() -> Iterator[tuple[int, int, str]]:
    """The limits on processes and threads: how many are allowed, how many there are, and a text for people."""
    allowed, _ = resource.getrlimit(resource.RLIMIT_NPROC)
    if allowed != resource.RLIM_INFINITY:
        used = _threads_of(os.getuid())
        yield allowed, used, f"ulimit -u: {allowed}, in use by user {os.getuid()}: {used}"
    for directory in own_cgroups("pids"):
        most, now = _number(directory / "pids.max"), _number(directory / "pids.current")
        if most is not None and now is not None:
            yield most, now, f"pids.max of the container or group {directory}: {most}, in use: {now}"


def _threads_of(user: int) -> int:
    """All threads of a user's processes, as far as they can be seen: what `ulimit -u` counts."""
    count = 0
    for entry in os.listdir("/proc"):
        if not entry.isdigit():
            continue
        with contextlib.suppress(OSError, ValueError, IndexError):
            lines = Path(f"/proc/{entry}/status").read_text(encoding="ascii", errors="replace").splitlines()
            fields = {name: rest.split() for name, _, rest in (line.partition(":") for line in lines)}
            if int(fields.get("Uid", ["-1"])[0]) == user:
                count += int(fields.get("Threads", ["1"])[0])
    return count


def _memory() -> Iterator[tuple[int, str]]:
    """How many bytes of memory there are for this process beside `ulimit -v`, and a text for people."""
    for directory in own_cgroups("memory"):
        most = _number(directory / "memory.max") or _number(directory / "memory.limit_in_bytes")
        if most is not None and most < 1 << 60:
            yield most, f"limit of the container or group {directory}: {most // 1_000_000} MB"
    if available := _machine_bytes():
        yield available, f"available on this machine: {available // 1_000_000} MB"


def _machine_bytes() -> int:
    """What this machine has left; 0: it does not say."""
    with contextlib.suppress(OSError, ValueError, IndexError, MemoryError):
        for line in _start_of("/proc/meminfo").splitlines():
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * 1024
    return 0


def own_cgroups(controller: str) -> Iterator[Path]:
    """The cgroup directories that may limit this process, from its own one up."""
    try:
        lines = _start_of("/proc/self/cgroup").splitlines()
    except (OSError, ValueError, MemoryError):
        return
    for line in lines:
        _, _, rest = line.partition(":")
        names, _, path = rest.partition(":")
        if names and controller not in names.split(","):
            continue
        top = _CGROUPS / names if names else _CGROUPS
        directory = top / path.lstrip("/")
        yield from (one for one in (directory, *directory.parents) if top in (one, *one.parents))


def _number(path: Path) -> int | None:
    """The number in a limit's file; None: no limit, or none that can be read."""
    try:
        return int(_start_of(path))
    except (OSError, ValueError, MemoryError):
        return None


def _start_of(path: Path | str) -> str:
    """The first kilobytes of a file of the kernel's. `open` may fail where memory is what lacks."""
    file = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        return os.read(file, _START_BYTES).decode()
    finally:
        os.close(file)
