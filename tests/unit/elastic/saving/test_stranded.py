"""A rank that waits with an error for ranks that may wait for it: it says so, and ends once nothing grows."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from dalsegno.elastic.checkpoint import CheckpointStore, Position
from dalsegno.elastic.rank.collective import PeerLost, PeerSilent
from dalsegno.elastic.rank.identity import Identity
from dalsegno.elastic.rank.meetings import may_be_a_peers
from dalsegno.elastic.saving import stranded
from dalsegno.elastic.saving.content import Content, Own
from dalsegno.elastic.saving.outcomes import SaveError
from dalsegno.elastic.saving.tiers import Disk


class Clock:
    """Stands for ``time``."""

    def __init__(self) -> None:
        self.now = 1000.0

    def monotonic(self) -> float:
        return self.now


class Group:
    """Of a rank that waits: keeps what is asked meanwhile."""

    def __init__(self) -> None:
        self.asked: Callable[[], bool] | None = None

    @contextmanager
    def unless(self, gone: Callable[[], bool]) -> Iterator[None]:
        self.asked = gone
        yield


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    made = Clock()
    monkeypatch.setattr(stranded, "time", made)
    return made


@pytest.fixture
def codes(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """What the process would end with."""
    found: list[int] = []
    monkeypatch.setattr(stranded, "insist", found.append)
    return found


def waiting(
    directory: Path,
    said: dict[str, Any],
    *,
    name: str = "step-5.e1.1",
    group: Group | None = None,
    link: Any = None,
    **identity: Any,
) -> Group:
    """A rank that waits with what it has said."""
    who = Identity(**{"rank": 1, "world_size": 2, "socket": "socket", "stall_timeout": 400.0, **identity})
    group = group or Group()
    own = Own(Content(5, Position(0, 80)), Disk(CheckpointStore(directory), who), name=name)
    with stranded.unless_stranded(group, who, link, own, said):  # type: ignore[arg-type]
        return group


FULL = {"text": "OSError: the disk is full", "cause": "surroundings"}


def test_it_says_so_once_and_ends_when_nothing_has_grown(
    tmp_path: Path, clock: Clock, codes: list[int], caplog: pytest.LogCaptureFixture
) -> None:
    """As long as files grow somebody writes. It ends with what it had, and a word about barriers."""
    (tmp_path / "step-5.e1.1").mkdir()
    asked = waiting(tmp_path, FULL).asked
    assert asked is not None
    for seconds in range(799):
        clock.now = 1000.0 + seconds
        if seconds < 500:
            (tmp_path / "step-5.e1.1" / "grows").write_bytes(bytes(seconds))
        assert asked() is False
        assert len(caplog.messages) == (seconds >= 10)
    clock.now = 1802.0
    with pytest.raises(SaveError, match=r"saving step 5 failed: OSError: the disk is full \(rank 1\); and the other"):
        asked()
    assert codes == [1]
    (said,) = caplog.messages
    assert said.startswith("rank 1 cannot save its part of step-5.e1.1, and the other ranks have not come yet: OSErr")
    assert "in 300 s without a byte from them it ends" in said


def blocks(path: Path, seconds: int) -> None:
    with path.open("rb+") as file:
        file.seek(seconds * 8192)
        file.write(b"x" * 4096)
    os.utime(path, ns=(0, 0))


def times(path: Path, seconds: int) -> None:
    os.utime(path, ns=(0, seconds))


@pytest.mark.parametrize("writes", [blocks, times])
def test_who_writes_in_a_file_that_has_its_size_is_not_silent(
    tmp_path: Path, clock: Clock, codes: list[int], writes: Callable[[Path, int], None]
) -> None:
    """A memory map, or one whose blocks were asked for first."""
    directory = tmp_path / "step-5.e1.1"
    directory.mkdir()
    with (directory / "mapped").open("wb") as file:
        file.truncate(1000 * 8192)
    times(directory / "mapped", 0)
    asked = waiting(tmp_path, FULL).asked
    assert asked is not None
    for seconds in range(0, 900, 100):
        clock.now = 1000.0 + seconds
        writes(directory / "mapped", seconds)
        assert asked() is False
    clock.now += 300.0
    with pytest.raises(SaveError, match="the disk is full"):
        asked()
    assert codes == [1]


def test_where_the_disk_is_never_stuck_it_waits(
    tmp_path: Path, clock: Clock, codes: list[int], caplog: pytest.LogCaptureFixture
) -> None:
    """`--stall-timeout=0`. Said it is all the same, also of a save without a name yet."""
    asked = waiting(tmp_path, FULL, name="", stall_timeout=0.0).asked
    assert asked is not None
    for _ in range(100):
        clock.now += 100.0
        assert asked() is False
    assert "rank 1 cannot save its part of step 5, " in caplog.text
    assert codes == []


def test_without_an_agent_it_does_not_wait_for_ever(tmp_path: Path, clock: Clock, codes: list[int]) -> None:
    """Nobody else would end it."""
    asked = waiting(tmp_path, FULL, socket=None, stall_timeout=0.0).asked
    assert asked is not None
    clock.now += stranded.ALONE_SECONDS
    with pytest.raises(SaveError, match="the disk is full"):
        asked()


@pytest.mark.parametrize(
    ("stall_timeout", "ends"),
    [(400.0, "in 400 s without a byte from any node the master ends this world"), (0.0, "it waits")],
)
def test_with_several_nodes_the_master_ends_it(
    tmp_path: Path,
    clock: Clock,
    codes: list[int],
    caplog: pytest.LogCaptureFixture,
    stall_timeout: float,
    ends: str,
) -> None:
    """This node does not see what another one writes: in its own memory, or behind a cache of a volume's."""
    asked = waiting(tmp_path, FULL, nodes=2, stall_timeout=stall_timeout).asked
    assert asked is not None
    for _ in range(100):
        clock.now += 100.0
        assert asked() is False
    (said,) = caplog.messages
    assert "OSError: the disk is full" in said
    assert f"a barrier, {ends}; mend" in said
    assert codes == []


