"""The checkpoint package: names, manifests, sealing, inventory, verification, the store. Nothing of it needs torch."""

from __future__ import annotations

import errno
import fcntl
import json
import os
import subprocess
import sys
import threading
import tracemalloc
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dalsegno.elastic.checkpoint import (
    CheckpointDamaged,
    CheckpointName,
    CheckpointStore,
    Damage,
    DirectoryInUse,
    FileEntry,
    LocalLock,
    Manifest,
    Order,
    Position,
    Ref,
    Shape,
    describe,
    files,
    inspect,
    inventory,
    read_sealed,
    seal,
    verify,
)
from dalsegno.protos import control_pb2

COUNTS = st.integers(0, 10**18 - 1)


def manifest_for(directory: Path, source: Ref | None = None, **changes: object) -> Manifest:
    name = CheckpointName.parse(directory.name)
    manifest = Manifest(
        name=directory.name,
        job_id="job",
        run_id="run-0001",
        step=name.step,
        epoch=name.epoch,
        generation=3,
        form=name.form,
        shape=Shape(2, "ddp", True),
        position=Position(1, 64),
        order=Order(7, 1000, 16, True),
        source=source,
        resumed_from=Ref("step-2.e1.1", "ab" * 32),
        min_nodes=1,
        max_nodes=4,
        metric=0.5,
        files=describe(directory),
    )
    return replace(manifest, **changes)  # type: ignore[arg-type]


def write(run_dir: Path, name: str) -> Manifest:
    directory = run_dir / name
    (directory / "part").mkdir(parents=True)
    (directory / "a.bin").write_bytes(b"alpha" * 1000)
    (directory / "part" / "b.bin").write_bytes(os.urandom(5 << 20))
    manifest = manifest_for(directory)
    seal(directory, manifest)
    return manifest


@given(COUNTS, COUNTS, COUNTS, st.one_of(st.none(), st.tuples(st.sampled_from(["universal", "weights"]), COUNTS)))
def test_names_round_trip(step: int, epoch: int, attempt: int, later: tuple[str, int] | None) -> None:
    """Every name parses back into its parts."""
    name = CheckpointName(step, epoch, attempt)
    if later is not None:
        name = name.later(*later)
    assert CheckpointName.parse(str(name)) == name
    assert name.source == CheckpointName(step, epoch, attempt)


@pytest.mark.parametrize(
    "text",
    ["", "step-1", "step-01.e1.1", "step-1.e1.1.universal", "step-1.e1.1.other.2", "step-1.e1.1\n", "step-٣.e1.1"],
)
def test_foreign_names_are_refused(text: str) -> None:
    """What does not have one spelling of ours is not a checkpoint."""
    with pytest.raises(ValueError, match="not a checkpoint name"):
        CheckpointName.parse(text)


def test_sealed_checkpoint_reads_back_and_verifies(tmp_path: Path) -> None:
    """A sealed directory gives the same manifest and digest to every reader, and verifies."""
    manifest = write(tmp_path, "step-4.e2.1")
    read = read_sealed(tmp_path / "step-4.e2.1", manifest.digest)
    assert read == manifest
    assert [entry.path for entry in read.files] == ["a.bin", "part/b.bin"]
    verify(tmp_path / "step-4.e2.1", read)
    assert inventory(tmp_path) == [manifest]


def test_manifest_becomes_a_message(tmp_path: Path) -> None:
    """The message carries everything the master decides with."""
    message = write(tmp_path, "step-4.e2.1").to_proto()
    assert message.ref.name == "step-4.e2.1"
    assert len(message.ref.digest) == 64
    assert message.form == control_pb2.FORM_SHARDED
    assert (message.shape.world_size, message.shape.strategy, message.shape.any_world_size) == (2, "ddp", True)
    assert (message.step, message.epoch, message.position.samples) == (4, 2, 64)
    assert message.bytes == 5000 + (5 << 20)
    assert message.largest_file == 5 << 20
    assert message.resumed_from.name == "step-2.e1.1"
    assert not message.HasField("source")
    assert message.metric == 0.5


@pytest.mark.parametrize("keep", [None, 0, 2])
def test_what_a_script_wants_kept_is_in_the_manifest_if_it_says_so(tmp_path: Path, keep: int | None) -> None:
    (tmp_path / "step-4.e2.1").mkdir()
    manifest = manifest_for(tmp_path / "step-4.e2.1", keep=keep)
    assert Manifest.from_bytes(manifest.to_bytes()) == manifest
    assert (b'"keep"' in manifest.to_bytes()) is (keep is not None)
    message = manifest.to_proto()
    assert (message.keep if message.HasField("keep") else None) == keep


