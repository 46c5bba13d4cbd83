"""What is taken for a sign of life of processes that were told to end, and what is not."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from dalsegno.agent.processes.signs import DiskWrites, Sign, Work
from dalsegno.agent.storage.writing import FileWrites

# Runs each line that it gets, and says so.
_OBEYS = """
import os, sys, time
files = []
for line in sys.stdin:
    exec(line)
    print("done", flush=True)
"""


class Process:
    """It does what it is told."""

    def __init__(self, directory: Path) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-c", _OBEYS],
            cwd=directory,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        self.pids = [self._process.pid]

    def does(self, line: str) -> None:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(f"{line}\n")
        self._process.stdin.flush()
        assert self._process.stdout.readline() == "done\n"

    def end(self) -> None:
        self._process.kill()
        self._process.communicate()


@pytest.fixture
def process(tmp_path: Path) -> Iterator[Process]:
    one = Process(tmp_path)
    yield one
    one.end()


def looks(sign: Sign, process: Process) -> Callable[[], bool]:
    """A function that looks; the first look has nothing to compare with."""
    assert not sign(process.pids)
    return lambda: sign(process.pids)


def test_whoever_computes_works(process: Process) -> None:
    """Who sleeps, and now and then wakes up, does not."""
    look = looks(Work(), process)
    process.does("[time.sleep(0.001) for _ in range(20)]")
    assert not look()
    process.does("sum(range(20_000_000))")
    assert look()
    assert not look()


def test_a_log_on_the_disk_is_no_save(process: Process) -> None:
    """Nor is one that grows for long, as long as it is small; a megabyte is one, however slowly it comes."""
    look = looks(DiskWrites(), process)
    append = "f = open('out', 'ab'); f.write(bytes({})); f.close()"
    process.does(append.format(100_000))
    assert not look()
    process.does(append.format(100_000))
    assert not look()
    process.does(append.format(1_000_000))
    if not _counts_writes(process):
        pytest.skip("this file system counts no writes")
    assert look()
    assert not look()


def _counts_writes(process: Process) -> bool:
    text = Path(f"/proc/{process.pids[0]}/io").read_text(encoding="ascii")
    return int(text.split("write_bytes: ")[1].split()[0]) > 0


@pytest.mark.parametrize("name", ["ckpt.pt", "step_20/model.safetensors", "ckpt.pt.tmp", "20/.metadata.part"])
def test_a_part_of_a_checkpoint_is_a_sign(process: Process, tmp_path: Path, name: str) -> None:
    """While it is open for writing, although nothing comes; and when it has changed since the last look."""
    (tmp_path / name).parent.mkdir(exist_ok=True)
    look = looks(FileWrites(tmp_path), process)
    process.does(f"files.append(open({name!r}, 'wb'))")
    assert look()
    assert look(), "still open"
    process.does("files.pop().close()")
    assert not look(), "nothing since"
    process.does(f"open({name!r}, 'ab').write(b'x')")
    assert look(), "written between two looks"
    assert not look()
    process.does(f"os.replace({name!r}, 'last.ckpt')")
    assert look(), "another name"
    process.does("files.append(open('last.ckpt', 'rb'))")
    assert not look(), "read"


@pytest.mark.parametrize("name", ["train.log", "metrics.jsonl", "events.out.tfevents.1", ".dalsegno-asked", "a.lock"])
def test_what_a_script_writes_all_the_time_is_none(process: Process, tmp_path: Path, name: str) -> None:
    """A log, its metrics, a lock, and what is ours."""
    look = looks(FileWrites(tmp_path), process)
    process.does(f"files.append(open({name!r}, 'w')); files[0].write('x'); files[0].flush()")
    assert not look()


def test_files_elsewhere_are_no_sign(process: Process, tmp_path: Path) -> None:
    """And a link as the script's directory is followed."""
    below, link = tmp_path / "below", tmp_path / "link"
    below.mkdir()
    link.symlink_to(below)
    look = looks(FileWrites(link), process)
    process.does("files.append(open('ckpt.pt', 'wb'))")
    assert not look()
    process.does("files.append(open('below/ckpt.pt', 'wb'))")
    assert look()


def test_processes_that_are_gone_give_no_sign(process: Process, tmp_path: Path) -> None:
    """Nothing of them can be read any more."""
    signs: tuple[Sign, ...] = (Work(), DiskWrites(), FileWrites(tmp_path))
    process.end()
    assert not any(sign(process.pids) for sign in signs)
    assert not FileWrites(tmp_path / "never")([os.getpid()])
