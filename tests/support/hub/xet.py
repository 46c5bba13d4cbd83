"""The hub's Xet way: tokens, and a store of chunks in blocks ("xorbs") with what files are made of ("shards").

As documented by Hugging Face (upload protocol, download protocol, shard and xorb formats). Chunks stay as the client
packed them: the client unpacks and checks them.
"""

from __future__ import annotations

import re
import struct
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .api import _REPO, Answer, Route, answer

if TYPE_CHECKING:
    from .server import Handler, State

TOKEN = "xet-token"
_HEADER, _ENTRY = 48, 48
_BOOKEND = b"\xff" * 32
_WITH_VERIFICATION, _WITH_METADATA = 1 << 31, 1 << 30


@dataclass(frozen=True)
class Term:
    """Chunks of one block, in a row, which are a part of a file."""

    block: str
    unpacked: int
    start: int
    end: int


def _hex(data: bytes) -> str:
    """A hash as text: four little-endian numbers of 64 bits."""
    return "".join(f"{number:016x}" for number in struct.unpack("<4Q", data))


def files_of(shard: bytes) -> list[tuple[str, str, list[Term]]]:
    """The files that a shard describes: Xet's hash, SHA-256, terms."""
    found = []
    at = _HEADER
    while shard[at : at + 32] != _BOOKEND:
        name, flags, count = _hex(shard[at : at + 32]), *struct.unpack_from("<II", shard, at + 32)
        at += _ENTRY
        terms = []
        for _ in range(count):
            _, unpacked, start, end = struct.unpack_from("<IIII", shard, at + 32)
            terms.append(Term(_hex(shard[at : at + 32]), unpacked, start, end))
            at += _ENTRY
        at += _ENTRY * count if flags & _WITH_VERIFICATION else 0
        sha256 = ""
        if flags & _WITH_METADATA:
            sha256 = _hex(shard[at : at + 32])
            at += _ENTRY
        found.append((name, sha256, terms))
    return found


def offsets_of(block: bytes, count: int) -> list[int]:
    """Where each chunk begins, and where the last one ends."""
    found = [0]
    for _ in range(count):
        at = found[-1]
        packed = int.from_bytes(block[at + 1 : at + 4], "little")
        found.append(at + 8 + packed)
    return found


def token(state: State, handler: Handler, found: re.Match[str], query: dict[str, str], body: Iterator[bytes]) -> Answer:
    if not state.xet:
        return answer({"error": "this repository is not stored with Xet"}, 404)
    until = int(time.time()) + 3600
    headers = {"X-Xet-Cas-Url": f"{state.cdn}/_cas", "X-Xet-Access-Token": TOKEN, "X-Xet-Token-Expiration": str(until)}
    return answer({"casUrl": f"{state.cdn}/_cas", "accessToken": TOKEN, "exp": until}, **headers)


def _refused(handler: Handler) -> bool:
    return handler.headers.get("Authorization") != f"Bearer {TOKEN}"


def block(state: State, handler: Handler, found: re.Match[str], query: dict[str, str], body: Iterator[bytes]) -> Answer:
    if _refused(handler):
        return answer({"error": "no token"}, 401)
    path = state.root / "blobs" / f"xorb-{found['hash']}"
    is_new = not path.exists()
    data = b"".join(body)
    path.write_bytes(data)
    return answer({"was_inserted": is_new})


def shard(state: State, handler: Handler, found: re.Match[str], query: dict[str, str], body: Iterator[bytes]) -> Answer:
    if _refused(handler):
        return answer({"error": "no token"}, 401)
    for name, sha256, terms in files_of(b"".join(body)):
        for term in terms:
            if not (state.root / "blobs" / f"xorb-{term.block}").exists():
                return answer({"error": "a block was never uploaded"}, 400)
        state.xet_terms[name] = terms
        state.xet_files[sha256] = name
    return answer({"result": 1})


def chunks(
    state: State, handler: Handler, found: re.Match[str], query: dict[str, str], body: Iterator[bytes]
) -> Answer:
    return answer({"error": "it is not known"}, 404)


def reconstruction(
    state: State, handler: Handler, found: re.Match[str], query: dict[str, str], body: Iterator[bytes]
) -> Answer:
    terms: list[Term] | None = state.xet_terms.get(found["hash"])
    if terms is None or _refused(handler):
        return answer({"error": "there is no such file"}, 404)
    total = sum(term.unpacked for term in terms)
    asked = re.fullmatch(r"bytes=(\d+)-(\d*)", handler.headers.get("Range", ""))
    start, end = (int(asked[1]), min(total, int(asked[2]) + 1 if asked[2] else total)) if asked else (0, total)
    del handler.headers["Range"]  # it means the file, not this answer
    if start >= total:
        return answer({"error": "behind the end"}, 416)
    kept, skipped, at = [], 0, 0
    for term in terms:
        if at < end and at + term.unpacked > start:
            if not kept:
                skipped = start - at
            kept.append(term)
        at += term.unpacked
    info: dict[str, list[dict[str, Any]]] = {}
    for term in kept:
        data = (state.root / "blobs" / f"xorb-{term.block}").read_bytes()
        offsets = offsets_of(data, term.end)
        info.setdefault(term.block, []).append(
            {
                "range": {"start": term.start, "end": term.end},
                "url": f"{state.cdn}/_cas/blocks/{term.block}",
                "url_range": {"start": offsets[term.start], "end": offsets[term.end] - 1},
            }
        )
    listed = [
        {"hash": term.block, "unpacked_length": term.unpacked, "range": {"start": term.start, "end": term.end}}
        for term in kept
    ]
    return answer({"offset_into_first_range": skipped, "terms": listed, "fetch_info": info})


def read(state: State, handler: Handler, found: re.Match[str], query: dict[str, str], body: Iterator[bytes]) -> Answer:
    return 200, {"Accept-Ranges": "bytes"}, Path(state.root / "blobs" / f"xorb-{found['hash']}")


_HASH = r"(?P<hash>[0-9a-f]{64})"
ROUTES: tuple[Route, ...] = (
    (rf"/api/models/{_REPO}/xet-(read|write)-token/.+", ("GET",), token),
    (rf"/_cas/v1/xorbs/default/{_HASH}", ("POST",), block),
    (r"/_cas/(v1/)?shards", ("POST",), shard),
    (rf"/_cas/v1/chunks/[^/]+/{_HASH}", ("GET",), chunks),
    (rf"/_cas/v1/reconstructions/{_HASH}", ("GET",), reconstruction),
    (rf"/_cas/blocks/{_HASH}", ("GET",), read),
)
OPEN = (block, shard, chunks, reconstruction, read)
