"""What could not be started, why, and what to do: one line."""

from __future__ import annotations

import errno
import resource
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from dalsegno.protos import shortage
from dalsegno.protos.shortage import CannotStartError, crowded, file_limit, prove_room, starting


def failed(number: int) -> OSError:
    return OSError(number, "as the kernel says it")


@pytest.mark.parametrize(
    ("error", "words"),
    [
        (failed(errno.EAGAIN), ("processes and threads", "raise that limit")),
        (RuntimeError("can't start new thread"), ("processes and threads", "raise that limit")),
        (RuntimeError("uv_thread_create failed: Resource temporarily unavailable"), ("processes and threads",)),
        (failed(errno.ENOMEM), ("memory", "end other processes")),
        (MemoryError(), ("memory", "end other processes")),
        (failed(errno.EMFILE), ("ulimit -n", "raise that limit")),
        (failed(errno.ENFILE), ("fs.file-max", "raise that limit")),
    ],
)
def test_what_was_used_up_is_said(error: Exception, words: tuple[str, ...]) -> None:
    """Which limit, how high it is, and the way out; as an error that those who expect an OSError take for one."""
    with pytest.raises(CannotStartError) as caught, starting("the keeper"):
        raise error
    text = str(caught.value)
    assert text.startswith("the keeper cannot be started: ")
    assert all(word in text for word in words)
    assert len(text.splitlines()) == 1
    with pytest.raises(CannotStartError, match=r"^the keeper cannot") as again, starting("the agent"):
        raise caught.value
    assert again.value is caught.value, "the narrowest name counts"


@pytest.mark.parametrize("error", [failed(errno.ENOENT), RuntimeError("a bug"), ValueError("a bug")])
def test_other_errors_are_passed_on(error: Exception) -> None:
    """They are about something else."""
    with pytest.raises(type(error)) as caught, starting("the keeper"):
        raise error
    assert caught.value is error


def test_the_limit_that_is_reached_is_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """With how much of it is in use; where none is known to be reached, all that there are."""
    group = tmp_path / "group"
    group.mkdir()
    (group / "pids.max").write_text("100\n")
    (group / "pids.current").write_text("100\n")
    monkeypatch.setattr(shortage, "own_cgroups", lambda controller: iter([group]))
    limits = {resource.RLIMIT_NPROC: 500, resource.RLIMIT_AS: resource.RLIM_INFINITY}
    monkeypatch.setattr(resource, "getrlimit", lambda kind: (limits[kind],) * 2)
    monkeypatch.setattr(shortage, "_threads_of", lambda user: 7)
    text = shortage.shortage(failed(errno.EAGAIN))
    assert f"group {group}: 100, in use: 100" in text
    assert "ulimit -u" not in text
    assert f"{group}: 100" in crowded()
    (group / "pids.current").write_text("3\n")
    text = shortage.shortage(failed(errno.EAGAIN))
    assert "ulimit -u: 500" in text
    assert "100, in use: 3" in text
    assert crowded() == ""


