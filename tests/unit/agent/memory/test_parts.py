"""A part as a stream: what is sent, and what is not taken."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import grpc
import pytest

from dalsegno.agent.memory import incoming
from dalsegno.agent.memory.connection import PIECE_BYTES
from dalsegno.agent.memory.durable import make_durable
from dalsegno.agent.memory.fence import Fence
from dalsegno.agent.memory.holdings import Holdings, StepPart
from dalsegno.agent.memory.incoming import PartRefusedError
from dalsegno.agent.memory.pieces import header_of, read_manifest, read_part
from dalsegno.agent.memory.space import NoSpaceError, Space
from dalsegno.elastic.checkpoint import MANIFEST, CheckpointDamaged, Manifest, summing, verify_files
from dalsegno.elastic.checkpoint.spares import keep_spares
from dalsegno.elastic.checkpoint.summing import WRITE_BYTES
from dalsegno.protos import peer_pb2
from dalsegno.protos.room import RESERVE_BYTES
from tests.support.checkpoints.memory import JOB, RUN, SMALL, manifest_of, write_own

NAME = "step-10.e3.1"


@pytest.fixture
def part(tmp_path: Path) -> StepPart:
    """Of another node, ready to be sent."""
    (tmp_path / "there" / RUN).mkdir(parents=True)
    manifest = manifest_of(NAME, SMALL)
    write_own(tmp_path / "there" / RUN, manifest, 1, SMALL[1])
    return Holdings(tmp_path / "there").add_own(RUN, NAME, manifest.digest, 1)


@pytest.fixture
def holdings(tmp_path: Path) -> Holdings:
    (tmp_path / "here" / RUN).mkdir(parents=True)
    return Holdings(tmp_path / "here")


def space(holdings: Holdings, budget: int | None = None) -> Space:
    return Space(budget, holdings.bytes, lambda: 1 << 40, lambda: 1 << 40)


Sent = list[Any]
"""A header, and the pieces behind it."""


def send(part: StepPart, what: Sent, piece_bytes: int = PIECE_BYTES) -> None:
    manifest = read_manifest(part)
    what.append(header_of(part, JOB, len(manifest)))
    what.extend(bytes(piece) for piece in read_part(part, manifest, piece_bytes))


def sent(part: StepPart, piece_bytes: int = PIECE_BYTES) -> Sent:
    what: Sent = []
    send(part, what, piece_bytes)
    return what


def receive(holdings: Holdings, what: Sent, budget: int | None = None) -> Any:
    pieces = (memoryview(piece) for piece in what[1:])
    return incoming.receive(what[0], pieces, holdings, space(holdings, budget))


@pytest.mark.parametrize("piece", [1, 1000, PIECE_BYTES])
def test_a_part_arrives_as_it_was_sealed(part: StepPart, holdings: Holdings, tmp_path: Path, piece: int) -> None:
    """Whatever the pieces are cut like, with folders and empty files; many small files share one piece."""
    if piece == 1:
        part = replace(part, entries=tuple(entry for entry in part.entries if entry.size < 4000))
    messages = sent(part, piece)
    if piece == PIECE_BYTES:
        assert len(messages) == 2 + -(-sum(map(len, SMALL[1].values())) // PIECE_BYTES)
    held = receive(holdings, messages)
    assert held.parts == (1,)
    verify_files(tmp_path / "here" / RUN / NAME, part.entries)
    assert sorted(os.listdir(tmp_path / "here" / RUN / f"{NAME}.parts")) == ["1.json"]
    assert Manifest.read(tmp_path / "here" / RUN / NAME) == part.manifest


def test_a_part_is_written_over_an_older_one(part: StepPart, holdings: Holdings, tmp_path: Path) -> None:
    """Of which more bytes were there, and others."""
    run_dir = tmp_path / "here" / RUN
    older = run_dir / "step-1.e3.1"
    older.mkdir(parents=True)
    (older / "rank1.pt").write_bytes(b"older" * 600_000)
    os.chmod(older / "rank1.pt", 0o604)
    keep_spares(run_dir, older, ["rank1.pt"])
    receive(holdings, sent(part))
    verify_files(run_dir / NAME, part.entries)
    assert os.stat(run_dir / NAME / "rank1.pt").st_mode & 0o777 == 0o604
    assert sorted(os.listdir(run_dir / f"{NAME}.parts")) == ["1.json"]


def test_a_part_is_written_as_the_page_cache_likes_it(
    part: StepPart, holdings: Holdings, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In writes that are small enough, on its way into memory and from there to the disk."""
    counts: list[int] = []
    write = os.write

    def counted(descriptor: int, data: memoryview) -> int:
        counts.append(len(data))
        return write(descriptor, data)

    monkeypatch.setattr(summing.os, "write", counted)
    assert max(map(len, SMALL[1].values())) > WRITE_BYTES
    receive(holdings, sent(part))
    paths = {entry.path for entry in part.entries}
    assert sum(counts) >= sum(entry.size for entry in part.entries)
    assert max(counts) <= WRITE_BYTES
    counts.clear()
    (tmp_path / "disk").mkdir()
    run_dir = tmp_path / "here" / RUN
    assert not make_durable(run_dir / NAME, part.manifest, paths, tmp_path / "disk" / RUN, lambda: "", seals=False)
    assert sum(counts) >= sum(entry.size for entry in part.entries)
    assert max(counts) <= WRITE_BYTES


