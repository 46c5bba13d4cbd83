"""Files that are written over: only by one, and only where nobody would see it."""

from __future__ import annotations

import mmap
import os
import stat
import subprocess
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import xxhash

from dalsegno.elastic.checkpoint.spares import (
    FOLDER,
    LEAST_BYTES,
    clear_spares,
    keep_spares,
    spare_bytes,
    take_spare,
    take_spare_of,
)
from dalsegno.elastic.saving.writing import SummedFile

MODE = 0o604
OLD, NEW = b"o" * (LEAST_BYTES + 5), b"n" * LEAST_BYTES


def a_step(run: Path, number: int, files: dict[str, bytes]) -> Path:
    directory = run / f"step-{number}.e1.1"
    for path, data in files.items():
        (directory / path).parent.mkdir(parents=True, exist_ok=True)
        (directory / path).write_bytes(data)
    return directory


def kept(run: Path, files: dict[str, bytes]) -> None:
    """Makes them the spares of an older step; their mode tells them from new files."""
    step = a_step(run, 1, files)
    for path in files:
        os.chmod(step / path, MODE)
    keep_spares(run, step, files)


def next_file(run: Path, path: str = "a/model.pt") -> Path:
    target = run / "step-2.e1.1" / path
    target.parent.mkdir(parents=True, exist_ok=True)
    return target


@pytest.mark.parametrize("new", [NEW, OLD + NEW, b"", b"short"], ids=["shorter", "longer", "empty", "small"])
def test_a_file_is_written_over(tmp_path: Path, new: bytes) -> None:
    """The same file afterwards, with the new bytes alone, and their sum."""
    kept(tmp_path, {"a/model.pt": OLD})
    target = next_file(tmp_path)
    with SummedFile(target) as file:
        file.write(new)
        assert file.finish(lasting=False) == xxhash.xxh3_128(new).hexdigest()
    assert target.read_bytes() == new
    assert (stat.S_IMODE(os.stat(target).st_mode), os.stat(target).st_nlink) == (MODE, 1)
    assert os.listdir(target.parent) == ["model.pt"]
    assert not os.listdir(tmp_path / FOLDER)


def test_only_large_files_of_the_last_step_are_kept(tmp_path: Path) -> None:
    kept(tmp_path, {"a": OLD, "b": OLD, "small": b"s"})
    assert spare_bytes(tmp_path) == 2 * len(OLD)
    step = a_step(tmp_path, 3, {"b": NEW})
    keep_spares(tmp_path, step, ["b", "of another node"])
    assert spare_bytes(tmp_path) == len(NEW)
    clear_spares(tmp_path)
    assert spare_bytes(tmp_path) == 0
    keep_spares(tmp_path, step, ["b"])
    assert spare_bytes(tmp_path) == 0


def test_another_path_has_no_spare(tmp_path: Path) -> None:
    kept(tmp_path, {"a/model.pt": OLD})
    assert take_spare_of(next_file(tmp_path, "a/other.pt")) is None
    assert take_spare_of(next_file(tmp_path, "a/" + 300 * "n")) is None
    assert take_spare_of(tmp_path / "no-checkpoint" / "a" / "model.pt") is None
    assert spare_bytes(tmp_path) == len(OLD)


@pytest.mark.parametrize(
    ("path", "other"),
    [
        ("checkpoint-5/optimizer.pt", "checkpoint-1000/optimizer.pt"),
        ("checkpoint-5/global_step5/states.pt", "checkpoint-15/global_step15/states.pt"),
    ],
)
def test_a_folder_named_after_a_step_is_any_steps(tmp_path: Path, path: str, other: str) -> None:
    """As transformers and DeepSpeed name theirs."""
    kept(tmp_path, {path: OLD})
    assert take_spare_of(next_file(tmp_path, "a/" + other)) is None
    assert take_spare_of(next_file(tmp_path, other.replace("-", "-0x"))) is None
    descriptor = take_spare_of(next_file(tmp_path, other))
    assert descriptor is not None
    os.close(descriptor)


def opened(path: Path) -> Callable[[], bytes]:
    descriptor = os.open(path, os.O_RDONLY)
    return lambda: os.pread(descriptor, len(OLD), 0)