def test_the_master_hears_why(tmp_path: Path) -> None:
    """Its line stands on all nodes; and it forgets that once nobody waits any more."""
    told = []
    link = SimpleNamespace(send=lambda message, *, droppable: told.append(message.saving.problem))
    waiting(tmp_path, FULL, nodes=2, link=link)
    assert (told[0], told[-1]) == ("OSError: the disk is full", "")


def test_several_nodes_without_an_agent_end_as_one(tmp_path: Path, clock: Clock, codes: list[int]) -> None:
    """There is no master that would."""
    asked = waiting(tmp_path, FULL, socket=None, nodes=2).asked
    assert asked is not None
    clock.now += stranded.ALONE_SECONDS
    with pytest.raises(SaveError, match="the disk is full"):
        asked()
    assert codes == [1]


class Losing(Group):
    """Of a rank whose wait fails."""

    def __init__(self, error: PeerLost) -> None:
        super().__init__()
        self._error = error

    @contextmanager
    def unless(self, gone: Callable[[], bool]) -> Iterator[None]:
        yield
        raise self._error


class Ending:
    """A link to an agent that says, or does not, that a notice is over."""

    def __init__(self, ending: int) -> None:
        self.ending = ending

    def send(self, message: object, *, droppable: bool = False) -> None:
        """Nobody listens."""


@pytest.mark.parametrize(
    ("lost", "ends", "kinds"),
    [
        (PeerSilent("Timed out waiting 21600000ms"), [1], (SaveError,)),
        (PeerLost("Connection closed by peer"), [], (SaveError, PeerLost)),
    ],
    ids=["silent", "gone"],
)
def test_what_it_had_is_said_where_its_wait_fails(
    tmp_path: Path, codes: list[int], lost: PeerLost, ends: list[int], kinds: tuple[type, ...]
) -> None:
    """Its own trouble may be the cause. Whether a peer is to blame, or it may stay, is asked only if one is gone."""
    with pytest.raises(
        SaveError, match=r"step 5 failed: OSError: the disk is full \(rank 1\); and .*(Timed|Connec)"
    ) as e:
        waiting(tmp_path, FULL, group=Losing(lost))
    assert all(isinstance(e.value, kind) for kind in kinds)
    assert may_be_a_peers(e.value) is (PeerLost in kinds)
    assert codes == ends


def test_a_leaver_whose_notice_is_over_is_no_failed_save(tmp_path: Path) -> None:
    """The others' parts are sealed without it."""
    lost = PeerLost("its notice is over")
    with pytest.raises(PeerLost) as raised:
        waiting(tmp_path, FULL, group=Losing(lost), link=Ending(1))
    assert raised.value is lost


def test_a_copy_that_failed_and_that_nobody_waits_for_is_said_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """And again behind one that was made."""
    who = Identity(rank=1, world_size=2, socket="socket")
    own = Own(Content(5, Position(0, 80)), Disk(CheckpointStore(tmp_path), who))
    unawaited = stranded.Unawaited(who)
    for error, count in ((None, 0), (MemoryError(), 1), (MemoryError(), 1), (None, 1), (MemoryError(), 2)):
        unawaited.note(own, error)
        assert len(caplog.messages) == count
    assert caplog.messages[0].startswith("rank 1 could not copy its part of step 5: MemoryError. It goes on; if")


@pytest.mark.parametrize("said", [{}, {"paths": ["model.pt"]}], ids=["waiting", "background"])
def test_who_has_saved_its_part_waits_as_ever(tmp_path: Path, said: dict[str, Any]) -> None:
    """However long the others write."""
    assert waiting(tmp_path, said).asked is None
