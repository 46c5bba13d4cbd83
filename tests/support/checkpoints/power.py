"""What a power cut would leave of a directory, by the strictest reading of what was asked of the disk.

A file has the bytes that it had when it was synced last, and none before; a name is there once its directory was synced
since; one sync of a whole file system does both for all that is there. Nothing else reaches the disk by itself.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from threading import RLock

import pytest
import xxhash

from dalsegno.elastic.checkpoint import MANIFEST, Manifest
from dalsegno.elastic.checkpoint.durability import FileSystem

Image = dict[str, bytes]


class Power:
    """Stands between the code and the disk. Each time something is made durable, and just before, ``look`` sees what a
    cut at that moment would leave.

    Attributes:
        syncs, whole: Files and directories that were synced by themselves, and whole file systems.
    """

    def __init__(self, root: Path, patch: pytest.MonkeyPatch, look: Callable[[Image], None]) -> None:
        self._root, self._look = root, look
        self._names: dict[int, dict[str, int]] = {}  # of a directory, by inode: what is in it
        self._bytes: dict[int, bytes] = {}
        self._lock = RLock()
        self.syncs = self.whole = 0
        fsync, sync = os.fsync, FileSystem.sync

        def one(descriptor: int) -> None:
            path = Path(os.readlink(f"/proc/self/fd/{descriptor}"))
            with self._lock:
                self._look(self.image())
                fsync(descriptor)
                self.syncs += 1
                self._reached(path)
                self._look(self.image())

        def all_of_it(system: FileSystem) -> None:
            with self._lock:
                self._look(self.image())
                if system.tells:
                    sync(system)
                self.whole += 1
                for path in (root, *root.rglob("*")):
                    self._reached(path)
                self._look(self.image())

        patch.setattr(os, "fsync", one)
        patch.setattr(FileSystem, "sync", all_of_it)

    def image(self) -> Image:
        """Files, by path below the root."""
        found: Image = {}

        def walk(inode: int, prefix: str) -> None:
            for name, other in self._names.get(inode, {}).items():
                if other in self._names or other not in self._bytes:
                    walk(other, f"{prefix}{name}/")
                if other in self._bytes:
                    found[prefix + name] = self._bytes[other]

        walk(self._root.stat().st_ino, "")
        return found

    def _reached(self, path: Path) -> None:
        try:
            if path.is_dir():
                self._names[path.stat().st_ino] = {entry.name: entry.inode() for entry in os.scandir(path)}
            else:
                self._bytes[path.stat().st_ino] = path.read_bytes()
        except FileNotFoundError:  # a temporary file, or the journal
            pass


def only_whole_checkpoints(image: Image) -> None:
    """Whatever has a manifest has every file that it lists, byte by byte."""
    for path in sealed(image):
        manifest = Manifest.from_bytes(image[f"{path}/{MANIFEST}"])
        for entry in manifest.files:
            data = image.get(f"{path}/{entry.path}")
            assert data is not None, f"{entry.path} has a manifest and no name"
            assert (len(data), xxhash.xxh3_128_hexdigest(data)) == (entry.size, entry.xxh3_128), entry.path


def sealed(image: Image) -> list[str]:
    """Directories in it that a manifest seals."""
    return sorted(path.removesuffix(f"/{MANIFEST}") for path in image if path.endswith(f"/{MANIFEST}"))
