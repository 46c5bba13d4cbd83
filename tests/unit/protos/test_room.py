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
    # A page that was read twice is active, and can be had as well.
    (inner / "memory.stat").write_text("inactive_file 3\ntotal_inactive_file 20\ntotal_active_file 10\n")
    assert room.available_bytes() == 130
    (root / "memory.stat").write_text("anon 800\ninactive_file 5\nactive_file 6\nslab_reclaimable 7\n")
    assert room.available_bytes() == 118
    (inner / "memory.limit_in_bytes").unlink()
    (root / "memory.max").write_text("max\n")
    assert room.available_bytes() > plain // 2


def test_nothing_is_refused_for_what_is_not_known(monkeypatch: pytest.MonkeyPatch, tmp_path: os.PathLike[str]) -> None:
    """A kernel that hides its figures says nothing of how many there are."""
    monkeypatch.setattr(room, "_MEMINFO", room.Path(tmp_path) / "meminfo")
    monkeypatch.setattr(room, "own_cgroups", lambda controller: iter(()))
    assert room.available_bytes() > 1 << 60
    assert room.lacks_memory(1 << 50, room.available_bytes()) == ""
