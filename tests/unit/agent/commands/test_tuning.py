"""What workers' libraries read of the environment."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from dalsegno.agent.commands.tuning import spin_little, stream_large_copies, take_large_pages


@pytest.mark.parametrize(
    ("chosen", "spins"),
    [({}, "1000"), ({"GOMP_SPINCOUNT": "7"}, "7"), ({"OMP_WAIT_POLICY": "active"}, None)],
)
def test_threads_wait_asleep_unless_somebody_chose_otherwise(chosen: dict[str, str], spins: str | None) -> None:
    environment = dict(chosen)
    spin_little(environment)
    assert environment == {**chosen, **({} if spins is None else {"GOMP_SPINCOUNT": spins})}


@pytest.mark.parametrize(
    ("enabled", "size", "chosen", "found"),
    [
        ("always [madvise] never", 2 << 20, {}, {"THP_MEM_ALLOC_ENABLE": "1"}),
        ("[always] madvise never", 2 << 20, {"A": "B"}, {"A": "B", "THP_MEM_ALLOC_ENABLE": "1"}),
        ("always [madvise] never", 2 << 20, {"THP_MEM_ALLOC_ENABLE": "0"}, {"THP_MEM_ALLOC_ENABLE": "0"}),
        ("always madvise [never]", 2 << 20, {}, {}),
        ("always [madvise] never", 512 << 20, {}, {}),
        ("always [madvise] never", "?", {}, {}),
        (None, 2 << 20, {}, {}),
    ],
)
def test_large_pages_are_taken_where_there_are_any(
    tmp_path: Path, enabled: str | None, size: Any, chosen: dict[str, str], found: dict[str, str]
) -> None:
    pages = tmp_path / "kernel/mm/transparent_hugepage"
    pages.mkdir(parents=True)
    if enabled is not None:
        (pages / "enabled").write_text(enabled)
    (pages / "hpage_pmd_size").write_text(f"{size}\n")
    take_large_pages(chosen, tmp_path)
    assert chosen == found


@pytest.mark.parametrize(
    ("device", "features", "found"),
    [("0x0005", "011001", {}), ("0x0005", "0110001", {"THP_MEM_ALLOC_ENABLE": "1"}), ("0x0002", "111111", None)],
    ids=["gives back", "keeps", "disk"],
)
def test_memory_that_goes_back_to_the_host_is_taken_in_small_pages(
    tmp_path: Path, device: str, features: str, found: dict[str, str] | None
) -> None:
    """Of all its virtual devices a machine's balloon says so."""
    pages, balloon = tmp_path / "kernel/mm/transparent_hugepage", tmp_path / "bus/virtio/devices/virtio0"
    for folder in (pages, balloon, balloon.with_name("virtio1")):
        folder.mkdir(parents=True)
    (pages / "enabled").write_text("always [madvise] never\n")
    (pages / "hpage_pmd_size").write_text("2097152\n")
    (balloon / "device").write_text(f"{device}\n")
    (balloon / "features").write_text(f"{features:0<64}\n")
    environment: dict[str, str] = {}
    take_large_pages(environment, tmp_path)
    assert environment == ({"THP_MEM_ALLOC_ENABLE": "1"} if found is None else found)


OURS = "glibc.cpu.x86_non_temporal_threshold=4194304"


@pytest.mark.parametrize(
    ("chosen", "found"),
    [
        ({}, OURS),
        ({"GLIBC_TUNABLES": ""}, OURS),
        ({"GLIBC_TUNABLES": "glibc.malloc.hugetlb=1"}, f"glibc.malloc.hugetlb=1:{OURS}"),
        ({"GLIBC_TUNABLES": "glibc.cpu.x86_non_temporal_threshold=0x8000:a=b"}, None),
    ],
)
def test_large_copies_go_past_the_caches_unless_somebody_chose_otherwise(
    chosen: dict[str, str], found: str | None
) -> None:
    environment = dict(chosen)
    stream_large_copies(environment)
    assert environment == (chosen if found is None else {"GLIBC_TUNABLES": found})
