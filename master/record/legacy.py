"""Converts records of older versions to the present format."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from .store import OLD_RECORD as KEY
from .store import StoreError

__all__ = ("KEY", "upgraded")

_LETTERS = {"running": "r", "drained": "d", "finished": "f", "failed": "x", "lost": "l"}


def upgraded(envelope: Any) -> tuple[dict[str, Any], str]:
    """The rows of a record of version 1, and the letters of its parts. Raises StoreError if it is none."""
    if (
        not isinstance(envelope, Mapping)
        or envelope.get("version") != 1
        or not isinstance(envelope.get("job"), Mapping)
    ):
        version = envelope.get("version") if isinstance(envelope, Mapping) else None
        raise StoreError(f"the stored state has version {version}: use the version of dalsegno that wrote it")
    try:
        return _rows(dict(envelope["job"]))
    except (KeyError, TypeError, AttributeError) as error:
        raise StoreError(f"the stored state of version 1 cannot be read: {error!r}") from error


def _rows(job: dict[str, Any]) -> tuple[dict[str, Any], str]:
    rows: dict[str, Any] = {}
    for name, node in job.pop("nodes").items():
        rows[f"node/{name}"] = node
    for record in job.pop("checkpoints"):
        rows[f"checkpoint/{record['digest']}"] = record
    for record in job.pop("late", []):
        rows[f"late/{record['digest']}"] = record
    for entry in job.pop("history"):
        rows[f"epoch/{entry['epoch']}"] = entry
    letters = ""
    world = job.pop("world")
    if world is not None:
        told = (("first_step", "announced"), ("start", "presented"), ("doubt", "doubted"))
        job["told"] = {new: world.pop(old, False) for new, old in told}
        letters = "".join(_LETTERS[member.pop("part")] for member in world["members"])
        rows["world"] = world
    job["told"] = job.get("told", {})
    job["budget"] = {
        "failures": job.pop("failures"),
        "last_step": job.pop("last_failure_step"),
        "pending": job.pop("pending_failure"),
        "doubtful": job.pop("doubtful", []),
    }
    rows["job"] = {"version": 2, **job}
    return rows, letters