def header(what: Sent, **changes: Any) -> Sent:
    changed = peer_pb2.Header()
    changed.CopyFrom(what[0])
    for name, value in changes.items():
        if name == "paths":
            del changed.paths[:]
            changed.paths.extend(value)
        else:
            setattr(changed, name, value)
    return [changed, *what[1:]]


def flipped(what: Sent, piece: int, position: int) -> Sent:
    spoilt = bytearray(what[piece])
    spoilt[position] ^= 16
    return [*what[:piece], bytes(spoilt), *what[piece + 1 :]]


HARM: dict[str, tuple[Callable[[Sent], Sent], grpc.StatusCode, str]] = {
    "flipped": (lambda m: flipped(m, 2, 5000), grpc.StatusCode.DATA_LOSS, "did not arrive as it was sealed"),
    "flipped in the manifest": (lambda m: flipped(m, 1, 50), grpc.StatusCode.INVALID_ARGUMENT, "not the one"),
    "cut": (lambda m: m[:-1], grpc.StatusCode.DATA_LOSS, "ended too early"),
    "cut in the manifest": (lambda m: m[:1], grpc.StatusCode.DATA_LOSS, "ended too early"),
    "too long": (lambda m: [*m, b"x"], grpc.StatusCode.INVALID_ARGUMENT, "more bytes"),
    "another digest": (lambda m: header(m, digest="0" * 64), grpc.StatusCode.INVALID_ARGUMENT, "not the one"),
    "another name": (lambda m: header(m, name="step-11.e3.1"), grpc.StatusCode.INVALID_ARGUMENT, "is that of"),
    "another run": (lambda m: header(m, run_id="run-0002"), grpc.StatusCode.INVALID_ARGUMENT, "is that of"),
    "outside": (lambda m: header(m, paths=["../rank1.pt"]), grpc.StatusCode.INVALID_ARGUMENT, "not in the manifest"),
    "unlisted": (lambda m: header(m, paths=["another"]), grpc.StatusCode.INVALID_ARGUMENT, "not in the manifest"),
    "twice": (lambda m: header(m, paths=["rank1.pt"] * 2), grpc.StatusCode.INVALID_ARGUMENT, "twice"),
    "no manifest": (lambda m: header(m, manifest_bytes=0), grpc.StatusCode.INVALID_ARGUMENT, "0 bytes"),
    "endless manifest": (lambda m: header(m, manifest_bytes=1 << 60), grpc.StatusCode.INVALID_ARGUMENT, "bytes"),
    "other files": (lambda m: header(m, paths=["rank2.pt"]), grpc.StatusCode.DATA_LOSS, "did not arrive"),
}


@pytest.mark.parametrize("harm", HARM)
def test_what_is_not_what_was_sealed_is_not_taken(
    part: StepPart, holdings: Holdings, tmp_path: Path, harm: str
) -> None:
    """And nothing of it is left."""
    spoil, code, said = HARM[harm]
    with pytest.raises(PartRefusedError, match=said) as refused:
        receive(holdings, spoil(sent(part)))
    assert refused.value.code is code
    assert holdings.all() == []
    assert [path for path in (tmp_path / "here").rglob("*") if path.is_file() or path.name.startswith(".")] == []
    assert holdings.keep(RUN, 4, frozenset(), 2) == []
    assert list((tmp_path / "here" / RUN).iterdir()) == []  # nothing is at work on it any more


def test_a_link_in_the_way_leads_nowhere(part: StepPart, holdings: Holdings, tmp_path: Path) -> None:
    """What ranks leave may have links in it."""
    (tmp_path / "elsewhere").mkdir()
    step = tmp_path / "here" / RUN / NAME
    step.mkdir()
    (step / "deep").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(PartRefusedError, match="link is in its way"):
        receive(holdings, sent(part))
    assert list((tmp_path / "elsewhere").iterdir()) == []
    (step / "deep").unlink()
    shutil.rmtree(step)
    step.symlink_to(tmp_path / "elsewhere")
    with pytest.raises(PartRefusedError):
        receive(holdings, sent(part))
    assert list((tmp_path / "elsewhere").iterdir()) == []


def _flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


def _as_link(path: Path) -> None:
    path.rename(path.with_suffix(".real"))
    path.symlink_to(path.with_suffix(".real"))


@pytest.mark.parametrize("name", ["rank1.pt", MANIFEST])
@pytest.mark.parametrize(
    "spoil", [_flip, Path.unlink, _as_link, lambda path: os.truncate(path, 10)], ids=["flip", "gone", "link", "cut"]
)
def test_a_part_that_was_damaged_here_is_not_sent(
    part: StepPart, holdings: Holdings, spoil: Callable[[Path], object], name: str
) -> None:
    """Its sender finds that itself, and what has arrived until then is no part."""
    spoil(part.place.files / name)
    arrived: Sent = []
    with pytest.raises(CheckpointDamaged) as damaged:
        send(part, arrived)
    assert damaged.value.file == name
    if arrived:
        with pytest.raises(PartRefusedError):
            receive(holdings, arrived)