def _flip(directory: Path) -> None:
    with open(directory / "part" / "b.bin", "r+b") as file:
        file.seek(4_500_000)
        byte = file.read(1)[0]
        file.seek(4_500_000)
        file.write(bytes([byte ^ 1]))


def _link(directory: Path) -> None:
    (directory / "a.bin").rename(directory.parent / "elsewhere")
    (directory / "a.bin").symlink_to(directory.parent / "elsewhere")


def test_a_conversion_may_end_between_its_seal_and_its_journal(tmp_path: Path) -> None:
    """What it has sealed is whole. In a checkpoint of ranks the same file is one too many."""
    source = write(tmp_path, "step-4.e2.1")
    later = tmp_path / "step-4.e2.1.universal.9"
    later.mkdir()
    (later / "a.bin").write_bytes(b"alpha")
    manifest = manifest_for(later, source=source.ref)
    seal(later, manifest)
    for directory in (later, tmp_path / "step-4.e2.1"):
        (directory / "JOURNAL.jsonl").write_bytes(b"{}\n")
    verify(later, manifest)
    with pytest.raises(CheckpointDamaged, match="EXTRA_FILE"):
        verify(tmp_path / "step-4.e2.1", source)


@pytest.mark.parametrize(
    ("harm", "reason", "file"),
    [
        (_flip, Damage.WRONG_CHECKSUM, "part/b.bin"),
        (lambda d: os.truncate(d / "a.bin", 4999), Damage.WRONG_SIZE, "a.bin"),
        (lambda d: (d / "part" / "b.bin").unlink(), Damage.MISSING_FILE, "part/b.bin"),
        (lambda d: (d / "part" / "c.bin").write_bytes(b""), Damage.EXTRA_FILE, "part/c.bin"),
        (lambda d: (d / "part" / "MANIFEST.json").write_bytes(b""), Damage.EXTRA_FILE, "part/MANIFEST.json"),
        (_link, Damage.NOT_A_FILE, "a.bin"),
    ],
)
def test_every_damage_is_found_and_named(tmp_path: Path, harm: object, reason: Damage, file: str) -> None:
    """A flipped byte, a truncated, missing, extra or replaced file: each is reported with file and reason."""
    manifest = write(tmp_path, "step-4.e2.1")
    harm(tmp_path / "step-4.e2.1")  # type: ignore[operator]
    with pytest.raises(CheckpointDamaged) as caught:
        verify(tmp_path / "step-4.e2.1", manifest)
    assert (caught.value.reason, caught.value.file) == (reason, file)


def test_verification_reads_several_files_at_once(tmp_path: Path) -> None:
    """Each of two threads waits in the middle of a file until the other is in the middle of one."""
    manifest = write(tmp_path, "step-1.e1.0")
    together = threading.Barrier(2, timeout=30)
    readers = set()

    def meet(count: int) -> None:
        if threading.get_ident() not in readers:
            readers.add(threading.get_ident())
            together.wait()

    verify(tmp_path / "step-1.e1.0", manifest, threads=2, moved=meet)
    assert len(readers) == 2


@pytest.mark.slow
def test_verification_takes_no_more_memory_for_larger_files(tmp_path: Path) -> None:
    """It streams: each thread has a piece that fits into its core's cache, and tells progress as the bytes go by."""
    directory = tmp_path / "step-1.e1.0"
    directory.mkdir()
    for name in ("a", "b"):
        with open(directory / name, "wb") as file:
            file.truncate(80 << 20)
    manifest = manifest_for(directory)
    seal(directory, manifest)
    parts: list[int] = []
    tracemalloc.start()
    verify(directory, manifest, threads=2, moved=parts.append)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert sum(parts) == 160 << 20
    assert max(parts) <= files.READ_BYTES <= 1 << 20
    assert peak < 2 * files.READ_BYTES + (1 << 20)


