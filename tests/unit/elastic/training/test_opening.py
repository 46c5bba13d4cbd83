"""Whether the ranks of several machines have one directory, and what they hear where that cannot be looked at."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from dalsegno.elastic import Session
from dalsegno.elastic.checkpoint import CheckpointStore, LocalLock
from dalsegno.elastic.rank.agreement import Refusal, Trouble
from dalsegno.elastic.training import opening
from dalsegno.elastic.training.opening import check_directory, next_epoch, take_lock
from dalsegno.elastic.training.session import BareSession
from dalsegno.elastic.training.unopened import _Unopened
from tests.support.workers.threads import Threads, together

pytestmark = pytest.mark.timeout(60)

HERE = threading.local()


@pytest.fixture
def machines(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each rank has a machine of its own, on which its directory is called the same. Nobody waits long."""
    monkeypatch.setattr(opening, "_host", lambda: [f"node-{HERE.rank}", f"boot-{HERE.rank}", "mnt:[1]"])
    monkeypatch.setattr(opening, "_real", lambda directory: "/w/checkpoints")
    monkeypatch.setattr(opening, "SIGHT_PAUSES_SECONDS", (0.05, 0.05))
    monkeypatch.setattr(opening, "OUT_OF_SIGHT_SECONDS", 0.3)


def checked(directories: list[Path]) -> list[BaseException | None]:
    """What the check says on each rank, whose directories these are."""

    def one(group: Threads) -> None:
        HERE.rank = group.rank
        check_directory(directories[group.rank], group)

    return together(len(directories), one)


def lines_of(ended: list[BaseException | None], kind: type[BaseException]) -> str:
    """The line with which all ranks ended."""
    assert [type(one) for one in ended] == [kind] * len(ended)
    assert len({str(one) for one in ended}) == 1
    return str(ended[0])


@contextmanager
def on_rank(rank: int, name: str, raises: Callable[[], BaseException]) -> Iterator[None]:
    """A function of ``os`` fails on this rank."""
    original = getattr(os, name)

    def call(*args: object, **options: object) -> object:
        if getattr(HERE, "rank", None) == rank:
            raise raises()
        return original(*args, **options)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, name, call)
        yield


@pytest.mark.usefixtures("machines")
@pytest.mark.parametrize("there", [True, False], ids=["made", "not made"])
def test_one_name_on_two_disks_is_two_directories(tmp_path: Path, there: bool) -> None:
    """`checkpoint_dir="checkpoints"` where each machine has a disk of its own: no directory would have all parts."""
    directories = [tmp_path / "0", tmp_path / "1"]
    if there:
        directories[1].mkdir()
    line = lines_of(checked(directories), Refusal)
    assert line == (
        "checkpoint_dir is /w/checkpoints on rank 0 (node-0) and /w/checkpoints on rank 1 (node-1): what rank 0 writes"
        " has not come into sight on rank 1 within 0.3 s: it is not the same directory, or a mount that caches names."
        " Give all ranks one that all of them see"
    )
    assert list(directories[0].iterdir()) == []
    assert directories[1].exists() == there


@pytest.mark.usefixtures("machines")
def test_a_shared_directory_passes_though_it_comes_into_sight_late(tmp_path: Path) -> None:
    """NFS shows a new name late: looked at once, a sound start would be refused."""
    directory, looks = tmp_path / "a" / "checkpoints", list[str]()
    listed = os.listdir

    def late(path: object = ".") -> list[str]:
        if HERE.rank == 1:
            looks.append(str(path))
            if len(looks) == 1:
                raise FileNotFoundError(2, "not yet", str(path))
            return [] if len(looks) == 2 else listed(path)  # type: ignore[call-overload,no-any-return]
        return listed(path)  # type: ignore[call-overload,no-any-return]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "listdir", late)
        assert checked([directory] * 2) == [None, None]
    assert len(looks) == 3
    assert list(directory.iterdir()) == []


