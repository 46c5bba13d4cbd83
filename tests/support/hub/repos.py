"""What the hub keeps: blobs by SHA-256, and per repository one line of commits with all files of each. On the disk."""

from __future__ import annotations

import hashlib
import json
import threading
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any


class Conflict(Exception):
    """The commit names another parent than the head."""


@dataclass(frozen=True)
class Stored:
    """One file of a commit: its size, its blob, the id that git has for it, and whether it is a large file."""

    size: int
    sha256: str
    git_oid: str
    large: bool


@dataclass
class Commit:
    oid: str
    parent: str | None
    title: str
    message: str
    date: float
    files: dict[str, Stored]


@dataclass
class Repo:
    private: bool
    commits: list[Commit] = field(default_factory=list)  # oldest first

    def find(self, revision: str) -> Commit | None:
        if revision in ("main", "HEAD"):
            return self.commits[-1]
        return next((one for one in self.commits if one.oid == revision), None)


def git_hash(data: bytes) -> str:
    return hashlib.sha1(b"blob %d\0" % len(data) + data).hexdigest()


class Repos:
    """All repositories. Threads share it.

    Args:
        root: an existing directory; what another process of the hub left there is read again.
    """

    def __init__(self, root: Path) -> None:
        self.root = root
        (root / "blobs").mkdir(exist_ok=True)
        self.lock = threading.RLock()
        self._repos: dict[str, Repo] = {}
        self._load()

    def _load(self) -> None:
        path = self.root / "repos.json"
        for name, raw in (json.loads(path.read_text()) if path.exists() else {}).items():
            commits = [
                Commit(**{**one, "files": {path: Stored(**f) for path, f in one["files"].items()}})
                for one in raw["commits"]
            ]
            self._repos[name] = Repo(raw["private"], commits)

    def _save(self) -> None:
        text = json.dumps(self._repos, default=vars)
        aside = self.root / "repos.json.new"
        aside.write_text(text)
        aside.rename(self.root / "repos.json")

    def get(self, name: str) -> Repo | None:
        with self.lock:
            return self._repos.get(name)

    def create(self, name: str, private: bool) -> bool:
        """False: it is there already. A new one has one commit, as on the real hub."""
        with self.lock:
            if name in self._repos:
                return False
            self._repos[name] = Repo(private)
            text = b"*.bin filter=lfs diff=lfs merge=lfs -text\n"
            self.commit(name, None, "initial commit", "", {".gitattributes": self.keep(text)}, [])
            return True

    def blob(self, sha256: str) -> Path:
        return self.root / "blobs" / sha256

    def keep(self, data: bytes) -> Stored:
        """Stores a small file."""
        sha256 = hashlib.sha256(data).hexdigest()
        self.blob(sha256).write_bytes(data)
        return Stored(len(data), sha256, git_hash(data), large=False)

    def large(self, sha256: str, size: int) -> Stored:
        """A large file that was uploaded before."""
        pointer = f"version https://git-lfs.github.com/spec/v1\noid sha256:{sha256}\nsize {size}\n"
        return Stored(size, sha256, git_hash(pointer.encode()), large=True)

    def commit(
        self,
        name: str,
        parent: str | None,
        title: str,
        message: str,
        added: dict[str, Stored],
        deleted: list[str],
    ) -> Commit:
        """Adds a commit; `parent`: what the head has to be, or None. `deleted`: paths, folders with a slash behind.

        Raises:
            Conflict: the head is another.
        """
        with self.lock:
            repo = self._repos[name]
            head = repo.commits[-1] if repo.commits else None
            if parent is not None and (head is None or head.oid != parent):
                raise Conflict(head.oid if head else "")
            files = dict(head.files) if head else {}
            for path in deleted:
                files = {
                    one: f
                    for one, f in files.items()
                    if one != path and not (path[-1:] == "/" and one.startswith(path))
                }
            files |= added
            text = json.dumps([head and head.oid, title, time.time_ns(), {p: vars(f) for p, f in files.items()}])
            made = Commit(
                hashlib.sha1(text.encode()).hexdigest(), head and head.oid, title, message, time.time(), files
            )
            repo.commits.append(made)
            self._save()
            return made

    def show(self) -> dict[str, Any]:
        """All of it, for tests."""
        with self.lock:
            return json.loads(json.dumps(self._repos, default=vars))  # type: ignore[no-any-return]
