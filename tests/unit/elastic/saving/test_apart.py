"""How a rank ends a drain's save when a leaver is gone, and a disk that does not answer."""

from __future__ import annotations

import errno
import os
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from dalsegno.elastic.checkpoint import CheckpointStore, Manifest, Position, verify
from dalsegno.elastic.rank import rng
from dalsegno.elastic.rank.collective import PeerLost, Solo
from dalsegno.elastic.rank.exits import Drained
from dalsegno.elastic.rank.identity import Identity
from dalsegno.elastic.rank.notices import Notice
from dalsegno.elastic.saving import apart, saving, sight
from dalsegno.elastic.saving.saving_reports import Count
from dalsegno.elastic.training import session as worker_session
from dalsegno.elastic.training import staying
from dalsegno.protos import control_pb2
from tests.support.workers.fake_link import FakeLink

pytestmark = pytest.mark.timeout(60)

LOST = PeerLost("connection closed by peer")
CONTENT = saving.Content(4, Position(0, 64))


class Deserted(Solo):
    """A group of two whose other rank is gone when the notes are compared that a test names."""

    world_size = 2

    def __init__(self, gone_at: int, rank: int = 0) -> None:
        self.rank, self._gathers, self._gone_at = rank, 0, gone_at

    def gather(self, message: Any) -> list[Any]:
        self._gathers += 1
        if self._gathers == self._gone_at:
            raise LOST
        return [message, message]

    def broadcast(self, message: Any) -> Any:
        return message


@pytest.fixture(autouse=True)
def in_no_time(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("WORD_SECONDS", "OTHERS_SECONDS", "LOOK_SECONDS"):
        monkeypatch.setattr(apart, name, 0.05)
    for module in (apart, sight):
        monkeypatch.setattr(module, "SIGHT_PAUSES_SECONDS", (0.01,))


def saver(agent: FakeLink, directory: Path, gone_at: int) -> saving.Saver:
    identity = Identity(rank=0, world_size=2, local_world_size=1, epoch=1, stall_timeout=600.0)
    collective = Deserted(gone_at)
    return saving.Saver(identity, collective, CheckpointStore(directory), agent, None)  # type: ignore[arg-type]


def save(one: saving.Saver, *, others_part: bool = True, drain: bool = True) -> Manifest | None:
    def write(path: Path) -> None:
        (path / "model.pt").write_bytes(bytes(1000))
        other = path / rng.file_name(1)
        other.parent.mkdir()
        other.write_bytes(rng.capture() if others_part else b'{"python"')

    return one.save(CONTENT, write, create_directory=True, drain=drain)


# The other rank is gone when they compare notes: of their writing, of what is there, of the checksums.
@pytest.mark.parametrize("gone_at", [1, 2, 3])
def test_the_last_rank_seals_what_is_there(tmp_path: Path, gone_at: int) -> None:
    """Wherever in the save the leaver was lost; the checkpoint is whole, and the agent hears of it."""
    agent = FakeLink(0, control_pb2.ENDING_WAIT, control_pb2.ENDING_WAIT, control_pb2.ENDING_SEAL)
    one = saver(agent, tmp_path, gone_at)
    manifest = save(one)
    one.close()
    assert manifest is not None
    assert one.apart
    verify(tmp_path / manifest.name, manifest, 1)
    assert {entry.path for entry in manifest.files} == {"model.pt", "rng/rank-0.json", "rng/rank-1.json"}
    (sealed,) = agent.of("sealed")
    assert (sealed.digest, manifest.shape.world_size) == (manifest.digest, 2)


def test_a_missing_part_is_never_sealed(tmp_path: Path) -> None:
    """Half of the leaver's last file is not its part."""
    one = saver(FakeLink(control_pb2.ENDING_SEAL), tmp_path, 1)
    with pytest.raises(saving.SaveError, match="rank 1 had to go before its part was written"):
        save(one, others_part=False)
    assert CheckpointStore(tmp_path).sealed() == []


def failing(plain: Callable[..., Any], path: str, code: int, times: int) -> Callable[..., Any]:
    """The call, which fails so often where it is about that path."""
    left = [times]

    def call(*words: Any, **more: Any) -> Any:
        if left[0] and str(words[0]).endswith(path):
            left[0] -= 1
            raise OSError(code, os.strerror(code), str(words[0]))
        return plain(*words, **more)

    return call


# What fails in the completion: looking for a part, listing, summing, sealing.
@pytest.mark.parametrize(
    ("owner", "name", "path", "code"),
    [
        (Path, "read_bytes", "rng/rank-1.json", errno.ESTALE),
        (Path, "read_bytes", "rng/rank-1.json", errno.EIO),
        (apart, "list_files", "", errno.EIO),
        (apart, "checksums", "", errno.ESTALE),
        (apart, "seal", "", errno.ESTALE),
    ],
)
def test_a_mount_that_fails_once_costs_no_save(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, owner: Any, name: str, path: str, code: int
) -> None:
    """Nobody else seals it: the others have gone."""
    agent = FakeLink(0, control_pb2.ENDING_SEAL)
    one = saver(agent, tmp_path, 1)
    monkeypatch.setattr(owner, name, failing(getattr(owner, name), path, code, 1))
    manifest = save(one)
    one.close()
    assert manifest is not None
    verify(tmp_path / manifest.name, manifest, 1)
    assert agent.of("sealed")


@pytest.mark.parametrize(("name", "code"), [("read_bytes", errno.ESTALE), ("read_bytes", errno.EIO)])
def test_a_mount_that_goes_on_failing_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, code: int
) -> None:
    """Not a rank that had to go before it was done."""
    one = saver(FakeLink(control_pb2.ENDING_SEAL), tmp_path, 1)
    monkeypatch.setattr(Path, name, failing(getattr(Path, name), "rng/rank-1.json", code, 100))
    with pytest.raises(OSError, match=os.strerror(code)):
        save(one)
    assert CheckpointStore(tmp_path).sealed() == []


