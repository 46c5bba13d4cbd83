"""``run_manifest.json``: what a milestone is, and every file of it with size and SHA-256. Pure.

Canonical JSON, so that the same checkpoint has the same manifest whoever mirrors it, and however often.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import asdict, dataclass
from typing import Any

from dalsegno.elastic.checkpoint import is_checkpoint_name
from dalsegno.protos.text import SHA256

__all__ = ("FOLDER", "MANIFEST_PATH", "File", "RunManifest", "git_blob_id")

# Where a milestone lies in its repository.
MANIFEST_PATH = "run_manifest.json"
FOLDER = "checkpoint"
METRICS_PATH = "metrics.jsonl"
VERSION = 1
MAX_BYTES = 64 << 20
_MAX_SIZE = (1 << 63) - 1


@dataclass(frozen=True)
class File:
    """One file: its path in the repository, its size in bytes, its SHA-256 in lower-case hex."""

    path: str
    size: int
    sha256: str


@dataclass(frozen=True)
class RunManifest:
    """What one revision holds.

    Attributes:
        run_id: whose milestone it is.
        step: of the checkpoint.
        checkpoint: its name.
        digest: its manifest's digest: what the Commander has on its record.
        files: all of them but this manifest, sorted by path.
        manifest: what ``run.yaml`` says under ``manifest``.
    """

    run_id: str
    step: int
    checkpoint: str
    digest: str
    files: tuple[File, ...]
    manifest: dict[str, Any]
    version: int = VERSION

    def __post_init__(self) -> None:
        if self.version != VERSION:
            raise ValueError(f"version {self.version!r}, this program reads {VERSION}")
        if not is_checkpoint_name(self.checkpoint):
            raise ValueError(f"{self.checkpoint!r} is no name of a checkpoint")
        if not SHA256.fullmatch(self.digest):
            raise ValueError("the digest is no SHA-256")
        for one in self.files:
            _check(one)
        paths = [one.path for one in self.files]
        if paths != sorted(set(paths)):
            raise ValueError("the files are not sorted by path, or one is there twice")
        if f"{FOLDER}/MANIFEST.json" not in paths:
            raise ValueError("the checkpoint has no MANIFEST.json")

    def to_bytes(self) -> bytes:
        """The canonical bytes."""
        text = json.dumps(asdict(self), sort_keys=True, indent=1, ensure_ascii=False, allow_nan=False)
        return text.encode() + b"\n"

    @classmethod
    def from_bytes(cls, data: bytes) -> RunManifest:
        """The inverse.

        Raises:
            ValueError: it is no such manifest.
        """
        try:
            raw = json.loads(data)
        except RecursionError as error:
            raise ValueError("it is nested too deep") from error
        keys = set(cls.__dataclass_fields__)
        if not isinstance(raw, dict) or set(raw) != keys:
            raise ValueError("it has other keys")
        kinds = {"run_id": str, "step": int, "checkpoint": str, "digest": str, "manifest": dict, "version": int}
        for key, kind in kinds.items():
            if type(raw[key]) is not kind:
                raise ValueError(f"{key} is no {kind.__name__}")
        files = raw["files"]
        if not isinstance(files, list) or not all(
            isinstance(one, dict) and set(one) == set(File.__dataclass_fields__) for one in files
        ):
            raise ValueError("files is no list of files")
        manifest = cls(**{**raw, "files": tuple(File(**one) for one in files)})
        if manifest.to_bytes() != data:
            raise ValueError("it is not in canonical form")
        return manifest

    @property
    def mark(self) -> str:
        """How the commit's title begins, and no other milestone's: by it a commit is found whose answer was lost."""
        return f"Milestone {hashlib.sha256(self.to_bytes()).hexdigest()[:32]}"

    @property
    def title(self) -> str:
        """The commit's title."""
        return f"{self.mark}: step {self.step} of {self.run_id}"

    @property
    def total_bytes(self) -> int:
        """Size of all files together."""
        return sum(one.size for one in self.files)


def _check(one: File) -> None:
    if not isinstance(one.path, str) or not (one.path == METRICS_PATH or one.path.startswith(f"{FOLDER}/")):
        raise ValueError(f"{one.path!r} is outside {FOLDER}/")
    parts = one.path.split("/")
    if not {"", ".", ".."}.isdisjoint(parts) or "\0" in one.path or "\\" in one.path:
        raise ValueError(f"{one.path!r} is no path inside a checkpoint")
    if type(one.size) is not int or not 0 <= one.size <= _MAX_SIZE:
        raise ValueError(f"{one.path}: its size is no count")
    if not isinstance(one.sha256, str) or not SHA256.fullmatch(one.sha256):
        raise ValueError(f"{one.path}: no SHA-256")


def git_blob_id(data: bytes) -> str:
    """What git calls a file with this content: the hub lists small files by it."""
    return hashlib.sha1(b"blob %d\0" % len(data) + data, usedforsecurity=False).hexdigest()
