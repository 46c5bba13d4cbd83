"""Everything about checkpoints on a mount that refuses rename, links and hard links: the same tests, and its own."""

from __future__ import annotations

import errno
import json
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from dalsegno.agent.control.claim import Claim, ClaimFile
from dalsegno.agent.storage.job_directory import JobDirectory
from dalsegno.agent.storage.private import read_private
from dalsegno.elastic.checkpoint import Best, CheckpointStore
from dalsegno.elastic.checkpoint.files import place_file, publish, replace_file
from tests.support.jobs.mounts import bare_mount

# The same tests again, on this mount.
from tests.unit.agent.storage.test_storage import *  # noqa: F403
from tests.unit.elastic.checkpoint.test_best import *  # noqa: F403
from tests.unit.elastic.checkpoint.test_checkpoint import *  # noqa: F403
from tests.unit.elastic.saving.test_resuming import *  # noqa: F403
from tests.unit.elastic.saving.test_saving import *  # noqa: F403
from tests.unit.elastic.saving.test_staging import *  # noqa: F403


@pytest.fixture(autouse=True)
def refused() -> Iterator[list[str]]:
    with bare_mount() as calls:
        yield calls


@pytest.mark.parametrize("code", sorted({errno.EPERM, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOSYS, errno.EINVAL}))
def test_however_the_mount_says_it(tmp_path: Path, code: int) -> None:
    """Mounts differ in the error by which they refuse."""
    with bare_mount(code):
        replace_file(tmp_path / "note.json", b"{}")
        (tmp_path / "aside").write_bytes(b"x")
        publish(tmp_path / "aside", tmp_path / "probe")
        place_file(tmp_path / "aside", tmp_path / "copy")
    assert [(tmp_path / name).read_bytes() for name in ("note.json", "probe", "copy")] == [b"{}", b"x", b"x"]


def test_notes_are_written_over_where_they_lie(tmp_path: Path, refused: list[str]) -> None:
    """A shorter note after a longer one is whole JSON, and nothing else is left in the directory."""
    store = CheckpointStore(tmp_path)
    for name, value in (("step-1000000.e1.1", 0.123456789), ("step-2.e1.1", 1.0)):
        store.write_best(Best(name, "loss", "min", value))
        assert json.loads((tmp_path / "best.json").read_text())["name"] == name
    assert [path.name for path in tmp_path.iterdir()] == ["best.json"]
    assert refused == ["replace", "replace"]


def test_an_error_that_is_not_the_mounts_way_is_not_hidden(tmp_path: Path) -> None:
    """A directory in the place of a note: replacing it fails with what the file system says."""
    (tmp_path / "note.json").mkdir()
    with pytest.raises(IsADirectoryError):
        replace_file(tmp_path / "note.json", b"{}\n")


def test_the_first_probe_and_token_count(tmp_path: Path, refused: list[str]) -> None:
    """Published without links: the second comer's is refused, and a reader waits until an empty one is written."""
    for number in (1, 2):
        (tmp_path / f"aside-{number}").write_bytes(b"%d" % number)
    publish(tmp_path / "aside-1", tmp_path / "token")
    with pytest.raises(FileExistsError):
        publish(tmp_path / "aside-2", tmp_path / "token")
    assert read_private(tmp_path / "token") == b"1"
    (tmp_path / "slow").touch()
    writer = threading.Timer(0.2, (tmp_path / "slow").write_bytes, [b"late"])
    writer.start()
    assert read_private(tmp_path / "slow") == b"late"
    writer.join()
    first, second = (JobDirectory(tmp_path, "job").probe() for _ in range(2))
    assert first == second
    assert len(first) == 32
    assert set(refused) == {"link"}


def test_a_claim_moves(tmp_path: Path, refused: list[str]) -> None:
    """Its counter is seen to move, also by one who reads in the middle of a write."""
    claims = ClaimFile(tmp_path)
    before = Claim("host", "boot", 1, 2, 3, 9, "127.0.0.1:1")
    claims.write(before, threading.Event())
    assert claims.bump(before) is not None
    assert claims.bump(before) is None, "it is not as it was"
    claim = claims.read()
    assert claim is not None
    assert claim.counter == 10
    whole = claims.path.read_bytes()
    claims.path.write_bytes(whole[:10])
    writer = threading.Timer(0.03, claims.path.write_bytes, [whole])
    writer.start()
    assert claims.read() == claim
    writer.join()
    assert "replace" in refused


def test_a_converted_file_is_copied_where_it_cannot_be_linked(tmp_path: Path, refused: list[str]) -> None:
    """What an earlier conversion finished is taken over all the same."""
    (tmp_path / "source").write_bytes(b"tensor")
    place_file(tmp_path / "source", tmp_path / "lease" / "target")
    assert (tmp_path / "lease" / "target").read_bytes() == b"tensor"
    assert refused == ["link"]
