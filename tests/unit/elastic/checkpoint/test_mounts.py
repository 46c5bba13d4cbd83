"""Where a path's volume is mounted, where that can be told. The mounts themselves: `test_master_spawning`."""

from __future__ import annotations

from pathlib import Path

import pytest

from dalsegno.elastic.checkpoint.mounts import is_away, mount_point


def test_what_is_not_there_counts_as_what_it_lies_in(tmp_path: Path) -> None:
    assert mount_point(tmp_path) == mount_point(tmp_path / "a" / "b")
    assert not is_away(mount_point(tmp_path), tmp_path / "a")
    assert is_away(tmp_path / "mounted here before", tmp_path / "mounted here before" / "a") is (
        mount_point(tmp_path) is not None
    )


@pytest.mark.parametrize("said", [b"pos:\t0\nflags:\t012000000\n", b"mnt_id:\tx y\n", b""])
def test_where_nobody_can_tell_nothing_is_away(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, said: bytes) -> None:
    monkeypatch.setattr(Path, "read_bytes", lambda path: said)
    assert mount_point(tmp_path) is None
    assert not is_away(Path("/nowhere/at/all"), tmp_path)


def test_names_with_spaces(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    lines = b"7 1 0:1 / /a\\040b\\134c rw - ext4 /dev/x rw\n8 1 0:1 / / rw - ext4 /dev/x rw\n"
    monkeypatch.setattr(Path, "read_bytes", lambda path: b"mnt_id:\t7\n" if "fdinfo" in str(path) else lines)
    assert mount_point(tmp_path) == Path("/a b\\c")