@pytest.mark.parametrize("error", [MemoryError(), failed(errno.ENOMEM)])
def test_memory_that_ulimit_keeps_back_is_not_asked_of_others(
    monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    """The machine has plenty: no process need end for it."""
    monkeypatch.setattr(shortage, "own_cgroups", lambda controller: iter([]))
    monkeypatch.setattr(shortage, "_machine_bytes", lambda: 64 << 30)
    space = shortage._address_space_bytes()
    monkeypatch.setattr(resource, "getrlimit", lambda kind: (space + (1 << 30),) * 2)
    text = shortage.shortage(error)
    assert text.startswith("there is not enough address space (ulimit -v: ")
    assert text.endswith("raise that limit")
    assert "other processes" not in text
    monkeypatch.setattr(shortage, "_machine_bytes", lambda: 1 << 20)
    assert "end other processes" in shortage.shortage(error), "the machine has less than the limit leaves"


def test_what_is_out_of_memory_itself_still_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not even what says how much there is may be read: the line comes without numbers."""

    def fails(path: object) -> str:
        raise MemoryError

    monkeypatch.setattr(shortage, "_start_of", fails)
    text = shortage.shortage(MemoryError())
    assert text.startswith("there is not enough memory (see ulimit -v and /proc/meminfo); ")


def test_memory_of_a_container_is_asked_of_others(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Its limit is what it has, whatever `ulimit -v` would leave."""
    (tmp_path / "memory.max").write_text(f"{1 << 29}\n")
    monkeypatch.setattr(shortage, "own_cgroups", lambda controller: iter([tmp_path]))
    monkeypatch.setattr(shortage, "_machine_bytes", lambda: 64 << 30)
    space = shortage._address_space_bytes()
    monkeypatch.setattr(resource, "getrlimit", lambda kind: (space + (1 << 30),) * 2)
    text = shortage.shortage(MemoryError())
    assert f"group {tmp_path}: 536 MB" in text
    assert "end other processes" in text


MAP = "libtorch_cpu.so: failed to map segment from shared object"


@pytest.mark.parametrize("error", [RuntimeError("can't start new thread"), failed(errno.EAGAIN), ImportError(MAP)])
def test_address_space_is_named(monkeypatch: pytest.MonkeyPatch, error: Exception) -> None:
    """Where `ulimit -v` is nearly reached and no limit on threads is: a stack, or a library, has no room."""
    monkeypatch.setattr(shortage, "own_cgroups", lambda controller: iter([]))
    monkeypatch.setattr(shortage, "_threads_of", lambda user: 7)
    space = shortage._address_space_bytes()
    limits = {resource.RLIMIT_AS: space + (8 << 20), resource.RLIMIT_NPROC: 500}
    monkeypatch.setattr(resource, "getrlimit", lambda kind: (limits[kind],) * 2)
    text = shortage.shortage(error)
    assert text.startswith("there is not enough address space (ulimit -v: ")
    assert text.endswith("raise that limit")
    assert "ulimit -u" not in text
    if isinstance(error, ImportError):
        return
    limits[resource.RLIMIT_NPROC] = 7
    assert "ulimit -u: 7" in shortage.shortage(error)
    limits.update({resource.RLIMIT_NPROC: 500, resource.RLIMIT_AS: space + (1 << 40)})
    assert "ulimit -u: 500" in shortage.shortage(error), "there is plenty"


def test_a_library_that_is_not_there_is_no_shortage() -> None:
    """Nor one that may not be run."""
    assert shortage.shortage(ImportError("No module named 'torch'")) == ""
    assert shortage.shortage(ImportError(f"{MAP}: Operation not permitted")) == ""


# Other tests' threads may open and close files in this process.
PROVES = """
import os, re, resource
from dalsegno.protos.shortage import CannotStartError, prove_descriptors, starting

open_before = os.listdir("/proc/self/fd")
prove_descriptors(20)
soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
limit = max(map(int, open_before)) + 10
resource.setrlimit(resource.RLIMIT_NOFILE, (limit, hard))
try:
    with starting("the agent"):
        prove_descriptors(limit)
except CannotStartError as error:
    said = str(error)
resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
needed = re.fullmatch(
    rf"the agent cannot be started: this process may have no more files open \\(ulimit -n: {limit}, "
    rf"at most {hard}\\), and about (\\d+) are needed; raise that limit",
    said,
)
assert needed, said
assert abs(int(needed[1]) - len(open_before) - limit) <= 2, said
assert os.listdir("/proc/self/fd") == open_before
"""


def test_descriptors_are_proven() -> None:
    """They are closed again, also where there are too few, and one line says how many are needed."""
    done = subprocess.run([sys.executable, "-c", PROVES], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr


def test_the_largest_file_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where there is such a limit."""
    limits = [resource.RLIM_INFINITY]
    monkeypatch.setattr(resource, "getrlimit", lambda kind: (limits[0],) * 2)
    assert file_limit() == ""
    limits[0] = 4096
    assert file_limit() == "a file may have at most 4 kB here (ulimit -f)"


def test_own_groups_are_found() -> None:
    """Whatever this machine's are, each is a directory below the place of all."""
    for controller in ("pids", "memory"):
        assert all(str(one).startswith("/sys/fs/cgroup") for one in shortage.own_cgroups(controller))


def test_room_is_proven_by_threads_that_are_gone_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where one could not be had."""
    before = set(threading.enumerate())  # Those of other tests may end meanwhile.
    prove_room()
    assert set(threading.enumerate()) <= before
    plain, left = threading.Thread.start, iter(range(3))

    def start(self: threading.Thread) -> None:
        if next(left, None) is None:
            raise RuntimeError("can't start new thread")
        plain(self)

    monkeypatch.setattr(threading.Thread, "start", start)
    with pytest.raises(RuntimeError):
        prove_room()
    assert set(threading.enumerate()) <= before