def test_the_budget_counts_what_is_here_and_what_comes(part: StepPart, holdings: Holdings) -> None:
    """Each byte of a part; the line names the flag."""
    size = sum(entry.size for entry in part.entries)
    with pytest.raises(PartRefusedError, match=r"no room for part 1 of step-10.e3.1.*--memory-budget") as refused:
        receive(holdings, sent(part), size - 1)
    assert refused.value.code is grpc.StatusCode.RESOURCE_EXHAUSTED
    receive(holdings, sent(part), size)
    room = space(holdings, 2 * size)
    with room.promised(size, "it"), pytest.raises(NoSpaceError, match="budget"), room.promised(1, "more"):
        pass
    with room.promised(size, "it"):
        pass


def test_room_is_on_the_file_system_and_in_the_container() -> None:
    """Files on a tmpfs are memory of the container: both are asked, and the line says what helps."""
    with (
        pytest.raises(NoSpaceError, match=r"part 1 .*99 MB are left on the file system; .*--shm-size.*medium: Memory"),
        Space(None, lambda: 0, lambda: 99_000_000, lambda: 1 << 40).promised(100_000_000, "part 1"),
    ):
        pass
    with (
        pytest.raises(NoSpaceError, match=r"99 MB of memory can be had, beside .*--memory-replicas"),
        Space(None, lambda: 0, lambda: 1 << 40, lambda: RESERVE_BYTES + 99_000_000).promised(100_000_000, "part 1"),
    ):
        pass
    room = Space(None, lambda: 0, lambda: 150, lambda: 1 << 40)
    with room.promised(100, "one"), pytest.raises(NoSpaceError), room.promised(51, "two"):
        pass


def test_what_is_written_to_a_full_disk_is_refused(
    part: StepPart, holdings: Holdings, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whoever else fills it meanwhile: the sender learns that there is no room."""
    monkeypatch.setattr(os, "write", lambda descriptor, data: (_ for _ in ()).throw(OSError(28, "No space left")))
    with pytest.raises(PartRefusedError, match="no room") as refused:
        receive(holdings, sent(part))
    assert refused.value.code is grpc.StatusCode.RESOURCE_EXHAUSTED


def offered(**changes: Any) -> peer_pb2.Header:
    fields = {"job_id": JOB, "run_id": RUN, "epoch": 3, "name": NAME, "digest": "d", "group_rank": 1}
    return peer_pb2.Header(**{**fields, **changes})


REFUSED: dict[str, tuple[dict[str, Any], grpc.StatusCode]] = {
    "job": ({"job_id": "another"}, grpc.StatusCode.NOT_FOUND),
    "closed": ({"epoch": 2, "name": "step-10.e2.1"}, grpc.StatusCode.FAILED_PRECONDITION),
    "own": ({"group_rank": 0}, grpc.StatusCode.INVALID_ARGUMENT),
    "name": ({"name": "../../x"}, grpc.StatusCode.INVALID_ARGUMENT),
    "form": ({"name": "step-10.e3.1.universal.1"}, grpc.StatusCode.INVALID_ARGUMENT),
    "epoch": ({"epoch": 4}, grpc.StatusCode.INVALID_ARGUMENT),
    "run": ({"run_id": "../x"}, grpc.StatusCode.INVALID_ARGUMENT),
    "no run": ({"run_id": ""}, grpc.StatusCode.INVALID_ARGUMENT),
}


@pytest.mark.parametrize("case", REFUSED)
def test_the_fence(case: str) -> None:
    """Another job, a closed epoch, this node's own part, impossible names."""
    fence = Fence(JOB)
    assert fence.open(RUN, 3, 0)
    changes, code = REFUSED[case]
    with pytest.raises(PartRefusedError) as refused:
        fence.check(offered(**changes))
    assert refused.value.code is code


def test_the_fence_lets_in_what_may_come() -> None:
    """The open epoch and later ones, a run of which nothing is known yet, and what is wanted here; no epoch reopens."""
    fence = Fence(JOB)
    fence.check(offered(group_rank=0))
    assert fence.open(RUN, 3, 0)
    assert not fence.open(RUN, 2, 1)
    fence.check(offered())
    fence.check(offered(epoch=4, name="step-10.e4.1", group_rank=0))
    fence.check(offered(run_id="run-0002", epoch=1, name="step-1.e1.1"))
    old = offered(epoch=2, name="step-10.e2.1", group_rank=0)
    with fence.wanted(RUN, "step-10.e2.1", "d"), fence.wanted(RUN, "step-10.e2.1", "d"):
        fence.check(old)
        with pytest.raises(PartRefusedError):
            fence.check(offered(epoch=2, name="step-10.e2.1", digest="e"))
    with pytest.raises(PartRefusedError):
        fence.check(old)