@pytest.mark.usefixtures("machines")
def test_a_mount_that_caches_names_has_as_long_as_a_save(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Listings that are kept for a minute: refused for good after 10 s, though saves would have waited."""
    paused, now, listed = list[float](), [0.0], os.listdir

    def sleeps(seconds: float) -> None:
        if HERE.rank == 1:
            paused.append(seconds)
            now[0] += seconds

    monkeypatch.setattr(opening, "SIGHT_PAUSES_SECONDS", (0.2, 0.5, 1.0, 3.0, 6.0))
    monkeypatch.setattr(opening, "OUT_OF_SIGHT_SECONDS", 60.0)
    monkeypatch.setattr(opening.time, "sleep", sleeps)

    def cached(path: object = ".") -> list[str]:
        return [] if HERE.rank == 1 and now[0] < 59.5 else listed(path)  # type: ignore[call-overload,no-any-return]

    monkeypatch.setattr(os, "listdir", cached)
    assert checked([tmp_path] * 2) == [None, None]
    assert sum(paused) == pytest.approx(60.0)
    assert max(paused) == 6.0


@pytest.mark.usefixtures("machines")
@pytest.mark.parametrize(("rank", "name", "how"), [(0, "open", "written"), (1, "listdir", "read")])
def test_a_rank_without_memory_tells_the_others(tmp_path: Path, rank: int, name: str, how: str) -> None:
    """It ended alone, and the others waited for it."""
    with on_rank(rank, name, lambda: MemoryError("no room")):
        assert f"cannot be {how} on rank {rank} (MemoryError: no room)" in lines_of(checked([tmp_path] * 2), Trouble)


@pytest.mark.usefixtures("machines")
def test_names_that_nfs_has_not_found_before_are_asked_for_anew(tmp_path: Path) -> None:
    """To resolve the path, before rank 0 made the directory, was to ask for it: NFS keeps that answer for a minute."""
    directory, opened = tmp_path / "a" / "checkpoints", list[str]()
    listed, original = os.listdir, os.open

    def notes(path: object, *arguments: object, **options: object) -> int:
        number = original(path, *arguments, **options)  # type: ignore[call-overload]
        if HERE.rank == 1:
            opened.append(str(path))
        return int(number)

    def remembers(path: object = ".") -> list[str]:
        if HERE.rank == 1 and not {str(tmp_path), str(tmp_path / "a")} <= set(opened):
            raise FileNotFoundError(2, "as it was before", str(path))
        return listed(path)  # type: ignore[call-overload,no-any-return]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "open", notes)
        patch.setattr(os, "listdir", remembers)
        assert checked([directory] * 2) == [None, None]


def test_one_machine_needs_no_file(tmp_path: Path) -> None:
    """All ranks see the same under one name there."""
    assert checked([tmp_path / "checkpoints"] * 2) == [None, None]
    assert list(tmp_path.iterdir()) == []


def test_another_name_on_one_machine_is_looked_at(tmp_path: Path) -> None:
    """A link is followed; two directories are refused at once, and nobody waits."""
    (tmp_path / "real").mkdir()
    (tmp_path / "0").symlink_to(tmp_path / "real")
    assert checked([tmp_path / "0", tmp_path / "real"]) == [None, None]
    line = lines_of(checked([tmp_path / "0", tmp_path / "other"]), Refusal)
    assert line.startswith(f"checkpoint_dir is {tmp_path}/real on rank 0 and {tmp_path}/other on rank 1, which are not")
    assert list((tmp_path / "real").iterdir()) == []


def test_who_cannot_tell_its_machine_is_looked_at(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without the kernel's word (gVisor, a hidden /proc) equal names say nothing."""
    monkeypatch.setattr(opening, "SIGHT_PAUSES_SECONDS", (0.05,))
    monkeypatch.setattr(opening, "OUT_OF_SIGHT_SECONDS", 0.1)
    monkeypatch.setattr(opening, "_real", lambda directory: "/w/checkpoints")

    def gone() -> str:
        raise PermissionError(13, "Permission denied", "/proc/sys/kernel/random/boot_id")

    monkeypatch.setattr(opening, "boot_id", gone)
    assert "it is not the same directory, or" in lines_of(checked([tmp_path / "0", tmp_path / "1"]), Refusal)
    assert checked([tmp_path / "0"] * 2) == [None, None]
    # Nobody else could see another one.
    assert checked([tmp_path / "alone"]) == [None]
    assert not (tmp_path / "alone").exists()


@pytest.mark.usefixtures("machines")
@pytest.mark.parametrize(
    ("error", "line"),
    [
        (OSError(28, "No space left on device"), "cannot be written on rank 0 (No space left on device)"),
        (OSError(30, "Read-only file system"), "cannot be written on rank 0 (Read-only file system)"),
    ],
    ids=["full", "read-only"],
)
def test_what_rank_0_cannot_write_all_hear(tmp_path: Path, error: OSError, line: str) -> None:
    """It was called two directories, whose names were the same, and once the disk is mended a start succeeds."""
    with on_rank(0, "open", lambda: error):
        said = lines_of(checked([tmp_path] * 2), Trouble)
    assert said == f"checkpoint_dir /w/checkpoints {line}: mend that, or give all ranks another directory"


@pytest.mark.usefixtures("machines")
def test_a_file_in_the_way_is_named(tmp_path: Path) -> None:
    """ "File exists" is no help to who wanted it to."""
    (tmp_path / "checkpoints").touch()
    said = lines_of(checked([tmp_path / "checkpoints"] * 2), Trouble)
    assert "/w/checkpoints cannot be written on rank 0 (it is no directory)" in said


@pytest.mark.usefixtures("machines")
@pytest.mark.parametrize("number", [5, 13, 116], ids=["EIO", "EACCES", "ESTALE"])
def test_what_one_rank_cannot_read_all_hear(tmp_path: Path, number: int) -> None:
    """It ended that rank alone, and the others waited in the gather."""
    with on_rank(1, "listdir", lambda: OSError(number, os.strerror(number), "x")):
        said = lines_of(checked([tmp_path] * 3), Trouble)
    assert f"checkpoint_dir /w/checkpoints cannot be read on rank 1 ({os.strerror(number)})" in said
    assert list(tmp_path.iterdir()) == []


@pytest.mark.usefixtures("machines")
def test_a_file_that_stays_is_no_trouble(tmp_path: Path) -> None:
    """Ranks have seen it: they have one directory, whatever becomes of the file."""
    with on_rank(0, "unlink", lambda: OSError(5, "Input/output error")):
        assert checked([tmp_path] * 2) == [None, None]


@pytest.mark.usefixtures("machines")
def test_nothing_stays_where_a_rank_is_gone(tmp_path: Path) -> None:
    """Rank 0 removes its file although the others never answer."""

    def one(group: Threads) -> None:
        HERE.rank = group.rank
        if group.rank == 1:
            group.gather({"path": "/w/checkpoints", "host": ["node-1", "boot-1", "mnt:[1]"]})
            group.broadcast(None)
            raise KeyboardInterrupt
        check_directory(tmp_path, group)

    first, _ = together(2, one)
    assert first is not None
    assert list(tmp_path.iterdir()) == []


LACKS = [OSError(5, "Input/output error"), MemoryError("no memory")]


@pytest.mark.parametrize("error", LACKS, ids=["disk", "memory"])
def test_what_rank_0_meets_at_the_lock_all_hear(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    """It ended rank 0 alone, and the others waited."""

    def fails(self: LocalLock) -> None:
        raise error

    monkeypatch.setattr(LocalLock, "acquire", fails)
    assert str(error) in lines_of(together(2, lambda group: take_lock(tmp_path, group)), RuntimeError)


@pytest.mark.parametrize("error", LACKS, ids=["disk", "memory"])
def test_what_rank_0_meets_as_it_counts_epochs_all_hear(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    """The same: it alone looks for the directory's highest one."""
    (tmp_path / "step-4.e2.1").mkdir()
    store = CheckpointStore(tmp_path)
    assert together(2, lambda group: next_epoch(store, group)) == [3, 3]

    def fails(self: CheckpointStore) -> int:
        raise error

    monkeypatch.setattr(CheckpointStore, "next_epoch", fails)
    for ranks in (1, 2):
        assert str(error) in lines_of(together(ranks, lambda group: next_epoch(store, group)), OSError)


@pytest.mark.parametrize("kind", [BareSession, Session])
def test_a_session_that_is_not_open_can_become_one(kind: type[BareSession]) -> None:
    """Python refuses to change the class of an object where a base (an abstract one) has laid it out otherwise."""
    before = object.__new__(type(kind.__name__, (_Unopened, kind), {}))
    object.__setattr__(before, "__class__", kind)
    assert type(before) is kind