def test_torn_or_edited_manifest_is_not_a_seal(tmp_path: Path) -> None:
    """Any proper prefix of a manifest, and any second spelling of it, is refused."""
    write(tmp_path, "step-4.e2.1")
    path = tmp_path / "step-4.e2.1" / "MANIFEST.json"
    whole = path.read_bytes()
    for length in [*range(0, len(whole), 37), len(whole) - 1]:
        path.write_bytes(whole[:length])
        with pytest.raises(CheckpointDamaged) as caught:
            Manifest.read(path.parent)
        assert caught.value.reason is Damage.MANIFEST
    path.write_bytes(json.dumps(json.loads(whole)).encode())
    assert inventory(tmp_path) == []
    path.write_bytes(whole.replace(b'"step":4', b'"step":5'))
    assert inventory(tmp_path) == []
    path.write_bytes(whole)
    with pytest.raises(CheckpointDamaged) as caught:
        read_sealed(path.parent, "0" * 64)
    assert caught.value.reason is Damage.DIGEST


@pytest.mark.parametrize("path", ["../x", "/etc/passwd", "a//b", "./a", "MANIFEST.json", ""])
def test_manifest_never_points_outside(tmp_path: Path, path: str) -> None:
    """A manifest cannot make a reader leave the checkpoint's directory."""
    directory = tmp_path / "step-1.e1.1"
    directory.mkdir()
    with pytest.raises(ValueError, match="not a path inside"):
        manifest_for(directory, files=(FileEntry(path, 1, "0" * 32),))


def test_seal_refuses_what_it_does_not_know(tmp_path: Path) -> None:
    """A file that came after the description, a second seal and a foreign manifest are errors."""
    directory = tmp_path / "step-4.e2.1"
    directory.mkdir()
    (directory / "a").write_bytes(b"1")
    manifest = manifest_for(directory)
    (directory / "b").write_bytes(b"2")
    with pytest.raises(CheckpointDamaged, match="EXTRA_FILE"):
        seal(directory, manifest)
    (directory / "b").unlink()
    seal(directory, manifest)
    with pytest.raises(FileExistsError):
        seal(directory, manifest)
    with pytest.raises(ValueError, match="cannot seal"):
        seal(tmp_path / "step-4.e2.2", manifest)


def test_failed_manifest_write_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """When the disk is full at the last moment, no half manifest stays behind."""
    directory = tmp_path / "step-4.e2.1"
    directory.mkdir()
    manifest = manifest_for(directory)
    real = os.fsync

    def full(descriptor: int) -> None:
        if os.readlink(f"/proc/self/fd/{descriptor}").endswith("MANIFEST.json"):
            raise OSError(28, "No space left on device")
        real(descriptor)

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="No space"):
        seal(directory, manifest)
    assert list(directory.iterdir()) == []


def test_inventory_orders_and_explains(tmp_path: Path) -> None:
    """Newest last by (epoch, step, attempt); what is not sealed is listed with its reason; strangers are ignored."""
    for name in ["step-8.e1.1", "step-4.e2.1", "step-10.e1.1", "step-4.e2.2"]:
        write(tmp_path, name)
    later = tmp_path / "step-4.e2.1.universal.9"
    later.mkdir()
    seal(later, manifest_for(later, source=Ref("step-4.e2.1", "cd" * 32)))
    (tmp_path / "step-99.e9.1").mkdir()
    (tmp_path / "checkpoint-100").mkdir()
    os.truncate(tmp_path / "step-8.e1.1" / "a.bin", 3)
    look = inspect(tmp_path)
    assert [m.name for m in look.sealed] == ["step-10.e1.1", "step-4.e2.1", later.name, "step-4.e2.2"]
    assert {u.name for u in look.unsealed} == {"step-99.e9.1", "step-8.e1.1"}
    assert "step-8.e1.1" in {m.name for m in inventory(tmp_path, check_sizes=False)}
    assert inventory(tmp_path / "absent") == []


def test_store_names_prunes_and_marks(tmp_path: Path) -> None:
    """Names are never used twice, exactly what is named is deleted, notes for people are whole."""
    store = CheckpointStore(tmp_path / "run-0001")
    assert store.newest() is None
    assert str(store.next_name(4, 2)) == "step-4.e2.1"
    first = write(store.run_dir, "step-4.e2.1")
    (store.run_dir / "step-4.e2.5").mkdir()
    assert str(store.next_name(4, 2)) == "step-4.e2.6"
    assert str(store.next_name(4, 3)) == "step-4.e3.1"
    newer = write(store.run_dir, "step-6.e2.1")
    assert store.newest() == newer
    store.write_latest(newer)
    assert json.loads((store.run_dir / "latest.json").read_text())["name"] == newer.name
    with pytest.raises(ValueError, match="not a checkpoint name"):
        store.prune([first.name, "../../precious"])
    assert store.sealed() == [first, newer]
    store.prune([first.name, "step-77.e1.1"])
    assert store.sealed() == [newer]
    assert not (store.run_dir / first.name).exists()
    store.mark_finished(6, newer)
    assert store.finished


