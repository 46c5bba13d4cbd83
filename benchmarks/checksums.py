"""Checksums of a checkpoint's files beside reading them: what a verification costs (docs/decisions/0008)."""

from __future__ import annotations

import hashlib
import os
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import xxhash

SIZE = 512 << 20
PIECE = 8 << 20


def _seconds(path: Path, update: Callable[[bytes], object]) -> float:
    began = time.perf_counter()
    with path.open("rb", buffering=0) as file:
        while piece := file.read(PIECE):
            update(piece)
    return time.perf_counter() - began


def main() -> int:
    """Prints GB/s of reading alone, and of reading with each checksum; the file is in the page cache."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "file"
        with path.open("wb") as file:
            for _ in range(SIZE // PIECE):
                file.write(os.urandom(PIECE))
        ways: dict[str, Callable[[bytes], object]] = {
            "reading alone": len,
            "xxh3-128": xxhash.xxh3_128().update,
            "sha-256": hashlib.sha256().update,
        }
        for name, update in ways.items():
            print(f"{name:>14}: {SIZE / 1e9 / _seconds(path, update):6.2f} GB/s")
    return 0