def mapped(path: Path) -> Callable[[], bytes]:
    with open(path, "rb") as file:
        held = mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ)
    return lambda: held[:]


def read_by_another_process(path: Path) -> Callable[[], bytes]:
    code = "import sys; file = open(sys.argv[1], 'rb'); print(flush=True); input(); print(file.read().decode())"
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    process = subprocess.Popen([sys.executable, "-S", "-c", code, path], **pipes)  # type: ignore[call-overload]
    process.stdout.readline()
    return lambda: process.communicate(b"\n")[0].strip()  # type: ignore[no-any-return]


def named(path: Path) -> Callable[[], bytes]:
    other = path.with_name("another-name")
    os.link(path, other)
    return other.read_bytes


@pytest.mark.parametrize("reader", [opened, mapped, read_by_another_process, named])
def test_who_reads_a_file_does_not_see_it_change(tmp_path: Path, reader: Callable[[Path], Callable[[], bytes]]) -> None:
    """The old bytes, until the reader is done: the new file is another one."""
    step = a_step(tmp_path, 1, {"model.pt": OLD})
    read = reader(step / "model.pt")
    keep_spares(tmp_path, step, ["model.pt"])
    target = next_file(tmp_path, "model.pt")
    with SummedFile(target) as file:
        file.write(NEW)
        file.finish(lasting=False)
    assert read() == OLD
    assert target.read_bytes() == NEW


OPENED_MEANWHILE = """
import fcntl, os, subprocess, sys
from pathlib import Path
from dalsegno.elastic.checkpoint import spares
ask = fcntl.fcntl
def late(descriptor, what, argument=0):
    done = ask(descriptor, what, argument)
    if (what, argument) == (fcntl.F_SETLEASE, fcntl.F_WRLCK):
        name = os.readlink(f"/proc/self/fd/{descriptor}")
        code = "import os, sys; os.open(sys.argv[1], os.O_RDONLY | os.O_NONBLOCK)"
        opens = subprocess.run([sys.executable, "-S", "-c", code, name], capture_output=True, text=True)
        print("BlockingIOError" in opens.stderr)
    return done
spares.fcntl.fcntl = late
run = Path(sys.argv[1])
print(spares.take_spare(run, "model.pt", run / "new") is not None)
"""


def test_whoever_opens_a_file_that_is_just_taken_kills_nobody(tmp_path: Path) -> None:
    """The kernel tells who holds the lease by a signal; its own choice would end the process."""
    step = a_step(tmp_path, 1, {"model.pt": OLD})
    keep_spares(tmp_path, step, ["model.pt"])
    line = [sys.executable, "-c", OPENED_MEANWHILE, str(tmp_path)]
    done = subprocess.run(line, capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stdout) == (0, "True\nTrue\n"), done


def test_nothing_is_replaced(tmp_path: Path) -> None:
    kept(tmp_path, {"a/model.pt": OLD})
    target = next_file(tmp_path)
    target.write_bytes(b"somebody's")
    with pytest.raises(FileExistsError), SummedFile(target):
        pass
    assert target.read_bytes() == b"somebody's"
    assert os.listdir(target.parent) == ["model.pt"]


def test_one_of_many_gets_it(tmp_path: Path) -> None:
    kept(tmp_path, {"model.pt": OLD})
    (tmp_path / "to").mkdir()

    def take(number: int) -> int | None:
        return take_spare(tmp_path, "model.pt", tmp_path / "to" / str(number))

    with ThreadPoolExecutor(16) as pool:
        taken = [one for one in pool.map(take, range(64)) if one is not None]
    assert len(taken) == 1
    assert len(os.listdir(tmp_path / "to")) == 1
    os.close(taken[0])


def test_a_folder_that_leads_elsewhere_is_not_followed(tmp_path: Path) -> None:
    """A link among the spares is not written to."""
    elsewhere = tmp_path / "elsewhere"
    elsewhere.write_bytes(OLD)
    (tmp_path / FOLDER).mkdir()
    (tmp_path / FOLDER / "=model.pt").symlink_to(elsewhere)
    assert take_spare_of(next_file(tmp_path, "model.pt")) is None
    assert elsewhere.read_bytes() == OLD
