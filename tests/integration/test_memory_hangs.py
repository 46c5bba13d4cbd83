"""A disk that hangs and says no error, under what agents bring to it: real file systems, frozen and thawed."""

from __future__ import annotations

import contextlib
import os
import subprocess
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from dalsegno.agent.memory import durable
from dalsegno.elastic.checkpoint import Manifest, read_sealed, verify
from dalsegno.elastic.checkpoint.files import THREADS
from tests.support.checkpoints.memory import RUN, Node, manifest_of, nodes

pytestmark = pytest.mark.timeout(120)

FILES = {f"file-{number}": bytes([number]) * 100_000 for number in range(4)}
STALL_SECONDS = 1.5
# What a slow disk takes in a second.
SLOW_BYTES = 6 << 20
HANGS = "the disk hangs: it took nothing for {:g} s, and said no error; look at its mount"


def run(*command: object) -> subprocess.CompletedProcess[str]:
    return subprocess.run([str(word) for word in command], capture_output=True, text=True, timeout=60, check=False)


@dataclass
class Disk:
    """Where a run's directory lies, and how it is made to hang."""

    run_dir: Path
    hang: Callable[[], None]
    go_on: Callable[[], None]


@contextlib.contextmanager
def frozen_file_system(path: Path) -> Iterator[Disk]:
    """Frozen by the kernel: whoever writes to it stands still, and nothing but a thaw ends that."""
    image, mount = path / "image", path / "mount"
    mount.mkdir(parents=True)
    with open(image, "wb") as file:
        file.truncate(32 << 20)
    for command in (("mkfs.ext4", "-q", image), ("mount", "-o", "loop", image, mount)):
        try:
            done = run(*command)
        except FileNotFoundError as error:
            pytest.skip(f"no file system of one's own can be made here: {error}")
        if done.returncode != 0:
            pytest.skip(f"no file system of one's own can be made here: {done.stderr.strip()}")

    def switch(flag: str) -> None:
        assert run("fsfreeze", flag, mount).returncode == 0

    try:
        yield Disk(mount / RUN, lambda: switch("-f"), lambda: switch("-u"))
    finally:
        run("fsfreeze", "-u", mount)
        run("umount", "-l", mount)


@contextlib.contextmanager
def hanging_sync(path: Path) -> Iterator[Disk]:
    """A sync that does not come back: as far as this process can tell, the same."""
    plain, free = durable._sync, threading.Event()
    free.set()

    def sync(*arguments: Any) -> None:
        assert free.wait(60)
        plain(*arguments)

    path.mkdir(parents=True)
    durable._sync = sync  # type: ignore[assignment]
    try:
        yield Disk(path / RUN, free.clear, free.set)
    finally:
        durable._sync = plain
        free.set()


@pytest.fixture(params=[frozen_file_system, hanging_sync])
def disk(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Disk]:
    with request.param(tmp_path / "disk") as made:
        yield made


def held(node: Node, *steps: int) -> list[Manifest]:
    """Steps in its memory, all of which is its own part."""
    made = [manifest_of(f"step-{step}.e1.1", {0: FILES}) for step in steps]
    node.tier.open_epoch(RUN, 1, 0, [])
    for manifest in made:
        node.writes(manifest, 0, FILES)
        node.holds(manifest.name, 0)
    return made


def writers() -> int:
    """Threads that may be at the disk."""
    return sum(thread.name in ("memory-durable",) for thread in threading.enumerate())


def order(node: Node, manifest: Manifest, disk: Disk) -> list[str]:
    """Has it written; what is answered comes into the list."""
    answers: list[str] = []
    node.tier.make_durable(RUN, manifest.ref.to_proto(), disk.run_dir, answers.append)
    return answers


def test_an_order_that_hangs_is_answered_and_seals_nothing(disk: Disk, tmp_path: Path) -> None:
    """So are those behind it, and new ones at once. When the disk goes on, so does the next order."""
    with nodes(tmp_path / "nodes", 1, disk_stall_seconds=STALL_SECONDS) as (one,):
        first, second, third = held(one, 10, 20, 30)
        before = writers()
        disk.hang()
        try:
            answers = [order(one, first, disk), order(one, second, disk)]
            one.wait_for(lambda: all(answers))
            assert answers == [[HANGS.format(STALL_SECONDS)]] * 2
            for _ in range(20):
                assert order(one, third, disk) == [HANGS.format(STALL_SECONDS)]
            assert writers() == before, "nobody else begins to hang"
        finally:
            disk.go_on()
        one.wait_for(lambda: one.makes_durable(third, disk.run_dir) == "")
        verify(disk.run_dir / third.name, read_sealed(disk.run_dir / third.name, third.digest))
        for given_up in (first, second):
            assert not (disk.run_dir / given_up.name / "MANIFEST.json").exists()
        assert [len(one) for one in answers] == [1, 1], "each is answered once"
        assert one.makes_durable(first, disk.run_dir) == ""
        verify(disk.run_dir / first.name, read_sealed(disk.run_dir / first.name, first.digest))


