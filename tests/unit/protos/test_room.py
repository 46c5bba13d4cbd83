"""How much memory can still be had."""

from __future__ import annotations

import os

import pytest

from dalsegno.protos import room


def test_a_container_or_a_job_may_have_less(monkeypatch: pytest.MonkeyPatch, tmp_path: os.PathLike[str]) -> None:
    """A group's limit counts, and those of the groups above it, without its cache, which can be had; "max" is none."""
    root, inner = room.Path(tmp_path), room.Path(tmp_path) / "inner"
    inner.mkdir()
    monkeypatch.setattr(room, "own_cgroups", lambda controller: iter([inner, root]))
    plain = room.available_bytes()
    (root / "memory.max").write_text("1000\n")
    (root / "memory.current").write_text("900\n")
    (root / "memory.stat").write_text("anon 800\ninactive_file 50\n")
    assert room.available_bytes() == 150
    (inner / "memory.limit_in_bytes").write_text("500\n")
    (inner / "memory.usage_in_bytes").write_text("400\n")
    (inner / "memory.stat").write_text("inactive_file 3\ntotal_inactive_file 20\n")
    assert room.available_bytes() == 120
    (inner / "memory.limit_in_bytes").unlink()
    (root / "memory.max").write_text("max\n")
    assert room.available_bytes() > plain // 2