def test_a_sync_that_failed_is_not_asked_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernel tells once that bytes are lost; the next call would succeed."""
    one = saver(FakeLink(control_pb2.ENDING_SEAL), tmp_path, 1)
    monkeypatch.setattr(apart, "checksums", failing(apart.checksums, "", errno.EIO, 1))
    with pytest.raises(OSError, match=os.strerror(errno.EIO)):
        save(one)
    assert CheckpointStore(tmp_path).sealed() == []


@pytest.mark.slow
def test_ranks_of_the_same_node_may_still_be_writing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The master tells only nodes apart. Of other nodes nothing more is to come."""
    monkeypatch.setattr(apart, "OTHERS_SECONDS", 30.0)
    (tmp_path / rng.DIRECTORY).mkdir()
    (tmp_path / rng.file_name(0)).write_bytes(rng.capture())
    late = threading.Timer(0.5, lambda: (tmp_path / rng.file_name(1)).write_bytes(rng.capture()))
    late.start()
    assert apart.missing_parts(tmp_path, 3, range(2)) == [2]
    late.join()


@pytest.mark.parametrize("comes_back", [True, False])
def test_a_mount_that_stays_dead_is_not_waited_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, comes_back: bool
) -> None:
    """Ranks of the same node may write for hours, and nobody would hear why this one stands still."""
    monkeypatch.setattr(apart, "SIGHT_PAUSES_SECONDS", (0.2, 0.2))
    monkeypatch.setattr(apart, "LOOK_SECONDS", 0.01)
    monkeypatch.setattr(apart, "OTHERS_SECONDS", 8.0)
    (tmp_path / rng.DIRECTORY).mkdir()
    (tmp_path / rng.file_name(0)).write_bytes(rng.capture())
    began = time.monotonic()

    def read(path: Path) -> bytes:
        if comes_back and time.monotonic() - began > 0.2:
            return rng.capture()
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    monkeypatch.setattr(Path, "read_bytes", read)
    if comes_back:
        assert apart.missing_parts(tmp_path, 1, range(1)) == []
    else:
        with pytest.raises(OSError, match=os.strerror(errno.EIO)):
            apart.missing_parts(tmp_path, 1, range(1))
    assert time.monotonic() - began < 4.0


def test_others_write_and_go(tmp_path: Path) -> None:
    """One seals; who is not asked to leaves the directory alone."""
    one = saver(FakeLink(0, control_pb2.ENDING_WRITE), tmp_path, 2)
    assert save(one) is None
    assert one.apart
    assert CheckpointStore(tmp_path).sealed() == []