def test_nodes_that_write_one_note_at_once_do_not_disturb_each_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In containers their process ids are the same; this process stands for both of them."""
    move, others = files.move_over, iter([b"other"])

    def meanwhile(aside: Path, path: Path) -> None:
        for text in others:
            files.replace_file(path, text)
        move(aside, path)

    monkeypatch.setattr(files, "move_over", meanwhile)
    files.replace_file(tmp_path / "latest", b"mine!")
    assert [(one.name, one.read_bytes()) for one in tmp_path.iterdir()] == [("latest", b"mine!")]


def test_interrupted_prune_does_not_leave_a_sealed_wreck(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The manifest goes first: what a deletion leaves when it dies is not taken for a checkpoint."""
    store = CheckpointStore(tmp_path)
    write(tmp_path, "step-4.e2.1")

    def dies(path: Path, **options: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("shutil.rmtree", dies)
    with pytest.raises(KeyboardInterrupt):
        store.prune(["step-4.e2.1"])
    assert (tmp_path / "step-4.e2.1" / "a.bin").exists()
    assert inventory(tmp_path, check_sizes=False) == []


def test_local_lock_is_exclusive_and_dies_with_its_process(tmp_path: Path) -> None:
    """A second process is refused with a line that says what to do; the lock is free once its holder is gone."""
    code = (
        "import sys, pathlib; from dalsegno.elastic.checkpoint import LocalLock;"
        "lock = LocalLock(pathlib.Path(sys.argv[1])); lock.acquire()"
        "; print('held', flush=True); sys.stdin.read()"
    )
    holder = subprocess.Popen(
        [sys.executable, "-c", code, str(tmp_path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert holder.stdout is not None
    assert holder.stdout.readline() == "held\n"
    with pytest.raises(DirectoryInUse, match="in use by another training"):
        LocalLock(tmp_path).acquire()
    holder.kill()
    holder.communicate(timeout=10)
    with LocalLock(tmp_path):
        pass


@pytest.mark.parametrize("code", [errno.ENOSYS, errno.ENOLCK])
def test_a_mount_without_locks_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: int) -> None:
    """Lustre without `flock`, NFSv3 without its lock server: "Function not implemented" of nothing named."""

    def none(descriptor: int, operation: int) -> None:
        opened.append(descriptor)
        raise OSError(code, os.strerror(code))

    opened: list[int] = []
    monkeypatch.setattr(fcntl, "flock", none)
    with pytest.raises(OSError, match="mount it with file locks, or give a checkpoint directory on another") as refused:
        LocalLock(tmp_path).acquire()
    assert refused.value.errno == code
    assert f"it cannot be locked ({os.strerror(code)})" in str(refused.value)
    assert str(refused.value).endswith(f": '{tmp_path}'")
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(opened[0])


def test_what_failed_first_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Not that the rest of it cannot be removed, on a mount that is away."""

    def fails(*_: object) -> None:
        raise OSError(errno.ESTALE, os.strerror(errno.ESTALE))

    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "unlink", fails)
    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="No space left"):
        files.write_exclusive(tmp_path / "note", b"x")


def test_what_may_be_a_directory_is_not_called_unsealed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A handle that is stale: a training without a master went back to the one before, without a line."""
    old, new = write(tmp_path, "step-1.e1.1"), write(tmp_path, "step-2.e1.1")
    read, stat = Manifest.read.__func__, os.stat  # type: ignore[attr-defined]

    def stale(path: Path) -> None:
        if tmp_path / new.name in (path, path.parent):
            raise OSError(errno.ESTALE, os.strerror(errno.ESTALE), str(path))

    def reading(cls: type[Manifest], path: Path) -> Manifest:
        stale(path)
        manifest: Manifest = read(cls, path)
        return manifest

    def looking(path: Path, **more: Any) -> os.stat_result:
        if isinstance(path, Path):
            stale(path)
        return stat(path, **more)

    monkeypatch.setattr(Manifest, "read", classmethod(reading))
    monkeypatch.setattr(os, "stat", looking)
    seen = inspect(tmp_path)
    assert [one.name for one in seen.sealed] == [old.name]
    assert [(one.name, one.unreadable) for one in seen.unsealed] == [(new.name, True)]


def test_a_forked_process_closes_no_strangers_file(tmp_path: Path) -> None:
    """A script may have closed all descriptors that it does not know, and have another file of that number."""
    text = (
        "import os, sys, pathlib; from dalsegno.elastic.checkpoint.run_directory import LocalLock;"
        "lock = LocalLock(pathlib.Path(sys.argv[1])); lock.acquire(); number = lock._descriptor; os.close(number);"
        "assert os.open(os.devnull, os.O_RDONLY) == number;"
        "child = os.fork() or os._exit(0 if os.path.exists(f'/proc/self/fd/{number}') else 1);"
        "sys.exit(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))"
    )
    assert subprocess.run([sys.executable, "-c", text, str(tmp_path)], check=False, timeout=60).returncode == 0


def test_a_renamed_directorys_lock_is_not_kept_either(tmp_path: Path) -> None:
    directory = tmp_path / "before"
    lock = LocalLock(directory)
    lock.acquire()
    descriptor = lock._descriptor
    directory.rename(tmp_path / "after")
    lock.forget()
    assert lock._descriptor is None
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(descriptor)  # type: ignore[arg-type]


@pytest.mark.parametrize("ends", ["released", "killed"])
def test_a_forked_process_does_not_keep_the_lock(tmp_path: Path, ends: str) -> None:
    """A data loader's workers outlive a process that is killed. Nor can they release it while that one lives."""
    code = (
        "import os, pathlib, sys; from dalsegno.elastic.checkpoint import LocalLock;"
        "lock = LocalLock(pathlib.Path(sys.argv[1])); lock.acquire();"
        "child = os.fork() or (lock.release() or print('forked', flush=True),"
        " os.read(int(sys.argv[3]), 1), os._exit(0));"
        "sys.argv[2] == 'released' and (sys.stdin.readline(), lock.release(), print('released', flush=True));"
        "os.waitpid(child, 0)"
    )
    ended, end = os.pipe()
    command = [sys.executable, "-c", code, str(tmp_path), ends, str(ended)]
    holder = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, pass_fds=[ended])
    os.close(ended)
    assert holder.stdout is not None
    assert holder.stdin is not None
    assert holder.stdout.readline() == "forked\n"
    with pytest.raises(DirectoryInUse, match="in use by another training"):
        LocalLock(tmp_path).acquire()
    if ends == "killed":
        holder.kill()
        holder.wait(10)
    else:
        holder.stdin.write("\n")
        holder.stdin.flush()
        assert holder.stdout.readline() == "released\n"
    with LocalLock(tmp_path):
        pass
    # The child ends with its own pipe, and is the last who holds its output.
    os.close(end)
    holder.stdin.close()
    assert holder.stdout.read() == ""
    holder.wait(10)


def test_importable_without_torch() -> None:
    """Agents import this package on machines that have no torch."""
    code = "import sys; sys.modules['torch'] = None; import dalsegno.elastic.checkpoint, dalsegno.elastic"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=30)


def test_an_order_names_its_version_only_where_it_is_not_the_first(tmp_path: Path) -> None:
    """Manifests of before orders had versions stay what they were, byte by byte; others carry it through."""
    (tmp_path / "step-1.e1.0").mkdir()
    manifest = manifest_for(tmp_path / "step-1.e1.0")
    assert b'"order":{"global_batch_size":16,"length":1000,"seed":7,"shuffle":true}' in manifest.to_bytes()
    assert Manifest.from_bytes(manifest.to_bytes()) == manifest
    newer = replace(manifest, order=Order(7, 100, 16, True, 2))
    assert b'"shuffle":true,"version":2}' in newer.to_bytes()
    assert Manifest.from_bytes(newer.to_bytes()) == newer
    old = replace(manifest, version=1)
    spelt_out = old.to_bytes().replace(b'"shuffle":true}', b'"shuffle":true,"version":1}')
    with pytest.raises(ValueError, match="canonical"):
        Manifest.from_bytes(spelt_out)


def test_a_file_that_cannot_be_read_is_named() -> None:
    """read(2) itself names none; a process's memory is not mapped at 0, and so reading it there fails."""
    with pytest.raises(OSError, match="Input/output error: '/proc/self/mem'"):
        files.checksum(Path("/proc/self"), "mem")
