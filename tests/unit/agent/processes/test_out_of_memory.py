"""A process that the kernel has ended for lack of memory is told from one that somebody has killed."""

from __future__ import annotations

import contextlib
import subprocess
import sys
import uuid
from pathlib import Path

import pytest

from dalsegno.protos import room
from dalsegno.protos.room import ended_for_memory, oom_kills

V1 = "oom_kill_disable 0\nunder_oom 0\noom_kill {count}\n"
V2 = "low 0\nhigh 0\nmax 12\noom 3\noom_kill {count}\noom_group_kill 0\n"


@pytest.mark.parametrize(
    ("name", "events", "limit"),
    [("memory.oom_control", V1, "memory.limit_in_bytes"), ("memory.events", V2, "memory.max")],
)
def test_the_group_that_was_full_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, events: str, limit: str
) -> None:
    """With its limit. An outer group, and the machine, count processes of others as well, which say nothing."""
    own, outer, machine = tmp_path / "outer" / "own", tmp_path / "outer", tmp_path / "vmstat"
    own.mkdir(parents=True)
    (own / limit).write_text("512000000\n")
    (outer / limit).write_text("9223372036854771712\n" if limit == "memory.limit_in_bytes" else "max\n")
    monkeypatch.setattr(room, "own_cgroups", lambda controller: [own, outer])
    monkeypatch.setattr(room, "_VMSTAT", machine)

    def counted(inner: int, outside: int, everywhere: int) -> None:
        (own / name).write_text(events.format(count=inner))
        (outer / name).write_text(events.format(count=outside))
        machine.write_text(f"oom_kill_x 7\noom_kill {everywhere}\n")

    counted(1, 1, 5)
    before = oom_kills()
    assert list(before.values()) == [1, 1, 5]
    assert ended_for_memory(before) == ""
    counted(2, 2, 6)
    assert f"limit of the container or group {own}: 512 MB" in ended_for_memory(before)
    for counts in ((1, 2, 6), (1, 1, 6)):
        counted(*counts)
        assert ended_for_memory(before) == ""
    monkeypatch.setattr(room, "own_cgroups", lambda controller: [])
    assert "this machine has " in ended_for_memory(before), "where no group counts"
    assert ended_for_memory({}) == "", "what was not there before says nothing"


@pytest.mark.slow
def test_a_real_group_that_is_full() -> None:
    """Of version 1, as this machine has it: the process is in a group of its own."""
    group = Path("/sys/fs/cgroup/memory") / f"dalsegno-{uuid.uuid4()}"
    try:
        group.mkdir()
        (group / "memory.limit_in_bytes").write_text(str(64 << 20))
    except OSError as error:
        pytest.skip(f"no control groups of version 1 to write to: {error}")
    script = f"""
import os, subprocess, sys
open({str(group / "cgroup.procs")!r}, "w").write(str(os.getpid()))
from dalsegno.protos.room import ended_for_memory, oom_kills
before = oom_kills()
code = subprocess.run([sys.executable, "-c", "bytearray(1 << 28)[::4096]; x = b'x' * (1 << 28)"]).returncode
print(code, ended_for_memory(before))
"""
    try:
        done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60, check=False)
    finally:
        with contextlib.suppress(OSError):
            group.rmdir()
    assert f"group {group}: 67 MB" in done.stdout, done.stderr
    assert done.stdout.startswith("-9 ")
