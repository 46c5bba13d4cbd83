"""A download that goes on from what an earlier one has left."""

from __future__ import annotations

import hashlib
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("huggingface_hub", reason="needs the extra relay")

from huggingface_hub.hf_api import RepoFile

from dalsegno.relay.milestones import hub_calls
from dalsegno.relay.milestones.run_manifest import MANIFEST_PATH, File, RunManifest, git_blob_id

INNER = b"sealed"
MANIFEST = RunManifest(
    run_id="my-run",
    step=1,
    checkpoint="step-1.e1.0",
    digest="a" * 64,
    files=(File("checkpoint/MANIFEST.json", len(INNER), hashlib.sha256(INNER).hexdigest()),),
    manifest={},
).to_bytes()


class Hub:
    """A revision. As the library does, it takes a file that is there for the one that it once brought."""

    def __init__(self) -> None:
        self.files = {MANIFEST_PATH: MANIFEST, "checkpoint/MANIFEST.json": INNER}
        self.sent: list[str] = []

    def model_info(self, repo: str, revision: str) -> Any:
        return SimpleNamespace(sha=revision)

    def list_repo_tree(self, repo: str, **_: object) -> list[RepoFile]:
        return [RepoFile(path=path, size=len(data), oid=git_blob_id(data)) for path, data in self.files.items()]

    def hf_hub_download(self, repo: str, path: str, *, revision: str, local_dir: Path, force_download: bool) -> str:
        target = local_dir / path
        if force_download or not target.exists():
            self.sent.append(path)
            target.parent.mkdir(exist_ok=True)
            target.write_bytes(self.files[path])
        return str(target)


@pytest.mark.parametrize("path", [MANIFEST_PATH, "checkpoint/MANIFEST.json"])
@pytest.mark.parametrize("left", [b"", b"short"])
def test_what_is_there_and_wrong_is_fetched_anew(
    path: str, left: bytes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A power cut has left a file short, be it the one that says what the others are. What is right is not fetched."""
    hub, told = Hub(), list[dict[str, Any]]()
    monkeypatch.setattr(hub_calls, "_api", lambda token: hub)
    job = {"repo": "me/tune", "revision": "abc", "target": str(tmp_path), "milestone": True}
    hub_calls.download(job, "", told.append)
    (tmp_path / path).write_bytes(left)
    hub.sent.clear()
    hub_calls.download(job, "", told.append)
    assert (hub.sent, (tmp_path / path).read_bytes()) == ([path], hub.files[path])
