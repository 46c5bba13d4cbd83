"""`run_manifest.json`: what it takes, and what it refuses."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dalsegno.relay.milestones.run_manifest import File, RunManifest, git_blob_id

SUM = "ab" * 32
FILES = (File("checkpoint/MANIFEST.json", 10, SUM), File("checkpoint/model.bin", 0, SUM), File("metrics.jsonl", 3, SUM))
GOOD = RunManifest("tune", 40, "step-40.e3.0", SUM, FILES, {"git_sha": "abc", "nested": {"lr": 1e-4}})


def test_there_and_back() -> None:
    """The same bytes each time, whoever makes it."""
    assert RunManifest.from_bytes(GOOD.to_bytes()) == GOOD
    assert GOOD.to_bytes() == replace(GOOD, manifest=dict(reversed(list(GOOD.manifest.items())))).to_bytes()


def test_each_has_a_mark_of_its_own() -> None:
    """A commit is found by it."""
    others = [replace(GOOD, digest="cd" * 32), replace(GOOD, files=FILES[:2]), replace(GOOD, manifest={})]
    marks = {one.mark for one in (GOOD, *others)}
    assert len(marks) == 4
    assert GOOD.title.startswith(GOOD.mark)
    assert "\n" not in GOOD.title


def _raw(change: Callable[[dict[str, Any]], object]) -> bytes:
    raw = json.loads(GOOD.to_bytes())
    change(raw)
    return json.dumps(raw, sort_keys=True, indent=1, ensure_ascii=False).encode() + b"\n"


def _path(path: object) -> Callable[[dict[str, Any]], object]:
    return lambda raw: raw["files"][1].update(path=path)


@pytest.mark.parametrize(
    "change",
    [
        lambda raw: raw.pop("step"),
        lambda raw: raw.update(more=1),
        lambda raw: raw.update(step=True),
        lambda raw: raw.update(step="40"),
        lambda raw: raw.update(version=2),
        lambda raw: raw.update(checkpoint="../step-40.e3.0"),
        lambda raw: raw.update(digest="AB" * 32),
        lambda raw: raw.update(files=[]),
        lambda raw: raw.update(files={}),
        lambda raw: raw.update(manifest=[]),
        lambda raw: raw["files"].reverse(),
        lambda raw: raw["files"].append(raw["files"][-1]),
        lambda raw: raw["files"][1].update(size=-1),
        lambda raw: raw["files"][1].update(size=1.0),
        lambda raw: raw["files"][1].update(sha256="ab"),
        lambda raw: raw["files"][1].pop("sha256"),
        _path("checkpoint/a/../../b"),
        _path("/checkpoint/model.bin"),
        _path("checkpoint/a//b"),
        _path("checkpoint/a/./b"),
        _path("checkpoint/a\0b"),
        _path("model.bin"),
        _path(7),
    ],
)
def test_what_it_refuses(change: Callable[[dict[str, Any]], object]) -> None:
    """Whoever can write to the repository can write this file."""
    with pytest.raises(ValueError, match=r"."):
        RunManifest.from_bytes(_raw(change))


@pytest.mark.parametrize(
    "text", [b"", b"{", b"[]", b"null", b"[" * 100_000, GOOD.to_bytes()[:-1], b" " + GOOD.to_bytes()]
)
def test_what_is_none(text: bytes) -> None:
    """Torn, empty, or spelt otherwise."""
    with pytest.raises(ValueError, match=r"."):
        RunManifest.from_bytes(text)


@given(st.binary(max_size=200))
def test_any_bytes(text: bytes) -> None:
    """Nothing but ValueError."""
    with pytest.raises(ValueError, match=r"."):
        RunManifest.from_bytes(text)


def test_git_names_a_blob_so() -> None:
    """The known name of the empty file, and of `hello`."""
    assert git_blob_id(b"") == "e69de29bb2d1d6434b8b29ae775ad8c2e48c5391"
    assert git_blob_id(b"hello\n") == "ce013625030ba8dba906f756967f9e9ca394464a"
