"""A frozen copy of a sealed checkpoint below ``<run>/hf/snapshots``: what becomes a milestone, whatever is pruned.

``<name>/<name>/`` holds the checkpoint's files, by hard links where the file system has them. ``run_manifest.json``
beside it comes last: a snapshot without one was never finished, and is thrown away.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import xxhash

from dalsegno.elastic.checkpoint import CheckpointDamaged, Damage, Manifest, is_checkpoint_name
from dalsegno.elastic.checkpoint.files import place_file, replace_file
from dalsegno.elastic.checkpoint.layout import MANIFEST
from dalsegno.elastic.checkpoint.reading import open_regular, read_regular

from .run_manifest import FOLDER, MANIFEST_PATH, MAX_BYTES, METRICS_PATH, File, RunManifest

__all__ = ("Snapshot", "freeze", "local_path", "plain", "snapshots")

# The newest part of the trainer's metrics that goes with a milestone.
METRICS_BYTES = 16 << 20
_STATE = "state.json"
_BUFFER_BYTES = 1 << 20


@dataclass(frozen=True)
class Snapshot:
    """One that is whole, and what became of it.

    Attributes:
        directory: where it lies.
        manifest: what it holds.
        repo: where it was published, or "".
        revision: the commit that holds it, or "".
    """

    directory: Path
    manifest: RunManifest
    repo: str = ""
    revision: str = ""

    def published(self, repo: str, revision: str) -> Snapshot:
        """The same, with the commit that holds it."""
        return replace(self, repo=repo, revision=revision)

    def note(self) -> None:
        """Notes, durably, which commit holds it. Raises OSError if the volume says no."""
        text = json.dumps({"repo": self.repo, "revision": self.revision}).encode() + b"\n"
        replace_file(self.directory / _STATE, text)

    def remove(self) -> None:
        """Deletes it: the manifest first, so that what is left is none."""
        (self.directory / MANIFEST_PATH).unlink(missing_ok=True)
        shutil.rmtree(self.directory)


def local_path(directory: Path, checkpoint: str, path: str) -> Path:
    """Where a file of the milestone lies in its snapshot."""
    return (
        directory / checkpoint / path.removeprefix(f"{FOLDER}/") if path.startswith(f"{FOLDER}/") else directory / path
    )


def plain(manifest: Mapping[str, Any]) -> dict[str, Any]:
    """The ``manifest`` section of ``run.yaml`` as JSON has it: dates and what is no number become text."""
    text = json.dumps(dict(manifest), default=str)
    read: dict[str, Any] = json.loads(text, parse_constant=str)
    return read


def snapshots(root: Path) -> list[Snapshot]:
    """Those that are whole, oldest first. What is left of others is deleted."""
    found = []
    for name in sorted(os.listdir(root)) if root.is_dir() else []:
        directory = root / name
        if not is_checkpoint_name(name):
            continue
        snapshot = _read(directory)
        if snapshot is None:
            shutil.rmtree(directory, ignore_errors=True)
        else:
            found.append(snapshot)
    return sorted(found, key=lambda one: Manifest.read(one.directory / one.manifest.checkpoint).parsed_name.age)


def _read(directory: Path) -> Snapshot | None:
    try:
        manifest = RunManifest.from_bytes(read_regular(directory / MANIFEST_PATH, MAX_BYTES))
        if Manifest.read(directory / manifest.checkpoint).digest != manifest.digest:
            return None
    except (ValueError, FileNotFoundError, CheckpointDamaged):
        return None
    try:
        state = json.loads(read_regular(directory / _STATE, 4096))
        return Snapshot(directory, manifest, str(state["repo"]), str(state["revision"]))
    except (ValueError, KeyError, TypeError, FileNotFoundError):
        return Snapshot(directory, manifest)


def freeze(source: Path, root: Path, run_id: str, section: Mapping[str, Any], metrics: Path | None) -> Snapshot:
    """Makes a snapshot of a sealed checkpoint. Every byte is read once, and must be what was sealed.

    Args:
        source: the checkpoint's directory.
        root: where snapshots lie.
        run_id: as in ``run.yaml``.
        section: the ``manifest`` section of ``run.yaml``.
        metrics: the trainer's metrics file; None: none.

    Raises:
        CheckpointDamaged: its files are not those of its manifest.
        OSError: it is gone meanwhile, the volume is full, or the file system says no.
        ValueError: no milestone can hold it, as where a file's name has a backslash. In any case nothing is left.
    """
    sealed = Manifest.read(source)
    directory = root / sealed.name
    if directory.exists():
        there = _read(directory)
        if there is not None and there.manifest.digest == sealed.digest:
            return there
        shutil.rmtree(directory)
    try:
        return _freeze(source, directory, sealed, run_id, section, metrics)
    except BaseException:
        shutil.rmtree(directory, ignore_errors=True)
        raise


def _freeze(
    source: Path, directory: Path, sealed: Manifest, run_id: str, section: Mapping[str, Any], metrics: Path | None
) -> Snapshot:
    copy = directory / sealed.name
    copy.mkdir(parents=True)
    for entry in sealed.files:
        place_file(source / entry.path, copy / entry.path)
    files = []
    for entry in sealed.files:
        size, sha256, sum_ = _sums(copy / entry.path)
        if (size, sum_) != (entry.size, entry.xxh3_128):
            kind = Damage.WRONG_SIZE if size != entry.size else Damage.WRONG_CHECKSUM
            raise CheckpointDamaged(source, entry.path, kind)
        files.append(File(f"{FOLDER}/{entry.path}", size, sha256))
    replace_file(copy / MANIFEST, sealed.to_bytes())
    files.append(_described(copy / MANIFEST, f"{FOLDER}/{MANIFEST}"))
    if metrics is not None and (text := _tail(metrics)):
        replace_file(directory / METRICS_PATH, text)
        files.append(_described(directory / METRICS_PATH, METRICS_PATH))
    files.sort(key=lambda one: one.path)
    manifest = RunManifest(run_id, sealed.step, sealed.name, sealed.digest, tuple(files), plain(section))
    replace_file(directory / MANIFEST_PATH, manifest.to_bytes())
    return Snapshot(directory, manifest)


def _sums(path: Path) -> tuple[int, str, str]:
    sha256, own, size = hashlib.sha256(), xxhash.xxh3_128(), 0
    with open(open_regular(path), "rb", buffering=0) as file:
        buffer = bytearray(_BUFFER_BYTES)
        view = memoryview(buffer)
        while count := file.readinto(buffer):
            sha256.update(view[:count])
            own.update(view[:count])
            size += count
    return size, sha256.hexdigest(), own.hexdigest()


def _described(path: Path, name: str) -> File:
    size, sha256, _ = _sums(path)
    return File(name, size, sha256)


def _tail(metrics: Path) -> bytes:
    """Whole lines of the metrics file, the newest if there are too many; nothing if it cannot be read."""
    try:
        with open(open_regular(metrics), "rb") as file:
            size = os.fstat(file.fileno()).st_size
            file.seek(max(0, size - METRICS_BYTES))
            text = file.read(METRICS_BYTES)
    except OSError:
        return b""
    text = text[: text.rfind(b"\n") + 1]
    return text if size <= METRICS_BYTES else text[text.find(b"\n") + 1 :]
