"""The keeper of one node: ends everything that the agent started when the agent is gone, however it ended.

It is a process of its own, executed as a file with `python -I -S` so that it starts in milliseconds and needs
nothing but the standard library. It reads lines from its standard input, a pipe whose only write end the agent
holds:

    mark NAME=VALUE     the environment variable that this agent's processes carry
    add PGID START      a process group to end; START is the start time of its leader (proc(5) stat, field 22)
    drop PGID           that group is over
    path DIRECTORY      a private directory of the agent to remove with it
    prefix PATH         the same for all files whose paths begin so
    claim FILE DIRECTORY PREFIX
                        both of them, under a name that another agent may have by then. The agent holds locks on
                        FILE and DIRECTORY. Each is removed only if it is the same one, and nobody has its lock

Paths are in hexadecimal, because they may have spaces and line ends in them. Only absolute ones are believed.

When the pipe ends (the kernel closes it with the agent, even after SIGKILL) every registered group gets SIGKILL, and so
does every process whose environment carries the mark. That finds grandchildren that left their group with setsid, and
processes that were spawned but not yet registered. PR_SET_PDEATHSIG alone would do neither: it fires when the spawning
*thread* ends and does not reach grandchildren.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import signal
import sys
import time

# Signals to all processes of a node are meant for the agent; the keeper ends with it.
DEAF_TO = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT, signal.SIGUSR1, signal.SIGUSR2)
# Scans go on until two in a row found nothing alive, so that a process that was just forking is found.
QUIET_SCANS = 2
SCAN_PAUSE_SECONDS = 0.02
# Seconds. A process in uninterruptible sleep can outlive SIGKILL, and nobody waits for the keeper.
PATIENCE_SECONDS = 10.0


def _stat(pid: str) -> list[str]:
    with open(f"/proc/{pid}/stat", encoding="ascii", errors="replace") as file:
        text = file.read()
    return text[text.rindex(")") + 2 :].split()


def _carries(pid: str, mark: bytes) -> bool:
    with open(f"/proc/{pid}/environ", "rb") as file:
        return mark in file.read().split(b"\0")


def is_ours(group: int, started: int) -> bool:
    """Whether a registered group is still the same: its leader is gone, or has the start time that was registered.

    While any process of a group lives, its number is not given to a new process. So a leader with another start time
    means that the group is over and the number belongs to somebody else.
    """
    try:
        fields = _stat(str(group))
    except (OSError, ValueError):
        return True
    return int(fields[19]) == started


def find(groups: dict[int, int], mark: str) -> list[int]:
    """Live processes (no zombies) of the groups, and those whose environment carries the mark."""
    found: list[int] = []
    for pid in os.listdir("/proc"):
        if not pid.isdigit() or int(pid) == os.getpid():
            continue
        try:
            fields = _stat(pid)
            if fields[0] in "ZX":
                continue
            if int(fields[2]) in groups or (mark and _carries(pid, os.fsencode(mark))):
                found.append(int(pid))
        except (OSError, ValueError):
            # It was gone before it could be read, or belongs to another user: not ours.
            continue
    return found


def end_all(groups: dict[int, int], mark: str, patience_seconds: float = PATIENCE_SECONDS) -> None:
    """SIGKILLs the groups and all carriers of the mark until two scans in a row find none alive."""
    ours = {group: started for group, started in groups.items() if is_ours(group, started)}
    for group in ours:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(group, signal.SIGKILL)
    quiet, deadline = 0, time.monotonic() + patience_seconds
    while quiet < QUIET_SCANS and time.monotonic() < deadline:
        found = find(ours, mark)
        for pid in found:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(pid, signal.SIGKILL)
        quiet = 0 if found else quiet + 1
        # why: no event tells of the death of a process that is not our child; the scan has to come again.
        time.sleep(SCAN_PAUSE_SECONDS)


def remove_files(prefix: str, last: str = "") -> None:
    """Removes all files whose paths begin so, the path `last` as the last one."""
    directory, _, beginning = prefix.rpartition("/")
    with contextlib.suppress(OSError):
        paths = [f"{directory}/{name}" for name in os.listdir(directory) if name.startswith(beginning)]
        for path in sorted(paths, key=lambda path: path == last):
            with contextlib.suppress(OSError):
                os.unlink(path)


class Claimed:
    """What the agent has under a name, as it was when the agent told of it. The descriptors tell it from a later one's.

    Args:
        owner, directory, prefix: see the module's docstring.
    """

    def __init__(self, owner: str, directory: str, prefix: str) -> None:
        self._owner, self._directory, self._prefix = owner, directory, prefix
        flags = os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
        self._held = [
            _open(self._owner, os.O_RDWR | flags),
            _open(self._directory, os.O_RDONLY | os.O_DIRECTORY | flags),
        ]

    def remove(self) -> None:
        """Removes what is still this agent's, now that it has ended."""
        owner, directory = self._held
        if _is_ours_still(directory, self._directory):
            shutil.rmtree(self._directory, ignore_errors=True)
        if _is_ours_still(owner, self._owner):
            remove_files(self._prefix, self._owner)


def written(word: str, *paths: str) -> str:
    """The line that tells the keeper of absolute paths; it removes nothing that is relative."""
    return " ".join([word, *(os.fsencode(path).hex() for path in paths)])


def _paths(text: str) -> list[str]:
    """What `written` wrote behind the word; nothing if that is not it."""
    try:
        paths = [os.fsdecode(bytes.fromhex(one)) for one in text.split(" ")]
    except ValueError:
        return []
    return paths if all(os.path.isabs(path) for path in paths) else []


def _open(path: str, flags: int) -> int:
    try:
        return os.open(path, flags)
    except OSError:
        return -1  # it is gone already


def _is_ours_still(descriptor: int, path: str) -> bool:
    """Whether the path still leads there, and nobody has the lock; then this process has it from now on."""
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        return os.path.samestat(os.fstat(descriptor), os.lstat(path))
    except (OSError, ValueError):
        return False


def main() -> None:
    """Reads the agent's lines until the pipe ends, then ends all that is registered."""
    # The agent has blocked them already, if it could.
    for signum in DEAF_TO:
        signal.signal(signum, signal.SIG_IGN)
    groups: dict[int, int] = {}
    paths: list[str] = []
    prefixes: list[str] = []
    claims: list[Claimed] = []
    mark = ""
    for raw in sys.stdin.buffer:
        word, _, rest = os.fsdecode(raw).rstrip("\n").partition(" ")
        if word == "mark":
            mark = rest
        elif word == "add":
            group, started = rest.split()
            groups[int(group)] = int(started)
        elif word == "drop":
            groups.pop(int(rest), None)
        elif word == "path":
            paths += _paths(rest)
        elif word == "prefix":
            prefixes += _paths(rest)
        elif word == "claim" and len(claimed := _paths(rest)) == 3:
            claims.append(Claimed(*claimed))
    end_all(groups, mark)
    for prefix in prefixes:
        remove_files(prefix)
    for path in paths:
        shutil.rmtree(path, ignore_errors=True)
    for claim in claims:
        claim.remove()


if __name__ == "__main__":
    main()