@pytest.mark.full
def test_a_slow_disk_is_waited_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One file, and many together, take it longer than a disk may be silent."""
    monkeypatch.setattr(durable, "_WAITING_BYTES", 1)  # so each piece that is read
    synced: dict[int, int] = {}
    plain = os.fsync

    def slow(descriptor: int) -> None:
        found = os.fstat(descriptor)
        threading.Event().wait(max(0, found.st_size - synced.get(found.st_ino, 0)) / SLOW_BYTES)
        synced[found.st_ino] = found.st_size
        plain(descriptor)

    monkeypatch.setattr(os, "fsync", slow)
    monkeypatch.setattr(durable, "at_once", lambda files, others: False)
    large = {"large": bytes(4 * SLOW_BYTES)}
    small = {f"small-{number}": bytes(SLOW_BYTES // 2) for number in range(8 * THREADS)}
    with nodes(tmp_path / "nodes", 1, disk_stall_seconds=2 * STALL_SECONDS) as (one,):
        one.tier.open_epoch(RUN, 1, 0, [])
        for step, files in ((10, large), (20, small)):
            manifest = manifest_of(f"step-{step}.e1.1", {0: files})
            one.writes(manifest, 0, files)
            one.holds(manifest.name, 0)
            answers: list[str] = []
            one.tier.make_durable(RUN, manifest.ref.to_proto(), tmp_path / RUN, answers.append)
            one.wait_for(lambda answers=answers: answers)  # type: ignore[misc]
            assert answers == [""]


def test_another_node_writes_what_hangs_at_one(tmp_path: Path) -> None:
    """As the master orders it: who hangs is at the same step on the same disk, and does no harm when it goes on."""
    with hanging_sync(tmp_path / "disk") as disk, nodes(tmp_path / "nodes", 2, disk_stall_seconds=1.0) as (one, two):
        (manifest,) = held(one, 10)
        held(two, 10)
        disk.hang()
        answers = order(one, manifest, disk)
        one.wait_for(lambda: answers)
        hung, durable._sync = durable._sync, lambda *_: None
        assert two.makes_durable(manifest, disk.run_dir) == ""
        durable._sync = hung
        disk.go_on()
        one.wait_for(lambda: order(one, manifest, disk)[:1] != [HANGS.format(1.0)])
        verify(disk.run_dir / manifest.name, read_sealed(disk.run_dir / manifest.name, manifest.digest))


def test_what_is_damaged_is_looked_at_while_the_disk_hangs(tmp_path: Path) -> None:
    """It is a matter of memory alone, and the run may wait for it."""
    with hanging_sync(tmp_path / "disk") as disk, nodes(tmp_path / "nodes", 1, disk_stall_seconds=60.0) as (one,):
        (manifest,) = held(one, 10)
        disk.hang()
        answers = order(one, manifest, disk)
        found: list[str] = []
        one.tier.doubt(RUN, manifest.ref.to_proto(), found.append)
        one.wait_for(lambda: found)
        assert (found, answers) == ([""], [])
        disk.go_on()
        one.wait_for(lambda: answers)
        assert answers == [""]


def test_an_agent_ends_although_the_disk_hangs(tmp_path: Path) -> None:
    with hanging_sync(tmp_path / "disk") as disk, nodes(tmp_path / "nodes", 1, disk_stall_seconds=60.0) as (one,):
        (manifest,) = held(one, 10)
        disk.hang()
        order(one, manifest, disk)
        one.tier.close()
        assert one.tier.path is not None
        assert not one.tier.path.exists()


def test_what_is_given_up_with_all_files_there_is_not_sealed(tmp_path: Path) -> None:
    """Whoever goes on after that does it; its files may be deleted just now."""
    with nodes(tmp_path / "nodes", 1) as (one,):
        (manifest,) = held(one, 10)
        target, files = tmp_path / RUN / manifest.name, sorted(FILES)

        def stopped() -> str:
            there = target.exists() and sorted(path.name for path in target.iterdir()) == files
            return "it is given up" if there else ""

        source = one.memory() / manifest.name
        assert durable.make_durable(source, manifest, files, tmp_path / RUN, stopped) == "it is given up"
        assert sorted(path.name for path in target.iterdir()) == files
