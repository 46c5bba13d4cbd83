"""The hub's ways for large files: Git LFS, in one piece or in parts, and what reads them."""

from __future__ import annotations

import hashlib
import json
import os
import re
import secrets
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from .api import _REPO, Answer, Route, answer

if TYPE_CHECKING:
    from .server import Handler, State


def _take(state: State, name: str, body: Iterator[bytes]) -> tuple[str, int]:
    """Stores a body under a name, whole or not at all; its SHA-256 and size."""
    aside = state.root / "blobs" / f"{name}.{secrets.token_hex(4)}.part"
    digest, size = hashlib.sha256(), 0
    try:
        with aside.open("wb") as file:
            for piece in body:
                file.write(piece)
                digest.update(piece)
                size += len(piece)
        os.rename(aside, state.root / "blobs" / name)
    finally:
        aside.unlink(missing_ok=True)
    return digest.hexdigest(), size


def batch(state: State, handler: Handler, found: re.Match[str], query: dict[str, str], body: Iterator[bytes]) -> Answer:
    asked = json.loads(b"".join(body))
    objects: list[dict[str, Any]] = []
    for one in asked["objects"]:
        entry = {"oid": one["oid"], "size": one["size"], "authenticated": True}
        if not state.repos.blob(one["oid"]).exists() and one["oid"] not in state.xet_files:
            entry["actions"] = {"upload": _upload(state, one), "verify": {"href": f"{state.url}/_lfs/verify"}}
        objects.append(entry)
    return answer({"transfer": "basic", "objects": objects})


def _upload(state: State, one: dict[str, Any]) -> dict[str, Any]:
    where = f"{state.url}/_lfs/{one['oid']}"
    if not state.multipart or one["size"] <= state.multipart:
        return {"href": where, "header": {}}
    count = -(-one["size"] // state.multipart)
    parts = {f"{number:05d}": f"{where}/part/{number}" for number in range(1, count + 1)}
    return {"href": f"{where}/complete", "header": {"chunk_size": str(state.multipart), **parts}}


def put(state: State, handler: Handler, found: re.Match[str], query: dict[str, str], body: Iterator[bytes]) -> Answer:
    name = f"{found['oid']}.whole"
    digest, _ = _take(state, name, body)
    if digest != found["oid"]:
        (state.root / "blobs" / name).unlink()
        return answer({"error": "the content has another SHA-256"}, 400)
    os.rename(state.root / "blobs" / name, state.repos.blob(digest))
    return answer({})


def part(state: State, handler: Handler, found: re.Match[str], query: dict[str, str], body: Iterator[bytes]) -> Answer:
    digest, _ = _take(state, f"{found['oid']}.{found['number']}.piece", body)
    return answer({}, ETag=f'"{digest}"')


def complete(
    state: State, handler: Handler, found: re.Match[str], query: dict[str, str], body: Iterator[bytes]
) -> Answer:
    asked = json.loads(b"".join(body))
    blobs = state.root / "blobs"

    def joined() -> Iterator[bytes]:
        for one in asked["parts"]:
            data = (blobs / f"{found['oid']}.{one['partNumber']}.piece").read_bytes()
            if one["etag"].strip('"') != hashlib.sha256(data).hexdigest():
                raise ValueError("a part is another")
            yield data

    return put(state, handler, found, query, joined())


def verify(
    state: State, handler: Handler, found: re.Match[str], query: dict[str, str], body: Iterator[bytes]
) -> Answer:
    asked = json.loads(b"".join(body))
    blob = state.repos.blob(asked["oid"])
    good = blob.exists() and blob.stat().st_size == asked["size"]
    return answer({}, 200 if good else 404)


def cdn(state: State, handler: Handler, found: re.Match[str], query: dict[str, str], body: Iterator[bytes]) -> Answer:
    blob = state.repos.blob(found["oid"])
    if not blob.exists():
        return answer({"error": "there is no such object"}, 404)
    return 200, {"ETag": f'"{found["oid"]}"', "Accept-Ranges": "bytes"}, blob


_OID = r"(?P<oid>[0-9a-f]{64})"
ROUTES: tuple[Route, ...] = (
    (rf"/{_REPO}\.git/info/lfs/objects/batch", ("POST",), batch),
    (rf"/_lfs/{_OID}", ("PUT",), put),
    (rf"/_lfs/{_OID}/part/(?P<number>[0-9]+)", ("PUT",), part),
    (rf"/_lfs/{_OID}/complete", ("POST",), complete),
    (r"/_lfs/verify", ("POST",), verify),
    (rf"/_cdn/{_OID}", ("GET", "HEAD"), cdn),
)
# As if their addresses were signed: they ask for no token.
OPEN = (put, part, complete, verify, cdn)
