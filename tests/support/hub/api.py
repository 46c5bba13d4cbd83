"""The hub's calls on repositories, as `huggingface_hub` makes them: create, look, list, commit, read."""

from __future__ import annotations

import base64
import json
import re
from collections.abc import Callable, Iterator
from datetime import datetime, timezone
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .repos import Conflict, Repo, Stored

if TYPE_CHECKING:
    from .server import Handler, State

Answer = tuple[int, dict[str, str], "bytes | Path"]
PAGE = 7  # entries of a page of a tree: the client has to turn pages


def answer(content: Any, status: int = 200, **headers: str) -> Answer:
    return status, {"Content-Type": "application/json", **headers}, json.dumps(content).encode()


def _no_repo() -> Answer:
    return answer({"error": "Repository not found"}, 404, **{"X-Error-Code": "RepoNotFound"})


def _no_revision() -> Answer:
    return answer({"error": "Invalid rev id"}, 404, **{"X-Error-Code": "RevisionNotFound"})


def create(
    state: State, handler: Handler, found: re.Match[str], query: dict[str, str], body: Iterator[bytes]
) -> Answer:
    asked = json.loads(b"".join(body))
    name = f"{asked.get('organization') or 'somebody'}/{asked['name']}"
    # Older clients say `private`.
    private = asked["visibility"] == "private" if "visibility" in asked else bool(asked.get("private"))
    if not state.repos.create(name, private):
        return answer({"error": "You already created this model repo", "url": f"{state.url}/{name}"}, 409)
    return answer({"url": f"{state.url}/{name}", "name": name, "id": name})


def info(state: State, handler: Handler, found: re.Match[str], query: dict[str, str], body: Iterator[bytes]) -> Answer:
    repo = state.repos.get(found["repo"])
    if repo is None:
        return _no_repo()
    commit = repo.find(found["revision"] or "main")
    if commit is None:
        return _no_revision()
    siblings = [{"rfilename": path} for path in sorted(commit.files)]
    about = {"id": found["repo"], "modelId": found["repo"], "sha": commit.oid, "siblings": siblings}
    return answer({**about, "private": repo.private, "tags": [], "downloads": 0, "likes": 0})


def _entries(repo: Repo, revision: str, folder: str, recursive: bool) -> list[dict[str, Any]] | None:
    commit = repo.find(revision)
    if commit is None:
        return None
    prefix = f"{folder}/" if folder else ""
    entries: dict[str, dict[str, Any]] = {}
    for path, file in sorted(commit.files.items()):
        if not path.startswith(prefix):
            continue
        parts = path[len(prefix) :].split("/")
        for depth in range(1, len(parts) if recursive else min(2, len(parts))):
            name = prefix + "/".join(parts[:depth])
            entries[name] = {"type": "directory", "oid": "0" * 40, "size": 0, "path": name}
        if recursive or len(parts) == 1:
            entry: dict[str, Any] = {"type": "file", "oid": file.git_oid, "size": file.size, "path": path}
            if file.large:
                entry["lfs"] = {"oid": file.sha256, "size": file.size, "pointerSize": 134}
            entries[path] = entry
    return list(entries.values())


def tree(state: State, handler: Handler, found: re.Match[str], query: dict[str, str], body: Iterator[bytes]) -> Answer:
    repo = state.repos.get(found["repo"])
    if repo is None:
        return _no_repo()
    folder = found["path"] or ""
    entries = _entries(repo, found["revision"], folder, query.get("recursive", "").lower() in ("1", "true"))
    if entries is None:
        return _no_revision()
    if folder and not entries:
        return answer({"error": "it does not exist"}, 404, **{"X-Error-Code": "EntryNotFound"})
    start = int(query.get("cursor", 0))
    headers = {}
    if start + PAGE < len(entries):
        where = f"{state.url}{handler.path.split('?')[0]}?recursive={query.get('recursive', '')}&cursor={start + PAGE}"
        headers["Link"] = f'<{where}>; rel="next"'
    return answer(entries[start : start + PAGE], **headers)


def commits(
    state: State, handler: Handler, found: re.Match[str], query: dict[str, str], body: Iterator[bytes]
) -> Answer:
    repo = state.repos.get(found["repo"])
    if repo is None:
        return _no_repo()
    head = repo.find(found["revision"])
    if head is None:
        return _no_revision()
    until = repo.commits.index(head) + 1
    entries = [
        {
            "id": one.oid,
            "title": one.title,
            "message": one.message,
            "authors": [],
            "date": datetime.fromtimestamp(one.date, timezone.utc).isoformat().replace("+00:00", "Z"),
        }
        for one in reversed(repo.commits[:until])
    ]
    start = int(query.get("p", 0)) * PAGE
    headers = {}
    if start + PAGE < len(entries):
        where = f"{state.url}{handler.path.split('?')[0]}?p={int(query.get('p', 0)) + 1}"
        headers["Link"] = f'<{where}>; rel="next"'
    return answer(entries[start : start + PAGE], **headers)


