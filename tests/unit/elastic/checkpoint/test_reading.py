"""Looks into directories in which others work."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest

from dalsegno.elastic.checkpoint.reading import size_below


def test_the_size_of_all_that_lies_below(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What goes meanwhile does not count; another failure counts only where the caller says so. No link is followed."""
    (tmp_path / "inner").mkdir()
    for name, size in (("a", 3), ("inner/b", 40), ("gone", 500)):
        (tmp_path / name).write_bytes(bytes(size))
    (tmp_path / "link").symlink_to("inner/b")
    plain, errors = os.lstat, [errno.ENOENT, errno.EIO, errno.EIO]

    def lstat(path: str) -> os.stat_result:
        if path.endswith("gone"):
            raise OSError(errors.pop(0), "gone", path)
        return plain(path)

    monkeypatch.setattr(os, "lstat", lstat)
    total = 3 + 40 + len("inner/b")
    assert size_below(tmp_path) == total
    with pytest.raises(OSError, match="gone"):
        size_below(tmp_path)
    assert size_below(tmp_path, OSError) == total
    assert size_below(tmp_path / "none") == 0