def test_a_crash_is_none_of_it(tmp_path: Path) -> None:
    """Nobody says that a leaver is gone: the rank fails as its peers do."""
    with pytest.raises(PeerLost):
        save(saver(FakeLink(control_pb2.ENDING_TOGETHER), tmp_path, 2))


def test_a_dead_agent_is_not_waited_for() -> None:
    """Its node is about to end."""
    with pytest.raises(PeerLost):
        apart.has_to_seal(FakeLink(control_pb2.ENDING_WAIT, alive=False), 0, LOST)  # type: ignore[arg-type]


def test_only_the_first_rank_of_a_node_seals() -> None:
    """The others go."""
    assert not apart.has_to_seal(FakeLink(control_pb2.ENDING_WAIT), 1, LOST)  # type: ignore[arg-type]


def test_two_seals_are_one(tmp_path: Path) -> None:
    """A thread of rank 0's may have been first."""
    one = saver(FakeLink(control_pb2.ENDING_SEAL), tmp_path, 3)
    manifest = save(one)
    one.close()
    assert manifest is not None
    assert apart.seal_once(tmp_path / manifest.name, manifest) == manifest


# ---- a drain that was withdrawn -------------------------------------------------------------------------------------


def test_ranks_go_only_if_somebody_still_wants_them_to(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A growth that was withdrawn while they saved: what they saved counts, and they train on."""
    insisted: list[int] = []
    monkeypatch.setattr(staying, "insist", insisted.append)
    link, closed = FakeLink(), []
    link.drain = True
    session = worker_session.BareSession(
        Identity(epoch=1, socket="socket", run_dir=tmp_path),
        Solo(),
        link=link,  # type: ignore[arg-type]
        lock=None,
        resume=None,
        keep=0,
        notice=Notice(),
    )

    def to_the_boundary() -> None:
        session.begin_step()
        assert session.end_step().drain == link.drain
        assert session.save(lambda path: (path / "model.pt").write_bytes(b"0") and None, drain=True) is not None

    to_the_boundary()
    link.drain = False
    session.leave_drained(lambda: closed.append(1))
    to_the_boundary()
    assert (insisted, closed, session.step) == ([], [], 2)
    assert not link.of("drained")
    link.drain = True
    to_the_boundary()
    with pytest.raises(Drained):
        session.leave_drained(lambda: closed.append(1))
    assert session.saves.saver is not None
    session.saves.saver.close()
    assert (insisted, closed, link.said[-1].drained.step) == ([83], [1], 3)


class Gone(Solo):
    """A group whose other rank is gone."""

    world_size = 2

    def max(self, values: Sequence[int]) -> list[int]:
        raise LOST


def test_a_leaver_that_is_gone_behind_the_save_takes_nobody_with_it() -> None:
    """Everything is saved: the others go, too, and wait for nobody."""
    assert apart.agree_to_go(Gone(), True, saved=True) == (True, True)
    assert apart.agree_to_go(Solo(), False, saved=True) == (False, False)


# ---- a disk that does not answer ------------------------------------------------------------------------------------


def test_a_disk_that_is_stuck_fails_the_save_and_not_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """After most of --stall-timeout without a byte; all ranks know it, and train on."""
    answers = threading.Event()
    monkeypatch.setattr(saving, "checksums", lambda *_, **__: answers.wait(30))
    agent = FakeLink()
    identity = Identity(epoch=1, stall_timeout=0.2)
    one = saving.Saver(identity, Solo(), CheckpointStore(tmp_path), agent, None)  # type: ignore[arg-type]
    assert one.save(CONTENT, lambda path: None, create_directory=True, drain=True) is None
    answers.set()
    failed = agent.said[-1].save_failed
    assert (failed.drain, "the disk has not answered" in failed.reason) == (True, True)


@pytest.mark.slow
def test_a_disk_that_moves_is_waited_for() -> None:
    """Byte by byte, for longer than it may stand still."""
    count, more = Count(0), threading.Event()

    def work() -> str:
        for _ in range(10):
            more.wait(0.1)
            count.add(1)
        return "done"

    assert apart.unless_stuck(work, count, 0.5) == "done"


def test_what_fails_on_the_way_is_the_callers() -> None:
    """As without a limit."""
    for patience in (0.0, 5.0):
        with pytest.raises(OSError, match="no space"):
            apart.unless_stuck(full, Count(0), patience)


def full() -> None:
    raise OSError("no space")