def preupload(
    state: State, handler: Handler, found: re.Match[str], query: dict[str, str], body: Iterator[bytes]
) -> Answer:
    repo = state.repos.get(found["repo"])
    if repo is None:
        return _no_repo()
    asked = json.loads(b"".join(body))["files"]
    files = repo.commits[-1].files

    def mode(one: dict[str, Any]) -> str:
        return (
            "lfs"
            if one["path"].endswith((".bin", ".pt", ".safetensors")) or one["size"] >= state.large_from
            else "regular"
        )

    def oid(one: dict[str, Any]) -> str | None:
        there: Stored | None = files.get(one["path"])
        return None if there is None else (there.sha256 if there.large else there.git_oid)

    return answer(
        {
            "files": [
                {"path": one["path"], "uploadMode": mode(one), "shouldIgnore": False, "oid": oid(one)} for one in asked
            ]
        }
    )


def commit(
    state: State, handler: Handler, found: re.Match[str], query: dict[str, str], body: Iterator[bytes]
) -> Answer:
    if state.repos.get(found["repo"]) is None:
        return _no_repo()
    lines = [json.loads(line) for line in b"".join(body).splitlines() if line.strip()]
    header: dict[str, Any] = {}
    added: dict[str, Stored] = {}
    deleted = []
    for line in lines:
        value = line["value"]
        if line["key"] == "header":
            header = value
        elif line["key"] == "file":
            assert value["encoding"] == "base64"
            added[value["path"]] = state.repos.keep(base64.b64decode(value["content"], validate=True))
        elif line["key"] == "lfsFile":
            if not state.repos.blob(value["oid"]).exists() and value["oid"] not in state.xet_files:
                return answer({"error": f"Your push was rejected: {value['path']} was never uploaded"}, 400)
            added[value["path"]] = state.repos.large(value["oid"], value["size"])
        elif line["key"] == "deletedFile":
            deleted.append(value["path"])
        elif line["key"] == "deletedFolder":
            deleted.append(value["path"].rstrip("/") + "/")
        else:
            return answer({"error": f"unknown operation {line['key']}"}, 400)
    try:
        made = state.repos.commit(
            found["repo"], header.get("parentCommit"), header["summary"], header.get("description", ""), added, deleted
        )
    except Conflict as conflict:
        return answer({"error": f"A commit has happened since. Please refresh and try again. {conflict}"}, 412)
    url = f"{state.url}/{found['repo']}/commit/{made.oid}"
    return answer({"success": True, "commitOid": made.oid, "commitUrl": url, "hookOutput": ""})


def resolve(
    state: State, handler: Handler, found: re.Match[str], query: dict[str, str], body: Iterator[bytes]
) -> Answer:
    repo = state.repos.get(found["repo"])
    if repo is None:
        return _no_repo()
    commit = repo.find(found["revision"])
    if commit is None:
        return _no_revision()
    file = commit.files.get(found["path"])
    if file is None:
        return answer({"error": "Entry not found"}, 404, **{"X-Error-Code": "EntryNotFound"})
    etag = file.sha256 if file.large else file.git_oid
    headers = {"X-Repo-Commit": commit.oid, "ETag": f'"{etag}"', "Accept-Ranges": "bytes"}
    if not file.large:
        return 200, headers, state.repos.blob(file.sha256)
    headers |= {"X-Linked-Etag": f'"{file.sha256}"', "X-Linked-Size": str(file.size)}
    if file.sha256 in state.xet_files and state.xet:
        headers["X-Xet-Hash"] = state.xet_files[file.sha256]
        where = f"{state.url}/api/models/{found['repo']}/xet-read-token/{commit.oid}"
        headers["Link"] = f'<{where}>; rel="xet-auth"'
    return 302, {**headers, "Location": f"{state.cdn}/_cdn/{file.sha256}"}, b""


def validate(
    state: State, handler: Handler, found: re.Match[str], query: dict[str, str], body: Iterator[bytes]
) -> Answer:
    for _ in body:
        pass
    return answer({"errors": [], "warnings": []})


_REPO = r"(?P<repo>[^/]+/[^/]+)"
Route = tuple[str, tuple[str, ...], Callable[..., Answer]]
ROUTES: tuple[Route, ...] = (
    (r"/api/repos/create", ("POST",), create),
    (r"/api/validate-yaml", ("POST",), validate),
    (rf"/api/models/{_REPO}(/revision/(?P<revision>[^/]+))?", ("GET", "HEAD"), info),
    (rf"/api/models/{_REPO}/tree/(?P<revision>[^/]+)(/(?P<path>.+))?", ("GET",), tree),
    (rf"/api/models/{_REPO}/commits/(?P<revision>[^/]+)", ("GET",), commits),
    (rf"/api/models/{_REPO}/preupload/(?P<revision>[^/]+)", ("POST",), preupload),
    (rf"/api/models/{_REPO}/commit/(?P<revision>[^/]+)", ("POST",), commit),
    (rf"/{_REPO}/resolve/(?P<revision>[^/]+)/(?P<path>.+)", ("GET", "HEAD"), resolve),
)
